"""Run a program at a return instruction only if it ends a call whose entry was seen.

A return instruction also ends other calls: those of another function that shares the code, and the agent's own calls, which begin
behind the probe at the entry. So a program at a function's entry counts the thread's calls that have not returned, and the program at
the return checks the count. The stack pointer cannot identify the call: if the agent has hooked the function, the stack pointer is
lower at the return than at the entry. A call that an exception or longjmp leaves stays in the count.
"""

from __future__ import annotations

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import BpfFunction, Instruction
from gpubpf.ebpf.helpers import number_of
from gpubpf.kernel import bpf_syscall
from gpubpf.record import replace

MAP = "gpubpf_matched"
_ENTRIES = 16384
_KEY = 24  # bytes: process and thread, cookie, number
_WORD = b.MEM | 0x18  # a load or store of 8 bytes
_LOOKUP, _UPDATE = number_of("bpf_map_lookup_elem"), number_of("bpf_map_update_elem")
_THREAD, _COOKIE = number_of("bpf_get_current_pid_tgid"), number_of("bpf_get_attach_cookie")
_MOVE, _SET, _CALL = b.ALU64 | b.MOV | 8, b.ALU64 | b.MOV, b.JMP | b.CALL
_EXIT = Instruction(b.JMP | b.EXIT)


def create_map() -> int:
    """Create the map of calls that have not returned. Return its file descriptor, for the name MAP."""
    return bpf_syscall.create_map(bpf_syscall.LRU_HASH, _KEY, 8, _ENTRIES, name=MAP)


def at_entry(function: BpfFunction, number: int, cookie: int | None = None) -> BpfFunction:
    """Return the program for the entries of functions at whose returns `function` runs.

    number: distinguishes programs for the returns of the same function.
    cookie: replaces the result of bpf_get_attach_cookie.
    """
    code = (
        *_key(number, cookie),
        Instruction(_CALL, imm=_LOOKUP),
        Instruction(b.JMP | b.JEQ, 0, imm=0, offset=4),
        Instruction(b.LDX | _WORD, 1, 0),
        Instruction(b.ALU64 | b.ADD, 1, imm=1),
        Instruction(b.STX | _WORD, 0, 1),
        Instruction(b.JMP | b.JA, offset=9),
        *_map_and_key(),
        Instruction(b.ST | _WORD, 10, offset=-_KEY - 8, imm=1),
        Instruction(_MOVE, 3, 10),
        Instruction(b.ALU64 | b.ADD, 3, imm=-_KEY - 8),
        Instruction(_SET, 4, imm=0),
        Instruction(_CALL, imm=_UPDATE),
        Instruction(_SET, 0, imm=0),
        _EXIT,
    )
    return BpfFunction(f"{function.name}.entry", "uprobe", code)


def at_return(function: BpfFunction, number: int, cookie: int | None = None) -> BpfFunction:
    """Return a program that runs `function` if the call was seen. The parameters are those of `at_entry`."""
    code = (
        *_key(number, cookie),
        Instruction(_CALL, imm=_LOOKUP),
        Instruction(b.JMP | b.JEQ, 0, imm=0, offset=2),
        Instruction(b.LDX | _WORD, 1, 0),
        Instruction(b.JMP | b.JNE, 1, imm=0, offset=2),
        Instruction(_SET, 0, imm=0),
        _EXIT,
        Instruction(b.ALU64 | b.ADD, 1, imm=-1),
        Instruction(b.STX | _WORD, 0, 1),
        Instruction(_MOVE, 1, 6),
    )
    return replace(function, instructions=(*code, *function.instructions))


def _key(number: int, cookie: int | None) -> tuple[Instruction, ...]:
    """Return instructions that make the key, and load the context into r6, the map into r1, and the key's address into r2."""
    return (
        Instruction(_MOVE, 6, 1),
        Instruction(_CALL, imm=_COOKIE) if cookie is None else Instruction(_SET, 0, imm=cookie),
        Instruction(b.STX | _WORD, 10, 0, -_KEY + 8),
        Instruction(_CALL, imm=_THREAD),
        Instruction(b.STX | _WORD, 10, 0, -_KEY),
        Instruction(b.ST | _WORD, 10, offset=-_KEY + 16, imm=number),
        *_map_and_key(),
    )


def _map_and_key() -> tuple[Instruction, ...]:
    return (
        Instruction(b.LD_IMM64, 1, b.PSEUDO_MAP, map=MAP),
        Instruction(0),
        Instruction(_MOVE, 2, 10),
        Instruction(b.ALU64 | b.ADD, 2, imm=-_KEY),
    )

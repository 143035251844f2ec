"""The first gate: the kernel's own verifier, applied to a stand-in for the device program.

The stand-in is a TRACEPOINT program, a type that accepts every context offset except 0 to 7. So context offsets are shifted by 8
bytes, and the second gate checks the size of the context. Helpers that the kernel lacks are replaced by helpers that it has, or by
loads and stores (`helpers.StandIn`).
"""

from __future__ import annotations

import errno
import os
import platform
from contextlib import ExitStack

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf import maps
from gpubpf.ebpf.bytecode import CONTEXTS, Instruction, Program, encode
from gpubpf.ebpf.helpers import HELPERS, ArgumentKind, StandIn, number_of
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.errors import VerifyError
from gpubpf.kernel import bpf_syscall
from gpubpf.kernel.bpf_syscall import Rejected
from gpubpf.record import replace
from gpubpf.verify.values import Checked, place_of

_CONTEXT_SHIFT = 8
_PRANDOM, _PRINTK = number_of("bpf_get_prandom_u32"), number_of("bpf_trace_printk")
_MAY_GOTO = b.JMP | 0xE0  # Linux 6.9: a jump that is taken after 2^23 iterations at the latest
_RINGBUF_OUTPUT = number_of("bpf_ringbuf_output")


def check(program: Program, checked: Checked) -> str | None:
    """Let the kernel verify a program that has passed the second gate.

    checked: the result of the second gate, which includes the places where the program reads its context

    Returns the kernel's release, or None if the kernel gives no verdict, for example without CAP_BPF. Raises VerifyError.
    """
    code, origin = stand_in(checked)
    with ExitStack() as stack:
        fds: dict[str, int] = {}
        try:
            for name in sorted({i.map for i in code if i.map is not None}):
                fds[name] = _create_map(program.maps[name])
                stack.callback(os.close, fds[name])
            os.close(bpf_syscall.load_program(bpf_syscall.TRACEPOINT, encode(code, fds)))
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOSYS, errno.ENOMEM):
                return None
            raise VerifyError(_message(program, checked, origin, error)) from None
    return platform.release()


def stand_in(checked: Checked) -> tuple[list[Instruction], list[int]]:
    """Return the instructions of the stand-in, and for each of them the number of the instruction that it comes from."""
    code = checked.function.instructions
    fields = CONTEXTS[checked.function.point]
    context = {
        pc: fields[access.name][0] + access.offset
        for (_, pc), access in checked.accesses.items()
        if access.kind == "context"
    }
    calls = {pc: call for (_, pc), call in checked.calls.items()}
    # Two slots below the program's stack hold an unknown number and the unmodified address of the context.
    slot = (checked.stack_low & ~7) - 16
    room = slot >= -b.STACK_SIZE
    # The kernel accepts only the unmodified address.
    moved = {pc for pc, at in context.items() if at != code[pc].offset}
    unknown = room and (
        bool(moved) or bool(checked.loops) or any(_stand_in(i) is StandIn.STORES for i in code)
    )
    made: list[Instruction] = []
    origin: list[int] = []
    start: dict[int, int] = {}

    def put(pc: int, *instructions: Instruction) -> None:
        made.extend(instructions)
        origin.extend([pc] * len(instructions))

    if unknown:
        put(
            0,
            Instruction(b.ALU64 | b.MOV | 8, 6, 1),
            Instruction(b.JMP | b.CALL, imm=_PRANDOM),
            # Stored in two halves: otherwise the kernel would assume that all copies of the number are equal.
            Instruction(b.STX | b.MEM, 10, 0, slot),
            Instruction(b.STX | b.MEM, 10, 0, slot + 4),
            Instruction(b.STX | b.MEM | 0x18, 10, 6, slot + 8),
            Instruction(b.ALU64 | b.MOV | 8, 1, 6),
        )
    entries = {0} | {
        pc + 1 + i.imm for pc, i in enumerate(code) if i.opcode == b.JMP | b.CALL and i.src == b.PSEUDO_CALL
    }
    inside_main = True
    turns = {pc: numbers for (_, pc), numbers in checked.loops.items()}
    for pc, i in enumerate(code):
        start[pc] = len(made)
        inside_main = inside_main and (pc == 0 or pc not in entries)
        if pc in turns:  # the loop may end the program here
            put(pc, Instruction(_MAY_GOTO, offset=1), Instruction(b.JMP | b.JA, offset=2))
            put(pc, Instruction(b.ALU64 | b.MOV), Instruction(b.JMP | b.EXIT))
            # Give the numbers that change between iterations an unknown value, so that the kernel need not follow each iteration.
            numbers = [n for n in sorted(turns[pc]) if unknown and inside_main]
            registers = [n for n in numbers if n >= 0]
            put(pc, *(Instruction(b.LDX | b.MEM | 0x18, n, 10, slot) for n in registers))
            for at in [n for n in numbers if n < 0 and registers]:
                put(pc, *(Instruction(b.STX | b.MEM, 10, registers[0], half) for half in (at, at + 4)))
        if pc in moved and unknown and inside_main:
            put(pc, Instruction(b.LDX | b.MEM | 0x18, i.dst, 10, slot + 8))
            i = replace(i, src=i.dst, offset=context[pc])
        if pc in context:
            i = replace(i, offset=i.offset + _CONTEXT_SHIFT)
        kind = _stand_in(i)
        if kind is StandIn.STORES:
            written = HELPERS[i.imm].registers[ArgumentKind.RESULT]
            if unknown and inside_main:
                for register in written:
                    put(pc, Instruction(b.LDX | b.MEM | 0x18, 0, 10, slot))
                    put(pc, Instruction(b.STX | b.MEM | 0x18, register, 0))
            else:
                put(pc, *(Instruction(b.ST | b.MEM | 0x18, register) for register in written))
            put(pc, Instruction(b.JMP | b.CALL, imm=_PRANDOM))  # a call clears r1 to r5
        elif kind is StandIn.UPDATE:
            cell, number = (
                HELPERS[i.imm].register(argument) for argument in (ArgumentKind.CELL, ArgumentKind.NUMBER)
            )
            put(
                pc,
                Instruction(b.LDX | b.MEM | 0x18, 0, cell),
                Instruction(b.STX | b.MEM | 0x18, cell, number),
            )
            put(pc, Instruction(b.JMP | b.CALL, imm=_PRANDOM))
        elif kind in (StandIn.PRINTK, StandIn.VPRINTK) and pc in calls:
            for at in calls[pc].numbers:
                put(
                    pc, Instruction(b.LDX | b.MEM | 0x18, 0, HELPERS[i.imm].register(ArgumentKind.VALUES), at)
                )
            put(pc, Instruction(b.ALU64 | b.MOV, 2, imm=calls[pc].size), replace(i, imm=_PRINTK))
        elif kind is StandIn.RINGBUF:
            given = (ArgumentKind.MAP, ArgumentKind.RECORD, ArgumentKind.SHORT_RECORD_SIZE)
            for register, argument in enumerate(given, 1):
                put(pc, Instruction(b.ALU64 | b.MOV | 8, register, HELPERS[i.imm].register(argument)))
            put(pc, Instruction(b.ALU64 | b.MOV, len(given) + 1), replace(i, imm=_RINGBUF_OUTPUT))
        elif kind is StandIn.NUMBER:
            put(pc, replace(i, imm=_PRANDOM))
        else:
            put(pc, i)
    start[len(code)] = len(made)
    for at, i in enumerate(made):
        pc, op = origin[at], i.opcode & 0xF0
        if i.cls not in (b.JMP, b.JMP32) or op == b.EXIT or i is not code[pc]:
            continue
        if op == b.CALL:
            if i.src == b.PSEUDO_CALL:
                made[at] = replace(i, imm=start[pc + 1 + i.imm] - at - 1)
        elif i.opcode == 0x06:
            made[at] = replace(i, imm=start[pc + 1 + i.imm] - at - 1)
        else:
            made[at] = replace(i, offset=start[pc + 1 + i.offset] - at - 1)
    return made, origin


def _stand_in(i: Instruction) -> StandIn:
    calls = i.opcode == b.JMP | b.CALL and i.src == 0 and i.imm in HELPERS
    return HELPERS[i.imm].stand_in if calls else StandIn.ITSELF


def _create_map(definition: MapDefinition) -> int:
    """Create a kernel map with the sizes that the verifier checks, using as little memory as possible."""
    key, value, entries = definition.key_size, definition.value_size, min(definition.max_entries, 1024)
    kind, flags = bpf_syscall.ARRAY, 0
    if definition.kind == "hash":
        kind, flags = bpf_syscall.HASH, bpf_syscall.NO_PREALLOC
    elif definition.kind == "ringbuf":
        kind, key, value, entries = bpf_syscall.RINGBUF, 0, 0, 4096
    if definition.constant:
        file = bpf_syscall.create_map(kind, key, value, entries, bpf_syscall.CONSTANT)
        maps.fill(definition, file)
        return file
    return bpf_syscall.create_map(kind, key, value, max(entries, 1), flags)


def _message(program: Program, checked: Checked, origin: list[int], error: OSError) -> str:
    rejected = error if isinstance(error, Rejected) else Rejected(error, "")
    said, at = rejected.reason()
    if at is None or at >= len(origin):
        where = f"device program {checked.function.name}"
    else:
        where = place_of(program, checked.function, origin[at])
    return f"{where}: the kernel's verifier says: {said}; correct the C text"

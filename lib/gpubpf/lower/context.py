"""Programs at launches and operations begin with a copy of their context to the stack.

In the kernel, the fields of `struct gpu_launch` are in registers of the stub's caller, not in one structure. And compilers load
through context pointers in ways that verifiers reject, such as two fields by one load. With a copy on the stack, both work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import CONTEXTS, HOST_POINTS, STACK_SIZE, BpfFunction, Instruction
from gpubpf.ebpf.helpers import TAKE_CONTEXT
from gpubpf.errors import VerifyError

# The offsets in struct pt_regs of x86-64 (arch/x86/include/asm/ptrace.h) of the registers that hold the fields, in order: those of the
# first six arguments (System V ABI), then two that a callee need not save.
_REGISTERS = (112, 104, 96, 88, 72, 64, 56, 48)  # di, si, dx, cx, r8, r9, r10, r11
REGISTERS: Mapping[str, tuple[int, ...]] = {
    point: _REGISTERS[: len(CONTEXTS[point])] for point in HOST_POINTS
}
FIELDS: Mapping[str, tuple[int, ...]] = {
    point: tuple(offset for offset, _ in CONTEXTS[point].values()) for point in HOST_POINTS
}
_LONG = b.MEM | 0x18


def copied(function: BpfFunction, where: tuple[int, ...]) -> BpfFunction:
    """Return the program with code in front that copies the fields of its context to the stack.

    where: the offsets of the fields from the address that the program is really given. Raises VerifyError if the stack has no room
    for the copy.
    """
    code = function.instructions
    room = 8 * len(where) + 8
    base = (_lowest(code) & ~7) - room
    if base < -STACK_SIZE:
        raise VerifyError(
            f"host program {function.name}: it uses {-base - room} bytes of the stack, and its context takes {room} of the"
            f" {STACK_SIZE}; keep less on the stack"
        )
    line = code[0].line if code else 0
    real = base + room - 8
    made = [Instruction(b.STX | _LONG, 10, 1, real)]
    for number, offset in enumerate(where):
        made.append(Instruction(b.LDX | _LONG, 0, 1, offset))
        made.append(Instruction(b.STX | _LONG, 10, 0, base + 8 * number))
    made += [Instruction(b.ALU64 | b.MOV | 8, 1, 10), Instruction(b.ALU64 | b.ADD, 1, imm=base)]
    made = [replace(i, line=line) for i in made]
    start: list[int] = []
    placed: dict[int, int] = {}  # the old number of each instruction, by its new one
    for pc, i in enumerate(code):
        start.append(len(made))
        if i.opcode == b.JMP | b.CALL and i.src == 0 and i.imm in TAKE_CONTEXT:
            made.append(Instruction(b.LDX | _LONG, 1, 10, real, line=i.line))
        placed[len(made)] = pc
        made.append(i)
    for at, pc in placed.items():
        i = code[pc]
        op = i.opcode & 0xF0
        if i.cls not in (b.JMP, b.JMP32) or op in (b.CALL, b.EXIT):
            continue
        if op == b.JA and i.cls == b.JMP32:
            made[at] = replace(i, imm=start[pc + 1 + i.imm] - at - 1)
        else:
            made[at] = replace(i, offset=start[pc + 1 + i.offset] - at - 1)
    return replace(function, instructions=tuple(made))


def _lowest(code: tuple[Instruction, ...]) -> int:
    """Return a stack offset below which the program accesses nothing."""
    addresses = {10}
    copies = [(i.dst, i.src) for i in code if i.opcode == b.ALU64 | b.MOV | 8]
    for _ in range(10):
        addresses |= {target for target, source in copies if source in addresses}
    lowest = 0
    for i in code:
        reaches = (i.cls == b.LDX and i.src == 10) or (i.cls in (b.ST, b.STX) and i.dst == 10)
        if reaches:
            lowest = min(lowest, i.offset)
        elif i.opcode == b.ALU64 | b.ADD and i.dst in addresses:
            lowest = min(lowest, i.imm)
    return lowest

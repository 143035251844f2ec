"""Programs at launches and operations find their context where they run: it is copied to the stack first.

In the kernel the fields of `struct gpu_launch` are in registers of the stub's caller, not in one structure; and compilers load
through context pointers in ways that verifiers reject (two fields by one load). On the stack both are fine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import CONTEXTS, HOST_POINTS, STACK_SIZE, BpfFunction, Instruction
from gpubpf.ebpf.helpers import TAKE_CONTEXT
from gpubpf.errors import VerifyError

# Where struct pt_regs of x86-64 has the registers that hold the fields, one after the other: those of the first six arguments
# (System V ABI), then two that no call has to keep (arch/x86/include/asm/ptrace.h).
_REGISTERS = (112, 104, 96, 88, 72, 64, 56, 48)  # di, si, dx, cx, r8, r9, r10, r11
REGISTERS: Mapping[str, tuple[int, ...]] = {
    point: _REGISTERS[: len(CONTEXTS[point])] for point in HOST_POINTS
}
FIELDS: Mapping[str, tuple[int, ...]] = {
    point: tuple(offset for offset, _ in CONTEXTS[point].values()) for point in HOST_POINTS
}
_LONG = b.MEM | 0x18


def copied(function: BpfFunction, where: tuple[int, ...]) -> BpfFunction:
    """The same program with the fields of its context copied, from the offsets `where` in what the context's address points to
    in truth, to the stack. Raises VerifyError where there is no room for that."""
    code = function.instructions
    room = 8 * len(where) + 8
    base = (_lowest(code) & ~7) - room
    if base < -STACK_SIZE:
        raise VerifyError(
            f"host program {function.name}: it uses {-base - room} bytes of the stack, and {room} of {STACK_SIZE} are"
            " taken; keep less on the stack"
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
    placed: dict[int, int] = {}  # where the old instructions are, and which
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
    """An offset on the stack below which the program reaches nothing."""
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

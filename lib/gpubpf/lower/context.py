"""Pass programs at launches and operations a copy of their context on the stack.

In the kernel, the fields of `struct gpu_launch` are in registers of the stub's caller, not in one structure. Also, compilers load
through context pointers in ways that verifiers reject, such as two fields with one load. A copy on the stack solves both.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpubpf import processor
from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import CONTEXTS, HOST_POINTS, BpfFunction, Instruction
from gpubpf.ebpf.helpers import TAKE_CONTEXT
from gpubpf.record import replace

# Offsets in struct pt_regs of the registers that hold the fields, in order. On x86-64 (arch/x86/include/asm/ptrace.h): the first six
# argument registers (System V ABI), then two caller-saved registers. On aarch64 (arch/arm64/include/uapi/asm/ptrace.h): x0 to x7.
_REGISTERS = {
    "x86_64": (112, 104, 96, 88, 72, 64, 56, 48),  # di, si, dx, cx, r8, r9, r10, r11
    "aarch64": tuple(range(0, 64, 8)),
}.get(processor.NAME, ())
REGISTERS: Mapping[str, tuple[int, ...]] = {
    point: _REGISTERS[: len(CONTEXTS[point])] for point in HOST_POINTS
}
FIELDS: Mapping[str, tuple[int, ...]] = {
    point: tuple(offset for offset, _ in CONTEXTS[point].values()) for point in HOST_POINTS
}
_LONG = b.MEM | 0x18


def copied(function: BpfFunction, where: tuple[int, ...]) -> BpfFunction:
    """Return a program that copies the fields of its context to its stack, and calls `function` with the copy.

    `function` has its own stack frame, so it cannot overwrite the copy. The copy is followed by the address of the real
    context, for helpers that take it.

    where: the offset of each field from the address of the real context, in bytes
    """
    code = function.instructions
    line = code[0].line if code else 0
    base = -8 * len(where) - 8
    front = [Instruction(b.STX | _LONG, 10, 1, -8)]
    for number, offset in enumerate(where):
        front.append(Instruction(b.LDX | _LONG, 0, 1, offset))
        front.append(Instruction(b.STX | _LONG, 10, 0, base + 8 * number))
    front += [
        Instruction(b.ALU64 | b.MOV | 8, 1, 10),
        Instruction(b.ALU64 | b.ADD, 1, imm=base),
        Instruction(b.JMP | b.CALL, src=b.PSEUDO_CALL, imm=1),
        Instruction(b.JMP | b.EXIT),
    ]
    made = [replace(i, line=line) for i in front]
    start: list[int] = []
    placed: dict[int, int] = {}  # new number of an instruction → old number
    for pc, i in enumerate(code):
        start.append(len(made))
        if i.opcode == b.JMP | b.CALL and i.src == 0 and i.imm in TAKE_CONTEXT:
            made.append(Instruction(b.LDX | _LONG, 1, 1, 8 * len(where), line=i.line))
        placed[len(made)] = pc
        made.append(i)
    for at, pc in placed.items():
        i = code[pc]
        op = i.opcode & 0xF0
        if i.cls not in (b.JMP, b.JMP32) or op == b.EXIT or (op == b.CALL and i.src != b.PSEUDO_CALL):
            continue
        if op == b.CALL or (op == b.JA and i.cls == b.JMP32):
            made[at] = replace(i, imm=start[pc + 1 + i.imm] - at - 1)
        else:
            made[at] = replace(i, offset=start[pc + 1 + i.offset] - at - 1)
    return replace(function, instructions=tuple(made))

"""An assembler for the notation of bpf_conformance, such as `jne %r0, 3, exit` and `lock fetch add [%r10-8], %r1`."""

from __future__ import annotations

import re

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import Instruction
from gpubpf.record import replace
from gpubpf_asm import (
    Code,
    alu,
    atomic,
    call,
    call_program,
    ja,
    jump,
    leave,
    load,
    load64,
    store,
    storei,
)

_ARITHMETIC = {
    "add": b.ADD, "sub": b.SUB, "mul": b.MUL, "div": b.DIV, "or": b.OR, "and": b.AND, "lsh": b.LSH, "rsh": b.RSH,
    "neg": b.NEG, "mod": b.MOD, "xor": b.XOR, "mov": b.MOV, "arsh": b.ARSH,
}  # fmt: skip
_JUMPS = {
    "jeq": b.JEQ, "jgt": b.JGT, "jge": b.JGE, "jset": b.JSET, "jne": b.JNE, "jsgt": b.JSGT, "jsge": b.JSGE,
    "jlt": b.JLT, "jle": b.JLE, "jslt": b.JSLT, "jsle": b.JSLE,
}  # fmt: skip
_ATOMICS = {
    "add": 0x00,
    "or": 0x40,
    "and": 0x50,
    "xor": 0xA0,
    "xchg": b.ATOMIC_XCHG,
    "cmpxchg": b.ATOMIC_CMPXCHG,
}
_SIZES = {"b": 1, "h": 2, "w": 4, "dw": 8}


class Unknown(Exception):
    """A line that this assembler does not know."""


def assemble(text: str) -> Code:
    """Return the instructions of a program. Raises Unknown."""
    code: Code = []
    labels: dict[str, int] = {}
    waiting: list[tuple[int, str]] = []  # instructions that jump to a label
    for line in text.splitlines():
        words = line.split("#")[0].replace(",", " ").split()
        if not words:
            continue
        if words[0].endswith(":"):
            labels[words[0][:-1]] = len(code)
            continue
        if words[0] == "exit":
            labels.setdefault("exit", len(code))
        try:
            made, target = _instruction(words[0], words[1:])
        except (KeyError, IndexError, ValueError, TypeError):
            raise Unknown(f"unknown instruction: {' '.join(words)}") from None
        if target is not None:
            waiting.append((len(code), target))
        code += made
    for at, target in waiting:
        if target[0] not in "+-" and target not in labels:
            raise Unknown(f"unknown label: {target}")
        distance = int(target, 0) if target[0] in "+-" else labels[target] - at - 1
        far = code[at].opcode in (b.JMP | b.CALL, b.JMP32 | b.JA)
        code[at] = replace(code[at], imm=distance) if far else replace(code[at], offset=distance)
    return code


def _register(text: str) -> int:
    return int(text.removeprefix("%r"))


def _place(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"\[%r(\d+)([+-]\w+)?\]", text)
    if found is None:
        raise ValueError(text)
    return int(found[1]), int(found[2] or "0", 0)


def _constant(text: str) -> int:
    return b.signed(int(text, 0), 32)


def _instruction(name: str, operands: list[str]) -> tuple[Code, str | None]:
    """Return the slots of one instruction, and the target of its jump."""
    if name == "exit":
        return [leave()], None
    if name == "ja":
        return [ja(0)], operands[0]
    if name == "ja32":
        return [Instruction(b.JMP32 | b.JA)], operands[0]
    if name == "call" and operands[0] == "local":
        return [call_program(0)], operands[1]
    if name == "call" and operands[0].startswith("%"):
        return [Instruction(b.JMP | b.CALL | 8, _register(operands[0]))], None
    if name == "call" and operands[0] == "runtime":
        return [Instruction(b.JMP | b.CALL, src=2, imm=int(operands[1], 0))], None
    if name == "call":
        return [call(int(operands[-1], 0))], None
    if name == "lock":
        return [_locked(operands)], None
    if name == "lddw":
        return load64(_register(operands[0]), int(operands[1], 0)), None
    if found := re.fullmatch(r"(ldx|ldxs|stx|st)(b|h|w|dw)", name):
        return [_access(found[1], _SIZES[found[2]], operands)], None
    if found := re.fullmatch(r"(le|be|swap|bswap)(16|32|64)", name):
        opcode = {"le": b.ALU, "be": b.ALU | 8}.get(found[1], b.ALU64)
        return [Instruction(opcode | b.END, _register(operands[0]), imm=int(found[2]))], None
    if found := re.fullmatch(r"movsx(8|16|32)(32|64)", name):
        dst, src = map(_register, operands)
        return [alu(b.MOV, dst, src, wide=found[2] == "64", offset=int(found[1]))], None
    wide = not name.endswith("32")
    base = name.removesuffix("32").removesuffix("64")
    if base in _JUMPS:
        src, imm = _source(operands[1])
        return [jump(_JUMPS[base], _register(operands[0]), 0, src, imm, wide)], operands[2]
    of_signed = base in ("sdiv", "smod")
    src, imm = (None, 0) if base == "neg" else _source(operands[1])
    op = _ARITHMETIC[base[1:] if of_signed else base]
    return [alu(op, _register(operands[0]), src, imm, wide, int(of_signed))], None


def _source(operand: str) -> tuple[int | None, int]:
    return (_register(operand), 0) if operand.startswith("%") else (None, _constant(operand))


def _access(kind: str, size: int, operands: list[str]) -> Instruction:
    if kind in ("ldx", "ldxs"):
        src, offset = _place(operands[1])
        return load(_register(operands[0]), src, offset, size, kind == "ldxs")
    dst, offset = _place(operands[0])
    if kind == "stx":
        return store(dst, offset, _register(operands[1]), size)
    return storei(dst, offset, _constant(operands[1]), size)


def _locked(operands: list[str]) -> Instruction:
    fetch = operands[0] == "fetch"
    name, place, source = operands[1:] if fetch else operands
    dst, offset = _place(place)
    size = 4 if name.endswith("32") else 8
    return atomic(_ATOMICS[name.removesuffix("32")] | fetch, dst, offset, _register(source), size)

"""eBPF instructions as text, as the kernel's verifier prints them (kernel/bpf/disasm.c).

    text(Instruction(0x07, 1, imm=-8))      # "r1 += -8"

Names of maps replace the addresses that the verifier prints: `r1 = map[counts]`, `r1 = map[data][0]+8`.
"""

from __future__ import annotations

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.bytecode import Instruction
from gpubpf.ebpf.helpers import HELPERS

_ARITHMETIC = {
    b.ADD: "+=",
    b.SUB: "-=",
    b.MUL: "*=",
    b.DIV: "/=",
    b.OR: "|=",
    b.AND: "&=",
    b.LSH: "<<=",
    b.RSH: ">>=",
    b.MOD: "%=",
    b.XOR: "^=",
    b.MOV: "=",
    b.ARSH: "s>>=",
}
_COMPARISONS = {
    b.JEQ: "==",
    b.JGT: ">",
    b.JGE: ">=",
    b.JSET: "&",
    b.JNE: "!=",
    b.JSGT: "s>",
    b.JSGE: "s>=",
    b.JLT: "<",
    b.JLE: "<=",
    b.JSLT: "s<",
    b.JSLE: "s<=",
}
_ATOMIC = {
    b.ATOMIC_ADD: ("+=", "add"),
    b.ATOMIC_OR: ("|=", "or"),
    b.ATOMIC_AND: ("&=", "and"),
    b.ATOMIC_XOR: ("^=", "xor"),
}
_REGISTER_OPERAND = 8  # in the opcode of arithmetic and jumps


def text(i: Instruction) -> str:
    """Return an instruction as text. An instruction that eBPF does not have is shown as its opcode."""
    if i.opcode == b.LD_IMM64:
        return f"r{i.dst} = {_constant(i)}"
    if i.cls in (b.ALU, b.ALU64):
        found = _arithmetic(i)
    elif i.cls in (b.JMP, b.JMP32):
        found = _jump(i)
    else:
        found = _access(i)
    return found or f"opcode {i.opcode:#04x}"


def _constant(i: Instruction) -> str:
    if i.map is None:
        return f"{i.imm & (1 << 64) - 1:#x}"
    return f"map[{i.map}][0]+{i.imm}" if i.src == b.PSEUDO_VALUE else f"map[{i.map}]"


def _arithmetic(i: Instruction) -> str:
    operation, letter = i.opcode & 0xF0, "r" if i.cls == b.ALU64 else "w"
    to = f"{letter}{i.dst}"
    if operation == b.NEG:
        return f"{to} = -{to}"
    if operation == b.END:
        swap = "bswap" if i.cls == b.ALU64 else "be" if i.opcode & _REGISTER_OPERAND else "le"
        return f"r{i.dst} = {swap}{i.imm} r{i.dst}"
    if operation not in _ARITHMETIC:
        return ""
    operand = f"{letter}{i.src}" if i.opcode & _REGISTER_OPERAND else str(i.imm)
    signed = "s" if i.offset == 1 and operation in (b.DIV, b.MOD) else ""
    cast = f"(s{i.offset})" if i.offset and operation == b.MOV else ""
    return f"{to} {signed}{_ARITHMETIC[operation]} {cast}{operand}"


def _jump(i: Instruction) -> str:
    operation = i.opcode & 0xF0
    if operation == b.EXIT:
        return "exit"
    if operation == b.CALL:
        if i.src == b.PSEUDO_CALL:
            return f"call pc{i.imm:+}"
        name = HELPERS[i.imm].name if i.imm in HELPERS else "unknown"
        return f"call {name}#{i.imm}"
    if operation == b.JA:
        return f"goto pc{i.offset:+}" if i.cls == b.JMP else f"gotol pc{i.imm:+}"
    if operation not in _COMPARISONS:
        return ""
    letter = "r" if i.cls == b.JMP else "w"
    operand = f"{letter}{i.src}" if i.opcode & _REGISTER_OPERAND else f"{i.imm & 0xFFFFFFFF:#x}"
    return f"if {letter}{i.dst} {_COMPARISONS[operation]} {operand} goto pc{i.offset:+}"


def _access(i: Instruction) -> str:
    mode, bits = i.opcode & 0xE0, 8 * b.WIDTH[i.opcode & 0x18]
    base = i.src if i.cls == b.LDX else i.dst
    place = f"(r{base} {i.offset:+})"
    if i.cls == b.LDX and mode in (b.MEM, b.MEMSX):
        return f"r{i.dst} = *({'u' if mode == b.MEM else 's'}{bits} *){place}"
    if i.cls == b.ST and mode == b.MEM:
        return f"*(u{bits} *){place} = {i.imm}"
    if i.cls == b.STX and mode == b.MEM:
        return f"*(u{bits} *){place} = r{i.src}"
    if i.cls != b.STX or mode != b.ATOMIC:
        return ""
    name = "atomic64" if bits == 64 else "atomic"
    if i.imm == b.ATOMIC_XCHG:
        return f"r{i.src} = {name}_xchg((u{bits} *){place}, r{i.src})"
    if i.imm == b.ATOMIC_CMPXCHG:
        return f"r0 = {name}_cmpxchg((u{bits} *){place}, r0, r{i.src})"
    if i.imm & ~b.FETCH not in _ATOMIC:
        return ""
    sign, word = _ATOMIC[i.imm & ~b.FETCH]
    if i.imm & b.FETCH:
        return f"r{i.src} = {name}_fetch_{word}((u{bits} *){place}, r{i.src})"
    return f"lock *(u{bits} *){place} {sign} r{i.src}"

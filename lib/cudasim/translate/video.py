"""Translate video instructions to C (PTX ISA 9.7.17): arithmetic on words, half-words or bytes of 32-bit registers.

Scalar instructions have one result of 34 bits. `.sat` limits the result to the range of the destination's type. The result is then
combined with a third operand, or replaces a part of it. vmad multiplies; its third operand is always added. SIMD instructions, whose
names end with 2 or 4, have a result for each part of the register.
"""

from __future__ import annotations

import re

from gpubpf.ptx.module import Name, Operand, PtxInstruction

from .arithmetic import compare, comparison_operator, emits
from .values import Values

_OPERATIONS = {
    "vadd": "x_ + y_",
    "vsub": "x_ - y_",
    "vabsdiff": "x_ < y_ ? y_ - x_ : x_ - y_",
    "vmin": "MIN(s64, x_, y_)",
    "vmax": "MAX(s64, x_, y_)",
    "vshl": "(s64)((u64)x_ << y_ << 30) >> 30",  # the result has 34 bits
    "vshr": "x_ >> y_",
    "vavrg": "(x_ + y_ + (x_ + y_ >= 0)) >> 1",
}
_SECOND = {"add": "t_ + z_", "min": "MIN(s64, t_, z_)", "max": "MAX(s64, t_, z_)"}
_PART = re.compile(r"b[0-3]|h[01]")  # what a selector of a scalar instruction chooses
_SIMD = [
    f"{name}{n}" for name in ("vadd", "vsub", "vavrg", "vabsdiff", "vmin", "vmax", "vset") for n in (2, 4)
]


def _selector(operand: Operand) -> str:
    return operand.name[len(operand.whole) + 1 :] if isinstance(operand, Name) else ""


def _part(v: Values, operand: Operand) -> tuple[Operand, int, int]:
    """Return the register of an operand, and the first bit and the number of bits that the operand's selector chooses."""
    selector = _selector(operand)
    if not isinstance(operand, Name) or not selector:
        return operand, 0, 32
    if not _PART.fullmatch(selector):
        raise v.unsupported(f"selector .{selector}")
    width = 8 if selector[0] == "b" else 16
    return Name(operand.whole), int(selector[1]) * width, width


def _extended(v: Values, operand: Operand, t: str) -> str:
    """Return the chosen bits of an operand, extended to 64 bits by the sign of the type."""
    register, first, width = _part(v, operand)
    return f"(s64)({t[0]}{width})({v.src(register, 'b32')} >> {first})"


def _sources(v: Values, i: PtxInstruction, ta: str, tb: str) -> str:
    a, b = (_extended(v, operand, t) for operand, t in zip(i.operands[1:3], (ta, tb), strict=True))
    return f"const s64 x_ = {a}; s64 y_ = {b}; "


def _limited(is_signed: bool, width: int) -> str:
    """Return C that limits `t_` to the range of a type."""
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if is_signed else (0, (1 << width) - 1)
    return f"t_ = t_ < {low}ll ? {low}ll : t_ > {high}ll ? {high}ll : t_; "


def _operation(v: Values, i: PtxInstruction) -> str:
    if i.opcode.startswith("vset"):
        return compare(v, i, comparison_operator(v, i), "x_", "y_", "s64")
    return _OPERATIONS[i.opcode.rstrip("24")]


@emits("vadd", "vsub", "vabsdiff", "vmin", "vmax", "vshl", "vshr", "vset")
def video(v: Values, i: PtxInstruction) -> str:
    modifiers = list(i.modifiers)
    result = "u32" if i.opcode == "vset" else modifiers.pop(0)
    ta, tb = modifiers.pop(0), modifiers.pop(0)
    second = next((m for m in modifiers if m in _SECOND), None)
    destination, first, width = _part(v, i.operands[0])
    text = f"{{ {_sources(v, i, ta, tb)}"
    if "clamp" in modifiers:
        text += "y_ = y_ > 32 ? 32 : y_; "
    if "wrap" in modifiers:
        text += "y_ &= 31; "
    text += f"s64 t_ = {_operation(v, i)}; "
    if "sat" in modifiers:
        text += _limited(result == "s32", width)
    if len(i.operands) > 3:
        text += f"const s64 z_ = {_extended(v, i.operands[3], result)}; "
    if second is not None:
        text += f"t_ = {_SECOND[second]}; "
    elif width < 32:
        mask = (1 << width) - 1 << first
        text += f"t_ = (t_ << {first} & {mask:#x}) | (z_ & {~mask & 0xFFFFFFFF:#x}); "
    return text + v.dst(destination, "b32", "(u32)t_") + " }"


@emits("vmad")
def multiply_add(v: Values, i: PtxInstruction) -> str:
    """Translate vmad. The product or the third operand may be negated, but not both; then the sum is signed."""
    ta, tb = i.modifiers[1:3]
    first, second, third = (isinstance(operand, Name) and operand.negative for operand in i.operands[1:])
    negates = first != second
    is_signed = negates or third or "s32" in (ta, tb)
    if (negates and third) or ("po" in i.modifiers and (first or second or third)):
        raise v.unsupported("negation of these operands")
    if _selector(i.operands[0]) or _selector(i.operands[3]):
        raise v.unsupported("selectors of these operands")
    z = f"(s64)({'s' if is_signed else 'u'}32)({'~' if third else ''}{_extended(v, i.operands[3], 'u32')})"
    text = f"{{ {_sources(v, i, ta, tb)}s128 t_ = {'-' if negates else ''}((s128)x_ * y_) + {z}"
    text += f" + {int(third or 'po' in i.modifiers)}; "
    text += "".join(f"t_ >>= {m[3:]}; " for m in i.modifiers if m in ("shr7", "shr15"))
    if "sat" in i.modifiers:
        text += _limited(is_signed, 32)
    return text + v.dst(i.operands[0], "b32", "(u32)t_") + " }"


def _places(v: Values, operand: Operand, default: str, most: int) -> list[int]:
    """Return the numbers of the parts that the selector of a SIMD operand names, the lowest part of the result first."""
    selector = _selector(operand) or default
    numbers = [int(digit) for digit in reversed(selector[1:])]
    if not isinstance(operand, Name) or selector[0] != default[0] or max(numbers) > most:
        raise v.unsupported(f"operand {operand}")
    return numbers


@emits(*_SIMD)
def parallel(v: Values, i: PtxInstruction) -> str:
    """Translate a SIMD instruction. Selectors choose sources from the parts of both registers; the mask, the parts with a result."""
    count = int(i.opcode[-1])
    width = 32 // count
    modifiers = list(i.modifiers)
    is_set = i.opcode.startswith("vset")
    result = "u32" if is_set else modifiers.pop(0)
    types = modifiers[:2]
    adds = "add" in modifiers
    orders = ("h10", "h32") if count == 2 else ("b3210", "b7654")
    mask = _places(v, i.operands[0], orders[0], count - 1)
    chosen = [
        _places(v, operand, order, 2 * count - 1)
        for operand, order in zip(i.operands[1:3], orders, strict=True)
    ]
    if mask != sorted(set(mask)) or any(len(c) != count for c in chosen):
        raise v.unsupported()
    d, a, b, c = i.operands
    if not isinstance(c, Name) or _selector(c):
        raise v.unsupported(f"operand {c}")
    a, b = (Name(o.whole) if isinstance(o, Name) else o for o in (a, b))
    part = (1 << width) - 1
    kept = 0xFFFFFFFF if adds else ~sum(part << k * width for k in mask) & 0xFFFFFFFF
    text = f"{{ const u64 both_ = (u64){v.src(b, 'b32')} << 32 | {v.src(a, 'b32')}; "
    text += f"u32 r_ = {v.src(c, 'b32')} & {kept:#x}u; "
    for k in mask:
        x, y = (
            f"({t[0]}{width})(both_ >> {places[k] * width})" for t, places in zip(types, chosen, strict=True)
        )
        text += f"{{ const s64 x_ = {x}, y_ = {y}; s64 t_ = {_operation(v, i)}; "
        text += _limited(result == "s32", width) if "sat" in modifiers else ""
        text += "r_ += (u32)t_; } " if adds else f"r_ |= ((u32)t_ & {part:#x}u) << {k * width}; }} "
    return text + v.dst(Name(d.whole) if isinstance(d, Name) else d, "b32", "r_") + " }"

"""Translate scalar video instructions to C (PTX ISA 9.7.17): arithmetic on words, half-words or bytes of 32-bit registers.

The operation has a result of 34 bits. `.sat` limits it to the range of the destination's type. The result is then combined with a
third operand, or replaces a part of it.
"""

from __future__ import annotations

from gpubpf.ptx.module import Name, Operand, PtxInstruction

from .arithmetic import compare, comparison_operator, emits
from .values import Values

_OPERATIONS = {
    "vadd": "x_ + y_",
    "vsub": "x_ - y_",
    "vabsdiff": "x_ < y_ ? y_ - x_ : x_ - y_",
    "vmin": "MIN(s64, x_, y_)",
    "vmax": "MAX(s64, x_, y_)",
    "vshl": "(s64)((u64)x_ << y_ << 30) >> 30",  # of 34 bits
    "vshr": "x_ >> y_",
}
_SECOND = {"add": "t_ + z_", "min": "MIN(s64, t_, z_)", "max": "MAX(s64, t_, z_)"}


def _part(operand: Operand) -> tuple[Operand, int, int]:
    """Return a register, and which bits of it an operand chooses: the first one, and how many."""
    if not isinstance(operand, Name) or operand.whole == operand.name:
        return operand, 0, 32
    width = 8 if operand.name[-2] == "b" else 16
    return Name(operand.whole), int(operand.name[-1]) * width, width


def _extended(v: Values, operand: Operand, t: str) -> str:
    """Return the chosen bits of an operand, extended to 64 bits by the sign of the type."""
    register, first, width = _part(operand)
    return f"(s64)({t[0]}{width})({v.src(register, 'b32')} >> {first})"


@emits("vadd", "vsub", "vabsdiff", "vmin", "vmax", "vshl", "vshr", "vset")
def video(v: Values, i: PtxInstruction) -> str:
    modifiers = list(i.modifiers)
    result = "u32" if i.opcode == "vset" else modifiers.pop(0)
    ta, tb = modifiers.pop(0), modifiers.pop(0)
    second = next((m for m in modifiers if m in _SECOND), None)
    destination, first, width = _part(i.operands[0])
    text = (
        f"{{ const s64 x_ = {_extended(v, i.operands[1], ta)}; s64 y_ = {_extended(v, i.operands[2], tb)}; "
    )
    if "clamp" in modifiers:
        text += "y_ = y_ > 32 ? 32 : y_; "
    if "wrap" in modifiers:
        text += "y_ &= 31; "
    if i.opcode == "vset":
        operation = compare(v, i, comparison_operator(v, i), "x_", "y_", "s64")
    else:
        operation = _OPERATIONS[i.opcode]
    text += f"s64 t_ = {operation}; "
    if "sat" in modifiers:
        low, high = (-(1 << width - 1), (1 << width - 1) - 1) if result == "s32" else (0, (1 << width) - 1)
        text += f"t_ = t_ < {low}ll ? {low}ll : t_ > {high}ll ? {high}ll : t_; "
    if len(i.operands) > 3:
        text += f"const s64 z_ = {_extended(v, i.operands[3], result)}; "
    if second is not None:
        text += f"t_ = {_SECOND[second]}; "
    elif width < 32:
        mask = (1 << width) - 1 << first
        text += f"t_ = (t_ << {first} & {mask:#x}) | (z_ & {~mask & 0xFFFFFFFF:#x}); "
    return text + v.dst(destination, "b32", "(u32)t_") + " }"

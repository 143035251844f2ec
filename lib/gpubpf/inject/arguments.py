"""Read a function's arguments and result for programs at its entry and exit (PTX ISA 5.1.6 and 7.1)."""

from __future__ import annotations

from gpubpf.ptx.access import TYPE
from gpubpf.ptx.module import Address, Immediate, Name, PtxInstruction, Variable, Vector, type_size

from .operands import Operands


def argument(parameter: Variable, into: str) -> list[str]:
    """Return instructions that load the first 8 bytes of a parameter, zero-extended, into the 64-bit register `into`.

    The result is 0 for a parameter of unknown length.
    """
    at, size = 0, min(parameter.size, 8)
    part = "%gpubpf_0part"
    lines = ["{", f".reg .b64 {part};", f"mov.b64 {into}, 0;"]
    while at < size:
        piece = next(p for p in (8, 4, 2, 1) if p <= min(parameter.alignment, size - at) and at % p == 0)
        lines.append(f"ld.param.u{8 * piece} {part}, [{parameter.name}+{at}];")
        lines += [f"shl.b64 {part}, {part}, {8 * at};"] if at else []
        lines.append(f"or.b64 {into}, {into}, {part};")
        at += piece
    return [*lines, "}"]


def returned(instruction: PtxInstruction, name: str) -> list[tuple[int, Operands]]:
    """Return the elements that a `st.param` writes to the return parameter `name`, each with its offset in bytes.

    Return [] for other instructions.
    """
    operands, modifiers = instruction.operands, instruction.modifiers
    types = [m for m in modifiers if TYPE.fullmatch(m)]
    if instruction.opcode != "st" or not {"param", "param::func"} & set(modifiers) or not types:
        return []
    if len(operands) != 2 or not isinstance(operands[0], Address) or operands[0].base != name:
        return []
    if operands[0].index is not None:
        return []
    elements = operands[1].items if isinstance(operands[1], Vector) else operands[1:]
    size = type_size(types[-1])
    return [
        (operands[0].offset + n * size, Operands(types[-1], size, (element,)))
        for n, element in enumerate(elements)
        if isinstance(element, Name | Immediate) and operands[0].offset >= 0
    ]

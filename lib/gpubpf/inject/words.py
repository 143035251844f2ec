"""Build instructions that put a value into 64-bit registers, with its bytes in memory order."""

from __future__ import annotations

from collections.abc import Callable

from gpubpf.errors import Refusal
from gpubpf.ptx.module import Immediate, Name, type_size

from .operands import Operands

_ELEMENT = "%gpubpf_0element"


def word(
    of: Operands,
    elements: tuple[Name | Immediate, ...],
    half: int,
    into: str,
    type_of: Callable[[str], str],
    address: Callable[[Name, str], list[str]],
) -> list[str]:
    """Return instructions that put 8 bytes of a value into the 64-bit register `into`.

    half     0 for the first 8 bytes, 1 for the second
    type_of  returns the PTX type of a register; "" for other names, whose value is the address of a variable
    address  returns instructions that put the address of a variable into a 64-bit register

    Raises Refusal for a register that cannot hold an element.
    """
    lines = ["{", f".reg .b64 {_ELEMENT};"]
    if of.size == 16:
        words = ", ".join(_ELEMENT if n == half else "_" for n in range(2))
        return [*lines, f"mov.b128 {{{words}}}, {elements[0]};", f"mov.b64 {into}, {_ELEMENT};", "}"]
    lines.append(f"mov.b64 {into}, 0;")
    count = 8 // of.size
    for n, element in enumerate(elements[half * count : (half + 1) * count]):
        if isinstance(element, Name) and element.name == "_":  # not loaded
            continue
        kind = type_of(element.name) if isinstance(element, Name) else ""
        if isinstance(element, Name) and (not kind or element.offset):
            lines += address(element, _ELEMENT)
        else:
            lines += _element(of, element, kind)
        lines += [f"shl.b64 {_ELEMENT}, {_ELEMENT}, {8 * of.size * n};"] if n else []
        lines.append(f"or.b64 {into}, {into}, {_ELEMENT};")
    return [*lines, "}"]


def _element(of: Operands, element: Name | Immediate, kind: str) -> list[str]:
    """Return instructions that put an element into _ELEMENT, zero-extended from its size in memory. `kind`: the register's type."""
    bits, lines, source = 8 * of.size, [], str(element)
    if isinstance(element, Immediate):
        # Moves of floating-point types accept no integers, other moves no doubles. There is no 8-bit move.
        has, source = max(bits, 16), "%gpubpf_0literal"
        kind = of.type if of.type in ("f32", "f64") else f"b{has}"
        lines += [f".reg .{kind} {source};", f"mov.{kind} {source}, {element};"]
    else:
        has = 8 * type_size(kind)
        if kind == "pred" or has == 128:
            raise Refusal(f"{element} is not a value of {bits} bits")
    if has == 8:
        lines.append(f"cvt.u64.u8 {_ELEMENT}, {source};")
    elif has == 64:
        lines.append(f"mov.b64 {_ELEMENT}, {source};")
    else:
        lines += [f".reg .b{has} %gpubpf_0raw;", f"mov.b{has} %gpubpf_0raw, {source};"]
        lines.append(f"cvt.u64.u{has} {_ELEMENT}, %gpubpf_0raw;")
    if bits < has:
        lines.append(f"and.b64 {_ELEMENT}, {_ELEMENT}, {(1 << bits) - 1};")
    return ["{", *lines, "}"]

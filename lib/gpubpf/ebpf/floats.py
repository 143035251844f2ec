"""Turn the bits of a value, as device programs see them, into numbers of Python.

as_float(0x7E00, TYPES.index("f16"))         # nan
element("f16", 0x3C007E00, 0, 1)             # 0x3C00, the second half
"""

from __future__ import annotations

import struct

from gpubpf.ebpf.bytecode import TYPES, signed

FLOATS = ("f16", "bf16", "f32", "f64")
_AS_FLOATS = {"b16": "f16", "b32": "f32", "b64": "f64"}
_FORMS = {"f16": ("<H", "<e"), "bf16": ("<I", "<f"), "f32": ("<I", "<f"), "f64": ("<Q", "<d")}
_FRACTIONS = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52}  # bits


def as_float(element: int, number: int) -> float:
    """Return the first element of a value as a floating-point number.

    b16, b32 and b64 are read as the floating-point types of their sizes, other integers as their values.

    element: the bits of the element
    number: the index of its type in TYPES
    """
    kind = TYPES[number] if number < len(TYPES) else ""  # the traced program can write to the ring
    kind = _AS_FLOATS.get(kind, kind)
    if kind not in _FORMS:
        return float(signed(element) if kind.startswith("s") else element)
    bits, form = _FORMS[kind]
    raw = element << 16 if kind == "bf16" else element
    return float(struct.unpack(form, struct.pack(bits, raw & (1 << 8 * struct.calcsize(bits)) - 1))[0])


def size(kind: str) -> int:
    """Return the number of bits of an element of a type of TYPES."""
    return 1 if kind == "pred" else int(kind.lstrip("bfsu"))


def element(kind: str, low: int, high: int, index: int) -> int:
    """Return the bits of an element.

    kind: the element's type, one of TYPES but not pred
    low, high: the first 8 bytes of the value, and the next 8
    index: the number of the element in the value, from 0
    """
    bits = size(kind)
    return (high << 64 | low) >> bits * index & (1 << bits) - 1


def is_denormal(kind: str, bits: int) -> bool:
    """Return whether a number of a type of FLOATS is denormal: smaller than any normal number, but not 0."""
    magnitude = bits & (1 << size(kind) - 1) - 1
    return 0 < magnitude < 1 << _FRACTIONS[kind]

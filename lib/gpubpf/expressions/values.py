"""The values of loads, stores, atomics and instructions: what expressions may name, its C text, and numbers on the host.

eBPF has no floating point, so a program looks at bits. Where nobody knows what bits are (b16, b32, b64), they are taken for the
floating-point types of their sizes. Integers never are: many of them would look like NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpubpf.ebpf.bytecode import OPERANDS
from gpubpf.record import Record


class Value(Record):
    """A name, or a function of one. c: its C text. fields: those of the context that it reads."""

    c: str
    fields: tuple[str, ...]


def _of(name: str, *whole: str) -> dict[str, Value]:
    """Return the names for a value: its first element, and whether any of its elements is NaN, or infinite.

    whole: the fields with its type, its first 8 bytes and, if it may have more, the next 8."""
    arguments = ", ".join([*(f"ctx_{field}" for field in whole), "0ull"][:3])
    return {
        name: Value(f"gpu_element(ctx_{whole[0]}, ctx_{whole[1]})", whole[:2]),
        f"isnan({name})": Value(f"gpu_isnan({arguments})", whole),
        f"isinf({name})": Value(f"gpu_isinf({arguments})", whole),
    }


# The names that gputrace can show as a floating-point number, and the fields with their types.
ELEMENTS = {"value": "type", "old": "type", **dict.fromkeys(OPERANDS, "operand_type")}
VALUES: Mapping[str, Value] = {
    **_of("value", "type", "low", "high"),
    **_of("old", "type", "old_low", "old_high"),
    **{name: one for field in OPERANDS for name, one in _of(field, "operand_type", field).items()},
}

# The functions of VALUES.
FUNCTIONS = "\n#include <gpubpf_floats.h>\n"

"""The values of loads, stores, atomics and instructions: what expressions may name, its C text, and numbers on the host.

eBPF has no floating point, so a program looks at bits. Bits of unknown type (b16, b32, b64) are interpreted as the floating-point type
of their size. Integers are not, because many integers would look like NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpubpf.ebpf.bytecode import OPERANDS
from gpubpf.record import Record


class Value(Record):
    """A name, or a function of a name. c: its C text. fields: the context's fields that it reads."""

    c: str
    fields: tuple[str, ...]


def _of(name: str, *whole: str) -> dict[str, Value]:
    """Return the names for a value: its first element, and whether any of its elements is NaN, or infinite.

    whole: names of the fields with the value's type, its first 8 bytes and, for values that may be longer, its next 8 bytes."""
    arguments = ", ".join([*(f"ctx_{field}" for field in whole), "0ull"][:3])
    return {
        name: Value(f"gpu_element(ctx_{whole[0]}, ctx_{whole[1]})", whole[:2]),
        f"isnan({name})": Value(f"gpu_isnan({arguments})", whole),
        f"isinf({name})": Value(f"gpu_isinf({arguments})", whole),
    }


# Names that gputrace can show as floating-point numbers → fields with their types.
ELEMENTS = {"value": "type", "old": "type", **dict.fromkeys(OPERANDS, "operand_type")}
VALUES: Mapping[str, Value] = {
    **_of("value", "type", "low", "high"),
    **_of("old", "type", "old_low", "old_high"),
    **{name: one for field in OPERANDS for name, one in _of(field, "operand_type", field).items()},
}

# The header that defines the functions in VALUES.
FUNCTIONS = "\n#include <gpubpf_floats.h>\n"

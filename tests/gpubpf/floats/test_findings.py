"""What nansnoop makes of the records in its map, which the traced program can overwrite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpubpf.ebpf.bytecode import FLOAT_OPERATIONS, TYPES
from gpubpf.floats.findings import first_of

RECORD = np.dtype(
    [
        *((name, "u8") for name in ("order", "launch", "low", "high")),
        ("operand", "u8", 4),
        ("block", "u4", 3),
        ("thread", "u4", 3),
        *((name, "u4") for name in ("type", "operand_type", "operands", "operation")),
    ]
)
F16, F32, S32 = (TYPES.index(name) for name in ("f16", "f32", "s32"))
ADD, CVT, MMA = (FLOAT_OPERATIONS.index(name) for name in ("add", "cvt", "mma"))


def record(**fields: Any) -> Any:
    made = np.zeros(1, RECORD)
    for name, value in fields.items():
        made[0][name] = value
    return made[0]


@pytest.mark.parametrize(
    ("kind", "fields", "value", "element", "operands"),
    [
        ("nan", {"type": F32, "low": 0xFFC00000, "operation": MMA, "operands": 3}, "nan", 0, ()),
        ("inf", {"type": F32, "high": 0x7F800000 << 32, "operation": MMA, "operands": 3}, "inf", 3, ()),
        (
            "denormal",
            {"type": F32, "low": 1, "operand_type": S32, "operation": CVT, "operands": 1, "operand": [2**32 - 2, 0, 0, 0]},
            *("1.4013e-45", 0, ("-2",)),
        ),
        (
            "overflow",
            {"type": F16, "low": 0xFC00 << 16, "operand_type": F16, "operands": 2, "operation": ADD}
            | {"operand": [0xFBFF << 16, 0x3C000000, 0, 0]},
            *("-inf", 1, ("-65504", "1")),
        ),
    ],
)  # fmt: skip
def test_the_first_element_of_the_kind_is_shown(
    kind: str, fields: dict[str, Any], value: str, element: int, operands: tuple[str, ...]
) -> None:
    found = first_of(record(**fields), kind)
    assert found is not None and (found.value, found.element, found.operands) == (value, element, operands)


@pytest.mark.parametrize(
    "fields",
    [
        {"type": 99, "low": 0x7FC00000},
        {"type": S32, "low": 0x7FC00000},
        {"type": F32, "operand_type": 2**32 - 1, "low": 0x7FC00000},
        {"type": F32, "low": 0x3F800000},  # the kind is another one
        {"type": F32},
    ],
)
def test_an_impossible_record_is_left_out(fields: dict[str, int]) -> None:
    assert first_of(record(**fields), "nan") is None
    whole = record(type=F32, low=0x7FC00000, operands=2**32 - 1, operation=77)
    assert first_of(whole, "nan") is not None

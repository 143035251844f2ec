"""What gpurun shows of maps with a copy for each kernel and launch shape."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gpubpf import names
from gpubpf.objects.report import MAP, Contents

OWNER = {"pid": 1, "comm": "app", "gpu": 0}


def contents(mangled: str, values: list[int]) -> Contents:
    definition: Any = SimpleNamespace(name="runs", kind="thread_array")
    kernel = {
        "kernel": names.demangle(mangled).short,
        "mangled": mangled,
        "grid": [2, 1, 1],
        "block_dim": [len(values) // 2, 1, 1],
        "launches": 1,
    }
    return Contents(definition, OWNER, kernel, [(0, values)], "thread")


def test_instantiations_of_a_template_are_told_apart() -> None:
    found = [contents("_Z4fillIiEvPT_", [2, 2]), contents("_Z4fillIdEvPT_", [1, 1])]
    labels = names.labels(one.kernel["mangled"] for one in found)
    assert [list(one.lines(labels)) for one in found] == [
        [
            "runs (thread array); app (pid 1)",
            f"  of fill<{type_}>({type_}*), grid 2 x 1 x 1, block 1 x 1 x 1",
            f"  0: threads 0-1: {value}",
        ]
        for type_, value in (("int", 2), ("double", 1))
    ]
    rows = [dict(zip(MAP.columns, row, strict=True)) for one in found for row in one.rows()]
    assert [(row["mangled"], row["unit"], row["value"]) for row in rows] == [
        ("_Z4fillIiEvPT_", 0, "2"),
        ("_Z4fillIiEvPT_", 1, "2"),
        ("_Z4fillIdEvPT_", 0, "1"),
        ("_Z4fillIdEvPT_", 1, "1"),
    ]
    assert (rows[0]["grid_x"], rows[0]["block_dim_x"]) == (2, 1)


def test_a_map_of_all_kernels_has_no_shape() -> None:
    definition: Any = SimpleNamespace(name="total", kind="array")
    (row,) = Contents(definition, OWNER, {}, [(0, 5)]).rows()
    assert dict(zip(MAP.columns, row, strict=True)) == dict.fromkeys(MAP.columns) | OWNER | {
        "map": "total",
        "key": "0",
        "value": "5",
    }

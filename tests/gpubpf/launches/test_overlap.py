"""How long copies and kernels ran at once, against a count of nanoseconds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from gpubpf.agent.definitions import Kind, Vendor
from gpubpf.launches import overlap
from gpubpf.launches.dependencies import NONE
from gpubpf.launches.overlap import Overlap
from gpubpf_properties import generated

UNKNOWN = (NONE, NONE)


def view(
    *operations: tuple[int, Kind, tuple[int, int]], process: int = 0, vendor: Vendor = Vendor.NVIDIA
) -> Any:
    """Operations: GPU, kind, (start, end)."""
    gpus, kinds, times = zip(*operations, strict=True)
    spans = np.array(times, np.int64)
    columns = SimpleNamespace(
        process=np.full(len(gpus), process), gpu=np.array(gpus),
        processes=[SimpleNamespace(pid=70 + n, number=n + 1, vendor=vendor) for n in range(process + 1)],
    )  # fmt: skip
    return SimpleNamespace(
        columns=columns, ops=SimpleNamespace(kind=np.array(kinds), start=spans[:, 0], end=spans[:, 1])
    )


def of(*views: Any) -> list[dict[str, Any]]:
    found = Overlap()
    for one in views:
        found.add(one, np.arange(len(one.ops.kind)))
    return found.records()


def said(*views: Any) -> str:
    return "\n".join(overlap.lines(of(*views)))


def test_a_copy_beside_a_kernel() -> None:
    both = view((0, Kind.KERNEL, (1000, 5000)), (0, Kind.H2D, (4000, 8000)), (0, Kind.MEMSET, (0, 9000)))
    assert of(both) == [
        {
            "gpu": 0,
            "vendor": "nvidia",
            "copies": 1,
            "copies_untimed": 0,
            "kernels_untimed": 0,
            "copy_ns": 4000,
            "overlap_ns": 1000,
        }
    ]
    assert said(both) == "copies: 4.00 us; kernels ran for 25 % of it (1.00 us)"


def test_the_first_gpu_of_each_vendor_is_another_one() -> None:
    kernel, copy = (0, Kind.KERNEL, (0, 10)), (0, Kind.H2D, (5, 15))
    both = of(view(kernel), view(copy), view(copy, process=1, vendor=Vendor.AMD))
    assert [(one["vendor"], one["gpu"], one["overlap_ns"]) for one in both] == [
        ("nvidia", 0, 5),
        ("amd", 0, 0),
    ]
    assert [line.partition(":")[0] for line in overlap.lines(both)] == [
        "copies on NVIDIA GPU 0",
        "copies on AMD GPU 0",
    ]


def test_what_is_not_known_is_null() -> None:
    kernel, copy = (0, Kind.KERNEL, (0, 10)), (0, Kind.D2H, (5, 15))
    ((no_copy,), (no_kernel,)) = (
        of(view(kernel, (0, Kind.H2D, UNKNOWN))),
        of(view(copy, (0, Kind.KERNEL, UNKNOWN))),
    )
    assert (no_copy["copy_ns"], no_copy["overlap_ns"], no_copy["copies_untimed"]) == (None, None, 1)
    assert (no_kernel["copy_ns"], no_kernel["overlap_ns"], no_kernel["kernels_untimed"]) == (10, None, 1)
    assert (
        said(view(copy, (0, Kind.KERNEL, UNKNOWN)))
        == "copies: overlap with kernels unknown; not timed: 1 kernel"
    )
    some = view(kernel, copy, (0, Kind.H2D, UNKNOWN), (0, Kind.H2D, UNKNOWN))
    assert said(some) == "copies: 10 ns; kernels ran for 50 % of it (5 ns); not timed: 2 copies"
    assert of(view(kernel)) == [] and of(view((0, Kind.H2H, (0, 10)))) == []
    assert of(view(copy))[0]["overlap_ns"] == 0


def test_each_gpu_and_process_has_its_own() -> None:
    one = view((0, Kind.KERNEL, (0, 10)), (1, Kind.H2D, (0, 10)), (1, Kind.KERNEL, (8, 20)))
    other = view((1, Kind.H2D, (100, 110)), (0, Kind.D2D, (5, 6)), process=1)
    assert [(r["gpu"], r["copies"], r["copy_ns"], r["overlap_ns"]) for r in of(one, other)] == [
        (0, 1, 1, 0),
        (1, 2, 20, 2),
    ]
    assert said(one, other).splitlines()[1] == "copies on GPU 1: 20 ns; kernels ran for 10 % of it (2 ns)"


KINDS = st.sampled_from((Kind.KERNEL, Kind.H2D))
OPERATIONS = st.lists(
    st.tuples(KINDS, st.integers(0, 1000), st.integers(0, 100)), min_size=1, max_size=20
)  # kind, start, ns


@generated(60, parts=st.lists(OPERATIONS, min_size=1, max_size=8), in_order=st.booleans())
def test_it_is_what_counting_gives(parts: list[Any], in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    busy, views, begin = {Kind.KERNEL: set[int](), Kind.H2D: set[int]()}, [], 0
    for part in parts:
        spans = [(kind, begin + start, begin + start + ns) for kind, start, ns in part]
        for kind, start, end in spans:
            busy[kind] |= set(range(start, end))
        if in_order:
            spans.sort(key=lambda span: span[1])
            begin = max(end for _, _, end in spans)
        views.append(view(*((0, kind, times) for kind, *times in spans)))
    copies, kernels = busy[Kind.H2D], busy[Kind.KERNEL]
    with monkeypatch.context() as patched:
        if in_order:  # the older half is added up when there are many
            patched.setattr(overlap, "MOST", 8)
        for record in of(*views):
            assert (record["copy_ns"], record["overlap_ns"]) == (len(copies), len(copies & kernels))


def test_a_copy_alone() -> None:
    assert said(view((0, Kind.H2D, (0, 1500)))) == "copies: 1.50 us; no kernel ran meanwhile"

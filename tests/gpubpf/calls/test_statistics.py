"""Sums that the tool makes of events, and the list of GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from gpubpf.calls import arrays
from gpubpf.calls.statistics import merge_sums, sums_of_events
from gpubpf.gpus.hip_devices import HipDevices

EVENT = np.dtype(
    [
        *((name, "<u8") for name in ("start_ns", "end_ns", "result", "kernel", "gap_ns", "gap_off_ns")),
        ("spent", [(name, "<u8") for name in ("preempted_ns", "blocked_ns", "io_ns", "fault_ns")]),
        *((name, "<u4") for name in ("tgid", "function")),
        *((name, "u1") for name in ("failed", "after")),
    ]
)
SUM = np.dtype(
    [
        *(("tgid", "<u4"), ("function", "<u4"), ("kernel", "<u8")),
        *((name, "<u8") for name in ("count", "errors", "ns", "largest_ns", "off_ns")),
        *((name, "<u8") for name in ("gaps", "gap_ns", "gap_largest_ns", "gap_off_ns", "error")),
        *((name, "<u4", arrays.BUCKETS) for name in ("latency", "gap")),
    ]
)


def test_calls_that_come_in_parts_add_up_to_the_same() -> None:
    random = np.random.default_rng(1)
    events = np.zeros(1000, EVENT)
    for name, end in (("tgid", 3), ("function", 4), ("kernel", 5), ("failed", 2), ("after", 2)):
        events[name] = random.integers(0, end, len(events))
    events["end_ns"] = random.integers(0, 1 << 30, len(events))
    events["gap_ns"] = random.integers(0, 1 << 30, len(events))
    events["spent"]["blocked_ns"] = events["end_ns"] // 2
    events["result"] = events["failed"] * random.integers(1, 900, len(events))
    whole, parts = sums_of_events(events, SUM), np.empty(0, SUM)
    for start in range(0, len(events), 70):
        parts = merge_sums([parts, sums_of_events(events[start : start + 70], SUM)])
    assert whole["count"].sum() == 1000 and (whole == parts).all()


def test_devices_are_asked_for_without_what_lies_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "packages", tmp_path / "here"
    (there / "hip").mkdir(parents=True)
    here.mkdir()
    (there / "hip" / "__init__.py").write_text(
        "from types import SimpleNamespace as S\n"
        "hip = S(hipGetDeviceCount=lambda: (0, 1), hipGetDeviceProperties=lambda p, n: (0,),\n"
        "        hipDeviceProp_t=lambda: S(name=b'MI\\0', gcnArchName=b'gfx', totalGlobalMem=9, multiProcessorCount=3))\n"
    )
    for name in ("json", "hip"):
        (here / f"{name}.py").write_text("open('taken', 'w')\n")
    monkeypatch.setenv("PYTHONPATH", str(there))
    monkeypatch.syspath_prepend(str(there))
    monkeypatch.delitem(sys.modules, "hip", raising=False)
    monkeypatch.chdir(here)
    inventory = HipDevices()
    found = inventory.devices(10)
    inventory.close()
    assert not (here / "taken").exists()
    assert found == [{"gpu": 0, "name": "MI", "architecture": "gfx", "memory_bytes": 9, "compute_units": 3}]

"""gputop on the embedded AMD device: shares, copies and memory of unmodified programs, on AMD's own runtime."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import hipsim_device
from hipsim_device import program

measured = functools.partial(hipsim_device.measured, "gputop")


def of_type(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["type"] == kind]


def test_kernels_that_overlap_count_once(tmp_path: Path) -> None:
    """timeline.hip prints when each kernel began and ended by the clock that the kernel read."""
    records, done = measured(tmp_path / "out", "--clock", "virtual", "--", program("timeline"))
    assert done.returncode == 0, done.stderr
    spans = []
    for line in done.stdout.splitlines():
        *_, began, ended = line.split()
        if began.isdigit() and ended.isdigit():
            spans.append((int(began), int(ended)))
    assert len(spans) > 5
    busy, until = 0, 0
    for began, ended in sorted(spans):
        busy += max(0, ended - max(began, until))
        until = max(until, ended)
    (one,) = of_type(records, "process")
    assert (one["vendor"], one["launches"]) == ("amd", len(spans))
    # A kernel begins some instructions before it reads the clock, and ends some after.
    assert busy < one["busy_ns"] < busy + 100 * len(spans)
    (kernel,) = one["kernels"]
    total = sum(ended - began for began, ended in spans)
    assert total < kernel["gpu_ns"] < total + 100 * len(spans)
    assert kernel["gpu_ns"] > one["busy_ns"], "some of them overlap"
    assert one["waits"] > 0 and records[-1]["lost"] == 0


def test_each_gpu_has_a_row(tmp_path: Path) -> None:
    """devices.hip copies 5,000 ints to each of two GPUs, and runs a kernel on each."""
    records, done = measured(tmp_path / "out", "--", program("devices"), HIPSIM_DEVICES="2")
    assert done.returncode == 0, done.stderr
    rows = {one["gpu"]: one for one in of_type(records, "process")}
    assert sorted(rows) == [one["gpu"] for one in of_type(records, "gpu")] == [0, 1]
    for one in rows.values():
        assert one["launches"] == sum(kernel["launches"] for kernel in one["kernels"]) > 0
        assert one["busy_ns"] > 0 and one["copies_bytes"] >= 20_000

"""launchlate on the embedded AMD device: when kernels of unmodified programs start, and what they waited for, on AMD's own runtime."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import cudasim_device
import hipsim_device
from hipsim_device import ROOT, environment, program

measured = functools.partial(hipsim_device.measured, "launchlate")
WAVES = {"gfx906": 64, "gfx90a": 64, "gfx1030": 32}
GPUS = tuple(WAVES)
BYTES = 1 << 20
PARTS = ("api_ns", "wait_ns", "overhead_ns")
ROUND = ["work", "small", "behind_event", "behind_copy"]  # the kernels of one turn of latency.hip's loop


def of_type(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["type"] == kind]


def launches(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(of_type(records, "launch"), key=lambda one: one["launch"])


def test_a_kernel_whose_failure_ends_the_program_does_not_run_any_more(tmp_path: Path) -> None:
    records, done = measured(tmp_path / "out", "-v", "--", program("faults"), "null")
    assert done.returncode == 134 and "ended while a kernel was running or had failed" in done.stderr
    (summary,) = of_type(records, "summary")
    assert (summary["launches_running"], summary["launches_lost_by_exit"]) == (0, 1)
    (launch,) = launches(records)
    assert launch["kernel"] == "readOutside" and (launch["running"], launch["end_ns"]) == (False, None)


@pytest.mark.every(6)
@pytest.mark.parametrize("gpu", GPUS)
def test_parts_of_the_latency(tmp_path: Path, gpu: str) -> None:
    """On the virtual clock: what each kernel waited for, and until when; how long copies and kernels lasted."""
    app = program("latency", gpu=gpu)
    records, done = measured(tmp_path / "out", "-v", "--timeline", "--clock", "virtual", "--", app)
    assert done.returncode == 0, done.stderr
    (summary,) = of_type(records, "summary")
    assert (summary["launches_seen"], summary["launches_instrumented"]) == (18, 18)
    assert summary["launches_timed"] == {"device": 18} and summary["lost"] == 0
    all_ = launches(records)
    assert [one["kernel"] for one in all_] == ["small"] * 2 + ROUND * 4
    for one in all_:
        assert (one["vendor"], one["wave"], one["clock_error_ns"]) == ("amd", WAVES[gpu], 0)
        assert one["latency_ns"] == one["start_ns"] - one["call_ns"] == sum(one[part] for part in PARTS)
        assert one["exec_ns"] == one["end_ns"] - one["start_ns"]
        assert one["api_ns"] == one["return_ns"] - one["call_ns"]
    copies = [op for op in of_type(records, "op") if op["op"] == "h2d" and op["bytes"] == BYTES]
    assert [op["dur_ns"] for op in copies] == [-(-BYTES // 10)] * 4  # 10 bytes a ns
    assert {(op["method"], op["on"]) for op in copies} == {("rocr", "gpu")}
    for turn, took in enumerate(map(int, done.stdout.split()[:4])):
        work, small, event, copied = all_[2 + 4 * turn : 6 + 4 * turn]
        assert (
            took < work["exec_ns"] < took + 60
        )  # instructions of the kernel before and after it reads its clock
        assert work["waited_for"] is None and work["wait_ns"] == 0
        copy = copies[turn]
        ended = copy["t_ns"] + copy["dur_ns"]
        for one, before, name, certain in (
            (small, work["end_ns"], {"kind": "kernel", "name": "work"}, True),
            (event, small["end_ns"], {"kind": "event", "name": "small", "of": "kernel"}, True),
            (copied, ended, {"kind": "copy", "name": "h2d"}, False),
        ):
            if not certain and before <= one["return_ns"]:  # the copy was faster than the host
                assert (one["wait_ns"], one["waited_for"]) == (0, None)
                continue
            assert one["wait_ns"] == before - one["return_ns"] > 0
            assert 0 <= one["overhead_ns"] == one["start_ns"] - before < 100
            assert one["waited_for"] == name
    (queues,) = {tuple(sorted({one["stream"] for one in all_}))}
    assert len(queues) == 2 and "0x0" not in queues  # the handles of HIP's streams
    assert not {op["op"] for op in of_type(records, "op")} & {"event"}  # signals are not the program's events


def test_memsets_and_copies_of_every_kind(tmp_path: Path) -> None:
    """HIP sets memory and copies within the device by kernels of its own, and makes small copies on the CPU."""
    words = ("-v", "--timeline", "--clock", "virtual", "--", program("operations"))
    records, done = measured(tmp_path / "out", *words)
    assert done.returncode == 0, done.stderr
    ops = [(one["op"], one["bytes"]) for one in of_type(records, "op") if one["op"] not in ("kernel", "api")]
    assert sorted(ops) == sorted(
        [
            ("memset", BYTES),
            ("memset", 4096),
            ("h2d", BYTES),
            ("d2h", BYTES),
            ("d2h", BYTES),
            ("d2h", 4),
            ("d2d", BYTES),
        ]
    )
    assert {one["name"] for one in of_type(records, "op") if one["op"] == "kernel"} == {"work"}
    assert [one["waited_for"] and one["waited_for"]["kind"] for one in launches(records)] == [
        None, None, "memset", "copy", "copy", "event"
    ]  # fmt: skip
    assert {one["wave"] for one in records if "gpu" in one} == {64}


@pytest.mark.every(2)
def test_kernels_without_a_probe_are_timed_by_rocr(tmp_path: Path) -> None:
    """What a launch waited for is known, although only the launch has a probe."""
    app = program("latency")
    words = ("-v", "--timeline", "--clock", "virtual", "--kernel", "small", "--kernel", "behind*", "--", app)
    records, done = measured(tmp_path / "out", *words)
    assert done.returncode == 0, done.stderr
    own = [op for op in of_type(records, "op") if op["name"] == "work"]
    took = [int(line) for line in done.stdout.split()[:4]]
    assert [op["method"] for op in own] == ["rocr"] * 4
    assert all(ns < op["dur_ns"] < ns + 60 for ns, op in zip(took, own, strict=True))
    all_ = launches(records)
    assert len(all_) == 14 and {one["method"] for one in all_} == {"device"}
    behind = [one for one in all_ if (one["waited_for"] or {}).get("name") == "work"]
    assert [one["wait_ns"] for one in behind] == [
        op["t_ns"] + op["dur_ns"] - one["return_ns"] for op, one in zip(own, behind, strict=True)
    ]


def test_what_the_agent_does_in_a_call_is_overhead(tmp_path: Path) -> None:
    """HIP loads a kernel's code at its first launch. There the agent waits for the copy, which is in no cache."""
    words = ("-v", "--clock", "real", "--", program("latency"))
    records, done = measured(tmp_path / "out", *words, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    seen, first = int(done.stdout.split()[4]), launches(records)[0]
    (summary,) = of_type(records, "summary")
    assert first["kernel"] == "small" and summary["overhead"]["hooks_ns"] > 0
    assert 0 < first["api_ns"] < 0.9 * seen  # making the copy takes several times as long as HIP's own part


@pytest.mark.parametrize("hostile", ["0", "1"])
def test_streams_events_graphs_and_callbacks(tmp_path: Path, hostile: str) -> None:
    """On the real clock: each launch has its times, in a program with all that HIP offers for them."""
    app = program("streams")
    records, done = measured(
        tmp_path / "out", "-v", "--stacks", "--clock", "real", "--", app, HIPSIM_HOSTILE=hostile
    )
    assert done.returncode == 0, done.stderr
    (summary,) = of_type(records, "summary")
    seen, all_ = summary["launches_seen"], launches(records)
    assert len(all_) == seen == summary["launches_instrumented"] > 10
    assert summary["launches_timed"] == {"device": seen} and summary["lost"] == 0
    for one in all_:
        error = one["clock_error_ns"]
        assert one["call_ns"] <= one["return_ns"] and one["call_ns"] <= one["start_ns"] + error
        assert any("main" in frame for frame in one["stack"]), one["stack"]
        if one["wait_ns"] is not None:
            assert one["latency_ns"] == sum(one[part] for part in PARTS)
    assert summary["overhead"]["hooks"] >= 10


def test_many_threads(tmp_path: Path) -> None:
    """Each of eight threads launches in a stream of its own; there are fewer queues."""
    app = program("serves")
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "launchlate.py", "-s", "--clock", "real", "--", app],
        input="threads 8 200\n", capture_output=True, text=True, timeout=300, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "counted 1,600 of 1,600 matching launches (1,600 in total)" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("tiny")]
    assert {row[1] for row in rows} == {"queue"} and 1 < len({row[2] for row in rows}) <= 4
    assert sum(int(row[3]) for row in rows) == 1600


@pytest.mark.every(6)
def test_one_table_for_both_vendors(tmp_path: Path) -> None:
    hipsim_device.libraries()
    cudasim_device.libraries()
    both = f"{cudasim_device.program('streams')} >/dev/null & {program('latency')} >/dev/null & wait"
    records, done = measured(tmp_path / "out", "--", "sh", "-c", both)
    assert done.returncode == 0, done.stderr
    kernels = {row["vendor"]: set() for row in of_type(records, "kernel")}
    for row in of_type(records, "kernel"):
        kernels[row["vendor"]].add(row["kernel"])
    assert set(kernels) == {"amd", "nvidia"} and kernels["amd"] == {"small", *ROUND}
    words = [sys.executable, str(ROOT / "tools" / "launchlate.py"), "--", "sh", "-c", both]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 0, done.stderr
    assert " AMD 0 " in done.stdout and " NVIDIA 0 " in done.stdout, done.stdout


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ((), {"early": 20, "tile": 1, "some": 1, "waits": 1}),
        (("--kernel", "__amd_rocclr_fill*"), {"__amd_rocclr_fillBufferAligned": 2}),
    ],
)
def test_kernels_of_hip_itself_are_measured_only_by_name(
    tmp_path: Path, choice: tuple[str, ...], expected: dict[str, int]
) -> None:
    """points.hip launches 23 kernels, and fills memory twice."""
    records, done = measured(tmp_path / "out", "-v", *choice, "--", program("points"))
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    assert Counter(one["kernel"] for one in launches(records)) == expected
    (summary,) = of_type(records, "summary")
    assert summary["launches_seen"] == 25 and summary["launches_matched"] == sum(expected.values())

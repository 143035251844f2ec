"""kernelretsnoop on the embedded AMD device: when threads of unmodified programs leave their kernels, on AMD's own runtime."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cudasim_device
import hipsim_device
from hipsim_device import ROOT, environment, libraries, program

measured = functools.partial(hipsim_device.measured, "kernelretsnoop")
TOOL = [sys.executable, str(ROOT / "tools" / "kernelretsnoop.py")]
GPUS = ("gfx906", "gfx90a", "gfx1030")
WAVE = {"gfx906": 64, "gfx90a": 64, "gfx1030": 32}
THREADS = 4 * 192


def of_type(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["type"] == kind]


def test_a_kernel_that_fails_has_no_exits(tmp_path: Path) -> None:
    """ROCr ends the program after a memory fault."""
    records, done = measured(tmp_path / "out", "--", program("faults"), "null")
    assert done.returncode == 134 and not of_type(records, "kernel")
    assert "ended while a kernel was running or had failed; results may be incomplete" in done.stderr


@pytest.mark.every(6)
@pytest.mark.parametrize("gpu", GPUS)
def test_times_are_between_those_that_threads_read(tmp_path: Path, gpu: str) -> None:
    """On the virtual clock, where each instruction of a wave takes 1 ns: known to a few instructions."""
    records, done = measured(tmp_path / "out", "-e", "--", program("leaves", gpu=gpu))
    assert done.returncode == 0, done.stderr
    (summary,) = of_type(records, "summary")
    assert summary["launches_instrumented"] == 2 and summary["not_instrumented"] == {}
    assert (summary["records"], summary["records_unknown"], summary["lost"]) == (2 * THREADS, 0, 0)
    read = [int(line) for line in done.stdout.split()]
    staged, together = (
        {
            one["block"][0] * 192 + one["thread"][0]: one
            for one in of_type(records, "exit")
            if one["kernel"] == kernel
        }
        for kernel in ("staged", "together")
    )
    assert sorted(staged) == sorted(together) == list(range(THREADS))
    near = 30  # instructions between leaving and reading the clock, or the other way round
    for n in range(0, THREADS, 4):
        begin, middle, end = read[3 * n : 3 * n + 3]
        assert begin + 1000 < middle < end - 1000
        odd, half, last = ({staged[n + lane]["ts_ns"] for lane in lanes} for lanes in ((1, 3), (2,), (0,)))
        assert len(odd) == 1 and begin - near < min(odd) < begin
        assert middle - near < min(half) < middle
        assert end < min(last) < end + near
    later = {together[n]["ts_ns"] - read[3 * THREADS + n] for n in range(THREADS)}
    assert len(later) == 1 and 0 < min(later) < near
    assert all(one["lane"] == n % 192 % WAVE[gpu] for n, one in staged.items())


@pytest.mark.every(6)
@pytest.mark.parametrize("gpu", GPUS)
def test_report(tmp_path: Path, gpu: str) -> None:
    """Every second lane is late, on both clocks: as single records, and added up on the GPU."""
    app = program("leaves", "-gline-tables-only", gpu=gpu)
    for clock in ("virtual", "real"):
        records, done = measured(tmp_path / clock, "--clock", clock, "--kernel", "staged", "--", app)
        assert done.returncode == 0, done.stderr
        (kernel,) = of_type(records, "kernel")
        lanes = {lane["lane"]: lane for lane in of_type(records, "lane")}
        assert (kernel["launches"], kernel["exits"], kernel["launches_whole"]) == (1, THREADS, 1)
        assert sorted(lanes) == list(range(WAVE[gpu]))
        late = [lanes[lane]["late_ns"]["mean"] for lane in range(4)]
        # On the real clock, the machine may be busy with something else while a wave runs.
        assert late[1] == late[3] == 0 and 0 < late[2] < (0.8 if clock == "virtual" else 1) * late[0]
        for number, lane in lanes.items():
            assert lane["exits"] == 4 * 192 // WAVE[gpu], clock
            assert lane["late_ns"] == lanes[number % 4]["late_ns"]
        assert lanes[0]["source"] == "leaves.hip:21"
        assert lanes[2]["source"] in ("leaves.hip:15", "leaves.hip:16")
        (summary,) = of_type(records, "summary")
        assert summary["lost"] == 0


@pytest.mark.every(6)
@pytest.mark.parametrize("tool", ["kernelretsnoop", "threadhist"])
def test_a_cuda_and_a_hip_process(tmp_path: Path, tool: str) -> None:
    """One command, one table; every device record has its vendor."""
    libraries()
    cudasim_device.libraries()
    both = f"{cudasim_device.program('streams')} >/dev/null & {program('leaves')} >/dev/null & wait"
    words = [sys.executable, str(ROOT / "tools" / f"{tool}.py")]
    done = subprocess.run(
        [*words, "--", "sh", "-c", both], capture_output=True, text=True, timeout=300, env=environment()
    )
    assert done.returncode == 0, done.stderr
    table = [line.split() for line in done.stdout.split("\n\n")[1].splitlines()]
    assert {(row[2], row[3]) for row in table[1:]} == {("AMD", "0"), ("NVIDIA", "0")}, done.stdout
    assert "AMD GPU 0" in done.stdout and "NVIDIA GPU 0" in done.stdout
    out = tmp_path / "out"
    subprocess.run(
        [*words, "--json", "-o", out, "--", "sh", "-c", both], check=True, timeout=300, env=environment()
    )
    records = [json.loads(line) for line in out.read_text().splitlines()]
    device = [one for one in records if one["type"] in ("kernel", "lane", "thread")]
    assert {(one["vendor"], one["wave"]) for one in device} == {("nvidia", 32), ("amd", 64)}
    assert {one["kernel"] for one in device if one["vendor"] == "amd"} == {"staged", "together"}


def test_text(tmp_path: Path) -> None:
    """The words are AMD's; without line tables, places are offsets of instructions."""
    libraries()
    words = [*TOOL, "-v", "--kernel", "staged", "--", program("leaves")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment())
    text = " ".join(done.stdout.split())
    assert "of its wave" in text or "of their wave" in text or "the lanes of a wave exit" in text, done.stdout
    assert "lanes of a wave" in text and "waves of a block" in text and "warp" not in text
    assert "instruction +0x" in text and "PTX" not in text
    assert "times are those of its virtual clock" in done.stderr.replace("\n", " ")
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


@pytest.mark.every(6)
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("clock", ["virtual", "real"])
def test_results_stay(tmp_path: Path, gpu: str, clock: str) -> None:
    words = ("--clock", clock, "--", program("probed", gpu=gpu))
    records, done = measured(tmp_path / "out", *words, HIPSIM_HOSTILE="1")
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    found = {one["kernel"]: (one["launches"], one["exits"]) for one in of_type(records, "kernel")}
    assert found == {
        "uses_variables": (5, 5 * 1024),
        "sums": (20, 20 * 1024),
        "leaves_early": (1, 1024),
        "rows": (1, 192),
        "columns": (1, 192),
    }


@pytest.mark.every(6)
@pytest.mark.parametrize(
    "name", ["kernels", "streams", "cooperative", "devices", "output", "forks", "modules", "primitives"]
)
def test_programs_do_not_notice_the_tool(name: str, tmp_path: Path) -> None:
    """Graphs, callbacks, printf, barriers of whole grids, children, modules, sorting and scanning."""
    words = [program(name), *([program("store", "--genco")] if name == "modules" else [])]
    variables = environment(HIPSIM_DEVICES="2")
    alone, traced = (
        subprocess.run([*before, *words], capture_output=True, text=True, timeout=300, env=variables)
        for before in ((), (*TOOL, "--clock", "real", "-o", tmp_path / "out", "--"))
    )
    assert (alone.returncode, traced.returncode) == (0, 0), traced.stderr
    # Blocks print in any order.
    assert sorted(traced.stdout.splitlines()) == sorted(alone.stdout.splitlines())

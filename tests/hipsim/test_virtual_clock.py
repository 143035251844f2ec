"""The virtual clock of the embedded AMD device: how long everything takes, and that runs repeat exactly."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

import hipsim_device
from hipsim_device import ROOT, environment, program, run

LAUNCH = 1000  # ns of a launch call
COPY = 104858  # ns of 1 MiB at 10 bytes a ns, rounded up
HALF_COPY = 52429
FILL = 10486  # at 100 bytes a ns


@functools.cache
def output(**variables: str) -> str:
    done = run([program("timeline")], HIPSIM_CLOCK="virtual", **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_times() -> None:
    """By the clocks of the kernels, which are read some instructions after they begin and before they end."""
    began: dict[str, int] = {}
    ended: dict[str, int] = {}
    for line in output().splitlines():
        name, times = line.split(": ")
        first, last = map(int, times.split())
        began.setdefault(name, first)
        ended.setdefault(name, last)
    gap = began["more"] - ended["record"]  # between two kernels of a stream
    assert 0 < gap < 20

    def after(name: str, before: str) -> int:
        """How many ns after a kernel's end another one began."""
        return began[name] - ended[before] - gap

    assert after("idle a", "first") == LAUNCH
    assert began["idle b"] - began["idle a"] == LAUNCH  # the streams do not wait for each other
    assert after("after a", "idle a") == LAUNCH and after("behind b", "idle b") == 0
    assert after("waits", "record") == after("waits too", "waits") == 0
    assert after("after the event", "record") == LAUNCH  # the event, not the kernel behind it
    assert after("copied", "more") == COPY
    assert after("copied back", "more") == LAUNCH + HALF_COPY  # by another engine
    assert after("beside", "more") == 3 * LAUNCH
    assert after("set", "beside") == FILL
    assert 0 <= after("waited for the copy", "copied") - COPY - LAUNCH < 10  # HIP copies in parts
    assert began["beside deep"] - began["deep"] == 70 * LAUNCH  # the host does not wait for old events
    assert after("after the query", "queried") == LAUNCH
    assert after("behind the call", "before the call") == 0
    assert began["beside the call"] - began["before the call"] == 2 * LAUNCH
    assert after("after the call", "behind the call") == LAUNCH


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_times_do_not_depend_on_delays(seed: str) -> None:
    """Hostile mode delays queues, signals and waits."""
    assert output(HIPSIM_HOSTILE="1", HIPSIM_SEED=seed) == output()


def test_a_tool_does_not_change_the_times(tmp_path: Path) -> None:
    """And its own records repeat exactly, in all but the numbers of processes and addresses."""
    hipsim_device.libraries()
    runs = []
    for seed in "12":
        out = tmp_path / seed
        words = [ROOT / "tools" / "launchlate.py", "-v", "--timeline", "--clock", "virtual", "--json"]
        done = subprocess.run(
            [sys.executable, *words, "-o", out, "--", program("timeline")],
            capture_output=True, text=True, timeout=300,
            env=environment(HIPSIM_HOSTILE="1", HIPSIM_SEED=seed),
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, output()), done.stderr
        records = [json.loads(line) for line in out.read_text().splitlines()]
        assert {one["latency_ns"] - one["wait_ns"] for one in records if one["type"] == "launch"} == {LAUNCH}
        changing = ("pid", "tid", "stream")
        runs.append(
            [
                [(key, value) for key, value in record.items() if key not in changing]
                for record in records
                if record["type"] in ("launch", "op", "kernel")
            ]
        )
    assert runs[0] == runs[1] and len(runs[0]) > 200


def test_times_of_calls() -> None:
    """A launch of a graph is one launch, and copies take their time whether the device makes them or HIP itself does."""
    done = run([program("call_times")], HIPSIM_CLOCK="virtual")
    assert done.returncode == 0, done.stderr
    took = dict(line.split(": ") for line in done.stdout.splitlines())
    copies = {name: int(ns) for name, ns in took.items() if "h2" in name or "d2" in name}
    assert len(copies) == 16
    assert {name: ns for name, ns in copies.items() if ns != (COPY if "many" in name else 100)} == {}
    assert (took["few set"], took["many set"]) == ("10", str(FILL))
    assert took["kernel"] == took["graph of three"] == took["graph of two"] == str(LAUNCH)
    assert took["two graphs"] == str(2 * LAUNCH)
    began, ended = zip(*(map(int, took[f"kernel {i}"].split()) for i in range(5)), strict=True)
    assert began[0] == began[3] == began[4] == LAUNCH + 1  # after the first instruction
    assert began[1] - ended[0] == began[2] - ended[1] < 20
    # A wait for a function in a stream does not spin. CPU time of ten waits; before, each took 0.3 s.
    assert float(done.stderr.split()[0]) < 1.5


def test_times_of_events() -> None:
    """hipEventElapsedTime, from the first event on."""
    done = run([program("elapsed")], HIPSIM_CLOCK="virtual")
    assert done.returncode == 0, done.stderr
    took = [float(line) for line in done.stdout.split()]
    # A kernel starts at the return of its launch. It runs 4 instructions in each turn, and some before and after.
    assert [round(1e6 * ms) // 100 for ms in took] == [410, 810, 1210]


def test_rocr_is_initialized_again() -> None:
    """What belonged to the queues and signals of its first life is forgotten."""
    words = [hipsim_device.hsa_program("hsa_alone"), hipsim_device.code_object("seen"), "3"]
    done = run(words, HIPSIM_CLOCK="virtual")
    assert (done.returncode, done.stdout) == (0, "3840 of 3840\n"), done.stderr

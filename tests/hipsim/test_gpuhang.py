"""gpuhang on HIP programs, whose kernels hang in ways that are known beforehand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpuhang_runs
import hipsim_device

# What to launch: the verdict, and of each kind of place how many waves of 64 lanes are there.
PLANTED = {
    "barrier": ("spinning", {"spin": 2, "barrier": 2}),
    "lock": ("spinning", {"spin": 1, "exited": 1}),
    "blocks": ("spinning", {"spin": 2, "barrier": 2}),
    "flag": ("spinning", {"spin": 2, "barrier": 2, "exited": 2}),
    "loop": ("spinning", {"loop": 4}),
    "slow": ("running", {"loop": 4}),
    "pipeline": ("running", None),
}
WAVES = {"gfx906": 64, "gfx1030": 32}


@pytest.fixture(params=["gfx906", pytest.param("gfx1030", marks=pytest.mark.long)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HIPSIM_GPU", request.param)
    return str(request.param)


@pytest.mark.parametrize("what", PLANTED)
@pytest.mark.every(3)
def test_a_planted_hang_is_named_while_it_hangs(what: str, gpu: str, tmp_path: Path) -> None:
    verdict, waves = PLANTED[what]
    program = hipsim_device.program("hangs", "-gline-tables-only", gpu=gpu)
    number = "4000000000" if what == "slow" else "600"
    with gpuhang_runs.hanging(tmp_path, "--kernel", what, "--", program, what, number) as (tool, out):
        head, *places = gpuhang_runs.until_told(out, verdict, tool)
        assert tool.poll() is None  # as the program still runs
    assert (head["kernel"], head["vendor"], head["wave"]) == (what, "amd", WAVES[gpu])
    if waves is None:
        return
    if gpu == "gfx906":  # the blocks have 128 threads
        counted: dict[str, int] = {}
        for one in places:
            counted[one["kind"]] = counted.get(one["kind"], 0) + one["warps"]
        assert counted == waves
    for one in places:
        assert one["source"].startswith("hangs.hip:")
        assert (one["address"] is not None) == (one["kind"] == "spin")
    if what == "lock":  # twice by the same wave
        (spin,) = (one for one in places if one["kind"] == "spin")
        assert (spin["taken_by"]["block"], spin["taken_by"]["warp"]) == ([0, 0, 0], 0)
    if what == "barrier":
        (waiting,) = (one for one in places if one["kind"] == "barrier")
        assert {(one["block"][0], one["warp"]) for one in waiting["missing"]} == {(0, 1), (1, 1)}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_running_program_hangs(tmp_path: Path) -> None:
    program = hipsim_device.program("hangs", "-gline-tables-only")
    app = subprocess.Popen(
        [program, "lock", "600", "wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=hipsim_device.environment(),
    )
    try:
        assert app.stdin is not None and app.stdout is not None
        assert app.stdout.readline() == "hangs: ready\n"
        with gpuhang_runs.hanging(tmp_path, "-p", str(app.pid)) as (tool, out):
            assert tool.stderr is not None
            for note in tool.stderr:  # until all kernels are instrumented
                if f"attached to {app.pid}" in note and "not instrumented yet" not in note:
                    break
            app.stdin.write("\n")
            app.stdin.flush()
            head, *places = gpuhang_runs.until_told(out, "spinning", tool)
            app.kill()
            tool.wait(60)
            summary = gpuhang_runs.read(out)[-1]
    finally:
        app.kill()
        app.communicate()
    assert head["kernel"] == "lock"
    (spin,) = (one for one in places if one["kind"] == "spin")
    assert (spin["taken_by"]["block"], spin["taken_by"]["warp"]) == ([0, 0, 0], 0)
    assert (
        summary["type"] == "summary" and summary["overhead"]["drained_bytes"] < 1 << 20
    )  # not all of the empty maps


def test_kernels_that_end_are_not_reported_and_the_program_is_unchanged(tmp_path: Path) -> None:
    program = hipsim_device.program("hangs", "-gline-tables-only")
    done = subprocess.run(
        [sys.executable, gpuhang_runs.TOOL, "--device", "sim", "--check", "--", program, "slow", "1000"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("hangs: PASSED\nno launch ran for 10 s\n")


@pytest.mark.parametrize("hostile", ["0", "1"])
@pytest.mark.every(2)
def test_programs_after_loads_leave_locks_as_they_are(
    hostile: str, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIPSIM_HOSTILE", hostile)
    program = hipsim_device.program("locks", gpu=gpu)
    done = subprocess.run(
        [sys.executable, gpuhang_runs.TOOL, "--device", "sim", "--kernel", "locks", "--check", "--", program],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("locks: PASSED\n") and "counted 1 of 1 matching launches" in done.stdout

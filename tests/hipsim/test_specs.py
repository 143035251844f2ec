"""gpucount, gpudist and gputrace on the embedded AMD device: waves of 64 and of 32 lanes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpubpf.ebpf import clang, compile
from hipsim_device import measured, program

pytestmark = pytest.mark.skipif(
    not compile.usable() and clang.find() is None, reason="compiling a SPEC requires root and bcc, or clang"
)

# vectoradd 1000: 4 blocks of 256 threads; 1,000 of the 1,024 threads load twice and store once.
LANES = {"gfx906": 64, "gfx1030": 32}


@pytest.mark.parametrize("gpu", LANES)
def test_waves_are_counted_with_all_their_lanes(tmp_path: Path, gpu: str) -> None:
    lanes = LANES[gpu]
    waves = 1024 // lanes
    answers = {
        "kernel:vec*": (1, 1024),
        "entry:*": (waves, 1024),
        "block_begin:*": (4, 4),
        "block_end:* (block == 3)": (1, 1),
        "load:*:global": (2 * waves, 2000),
        "store:* (lane >= 16)": (waves - (lanes == 32), 1000 - 16 * waves + (8 if lanes == 32 else 0)),
        f"store:* (lane == {lanes - 1})": (1000 // lanes, 1000 // lanes),
        "store:* (popcount(active) < 50)": (1, 1000 % lanes) if lanes == 64 else (waves, 1000),
    }
    records, done = measured(
        "gpucount", tmp_path / "out", *answers, "--", program("vectoradd", gpu=gpu), 1000
    )
    assert (done.returncode, done.stdout) == (0, "1000 sums are right\n"), done.stderr
    counts = {one["spec"]: (one["count"], one["threads"]) for one in records if one["type"] == "count"}
    assert counts == answers
    assert {(one["vendor"], one["wave"]) for one in records if one["type"] == "count"} == {("amd", lanes)}


def test_values_and_events(tmp_path: Path) -> None:
    app = program("vectoradd")
    specs = ("store:*:u32:popcount(active), kernel", "entry:*:u32:lane / 32")
    records, done = measured("gpudist", tmp_path / "dist", "-C", *specs, "--", app, 1000)
    assert (done.returncode, records[-1]["lost"]) == (0, 0), done.stderr
    active, half = (one["values"] for one in records if one["type"] == "dist")
    assert active == {"40": 40, "64": 960} and half == {"0": 512, "1": 512}
    records, done = measured(
        *(
            "gputrace",
            tmp_path / "trace",
            'store:* (gthread == 999) "%u %u %s", lane, warp, kernel',
            "--",
            app,
            1000,
        )
    )
    assert done.returncode == 0, done.stderr
    (event,) = (one for one in records if one["type"] == "event")
    assert (event["block"], event["thread"], event["text"]) == ([3, 0, 0], [231, 0, 0], "39 3 vectorAdd")


@pytest.mark.every(2)
@pytest.mark.parametrize("gpu", LANES)
def test_arguments_of_kernels(tmp_path: Path, gpu: str) -> None:
    names = ", ".join(["args", *(f"arg{n}" for n in range(11))])
    spec = f'entry:* (lane == 0 && block == 0) "{" ".join(["%x"] * 12)}", {names}'
    records, done = measured("gputrace", tmp_path / "out", spec, "--", program("arguments", gpu=gpu))
    assert done.returncode == 0, done.stderr
    texts = {(one["kernel"], one["text"]) for one in records if one["type"] == "event"}
    pointer = done.stdout.strip().removeprefix("0x")
    given = f"{pointer} 64 3ff8000000000000 fd 200000007 fffe 30201 3e800000 ffffffffffffffff 1"
    assert texts == {("many", f"a {given} 0"), ("none", " ".join(["0"] * 12))}


@pytest.mark.every(3)
@pytest.mark.parametrize("gpu", ["gfx906", "gfx90a", "gfx1030"])
def test_instructions_are_counted_with_their_lanes(tmp_path: Path, gpu: str) -> None:
    """The only sum of floats is that of the vectors. A scalar instruction is executed by waves, so it is named but not counted."""
    waves = -(-1000 // LANES.get(gpu, 64))
    answers = {
        "instruction:*:v_add_f32": (waves, 1000),
        "instruction:*:v_add_f32* (lane < 8)": (waves, waves * 8),
        "instruction:*:v_add_f64": (0, 0),
        "instruction:*:s_endpgm": (0, 0),
    }
    records, done = measured(
        "gpucount", tmp_path / "out", *answers, "--", program("vectoradd", gpu=gpu), 1000
    )
    assert (done.returncode, done.stdout) == (0, "1000 sums are right\n"), done.stderr
    counts = {one["spec"]: (one["count"], one["threads"]) for one in records if one["type"] == "count"}
    assert counts == answers
    assert records[-1]["not_probed"] == {"s_endpgm": 1}


@pytest.mark.every(6)
@pytest.mark.parametrize("gpu", ["gfx906", "gfx90a", "gfx1030"])
def test_branches_are_counted_with_the_lanes_that_take_them(tmp_path: Path, gpu: str) -> None:
    """The only branch skips the sum in 24 threads, which are all in the last wave but those with a sum."""
    lanes = LANES.get(gpu, 64)
    specs = ("branch:*", "branch:* (taken)", "branch:* (taken == active)", "branch:* (popcount(taken) == 24)")
    records, done = measured("gpucount", tmp_path / "out", *specs, "--", program("vectoradd", gpu=gpu), 1000)
    assert (done.returncode, done.stdout) == (0, "1000 sums are right\n"), done.stderr
    counts = [(one["count"], one["threads"]) for one in records if one["type"] == "count"]
    assert counts == [(1024 // lanes, 1024), (1, lanes), (0, 0), (1, lanes)]
    assert records[-1]["not_probed"] == {}


LACKING = {
    "func:*": "function_entry",
    "store:* (isnan(value))": "value",
    "instruction:*:v_add_f32 (isnan(value))": "instruction with type",
}


@pytest.mark.every(6)
@pytest.mark.parametrize("spec", LACKING)
def test_points_that_amd_gpus_lack_are_said(tmp_path: Path, spec: str) -> None:
    point = LACKING[spec]
    notice = f"gpucount: note: kernels of AMD GPUs have no probes at {point} yet, which '{spec}' needs\n"
    for others in ((), ("entry:*",)):
        records, done = measured(
            "gpucount", tmp_path / "out", spec, *others, "--", program("vectoradd"), 1000
        )
        assert (done.returncode, done.stdout) == (0, "1000 sums are right\n"), done.stderr
        assert notice in done.stderr
        counts = [(one["spec"], one["threads"]) for one in records if one["type"] == "count"]
        assert counts == [(other, 1024) for other in others]
        why = {} if others else {f"kernels of AMD GPUs have no probes at {point} yet": 1}
        assert records[-1]["not_instrumented"] == why

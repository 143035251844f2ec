"""Programs that ran before the tool came: what they had loaded is measured, and they notice nothing (attach/before.cu)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda as cuda

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[3]
THREADS = 1024  # of each launch

pytestmark = [*cuda.needs_cuda, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]


@pytest.fixture(scope="module")
def program() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gpubpf-before-") as at:
        image = ["nvcc", "-fatbin", "-gencode", "arch=compute_75,code=compute_75"]
        cuda.run_nvcc([*image, "-o", "plain.fatbin", HERE / "before_plain.cu"], cwd=at)
        command = ["nvcc", "-arch=sm_75", "-cudart", "shared", "-o", "before", HERE / "before.cu"]
        cuda.run_nvcc([*command, "-L", cuda.LIBRARIES, "-lcuda"], cwd=at)
        yield Path(at) / "before"


@dataclass
class Seen:
    """What came of it: launches by kernel as the program counts them, and what the tool says of each interval."""

    launched: dict[str, int]
    wrong: int
    summary: dict[str, Any]
    kernels: list[dict[str, Any]] = field(default_factory=list)
    attached: list[dict[str, Any]] = field(default_factory=list)


def measured(
    program: Path,
    kind: str,
    enough: Callable[[list[dict[str, Any]]], bool],
    meanwhile: Callable[[list[dict[str, Any]]], None] | None = None,
    **environment: str,
) -> Seen:
    """Attaches to a program that is under way; has it end when `enough` says so of what was measured. `meanwhile` is
    called with the same, each time before. An idle program gets a line when all its copies are ready."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "lib")} | environment
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "cudasim.launcher", "--", program, kind],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
            )
        )  # fmt: skip
        stack.callback(target.kill)
        assert (
            target.stdin is not None and target.stdout is not None and target.stdout.readline() == "ready\n"
        )
        tool = stack.enter_context(
            subprocess.Popen(
                [sys.executable, ROOT / "tools" / "threadhist.py", "--json", "-p", str(target.pid), "0.2"],
                stdout=subprocess.PIPE, env=env,
            )
        )  # fmt: skip
        stack.callback(tool.kill)
        assert tool.stdout is not None
        timer = threading.Timer(100, tool.kill)
        timer.start()
        stack.callback(timer.cancel)
        records: list[dict[str, Any]] = []
        kernels: list[dict[str, Any]] = []
        left = False
        for line in tool.stdout:
            records.append(json.loads(line))
            if records[-1]["type"] == "kernel":
                kernels.append(records[-1])
            if kind == "idle" and records[-1]["type"] == "attached" and "waiting" not in records[-1]:
                target.stdin.write("\n")
                target.stdin.flush()
            if meanwhile is not None:
                meanwhile(kernels)
            if not left and enough(kernels):
                left = True
                target.stdin.close()
        assert tool.wait(60) == 0
        out = target.stdout.read()
        assert target.wait(60) == 0, out
        said = [line.split() for line in out.splitlines()]
    launched = {name: int(n) for _, name, n in (words for words in said if words[0] == "launches")}
    attached = [r for r in records if r["type"] == "attached"]
    return Seen(launched, int(said[-1][1]), records[-1], kernels, attached)


def check(seen: Seen, *names: str) -> None:
    assert seen.wrong == 0
    reasons = seen.summary["not_instrumented"]
    assert set(reasons) <= {"before ready"}, reasons
    assert seen.summary["launches_instrumented"] + sum(reasons.values()) == seen.summary["launches_seen"]
    assert seen.summary["launches_seen"] <= sum(seen.launched.values())
    assert {k["kernel"] for k in seen.kernels} == set(names)
    runs, launches = (sum(k[name] for k in seen.kernels) for name in ("runs", "launches"))
    assert runs == THREADS * launches
    assert launches == seen.summary["launches_instrumented"]


KINDS = {
    "runtime": ("add", "scale"),
    "module": ("plain_add",),
    "library": ("plain_add",),
    "threads": ("add",),
    "unload": ("plain_add", "other_add"),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_loaded_before_is_measured(program: Path, kind: str) -> None:
    names = KINDS[kind]
    seen = measured(program, kind, lambda kernels: {k["kernel"] for k in kernels} == set(names))
    check(seen, *names)


@pytest.mark.parametrize("hostile", ["0", "1"])
def test_who_launches_when_probes_are_live_is_measured_from_the_first_launch(
    program: Path, hostile: str
) -> None:
    seen = measured(
        program, "idle", lambda kernels: sum(k["launches"] for k in kernels) >= 100, CUDASIM_HOSTILE=hostile
    )
    check(seen, "add")
    assert seen.summary["launches_instrumented"] == seen.summary["launches_seen"] == 100
    # On a busy machine, copies may take longer than the tool waits for them: it says so, and again when they are ready.
    *early, last = (record.get("waiting") for record in seen.attached)
    assert last is None and all(early) and len(early) <= 1


@pytest.mark.parametrize("kernels", [(), ("--kernel", "add")])
def test_what_was_launched_before_is_not_said_to_be_nothing(program: Path, kernels: tuple[str, ...]) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT / "lib")}
    command = [sys.executable, "-m", "cudasim.launcher", "--", program, "idle"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as target:
        assert target.stdout is not None and target.stdout.readline() == "ready\n"
        tool = [sys.executable, ROOT / "tools" / "threadhist.py", "-d", "1", "-p", str(target.pid), *kernels]
        done = subprocess.run(tool, capture_output=True, text=True, env=env, timeout=60)
        target.communicate("\n", timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("counted nothing\n")
    assert done.stderr.endswith(
        "note: no kernel was launched after the tool attached; it does not see what was launched before\n"
    )


def test_a_driver_that_tells_kernels_and_functions_apart_by_itself(program: Path) -> None:
    check(measured(program, "library", bool, CUDASIM_HOSTILE="0"), "plain_add")


def test_a_program_that_always_has_more_to_do(program: Path) -> None:
    seen = measured(program, "busy", bool)  # intervals end while kernels run
    assert seen.wrong == 0 and seen.summary["lost"] == 0
    assert 0 < seen.summary["launches_instrumented"] < seen.launched["long_one"]


@pytest.mark.every(2)
def test_several_contexts_and_devices(program: Path) -> None:
    seen = measured(
        program, "contexts", lambda kernels: {k["gpu"] for k in kernels} == {0, 1}, CUDASIM_DEVICES="2"
    )
    check(seen, "plain_add")
    assert {k["gpu"] for k in seen.kernels} == {0, 1}


def test_graphs_of_before_are_counted_and_new_ones_measured(program: Path) -> None:
    seen = measured(program, "graphs", bool)
    check(seen, "add")
    assert seen.summary["graphs_before"] > 0


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", ["persistent", "capture"])
def test_what_must_not_be_waited_for_defers_the_copies(program: Path, kind: str, tmp_path: Path) -> None:
    """A kernel that does not end; a capture that the launching thread is in the middle of."""
    stop = tmp_path / "stop"

    def meanwhile(kernels: list[dict[str, Any]]) -> None:
        assert stop.exists() or not kernels

    timer = threading.Timer(5, stop.touch)  # well after the second that the tool waits before it says so
    timer.start()
    try:
        seen = measured(program, kind, bool, meanwhile, BEFORE_STOP=str(stop))
    finally:
        timer.cancel()
    check(seen, "add")
    assert seen.launched["add"] > 200
    first, second = seen.attached  # after a second, and when the copies are ready
    assert first["waiting"] > 0 and "waiting" not in second
    assert second["ts_ns"] - first["ts_ns"] > 100_000_000

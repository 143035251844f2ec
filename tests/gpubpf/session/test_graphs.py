"""A program that looks closely at its graphs sees its own functions and parameters alone, and all that graphs launch is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
from gpubpf.traced.device import LIBRARIES
from gpubpf.traced.measurement import Follow

ROOT = Path(__file__).resolve().parents[3]
TOOL = [sys.executable, str(ROOT / "tools/threadhist.py"), "--device", "sim", "--json"]
# What agent/graphs.cu launches: replays times kernel nodes that are enabled.
LAUNCHES = 3 * 3 + 3 + 2 + 3 + 2 + 2 + 2 * 4 + 3 + 4 + 4 * 4 + 2


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = ROOT / "tests/gpubpf/agent/graphs.cu"
    return gpubpf_cuda.build(source, tmp_path_factory.mktemp("graphs") / "graphs", f"-L{LIBRARIES}", "-lcuda")


def run(program: Path, out: Path, *options: str, **setting: str) -> tuple[str, list[dict[str, Any]]]:
    command = [*TOOL, *options, "-o", str(out), "--", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | setting)
    assert done.returncode == 0, done.stderr
    return done.stdout, [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.every(2)
@pytest.mark.parametrize("setting", [{}, {"CUDASIM_HOSTILE": "1"}, {"CUDASIM_CLOCK": "virtual"}])
def test_a_program_sees_its_own_graphs(program: Path, tmp_path: Path, setting: dict[str, str]) -> None:
    environment = os.environ | setting | {"LD_LIBRARY_PATH": str(LIBRARIES)}
    alone = subprocess.run([program], capture_output=True, text=True, env=environment, check=True)
    shown, records = run(program, tmp_path / "out", **setting)
    assert shown == alone.stdout
    summary = records[-1]
    assert (summary["launches_seen"], summary["launches_instrumented"]) == (LAUNCHES, LAUNCHES)
    # Each thread of a kernel ran as often as the kernel did: no replay ran an original, and none a copy twice.
    launches = {r["kernel"]: r["launches"] for r in records if r["type"] == "kernel"}
    runs: dict[str, set[int]] = {}
    for r in records:
        if r["type"] == "thread":
            runs.setdefault(r["kernel"], set()).add(r["runs"])
    assert runs == {kernel: {count} for kernel, count in launches.items()}
    assert set(launches) == {"add", "mul"} and sum(launches.values()) == LAUNCHES


def test_launches_chosen_by_number_leave_graphs_alone(program: Path, tmp_path: Path) -> None:
    _, records = run(program, tmp_path / "out", "--launch", "1:5")
    summary = records[-1]
    assert (summary["launches_seen"], summary["launches_instrumented"]) == (LAUNCHES, 0)
    assert summary["not_instrumented"] == {"capture": LAUNCHES}


def test_graphs_are_left_alone(program: Path, tmp_path: Path) -> None:
    """With --no-graphs, and with drivers that are too old unless --graphs is given."""
    _, records = run(program, tmp_path / "out", "--no-graphs")
    assert records[-1]["not_instrumented"] == {"capture": LAUNCHES}
    cases = [(asked, driver) for asked in (None, True, False) for driver in (12, 13)]
    instrumented = [case for case in cases if Follow(graphs=case[0]).instruments_graphs(case[1])]
    assert instrumented == [(None, 13), (True, 12), (True, 13)]


# --- conditional nodes ---------------------------------------------------------------------------------------

# What agent/conditional.cu launches: executions of bodies as the GPU decides.
EXECUTIONS = {"turn": 3 * 7 + 2, "often": 3 * (3 * 7 + 2) - 2 + 1, "once": 2 + 1, "decide": 2, "after": 2}
IN_BODIES = 4 * 5 + 2 * 2  # kernel nodes there, in all launches of graphs
OUTSIDE = EXECUTIONS["decide"] + EXECUTIONS["after"]
GRAPHS = 3 + 1 + 2


@pytest.fixture(scope="module")
def conditional(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = ROOT / "tests/gpubpf/agent/conditional.cu"
    place = tmp_path_factory.mktemp("conditional") / "conditional"
    return gpubpf_cuda.build(source, place, "-std=c++17", f"-L{LIBRARIES}", "-l:libcuda.so.1")


PRINTED = "loop 2016 0\nown 1 2 1\nupdated 2344\nboth 2408\n"


@pytest.mark.parametrize("setting", [{}, {"CUDASIM_CLOCK": "virtual"}])
def test_kernels_in_bodies_of_conditional_nodes_are_measured(
    conditional: Path, tmp_path: Path, setting: dict[str, str]
) -> None:
    shown, records = run(conditional, tmp_path / "out", **setting)
    assert shown == PRINTED
    summary, total = records[-1], sum(EXECUTIONS.values())
    assert (summary["launches_seen"], summary["launches_instrumented"]) == (total, total)
    assert not summary["not_instrumented"] and "graphs_unknown" not in summary
    launches: dict[str, int] = {}
    for r in records:
        if r["type"] == "kernel":
            launches[r["kernel"]] = launches.get(r["kernel"], 0) + r["launches"]
            assert r["runs"] == r["launches"] * r["threads"]
    assert launches == EXECUTIONS


def test_one_kernel_in_bodies(conditional: Path, tmp_path: Path) -> None:
    """Of the others, the number is a guess: one for each launch of their graph."""
    _, records = run(conditional, tmp_path / "out", "--kernel", "often")
    summary = records[-1]
    assert summary["launches_matched"] == summary["launches_instrumented"] == EXECUTIONS["often"]
    assert "graphs_unknown" not in summary


def test_bodies_that_are_not_instrumented_are_counted_once_per_launch(
    conditional: Path, tmp_path: Path
) -> None:
    _, records = run(conditional, tmp_path / "out", "--no-graphs")
    assert records[-1]["not_instrumented"] == {"capture": IN_BODIES + OUTSIDE}
    assert records[-1]["graphs_unknown"] == GRAPHS


def test_programs_that_read_the_number_of_a_launch_are_not_put_into_bodies(
    conditional: Path, tmp_path: Path
) -> None:
    """All executions in a launch of the graph would have one number."""
    out = tmp_path / "out"
    tool = [sys.executable, str(ROOT / "tools/launchlate.py"), "--device", "sim", "--json", "-o", str(out)]
    command = [*tool, "--", str(conditional)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == PRINTED
    records = [json.loads(line) for line in out.read_text().splitlines()]
    summary = records[-1]
    assert summary["launches_instrumented"] == OUTSIDE
    assert summary["not_instrumented"] == {"conditional node": IN_BODIES}
    assert summary["graphs_unknown"] == GRAPHS
    assert {r["kernel"]: r["count"] for r in records if r["type"] == "kernel"} == {"decide": 2, "after": 2}

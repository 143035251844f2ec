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
from gpubpf.session.device import LIBRARIES
from gpubpf.session.measurement import Follow

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

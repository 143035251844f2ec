"""Threads that launch together for the first time are all measured, in every context (attach/together.cu)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda as cuda

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[3]
LAUNCHES = 3 * 4 * 5  # kernels, threads, launches of each thread
THREADS = 32  # of a launch

pytestmark = cuda.needs_cuda
attaches = pytest.mark.skipif(
    os.geteuid() != 0 or os.uname().machine != "x86_64", reason="needs root on x86-64"
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("together") / "together"
    yield cuda.build(HERE / "together.cu", made, "-std=c++17", "-L", cuda.LIBRARIES, "-lcuda")


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT / "lib"), "CUDASIM_DEVICES": "4"} | more


def check(records: list[dict[str, Any]], printed: str, before: int) -> None:
    """before: launches of each kernel before the tool came."""
    each = LAUNCHES // 3
    assert printed == f"{THREADS * (before + each)} " * 3 + "done\n"
    summary = records[-1]
    assert summary["not_instrumented"] == {}
    assert summary["launches_seen"] == summary["launches_instrumented"] == LAUNCHES
    runs = dict.fromkeys(("one", "two", "three"), 0)
    for record in records:
        if record["type"] == "kernel":
            runs[record["kernel"]] += record["runs"]
    assert runs == dict.fromkeys(runs, THREADS * each)


# Letters: see together.cu.
@attaches
@pytest.mark.parametrize("how", ["b", "s", "bg", "d", "dg", "c"])
def test_all_launches_after_the_attach_are_measured(program: Path, how: str) -> None:
    env = environment()
    with ExitStack() as stack:
        target = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "cudasim.launcher", "--", program, "_" + how],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
            )
        )  # fmt: skip
        stack.callback(target.kill)
        assert target.stdin is not None and target.stdout is not None
        assert target.stdout.readline() == "ready\n"
        tool = stack.enter_context(
            subprocess.Popen(
                [sys.executable, ROOT / "tools" / "threadhist.py", "--json", "-p", str(target.pid)],
                stdout=subprocess.PIPE, text=True, env=env,
            )
        )  # fmt: skip
        stack.callback(tool.kill)
        assert tool.stdout is not None
        records = []
        for line in tool.stdout:
            records.append(json.loads(line))
            if records[-1]["type"] == "attached" and "waiting" not in records[-1]:
                target.stdin.write("\n")
                target.stdin.flush()
        assert tool.wait(60) == 0
        check(records, target.communicate(timeout=60)[0], int("b" in how))


@pytest.mark.parametrize("how", ["nd", "ndg"])
def test_all_launches_of_a_command_are_measured(program: Path, how: str, tmp_path: Path) -> None:
    """Contexts on four devices are made at the same time. Only in the first run, the tool has to assemble the copies."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, ROOT / "tools" / "threadhist.py", "--json", "--", program, how],
            capture_output=True, text=True, env=environment(XDG_CACHE_HOME=str(tmp_path)), timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.startswith("{")]
        check(records, "".join(line for line in lines if not line.startswith("{")), 0)

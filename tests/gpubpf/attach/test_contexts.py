"""Contexts that end, that only seem to, and green contexts: every launch is counted, and the program goes on as it would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from test_lifecycle import TOOLS, built

HOSTILE = pytest.mark.parametrize("hostile", [False, True], ids=["", "hostile"])


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("contexts"), "contexts")


def summary(contexts: Path, *arguments: str, hostile: bool = False) -> dict[str, Any]:
    command = [sys.executable, str(TOOLS / "threadhist.py"), "--json", "--", str(contexts), *arguments]
    environment = os.environ | {"CUDASIM_HOSTILE": "1" if hostile else "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@HOSTILE
@pytest.mark.parametrize(("way", "each"), [("alone", 20), ("kept", 30), ("refused", 10)])
def test_every_launch_is_counted_until_the_context_ends(
    contexts: Path, way: str, each: int, hostile: bool
) -> None:
    found = summary(contexts, way, "4", hostile=hostile)
    assert found["launches_instrumented"] == 4 * each and found["lost"] == 0 and not found["not_instrumented"]


def test_a_launch_on_several_devices_is_counted(contexts: Path) -> None:
    found = summary(contexts, "several", "3")
    assert found["launches_instrumented"] == 0 and found["not_instrumented"] == {"legacy launch": 3}


@HOSTILE
def test_green_contexts_in_a_program_that_runs(contexts: Path, hostile: bool) -> None:
    environment = os.environ | {"CUDASIM_HOSTILE": "1" if hostile else "0"}
    with subprocess.Popen(
        [contexts, "until"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as program:
        assert program.stdin and program.stdout and program.stdout.readline() == "ready\n"
        command = [sys.executable, str(TOOLS / "threadhist.py"), "--json", "-p", str(program.pid), "-d", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        program.stdin.write("\n")
    assert program.returncode == 0 and done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["launches_instrumented"] > 0 and found["lost"] == 0

"""A few cycles of the soak, and that it notices what it is there to notice. script/soak runs it for hours."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from gpubpf import agent
from gpubpf.session import device

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports test modules without it

import soak

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0
    or not shutil.which("nvcc")
    or not agent.LIBRARY.exists()
    or not (device.LIBRARIES / "libcuda.so.1").exists(),
    reason="needs root, nvcc, the agent and the embedded device",
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return soak.build(tmp_path_factory.mktemp("soak"))


@pytest.mark.parametrize(
    ("tool", "way_in", "end", "fault"),
    [
        ("threadhist", "command", "forks", "none"),
        ("launchlate", "command", "kill", "full /dev/shm"),
        ("memtrace", "process", "serve", "killed"),
        ("kernelretsnoop", "process", "serve", "stopped program"),
    ],
)
def test_a_cycle(program: Path, tmp_path: Path, tool: str, way_in: str, end: str, fault: str) -> None:
    cycle = soak.Cycle(0, tool, way_in, end, fault, launches=10, moment=0.3)
    found = soak.run(cycle, program, tmp_path)
    assert found.made >= 10
    assert found.seen == found.made or fault == "killed"


def test_a_wrong_result_is_a_defect(program: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("#!/bin/sh\nexit 3\n")
    wrong.chmod(0o755)
    with pytest.raises(soak.Defect, match="status 3"):
        soak.run(soak.Cycle(0, "threadhist", "command", "return", "none", 10, 0.3), wrong, tmp_path)


def test_a_launch_without_a_word_is_a_defect(program: Path, tmp_path: Path) -> None:
    scene = soak.Scene(soak.Cycle(0, "threadhist", "command", "return", "none", 10, 0.3), program, tmp_path)
    scene.lives.write_text("1 11\n")
    counts = (
        '"launches_seen":10,"launches_matched":10,"launches_instrumented":10,"not_instrumented":{},"lost":0'
    )
    scene.out.write_text('{"type":"summary",' + counts + "}\n")
    scene.err.write_text("threadhist: note: attached to 1 (lives)\n")
    with pytest.raises(soak.Defect, match="10 launches seen of 11, without a word"):
        soak.account(scene)

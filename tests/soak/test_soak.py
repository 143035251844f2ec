"""A few cycles of the soak, and that it notices what it is there to notice. script/soak runs it for hours."""

from __future__ import annotations

import collections
import contextlib
import os
import shutil
import sys
from pathlib import Path

import pytest

from gpubpf import agent
from gpubpf.records import reasons
from gpubpf.traced import device

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports test modules without it

import accounts
import hostile

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
    ("tool", "form", "way_in", "end", "fault"),
    [
        ("threadhist", "text", "command", "forks", "none"),
        ("gputrace", "json", "command", "kill", "full /dev/shm"),
        ("memtrace", "json", "process", "serve", "killed"),
        ("gpucount", "text", "process", "serve", "stopped program"),
    ],
)
def test_a_cycle(
    program: Path, tmp_path: Path, tool: str, form: str, way_in: str, end: str, fault: str
) -> None:
    cycle = soak.Cycle(0, tool, way_in, end, fault, launches=10, moment=0.3, form=form)
    found = soak.run(cycle, program, tmp_path)
    assert found.made >= 10
    assert found.seen == found.made or fault == "killed"


def test_a_wrong_result_is_a_defect(program: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("#!/bin/sh\nexit 3\n")
    wrong.chmod(0o755)
    with pytest.raises(soak.Defect, match="status 3"):
        soak.run(soak.Cycle(0, "threadhist", "command", "return", "none", 10, 0.3), wrong, tmp_path)


FORKED = [(1, 10), (2, 10), (3, 20)]  # PID and launches of three programs
NOTE = "note: pid 2 (lives) is no longer traced: too many open files; raise the limit (ulimit -n)"
NOT_TRACED = NOTE.replace("no longer", "not")


@pytest.mark.parametrize(
    ("seen", "missed", "line", "fault", "wrong"),
    [
        (40, 0, "note: attached to 1 (lives)", "none", ""),
        (39, 0, "note: attached to 1 (lives)", "none", "39 launches seen of 40, without a word"),
        (41, 0, "note: attached to 1 (lives)", "none", "41 launches seen of 40"),
        (30, 0, NOTE, accounts.OUT_OF_FILES, ""),
        (29, 0, NOTE, accounts.OUT_OF_FILES, "29 launches seen of 40: reasons only for 10"),
        (30, 0, NOTE, "full disk", "has no cause here"),
        (0, 2, NOTE, accounts.OUT_OF_FILES, ""),  # the notice names a third process
        (10, 2, NOT_TRACED, accounts.OUT_OF_FILES, ""),  # the notice names one of the two processes
        (9, 2, NOT_TRACED, accounts.OUT_OF_FILES, "9 launches seen of 40: reasons only for 30"),
        (20, 1, "note: attached to 1 (lives)", "none", "processes are missed"),
        (40, 0, "note: all is well", "none", "unknown notice"),
        (0, 0, "no kernel was launched", "none", "not true"),
        (0, 0, "note: no traced process has loaded libcuda.so", "interrupted", "not true"),
    ],
)
def test_each_launch_needs_a_reason(seen: int, missed: int, line: str, fault: str, wrong: str) -> None:
    said = accounts.Said(seen, seen, missed={reasons.UNREACHED: missed} if missed else {})
    defect = pytest.raises(accounts.Defect, match=wrong) if wrong else contextlib.nullcontext()
    with defect:
        found = accounts.account(said, [line], FORKED, 40, ("command", fault))
        assert (found.made, found.seen, bool(found.explained)) == (40, seen, seen < 40)


def test_totals_that_do_not_add_up_are_a_defect() -> None:
    said = accounts.Said(40, 40, totals=[accounts.Total("exits", 39 * 64, 64)])
    with pytest.raises(accounts.Defect, match="exits: 2496, but 40 launches make 64 each"):
        accounts.account(said, [], FORKED, 40, ("command", "none"))


def test_a_tool_that_ends_without_a_reason_is_a_defect() -> None:
    with pytest.raises(accounts.Defect, match="neither a summary nor a reason"):
        accounts.account(
            accounts.Said(), ["note: attached to 1 (lives)"], FORKED, 40, ("command", "full disk")
        )


def test_text_is_read() -> None:
    text = """soak_add: instructions per thread
  grid 2 x 1 x 1, block 32 x 1 x 1; lives (pid 1)
  1,010 launches, 64 threads
counted 1,010 of 1,200 matching launches (1,200 in total)
  not counted: 190 (before ready)
lost: 7 (a map was full, an update timed out, a kernel failed, or a program
  ended early)
processes measured: 2; missed: 3 (ended), 1 (not reached in time)
"""
    said = accounts.from_text("threadhist", text)
    assert (said.seen, said.counted, said.lost, said.not_counted) == (1200, 1010, 7, {"before ready": 190})
    assert said.missed == {"ended": 3, "not reached in time": 1}
    assert said.totals == [accounts.Total("launches", 1010, 1)]
    with pytest.raises(accounts.Defect, match="81 columns"):
        accounts.from_text("threadhist", text + 81 * "-" + "\n")


def test_the_figures_of_a_hostile_user_are_a_row_of_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    _, _, part = page.partition("### A hostile user")
    head = next(line for line in part.splitlines() if line.startswith("| rounds |"))
    row = hostile.row(
        collections.Counter({"rounds": 9, "programs": 36, "programs that were measured whole": 19})
    )
    assert row == "| 9 | 36 | 19 | 17 | 0 MB | 0.00 s | 0 |" and row.count("|") == head.count("|")

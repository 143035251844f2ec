"""Programs that end in every way (agent/ends.c): what they launched is counted, and they end as without a tool."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "agent"))

import fake_tool

NOT_ENDING = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
    signal.SIGURG, signal.SIGWINCH,
}  # fmt: skip
ENDING = sorted(
    {*signal.valid_signals(), signal.SIGRTMIN + 1} - NOT_ENDING - {*range(signal.SIGRTMIN + 2, 65)}
)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(fake_tool.built(tmp_path_factory.mktemp("ends"), program="ends"))


def counted(found: dict[str, Any]) -> int:
    """Check that every launch was counted in each of its threads. Return the launches."""
    summary, ((_, _, launches, values),) = found["summary"], found["instances"]
    assert summary["lost"] == 0 and found["said"] == []
    assert summary["launches_seen"] == launches + sum(summary["not_instrumented"].values())
    assert values == [launches] * 5
    return int(launches)


def check_lost(found: dict[str, Any]) -> None:
    """Check that six launches were counted or are lost: nothing runs at the end of the process."""
    lost = found["summary"]["lost"]
    assert found["summary"]["launches_instrumented"] == 6
    # On a busy machine, the maps may have been read between two launches, or before the end.
    assert [values for *_, values in found["instances"]] == [[6 - lost] * 5] * (lost < 6)
    told = [f"the counts of up to {lost} launches are lost"] * (lost > 0)
    assert len(found["said"]) == len(told) and all(text in found["said"][0] for text in told)


def status_alone(command: list[str], **options: Any) -> int:
    done = subprocess.run(command, capture_output=True, timeout=60, **options)
    assert not done.stdout + done.stderr
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


@pytest.mark.parametrize(
    ("way", "launches"),
    [
        ("", 6),
        ("atexit", 9),
        ("twice", 11),
        ("on_exit", 10),
        ("leaves", 9),
        ("exits", 9),
        ("quick", 9),
        ("_exit", 6),
        ("destructor", 9),
        ("exec", 6),
        ("fexecve", 6),
        ("noexec", 9),
        ("spawns", 9),
        ("vfork", 9),
        ("first", 3),
        ("fault", 6),
        ("overflow", 0),
        ("abort", 6),
        ("alarm", 6),
    ],
)
def test_an_end(ends: str, way: str, launches: int) -> None:
    found = fake_tool.measure([ends, way])
    assert found["status"] == status_alone([ends, way])
    if way == "overflow":  # no handler can run, for there is no stack
        check_lost(found)
    else:
        assert counted(found) == launches
        assert found["summary"]["not_instrumented"] == {}


def test_launches_of_other_threads_while_the_process_exits(ends: str) -> None:
    found = fake_tool.measure([ends, "thread"])
    assert found["status"] == 4 and counted(found) >= 6
    assert found["summary"]["not_instrumented"].keys() == {"process ending"}


@pytest.mark.parametrize("number", ENDING, ids=int)
@pytest.mark.every(8)
@pytest.mark.parametrize("way", ["raise", "restores"])
def test_a_signal(ends: str, way: str, number: int) -> None:
    found = fake_tool.measure([ends, way, str(int(number))])
    assert found["status"] == 128 + number
    assert counted(found) == 6


def test_sigkill(ends: str) -> None:
    """The launches are known, and the report says how many counts are lost, or were read in time."""
    found = fake_tool.measure([ends, "raise", str(int(signal.SIGKILL))])
    assert found["status"] == 128 + signal.SIGKILL
    check_lost(found)


def test_a_signal_that_the_program_ignores(ends: str) -> None:
    command = ["sh", "-c", f"trap '' PIPE; exec {ends} raise {int(signal.SIGPIPE)}"]
    found = fake_tool.measure(command)
    assert found["status"] == 4 and counted(found) == 6


def test_what_was_read_before_survives_the_process(ends: str, tmp_path: Path) -> None:
    said: list[str] = []
    with fake_tool.session([ends, "later", str(tmp_path / "read")], note=said.append) as session:
        processes, lock = session._measurement.processes, session._measurement.lock

        def wait() -> None:
            with lock:
                assert lock.wait_for(lambda: any(process.snapshots for process in processes), 60)
            (tmp_path / "read").touch()

        threading.Thread(target=wait).start()
        for _ in session.intervals():
            pass
    found = fake_tool.result(session)
    assert found["status"] == 128 + signal.SIGKILL
    assert found["instances"] == [[[1, 1, 1], [5, 1, 1], 6, [6] * 5]]
    assert (found["summary"]["launches_instrumented"], found["summary"]["lost"]) == (8, 2)
    assert "the counts of up to 2 launches are lost" in said[0]

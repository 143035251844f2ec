"""How many connections a process and a user may have."""

from __future__ import annotations

import pytest

from gpubpf.process import limits, traceable
from gpubpf.traced.connections import Connections

pytestmark = pytest.mark.without_driver


def test_a_process_may_greet_and_be_replaced_many_times() -> None:
    counted = Connections()
    for number in range(limits.CONNECTIONS_OF_PROCESS):
        assert counted.add(number, 7, 1.0, 1000) == ""
        counted.greeted(number)
        counted.remove(number)
    assert counted.add(0, 7, 1.0, 1000) == "it"
    assert counted.add(1, 7, 2.0, 1000) == ""  # another process, of the same ID


def test_few_may_be_silent() -> None:
    counted = Connections()
    for number in range(limits.GREETINGS):
        assert counted.add(number, 7, 1.0, 0) == ""
    assert counted.add(limits.GREETINGS, 7, 1.0, 0) == "it"
    counted.remove(limits.GREETINGS)
    counted.greeted(3)
    assert counted.add(limits.GREETINGS, 7, 1.0, 0) == ""


def test_a_user_has_a_limit_and_root_a_higher_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS_OF_USER", 3)
    monkeypatch.setattr(limits, "CONNECTIONS", 9)
    counted = Connections()
    assert [counted.add(n, n, 1.0, 1000) for n in range(4)] == ["", "", "", "its user"]
    counted.remove(3)
    counted.remove(0)
    assert counted.add(4, 4, 1.0, 1000) == ""
    assert [counted.add(n, n, 1.0, 0) for n in range(5, 12)] == ["", "", "", "", "", "", "root"]


def test_what_a_user_has_had_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool keeps something of each process until its end, so a user who starts one after another would use up its memory."""
    monkeypatch.setattr(limits, "ENTRIES_OF_USER", 3)
    monkeypatch.setattr(limits, "ENTRIES", 12)
    counted = Connections()
    for user, expected in ((1000, ["", "", "", "its user"]), (1001, [""] * 3), (0, [""] * 6)):
        for pid, excess in enumerate(expected):
            assert counted.add(pid, pid, 1.0, user) == excess
            counted.remove(pid)


def test_ended_processes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of processes may connect and end. One that lives on is still counted, and few are looked for."""
    looked: list[int] = []

    def started(pid: int) -> float:
        looked.append(pid)
        return 1.0 if pid == 7 else pid % 2 * 2.0  # others have ended, or their IDs were reused

    monkeypatch.setattr(traceable, "started", started)
    counted = Connections()
    for _ in range(limits.CONNECTIONS_OF_PROCESS):
        counted.add(0, 7, 1.0, 1000)
        counted.remove(0)
    most = 0
    for pid in range(1000, 21000):
        assert counted.add(0, pid, pid % 2, 1000) == ""
        counted.remove(0)
        most = max(most, len(counted._of_process))
    assert most < 2000
    assert len(looked) < 2 * 20000
    assert counted.add(0, 7, 1.0, 1000) == "it"
    counted.remove(0)
    assert not counted._open and not counted._of_user


def test_each_process_beyond_a_limit_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of processes; the ended ones are forgotten."""
    monkeypatch.setattr(limits, "CONNECTIONS_OF_USER", 1)
    monkeypatch.setattr(traceable, "started", lambda pid: 0.0)
    counted = Connections()
    assert counted.add(0, 1, 1.0, 1000) == ""
    for pid in range(2, 5002):
        for number in (1, 2):
            assert counted.add(number, pid, 1.0, 1000) == "its user"
            counted.remove(number)
        assert [counted.report(pid, 1.0), counted.report(pid, 1.0)] == [True, False]
    assert len(counted._reported) <= 2048


def test_a_forgotten_process_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement of weeks forgets processes that it has counted, so any number may come and end."""
    monkeypatch.setattr(limits, "ENTRIES_OF_USER", 3)
    monkeypatch.setattr(limits, "ENTRIES", 12)
    counted = Connections()
    for pid in range(100):
        assert counted.add(pid, pid, 1.0, 1000) == ""
        counted.remove(pid)
        if pid >= 2:
            counted.forget(1000)
    assert not counted.add(100, 100, 1.0, 1000) and counted.add(101, 101, 1.0, 1000) == "its user"

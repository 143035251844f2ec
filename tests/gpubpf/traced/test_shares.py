"""What the processes of one user may take leaves room for those of others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpubpf.errors import SessionError
from gpubpf.process import limits
from gpubpf.traced.connections import Connections
from gpubpf.traced.server import Server
from gpubpf.traced.shares import Share

pytestmark = pytest.mark.without_driver

MIB = 1 << 20


def test_a_user_who_takes_all_leaves_room_for_others() -> None:
    share = Share("names", 8 * MIB, 2 * MIB)
    share.take(1000, 2 * MIB)
    with pytest.raises(SessionError, match="the names of its user exceed 2 MiB"):
        share.take(1000, 1)
    share.take(1001, MIB)
    share.take(1000, -1)
    share.take(1001, MIB)
    with pytest.raises(SessionError, match="its user"):
        share.take(1001, 1)
    share.take(0, 3 * MIB)  # more than others may take
    with pytest.raises(SessionError, match="the names of the machine exceed 8 MiB"):
        share.take(0, MIB)


def test_root_and_the_others_leave_each_other_a_share() -> None:
    """Processes of containers that run as root are no more trusted than those of other users."""
    share = Share("names", 8 * MIB, 2 * MIB)
    share.take(0, 6 * MIB)
    with pytest.raises(SessionError, match="the names of root exceed 6 MiB"):
        share.take(0, 1)
    share.take(0, -1)
    share.take(1000, 2 * MIB)
    others = Share("names", 8 * MIB, 2 * MIB)
    for user in (1000, 1001, 1002):
        others.take(user, 2 * MIB)
    with pytest.raises(SessionError, match="the names of all users but root exceed 6 MiB"):
        others.take(1003, 1)
    others.take(1003, -1)
    others.take(0, 2 * MIB)


def test_what_is_given_back_can_be_taken_again() -> None:
    share = Share("names", 2 * MIB, MIB)
    for _ in range(10):
        share.take(1000, MIB)
        share.take(1000, -MIB)
    assert share.taken == 0


def test_one_users_limits_leave_room() -> None:
    """Of the tool's memory, and of the files that it may open."""
    assert 4 * limits.TEXTS_OF_USER <= limits.TEXTS and 4 * limits.UNFINISHED_OF_USER <= limits.UNFINISHED
    assert limits.TEXT < limits.TEXTS_OF_USER


def test_connections_leave_files_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (320, 320))
    counted = Connections()
    assert [counted.add(n, n, 1.0, 1000) for n in range(11)] == [""] * 10 + ["its user"]
    assert counted.add(11, 11, 1.0, 1001) == ""


def test_files_leave_some_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process alone may have many; all processes of a user together have a limit."""
    monkeypatch.setattr(limits, "files", lambda: (40_000, 1000))

    def process(user: int, files: int) -> Any:
        return SimpleNamespace(user=user, files=files)

    def handed_over(*processes: Any) -> None:
        server: Any = SimpleNamespace(_measurement=SimpleNamespace(processes=processes))
        Server._count_file(server, processes[0])

    handed_over(process(1000, 999))
    handed_over(process(1000, 300), process(1000, 600), process(1001, 9000), process(0, 9000))
    handed_over(process(0, 9000))
    with pytest.raises(SessionError, match="processes of root have handed over too many files"):
        handed_over(process(0, 39_000))
    handed_over(process(1000, limits.FILES - 1), process(1000, 9000))
    with pytest.raises(SessionError, match="processes of its user have handed over too many files"):
        handed_over(process(1000, 400), process(1000, 600))


def test_the_records_of_one_user_leave_room_for_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool moves records out of each log until it has many of one user's processes."""
    monkeypatch.setattr(limits, "BUFFERED_RECORDS", 400)
    monkeypatch.setattr(limits, "BUFFERED_RECORDS_OF_USER", 100)

    class Process(SimpleNamespace):
        buffered = 0

        def buffer_log(self) -> None:
            self.buffered += 60

    processes = [Process(user=user) for user in (1000, 1000, 1000, 1000, 1001, 0, 0)]
    server: Any = SimpleNamespace(
        _closing=False,
        _measurement=SimpleNamespace(
            active=lambda: processes, privileges=SimpleNamespace(apply=lambda: None)
        ),
    )

    def pause(seconds: float) -> None:
        server._closing = True  # after this round

    monkeypatch.setattr("gpubpf.traced.server.time.sleep", pause)
    Server._buffer_logs(server)
    assert [process.buffered for process in processes] == [60, 60, 0, 0, 60, 60, 60]

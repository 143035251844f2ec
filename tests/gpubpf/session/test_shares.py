"""What the processes of one user may take leaves room for those of others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpubpf.errors import SessionError
from gpubpf.process import limits
from gpubpf.session import shares
from gpubpf.session.connections import Connections
from gpubpf.session.server import Server
from gpubpf.session.shares import Share

pytestmark = pytest.mark.without_driver

MIB = 1 << 20


def test_a_user_who_takes_all_leaves_room_for_others() -> None:
    share = Share("names", 8 * MIB, 2 * MIB)
    share.take(1000, 2 * MIB)
    with pytest.raises(SessionError, match="the names of this user's processes exceed 2 MiB"):
        share.take(1000, 1)
    share.take(1001, MIB)
    share.take(1000, -1)
    share.take(1001, MIB)
    with pytest.raises(SessionError, match="this user's"):
        share.take(1001, 1)
    share.take(0, 3 * MIB)  # root has no limit of its own
    with pytest.raises(SessionError, match="the names of all processes exceed 8 MiB"):
        share.take(0, MIB)


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
    monkeypatch.setattr(shares.resource, "getrlimit", lambda _: (320, 320))
    counted = Connections()
    assert [counted.add(n, n, 1.0, 1000) for n in range(11)] == [""] * 10 + ["its user"]
    assert counted.add(11, 11, 1.0, 1001) == ""


def test_files_leave_some_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process alone may have many; all processes of a user together have a limit."""
    monkeypatch.setattr(shares, "files_of_user", lambda: 1000)

    def process(user: int, files: int) -> Any:
        return SimpleNamespace(user=user, files=files)

    def handed_over(*processes: Any) -> None:
        server: Any = SimpleNamespace(_measurement=SimpleNamespace(processes=processes))
        Server._count_file(server, processes[0])

    handed_over(process(1000, 999))
    handed_over(process(1000, 300), process(1000, 600), process(1001, 9000), process(0, 9000))
    handed_over(process(0, 9000))
    handed_over(process(1000, limits.FILES - 1), process(1000, 9000))
    with pytest.raises(SessionError, match="this user's processes have handed over 1,000 files"):
        handed_over(process(1000, 400), process(1000, 600))

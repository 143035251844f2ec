"""End the waits of threads for file systems of users, so that the tool's process can end.

    with user_waits.waiting(user):
        os.pread(memory, 8, address)
    for line in user_waits.end(2.0): …

A thread that waits for a program that serves a file system (FUSE) cannot be killed, and neither can its process. The tool looks before
it reads, but a process can exchange a mapping after that look. Root can abort the connection of such a file system (Documentation/
filesystems/fuse.rst): all its requests then fail. That happens only at the end, only to file systems that do not answer, and only to
those of the user whose process keeps the tool waiting.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_CONNECTIONS = Path("/sys/fs/fuse/connections")
_PAUSE = 0.01  # seconds between checks

_waiting: dict[int, tuple[int, float]] = {}  # by thread: the user whose process it reads, and since when


@contextlib.contextmanager
def waiting(user: int) -> Iterator[None]:
    """Record that this thread may wait for a file system of a user. user: user ID, or -1 if it is unknown."""
    thread = threading.get_ident()
    before = _waiting.get(thread)
    _waiting[thread] = user, time.monotonic()
    try:
        yield
    finally:
        if before is None:
            del _waiting[thread]
        else:
            _waiting[thread] = before


def end(seconds: float) -> list[str]:
    """End waits that take longer than this many seconds. Return notices for the user."""
    until = time.monotonic() + seconds
    while (users := _users(seconds)) is not None and time.monotonic() < until:
        time.sleep(_PAUSE)
    found = []
    for user in sorted(users or ()):
        if aborted := _abort(user):
            found.append(
                f"a process of user {user} kept the tool waiting for its memory; disconnected the file systems of this user that"
                f" did not answer (FUSE {', '.join(aborted)})"
            )
            until = time.monotonic() + seconds
            while user in (_users(seconds) or ()) and time.monotonic() < until:
                time.sleep(_PAUSE)
        if user in (_users(seconds) or ()):
            found.append(
                f"a process of user {user} keeps the tool waiting for its memory (FUSE?), so this process cannot end before it does;"
                " end the processes of this user"
            )
    return found


def _users(seconds: float) -> set[int] | None:
    """Return the users for whom threads have waited this long; None if no thread waits at all."""
    late = time.monotonic() - seconds
    waits = list(_waiting.values())
    return {user for user, since in waits if since < late} if waits else None


def _abort(user: int) -> list[str]:
    """Abort the FUSE connections of a user with requests that are not answered. Return their numbers. Root's are left alone."""
    found = []
    with contextlib.suppress(OSError):
        for connection in _CONNECTIONS.iterdir():
            with contextlib.suppress(OSError, ValueError):
                owner = (connection / "abort").stat().st_uid
                if owner == user > 0 and int((connection / "waiting").read_text()) > 0:
                    (connection / "abort").write_text("1")
                    found.append(connection.name)
    return found

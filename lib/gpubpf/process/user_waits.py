"""End the waits of threads for file systems of users, so that the tool's process can end.

    with user_waits.waiting(user, pid, lambda: [the device of the mapping]):
        os.pread(memory, 8, address)
    for line in user_waits.end(2.0): …

A thread that waits for a program that serves a file system (FUSE) cannot be killed, and neither can its process. The tool looks before
it reads, but a process can exchange a mapping after that look. Root can abort the connection of such a file system (Documentation/
filesystems/fuse.rst): all its requests then fail. That happens only at the end, only to a file system that the process maps where the
thread reads, and only if the file system belongs to the user of the process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from gpubpf.process import fuse, patience
from gpubpf.record import Record

_PAUSE = 0.01  # seconds between checks


class _Wait(Record):
    """A thread may wait for a process since this time (time.monotonic). devices: see `waiting`."""

    user: int
    pid: int
    devices: Callable[[], Iterable[str]]
    since: float


_waiting: dict[int, _Wait] = {}  # by thread


def prepare() -> None:
    """Get what `end` needs, if its thread will have dropped its privileges by then."""
    fuse.connections()


@contextlib.contextmanager
def waiting(user: int, pid: int = 0, devices: Callable[[], Iterable[str]] = tuple) -> Iterator[None]:
    """Record that this thread may wait for a file system of a user.

    user: see `scans.user_of`; -1 if it is unknown.
    pid: the user's process that may map the file system; 0: none.
    devices: returns the devices, as in /proc/PID/maps, that the wait can be for.
    """
    thread = threading.get_ident()
    before = _waiting.get(thread)
    _waiting[thread] = _Wait(user, pid, devices, time.monotonic())
    try:
        yield
    finally:
        if before is None:
            del _waiting[thread]
        else:
            _waiting[thread] = before


def end(seconds: float) -> list[str]:
    """End waits that take longer than this many seconds. Return notices for the user."""
    _wait_while(lambda: _waiting, seconds)
    found = []
    for user in sorted({wait.user for wait in _late(seconds)}):
        if aborted := [number for wait in _late(seconds, user) for number in _abort(wait)]:
            found.append(
                f"a process of user {user} kept the tool waiting for its memory; disconnected the file system of this user that"
                f" did not answer (FUSE {', '.join(aborted)})"
            )
            _wait_while(partial(_late, seconds, user), seconds)
        if _late(seconds, user):
            found.append(
                f"a process of user {user} keeps the tool waiting for its memory (FUSE?), so this process cannot end before it does;"
                " end the processes of this user"
            )
    return found


def _wait_while(condition: Callable[[], object], seconds: float) -> None:
    until = time.monotonic() + seconds
    while condition() and time.monotonic() < until:
        time.sleep(_PAUSE)


def _late(seconds: float, user: int | None = None) -> list[_Wait]:
    """Return the waits that have taken this long. user: only those for a process of this user."""
    late = time.monotonic() - seconds
    return [one for one in list(_waiting.values()) if one.since < late and user in (None, one.user)]


def _abort(wait: _Wait) -> list[str]:
    """Abort the FUSE connections that a thread can wait for. Return their numbers.

    Connections of root and of other users, and those without a request that is not answered, are left alone."""
    found = []
    with contextlib.suppress(OSError):
        # Without limits, because looks that wait would otherwise protect the process.
        devices = patience.within(patience.LOOK_WAIT, wait.pid, lambda: {*wait.devices()}, limited=False)
        for device in devices:
            major, _, minor = device.partition(":")
            number = str(int(minor or "0", 16))
            owned = int(major, 16) == 0 < fuse.owner(number) == wait.user
            if owned and fuse.waits(number) and fuse.abort(number):
                found.append(number)
    return found

"""The CPU time for reading the files of all processes, by user.

    budget = ScanBudget()
    with budget.scan(user):
        mappings = list(proc.lines(pid, "maps"))
    budget.exhausted(user)

A process can make its files in /proc/PID large, and a user can have many processes. So each user's processes get only a part of the
time, and no user can keep a tool from scanning the processes of others.
"""

from __future__ import annotations

import contextlib
import functools
import pwd
import time
from collections.abc import Iterator
from pathlib import Path

from gpubpf.errors import out_of_files
from gpubpf.process import limits, proc


def user_of(pid: int) -> int:
    """Return the ID of the user who answers for a process; -1 if the process has ended. Raises OSError if no more files can be opened.

    A user may have thousands of user IDs (subuid(5)), with which processes run in user namespaces. The owner of the namespace answers
    for them, unless root has made it for a container.
    """
    # The owner of /proc/PID is root if the process is not dumpable.
    try:
        uid = proc.user(pid)
        return proc.owner_of_namespace(pid) or responsible(uid)
    except OSError as error:
        if out_of_files(error):
            raise
    except LookupError:  # it ends while its file is read
        pass
    return -1


def responsible(uid: int) -> int:
    """Return the user to whom a user ID is delegated in /etc/subuid. IDs that root has for one container count as their first ID."""
    for whose, first, count in _delegated():
        if first <= uid < first + count:
            return whose or first
    return uid


@functools.cache
def _delegated() -> list[tuple[int, int, int]]:
    """Return the lines of /etc/subuid: user ID, first delegated ID, number of IDs."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/etc/subuid").read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, LookupError):
                name, first, count = line.split(":")
                uid = int(name) if name.isdigit() else pwd.getpwnam(name).pw_uid
                found.append((uid, int(first), int(count)))
    return found


class ScanBudget:
    """The CPU time that is left for each user's processes. Use it from one thread."""

    def __init__(self) -> None:
        self._left: dict[
            int, tuple[float, float]
        ] = {}  # by user: seconds, and when that was (time.monotonic)

    def _now(self, user: int) -> tuple[float, float]:
        now = time.monotonic()
        left, when = self._left.get(user, (limits.SCAN_BURST, now))
        return min(limits.SCAN_BURST, left + (now - when) * limits.SCAN_SHARE), now

    def exhausted(self, user: int) -> bool:
        """Return whether the processes of a user must wait."""
        return user in self._left and self._now(user)[0] <= 0

    def spend(self, user: int, seconds: float) -> None:
        """Take time from a user whose process kept the tool waiting."""
        left, now = self._now(user)
        self._left[user] = left - seconds, now

    @contextlib.contextmanager
    def scan(self, user: int) -> Iterator[None]:
        """Count the CPU time of this thread in the block."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.spend(user, time.thread_time() - began)

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
import time
from collections.abc import Iterator

from gpubpf.errors import out_of_files
from gpubpf.process import limits, proc


def user_of(pid: int) -> int:
    """Return the user ID of a process; -1 if it has ended. Raises OSError if no more files can be opened."""
    # The owner of /proc/PID is root if the process is not dumpable.
    try:
        return int(proc.status(pid)["Uid"].split()[0])
    except OSError as error:
        if out_of_files(error):
            raise
    except LookupError:  # it ends while its file is read
        pass
    return -1


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

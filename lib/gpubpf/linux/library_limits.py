"""What the libraries of each user's processes may cost a tool with uprobes: files, probes and time.

    shares = LibraryLimits()
    if not shares.full(user) and not shares.exhausted(user):
        with shares.probing(user) as took:
            took(True, probes, seconds)

Any user can map any number of files that are named like a GPU's library, with functions that take long to read. The processes of one
user leave probes and time for the libraries of others.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

from gpubpf.process import limits
from gpubpf.process.scans import ScanBudget


class LibraryLimits:
    """Counts what the libraries of each user's processes cost. Use it from one thread at a time."""

    def __init__(self) -> None:
        self._files: Counter[int] = Counter()  # by user
        self._probes: Counter[int] = Counter()
        self._budget = ScanBudget()

    def full(self, user: int) -> bool:
        """Return whether no other library of a user's processes gets probes."""
        return bool(
            limits.exceeded(self._files, user, limits.LIBRARIES, limits.LIBRARIES_OF_USER, 1)
            or limits.exceeded(self._probes, user, *limits.files(), 1)
        )

    def exhausted(self, user: int) -> bool:
        """Return whether the libraries of a user's processes must wait for their probes."""
        return self._budget.exhausted(user)

    @contextlib.contextmanager
    def probing(self, user: int) -> Iterator[Callable[[bool, int, float], None]]:
        """Count the CPU time of this thread in the block. Yield a function that counts the rest.

        Its arguments: whether the file had no probes before (it may appear in several containers), the number of open files that the
        probes take, and the seconds that the kernel took to place them."""

        def took(new: bool, probes: int, seconds: float) -> None:
            self._files[user] += new
            self._probes[user] += probes
            self._budget.spend(user, seconds)

        with self._budget.scan(user):
            yield took

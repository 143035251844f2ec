"""What the processes of one user may take of the tool's memory and files, so that processes of other users still find some."""

from __future__ import annotations

import resource
from collections import Counter

from gpubpf.errors import SessionError
from gpubpf.process import limits

MIB = 1 << 20


class Share:
    """Counts what processes have taken of something. The caller makes one call at a time.

    what: as the beginning of a sentence. most: of all processes together. of_user: of the processes of one user; not for root.
    """

    def __init__(self, what: str, most: int, of_user: int) -> None:
        self._what, self._most, self._of_user = what, most, of_user
        self._taken: Counter[int] = Counter()  # by user

    def take(self, user: int, amount: int) -> None:
        """Count an amount, perhaps a negative one. Raises SessionError if more than the limits is taken now; it counts even then."""
        self._taken[user] += amount
        if not self._taken[user]:
            del self._taken[user]
        if amount <= 0:
            return
        if user and self._taken[user] > self._of_user:
            raise SessionError(f"the {self._what} of this user's processes exceed {self._of_user // MIB} MiB")
        if self._taken.total() > self._most:
            raise SessionError(f"the {self._what} of all processes exceed {self._most // MIB} MiB")

    @property
    def taken(self) -> int:
        return self._taken.total()


def connections_of_user() -> int:
    """Return how many connections the processes of one user may have: each takes some of the files that the tool may open."""
    return min(limits.CONNECTIONS_OF_USER, files_of_user() // limits.FILES_OF_CONNECTION)


def files_of_user() -> int:
    """Return how many files the processes of one user may take."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4

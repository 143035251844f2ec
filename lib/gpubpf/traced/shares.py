"""What the processes of one user may take of the tool's memory and files, so that processes of other users still find some."""

from __future__ import annotations

import resource
from collections import Counter

from gpubpf.errors import SessionError
from gpubpf.process import limits

MIB = 1 << 20


class Share:
    """Counts what processes have taken of something. The caller makes one call at a time.

    what: as the beginning of a sentence. most, of_user: see `limits.exceeded`.
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
        if whose := limits.exceeded(self._taken, user, self._most, self._of_user):
            limit = {"its user": self._of_user, "the machine": self._most}.get(
                whose, self._most - self._of_user
            )
            raise SessionError(f"the {self._what} of {whose} exceed {limit // MIB} MiB")

    @property
    def taken(self) -> int:
        return self._taken.total()


def connections() -> tuple[int, int]:
    """Return how many connections all processes, and those of one user, may have: each takes some of the tool's files."""
    most, of_user = (found // limits.FILES_OF_CONNECTION for found in files())
    return min(limits.CONNECTIONS, most), min(limits.CONNECTIONS_OF_USER, of_user)


def files() -> tuple[int, int]:
    """Return how many files the tool may open, and how many the processes of one user may take."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most, most // 4

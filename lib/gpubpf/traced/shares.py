"""What the processes of one user may take of the tool's memory and files, so that processes of other users still find some."""

from __future__ import annotations

from collections import Counter

from gpubpf.errors import SessionError
from gpubpf.process import limits

MIB = 1 << 20


class Share:
    """Counts how much of a resource processes have taken. The caller makes one call at a time.

    what: the resource, as the subject of a message ("names and stacks").
    most, of_user: see `limits.exceeded`.
    """

    def __init__(self, what: str, most: int, of_user: int) -> None:
        self._what, self._most, self._of_user = what, most, of_user
        self._taken: Counter[int] = Counter()  # by user

    def take(self, user: int, amount: int) -> None:
        """Add an amount, which may be negative. If a limit is then exceeded, raise SessionError; the amount still counts."""
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
    """Return the most connections for all processes, and for those of one user. Each connection takes some of the tool's files."""
    most, of_user = (found // limits.FILES_OF_CONNECTION for found in limits.files())
    return min(limits.CONNECTIONS, most), min(limits.CONNECTIONS_OF_USER, of_user)

"""The number of connections of each process and user, which are limited: a process may connect as often as it likes."""

from __future__ import annotations

from collections import Counter

from gpubpf.process import limits, traceable
from gpubpf.traced import shares

_ENDED = 1024  # number of counted processes without a connection at which ended processes are forgotten


class Connections:
    """Counts connections. The caller makes one call at a time. Connections are named by their file descriptors."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[int, float, int]] = {}  # process ID, start time, user ID
        self._silent: dict[int, tuple[int, float]] = {}  # connections whose agent has not greeted → process
        self._greeting: Counter[tuple[int, float]] = Counter()
        self._of_process: Counter[tuple[int, float]] = Counter()  # including closed ones
        self._most = _ENDED  # processes in `_of_process` until `_forget_ended`
        self._of_user: Counter[int] = Counter()
        self._admitted: Counter[int] = Counter()  # by user, including closed ones
        self._reported: set[tuple[int, float]] = set()  # processes that exceeded a limit

    def add(self, connection: int, pid: int, started: float, uid: int) -> str:
        """Count a new connection. Return whose limit it exceeds: "it" (the process) or a result of `limits.exceeded`; "" if none.

        Call `remove` when the connection is closed, also if it exceeded a limit."""
        process = pid, started
        self._open[connection] = pid, started, uid
        self._silent[connection] = process
        self._greeting[process] += 1
        self._of_process[process] += 1
        if len(self._of_process) > self._most:
            self._forget_ended()
        self._of_user[uid] += 1
        if (
            self._greeting[process] > limits.GREETINGS
            or self._of_process[process] > limits.CONNECTIONS_OF_PROCESS
        ):
            return "it"
        excess = limits.exceeded(self._of_user, uid, *shares.connections()) or limits.exceeded(
            self._admitted, uid, limits.ENTRIES, limits.ENTRIES_OF_USER, 1
        )
        if not excess:
            self._admitted[uid] += 1
        return excess

    def report(self, pid: int, started: float) -> bool:
        """Return whether a process exceeds a limit for the first time."""
        before = len(self._reported)
        self._reported.add((pid, started))
        return len(self._reported) > before

    def greeted(self, connection: int) -> None:
        """Record that the agent has greeted."""
        if (process := self._silent.pop(connection, None)) is not None:
            self._greeting[process] -= 1
            if not self._greeting[process]:
                del self._greeting[process]

    def remove(self, connection: int) -> None:
        """Record that a connection is closed."""
        self.greeted(connection)
        if (found := self._open.pop(connection, None)) is not None:
            user = found[2]
            self._of_user[user] -= 1
            if not self._of_user[user]:
                del self._of_user[user]

    def forget(self, uid: int) -> None:
        """Let the user have one more connection: a process that has ended was forgotten. uid: as in `add`."""
        self._admitted[uid] -= 1
        if not self._admitted[uid]:
            del self._admitted[uid]

    def _forget_ended(self) -> None:
        """Forget processes that have ended. This next runs when the number of processes has doubled, so each process costs little."""
        for pid, started in list(self._of_process):
            if not started or traceable.started(pid) != started:  # 0: it ended before it was counted
                del self._of_process[pid, started]
        self._reported &= self._of_process.keys()
        self._most = 2 * len(self._of_process) + _ENDED

"""Count which host threads launch each kernel, for warpdiv --threads.

launchers = Launchers()
launchers.read(session)          # often, so that the operation log does not overflow and threads still have names
launchers.rows(kernels)          # of these kernels, in this order
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from gpubpf.agent.definitions import Kind
from gpubpf.divergence.branches import Place
from gpubpf.process import proc
from gpubpf.record import Record
from gpubpf.show.table import printable

if TYPE_CHECKING:
    from gpubpf.session.session import Session


class Launcher(Record):
    """A host thread that launched a kernel. name: None if the thread had ended before the tool looked."""

    place: Place
    tid: int
    name: str | None
    launches: int


LIMIT = 1 << 17  # pairs of a kernel and a thread; the traced process can write any thread into its log


class Launchers:
    """Reads the operation log. lost: launches that found no room in the log, or that are beyond LIMIT."""

    def __init__(self) -> None:
        self._launches: Counter[tuple[int, str, int]] = Counter()  # by process, kernel and thread
        self._names: dict[tuple[int, int], str | None] = {}  # by process and thread
        self._beyond = self.lost = 0

    def read(self, session: Session) -> None:
        """Count the launches in the log since the last call."""
        lost = 0
        for log in session.logs():
            lost += log.lost
            raw = log.records
            launched = raw[(raw["kind"] == Kind.KERNEL) & (raw["kernel"]["outcome"] == 0)]
            pairs = np.stack([launched["kernel"]["slot"], launched["thread"]], axis=1)
            for (slot, tid), count in zip(*np.unique(pairs, axis=0, return_counts=True), strict=True):
                key = log.process, log.names.get(int(slot), ""), int(tid)
                if len(self._launches) >= LIMIT and key not in self._launches:
                    self._beyond += int(count)
                    continue
                self._launches[key] += int(count)
                if (log.process, int(tid)) not in self._names:
                    self._names[log.process, int(tid)] = _name(log.pid, int(tid))
        self.lost = max(self.lost, lost + self._beyond)

    def rows(self, kernels: Iterable[Place]) -> list[Launcher]:
        """Return the threads that launched these kernels."""
        by_kernel: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for (process, mangled, tid), count in self._launches.items():
            by_kernel.setdefault((process, mangled), []).append((-count, tid))
        return [
            Launcher(place, tid, self._names[place.process, tid], -count)
            for place in dict.fromkeys(kernels)
            for count, tid in sorted(by_kernel.get((place.process, place.mangled), ()))
        ]


def _name(pid: int, tid: int) -> str | None:
    try:
        return printable(proc.text(pid, f"task/{tid}/comm").rstrip("\n"))
    except OSError:
        return None

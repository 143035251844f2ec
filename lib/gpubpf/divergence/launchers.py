"""Count which host threads launch each kernel, and from which stacks, for warpdiv --threads.

launchers = Launchers()
launchers.read(session)          # often, so that the operation log does not overflow and threads still have names
launchers.rows(kernels)          # of these kernels, in this order
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from gpubpf.agent.definitions import Kind
from gpubpf.divergence.branches import Place
from gpubpf.launches.frames import Stack
from gpubpf.process import proc
from gpubpf.record import Record
from gpubpf.show.table import printable

if TYPE_CHECKING:
    from gpubpf.records.results import HostFrame
    from gpubpf.session.session import Session


class Launcher(Record):
    """A host thread that launched a kernel.

    name: None if the thread had ended before the tool looked
    stack: the functions of the host stack of most of these launches, outermost first; () if unknown
    """

    place: Place
    tid: int
    name: str | None
    launches: int
    stack: tuple[str, ...]


LIMIT = 1 << 17  # kernels, threads and stacks; the traced process can write any into its log


class Launchers:
    """Reads the operation log. lost: launches that found no room in the log, or that are beyond LIMIT."""

    def __init__(self) -> None:
        # By process, kernel, thread and number of the host stack.
        self._launches: Counter[tuple[int, str, int, int]] = Counter()
        self._stacks: dict[int, Mapping[int, tuple[HostFrame, ...]]] = {}  # by process
        self._names: dict[tuple[int, int], str | None] = {}  # by process and thread
        self._beyond = self.lost = 0

    def read(self, session: Session) -> None:
        """Count the launches in the log since the last call."""
        lost = 0
        for log in session.logs():
            lost += log.lost
            raw = log.records
            self._stacks[log.process] = log.stacks
            launched = raw[(raw["kind"] == Kind.KERNEL) & (raw["kernel"]["outcome"] == 0)]
            columns = (launched["kernel"]["slot"], launched["thread"], launched["stack"])
            rows = np.stack([column.astype(np.int64) for column in columns], axis=1)
            for (slot, tid, stack), count in zip(*np.unique(rows, axis=0, return_counts=True), strict=True):
                key = log.process, log.names.get(int(slot), ""), int(tid), int(stack)
                if len(self._launches) >= LIMIT and key not in self._launches:
                    self._beyond += int(count)
                    continue
                self._launches[key] += int(count)
                if (log.process, int(tid)) not in self._names:
                    self._names[log.process, int(tid)] = _name(log.pid, int(tid))
        self.lost = max(self.lost, lost + self._beyond)

    def rows(self, kernels: Iterable[Place]) -> list[Launcher]:
        """Return the threads that launched these kernels."""
        by_kernel: dict[tuple[int, str], dict[int, Counter[int]]] = {}
        for (process, mangled, tid, stack), count in self._launches.items():
            by_kernel.setdefault((process, mangled), {}).setdefault(tid, Counter())[stack] += count
        return [
            Launcher(place, tid, self._names[place.process, tid], -count, self._functions(place, stacks))
            for place in dict.fromkeys(kernels)
            for count, tid, stacks in sorted(
                (
                    (-of.total(), tid, of)
                    for tid, of in by_kernel.get((place.process, place.mangled), {}).items()
                ),
                key=lambda row: row[:2],
            )
        ]

    def _functions(self, place: Place, stacks: Counter[int]) -> tuple[str, ...]:
        """Return the functions of the stack with most launches."""
        ((most, _),) = stacks.most_common(1)
        frames = self._stacks[place.process].get(most, ())
        return tuple(printable(frame.name) for frame in Stack.of(frames).own()) if frames else ()


def _name(pid: int, tid: int) -> str | None:
    try:
        return printable(proc.text(pid, f"task/{tid}/comm").rstrip("\n"))
    except OSError:
        return None

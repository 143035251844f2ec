"""Why calls, and the gaps between launches, took long: time by reason (docs/amd.md).

Rows (`ROW`): `tgid`, `tid`, `function` (its number, or arrays.GAP), `reason`, `syscall` (its number, or OUTSIDE), `count`, `ns`,
`largest_ns`. Rows of one thread do not overlap in time, but for what is no time (`TIMELESS`): a row of TCP retransmits of a
thread has as `ns` how long it was blocked while they happened; one whose `tid` is 0 counts all of the process. And what was inside
of calls between two launches of their thread has rows of its own as well, see `parted`.

Spans (`SPAN`): `start_ns`, `end_ns` (CLOCK_BOOTTIME), `inode`, `tgid`, `tid`, `function`, `reason`, `syscall`: the same one by one. A
retransmit is one without length, whose `tid` is 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpubpf.calls.arrays import GAP
from gpubpf.process import syscalls

if TYPE_CHECKING:
    import numpy as np

# As enum context_reason of gpubpf_context.h has them.
PREEMPTED, BLOCKED, BLOCK_IO, PAGE_FAULT, MEMORY, STOPPED, FAULTS, RETRANSMITS = range(8)
DRIVER = 8  # what the GPU's driver did meanwhile: see kfd.py
TIMELESS = (FAULTS, RETRANSMITS, DRIVER)
OUTSIDE, UNKNOWN = -1, -2  # of a system call; whether it was in one
BETWEEN = 0x10000  # as CONTEXT_BETWEEN
PROCESS = -1  # in place of a function
_TEXTS = (
    *("preempted", "blocked in {}", "block I/O in {}", "blocked in {}", "memory pressure in {}", "stopped"),
    *("page faults", "TCP retransmits"),
)
ROW = [(name, "<u4") for name in ("tgid", "tid", "function", "reason")] + [
    ("syscall", "<i4"),
    ("count", "<u8"),
    ("ns", "<u8"),
    ("largest_ns", "<u8"),
]
KEY = ("tgid", "tid", "function", "reason", "syscall")


@dataclass(frozen=True)
class Cause:
    """What took `ns` in all and `largest_ns` at most, `count` times; `timeless`: `ns` is part of other causes' time."""

    reason: int
    text: str
    count: int
    ns: int
    largest_ns: int

    @property
    def timeless(self) -> bool:
        return self.reason in TIMELESS

    def tells(self, total_ns: int) -> bool:
        """Whether it can be why something took so long: 1 % of it, at half a microsecond for a page fault."""
        return (
            100 * (500 * self.count if self.reason == FAULTS else self.ns) >= total_ns
            or self.reason == RETRANSMITS
        )


def text(reason: int, syscall: int) -> str:
    """Such as "blocked in futex", "block I/O in a page fault"."""
    said = _TEXTS[reason] if reason < len(_TEXTS) else f"reason {reason}"
    if syscall == UNKNOWN:
        return said.removesuffix(" in {}")
    return said.format("a page fault" if syscall < 0 else syscalls.name(syscall))


def causes(rows: np.ndarray[Any, Any], name: Callable[[int], str] | None = None) -> list[Cause]:
    """Rows of any number of threads, together by reason: time first, the longest first. `name`: of a function, by its number, or
    ""; what was in different functions is told apart then."""
    whole = (rows["reason"] == RETRANSMITS) & (rows["tid"] == 0)
    if whole.any():  # what its threads have is part of it
        rows = rows[whole | (rows["reason"] != RETRANSMITS)]
    total: dict[str, list[int]] = {}
    for _, _, function, reason, syscall, count, ns, largest in rows.tolist():
        where = name(function) if name is not None else ""
        said = f"in {where} {text(reason, syscall)}" if where else text(reason, syscall)
        entry = total.setdefault(said, [reason, 0, 0, 0])
        entry[1] += count
        entry[2] += ns
        entry[3] = max(entry[3], largest)
    found = [Cause(reason, said, *rest) for said, (reason, *rest) in total.items()]
    return sorted(found, key=lambda cause: (cause.timeless, -cause.ns, -cause.count))


def by_place(rows: np.ndarray[Any, Any]) -> dict[int, np.ndarray[Any, Any]]:
    """Rows of threads by their function, or GAP; what is of a whole process under PROCESS."""
    import numpy as np

    places = np.where(rows["tid"] == 0, PROCESS, rows["function"].astype("i8"))
    return {place: rows[places == place] for place in sorted(set(places.tolist()))}


def together(parts: Iterable[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Rows with the same key as one."""
    import numpy as np

    rows = np.concatenate([np.empty(0, ROW), *parts])
    keys, place = np.unique(rows[list(KEY)], return_inverse=True)
    made = np.zeros(len(keys), ROW)
    for name in KEY:
        made[name] = keys[name]
    for name in ("count", "ns"):
        np.add.at(made[name], place, rows[name])
    np.maximum.at(made["largest_ns"], place, rows["largest_ns"])
    return made


def parted(rows: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Rows as at the top, by function or GAP; then those of all that was between launches, by the call in which it was, or GAP."""
    outside = rows["function"] == GAP
    inside = ~outside & (rows["function"] & BETWEEN != 0)
    between = rows[outside | inside]
    between["function"][between["function"] != GAP] &= BETWEEN - 1
    return rows[~inside], between


def since(rows: np.ndarray[Any, Any], before: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What has come to `rows`, which has each key once, since `before`. `largest_ns` is that of all time, as far as
    that fits into what has come."""
    import numpy as np

    place = {key: number for number, key in enumerate(before[list(KEY)].tolist())}
    at = np.array([place.get(key, -1) for key in rows[list(KEY)].tolist()], "i8")
    made = rows.copy()
    known = at >= 0
    for name in ("count", "ns"):
        old = before[name][at[known]]
        made[name][known] -= np.minimum(old, rows[name][known])
    made["largest_ns"] = np.minimum(made["largest_ns"], made["ns"])
    return made[(made["count"] > 0) | (made["ns"] > 0)]


def explain(spans: np.ndarray[Any, Any], tgid: int, tid: int, start_ns: int, end_ns: int) -> list[Cause]:
    """What a thread did from `start_ns` to `end_ns` beside running: its spans, in any order, cut to that time, and the retransmits of
    its process."""
    import numpy as np

    own = spans[(spans["tgid"] == tgid) & (spans["start_ns"] < end_ns) & (spans["end_ns"] > start_ns)]
    found = own[own["tid"] == tid]
    rows = np.zeros(len(found), ROW)
    rows["reason"], rows["syscall"], rows["count"] = found["reason"], found["syscall"], 1
    rows["ns"] = np.minimum(found["end_ns"], end_ns) - np.maximum(found["start_ns"], start_ns)
    rows["largest_ns"] = rows["ns"]
    made = causes(rows)
    if again := int(np.count_nonzero(own["reason"] == RETRANSMITS)):
        made.append(Cause(RETRANSMITS, text(RETRANSMITS, OUTSIDE), again, 0, 0))
    return made


class Spans:
    """Times that threads were off the CPU, kept until the calls in which they were have ended: the last `most` or so."""

    def __init__(self, most: int = 1 << 20, part: int = 1 << 13) -> None:
        self._most, self._part = most, part
        self._parts: deque[tuple[int, int, np.ndarray[Any, Any]]] = deque()  # from when, to when
        self._count = 0

    def add(self, spans: np.ndarray[Any, Any]) -> None:
        """Spans that ended since the last time."""
        import numpy as np

        if not len(spans):
            return
        self._count += len(spans)
        if self._parts and len(self._parts[-1][2]) < self._part:
            spans = np.concatenate([self._parts.pop()[2], spans])
        self._parts.append((int(spans["start_ns"].min()), int(spans["end_ns"].max()), spans))
        while self._count > self._most and len(self._parts) > 1:
            self._count -= len(self._parts.popleft()[2])

    def explain(self, tgid: int, tid: int, start_ns: int, end_ns: int) -> list[Cause]:
        """See the function of this name."""
        import numpy as np

        near = [spans for first, last, spans in self._parts if first < end_ns and last > start_ns]
        own = [spans[spans["tgid"] == tgid] for spans in near]
        return explain(np.concatenate(own), tgid, tid, start_ns, end_ns) if own else []

"""Why calls and the gaps between launches took long: the time that threads spent off the CPU, by reason
(docs/host-calls.md).

A row (`ROW`) sums the delays of a thread with the same reason: `tgid`, `tid`, `function` (its number, or
arrays.GAP), `reason`, `syscall` (its number, OUTSIDE or UNKNOWN), `count`, `ns`, `largest_ns`. Rows of one
thread do not overlap in time, with two exceptions. First, the reasons in TIMELESS are events, not times. For
TCP retransmits, `ns` is how long the thread was blocked while they happened, and a row whose `tid` is 0 counts
the retransmits of the whole process. Second, delays inside calls between two launches also have separate rows;
see `split_gaps`.

A span is one delay: `start_ns`, `end_ns` (CLOCK_BOOTTIME), `inode`, `tgid`, `tid`, `function`, `reason`,
`syscall`. The span of a retransmit has no length, and its `tid` is 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gpubpf.calls.arrays import GAP
from gpubpf.kernel import syscalls
from gpubpf.record import Record

if TYPE_CHECKING:
    import numpy as np

# The numbers of enum delay_reason in gpubpf_delays.h.
PREEMPTED, BLOCKED, BLOCK_IO, PAGE_FAULT, MEMORY, STOPPED, FAULTS, RETRANSMITS = range(8)
DRIVER = 8  # the GPU driver did something meanwhile; see kfd.py
TIMELESS = (FAULTS, RETRANSMITS, DRIVER)
OUTSIDE, UNKNOWN = -1, -2  # instead of a system call's number: outside system calls, or unknown
BETWEEN = 0x10000  # DELAY_BETWEEN: added to a function's number in rows between launches
PROCESS = -1  # instead of a function: the whole process
# By number: the word in JSON, and the text, in which {} stands for the system call or "a page fault".
DELAY_REASONS = (
    ("preempted", "preempted"),
    ("blocked", "blocked in {}"),
    ("block_io", "block I/O in {}"),
    ("page_fault", "blocked in {}"),
    ("memory", "memory pressure in {}"),
    ("stopped", "stopped"),
    ("page_faults", "page faults"),
    ("tcp_retransmits", "TCP retransmits"),
)
ROW = [(name, "<u4") for name in ("tgid", "tid", "function", "reason")] + [
    ("syscall", "<i4"),
    ("count", "<u8"),
    ("ns", "<u8"),
    ("largest_ns", "<u8"),
]
KEY = ("tgid", "tid", "function", "reason", "syscall")


class Cause(Record):
    """A reason for a delay. It happened `count` times and took `ns` in total, at most `largest_ns` at once.

    `where`: the function in which it happened, if functions are distinguished.
    """

    reason: int
    text: str
    count: int
    ns: int
    largest_ns: int
    where: str = ""

    @property
    def timeless(self) -> bool:
        """Whether this is an event: its `ns` is part of the time of other causes."""
        return self.reason in TIMELESS

    def is_significant(self, total_ns: int) -> bool:
        """Return whether this is at least 1 % of `total_ns`. A page fault counts as 500 ns; retransmits are
        always significant.
        """
        return (
            100 * (500 * self.count if self.reason == FAULTS else self.ns) >= total_ns
            or self.reason == RETRANSMITS
        )


def text(reason: int, syscall: int) -> str:
    """Return a description, such as "blocked in futex" or "block I/O in a page fault"."""
    said = DELAY_REASONS[reason][1] if reason < len(DELAY_REASONS) else f"reason {reason}"
    if syscall == UNKNOWN:
        return said.removesuffix(" in {}")
    return said.format("a page fault" if syscall < 0 else syscalls.name(syscall))


def causes(rows: np.ndarray[Any, Any], name: Callable[[int], str] | None = None) -> list[Cause]:
    """Sum rows of any threads by reason. Causes with a time come first, longest first.

    `name` returns the name of a function, or "". If it is given, delays in different functions are different
    causes.
    """
    whole = (rows["reason"] == RETRANSMITS) & (rows["tid"] == 0)
    if whole.any():  # these already include the retransmits of threads
        rows = rows[whole | (rows["reason"] != RETRANSMITS)]
    total: dict[tuple[str, str], list[int]] = {}
    for _, _, function, reason, syscall, count, ns, largest in rows.tolist():
        where = name(function) if name is not None else ""
        entry = total.setdefault((text(reason, syscall), where), [reason, 0, 0, 0])
        entry[1] += count
        entry[2] += ns
        entry[3] = max(entry[3], largest)
    found = [
        Cause(reason, said, count, ns, largest, where)
        for (said, where), (reason, count, ns, largest) in total.items()
    ]
    return sorted(found, key=lambda cause: (cause.timeless, -cause.ns, -cause.count))


def by_function(rows: np.ndarray[Any, Any]) -> dict[int, np.ndarray[Any, Any]]:
    """Return the rows by function. Other keys: GAP for gaps between launches, PROCESS for rows of a whole
    process.
    """
    import numpy as np

    places = np.where(rows["tid"] == 0, PROCESS, rows["function"].astype("i8"))
    return {place: rows[places == place] for place in sorted(set(places.tolist()))}


def merge_rows(parts: Iterable[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Sum rows that have the same key."""
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


def split_gaps(rows: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return two arrays: the rows by function or GAP, without BETWEEN; and the rows between launches.

    In the second array, `function` is the call in which the thread was between two launches, or GAP if the
    thread was not in a call.
    """
    outside = rows["function"] == GAP
    inside = ~outside & (rows["function"] & BETWEEN != 0)
    between = rows[outside | inside]
    between["function"][between["function"] != GAP] &= BETWEEN - 1
    return rows[~inside], between


def rows_since(rows: np.ndarray[Any, Any], before: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return what was added to `rows` since `before`. `rows` have each key once.

    `largest_ns` is the largest since the beginning, but at most the new `ns`.
    """
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
    """Return why a thread was off the CPU from `start_ns` to `end_ns`, and the retransmits of its process in
    this interval.

    `spans` may be in any order. Only the part of a span inside the interval counts.
    """
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


class RecentSpans:
    """About the last `most` spans, kept until the calls that contain them have returned."""

    def __init__(self, most: int = 1 << 20, part: int = 1 << 13) -> None:
        self._most, self._part = most, part
        self._parts: deque[tuple[int, int, np.ndarray[Any, Any]]] = deque()  # start, end, spans
        self._count = 0

    def add(self, spans: np.ndarray[Any, Any]) -> None:
        """Add spans that ended since the last call."""
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
        """Call the function `explain` with the kept spans."""
        import numpy as np

        overlapping = [spans for first, last, spans in self._parts if first < end_ns and last > start_ns]
        own = [spans[spans["tgid"] == tgid] for spans in overlapping]
        return explain(np.concatenate(own), tgid, tid, start_ns, end_ns) if own else []

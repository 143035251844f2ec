"""How long copies and kernels of a process ran at the same time on a GPU.

overlap = Overlap()
overlap.add(view, new)          # any number of times
records = overlap.records()     # one for each GPU with copies
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gpubpf.agent.definitions import Kind, Vendor
from gpubpf.launches import arrays, dependencies
from gpubpf.launches.dependencies import NONE
from gpubpf.record import MutableRecord, field
from gpubpf.show import table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpubpf.launches.latency import LaunchView

    Integers: TypeAlias = NDArray[np.int64]

COPIES = (Kind.H2D, Kind.D2H, Kind.D2D)  # not H2H, which does not involve the GPU
MOST = 1 << 20  # maximum intervals to keep per GPU and process; if there are more, the older half is summed

_Gpu: TypeAlias = tuple[Vendor, int]


class _Intervals(MutableRecord):
    """When a GPU worked for a process. Intervals are int64 [n, 2], disjoint and in order; those before `begin` are summed."""

    copies: Integers = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    kernels: Integers = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    begin: int = NONE
    copy_ns: int = 0
    overlap_ns: int = 0

    def add(self, copies: Integers, kernels: Integers) -> None:
        self.copies = merged(self.copies, clipped(copies, self.begin))
        self.kernels = merged(self.kernels, clipped(kernels, self.begin))
        while len(self.copies) + len(self.kernels) > MOST:
            self.add_up(int(np.median(np.concatenate([self.copies, self.kernels])[:, 0])) + 1)

    def add_up(self, end: int) -> None:
        """Sum all intervals before `end`."""
        copies, kernels = clipped(self.copies, end=end), clipped(self.kernels, end=end)
        self.copy_ns += length(copies)
        self.overlap_ns += length(copies) + length(kernels) - length(merged(copies, kernels))
        self.copies, self.kernels = clipped(self.copies, end), clipped(self.kernels, end)
        self.begin = end


class Overlap:
    """Adds up operations as they arrive."""

    def __init__(self) -> None:
        self._intervals: dict[tuple[int, _Gpu], _Intervals] = {}  # by process and GPU
        self._counts: dict[_Gpu, dict[str, int]] = {}

    def add(self, view: LaunchView, new: Integers) -> None:
        """Add operations, given by their indices in `view`."""
        columns, ops = view.columns, view.ops
        kernels, copies = ops.kind[new] == Kind.KERNEL, np.isin(ops.kind[new], COPIES)
        places = new[kernels | copies]
        number = arrays.row_numbers(columns.process[places], columns.gpu[places])
        order = np.argsort(number, kind="stable")
        for part in arrays.equal_runs(number[order]):
            at = places[order[part]]
            process = columns.processes[int(columns.process[at[0]])]
            gpu = process.vendor, int(columns.gpu[at[0]])
            is_copy = ops.kind[at] != Kind.KERNEL
            timed = (ops.start[at] != NONE) & (ops.end[at] != NONE)
            counts = self._counts.setdefault(
                gpu, dict.fromkeys(("copies", "copies_untimed", "kernels", "kernels_untimed"), 0)
            )
            for name, some in (("copies", is_copy), ("kernels", ~is_copy)):
                counts[name] += int(some.sum())
                counts[f"{name}_untimed"] += int((some & ~timed).sum())
            spans = np.stack([ops.start[at], ops.end[at]], axis=1)
            key = process.number or process.pid, gpu
            self._intervals.setdefault(key, _Intervals()).add(spans[is_copy & timed], spans[~is_copy & timed])

    def records(self) -> list[dict[str, Any]]:
        """Return `copy_overlap` of the summary record: for each GPU with copies, how long they took, and how long kernels ran
        at the same time. None stands for an unknown time.
        """
        found = []
        for gpu, counts in sorted(self._counts.items()):
            if not counts["copies"]:
                continue
            mine = [one for (_, of), one in self._intervals.items() if of == gpu]
            for one in mine:
                one.add_up(dependencies.NEVER)
            known = counts["copies"] > counts["copies_untimed"]
            overlap = known and not 0 < counts["kernels"] == counts["kernels_untimed"]
            vendor, number = gpu
            record: dict[str, Any] = {"gpu": number, "vendor": vendor.word}
            record |= {name: count for name, count in counts.items() if name != "kernels"}
            record["copy_ns"] = sum(one.copy_ns for one in mine) if known else None
            record["overlap_ns"] = sum(one.overlap_ns for one in mine) if overlap else None
            found.append(record)
        return found


def lines(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each record of `Overlap.records`."""
    vendors = {record["vendor"] for record in records}
    for record in records:
        vendor = f"{record['vendor'].upper()} " if len(vendors) > 1 else ""
        where = f" on {vendor}GPU {record['gpu']}" if len(records) > 1 else ""
        copied, both = record["copy_ns"], record["overlap_ns"]
        said = f"copies{where}: overlap with kernels unknown"
        if both is not None:
            share = f"kernels ran for {100 * both / max(copied, 1):.0f} % of it ({table.with_unit(both)})"
            said = f"copies{where}: {table.with_unit(copied)}; {share if both else 'no kernel ran meanwhile'}"
        untimed = [
            f"{count:,} {one if count == 1 else many}"
            for one, many in (("copy", "copies"), ("kernel", "kernels"))
            if (count := record[f"{many}_untimed"])
        ]
        yield from table.wrap(said + (f"; not timed: {', '.join(untimed)}" if untimed else ""), glue=" %")


def merged(one: Integers, other: Integers) -> Integers:
    """Return the union of intervals: disjoint and in order."""
    both = np.concatenate([one, other])
    both = both[np.argsort(both[:, 0], kind="stable")]
    if not len(both):
        return both
    ends = np.maximum.accumulate(both[:, 1])
    first = np.concatenate([[True], both[1:, 0] > ends[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([both[first, 0], ends[last]], axis=1)


def clipped(intervals: Integers, begin: int = NONE, end: int = dependencies.NEVER) -> Integers:
    """Return the parts of intervals from `begin` to `end`."""
    made = np.clip(intervals, begin, end)
    return made[made[:, 1] > made[:, 0]]


def length(intervals: Integers) -> int:
    """Return the total length of disjoint intervals."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())

"""Statistics of calls: by function, and by kernel with the gaps before its launches.

    for row in by_function(sums, comm, api): row.function_record()
    for row in by_kernel(sums, comm, name_of, api): row.kernel_record()

`sums` is the array that `CallProbes.sums` returns. Times are in ns. Percentiles are within 6 %; counts, means
and maxima are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf.calls import arrays
from gpubpf.calls.call_fields import FUNCTION, KERNEL
from gpubpf.names import KernelName
from gpubpf.record import MutableRecord, field

if TYPE_CHECKING:
    from gpubpf.calls.api import Api

NameOrAddress = KernelName | str | None  # a name, the address of a kernel whose name is unknown, or no kernel
_KEY = ["tgid", "function", "kernel"]  # fields of the array of sums


class Durations(MutableRecord):
    """Durations: their count, sum, maximum and histogram, and how much of the sum was off the CPU."""

    count: int = 0
    ns: int = 0
    largest_ns: int = 0
    off_ns: int = 0
    buckets: Any = 0

    def add(self, sum_: Any, fields: Sequence[str]) -> None:
        """Add one sum. `fields`: the fields of the array with the count, sum, maximum, off-CPU time and
        histogram.
        """
        count, ns, largest, off, buckets = fields
        self.count += int(sum_[count])
        self.ns += int(sum_[ns])
        self.largest_ns = max(self.largest_ns, int(sum_[largest]))
        self.off_ns += int(sum_[off])
        self.buckets = self.buckets + sum_[buckets].astype(np.int64)

    def distribution(self) -> dict[str, int] | None:
        """Return mean, p50, p99 and max, or None without durations."""
        if not self.count:
            return None
        p50 = p99 = self.largest_ns
        if self.count > 1:
            p50, p99 = (arrays.percentile(self.buckets, q, self.largest_ns) for q in (0.5, 0.99))
        return {"mean": round(self.ns / self.count), "p50": p50, "p99": p99, "max": self.largest_ns}


class CallStatistics(MutableRecord):
    """The calls of a function, or the launches of a kernel, by one process: a row of a table.

    number: number of the function.
    address: a handle of the kernel.
    times: durations of the calls.
    gaps: durations from the return of a thread's launch to its next launch, if that launches this kernel.
    runs: durations of the kernel on the GPU, if known.
    """

    pid: int
    comm: str
    name: str
    kernel: KernelName | None = None
    number: int = 0
    address: int = 0
    gpu: int = 0
    errors: int = 0
    error: int = 0  # the number of the last error
    error_name: str = ""  # its name, only for a function
    times: Durations = field(default_factory=Durations)
    gaps: Durations = field(default_factory=Durations)
    runs: Durations = field(default_factory=Durations)

    def add(self, sum_: Any) -> None:
        """Add one element of the array of sums."""
        self.errors += int(sum_["errors"])
        self.error = int(sum_["error"]) or self.error
        self.times.add(sum_, ("count", "ns", "largest_ns", "off_ns", "latency"))
        self.gaps.add(sum_, ("gaps", "gap_ns", "gap_largest_ns", "gap_off_ns", "gap"))

    def function_record(self) -> dict[str, Any]:
        """Return the record "api"."""
        return FUNCTION.record(self)

    def kernel_record(self) -> dict[str, Any]:
        """Return the record "kernel". Fields that do not apply are absent."""
        return KERNEL.record(self)


def by_function(sums: Any, comm: Callable[[int], str], api: Api) -> list[CallStatistics]:
    """Return a row for each process and function, most time first."""
    found: dict[tuple[int, int], CallStatistics] = {}
    for one in sums:
        pid, number = int(one["tgid"]), int(one["function"])
        row = found.get((pid, number))
        if row is None:
            name = api.functions[number].name
            row = found[pid, number] = CallStatistics(pid, comm(pid), name, number=number)
        row.add(one)
        if row.errors:
            row.error_name = api.error(api.functions[number], row.error)
    return sorted(found.values(), key=lambda row: (-row.times.ns, row.name))


def by_kernel(
    sums: Any, comm: Callable[[int], str], name_of: Callable[[int, int], NameOrAddress], api: Api
) -> list[CallStatistics]:
    """Return a row for each process and kernel, most launches first.

    A kernel may have several handles. A handle without a name has its own row, under its address.
    Launches without a handle, such as those of graphs, are listed under the name of their function.
    """
    found: dict[tuple[int, str], CallStatistics] = {}
    for one in sums:
        pid, handle, function = int(one["tgid"]), int(one["kernel"]), api.functions[int(one["function"])]
        if not handle and function.group != "launch":
            continue
        name = name_of(pid, handle) if handle else f"[{function.name}]"
        key = pid, name.mangled if isinstance(name, KernelName) else name or f"{handle:#x}"
        row = found.get(key)
        if row is None:
            named = name if isinstance(name, KernelName) else None
            short = named.short if named else key[1]
            row = found[key] = CallStatistics(pid, comm(pid), short, named, address=handle)
        row.add(one)
    return sorted(found.values(), key=lambda row: (-row.times.count, row.name))


def sums_of_events(events: Any, dtype: Any) -> Any:
    """Sum these events in the form of `CallProbes.sums`, whose dtype is `dtype`."""
    keys, place = np.unique(events[_KEY], return_inverse=True)
    made = np.zeros(len(keys), dtype)
    for name in _KEY:
        made[name] = keys[name]
    edges = arrays.bounds()[1:-1]
    failed, after = events["failed"] != 0, events["after"] != 0
    parts = (
        (slice(None), events["end_ns"] - events["start_ns"], arrays.off_ns(events["spent"]), ""),
        (after, events["gap_ns"], events["gap_off_ns"], "gap_"),
    )
    for chosen, ns, off_ns, kind in parts:
        where, ns = place[chosen], ns[chosen]
        np.add.at(made["gaps" if kind else "count"], where, 1)
        np.add.at(made[f"{kind}ns"], where, ns)
        np.add.at(made[f"{kind}off_ns"], where, off_ns[chosen])
        np.maximum.at(made[f"{kind}largest_ns"], where, ns)
        np.add.at(made["gap" if kind else "latency"], (where, np.searchsorted(edges, ns, side="right")), 1)
    np.add.at(made["errors"], place[failed], 1)
    made["error"][place[failed]] = events["result"][failed] & np.uint64(0xFFFFFFFF)
    return made


def merge_sums(parts: Sequence[Any]) -> Any:
    """Sum arrays of `CallProbes.sums`: the result has each process, function and kernel once."""
    array = np.concatenate(parts)
    keys, place = np.unique(array[_KEY], return_inverse=True)
    made = np.zeros(len(keys), array.dtype)
    for name in made.dtype.names or ():
        if name in _KEY:
            made[name] = keys[name]
        elif name == "error":  # the last one counts
            failed = array["error"] != 0
            made[name][place[failed]] = array[name][failed]
        elif name in ("largest_ns", "gap_largest_ns"):
            np.maximum.at(made[name], place, array[name])
        else:
            np.add.at(made[name], place, array[name])
    return made

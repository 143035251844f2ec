"""Calls added up: by function, and by kernel with the gaps before its launches.

    for row in functions(array, owner, api): row.record()
    for row in kernels(array, owner, name_of): row.record()

`array` is what `Calls.sums` gives. Times in ns; percentiles are right to 6 %, counts, means and largest exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf.calls import arrays
from gpubpf.names import Name

if TYPE_CHECKING:
    from gpubpf.calls.api import Api

Kernel = Name | str | None  # a name, an address that nobody can name, none
_KEY = ["tgid", "function", "kernel"]  # of the array


@dataclass
class Times:
    """Durations: how many, how long together, the longest, how much of it off the CPU, and how they are spread."""

    count: int = 0
    ns: int = 0
    largest_ns: int = 0
    off_ns: int = 0
    buckets: Any = 0

    def add(self, sum_: Any, fields: Sequence[str]) -> None:
        """An element of the array; in which of its fields these are."""
        count, ns, largest, off, buckets = fields
        self.count += int(sum_[count])
        self.ns += int(sum_[ns])
        self.largest_ns = max(self.largest_ns, int(sum_[largest]))
        self.off_ns += int(sum_[off])
        self.buckets = self.buckets + sum_[buckets].astype(np.int64)

    def distribution(self) -> dict[str, int] | None:
        """Mean, p50, p99 and max; None without durations."""
        if not self.count:
            return None
        p50 = p99 = self.largest_ns
        if self.count > 1:
            p50, p99 = (arrays.percentile(self.buckets, q, self.largest_ns) for q in (0.5, 0.99))
        return {"mean": round(self.ns / self.count), "p50": p50, "p99": p99, "max": self.largest_ns}


@dataclass
class Row:
    """One line of a table: the calls of a function, or the launches of a kernel, by a process. `number`: of a function;
    `address`: a handle of a kernel. `gaps`: between the return of a thread's launch and its next one, which is of this kernel.
    `runs`: on the GPU, where that is known."""

    pid: int
    comm: str
    name: str
    kernel: Name | None = None
    number: int = 0
    address: int = 0
    gpu: int = 0
    errors: int = 0
    error: int = 0  # the last one's number,
    error_name: str = ""  # of a function: its name
    times: Times = field(default_factory=Times)
    gaps: Times = field(default_factory=Times)
    runs: Times = field(default_factory=Times)

    def add(self, sum_: Any) -> None:
        """`sum_`: an element of the array."""
        self.errors += int(sum_["errors"])
        self.error = int(sum_["error"]) or self.error
        self.times.add(sum_, ("count", "ns", "largest_ns", "off_ns", "latency"))
        self.gaps.add(sum_, ("gaps", "gap_ns", "gap_largest_ns", "gap_off_ns", "gap"))

    def function_record(self) -> dict[str, Any]:
        """The record "api"."""
        return {
            "type": "api",
            "pid": self.pid,
            "comm": self.comm,
            "api": self.name,
            "count": self.times.count,
            "errors": self.errors,
            **({"last_error": self.error_name} if self.errors else {}),
            "lat_ns": self.times.distribution(),
            "total_ns": self.times.ns,
            "off_cpu_ns": self.times.off_ns,
        }

    def kernel_record(self) -> dict[str, Any]:
        """The record "kernel". What does not apply is absent."""
        record: dict[str, Any] = {"type": "kernel", "pid": self.pid, "comm": self.comm, "kernel": self.name}
        if self.kernel is not None:
            record |= {"demangled": self.kernel.full, "mangled": self.kernel.mangled}
        record |= {"fn_addr": f"{self.address:#x}"} if self.address else {}
        record |= {"count": self.times.count, "errors": self.errors}
        if (gaps := self.gaps.distribution()) is not None:
            record |= {"gap_ns": gaps, "gap_total_ns": self.gaps.ns, "gap_off_cpu_ns": self.gaps.off_ns}
        if (runs := self.runs.distribution()) is not None:
            record |= {"exec_ns": runs, "exec_total_ns": self.runs.ns, "runs": self.runs.count}
        return record


def functions(array: Any, comm: Callable[[int], str], api: Api) -> list[Row]:
    """By process and function, most time first."""
    found: dict[tuple[int, int], Row] = {}
    for one in array:
        pid, number = int(one["tgid"]), int(one["function"])
        row = found.get((pid, number))
        if row is None:
            row = found[pid, number] = Row(pid, comm(pid), api.functions[number].name, number=number)
        row.add(one)
        if row.errors:
            row.error_name = api.error(api.functions[number], row.error)
    return sorted(found.values(), key=lambda row: (-row.times.ns, row.name))


def kernels(
    array: Any, comm: Callable[[int], str], name_of: Callable[[int, int], Kernel], api: Api
) -> list[Row]:
    """By process and kernel, most launches first. One kernel may have several handles, and handles of one kernel no name. What is
    launched without one (a graph) goes by its function."""
    found: dict[tuple[int, str], Row] = {}
    for one in array:
        pid, handle, function = int(one["tgid"]), int(one["kernel"]), api.functions[int(one["function"])]
        if not handle and function.group != "launch":
            continue
        name = name_of(pid, handle) if handle else f"[{function.name}]"
        key = pid, name.mangled if isinstance(name, Name) else name or f"{handle:#x}"
        row = found.get(key)
        if row is None:
            named = name if isinstance(name, Name) else None
            row = found[key] = Row(pid, comm(pid), named.short if named else key[1], named, address=handle)
        row.add(one)
    return sorted(found.values(), key=lambda row: (-row.times.count, row.name))


class Picked:
    """Of each kernel and process the launches that --launch and --sample mean; launches count from 1."""

    def __init__(self, extent: tuple[int, int | None], sample: int) -> None:
        self._first, self._last = extent
        self._sample = sample
        self._seen: dict[tuple[int, object], int] = {}

    def of(self, events: Any, name_of: Callable[[int, int], Kernel]) -> Any:
        """Those of `Calls.events`, each time in their order."""
        wanted = np.zeros(len(events), bool)
        for at in np.flatnonzero(events["launch"]).tolist():
            pid, handle = int(events["tgid"][at]), int(events["kernel"][at])
            key = pid, (name_of(pid, handle) if handle else None) or (int(events["function"][at]), handle)
            number = self._seen[key] = self._seen.get(key, 0) + 1
            inside = self._first <= number and (self._last is None or number <= self._last)
            wanted[at] = inside and (number - self._first) % self._sample == 0
        return events[wanted]


def of_events(events: Any, dtype: Any) -> Any:
    """What `Calls.sums` would give of these calls alone, of its dtype."""
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


def merged(parts: Sequence[Any]) -> Any:
    """Arrays as `Calls.sums` gives them as one, with each process, function and kernel once."""
    array = np.concatenate(parts)
    keys, place = np.unique(array[_KEY], return_inverse=True)
    made = np.zeros(len(keys), array.dtype)
    for name in made.dtype.names or ():
        if name in _KEY:
            made[name] = keys[name]
        elif name == "error":  # the last one's
            failed = array["error"] != 0
            made[name][place[failed]] = array[name][failed]
        elif name in ("largest_ns", "gap_largest_ns"):
            np.maximum.at(made[name], place, array[name])
        else:
            np.add.at(made[name], place, array[name])
    return made

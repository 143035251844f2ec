"""Launches added up as they come, in memory for what differs among them: the lines of launchlate's table.

sums = Sums(("queue",))
sums.add(view, chosen)          # any number of times
for group in sums.groups:       # by kernel and stream
    record = kernel_record(group, by_stream=True)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gpubpf.launches import dependencies
from gpubpf.launches.dependencies import NONE, Kind
from gpubpf.launches.latency import SPLIT, Row, View, rows_for_a_graph
from gpubpf.launches.launches import METHODS
from gpubpf.session.clock import UNKNOWN
from gpubpf.show import histogram

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers: TypeAlias = NDArray[np.int64]

TIMES = ("latency", *SPLIT, "exec")
# That are told apart: rows of the table, and what the launches of one waited behind.
MOST_GROUPS, MOST_WAITED = 4096, 256
EXACT = 4096  # different values; of more than that each is kept to 1 part in 256
_BITS = 8


class Tally:
    """Values (int64; NONE is left out) and how often each came. Count, mean and largest are exact, percentiles are right to 0.4 %."""

    def __init__(self, values: Any = ()) -> None:
        self.count = self.total = 0
        self.largest: int | None = None
        self._values, self._counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._exact = True
        self.add(np.asarray(values, np.int64))

    def add(self, values: Integers) -> None:
        values = values[values != NONE]
        if len(values):
            self._merge(values, np.ones(len(values), np.int64), int(values.sum()), int(values.max()))

    def plus(self, other: Tally) -> None:
        if other.largest is not None:
            self._merge(other._values, other._counts, other.total, other.largest)

    def _merge(self, values: Integers, counts: Integers, total: int, largest: int) -> None:
        self.count += int(counts.sum())
        self.total += total
        self.largest = largest if self.largest is None else max(self.largest, largest)
        counts = np.concatenate([self._counts, counts])
        values = np.concatenate([self._values, values])
        unique, places = np.unique(values, return_inverse=True)
        if self._exact and len(unique) > EXACT:
            self._exact = False
        if not self._exact:
            unique, places = np.unique(_rounded(values), return_inverse=True)
        self._counts = np.zeros(len(unique), np.int64)
        np.add.at(self._counts, places, counts)
        self._values = unique

    def percentile(self, percent: int) -> int:
        """By nearest rank. There is at least one value."""
        rank = -(-self.count * percent // 100)
        value = int(self._values[np.searchsorted(np.cumsum(self._counts), rank)])
        assert self.largest is not None
        return min(value, self.largest)

    def distribution(self) -> dict[str, int] | None:
        """Mean, p50, p99 and max; None without values."""
        if self.largest is None:
            return None
        mean = round(self.total / self.count)
        return {"mean": mean, "p50": self.percentile(50), "p99": self.percentile(99), "max": self.largest}


def _rounded(values: Integers) -> Integers:
    """To `_BITS` bits."""
    size = np.abs(values)
    _, exponent = np.frexp(size.astype(np.float64))
    shift = np.maximum(exponent - _BITS, 0).astype(np.int64)
    return np.sign(values) * ((size + (np.int64(1) << shift >> 1)) >> shift << shift)


@dataclass
class Group:
    """Launches of one kernel (and stream, graph node) of one process and GPU, or of one graph, added up. `fields`: how its record
    begins. `title`: graph and node, and the kernel. `waited`: behind what they waited: how often, how long in all (ns)."""

    fields: dict[str, Any]
    title: str
    process: int
    gpu: int
    stream: str | None
    stream_handle: str | None
    graph: dict[str, Any] | None
    times: dict[str, Tally] = field(default_factory=lambda: {what: Tally() for what in TIMES})
    count: int = 0
    clock_error: int | None = None
    unknown: int = 0
    methods: Counter[str] = field(default_factory=Counter)
    waited: dict[tuple[tuple[str, str], ...], list[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.count

    @property
    def pid(self) -> int:
        return int(self.fields["pid"])

    @property
    def comm(self) -> str:
        return str(self.fields["comm"])

    def add(self, view: View, at: Integers) -> None:
        """More of its launches, by their places."""
        found, waits = view.found, view.waits
        self.count += len(at)
        for what, tally in self.times.items():
            tally.add(getattr(waits, what)[at])
        self.clock_error = most(self.clock_error, clock_error(view, at))
        self.unknown += int((waits.latency[at] == NONE).sum())
        for n, name in enumerate(METHODS):
            if name:
                self.methods[name] += int((found.method[at] == n).sum())
        for place in at[waits.waited_for[at] >= 0].tolist():
            key = tuple((view.waited_for(place) or {}).items())
            if key not in self.waited and len(self.waited) >= MOST_WAITED:
                key = (("kind", "api"), ("name", "other work"))
            entry = self.waited.setdefault(key, [0, 0])
            entry[0] += 1
            entry[1] += max(int(waits.wait[place]), 0)

    def waited_for(self) -> list[tuple[dict[str, str], int, int]]:
        """Behind what the launches waited: what, how often, how long in all (ns); the longest first."""
        listed = [(dict(key), count, total) for key, (count, total) in self.waited.items()]
        return sorted(listed, key=lambda item: -item[2])


class Sums:
    """Launches as they come, added up: of `by` ("queue", "graph", "node") each by itself, with `graphs` also the graphs as a whole.
    Needs memory for what differs, not for each launch."""

    def __init__(self, by: Sequence[str] = (), graphs: bool = False) -> None:
        self._by, self._with_graphs = tuple(by), graphs
        self._groups: dict[tuple[Any, ...], Group] = {}
        self._graphs: dict[int, Group] = {}
        self.count = 0
        self.whole: Counter[str] = (
            Counter()
        )  # of launches of which all parts are known: how many, and where their time went
        self.slots = {
            unit: np.zeros(64, np.int64) for unit in (1, 1000)
        }  # of latencies: log2, by ns in a unit
        self.slowest = NONE
        self.errors = Tally()
        self.virtual, self.clock_steps = False, 0
        self.stacks: Counter[tuple[str, ...]] = Counter()
        self.rows = self.gain = 0
        self.best_row: Row | None = None

    def add(self, view: View, chosen: Integers, stacks: bool = False) -> None:
        """Launches by their places in `view`."""
        self._add_groups(view, chosen)
        self.count += len(chosen)
        self.virtual |= any(process.virtual for process in view.found.processes)
        self.clock_steps = max(self.clock_steps, view.found.clock_steps)
        errors = view.found.start_error[chosen]
        self.errors.add(errors[errors != UNKNOWN])
        parts = {name: getattr(view.waits, name)[chosen] for name in SPLIT}
        known_ = np.all([values != NONE for values in parts.values()], axis=0)
        latency = view.waits.latency[chosen]
        # A kernel may start before its call returns.
        called = np.minimum(parts["api"], latency)[known_]
        waited = np.clip(latency[known_] - called, 0, parts["wait"][known_])
        total = int(latency[known_].sum())
        sums = {"api": int(called.sum()), "wait": int(waited.sum())}
        sums |= {"overhead": total - sum(sums.values()), "count": int(known_.sum())}
        self.whole.update(sums)
        latency = latency[latency != NONE]
        self.slowest = max(self.slowest, int(latency.max(initial=NONE)))
        for unit, counts in self.slots.items():
            slots = histogram.log2_slots(np.maximum(latency, 0) // unit)
            counts[: len(slots)] += slots
        if stacks:
            keys = Counter(
                zip(view.found.process[chosen].tolist(), view.found.stack[chosen].tolist(), strict=True)
            )
            for (process, number), count in keys.items():
                frames = tuple(view.frames(process, number))
                self.stacks[frames if len(self.stacks) < MOST_GROUPS or frames in self.stacks else ()] += (
                    count
                )
        for row in rows_for_a_graph(view, chosen):
            self.rows += 1
            self.gain += row.took - row.as_graph
            if self.best_row is None or row.took - row.as_graph > self.best_row.took - self.best_row.as_graph:
                self.best_row = row

    def _add_groups(self, view: View, chosen: Integers) -> None:
        found, ops = view.found, view.ops
        if not len(chosen):
            return
        columns = {"queue": ops.queue, "graph": ops.graph, "node": ops.node}
        keys = [found.name, found.process, found.gpu, *(columns[name] for name in self._by)]
        number = dependencies.numbered(*(column[chosen] for column in keys))
        order = np.argsort(number, kind="stable")
        for place in dependencies.runs(number[order]):
            part = chosen[order[place]]
            first = int(part[0])
            process, queue = found.processes[int(found.process[first])], int(ops.queue[first])
            key: tuple[Any, ...] = (
                process.number or process.pid,
                found.names[int(found.name[first])],
                int(found.gpu[first]),
            )
            key += tuple(
                found.queue_keys[queue][0] if name == "queue" else int(columns[name][first])
                for name in self._by
            )
            if len(self._groups) >= MOST_GROUPS and key not in self._groups:
                key = (key[0], "(others)", key[2])
            if key not in self._groups:
                self._groups[key] = group = new_group(view, first, self._by)
                if key[1] == "(others)":
                    group.title = "(others)"
                    group.fields |= dict.fromkeys(("kernel", "demangled", "mangled"), group.title)
            self._groups[key].add(view, part)
        if self._with_graphs:
            launches = np.unique(found.parent[chosen])
            launches = launches[launches >= 0]
            for graph in np.unique(ops.graph[launches]).tolist():
                part = launches[ops.graph[launches] == graph]
                if graph not in self._graphs and len(self._graphs) < MOST_GROUPS:
                    self._graphs[graph] = new_group(view, int(part[0]), ("queue", "graph"))
                if graph in self._graphs:
                    self._graphs[graph].add(view, part)

    @property
    def groups(self) -> list[Group]:
        """Graphs, then kernels, those with most time lost first."""
        made = sorted(self._groups.values(), key=lambda group: -group.times["latency"].total)
        return [*(group for _, group in sorted(self._graphs.items())), *made]


def new_group(view: View, at: int, by: Sequence[str]) -> Group:
    """The group that a launch belongs to, without any."""
    found, name = view.found, int(view.found.name[at])
    is_graph = view.ops.kind[at] == Kind.GRAPH
    fields: dict[str, Any] = {"type": "graph" if is_graph else "kernel", **view.common(at)}
    title = f"graph {int(view.ops.graph[at]) + 1}"
    graph = None
    if view.ops.graph[at] >= 0:
        graph = {"exec": f"0x{int(found.exec[at]):x}"} | (
            {} if is_graph else {"node": int(view.ops.node[at])}
        )
    if not is_graph:
        fields |= {"kernel": view.short[name], "demangled": view.full[name], "mangled": found.names[name]}
        title = view.labels[name]
        if "graph" in by and graph:
            title = f"{int(view.ops.graph[at]) + 1}.{graph['node']} {title}"
    stream = view.streams[int(view.ops.queue[at])] if "queue" in by else None
    handle = f"0x{int(found.stream[at]):x}"
    process = found.processes[int(found.process[at])]
    return Group(fields, title, process.number or process.pid, int(found.gpu[at]), stream, handle, graph)


def most(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)


def clock_error(view: View, at: Integers) -> int | None:
    """The largest error of the starts, ns."""
    errors = view.found.start_error[at]
    errors = errors[errors != UNKNOWN]
    if not len(errors) and len(at) and view.ops.kind[at[0]] == Kind.GRAPH:  # of what is in it
        inside = np.flatnonzero(np.isin(view.found.parent, at))
        return clock_error(view, inside) if len(inside) else None
    return int(errors.max()) if len(errors) else None


def kernel_record(group: Group, by_stream: bool, by_node: bool = False) -> dict[str, Any]:
    """The record of a line of the table."""
    fields = group.fields | {"stream": group.stream_handle if by_stream else None}
    if by_node and group.graph:
        fields |= {"graph": group.graph}
    fields["count"] = group.count
    for what, tally in group.times.items():
        fields[f"{what}_ns"] = tally.distribution()
    fields |= {"clock_error_ns": group.clock_error, "unknown": group.unknown}
    fields["methods"] = {name: group.methods[name] for name in METHODS if name and group.methods[name]}
    fields["waited_for"] = [
        dict(waited) | {"count": count, "wait_ns": total} for waited, count, total in group.waited_for()
    ]
    return fields


class Losses:
    """What the summary adds, of launches as they are reported."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._error: int | None = None
        self._steps = 0

    def add(self, view: View, new: Integers) -> None:
        """Operations by their places in `view`."""
        found = view.found
        launched = new[found.wanted[new]]
        lost = found.lost[launched]
        self._counts["lost"] += int(lost.sum())
        self._counts["running"] += int(found.running[launched].sum())
        self._counts["behind_unseen"] += int(view.waits.unseen[launched].sum())
        self._counts["unknown"] += int(((view.ops.start[launched] == NONE) & ~lost).sum())
        self._error = most(self._error, clock_error(view, launched))
        self._steps = max(self._steps, found.clock_steps)

    def fields(self, lost: int) -> dict[str, Any]:
        """`lost` operations found no room in a log."""
        counts = {
            f"launches_{name}": self._counts[name] for name in ("lost", "running", "unknown", "behind_unseen")
        }
        return counts | {"operations_lost": lost, "clock_error_ns": self._error, "clock_steps": self._steps}

"""Sum launches as they arrive, for the rows of launchlate's table. Memory depends on the number of rows, not of launches.

sums = LaunchSums(("queue",))
sums.add(view, chosen)          # any number of times
for group in sums.groups:       # by kernel and stream
    record = kernel_record(group, by_stream=True)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gpubpf.agent.definitions import Kind
from gpubpf.launches import arrays
from gpubpf.launches.dependencies import NONE
from gpubpf.launches.latency import SPLIT, GraphCandidate, LaunchView, graph_candidates
from gpubpf.launches.launch_records import GRAPH_RECORD, KERNEL_RECORD, TIMES
from gpubpf.launches.launches import METHODS
from gpubpf.record import MutableRecord, field
from gpubpf.records.clock import UNKNOWN
from gpubpf.show import histogram

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers: TypeAlias = NDArray[np.int64]

MOST_GROUPS = 4096  # maximum rows of the table; further kernels share one row
MOST_WAITED = 256  # maximum operations that the launches of a row waited for; further ones share one entry
EXACT = 4096  # maximum distinct values that are kept exactly; if there are more, all are rounded to 8 significant bits
_BITS = 8


class ValueCounts:
    """Values (int64; NONE is skipped) and their counts. Count, mean and maximum are exact, percentiles to 0.4 %."""

    def __init__(self, values: Any = ()) -> None:
        self.count = self.total = 0
        self.largest: int | None = None
        self._values, self._counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._exact = True
        self.add(np.asarray(values, np.int64))

    def add(self, values: Integers) -> None:
        values = values[values != NONE]
        if len(values):
            total, largest = arrays.exact_sum(values), int(values.max())
            values = np.sort(values if self._exact else _rounded(values))
            self._merge(values, np.ones(len(values), np.int64), total, largest)

    def plus(self, other: ValueCounts) -> None:
        if other.largest is not None:
            self._merge(other._values, other._counts, other.total, other.largest)

    def _merge(self, values: Integers, counts: Integers, total: int, largest: int) -> None:
        """Add values, in ascending order, with their counts."""
        self.count += int(counts.sum())
        self.total += total
        self.largest = largest if self.largest is None else max(self.largest, largest)
        values, counts = _summed(values, counts)
        values, counts = np.append(self._values, values), np.append(self._counts, counts)
        order = np.argsort(values, kind="stable")
        values, counts = _summed(values[order], counts[order])
        self._exact &= len(values) <= EXACT
        if not self._exact:  # rounding keeps the order
            values, counts = _summed(_rounded(values), counts)
        self._values, self._counts = values, counts

    def percentile(self, percent: int) -> int:
        """Return a percentile by nearest rank. There must be at least one value."""
        rank = -(-self.count * percent // 100)
        value = int(self._values[np.searchsorted(np.cumsum(self._counts), rank)])
        assert self.largest is not None
        return min(value, self.largest)

    def distribution(self) -> dict[str, int] | None:
        """Return mean, p50, p99 and max; None without values."""
        if self.largest is None:
            return None
        mean = round(self.total / self.count)
        return {"mean": mean, "p50": self.percentile(50), "p99": self.percentile(99), "max": self.largest}


def _summed(values: Integers, counts: Integers) -> tuple[Integers, Integers]:
    """Return the distinct values of a sorted array, and the sum of counts for each."""
    first = np.flatnonzero(np.append(len(values) > 0, values[1:] != values[:-1]))
    return values[first], np.add.reduceat(counts, first) if len(first) else counts


def _rounded(values: Integers) -> Integers:
    """Return values rounded to `_BITS` significant bits."""
    size = np.abs(values)
    _, exponent = np.frexp(size.astype(np.float64))
    shift = np.maximum(exponent - _BITS, 0).astype(np.int64)
    return np.sign(values) * ((size + (np.int64(1) << shift >> 1)) >> shift << shift)


class LaunchGroup(MutableRecord):
    """The sums of the launches of one kernel (and stream, graph node) of one process and GPU, or of one graph.

    fields   the first fields of its JSON record
    title    the kernel, with its graph and node
    node     the graph and node in the title
    waited   what the launches waited for → number of waits, and their total time in ns; the key of a kernel has its mangled name, too
    """

    fields: dict[str, Any]
    title: str
    process: int
    gpu: int
    stream: str | None
    stream_handle: str | None
    graph: dict[str, Any] | None
    times: dict[str, ValueCounts] = field(default_factory=lambda: {what: ValueCounts() for what in TIMES})
    count: int = 0
    errors: ValueCounts = field(default_factory=ValueCounts)  # of the start times, in ns
    unknown: int = 0
    methods: Counter[str] = field(default_factory=Counter)
    waited: dict[tuple[tuple[str, str], ...], list[int]] = field(default_factory=dict)
    node: str = ""

    def __len__(self) -> int:
        return self.count

    @property
    def stream_name(self) -> str:
        """The name of the stream in the table: ``t70`` for the default stream of thread 70; ``-`` for all streams."""
        return (self.stream or "-").replace("thread ", "t")

    @property
    def pid(self) -> int:
        return int(self.fields["pid"])

    @property
    def comm(self) -> str:
        return str(self.fields["comm"])

    @property
    def vendor(self) -> str:
        return str(self.fields["vendor"])

    def add(self, view: LaunchView, at: Integers) -> None:
        """Add launches, given by their indices in `view`."""
        columns, waits = view.columns, view.waits
        self.count += len(at)
        timed = at[waits.latency[at] != NONE]
        for what, tally in self.times.items():
            # On an idle stream, the wait of a launch is known (0) even if its start is not. A mean of such waits alone would mislead.
            tally.add(getattr(waits, what)[timed if what == "wait" else at])
        self.errors.add(clock_errors(view, at))
        self.unknown += int((waits.latency[at] == NONE).sum())
        for n, name in enumerate(METHODS):
            if name:
                self.methods[name] += int((columns.method[at] == n).sum())
        waiting = at[waits.waited_for[at] >= 0]
        _, first, alike, counts = np.unique(
            view.waits_alike(waiting), return_index=True, return_inverse=True, return_counts=True
        )
        waited = np.zeros(len(first), np.int64)
        np.add.at(waited, alike, np.maximum(waits.wait[waiting], 0))
        for n in np.argsort(first).tolist():  # in order of first occurrence
            place = int(waiting[first[n]])
            key = tuple((view.waited_for(place) or {}).items())
            if (mangled := view.kernel_waited_for(place)) is not None:
                key += (("mangled", mangled),)
            if key not in self.waited and len(self.waited) >= MOST_WAITED:
                key = (("kind", "api"), ("name", "other work"))
            entry = self.waited.setdefault(key, [0, 0])
            entry[0] += int(counts[n])
            entry[1] += int(waited[n])

    @property
    def mangled(self) -> str | None:
        """The mangled name of the kernel; None for a graph."""
        return self.fields.get("mangled")

    def waited_for(self) -> list[tuple[dict[str, str], int, int]]:
        """Return what the launches waited for, how often, and how long in total (ns); the longest wait first."""
        listed = [(dict(key), count, total) for key, (count, total) in self.waited.items()]
        return sorted(listed, key=lambda item: -item[2])


class LaunchSums:
    """The sums of launches. Memory depends on the number of distinct kernels, streams and waits, not on the number of launches.

    by        what separates groups of the same kernel: "queue", "graph", "node"
    graphs    also sum graphs as a whole
    whole     sums over the launches with all parts known: their number, the number of calls that made them, and in ns each part of the
              latency and the clock errors; the time of a graph's call counts once
    slots     log2 histograms of latencies, by ns per unit
    candidates, gain, best_candidate   number of sequences of launches that a graph would shorten, by how much in total (ns), the best
    """

    def __init__(self, by: Sequence[str] = (), graphs: bool = False) -> None:
        self._by, self._with_graphs = tuple(by), graphs
        self._groups: dict[tuple[Any, ...], LaunchGroup] = {}
        self._graphs: dict[int, LaunchGroup] = {}
        self.count = 0
        self.whole: Counter[str] = Counter()
        self.slots = {unit: np.zeros(64, np.int64) for unit in (1, 1000)}
        self.slowest = NONE
        self.errors = ValueCounts()
        self.virtual, self.clock_steps = False, 0
        self.stacks: Counter[tuple[str, ...]] = Counter()
        self.candidates = self.gain = 0
        self.best_candidate: GraphCandidate | None = None

    def add(self, view: LaunchView, chosen: Integers, stacks: bool = False) -> None:
        """Add launches, given by their indices in `view`."""
        self._add_groups(view, chosen)
        self.count += len(chosen)
        self.virtual |= any(process.virtual for process in view.columns.processes)
        self.clock_steps = max(self.clock_steps, view.columns.clock_steps)
        errors = view.columns.start_error[chosen]
        self.errors.add(errors[errors != UNKNOWN])
        errors = np.where(errors == UNKNOWN, 0, errors)
        parts = {name: getattr(view.waits, name)[chosen] for name in SPLIT}
        known_ = np.all([values != NONE for values in parts.values()], axis=0)
        latency = view.waits.latency[chosen]
        # A kernel may start before its call returns. Because of the clock error, it may even seem to start before its call.
        whole = np.maximum(latency[known_], 0)
        called = np.minimum(parts["api"][known_], whole)
        waited = np.clip(whole - called, 0, parts["wait"][known_])
        again = _in_same_call(view.columns.parent[chosen[known_]])
        total = int(whole.sum() - called[again].sum())
        called[again] = 0
        sums = {"api": int(called.sum()), "wait": int(waited.sum())}
        sums |= {
            "overhead": total - sum(sums.values()),
            "count": int(known_.sum()),
            "calls": int((~again).sum()),
        }
        sums["error"] = int(errors[known_].sum())
        self.whole.update(sums)
        latency = latency[latency != NONE]
        self.slowest = max(self.slowest, int(latency.max(initial=NONE)))
        for unit, counts in self.slots.items():
            slots = histogram.log2_slots(np.maximum(latency, 0) // unit)
            counts[: len(slots)] += slots
        if stacks:
            keys = Counter(
                zip(view.columns.process[chosen].tolist(), view.columns.stack[chosen].tolist(), strict=True)
            )
            for (process, number), count in keys.items():
                frames = tuple(view.frames(process, number))
                self.stacks[frames if len(self.stacks) < MOST_GROUPS or frames in self.stacks else ()] += (
                    count
                )
        for candidate in graph_candidates(view, chosen):
            self.candidates += 1
            self.gain += candidate.gain
            if self.best_candidate is None or candidate.gain > self.best_candidate.gain:
                self.best_candidate = candidate

    def _add_groups(self, view: LaunchView, chosen: Integers) -> None:
        columns, ops = view.columns, view.ops
        if not len(chosen):
            return
        orders = {"queue": ops.queue, "graph": ops.graph, "node": ops.node}
        keys = [columns.name, columns.process, columns.gpu, *(orders[name] for name in self._by)]
        number = arrays.row_numbers(*(key[chosen] for key in keys))
        order = np.argsort(number, kind="stable")
        for place in arrays.equal_runs(number[order]):
            part = chosen[order[place]]
            first = int(part[0])
            process, queue = columns.processes[int(columns.process[first])], int(ops.queue[first])
            key: tuple[Any, ...] = (
                process.number or process.pid,
                columns.names[int(columns.name[first])],
                int(columns.gpu[first]),
            )
            key += tuple(
                columns.queue_keys[queue][0] if name == "queue" else int(orders[name][first])
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
            launches = arrays.distinct(columns.parent[chosen])
            launches = launches[launches >= 0]
            for graph in arrays.distinct(ops.graph[launches]).tolist():
                part = launches[ops.graph[launches] == graph]
                if graph not in self._graphs and len(self._graphs) < MOST_GROUPS:
                    self._graphs[graph] = new_group(view, int(part[0]), ("queue", "graph"))
                if graph in self._graphs:
                    self._graphs[graph].add(view, part)

    @property
    def groups(self) -> list[LaunchGroup]:
        """Graphs by number, then kernels, those with the largest total latency first."""
        made = sorted(self._groups.values(), key=lambda group: -group.times["latency"].total)
        return [*(group for _, group in sorted(self._graphs.items())), *made]


def _in_same_call(parents: Integers) -> NDArray[np.bool_]:
    """Return a mask: launches made by the same call as an earlier launch, so all kernels of a graph launch except the first."""
    again = parents >= 0
    again[np.unique(parents, return_index=True)[1]] = False
    return again


def new_group(view: LaunchView, at: int, by: Sequence[str]) -> LaunchGroup:
    """Return the empty group of a launch."""
    columns, name = view.columns, int(view.columns.name[at])
    is_graph = view.ops.kind[at] == Kind.GRAPH
    fields = view.common(at)
    title, node = f"graph {int(view.ops.graph[at]) + 1}", ""
    graph = None
    if view.ops.graph[at] >= 0:
        graph = {"exec": f"0x{int(columns.exec[at]):x}"} | (
            {} if is_graph else {"node": int(view.ops.node[at])}
        )
    if not is_graph:
        fields |= {"kernel": view.short[name], "demangled": view.full[name], "mangled": columns.names[name]}
        if "graph" in by and graph:
            node = f"{int(view.ops.graph[at]) + 1}.{graph['node']} "
        title = node + view.labels[name]
    stream = view.streams[int(view.ops.queue[at])] if "queue" in by else None
    handle = f"0x{int(columns.stream[at]):x}"
    process = columns.processes[int(columns.process[at])]
    return LaunchGroup(
        fields, title, process.number or process.pid, int(columns.gpu[at]), stream, handle, graph, node=node
    )


def clock_errors(view: LaunchView, at: Integers) -> Integers:
    """Return the known errors of the launches' start times, in ns. If a graph has none, return those of its kernels."""
    errors = view.columns.start_error[at]
    errors = errors[errors != UNKNOWN]
    if not len(errors) and len(at) and view.ops.kind[at[0]] == Kind.GRAPH:
        inside = np.flatnonzero(np.isin(view.columns.parent, at))
        return clock_errors(view, inside) if len(inside) else errors
    return errors


def kernel_record(group: LaunchGroup, by_stream: bool, by_node: bool = False) -> dict[str, Any]:
    """Return the JSON record of a row of the table."""
    more: dict[str, Any] = {}
    if by_stream:  # not the handle: handles are reused, and all threads share one for their default streams
        more["stream_name"] = group.stream_name
    if by_node and group.graph:
        more["graph"] = group.graph
    record = KERNEL_RECORD if "kernel" in group.fields else GRAPH_RECORD
    return record.record(group, **group.fields, stream=group.stream_handle if by_stream else None, **more)


class LaunchLosses:
    """Counts lost, timed and untimed launches for the summary, as they are reported.

    wanted   launches that the user asked for
    others   launches by threads that -t, --comm or --cgroup leaves out, by thread and the name of its process
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lost: Counter[int] = Counter()  # by the number of the process
        self._methods: Counter[str] = Counter()
        self._errors = ValueCounts()
        self._steps = 0
        self.wanted = 0
        self.others: Counter[tuple[int, str]] = Counter()

    def add(self, view: LaunchView, new: Integers) -> None:
        """Add operations, given by their indices in `view`."""
        columns = view.columns
        launched = new[columns.wanted[new]]
        self.wanted += len(launched)
        others = new[columns.by_others[new]]
        threads = zip(columns.tid[others].tolist(), columns.process[others].tolist(), strict=True)
        self.others.update((tid, columns.processes[process].comm) for tid, process in threads)
        lost = columns.lost[launched]
        numbers = [process.number for process in columns.processes]
        self._lost.update(numbers[process] for process in columns.process[launched[lost]].tolist())
        self._counts["running"] += int(columns.running[launched].sum())
        self._counts["behind_unseen"] += int(view.waits.unseen[launched].sum())
        timed = view.ops.start[launched] != NONE
        self._counts["untimed"] += int((~timed & ~lost & ~columns.running[launched]).sum())
        for n, name in enumerate(METHODS):
            if name:
                self._methods[name] += int((timed & (columns.method[launched] == n)).sum())
        self._errors.add(clock_errors(view, launched))
        self._steps = max(self._steps, columns.clock_steps)

    def fields(self, lost: int, failed: Collection[int] = (), ended: Collection[int] = ()) -> dict[str, Any]:
        """Return the fields of the summary record.

        lost: operations that were dropped because a log was full.
        failed, ended: the numbers of the processes whose context failed, and of others that ended before their maps were read.
        """
        counts = {"launches_lost": self._lost.total()}
        counts["launches_lost_by_failure"] = sum(self._lost[number] for number in failed)
        counts["launches_lost_by_exit"] = sum(self._lost[number] for number in ended)
        counts |= {f"launches_{name}": self._counts[name] for name in ("running", "untimed", "behind_unseen")}
        timed = {name: count for name, count in self._methods.items() if count}
        return (
            counts
            | {"launches_timed": timed, "launches_by_others": self.others.total()}
            | {"operations_lost": lost, "clock_error_ns": self._errors.largest, "clock_steps": self._steps}
        )

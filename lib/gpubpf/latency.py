"""What launches waited for, as tables, stories and records: the analysis behind launchlate.

Times are ns on the host's clock; a number that is not known is None in records and "-" in text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gpubpf import hist, names, symbols, table, timeline
from gpubpf.clock import UNKNOWN
from gpubpf.launches import METHODS, Found
from gpubpf.sums import Tally
from gpubpf.timeline import NONE, Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpubpf.offcpu import Activity
    from gpubpf.perfetto import Trace

    Integers: TypeAlias = NDArray[np.int64]

COPIES = {Kind.H2D: "h2d", Kind.D2H: "d2h", Kind.D2D: "d2d", Kind.H2H: "h2h"}
OPS = {
    Kind.KERNEL: "kernel",
    Kind.MEMSET: "memset",
    Kind.RECORD: "event",
    Kind.WAIT: "event",
    Kind.SYNC: "api",
}
SPLIT = ("api", "wait", "overhead")
TIMES = ("latency", *SPLIT, "exec")
TITLES = {"h2d": "H->D", "d2h": "D->H", "d2d": "D->D", "h2h": "H->H", "memset": "memset"}
SYNCS = ("stream", "event", "context")
IN_A_ROW = 5  # launches: fewer are not worth a graph
STACKS = 10  # that are shown
MOST_GROUPS, MOST_WAITED = (
    1024,
    256,
)  # that are told apart: rows of the table, what the launches of one waited behind
NODE_NS = 1500  # what the GPU needs from one small kernel of a graph to the next, generously


class View:
    """`Found` with the names that people and programs read."""

    def __init__(self, found: Found, activity: Activity | None = None) -> None:
        self.found, self.activity = found, activity
        self.ops, self.waits = found.ops, found.waits
        self.short = [name.short if name.short else "?" for name in names.demangle_all(found.names)]
        self.full = [name.full for name in names.demangle_all(found.names)]
        labels = names.labels(found.names)
        self.labels = [labels.get(name, "") or "?" for name in found.names]
        self._stacks: dict[tuple[int, int], list[str]] = {}

    @property
    def streams(self) -> list[str]:
        """A label for each lane: "default", "thread" (the per-thread default stream), or a number in its process."""
        return [name for _, name in self.found.lane_keys]

    def op(self, at: int) -> str:
        kind = int(self.ops.kind[at])
        return COPIES.get(Kind(kind)) or OPS.get(Kind(kind)) or ("graph" if kind == Kind.GRAPH else "api")

    def name(self, at: int) -> str:
        """Of one operation, short."""
        kind = Kind(int(self.ops.kind[at]))
        if kind == Kind.KERNEL:
            return self.short[int(self.found.name[at])]
        if kind == Kind.GRAPH:
            return f"graph {int(self.ops.graph[at]) + 1}"
        if kind in (Kind.RECORD, Kind.WAIT):
            return f"{'record' if kind == Kind.RECORD else 'wait'} 0x{int(self.found.event[at]):x}"
        if kind == Kind.SYNC:
            what = int(self.ops.what[at])
            return f"synchronize {SYNCS[what] if what < len(SYNCS) else '?'}"
        if kind == Kind.API:
            return self.found.functions.get(int(self.found.api[at]), "driver call")
        return self.op(at)

    def waited_for(self, at: int) -> dict[str, str] | None:
        """The operation behind which one waited: its kind and name; through an event, of what kind it was."""
        before = int(self.waits.waited_for[at])
        if before < 0:
            return None
        op = self.op(before)
        kind = "copy" if int(self.ops.kind[before]) in COPIES else op
        if self.waits.by_event[at]:
            return {"kind": "event", "name": self.name(before), "of": kind}
        return {"kind": kind, "name": self.name(before)}

    def common(self, at: int) -> dict[str, Any]:
        process = self.found.processes[int(self.found.process[at])]
        return {"pid": process.pid, "comm": process.comm, "gpu": int(self.found.gpu[at])}

    def stack(self, at: int) -> list[str]:
        """The host's stack that launched, innermost frame first; empty where it is not known."""
        return self.frames(int(self.found.process[at]), int(self.found.stack[at]))

    def frames(self, process: int, number: int) -> list[str]:
        if (process, number) not in self._stacks:
            frames = self.found.processes[process].stacks.get(number, ())
            # A return address is that of the next instruction.
            self._stacks[process, number] = [
                symbols.describe(frame.file, max(frame.offset - 1, 0))
                if frame.file
                else frame.symbol or f"{frame.address:#x}"
                for frame in frames
            ]
        return self._stacks[process, number]

    def meanwhile(self, at: int) -> list[tuple[str, int]]:
        """What the launching thread did from the call to the kernel's start beside running its own code: (what, ns)."""
        if self.activity is None or self.ops.start[at] == NONE:
            return []
        return self.activity.explain(int(self.found.tid[at]), int(self.ops.call[at]), int(self.ops.start[at]))

    def launch(self, at: int, stack: bool = False) -> dict[str, Any]:
        """The record of one launch."""
        found, ops, waits = self.found, self.ops, self.waits
        graph = None
        if ops.node[at] >= 0:
            exec_number = found.exec[at]
            graph = {"exec": f"0x{exec_number:x}", "node": int(ops.node[at]), "replay": int(ops.replay[at])}
        fields = {
            "type": "launch", **self.common(at), "launch": int(ops.id[at]), "kernel": self.short[int(found.name[at])],
            "tid": int(found.tid[at]), "stream": f"0x{int(found.stream[at]):x}", "graph": graph,
            "call_ns": int(ops.call[at]), "return_ns": int(ops.ret[at]),
            "start_ns": known(ops.start[at]), "end_ns": known(ops.end[at]),
        }  # fmt: skip
        for name in ("latency", *SPLIT, "exec"):
            fields[f"{name}_ns"] = known(getattr(waits, name)[at])
        error = int(found.start_error[at])
        fields |= {"waited_for": self.waited_for(at), "method": METHODS[int(found.method[at])]}
        fields |= {"clock_error_ns": None if error == UNKNOWN else error, "running": bool(found.running[at])}
        if stack:
            fields["stack"] = self.stack(at)
        if self.activity is not None:
            fields["meanwhile"] = [{"what": what, "ns": ns} for what, ns in self.meanwhile(at)]
        return fields | {"grid": found.grid[at].tolist(), "block_dim": found.block_dim[at].tolist()}

    def operation(self, at: int) -> dict[str, Any]:
        """The record of one operation for `--timeline`: when the GPU did it, or for what has no such time when it was called."""
        ops, op = self.ops, self.op(at)
        begin, end = self.span(at)
        on_gpu = op != "api" and (op != "graph" or at in self.untold_graphs) and begin is not None
        if not on_gpu:
            begin, end = int(ops.call[at]), int(ops.ret[at])
        assert begin is not None
        return {
            "type": "op", **self.common(at), "t_ns": begin, "dur_ns": None if end is None else end - begin, "op": op,
            "name": self.name(at), "stream": f"0x{int(self.found.stream[at]):x}", "tid": int(self.found.tid[at]),
            "bytes": int(self.found.bytes[at]), "call_ns": int(ops.call[at]), "on": "gpu" if on_gpu else "host",
        }  # fmt: skip

    @cached_property
    def untold_graphs(self) -> frozenset[int]:
        """Graph launches whose time is known as a whole, and that of no kernel in it."""
        parents = self.found.parent
        inside = parents >= 0
        told = np.unique(parents[inside & (self.ops.start != NONE)])
        whole = np.flatnonzero((self.ops.kind == Kind.GRAPH) & (self.ops.start != NONE))
        return frozenset(np.setdiff1d(whole, told).tolist())

    def span(self, at: int) -> tuple[int | None, int | None]:
        """When the operation was done: by the GPU, or for host calls by the host."""
        op = self.op(at)
        if op == "api" or (op == "graph" and at not in self.untold_graphs):
            return int(self.ops.call[at]), int(self.ops.ret[at])
        if op == "event":
            return known(self.waits.passed[at]), known(self.waits.passed[at])
        return known(self.ops.start[at]), known(self.ops.end[at])


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
    """Launches as they come, added up: of `by` ("lane", "graph", "node") each by itself, with `graphs` also the graphs as a whole.
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
            slots = hist.log2_slots(np.maximum(latency, 0) // unit)
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
        columns = {"lane": ops.lane, "graph": ops.graph, "node": ops.node}
        keys = [found.name, found.process, found.gpu, *(columns[name] for name in self._by)]
        number = timeline.numbered(*(column[chosen] for column in keys))
        order = np.argsort(number, kind="stable")
        for place in timeline.runs(number[order]):
            part = chosen[order[place]]
            first = int(part[0])
            process, lane = found.processes[int(found.process[first])], int(ops.lane[first])
            key: tuple[Any, ...] = (
                process.number or process.pid,
                found.names[int(found.name[first])],
                int(found.gpu[first]),
            )
            key += tuple(
                found.lane_keys[lane][0] if name == "lane" else int(columns[name][first]) for name in self._by
            )
            if len(self._groups) >= MOST_GROUPS and key not in self._groups:
                key = ()  # the first of them lends its name to all
            if key not in self._groups:
                self._groups[key] = new_group(view, first, self._by)
                if not key:
                    self._groups[key].title = "(others)"
            self._groups[key].add(view, part)
        if self._with_graphs:
            launches = np.unique(found.parent[chosen])
            launches = launches[launches >= 0]
            for graph in np.unique(ops.graph[launches]).tolist():
                part = launches[ops.graph[launches] == graph]
                if graph not in self._graphs and len(self._graphs) < MOST_GROUPS:
                    self._graphs[graph] = new_group(view, int(part[0]), ("lane", "graph"))
                if graph in self._graphs:
                    self._graphs[graph].add(view, part)

    @property
    def groups(self) -> list[Group]:
        """Graphs, then kernels, those with most time lost first."""
        made = sorted(self._groups.values(), key=lambda group: -group.times["latency"].total)
        return [*(group for _, group in sorted(self._graphs.items())), *made]

    def label(self, group: Group) -> str:
        """Its title, with the process and the GPU where there are several."""
        label = group.title
        if "kernel" in group.fields:
            if len({other.process for other in self._groups.values()}) > 1:
                label += f" {group.fields['pid']}"
            if len({other.gpu for other in self._groups.values()}) > 1:
                label += f" GPU {group.gpu}"
        return label


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
    stream = view.streams[int(view.ops.lane[at])] if "lane" in by else None
    handle = f"0x{int(found.stream[at]):x}"
    process = found.processes[int(found.process[at])]
    return Group(fields, title, process.number or process.pid, int(found.gpu[at]), stream, handle, graph)


def most(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)


def known(value: Any) -> int | None:
    return None if value in (NONE, UNKNOWN) else int(value)


def clock_error(view: View, at: Integers) -> int | None:
    """The largest error of the starts, ns."""
    errors = view.found.start_error[at]
    errors = errors[errors != UNKNOWN]
    if not len(errors) and len(at) and view.ops.kind[at[0]] == Kind.GRAPH:  # of what is in it
        inside = np.flatnonzero(np.isin(view.found.parent, at))
        return clock_error(view, inside) if len(inside) else None
    return int(errors.max()) if len(errors) else None


# --- records ---


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


# --- text ---


def us(ns: int | None) -> str:
    """A time in µs in at most seven columns, in seconds where those are too few."""
    if ns is None:
        return "-"
    value = ns / 1000
    for limit, digits in ((100, 2), (10_000, 1), (1_000_000, 0)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value / 1e6:.2f}s" if value < 1e9 else f"{value / 1e6:.0f}s"


def at_least(ns: int | None, error: int | None) -> str:
    """A time, unless it is less than it may be wrong: then ``<`` and the error."""
    return f"<{us(error)}" if ns is not None and error and abs(ns) < error else us(ns)


def finding(sums: Sums) -> Iterator[str]:
    """Where the time of all of them went."""
    parts = {name: sums.whole[name] for name in SPLIT}
    total = sum(parts.values())
    if total <= 0:
        return
    words = {"wait": "behind earlier work", "api": "in the launch call", "overhead": "on the way to the GPU"}
    order = sorted(("api", "wait", "overhead"), key=lambda name: -parts[name])
    said = ", ".join(f"{round(100 * parts[name] / total)} % {words[name]}" for name in order)
    yield from table.wrap(
        f"{table.count(sums.whole['count'], 'launch')} took {us(total)} us to start, in all: {said}"
    )


def kernel_table(sums: Sums, by_stream: bool) -> list[str]:
    """One line for each group: how many, how long from call to start, what that was, how long they ran."""
    width = 8 if by_stream else 16
    stream = " STREAM " if by_stream else ""
    titles = ("P50", "P99", "MAX", "API", "WAIT", "OVERHEAD", "EXEC")
    lines = [f"{'':23}{'latency, us':>24}{'what of it, mean us':>25}"]
    lines.append(f"{'KERNEL':<{width}}{stream}{'COUNT':>7}" + _cells(titles))
    for group in sums.groups:
        error = group.clock_error
        latency = group.times["latency"].distribution() or {}
        cells = [at_least(latency.get(p), error) for p in ("p50", "p99", "max")]
        for what in (*SPLIT, "exec"):
            mean = (group.times[what].distribution() or {}).get("mean")
            cells.append(at_least(mean, error) if what == "overhead" else us(mean))
        place = f" {group.stream:<7}" if by_stream else ""
        lines.append(f"{table.fit(sums.label(group), width):<{width}}{place}{len(group):>7}" + _cells(cells))
    return lines


def _cells(cells: Sequence[str]) -> str:
    """The times of a table's line: the last but one is OVERHEAD."""
    return "".join(f"{cell:>{9 if n == len(cells) - 2 else 8}}" for n, cell in enumerate(cells))


def stream_name(label: str) -> str:
    """In a sentence."""
    return {"default": "default stream", "thread": "a thread's default stream"}.get(label, f"stream {label}")


def wait_lines(sums: Sums) -> Iterator[str]:
    """Behind what each kernel waited most."""
    for group in sums.groups:
        for waited, count, total in group.waited_for()[:2]:
            how = " through an event" if waited["kind"] == "event" else ""
            what = waited.get("of", waited["kind"])
            title = f"{TITLES.get(waited['name'], waited['name'])}{' copies' if what == 'copy' else ''}"
            where = f" ({stream_name(group.stream)})" if group.stream else ""
            who = f"{sums.label(group)}{where}: {count:,} of {len(group):,}"
            sentence = f"{who} waited behind {title}{how}, {us(total // count)} us on average"
            yield from table.wrap(sentence, indent=2)


def histogram(sums: Sums) -> list[str]:
    """Of latencies. Log2, in µs, or in ns where the times are short."""
    if sums.slowest == NONE:
        return []
    if sums.slowest < 64_000:
        return hist.lines(sums.slots[1], "nsecs", "count")
    return hist.lines(sums.slots[1000], "usecs", "count")


LAUNCH_HEADER = f"{'CALL T+us':>11} {'TID':>7} {'KERNEL':<17}" + _cells(
    ("LATENCY", "API", "WAIT", "OVERHEAD", "EXEC")
)


def launch_line(view: View, at: int) -> str:
    """One launch; times in µs, from the first call of all."""
    waits, error = view.waits, known(view.found.start_error[at])
    cells = [at_least(known(waits.latency[at]), error)]
    cells += [us(known(getattr(waits, what)[at])) for what in SPLIT]
    cells.append("runs" if view.found.running[at] else us(known(waits.exec[at])))
    when = f"{(int(view.ops.call[at]) - view.found.origin) / 1000:.1f}"
    label = table.fit(view.labels[int(view.found.name[at])], 17)
    return f"{when:>11} {int(view.found.tid[at]):>7} {label:<17}" + _cells(cells)


def timeline_lines(view: View, new: Integers) -> Iterator[str]:
    """Of the operations in `new`: each stream's story, then each host thread's. Times in µs from the first call of all."""
    found, ops = view.found, view.ops
    origin = found.origin
    told = np.zeros(len(ops), bool)
    told[new] = True
    for process_number, process in enumerate(found.processes):
        mine = told & (found.process == process_number)
        host = np.isin(ops.kind, (Kind.SYNC, Kind.API))
        for lane in np.unique(ops.lane[mine & ~host]).tolist():
            at = np.flatnonzero(mine & ~host & (ops.lane == lane))
            first = int(at[0])
            title = stream_name(view.streams[lane])
            title += f" (0x{int(found.stream[first]):x})" if title.startswith("stream") else ""
            yield f"{title} of {process.comm} (pid {process.pid}), GPU {int(found.gpu[first])}"
            yield f"{'FROM T+us':>12} {'TO T+us':>12} {'FOR us':>9}  WHAT"
            for place in at.tolist():
                if int(found.parent[place]) not in view.untold_graphs:
                    yield _story_line(view, place, origin)
            yield ""
        for tid in np.unique(found.tid[mine & host]).tolist():
            yield f"thread {tid} of {process.comm} (pid {process.pid}): what it waited for, other calls"
            yield f"{'FROM T+us':>12} {'TO T+us':>12} {'FOR us':>9}  CALL"
            for place in np.flatnonzero(mine & host & (found.tid == tid)).tolist():
                yield _story_line(view, place, origin)
            yield ""


def _story_line(view: View, at: int, origin: int) -> str:
    ops, op = view.ops, view.op(at)
    begin, end = view.span(at)

    def when(ns: int | None) -> str:
        return "-" if ns is None else f"{(ns - origin) / 1000:.2f}"

    length = us(end - begin) if begin is not None and end is not None else "-"
    text = {"kernel": view.labels[int(view.found.name[at])] if op == "kernel" else ""}.get(op) or view.name(
        at
    )
    if op in TITLES:
        text = f"{TITLES[op]} {int(view.found.bytes[at]):,} bytes"
    if op == "kernel" and ops.node[at] >= 0:
        text += f" (graph {int(ops.graph[at]) + 1}, node {int(ops.node[at])})"
    waited = view.waited_for(at)
    if waited and view.waits.wait[at] > 0:
        text += f", after {TITLES.get(waited['name'], waited['name'])}"
    if begin is None:
        text += f", called T+{when(int(ops.call[at]))}"
    return f"{when(begin):>12} {when(end):>12} {length:>9}  {table.fit(text, 43)}"


# --- findings ---


@dataclass(frozen=True)
class Row:
    """Launches of short kernels that follow each other in one stream, by a host that does nothing else."""

    count: int
    took: int  # ns from the first call to the last end
    busy: int  # ns that the GPU worked
    as_graph: int  # ns as one graph, generously
    label: str


def rows_for_a_graph(view: View, chosen: Integers) -> list[Row]:
    """Where a graph would gain: at least `IN_A_ROW` launches, a GPU that mostly waits for the next call, a host that mostly
    launches. The one with the most to gain first."""
    ops, found = view.ops, view.found
    plain = ops.node < 0
    wanted = np.zeros(len(ops), bool)
    wanted[chosen] = True
    made = []
    order = np.lexsort((np.arange(len(ops)), ops.lane))
    order = order[(plain & (ops.kind != Kind.API))[order]]
    for place in timeline.runs(ops.lane[order]):
        part = order[place]
        fits = wanted[part] & (ops.start[part] != NONE) & (ops.end[part] != NONE)
        fits &= ops.kind[part] == Kind.KERNEL
        gap = np.append(0, ops.call[part][1:] - ops.ret[part][:-1])
        length = np.where(fits, ops.end[part] - ops.call[part], 0)
        near = gap <= length  # the host went on to the next one at once
        borders = np.concatenate([[0], np.flatnonzero(~(fits[1:] & fits[:-1] & near[1:])) + 1, [len(part)]])
        for number in np.flatnonzero(np.diff(borders) >= IN_A_ROW).tolist():
            run = part[borders[number] : borders[number + 1]]
            behind = view.waits.waited_for[run[1:]]
            if (~np.isin(behind[behind >= 0], run)).any():  # for other work: no graph would change that
                continue
            took = int(ops.end[run].max() - ops.call[run[0]])
            busy = int((ops.end[run] - ops.start[run]).sum())
            host = int((ops.call[run][1:] - ops.ret[run][:-1]).sum())
            launch = int(view.waits.api[run[0]]) + max(known(view.waits.overhead[run[0]]) or 0, 0)
            as_graph = launch + busy + NODE_NS * (len(run) - 1)
            error = max(int(found.start_error[run].max()), int(found.end_error[run].max()))
            if as_graph + 2 * error < 0.7 * took and host < 0.3 * took:
                made.append(Row(len(run), took, busy, as_graph, view.labels[int(found.name[run[0]])]))
    return sorted(made, key=lambda row: row.as_graph - row.took)


def graph_hint(sums: Sums) -> list[str]:
    best = sums.best_row
    if best is None:
        return []
    sentence = (
        f"{best.count:,} launches in a row, from {best.label} on, took {us(best.took)} us, of which the GPU worked "
        f"{us(best.busy)} us: as one CUDA graph about {us(best.as_graph)} us"
    )
    if sums.rows > 1:
        sentence += f" ({sums.rows:,} such rows; {us(sums.gain)} us to gain in all)"
    return table.wrap(sentence)


def slower(view: View, chosen: Integers, limit: int) -> Integers:
    """Those whose latency is more than `limit` ns."""
    latency = view.waits.latency[chosen]
    return chosen[(latency != NONE) & (latency > limit)]


def slow_stories(view: View, slow: Integers, chosen: Integers, limit: int) -> Iterator[str]:
    """What happened in each slow launch, then which host threads launched them."""
    found, waits = view.found, view.waits
    yield f"{len(slow):,} of {table.count(len(chosen), 'launch')} took more than {limit} us to start"
    for at in slow.tolist():
        process = found.processes[int(found.process[at])]
        stream = view.streams[int(view.ops.lane[at])]
        yield ""
        yield (
            f"T+{(int(view.ops.call[at]) - found.origin) / 1000:.1f} us  {view.labels[int(found.name[at])]}: "
            f"{at_least(int(waits.latency[at]), known(found.start_error[at]))} us"
        )
        yield f"  thread {int(found.tid[at])} of {process.comm}, {stream_name(stream)}"
        parts = [f"{us(known(waits.api[at]))} us in the call"]
        if waits.wait[at] > 0:
            waited = view.waited_for(at) or {"name": "earlier work"}
            parts.append(f"{us(int(waits.wait[at]))} us behind {TITLES.get(waited['name'], waited['name'])}")
        elif waits.wait[at] == NONE:
            parts.append("what it waited for is not known")
        if waits.overhead[at] != NONE:
            parts.append(f"{us(int(waits.overhead[at]))} us on the launch path")
        yield from table.wrap("; ".join(parts), indent=2)
        if view.activity is not None and (did := view.meanwhile(at)):
            yield from table.wrap(
                "meanwhile the thread: " + "; ".join(f"{what} {us(ns)} us" for what, ns in did[:4]), indent=2
            )
    if len(slow):
        yield ""
        yield "which threads launch the slow kernels"
        yield from slow_threads(view, slow, chosen)
    yield ""


def slow_threads(view: View, slow: Integers, chosen: Integers) -> list[str]:
    """A row for each host thread that launched slow ones: how many, of how many."""
    of_all, of_slow = (Counter(view.found.tid[some].tolist()) for some in (chosen, slow))
    rows = []
    for tid, count in of_slow.most_common(10):
        mine = slow[view.found.tid[slow] == tid]
        latency = Tally(view.waits.latency[mine]).distribution() or {}
        spent: Counter[str] = Counter()
        for at in mine[:1000].tolist():
            spent.update(dict(view.meanwhile(at)))
        most = next((what for what, _ in spent.most_common(1)), "-")
        rows.append([tid, count, of_all[tid], us(latency.get("p50")), us(latency.get("max")), most])
    heads = ["TID", "SLOW", "LAUNCHES", "P50 us", "MAX us", "MEANWHILE MOSTLY"]
    return table.lines(heads, rows, left=heads[-1:])


def stack_lines(sums: Sums) -> Iterator[str]:
    """The host's stacks that launched, most launches first."""
    for frames, count in sums.stacks.most_common(STACKS):
        yield f"{table.count(count, 'launch')} from"
        yield from (f"    {frame}" for frame in frames or ["a stack that is not known"])
        yield ""
    if len(sums.stacks) > STACKS:
        yield f"and from {len(sums.stacks) - STACKS:,} other stacks"
        yield ""


def clock_line(sums: Sums) -> str:
    """How wrong the times may be."""
    if sums.virtual:
        return "virtual clock: times are exact"
    if sums.errors.largest is None:
        return "GPU clock: not known"
    text = (
        f"GPU times are right to {us(sums.errors.percentile(50))} us (at worst {us(sums.errors.largest)} us)"
    )
    if sums.clock_steps:
        text += f"; a clock made {table.count(sums.clock_steps, 'step')}"
    return text


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
        self._counts["unknown"] += int(((view.ops.start[launched] == NONE) & ~lost).sum())
        self._error = most(self._error, clock_error(view, launched))
        self._steps = max(self._steps, found.clock_steps)

    def fields(self, lost: int) -> dict[str, Any]:
        """`lost` operations found no room in a log."""
        counts = {f"launches_{name}": self._counts[name] for name in ("lost", "running", "unknown")}
        return counts | {"operations_lost": lost, "clock_error_ns": self._error, "clock_steps": self._steps}


def loss_lines(summary: Mapping[str, Any]) -> list[str]:
    """The same for people; nothing where there is nothing to say."""
    said = {
        "launches_running": "still running when the measurement ended",
        "launches_lost": "lost: their place was used again before it was read, or their process died",
        "launches_unknown": "not timed: no probe in them, no timing events around them",
    }
    lines = [f"{table.count(summary[name], 'launch')} {text}" for name, text in said.items() if summary[name]]
    if summary["operations_lost"]:
        lines.append(
            f"{summary['operations_lost']:,} operations found no room in the log: waits may be attributed wrongly"
        )
    return lines


# --- CSV ---

CSV_COLUMNS = (
    *("pid", "comm", "gpu", "kernel", "stream", "graph", "node", "count"),
    *(
        f"{what}_{which}_ns"
        for what in ("latency", *SPLIT, "exec")
        for which in ("mean", "p50", "p99", "max")
    ),
    "clock_error_ns",
)


def csv_row(record: Mapping[str, Any]) -> tuple[object, ...]:
    """A row of the table from its record; what is not known is empty."""
    graph = record.get("graph") or {}
    row: list[object] = [record.get(name) for name in ("pid", "comm", "gpu", "kernel", "stream")]
    row += [graph.get("exec"), graph.get("node"), record["count"]]
    for what in ("latency", *SPLIT, "exec"):
        values = record[f"{what}_ns"] or {}
        row += [values.get(which) for which in ("mean", "p50", "p99", "max")]
    row.append(record["clock_error_ns"])
    return tuple("" if cell is None else cell for cell in row)


# --- traces ---


def write_trace(view: View, trace: Trace, new: Integers) -> None:
    """Of the operations in `new`: host calls by thread, work by stream, an arrow from each launch's call to its kernel."""
    found, ops = view.found, view.ops
    for at in new.tolist():
        process = found.processes[int(found.process[at])]
        op, name, tid = view.op(at), view.name(at), int(found.tid[at])
        member = bool(ops.node[at] >= 0)
        begin, call = known(ops.start[at]), int(ops.call[at])
        trace.name(process.pid, f"{process.comm} (host)")
        if not member:
            trace.name(process.pid, f"{process.comm} {tid}", tid)
            title = name if op == "api" else f"launch {name}" if op in ("kernel", "graph") else name
            trace.slice(process.pid, tid, title, call, int(ops.ret[at]) - call, "call", id=int(ops.id[at]))
        if begin is None:
            continue
        # Processes of a trace have numbers of their own; no process of Linux is beyond 2^22.
        device = (int(found.gpu[at]) + 1 << 22) + process.pid
        lane, label = found.lane_keys[int(ops.lane[at])]
        trace.name(device, f"{process.comm} (pid {process.pid}) on GPU {int(found.gpu[at])}", order=1)
        trace.name(device, f"stream {label}", lane, lane)
        end = known(ops.end[at])
        details: dict[str, Any] = {"id": int(ops.id[at])}
        for what in ("latency", *SPLIT):
            details[f"{what}_us"] = (
                None if (value := known(getattr(view.waits, what)[at])) is None else value / 1000
            )
        details |= {"waited_for": (view.waited_for(at) or {}).get("name")}
        if found.bytes[at]:
            details["bytes"] = int(found.bytes[at])
        trace.slice(device, lane, name, begin, 0 if end is None else end - begin, op, **details)
        trace.arrow(int(ops.id[at]), (process.pid, tid, call), (device, lane, begin))

"""What launches waited for, as tables, stories and records: the analysis behind launchlate.

Times are ns on the host's clock; a number that is not known is None in records and "-" in text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gpubpf import hist, names, symbols, table, timeline
from gpubpf.clock import UNKNOWN
from gpubpf.launches import METHODS, Found
from gpubpf.timeline import NONE, Kind, Lane

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
TITLES = {"h2d": "H->D", "d2h": "D->H", "d2d": "D->D", "h2h": "H->H", "memset": "memset"}
SYNCS = ("stream", "event", "context")
IN_A_ROW = 5  # launches: fewer are not worth a graph
STACKS = 10  # that are shown
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

    @cached_property
    def streams(self) -> list[str]:
        """A label for each lane: "default", "thread" (the per-thread default stream), or a number in its process."""
        found, made = self.found, [""] * len(self.ops.lanes)
        counts: Counter[int] = Counter()
        lanes, first = np.unique(self.ops.lane, return_index=True)
        for lane, at in sorted(zip(lanes.tolist(), first.tolist(), strict=True), key=lambda pair: pair[1]):
            kind = self.ops.lanes[lane]
            process = int(found.process[at])
            if kind == Lane.LEGACY:
                made[lane] = "default"
            elif kind == Lane.PER_THREAD:
                made[lane] = "thread"
            else:
                counts[process] += 1
                made[lane] = str(counts[process])
        return made

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
        return self._frames(int(self.found.process[at]), int(self.found.stack[at]))

    def _frames(self, process: int, number: int) -> list[str]:
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


@dataclass(frozen=True)
class Group:
    """Launches of one kernel (and stream, graph node) of one process and GPU, or of one graph: their places. `label` begins with graph
    and node, and ends with the process and the GPU where there are several."""

    at: Integers
    label: str
    stream: str | None = None

    def __len__(self) -> int:
        return len(self.at)


def groups(view: View, chosen: Integers, by: Sequence[str] = ()) -> list[Group]:
    """The chosen launches by kernel, process and GPU, and what else is asked for ("lane", "graph", "node"); most time lost first."""
    found, ops = view.found, view.ops
    if not len(chosen):
        return []
    several, gpus = len(np.unique(found.process[chosen])) > 1, len(np.unique(found.gpu[chosen])) > 1
    columns = {"lane": ops.lane, "graph": ops.graph, "node": ops.node}
    keys = [found.name, found.process, found.gpu, *(columns[name] for name in by)]
    number = timeline.numbered(*(column[chosen] for column in keys))
    order = np.argsort(number, kind="stable")
    made = []
    for place in timeline.runs(number[order]):
        part = chosen[order[place]]
        first = int(part[0])
        stream = view.streams[int(ops.lane[first])] if "lane" in by else None
        label = view.labels[int(found.name[first])]
        if several:
            label += f" {found.processes[int(found.process[first])].pid}"
        if gpus:
            label += f" GPU {int(found.gpu[first])}"
        if "graph" in by and ops.graph[first] >= 0:
            label = f"{int(ops.graph[first]) + 1}.{int(ops.node[first])} {label}"
        made.append(Group(part, label, stream))

    def lost(group: Group) -> int:
        latency = view.waits.latency[group.at]
        return -int(latency[latency != NONE].sum())

    return sorted(made, key=lost)


def graphs(view: View, chosen: Integers) -> list[Group]:
    """The graphs that the chosen kernels ran in, each with its launches."""
    launches = np.unique(view.found.parent[chosen])
    launches = launches[launches >= 0]
    numbers = view.ops.graph[launches]
    return [
        Group(
            launches[numbers == number],
            f"graph {number + 1}",
            view.streams[int(view.ops.lane[launches[numbers == number][0]])],
        )
        for number in np.unique(numbers).tolist()
    ]


def known(value: Any) -> int | None:
    return None if value in (NONE, UNKNOWN) else int(value)


def distribution(values: Integers) -> dict[str, int] | None:
    """Of the known ones: mean, and percentiles by nearest rank. None without any."""
    values = np.sort(values[values != NONE])
    if not len(values):
        return None
    rank = {p: int(values[max(0, -(-len(values) * p // 100) - 1)]) for p in (50, 99)}
    return {"mean": round(float(values.mean())), "p50": rank[50], "p99": rank[99], "max": int(values[-1])}


def clock_error(view: View, at: Integers) -> int | None:
    """The largest error of the starts, ns."""
    errors = view.found.start_error[at]
    errors = errors[errors != UNKNOWN]
    if not len(errors) and len(at) and view.ops.kind[at[0]] == Kind.GRAPH:  # of what is in it
        inside = np.flatnonzero(np.isin(view.found.parent, at))
        return clock_error(view, inside) if len(inside) else None
    return int(errors.max()) if len(errors) else None


# --- records ---


def kernel_record(view: View, group: Group, by_stream: bool, by_node: bool = False) -> dict[str, Any]:
    """The record of a line of the table."""
    found, first = view.found, int(group.at[0])
    name = int(found.name[first])
    is_graph = view.ops.kind[first] == Kind.GRAPH
    fields: dict[str, Any] = {"type": "graph" if is_graph else "kernel", **view.common(first)}
    if not is_graph:
        fields |= {"kernel": view.short[name], "demangled": view.full[name], "mangled": found.names[name]}
    fields["stream"] = f"0x{int(found.stream[first]):x}" if by_stream else None
    if by_node and view.ops.graph[first] >= 0:
        fields["graph"] = {"exec": f"0x{int(found.exec[first]):x}"}
        fields["graph"] |= {} if is_graph else {"node": int(view.ops.node[first])}
    fields["count"] = len(group)
    for what in ("latency", *SPLIT, "exec"):
        fields[f"{what}_ns"] = distribution(getattr(view.waits, what)[group.at])
    fields["clock_error_ns"] = clock_error(view, group.at)
    fields["unknown"] = int((view.waits.latency[group.at] == NONE).sum())
    fields["methods"] = {
        name: count
        for n, name in enumerate(METHODS)
        if name and (count := int((found.method[group.at] == n).sum()))
    }
    fields["waited_for"] = [
        dict(waited) | {"count": count, "wait_ns": total} for waited, count, total in waited_for(view, group)
    ]
    return fields


def waited_for(view: View, group: Group) -> list[tuple[dict[str, str], int, int]]:
    """Behind what the launches waited: what, how often, how long in all (ns); the longest first."""
    waited = group.at[view.waits.waited_for[group.at] >= 0]
    sums: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for at in waited.tolist():
        key = tuple((view.waited_for(at) or {}).items())
        entry = sums.setdefault(key, [0, 0])
        entry[0] += 1
        entry[1] += max(int(view.waits.wait[at]), 0)
    listed = [(dict(key), count, total) for key, (count, total) in sums.items()]
    return sorted(listed, key=lambda item: -item[2])


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


def finding(view: View, chosen: Integers) -> Iterator[str]:
    """Where the time of all of them went."""
    parts = {name: getattr(view.waits, name)[chosen] for name in SPLIT}
    whole = np.all([values != NONE for values in parts.values()], axis=0)
    latency, api, wait = (
        values[whole] for values in (view.waits.latency[chosen], parts["api"], parts["wait"])
    )
    # A kernel may start before its call returns.
    called = np.minimum(api, latency)
    waited = np.clip(latency - called, 0, wait)
    total = int(latency.sum())
    sums = {"api": int(called.sum()), "wait": int(waited.sum())}
    sums["overhead"] = total - sums["api"] - sums["wait"]
    if total <= 0:
        return
    words = {"wait": "behind earlier work", "api": "in the launch call", "overhead": "on the way to the GPU"}
    order = sorted(sums, key=lambda name: -sums[name])
    said = ", ".join(f"{round(100 * sums[name] / total)} % {words[name]}" for name in order)
    yield from table.wrap(
        f"{table.count(int(whole.sum()), 'launch')} took {us(total)} us to start, in all: {said}"
    )


def kernel_table(view: View, found: Sequence[Group], by_stream: bool) -> list[str]:
    """One line for each group: how many, how long from call to start, what that was, how long they ran."""
    width = 8 if by_stream else 16
    stream = " STREAM " if by_stream else ""
    titles = ("P50", "P99", "MAX", "API", "WAIT", "OVERHEAD", "EXEC")
    lines = [f"{'':23}{'latency, us':>24}{'what of it, mean us':>25}"]
    lines.append(f"{'KERNEL':<{width}}{stream}{'COUNT':>7}" + _cells(titles))
    for group in found:
        error = clock_error(view, group.at)
        latency = distribution(view.waits.latency[group.at]) or {}
        cells = [at_least(latency.get(p), error) for p in ("p50", "p99", "max")]
        for what in (*SPLIT, "exec"):
            mean = (distribution(getattr(view.waits, what)[group.at]) or {}).get("mean")
            cells.append(at_least(mean, error) if what == "overhead" else us(mean))
        place = f" {group.stream:<7}" if by_stream else ""
        lines.append(f"{table.fit(group.label, width):<{width}}{place}{len(group):>7}" + _cells(cells))
    return lines


def _cells(cells: Sequence[str]) -> str:
    """The times of a table's line: the last but one is OVERHEAD."""
    return "".join(f"{cell:>{9 if n == len(cells) - 2 else 8}}" for n, cell in enumerate(cells))


def stream_name(label: str) -> str:
    """In a sentence."""
    return {"default": "default stream", "thread": "a thread's default stream"}.get(label, f"stream {label}")


def wait_lines(view: View, found: Sequence[Group]) -> Iterator[str]:
    """Behind what each kernel waited most."""
    for group in found:
        for waited, count, total in waited_for(view, group)[:2]:
            how = " through an event" if waited["kind"] == "event" else ""
            what = waited.get("of", waited["kind"])
            title = f"{TITLES.get(waited['name'], waited['name'])}{' copies' if what == 'copy' else ''}"
            where = f" ({stream_name(group.stream)})" if group.stream else ""
            who = f"{group.label}{where}: {count:,} of {len(group):,}"
            sentence = f"{who} waited behind {title}{how}, {us(total // count)} us on average"
            yield from table.wrap(sentence, indent=2)


def histogram(values: Integers) -> list[str]:
    """Log2, in µs, or in ns where the times are short."""
    values = np.maximum(values[values != NONE], 0)
    if not len(values):
        return []
    if int(values.max()) < 64_000:
        return hist.lines(hist.log2_slots(values), "nsecs", "count")
    return hist.lines(hist.log2_slots(values // 1000), "usecs", "count")


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


def graph_hint(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    best = rows[0]
    sentence = (
        f"{best.count:,} launches in a row, from {best.label} on, took {us(best.took)} us, of which the GPU worked "
        f"{us(best.busy)} us: as one CUDA graph about {us(best.as_graph)} us"
    )
    if len(rows) > 1:
        gain = sum(row.took - row.as_graph for row in rows)
        sentence += f" ({len(rows):,} such rows; {us(gain)} us to gain in all)"
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
        latency = distribution(view.waits.latency[mine]) or {}
        spent: Counter[str] = Counter()
        for at in mine[:1000].tolist():
            spent.update(dict(view.meanwhile(at)))
        most = next((what for what, _ in spent.most_common(1)), "-")
        rows.append([tid, count, of_all[tid], us(latency.get("p50")), us(latency.get("max")), most])
    heads = ["TID", "SLOW", "LAUNCHES", "P50 us", "MAX us", "MEANWHILE MOSTLY"]
    return table.lines(heads, rows, left=heads[-1:])


def stack_lines(view: View, chosen: Integers) -> Iterator[str]:
    """The host's stacks that launched, most launches first."""
    keys = Counter(zip(view.found.process[chosen].tolist(), view.found.stack[chosen].tolist(), strict=True))
    for (process, number), count in keys.most_common(STACKS):
        frames = view._frames(process, number)
        yield f"{table.count(count, 'launch')} from"
        yield from (f"    {frame}" for frame in frames or ["a stack that is not known"])
        yield ""
    if len(keys) > STACKS:
        yield f"and from {len(keys) - STACKS:,} other stacks"
        yield ""


def clock_line(view: View, chosen: Integers) -> str:
    """How wrong the times may be."""
    if any(process.virtual for process in view.found.processes):
        return "virtual clock: times are exact"
    errors = view.found.start_error[chosen]
    errors = errors[errors != UNKNOWN]
    if not len(errors):
        return "GPU clock: not known"
    text = f"GPU times are right to {us(int(np.median(errors)))} us (at worst {us(int(errors.max()))} us)"
    if view.found.clock_steps:
        text += f"; a clock made {table.count(view.found.clock_steps, 'step')}"
    return text


def losses(view: View, lost: int) -> dict[str, Any]:
    """What the summary adds: `lost` operations found no room in a log."""
    found, ops = view.found, view.ops
    wanted = found.wanted
    return {
        "launches_lost": int((found.lost & wanted).sum()),
        "launches_running": int((found.running & wanted).sum()),
        "launches_unknown": int((wanted & (ops.start == NONE) & ~found.lost).sum()),
        "operations_lost": lost,
        "clock_error_ns": clock_error(view, np.flatnonzero(wanted)),
        "clock_steps": found.clock_steps,
    }


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


def write_trace(view: View, trace: Trace) -> None:
    """Host calls by thread, work by stream, an arrow from each launch's call to its kernel."""
    found, ops = view.found, view.ops
    for at in range(len(ops)):
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
        lane = int(ops.lane[at]) + 1
        label = view.streams[lane - 1]
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

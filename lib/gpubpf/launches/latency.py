"""What launches waited for: the analysis behind launchlate, and its records.

Times are ns on the host's clock; a number that is not known is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gpubpf import names
from gpubpf.images import symbols
from gpubpf.launches import dependencies
from gpubpf.launches.dependencies import NONE, Kind
from gpubpf.launches.launches import METHODS, Found
from gpubpf.session.clock import UNKNOWN
from gpubpf.show.owner_columns import Owner

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpubpf.launches.off_cpu import Activity
    from gpubpf.show.perfetto import Trace

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
SYNCS = ("stream", "event", "context")
IN_A_ROW = 5  # launches: fewer are not worth a graph
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
        """A label for each queue: "default", "thread" (the per-thread default stream), or a number in its process."""
        return [name for _, name in self.found.queue_keys]

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
        return self.owner(at)._asdict()

    def owner(self, at: int) -> Owner:
        process = self.found.processes[int(self.found.process[at])]
        return Owner(process.pid, process.comm, int(self.found.gpu[at]))

    def owners(self, some: Integers) -> list[Owner]:
        """Of operations by their places, each once."""
        number = dependencies.numbered(self.found.process[some], self.found.gpu[some])
        _, first = np.unique(number, return_index=True)
        return [self.owner(at) for at in some[first].tolist()]

    def by_call(self, some: Integers) -> Integers:
        """Places in the order of the calls: operations of each process come together."""
        return some[np.argsort(self.ops.call[some], kind="stable")]

    def stack(self, at: int) -> list[str]:
        """The host's stack that launched, innermost frame first; empty where it is not known."""
        return self.frames(int(self.found.process[at]), int(self.found.stack[at]))

    def frames(self, process: int, number: int) -> list[str]:
        if (process, number) not in self._stacks:
            frames = self.found.processes[process].stacks.get(number, ())
            self._stacks[process, number] = [symbols.frame_of(frame) for frame in frames]
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


def known(value: Any) -> int | None:
    return None if value in (NONE, UNKNOWN) else int(value)


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
    order = np.lexsort((np.arange(len(ops)), ops.queue))
    order = order[(plain & (ops.kind != Kind.API))[order]]
    for place in dependencies.runs(ops.queue[order]):
        part = order[place]
        if len(part) < IN_A_ROW:
            continue
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


def slower(view: View, chosen: Integers, limit: int) -> Integers:
    """Those whose latency is more than `limit` ns."""
    latency = view.waits.latency[chosen]
    return chosen[(latency != NONE) & (latency > limit)]


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
        order = 64 * process.number  # each process's GPUs stand below it
        trace.name(process.pid, f"{process.comm} (host)", order=order)
        if not member:
            trace.name(process.pid, f"{process.comm} {tid}", tid)
            title = name if op == "api" else f"launch {name}" if op in ("kernel", "graph") else name
            trace.slice(process.pid, tid, title, call, int(ops.ret[at]) - call, "call", id=int(ops.id[at]))
        if begin is None:
            continue
        # Processes of a trace have numbers of their own; no process of Linux is beyond 2^22.
        device = (int(found.gpu[at]) + 1 << 22) + process.pid
        queue, label = found.queue_keys[int(ops.queue[at])]
        trace.name(
            device,
            f"{process.comm} (pid {process.pid}) on GPU {int(found.gpu[at])}",
            order=order + 1 + int(found.gpu[at]),
        )
        end = known(ops.end[at])
        length = 0 if end is None else end - begin
        errors = known(found.start_error[at]) or 0, known(found.end_error[at]) or 0
        row, begin = trace.place(device, queue, begin, begin + length, errors)
        track = queue + (row << 32)
        trace.name(device, f"stream {label}" + (f", beside ({row})" if row else ""), track, queue)
        details: dict[str, Any] = {"id": int(ops.id[at])}
        for what in ("latency", *SPLIT):
            details[f"{what}_us"] = (
                None if (value := known(getattr(view.waits, what)[at])) is None else value / 1000
            )
        details |= {"waited_for": (view.waited_for(at) or {}).get("name")}
        if found.bytes[at]:
            details["bytes"] = int(found.bytes[at])
        trace.slice(device, track, name, begin, length, op, **details)
        trace.arrow(int(ops.id[at]), (process.pid, tid, call), (device, track, begin))

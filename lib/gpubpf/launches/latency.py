"""Present what launches waited for: names, JSON records, CSV, traces, and where a CUDA graph would save time.

Times are in ns on the host's clock. None stands for an unknown number.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gpubpf import names
from gpubpf.agent.definitions import NO_FUNCTION, Kind, Vendor
from gpubpf.images import symbols
from gpubpf.launches import arrays
from gpubpf.launches.dependencies import NONE
from gpubpf.launches.launch_records import LAUNCH, OPERATION, TIMES
from gpubpf.launches.launches import METHODS, OperationColumns
from gpubpf.record import Record
from gpubpf.records.clock import UNKNOWN
from gpubpf.records.launch_shape import vendor_fields, wave_of
from gpubpf.show.owner_columns import Owner, OwnerColumns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpubpf.launches.off_cpu import Activity
    from gpubpf.show.perfetto import Trace

    Integers: TypeAlias = NDArray[np.int64]

COPIES = {Kind.H2D: "h2d", Kind.D2H: "d2h", Kind.D2D: "d2d", Kind.H2H: "h2h"}
OPS = {
    Kind.KERNEL: "kernel",
    Kind.MEMSET: "memset",
    Kind.RECORDED: "event",
    Kind.WAIT: "event",
    Kind.SYNC: "api",
    Kind.HOST_FUNCTION: "host_function",
}
SPLIT = tuple(TIMES)[1:-1]  # the parts of the latency
SYNCS = ("stream", "event", "context", "stream")
IN_A_ROW = 5  # launches in a row; with fewer, a graph does not pay off
NODE_NS = 1500  # upper estimate of the time between two small kernels of a graph, ns


class LaunchView:
    """`OperationColumns` with the names for output. `at` is the index of an operation in the columns."""

    def __init__(self, columns: OperationColumns, activity: Activity | None = None) -> None:
        self.columns, self.activity = columns, activity
        self.ops, self.waits = columns.ops, columns.waits
        self.short = [name.short if name.short else "?" for name in names.demangle_all(columns.names)]
        self.full = [name.full for name in names.demangle_all(columns.names)]
        self._shown: dict[int | None, list[str]] = {}
        self.labels = self.shown(None)
        self._stacks: dict[tuple[int, int], list[str]] = {}

    def shown(self, width: int | None) -> list[str]:
        """Return the labels of kernels, by number, in at most `width` columns. Different kernels have different labels."""
        if width not in self._shown:
            labels = names.labels(self.columns.names, width)
            self._shown[width] = [labels[name] or "?" for name in self.columns.names]
        return self._shown[width]

    @cached_property
    def streams(self) -> list[str]:
        """The label of each queue, as in `OperationColumns.queue_keys`."""
        return [name for _, name in self.columns.queue_keys]

    def listed(self, some: Integers) -> Integers:
        """Remove what the program did not call.

        On AMD GPUs, these are ROCr's signals (events). On NVIDIA GPUs, they are notes about memory, such as a module's variables.
        """
        vendors = np.array([process.vendor == Vendor.AMD for process in self.columns.processes], bool)
        amd = vendors[self.columns.process[some]]
        signals = np.isin(self.ops.kind[some], (Kind.RECORDED, Kind.WAIT)) & amd
        notes = (self.columns.api[some] == NO_FUNCTION) & ~amd
        return some[~signals & ~notes]

    def op(self, at: int) -> str:
        """Return the `op` field of an operation."""
        kind = int(self.ops.kind[at])
        return COPIES.get(Kind(kind)) or OPS.get(Kind(kind)) or ("graph" if kind == Kind.GRAPH else "api")

    def name(self, at: int) -> str:
        """Return the short name of an operation."""
        kind = Kind(int(self.ops.kind[at]))
        if kind == Kind.KERNEL:
            return self.short[int(self.columns.name[at])]
        if kind == Kind.GRAPH:
            return f"graph {int(self.ops.graph[at]) + 1}"
        if kind in (Kind.RECORDED, Kind.WAIT):
            return f"{'record' if kind == Kind.RECORDED else 'wait'} 0x{int(self.columns.event[at]):x}"
        if kind == Kind.SYNC:
            what = int(self.ops.what[at])
            word = SYNCS[what] if what < len(SYNCS) else "?"
            amd = self.columns.processes[int(self.columns.process[at])].vendor == Vendor.AMD
            return f"synchronize {'device' if amd and word == 'context' else word}"
        if kind == Kind.API:
            return self.columns.functions.get(int(self.columns.api[at])) or "driver call"
        return self.op(at).replace("_", " ")

    def waited_for(self, at: int) -> dict[str, str] | None:
        """Return the kind and name of the operation that this one waited for. If it waited through an event, `of` is the real kind."""
        before = int(self.waits.waited_for[at])
        if before < 0:
            return None
        op = self.op(before)
        kind = "copy" if int(self.ops.kind[before]) in COPIES else op
        if self.waits.by_event[at]:
            return {"kind": "event", "name": self.name(before), "of": kind}
        return {"kind": kind, "name": self.name(before)}

    def kernel_waited_for(self, at: int) -> str | None:
        """Return the mangled name of the kernel that an operation waited for."""
        before = int(self.waits.waited_for[at])
        is_kernel = before >= 0 and self.ops.kind[before] == Kind.KERNEL
        return self.columns.names[int(self.columns.name[before])] if is_kernel else None

    def waits_alike(self, at: Integers) -> Integers:
        """Return a number for each of these operations, all of which have waited.

        Two numbers are equal if the operations waited for the same thing (`waited_for` and `kernel_waited_for`)."""
        columns, ops = self.columns, self.ops
        before = self.waits.waited_for[at]
        kind = ops.kind[before]
        event = np.isin(kind, (Kind.RECORDED, Kind.WAIT))
        # What an operation's name depends on besides its kind.
        named = np.select(
            [kind == Kind.KERNEL, kind == Kind.GRAPH, event, kind == Kind.SYNC, kind == Kind.API],
            [
                columns.name[before],
                ops.graph[before],
                columns.event[before].astype(np.int64),
                ops.what[before],
                columns.api[before],
            ],
        )
        process = np.where(kind == Kind.SYNC, columns.process[before], 0)
        return arrays.row_numbers(kind, self.waits.by_event[at].astype(np.int64), named, process)

    def common(self, at: int) -> dict[str, Any]:
        """Return the fields pid, comm, gpu, vendor and wave."""
        owner, process = self.owner(at), self.columns.processes[int(self.columns.process[at])]
        name = int(self.columns.name[at]) if self.ops.kind[at] == Kind.KERNEL else -1
        wave = wave_of(process.waves, owner.gpu, self.columns.names[name] if name >= 0 else "")
        return owner._asdict() | vendor_fields(process.vendor, wave)

    def owner(self, at: int) -> Owner:
        process = self.columns.processes[int(self.columns.process[at])]
        return Owner(process.pid, process.comm, int(self.columns.gpu[at]), process.vendor.word)

    def owners(self, some: Integers) -> list[Owner]:
        """Return the distinct owners of operations."""
        number = arrays.row_numbers(self.columns.process[some], self.columns.gpu[some])
        _, first = np.unique(number, return_index=True)
        return [self.owner(at) for at in some[first].tolist()]

    def by_call(self, some: Integers) -> Integers:
        """Return indices in the order of the calls. By default, operations are ordered by process."""
        return some[np.argsort(self.ops.call[some], kind="stable")]

    def stack(self, at: int) -> list[str]:
        """Return the host stack of a launch, innermost frame first; empty if unknown."""
        return self.frames(int(self.columns.process[at]), int(self.columns.stack[at]))

    def frames(self, process: int, number: int) -> list[str]:
        """Return the frames of a host stack, given its number in the process."""
        if (process, number) not in self._stacks:
            frames = self.columns.processes[process].stacks.get(number, ())
            self._stacks[process, number] = [symbols.frame_of(frame) for frame in frames]
        return self._stacks[process, number]

    def meanwhile(self, at: int) -> list[tuple[str, int]]:
        """Return what kept the launching thread from its own code between the call and the kernel's start, as (what, ns)."""
        if self.activity is None or self.ops.start[at] == NONE:
            return []
        process = self.columns.processes[int(self.columns.process[at])]
        thread = process.number << 32 | int(self.columns.tid[at])
        return self.activity.explain(thread, int(self.ops.call[at]), int(self.ops.start[at]))

    def ranges(self, at: int) -> list[str]:
        """Return the names of the ranges in which a launch was, the outermost first."""
        process = self.columns.processes[int(self.columns.process[at])]
        return [one.name for one in process.ranges.get(int(self.columns.ranges[at]), ())]

    def launch(self, at: int, stack: bool = False, ranges: bool = False) -> dict[str, Any]:
        """Return the JSON record of a launch."""
        columns, ops, waits = self.columns, self.ops, self.waits
        graph = None
        if ops.node[at] >= 0:
            exec_number = columns.exec[at]
            graph = {"exec": f"0x{exec_number:x}", "node": int(ops.node[at]), "replay": int(ops.replay[at])}
        more: dict[str, Any] = {"stack": self.stack(at)} if stack else {}
        more |= {"ranges": self.ranges(at)} if ranges else {}
        if self.activity is not None:
            more["meanwhile"] = [{"what": what, "ns": ns} for what, ns in self.meanwhile(at)]
        return LAUNCH.record(
            **self.common(at),
            launch=int(ops.id[at]),
            kernel=self.short[int(columns.name[at])],
            tid=int(columns.tid[at]),
            stream=f"0x{int(columns.stream[at]):x}",
            graph=graph,
            call_ns=int(ops.call[at]),
            return_ns=int(ops.ret[at]),
            start_ns=known(ops.start[at]),
            end_ns=known(ops.end[at]),
            **{f"{name}_ns": known(getattr(waits, name)[at]) for name in TIMES},
            waited_for=self.waited_for(at),
            method=METHODS[int(columns.method[at])],
            clock_error_ns=known(columns.start_error[at]),
            running=bool(columns.running[at]),
            grid=columns.grid[at].tolist(),
            block_dim=columns.block_dim[at].tolist(),
            **more,
        )

    def operation(self, at: int) -> dict[str, Any]:
        """Return the JSON record of an operation for --timeline: when it ran on the GPU, otherwise when it was called."""
        ops, op = self.ops, self.op(at)
        begin, end = self.span(at)
        on_gpu = op != "api" and (op != "graph" or at in self.opaque_graphs) and begin is not None
        if not on_gpu:
            begin, end = int(ops.call[at]), int(ops.ret[at])
        assert begin is not None
        return OPERATION.record(
            **self.common(at),
            t_ns=begin,
            dur_ns=None if end is None else end - begin,
            op=op,
            name=self.name(at),
            stream=f"0x{int(self.columns.stream[at]):x}",
            tid=int(self.columns.tid[at]),
            bytes=int(self.columns.bytes[at]),
            call_ns=int(ops.call[at]),
            on="gpu" if on_gpu else "host",
            method=METHODS[int(self.columns.method[at])] if on_gpu else None,
            clock_error_ns=known(self.columns.start_error[at]) if on_gpu else None,
        )

    @cached_property
    def opaque_graphs(self) -> frozenset[int]:
        """Graph launches whose total time is known, but not the time of any kernel in them."""
        parents = self.columns.parent
        inside = parents >= 0
        told = arrays.distinct(parents[inside & (self.ops.start != NONE)])
        whole = np.flatnonzero((self.ops.kind == Kind.GRAPH) & (self.ops.start != NONE))
        return frozenset(whole[~arrays.among(whole, told)].tolist())

    def span(self, at: int) -> tuple[int | None, int | None]:
        """Return the beginning and end of an operation: on the GPU, or on the host for host calls.

        A graph whose kernels are timed begins with its call and ends with its last kernel.
        """
        op, call = self.op(at), int(self.ops.call[at])
        if op == "api":
            return call, int(self.ops.ret[at])
        if op == "graph" and at not in self.opaque_graphs:
            latency, lasted = self.waits.latency[at], self.waits.exec[at]
            return call, None if NONE in (latency, lasted) else int(call + latency + lasted)
        if op == "event":
            return known(self.waits.passed[at]), known(self.waits.passed[at])
        return known(self.ops.start[at]), known(self.ops.end[at])


def known(value: Any) -> int | None:
    """Return an integer, or None for NONE and UNKNOWN."""
    return None if value in (NONE, UNKNOWN) else int(value)


# --- findings ---


class GraphCandidate(Record):
    """A sequence of launches of short kernels in one stream, by a host that does little else meanwhile. Times are in ns.

    took       time from the first call to the last end
    busy       time during which the GPU worked
    as_graph   upper estimate for the same kernels in one graph
    label      label of the first kernel
    """

    count: int
    took: int
    busy: int
    as_graph: int
    label: str

    @property
    def gain(self) -> int:
        """The time that a graph would save, in ns."""
        return self.took - self.as_graph


def _waits_before(view: LaunchView) -> Integers:
    """Return a number for each operation. Two are equal only if the same thread did not wait for the GPU between the operations."""
    ops = view.ops
    order = np.lexsort((np.arange(len(ops)), view.columns.tid, view.columns.process))
    waited = np.zeros(len(ops), np.int64)
    thread = np.diff(view.columns.tid[order], prepend=-1) != 0
    thread |= np.diff(view.columns.process[order], prepend=-1) != 0
    waited[order] = np.cumsum((ops.kind[order] == Kind.SYNC) | ops.waits[order] | thread)
    return waited


def graph_candidates(view: LaunchView, chosen: Integers) -> list[GraphCandidate]:
    """Return the sequences of launches that a graph would shorten, largest gain first.

    In these, there are at least `IN_A_ROW` launches, the GPU mostly waits for the next call, and the host mostly launches.
    All are by one thread, which does not wait for the GPU in between.
    """
    ops, columns = view.ops, view.columns
    plain = ops.node < 0
    wanted = np.zeros(len(ops), bool)
    wanted[chosen] = True
    made = []
    waits = _waits_before(view)
    order = np.lexsort((np.arange(len(ops)), ops.queue))
    order = order[(plain & (ops.kind != Kind.API))[order]]
    for place in arrays.equal_runs(ops.queue[order]):
        part = order[place]
        if len(part) < IN_A_ROW:
            continue
        fits = wanted[part] & (ops.start[part] != NONE) & (ops.end[part] != NONE)
        fits &= ops.kind[part] == Kind.KERNEL
        gap = np.append(0, ops.call[part][1:] - ops.ret[part][:-1])
        length = np.where(fits, ops.end[part] - ops.call[part], 0)
        near = gap <= length  # the next call came soon
        near[1:] &= waits[part][1:] == waits[part][:-1]
        borders = np.concatenate([[0], np.flatnonzero(~(fits[1:] & fits[:-1] & near[1:])) + 1, [len(part)]])
        for number in np.flatnonzero(np.diff(borders) >= IN_A_ROW).tolist():
            run = part[borders[number] : borders[number + 1]]
            behind = view.waits.waited_for[run[1:]]
            if not arrays.among(behind[behind >= 0], run).all():
                # They waited for other work, which a graph would not change.
                continue
            took = int(ops.end[run].max() - ops.call[run[0]])
            busy = int((ops.end[run] - ops.start[run]).sum())
            host = int((ops.call[run][1:] - ops.ret[run][:-1]).sum())
            launch = int(view.waits.api[run[0]]) + max(known(view.waits.overhead[run[0]]) or 0, 0)
            as_graph = launch + busy + NODE_NS * (len(run) - 1)
            error = max(int(columns.start_error[run].max()), int(columns.end_error[run].max()))
            if as_graph + 2 * error < 0.7 * took and host < 0.3 * took:
                made.append(
                    GraphCandidate(len(run), took, busy, as_graph, view.labels[int(columns.name[run[0]])])
                )
    return sorted(made, key=lambda candidate: -candidate.gain)


def slower(view: LaunchView, chosen: Integers, limit: int) -> Integers:
    """Return the launches with a latency above `limit` ns."""
    latency = view.waits.latency[chosen]
    return chosen[(latency != NONE) & (latency > limit)]


# --- traces ---


def write_trace(view: LaunchView, trace: Trace, new: Integers) -> None:
    """Write the operations in `new`: host calls by thread, GPU work by stream, and an arrow from each call to its GPU work."""
    columns, ops = view.columns, view.ops
    owners = OwnerColumns().see(view.owners(np.flatnonzero(~np.isin(ops.kind, (Kind.SYNC, Kind.API)))))
    for at in new.tolist():
        process = columns.processes[int(columns.process[at])]
        op, name, tid = view.op(at), view.name(at), int(columns.tid[at])
        member = bool(ops.node[at] >= 0)
        begin, call = known(ops.start[at]), int(ops.call[at])
        order = 64 * process.number  # the GPUs of a process follow it
        trace.name(process.pid, f"{process.comm} (host)", order=order)
        if not member:
            trace.name(process.pid, f"{process.comm} {tid}", tid)
            title = name if op == "api" else f"launch {name}" if op in ("kernel", "graph") else name
            trace.slice(process.pid, tid, title, call, int(ops.ret[at]) - call, "call", id=int(ops.id[at]))
        if begin is None:
            continue
        # Each GPU is a process in the trace, with a pid that no Linux process has: those are below 2^22.
        device = (int(columns.gpu[at]) + 1 << 22) + process.pid
        queue, label = columns.queue_keys[int(ops.queue[at])]
        trace.name(
            device,
            f"{process.comm} (pid {process.pid}) on {owners.gpu_name(view.owner(at))}",
            order=order + 1 + int(columns.gpu[at]),
        )
        end = known(ops.end[at])
        length = 0 if end is None else end - begin
        errors = known(columns.start_error[at]) or 0, known(columns.end_error[at]) or 0
        row, begin = trace.place(device, queue, begin, begin + length, errors)
        track = queue + (row << 32)
        trace.name(device, f"stream {label}" + (f", beside ({row})" if row else ""), track, queue)
        details: dict[str, Any] = {"id": int(ops.id[at])}
        for what in ("latency", *SPLIT):
            details[f"{what}_us"] = (
                None if (value := known(getattr(view.waits, what)[at])) is None else value / 1000
            )
        details |= {"waited_for": (view.waited_for(at) or {}).get("name")}
        if columns.bytes[at]:
            details["bytes"] = int(columns.bytes[at])
        trace.slice(device, track, name, begin, length, op, **details)
        trace.arrow(int(ops.id[at]), (process.pid, tid, call), (device, track, begin))

"""Combine the operation log with the device programs' measurements into launches with times on the host's clock.

launches = Launches(slots=1 << 15)
for _ in session.intervals(…, tick=lambda: launches.take(session)):
    launches.take_shared(session)
    columns = launches.columns()
    new = launches.fresh(columns, last=True)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gpubpf import names as kernel_names
from gpubpf.agent.definitions import (
    NUMBER_BITS,
    NUMBER_MASK,
    OTHER_OPERATION,
    Kind,
    QueueKind,
    Reason,
    Vendor,
    outcome_of,
)
from gpubpf.launches import dependencies
from gpubpf.launches.arrays import among, as_bytes, distinct, elements, equal_runs, joined, row_numbers
from gpubpf.launches.dependencies import NEVER, NONE, Operations, Waits
from gpubpf.launches.device_times import CELL, MASK, TIME_BITS, DeviceCells
from gpubpf.record import MutableRecord, Record, field, replace
from gpubpf.records import operation_log
from gpubpf.records.clock import UNKNOWN, Bracket, GpuClock

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpubpf.agent.definitions import RangeName
    from gpubpf.records.results import ProcessLog
    from gpubpf.session.session import Session

    Integers: TypeAlias = NDArray[np.int64]
    Records: TypeAlias = NDArray[Any]

NO_METHOD, DEVICE, STAMP, CUPTI, ROCR = range(5)  # how a time was measured
QUEUE_NAMES = {
    QueueKind.LEGACY: "default",
    QueueKind.H2D: "H->D", QueueKind.D2H: "D->H", QueueKind.D2D: "D->D",
}  # fmt: skip
LEFT_OUT = (
    outcome_of(Reason.SAMPLED_OUT),
    outcome_of(Reason.FILTERED),
)  # outcomes because of --sample and --launch
METHODS = (None, "device", "stamp", "cupti", "rocr")
KEPT = 1 << 15  # the latest records, which `forget` always keeps
OPEN = 1 << 18  # records that `forget` also keeps: of launches that run, or whose times are not read yet
FULL = 1 << 18  # new records after which `forget` is due
MOST_NUMBERED = 1 << 16  # maximum streams or graphs to remember
MOST_EDGES = 1 << 18  # maximum edges of graphs to remember per process
READINGS = 1024  # clock brackets to keep per context; the older ones are kept at longer intervals
WIDE = 10_000  # ns; if all clock brackets are wider, as on a very busy machine, launches bound the clock, too
SPREAD = 64  # number of launches that then bound the clock
_HOST = "host"  # the source of cells that come from the shared array in host memory


class LoggedProcess(MutableRecord):
    """A traced process.

    virtual   its times are on the virtual clock of the embedded device
    names     mangled kernel names by slot
    gpus      GPU ordinals by context number
    stacks    host stacks by number, innermost frame first
    ranges    combinations of open ranges by number, the outermost range first
    number    unique in the session, unlike the pid, which survives exec
    vendor    the vendor of its GPUs
    waves     see `ProcessLog`
    ended     it has ended, and its log was read
    failed    one of its contexts failed
    from_before   it may have used the GPU before the tool attached to it
    taken_ns  when the last reading of each context began, on the host's clock
    """

    pid: int
    comm: str = ""
    virtual: bool = False
    names: Mapping[int, str] = field(default_factory=dict)
    gpus: Mapping[int, int] = field(default_factory=dict)
    stacks: Mapping[int, Sequence[Any]] = field(default_factory=dict)
    ranges: Mapping[int, Sequence[RangeName]] = field(default_factory=dict)
    number: int = 0
    vendor: Vendor = Vendor.NVIDIA
    waves: Mapping[str | int, int] = field(default_factory=dict)
    ended: bool = False
    failed: bool = False
    from_before: bool = False
    taken_ns: dict[Any, int] = field(default_factory=dict)


class Numbering:
    """Numbers keys from 1 in order of appearance, separately in each group. Beyond MOST_NUMBERED keys, it forgets the oldest."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, Any], int] = {}
        self._next: dict[Any, int] = {}

    def of(self, group: Any, key: Any) -> int:
        """Return the number of a key."""
        number = self._known.get((group, key))
        if number is None:
            number = self._next[group] = self._next.get(group, 0) + 1
            self._known[group, key] = number
            if len(self._known) > MOST_NUMBERED:
                del self._known[next(iter(self._known))]
        return number


class OperationColumns(Record):
    """What is known about operations: arrays with one element per operation.

    process     index in `processes`
    name        index of the kernel's mangled name in `names`, or -1
    method      how its times were measured: NO_METHOD, DEVICE, STAMP, CUPTI or ROCR
    start_error, end_error   ns; UNKNOWN without a time
    exec_error  error of end - start, ns
    likely_end  of launches without an end, because the reading may lack the last threads: the end that it shows, ns; NONE if no
                later kernel of the stream has started
    running     not complete, or not even started, at the last reading
    lost        instrumented, but its times never arrived
    bytes       of copies and memsets
    exec        of graph launches and their kernels: the executable graph
    first       of a graph launch: the id of its first kernel
    parent      of a kernel in a graph: the index of the graph launch, else -1
    event       of event records and waits: the handle
    api         of an API call: the number of its function; `functions` has the names
    grid, block_dim   [operation, 3]
    ranges      of launches: the number of the open ranges, 0 if none are known; a kernel in a graph has those of the graph launch
    wanted      launches that the user asked for
    by_others   instrumented launches that only the host program's filters exclude
    origin      the time of the very first call, ns
    clock_steps how often a clock was set or jumped
    queue_keys  for each stream: a number that never changes (unlike that in `ops`), and its name: "default", "thread 70" (the
                default stream of thread 70), or a number in its process; on AMD GPUs "queue" and the number, or "H->D"
    """

    ops: Operations
    waits: Waits
    processes: list[LoggedProcess]
    process: Integers
    names: list[str]
    name: Integers
    gpu: Integers
    tid: Integers
    stream: NDArray[np.uint64]
    method: Integers
    start_error: Integers
    end_error: Integers
    exec_error: Integers
    likely_end: Integers
    running: NDArray[np.bool_]
    lost: NDArray[np.bool_]
    bytes: Integers
    exec: Integers
    first: Integers
    parent: Integers
    event: NDArray[np.uint64]
    api: Integers
    stack: Integers
    ranges: Integers
    grid: Integers
    block_dim: Integers
    wanted: NDArray[np.bool_]
    by_others: NDArray[np.bool_]
    origin: int
    clock_steps: int
    queue_keys: Sequence[tuple[int, str]] = ()
    functions: Mapping[int, str] = field(default_factory=dict)


class _Lasting:
    """The records of a process that later operations need, whatever their age: its streams, its graphs' edges, and its clocks."""

    KINDS = (operation_log.QUEUE, operation_log.EDGE, operation_log.CLOCK)

    def __init__(self, process: LoggedProcess) -> None:
        self.process = process
        nothing = np.zeros(0, operation_log.DTYPE)
        self._queues, self._edges = nothing, nothing
        self._clocks: dict[int, Records] = {}  # by context

    def take(self, records: Records) -> None:
        """Take records of these kinds. If a context has too many clock brackets, drop every second one, as in `KernelShapes`."""
        kinds = records["kind"]
        queues, edges = (elements(records, kinds == kind) for kind in self.KINDS[:2])
        self._queues = joined([self._queues, queues], operation_log.DTYPE)
        self._edges = joined([self._edges, edges], operation_log.DTYPE)
        clocks = elements(records, kinds == operation_log.CLOCK)
        for context in distinct(clocks["context"].astype(np.int64)).tolist():
            new = elements(clocks, clocks["context"] == context)
            parts = [self._clocks[context], new] if context in self._clocks else [new]
            kept = joined(parts, operation_log.DTYPE)
            while len(kept) > READINGS:
                kept = joined([kept[:1], kept[2:-1:2], kept[-1:]], operation_log.DTYPE)
            self._clocks[context] = kept

    def forget(self, queues: Integers, graphs: Integers) -> None:
        """If there are too many streams or graphs, drop those that were unused for longest.

        queues, graphs: sorted numbers of the streams and graphs used lately."""
        used = among(self._queues["queue"].astype(np.int64), queues)
        self._queues = elements(self._queues, np.argsort(used, kind="stable")[-MOST_NUMBERED:])
        used = among(self._edges["edge"]["exec"].astype(np.int64), graphs)
        self._edges = elements(self._edges, np.argsort(used, kind="stable")[-MOST_EDGES:])

    def records(self) -> Records:
        return joined([self._queues, self._edges, *self._clocks.values()], operation_log.DTYPE)


class Launches:
    """Collects launches as they arrive.

    slots: the size of the device programs' arrays, a power of two.
    kernels: the globs of --kernel.
    filtered: the host program filters launches.
    """

    def __init__(self, slots: int, kernels: Sequence[str] = (), filtered: bool = False) -> None:
        self._slots, self._kernels, self._filtered = slots, tuple(kernels), filtered
        self._records: list[tuple[LoggedProcess, Records]] = []
        self._lasting: dict[int, _Lasting] = {}  # by the identity of the process
        self._cells: dict[tuple[int, Any], DeviceCells] = {}
        self._processes: dict[int, LoggedProcess] = {}
        self._told = np.zeros(0, np.int64)  # sorted ids of operations that `fresh` has returned
        # Process → ids of the launches that passed the host program's filters.
        self._passed: dict[int, Integers] = {}
        self._count = self._kept = 0  # records: all, and those that `forget` has kept
        self._origin = NEVER
        self._lost_of: dict[int, int] = {}
        # Numbers for queues, for streams in a process, and for graphs.
        self._numbers = (Numbering(), Numbering(), Numbering())
        # Streams and contexts, as (process, number), that may hold work from before attaching.
        self._unseen: tuple[set[tuple[int, int]], set[tuple[int, int]]] = (set(), set())

    @property
    def lost(self) -> int:
        """The number of operations that were dropped because a log was full."""
        return sum(self._lost_of.values())

    def take(
        self, session: Session, starts: str = "starts", ends: str = "ends", shared: str = "launches"
    ) -> None:
        """Take new logs and readings. The logs come first, so that they have the launches in the readings."""
        for log in session.logs():
            self.take_log(log)
        self.take_readings(session, starts, ends, shared)

    def take_log(self, log: ProcessLog) -> LoggedProcess:
        """Take the new records of a process's log. Return the process."""
        process = self._processes.setdefault(log.process, LoggedProcess(log.pid, number=log.process))
        process.comm, process.virtual = log.comm, log.virtual
        process.names, process.gpus, process.stacks = log.names, log.gpus, log.stacks
        process.ranges = log.ranges
        process.vendor, process.waves, process.ended = log.vendor, log.waves, log.over
        process.from_before = log.from_before
        self._lost_of[log.process] = log.lost
        self.log(process, log.records)
        return process

    def take_readings(
        self, session: Session, starts: str = "starts", ends: str = "ends", shared: str = "launches"
    ) -> None:
        """Take new readings. Take the logs before, so that they have the launches in the readings."""
        for number in session.failed() & self._processes.keys():
            self._processes[number].failed = True
        for reading in session.readings(starts, ends):
            process = self._processes.setdefault(
                reading.process, LoggedProcess(reading.pid, reading.comm, number=reading.process)
            )
            cells = [reading.instances[name] for name in (starts, ends)]
            if all(cells):
                begun, ended = (found[0].array for found in cells)
                self.reading(process, begun, ended, reading.taken_ns, reading.idle, reading.context)
        if self._filtered:
            self.take_shared(session, shared)

    def take_shared(self, session: Session, shared: str = "launches") -> None:
        """Take the shared arrays, which survive a killed process. Call this before `columns`."""
        for array in session.shared(shared):
            self.host_launches(array.process, array.array)

    def log(self, process: LoggedProcess, records: Records) -> None:
        """Take consecutive records of the operation log (`operation_log.DTYPE`)."""
        if not len(records):
            return
        self._count += len(records)
        older = records[
            (records["kind"] == operation_log.QUEUE) & (records["flags"] & operation_log.FROM_BEFORE != 0)
        ]
        for unseen, column in zip(self._unseen, ("queue", "context"), strict=True):
            unseen.update((process.number, number) for number in older[column].tolist()[:MOST_NUMBERED])
        calls = records["call_ns"][(records["kind"] < operation_log.SPAN) & (records["call_ns"] > 0)]
        if len(calls):
            self._origin = min(self._origin, int(calls.min()))
        lasting = np.isin(records["kind"], _Lasting.KINDS)
        if lasting.any():
            self._lasting.setdefault(id(process), _Lasting(process)).take(elements(records, lasting))
            records = elements(records, ~lasting)
        if len(records):
            self._records.append((process, records))

    def host_launches(self, process: int, launches: Any) -> None:
        """Take the shared array of a process (given by its number), with the fields `launch`, `start` and `end`.

        The host program writes the launches that pass the filters. Device programs write the starts here, because in GPU memory they
        would be lost with the process. The agent copies the ends from the GPU after waits of the program (`Follow.kept`).
        """
        ids = launches["launch"].astype(np.int64)
        if self._filtered:
            before = self._passed.get(process, np.zeros(0, np.int64))
            self._passed[process] = distinct(np.append(before, ids[ids != 0]))
        if len(launches) == self._slots:
            starts, ends = (np.ascontiguousarray(launches[name]) for name in ("start", "end"))
            cells = self._cells.setdefault((process, _HOST), DeviceCells(self._slots))
            cells.update(starts, ends, 0, False)

    @property
    def full(self) -> bool:
        """Whether it is time to use `columns` and then `forget`."""
        return self._count - self._kept >= FULL

    def fresh(self, columns: OperationColumns, last: bool) -> Integers:
        """Return the indices of operations that are complete and were not returned before.

        The `last` call also returns operations that are still running. If more than OPEN are running, the oldest are returned earlier.
        """
        over = (columns.ops.kind != Kind.KERNEL) | (columns.ops.end != NONE) | last
        untold = ~among(columns.ops.id, self._told)
        over[np.flatnonzero(untold & ~over)[:-OPEN]] = True
        new = np.flatnonzero(over & untold)
        if not last:
            self._told = distinct(np.append(self._told, columns.ops.id[new]))
        return new

    def open_since(self, columns: OperationColumns) -> int:
        """Return the call time of the oldest launch that `fresh` has not returned yet, in ns; NEVER if there is none."""
        open_ = (columns.ops.kind == Kind.KERNEL) & ~among(columns.ops.id, self._told)
        return int(columns.ops.call[open_].min(initial=NEVER))

    def forget(self) -> None:
        """Drop old records of operations that `fresh` has returned. Only the latest of them matter to later operations."""
        if self._count < 2 * KEPT:
            return
        self._forget_lasting()
        kept: list[tuple[LoggedProcess, Records]] = []
        left = KEPT  # how many more records to keep; below 0, it counts older open ones
        for process, records in reversed(self._records):
            border = max(0, len(records) - max(left, 0))
            earlier, latest = records[:border], records[border:]
            left -= len(latest)
            ran = (earlier["flags"] & operation_log.CAPTURED == 0) & (earlier["result"] == 0)
            told = among(earlier["id"].astype(np.int64), self._told)
            open_ = (earlier["kind"] == operation_log.KERNEL) & ran & ~told
            if any(self._unseen):
                self._note_work(process, elements(earlier, ~open_))
            earlier = elements(earlier, open_)[-(left + OPEN) :]
            left -= len(earlier)
            if len(earlier) or len(latest):
                kept.append((process, joined([earlier, latest], operation_log.DTYPE)))
            if left <= -OPEN:
                break
        self._records = kept[::-1]
        self._count = self._kept = sum(len(records) for _, records in self._records)
        numbers = [records["id"].astype(np.int64) for _, records in self._records]
        ids = distinct(np.concatenate([np.zeros(0, np.int64), *numbers]))
        self._told = self._told[among(self._told, ids)]
        launched = ids[ids & OTHER_OPERATION == 0]
        open_ids = ids[~among(ids, self._told)] & NUMBER_MASK

        def last(process: int) -> int:
            return int(launched[launched >> NUMBER_BITS == process].max(initial=0))

        for number, passed in self._passed.items():
            self._passed[number] = passed[among(passed, ids) | (passed > last(number) - KEPT)]
        for (number, _), cells in self._cells.items():
            cells.forget(open_ids, last(number) & NUMBER_MASK)

    def _forget_lasting(self) -> None:
        """Drop the streams and graphs of ended processes, and those that were not used for longest if there are too many."""
        parts: dict[int, list[Records]] = {}
        for process, records in self._records:
            parts.setdefault(id(process), []).append(records)
        for key, lasting in list(self._lasting.items()):
            if key not in parts and lasting.process.ended:
                del self._lasting[key]
                continue
            queues, graphs = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
            for records in parts.get(key, ()):
                queues.append(records["queue"].astype(np.int64))
                launched = records["kind"] == operation_log.GRAPH
                graphs.append(records["graph"]["exec"][launched].astype(np.int64))
            lasting.forget(distinct(np.concatenate(queues)), distinct(np.concatenate(graphs)))

    def _note_work(self, process: LoggedProcess, forgotten: Records) -> None:
        """Record that later operations in these streams do not wait for work from before attaching."""
        work = forgotten["kind"] <= operation_log.GRAPH
        for unseen, column in zip(self._unseen, ("queue", "context"), strict=True):
            unseen.difference_update((process.number, n) for n in distinct(forgotten[column][work]).tolist())

    def reading(
        self, process: LoggedProcess, starts: Any, ends: Any, taken: int, idle: bool, source: Any = None
    ) -> None:
        """Take the device's arrays (uint64): see `DeviceCells.update`.

        taken: host time at which reading began, ns. idle: no kernel was running then, so every end is final. source: the context.
        """
        cells = self._cells.setdefault((process.number, source), DeviceCells(self._slots))
        cells.update(np.asarray(starts, np.uint64), np.asarray(ends, np.uint64), taken, idle)
        process.taken_ns[source] = taken

    def columns(self) -> OperationColumns:
        """Return all that is known now. This takes several seconds for a million operations."""
        passed = np.concatenate([np.zeros(0, np.int64), *self._passed.values()]) if self._filtered else None
        records = [(of.process, of.records()) for of in self._lasting.values()] + self._records
        return _ColumnsBuilder(records, self._cells, self._slots, self._numbers, self._unseen).columns(
            self._origin, self._kernels, passed
        )


class _ColumnsBuilder:
    """Builds `OperationColumns` from records and readings, once."""

    def __init__(
        self,
        records: list[tuple[LoggedProcess, Records]],
        cells: Mapping[tuple[int, Any], DeviceCells],
        slots: int,
        numbers: tuple[Numbering, Numbering, Numbering],
        unseen: tuple[set[tuple[int, int]], set[tuple[int, int]]],
    ) -> None:
        self.unseen_queues, self.unseen_contexts = unseen
        self.processes = list({id(process): process for process, _ in records}.values())
        place = {id(process): n for n, process in enumerate(self.processes)}
        self.raw = joined([part for _, part in records], operation_log.DTYPE)
        self.process = np.repeat(
            np.array([place[id(process)] for process, _ in records], np.int64),
            [len(part) for _, part in records],
        )
        self.cells, self.slots = cells, slots
        self.queue_numbers, self.stream_numbers, self.graph_numbers = numbers

    def columns(self, origin: int, kernels: Sequence[str], passed: Integers | None) -> OperationColumns:
        raw = self.raw
        kind = raw["kind"].astype(np.int64)
        queued = (kind >= Kind.KERNEL) & (kind <= Kind.HOST_FUNCTION)
        ran = queued & ((raw["flags"] & operation_log.CAPTURED) == 0) & (raw["result"] == 0)
        ran[self._joins(kind)] = False
        at = self._in_stream_order(np.flatnonzero(ran))
        self.at, self.kind = at, kind[at]
        count = len(at)
        self.owner = self.process[at]
        kinds = self.kind

        def field(part: str, name: str) -> Integers:
            return raw[part][name][at].astype(np.int64)

        kernel, graph = kinds == Kind.KERNEL, kinds == Kind.GRAPH
        member = kernel & ((raw["flags"][at] & operation_log.GRAPH_NODE) != 0)
        queue, queues, queue_keys, unseen = self._queues(at)
        contexts = raw["context"][at].astype(np.int64)
        context = row_numbers(self.owner, contexts)
        nothing = np.zeros(count, np.int64)
        none = np.full(count, -1, np.int64)
        execs = np.where(graph, field("graph", "exec"), field("kernel", "exec"))
        graphs = self._graphs(execs, graph | member)
        link = np.where(kinds == Kind.WAIT, field("event", "record"), field("sync", "record"))
        link = np.where((kinds == Kind.WAIT) | (kinds == Kind.SYNC), link, nothing)
        order = (kinds == Kind.WAIT) & ((raw["flags"][at] & operation_log.ORDER) != 0)
        what = np.select(
            [kinds == Kind.SYNC, graph],
            [field("sync", "what"), field("graph", "others")],
            order.astype(np.int64),
        )
        replay = np.where(graph, field("graph", "replay"), np.where(member, field("kernel", "replay"), -1))
        call, ret = (raw[name][at].astype(np.int64) for name in ("call_ns", "return_ns"))
        ops = Operations(
            id=raw["id"][at].astype(np.int64), kind=kinds, call=call, ret=np.maximum(ret, call),
            start=np.full(count, NONE), end=np.full(count, NONE), queue=queue, context=context,
            waits=(raw["flags"][at] & operation_log.SYNCHRONOUS) != 0, link=link, what=what, graph=graphs, replay=replay,
            node=np.where(member, field("kernel", "node"), none), queues=queues, edges=self._edges(), unseen=unseen,
            unseen_contexts=self._unseen_contexts(context, contexts),
        )  # fmt: skip
        outcome = np.where(kernel, field("kernel", "outcome"), none)
        self.parents = self._parents(ops, member)
        times = self._times(ops, outcome)
        names, name = self._names(kernel, field("kernel", "slot"))
        # Match by name, not by the agent's outcome, so that kernels that cannot be instrumented match, too.
        asked = kernel & np.array([kernel_names.chosen(kernels, text) for text in names] or [False])[name]
        handles = (kinds == Kind.RECORDED) | (kinds == Kind.WAIT)
        sized = (kinds > Kind.KERNEL) & (kinds <= Kind.MEMSET)
        parent, firsts = self.parents, np.where(graph, field("graph", "first"), none)
        waits = dependencies.waits(ops)
        lasted = times.pop("exec")
        waits = replace(waits, exec=np.where(waits.exec != NONE, waits.exec, lasted))
        wanted = asked & ~np.isin(outcome, LEFT_OUT) & (raw["flags"][at] & operation_log.NOT_CHOSEN == 0)
        ranges = np.where(
            kernel & ~member, field("kernel", "ranges"), np.where(graph, field("graph", "ranges"), nothing)
        )
        ranges = np.where(parent >= 0, ranges[np.maximum(parent, 0)], ranges)
        chosen = self._by_chosen_threads(ops, parent, firsts, passed)
        return OperationColumns(
            ops=ops, waits=waits, processes=self.processes, process=self.owner, names=names, name=name,
            gpu=self._gpus(at), tid=raw["thread"][at].astype(np.int64), stream=raw["stream"][at],
            bytes=np.where(sized, field("copy", "bytes"), nothing), exec=execs,
            first=firsts, parent=parent,
            event=np.where(handles, raw["event"]["event"][at], np.uint64(0)),
            api=np.where(kinds == Kind.API, field("api", "function"), none), functions=self._functions(at[kinds == Kind.API]),
            queue_keys=queue_keys,
            stack=raw["stack"][at].astype(np.int64), ranges=ranges, grid=field("kernel", "grid"),
            block_dim=field("kernel", "block"), origin=origin, wanted=wanted & chosen,
            by_others=wanted & ~chosen & (outcome == operation_log.INSTRUMENTED), **times,
        )  # fmt: skip

    def _in_stream_order(self, at: Integers) -> Integers:
        """Return an order of operations in which a call that waits for its own work is at the time of the call, not of its return.

        Other threads can launch work during such a wait. On the virtual clock the order stays, because each thread has its own time.
        It also stays on AMD GPUs, where all operations of a call to HIP have the times of that call.
        """
        raw, at = self.raw, at.copy()
        waiting = (raw["flags"][at] & operation_log.SYNCHRONOUS != 0) & (raw["kind"][at] <= Kind.GRAPH)
        owner = self.process[at]
        for place in distinct(owner[waiting]).tolist():
            if self.processes[place].virtual or self.processes[place].vendor == Vendor.AMD:
                continue
            mine = np.flatnonzero(owner == place)
            call, ret = (raw[name][at[mine]].astype(np.int64) for name in ("call_ns", "return_ns"))
            returned = np.maximum.accumulate(np.where(waiting[mine], 0, ret))
            moment = np.where(waiting[mine], call, returned)
            at[mine] = at[mine][np.argsort(moment, kind="stable")]
        return at

    def _joins(self, kind: Integers) -> list[int]:
        """Return the waits for events that were recorded in a capture. They put their stream into the capture and never ran."""
        raw = self.raw
        if not ((kind == Kind.RECORDED) & ((raw["flags"] & operation_log.CAPTURED) != 0)).any():
            return []
        places = np.flatnonzero((kind == Kind.RECORDED) | (kind == Kind.WAIT))
        captured: dict[tuple[int, int], bool] = {}
        found = []
        keys = zip(self.process[places].tolist(), raw["event"]["event"][places].tolist(), strict=True)
        for place, key in zip(places.tolist(), keys, strict=True):
            if kind[place] == Kind.RECORDED:
                captured[key] = bool(raw["flags"][place] & operation_log.CAPTURED)
            elif captured.get(key) and not raw["event"]["record"][place]:
                found.append(place)
        return found

    def _by_chosen_threads(
        self, ops: Operations, parent: Integers, firsts: Integers, passed: Integers | None
    ) -> NDArray[np.bool_]:
        """Return which operations passed the host program's filters."""
        if passed is None:
            return np.ones(len(ops), bool)
        return np.isin(np.where(parent >= 0, firsts[parent], ops.id), passed)  # it runs once per graph

    # --- identities ---

    def _queues(self, at: Integers) -> tuple[Integers, list[QueueKind], list[tuple[int, str]], list[bool]]:
        """Return the stream number of each operation; and by stream its kind, its key (`OperationColumns`), and whether it is unseen.

        An unseen stream may hold work from before attaching.
        """
        known = np.flatnonzero(self.raw["kind"] == operation_log.QUEUE)
        both = np.concatenate([known, at])
        numbers = row_numbers(self.process[both], self.raw["queue"][both].astype(np.int64))
        count = int(numbers.max()) + 1 if len(numbers) else 0
        kinds = [QueueKind.BLOCKING] * count
        for number, kind in zip(
            numbers[: len(known)].tolist(), self.raw["queue_kind"][known].tolist(), strict=True
        ):
            kinds[number] = QueueKind(kind) if kind < len(QueueKind) else QueueKind.BLOCKING
        keys, unseen = [(0, "")] * count, [False] * count
        used, first = np.unique(numbers[len(known) :], return_index=True)
        for number, place in sorted(
            zip(used.tolist(), at[first].tolist(), strict=True), key=lambda pair: pair[1]
        ):
            process = self.processes[int(self.process[place])].number
            queue = int(self.raw["queue"][place])
            if kinds[number] == QueueKind.PER_THREAD:
                name = f"thread {int(self.raw['thread'][place])}"
            else:
                name = QUEUE_NAMES.get(kinds[number]) or str(self.stream_numbers.of(process, queue))
            name = f"queue {name}" if kinds[number] == QueueKind.HARDWARE else name
            keys[number] = self.queue_numbers.of(None, (process, queue)), name
            unseen[number] = (process, queue) in self.unseen_queues
        return numbers[len(known) :], kinds, keys, unseen

    def _unseen_contexts(self, numbers: Integers, contexts: Integers) -> frozenset[int]:
        """Return the numbers of contexts that may hold work from before attaching."""
        if not self.unseen_contexts:
            return frozenset()
        used, first = np.unique(numbers, return_index=True)
        keys = ((self.processes[self.owner[place]].number, int(contexts[place])) for place in first.tolist())
        return frozenset(n for n, key in zip(used.tolist(), keys, strict=True) if key in self.unseen_contexts)

    def _graphs(self, execs: Integers, used: NDArray[np.bool_]) -> Integers:
        numbers = np.full(len(execs), -1, np.int64)
        self._graph_keys: dict[tuple[int, int], int] = {}
        owner, serial = self.owner[used], execs[used]
        _, first, which = np.unique(row_numbers(owner, serial), return_index=True, return_inverse=True)
        number_of = np.zeros(len(first), np.int64)
        for place in np.argsort(first).tolist():  # in order of appearance
            number_of[place] = self._graph(int(owner[first[place]]), int(serial[first[place]]))
        numbers[used] = number_of[which]
        return numbers

    def _graph(self, process: int, serial: int) -> int:
        key = (process, serial)
        if key not in self._graph_keys:
            number = self.graph_numbers.of(None, (self.processes[process].number, serial))
            self._graph_keys[key] = number - 1
        return self._graph_keys[key]

    def _edges(self) -> dict[int, list[tuple[int, int]]]:
        edges: dict[int, list[tuple[int, int]]] = {}
        found = np.flatnonzero(self.raw["kind"] == operation_log.EDGE)
        columns = (
            self.process[found],
            *(self.raw["edge"][name][found] for name in ("exec", "before", "after")),
        )
        for process, graph, begin, end in zip(*(column.tolist() for column in columns), strict=True):
            number = self._graph_keys.get((process, graph))
            if number is not None:
                edges.setdefault(number, []).append((begin, end))
        return edges

    def _parents(self, ops: Operations, member: NDArray[np.bool_]) -> Integers:
        parents = np.full(len(ops), -1, np.int64)
        launches, places = np.flatnonzero(ops.kind == Kind.GRAPH), np.flatnonzero(member)
        if not len(launches) or not len(places):
            return parents
        both = np.concatenate([launches, places])
        keys = row_numbers(ops.graph[both], ops.replay[both])
        by_key = np.full(int(keys.max()) + 1, -1, np.int64)
        by_key[keys[: len(launches)]] = launches
        parents[places] = by_key[keys[len(launches) :]]
        return parents

    def _names(self, kernel: NDArray[np.bool_], slots: Integers) -> tuple[list[str], Integers]:
        numbers: dict[str, int] = {}
        name = np.full(len(slots), -1, np.int64)
        for place, process in enumerate(self.processes):
            mine = np.flatnonzero(kernel & (self.owner == place))
            used, which = np.unique(slots[mine], return_inverse=True)
            given = [numbers.setdefault(process.names.get(slot, ""), len(numbers)) for slot in used.tolist()]
            name[mine] = np.array(given, np.int64)[which]
        return list(numbers), name

    def _functions(self, at: Integers) -> dict[int, str]:
        """Return the names of API functions by number; all processes use the same numbers."""
        numbers, first = np.unique(self.raw["api"]["function"][at], return_index=True)
        texts = self.raw["api"]["name"][at[first]].tolist()
        return {
            n: text.decode("utf-8", "backslashreplace")
            for n, text in zip(numbers.tolist(), texts, strict=True)
        }

    def _gpus(self, at: Integers) -> Integers:
        gpu = np.zeros(len(at), np.int64)
        contexts = self.raw["context"][at]
        for place, process in enumerate(self.processes):
            mine = self.owner == place
            used, which = np.unique(contexts[mine], return_inverse=True)
            gpu[mine] = np.array([process.gpus.get(context, 0) for context in used.tolist()], np.int64)[which]
        return gpu

    # --- times ---

    def _times(self, ops: Operations, outcome: Integers) -> dict[str, Any]:
        """Set `start` and `end` of the operations. Return the other time columns of `OperationColumns`."""
        count = len(ops)
        method, lasted = np.zeros(count, np.int64), np.full(count, NONE)
        start_error, end_error, exec_error = (np.full(count, UNKNOWN) for _ in range(3))
        end = np.full(count, NONE)
        probed = (ops.kind == Kind.KERNEL) & (outcome == operation_log.INSTRUMENTED)
        over = dependencies.ended_by(ops)  # from the host's waits only, because no starts are known yet
        read, cells = self._read(ops, probed, self._kept(ops, over))
        steps = 0
        for place, process in enumerate(self.processes):
            mine = np.flatnonzero(self.owner == place)
            gpus = self._gpus(self.at)[mine]
            spans = self._spans(place)
            for gpu in distinct(gpus).tolist():
                some = mine[gpus == gpu]
                at = some[read[some]]
                brackets = [Bracket(0, 0, 0)] if process.virtual else self._brackets(place, process, gpu)
                begin = _unwrapped(cells["start"][at], brackets[0] if brackets else None, ops.call[at])
                length = (cells["end"][at] - cells["start"][at]) & MASK
                good = cells["ended"][at] & (length < MASK // 2)
                if min((bracket.width for bracket in brackets), default=WIDE) >= WIDE:
                    brackets += _of_launches(begin[good], length[good], ops.call[at[good]], over[at[good]])
                clock = GpuClock.same() if process.virtual else GpuClock(brackets)
                steps += len(clock.steps)
                times, until = clock.host(begin), clock.host(begin + length)
                ops.start[at], start_error[at] = np.where(times.known, times.at, NONE), times.error
                end[at], end_error[at] = np.where(good & until.known, until.at, NONE), until.error
                lasted[at] = np.where(good, length, NONE)
                # The GPU's clock measures the duration better than the difference of start and end on the host's clock.
                off = np.where(times.known & until.known, np.abs(until.at - times.at - length), 0)
                exec_error[at] = np.where(good, max(clock.tick - 1, 0) + off, UNKNOWN)
                method[at] = np.where(times.known, DEVICE, NO_METHOD)
                self._stamps(ops, some, spans, clock, method, (start_error, end_error, exec_error))
                if not process.virtual:  # on the virtual clock, the agent has done so
                    self._within_calls(ops, some[method[some] == STAMP], start_error, exec_error)
        # A reading that was taken before the end of a launch may lack its last threads.
        over = dependencies.ended_by(ops)
        virtual = np.array([process.virtual for process in self.processes], bool)[self.owner]
        in_time = (over != NEVER) & (cells["taken"] >= over) & ~virtual  # a reading has no virtual time
        overtaken = self._overtaken(ops, read, cells)
        sure = cells["idle"] | in_time | (cells["last"] > overtaken)
        settled = read & (lasted != NONE) & sure
        ops.end[settled] = end[settled]
        open_ = read & ~settled
        end_error[open_] = exec_error[open_] = UNKNOWN
        likely_end = np.where(open_ & (lasted != NONE) & (overtaken != NEVER), end, NONE)
        lasted[~settled] = NONE
        past = cells["past"] | np.array([process.ended for process in self.processes], bool)[self.owner]
        unread = probed & ~read & (method == NO_METHOD)
        queued = unread & self._queued(ops, np.flatnonzero(unread))
        lost = open_ & past | unread & ~queued
        return {
            "method": method, "start_error": start_error, "end_error": end_error, "exec_error": exec_error, "exec": lasted,
            "likely_end": likely_end, "running": open_ & ~past | queued, "lost": lost, "clock_steps": steps,
        }  # fmt: skip

    def _kept(self, ops: Operations, over: Integers) -> NDArray[np.bool_]:
        """Return which operations had ended when the agent last kept values of their context's launches. over: see `ended_by`."""
        kept = np.where(
            ops.kind == Kind.SYNC,
            self.raw["sync"]["kept"][self.at],
            np.where(ops.kind == Kind.D2H, self.raw["copy"]["kept"][self.at], 0),
        ).astype(np.int64)
        found = np.zeros(len(ops), bool)
        keeping = np.flatnonzero(kept)
        for context in distinct(ops.context[keeping]).tolist():
            waits = keeping[ops.context[keeping] == context]
            waits = waits[np.argsort(kept[waits], kind="stable")]
            mine = np.flatnonzero(ops.context == context)
            # The latest of the waits that kept values of a launch.
            latest = np.append(NONE, np.maximum.accumulate(ops.ret[waits]))
            found[mine] = over[mine] <= latest[np.searchsorted(kept[waits], ops.id[mine], side="right")]
        return found

    def _read(
        self, ops: Operations, probed: NDArray[np.bool_], kept: NDArray[np.bool_]
    ) -> tuple[NDArray[np.bool_], NDArray[Any]]:
        """Return which operations have a cell, and the cells.

        The GPU's arrays override the host's, because they have more, except for ends that were kept after the last reading.
        """
        read, found = np.zeros(len(ops), bool), np.zeros(len(ops), CELL)
        final = np.zeros(len(ops), bool)
        for (number, source), cells in sorted(self.cells.items(), key=lambda item: item[0][1] != _HOST):
            here = [place for place, process in enumerate(self.processes) if process.number == number]
            at = np.flatnonzero(probed & np.isin(self.owner, here))
            there, cell = cells.lookup(ops.id[at] & NUMBER_MASK)
            there &= ~final[at] | cell["idle"]
            read[at[there]] = True
            as_bytes(found)[at[there]] = as_bytes(cell)[there]
            if source == _HOST:  # only the host's array has the launch: the process has ended
                found["past"][at[there]] = True
                final = kept & found["ended"]
                found["idle"] |= final
        return read, found

    def _queued(self, ops: Operations, unread: Integers) -> NDArray[np.bool_]:
        """Return which of the operations `unread`, given by their indices, had not started when their context was last read."""
        found = np.zeros(len(ops), bool)
        contexts = self.raw["context"][self.at[unread]]
        for (number, source), cells in self.cells.items():
            there = [process.number == number for process in self.processes]
            alive = [not (process.ended or process.failed) for process in self.processes]
            mine = (np.array(there, bool) & np.array(alive, bool))[self.owner[unread]]
            if source != _HOST and mine.any():
                at = unread[mine if source is None else mine & (contexts == source)]
                found[at] = ~cells.reused(ops.id[at] & NUMBER_MASK)
        return found

    def _overtaken(self, ops: Operations, read: NDArray[np.bool_], cells: NDArray[Any]) -> Integers:
        """Return, for each operation, the number of the first reading with a later kernel of its stream; NEVER without such a reading.

        Later readings show the operation complete.
        """
        result = np.full(len(ops), NEVER)
        position = np.arange(len(ops))
        # Kernels in a graph count at the position of the graph launch.
        place = np.where(ops.node >= 0, np.maximum(self.parents, 0), position)
        order = np.lexsort((place, ops.queue))
        order = order[read[order]]
        for queue in equal_runs(ops.queue[order]):
            mine = order[queue]
            first = np.append(np.minimum.accumulate(cells["first"][mine].astype(np.int64)[::-1])[::-1], NEVER)
            result[mine] = first[np.searchsorted(place[mine], place[mine], side="right")]
        return result

    def _brackets(self, place: int, process: LoggedProcess, gpu: int) -> list[Bracket]:
        """Return the clock brackets that the agent measured for one GPU."""
        found = np.flatnonzero((self.raw["kind"] == operation_log.CLOCK) & (self.process == place))
        found = found[[process.gpus.get(n, 0) == gpu for n in self.raw["context"][found].tolist()]]
        clock = self.raw["clock"][found]
        columns = (clock[name].tolist() for name in ("host_before", "gpu", "host_after", "tick_ns"))
        return [Bracket(*values) for values in zip(*columns, strict=True) if max(values) < 1 << 62]

    def _spans(self, place: int) -> tuple[Integers, Integers]:
        """Return the spans of a process: the sorted ids of the operations that they time, and the indices of the span records.

        An operation may have two spans. CUPTI's comes first."""
        found = np.flatnonzero((self.raw["kind"] == operation_log.SPAN) & (self.process == place))
        ids = self.raw["span"]["of"][found].astype(np.int64)
        order = np.lexsort((self.raw["flags"][found] & operation_log.HOST_CLOCK == 0, ids))
        return ids[order], found[order]

    def _stamps(
        self,
        ops: Operations,
        some: Integers,
        spans: tuple[Integers, Integers],
        clock: GpuClock,
        method: Integers,
        errors: tuple[Integers, Integers, Integers],
    ) -> None:
        """Set the times of operations without a probe, from timing events around them, CUPTI (whose error is unknown) or ROCr."""
        ids, records = spans
        some = some[method[some] == NO_METHOD]
        if not len(ids) or not len(some):
            return
        at = np.minimum(np.searchsorted(ids, ops.id[some]), len(ids) - 1)
        there = ids[at] == ops.id[some]
        some, at = some[there], records[at[there]]
        begin, end, error = (
            self.raw["span"][name][at].astype(np.int64) for name in ("start", "end", "error_ns")
        )
        starts, ends = clock.host(begin), clock.host(end)
        for known, times, target, wrong in (
            (begin, starts, ops.start, errors[0]),
            (end, ends, ops.end, errors[1]),
        ):
            good = times.known & (known != 0)
            target[some[good]] = times.at[good]
            wrong[some[good]] = times.error[good] + error[good]
        both = (begin != 0) & (end != 0)
        errors[2][some[both]] = 2 * error[both]
        method[some[starts.known & both]] = STAMP
        for flag, of in ((operation_log.HOST_CLOCK, CUPTI), (operation_log.BY_ROCR, ROCR)):
            theirs = both & (self.raw["flags"][at] & flag != 0)
            ops.start[some[theirs]], ops.end[some[theirs]] = begin[theirs], end[theirs]
            for wrong in errors:
                wrong[some[theirs]] = UNKNOWN if of == CUPTI else error[theirs]
            method[some[theirs]] = of

    def _within_calls(
        self, ops: Operations, stamped: Integers, start_error: Integers, exec_error: Integers
    ) -> None:
        """Correct the starts of operations that timing events have timed, given by their indices.

        If the stream was idle, the first event completed before the work arrived, and even before the work's call. The work began
        between call and return, so take the middle, and add half of that time to the errors.
        """
        early = stamped[ops.start[stamped] < ops.ret[stamped]]
        first = np.minimum(np.maximum(ops.start[early], ops.call[early]), ops.end[early])
        # A call that waits for its work does not return before the work's end.
        last = np.where(ops.waits[early], first, np.minimum(ops.ret[early], ops.end[early]))
        half = np.maximum(last - first + 1, 0) // 2
        ops.start[early] = first + half
        start_error[early] += half
        exec_error[early] += half


def _of_launches(begin: Integers, length: Integers, call: Integers, over: Integers) -> list[Bracket]:
    """Return launches as clock brackets, the narrowest of each period.

    A kernel starts after its call, and ends before the host's wait for it returns.
    """
    known = np.flatnonzero((over != NEVER) & (begin > 0))
    width = over[known] - call[known] - length[known]
    made = []
    for some in np.array_split(np.argsort(call[known], kind="stable"), SPREAD):
        if len(some):
            best = known[some[np.argmin(width[some])]]
            end = int(begin[best]) + int(length[best])
            made.append(Bracket(int(call[best]), end, int(over[best]), back=int(length[best])))
    return made


def _unwrapped(times: Integers, bracket: Bracket | None, call: Integers) -> Integers:
    """Extend times of 48 bits: return the candidate that is nearest to the call, according to one clock bracket.

    Without a bracket, the upper bits are unknown and do not matter; they are chosen so that no time is negative.
    """
    near = call + (1 << TIME_BITS) if bracket is None else call - bracket.before + bracket.gpu
    away = (times - near) & MASK
    return near + np.where(away > MASK // 2, away - (MASK + 1), away)

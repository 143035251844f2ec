"""The operation log and what device programs measured → launches with times on the host's clock.

launches = Launches(slots=1 << 15)
for _ in session.intervals(…, tick=lambda: launches.take(session)):
    launches.take_halves(session)
    found = launches.found()
    new = launches.fresh(found, last=True)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gpubpf.launches import dependencies
from gpubpf.launches.dependencies import NEVER, NONE, Kind, Operations, Queue, Waits
from gpubpf.launches.device_times import CELL, MASK, TIME_BITS, Cells
from gpubpf.names import matches
from gpubpf.session import operation_log
from gpubpf.session.clock import UNKNOWN, Bracket, GpuClock

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpubpf.session.session import Session

    Integers: TypeAlias = NDArray[np.int64]
    Records: TypeAlias = NDArray[Any]

COUNTER = (1 << 40) - 1  # the part of an id that counts; the process is above
NO_METHOD, DEVICE, STAMP, CUPTI = range(4)  # how a time was measured
LEFT_OUT = (1, 2)  # reasons: by --sample, by --launch
METHODS = (None, "device", "stamp", "cupti")
KEPT = 1 << 15  # records, when room is made: those that came last, and as many that are still of use
FULL = 1 << 18  # records at which it is time to make room
MOST_NUMBERED = 1 << 16  # streams and graphs that are remembered
WIDE = 10_000  # ns: of a machine so busy that its brackets are wider, launches themselves bound the clock
SPREAD = 64  # launches that do
_HOST = "host"  # as a source of cells


@dataclass
class Process:
    """A traced process: its `names` are the kernels' mangled names by slot, `gpus` the ordinals by context number. `number`: that of
    no other; what a process executes has its id."""

    pid: int
    comm: str = ""
    virtual: bool = False  # its times are on the embedded device's virtual clock
    names: Mapping[int, str] = field(default_factory=dict)
    gpus: Mapping[int, int] = field(default_factory=dict)
    stacks: Mapping[int, Sequence[Any]] = field(default_factory=dict)  # by number, innermost frame first
    number: int = 0


class Numbers:
    """Numbers things from 1, in the order in which they come first, in each group by itself. Of very many the first are forgotten."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, Any], int] = {}
        self._next: dict[Any, int] = {}

    def of(self, group: Any, key: Any) -> int:
        number = self._known.get((group, key))
        if number is None:
            number = self._next[group] = self._next.get(group, 0) + 1
            self._known[group, key] = number
            if len(self._known) > MOST_NUMBERED:
                del self._known[next(iter(self._known))]
        return number


@dataclass(frozen=True)
class Found:
    """Operations and what is known of each: arrays with an element for each.

    name: of a kernel its number in `names` (mangled), else -1. reason: why a kernel was not instrumented (as in the log). method: how
    its times were measured. start_error, end_error: ns, UNKNOWN without a time; exec_error: of end - start. running: not over at the
    last reading. lost: instrumented, and its times never came. bytes: of copies and memsets. parent: of a kernel in a graph the
    graph's launch, else -1; exec: of both the executable graph, first: of the graph's launch the id of its first kernel. event: the
    handle of records and waits. api: the number of an API call's function, which `functions` names. wanted: the launches of
    kernels that were asked for. origin: the first call of all, ns. clock_steps: places where clocks contradict themselves. queue_keys:
    of each stream its number, unlike that in `ops` always the same, and its name: "default", "thread" (the per-thread default
    stream), or a number in its process.
    """

    ops: Operations
    waits: Waits
    processes: list[Process]
    process: Integers  # place in `processes`
    names: list[str]
    name: Integers
    gpu: Integers
    tid: Integers
    stream: NDArray[np.uint64]
    reason: Integers
    method: Integers
    start_error: Integers
    end_error: Integers
    exec_error: Integers
    running: NDArray[np.bool_]
    lost: NDArray[np.bool_]
    bytes: Integers
    exec: Integers
    first: Integers
    parent: Integers
    event: NDArray[np.uint64]
    api: Integers
    stack: Integers
    grid: Integers  # [operation, 3]
    block_dim: Integers
    wanted: NDArray[np.bool_]
    origin: int
    clock_steps: int
    queue_keys: Sequence[tuple[int, str]] = ()
    functions: Mapping[int, str] = field(default_factory=dict)


class Launches:
    """Collects, in the order in which things come. `slots`: a power of two. `kernels`: as --kernel has them.
    `filtered`: the host program lets only some launches through."""

    def __init__(self, slots: int, kernels: Sequence[str] = (), filtered: bool = False) -> None:
        self._slots, self._kernels, self._filtered = slots, tuple(kernels), filtered
        self._records: list[tuple[Process, Records]] = []
        self._cells: dict[tuple[int, Any], Cells] = {}
        self._processes: dict[int, Process] = {}
        self._told = np.zeros(0, np.int64)  # ids, sorted
        self._passed: dict[int, Integers] = {}  # by process: ids that the host program let through
        self._origin = NEVER
        self._lost_of: dict[int, int] = {}
        self._numbers = (Numbers(), Numbers(), Numbers())  # of queues, of streams in a process, of graphs
        # Streams from before the attachment of which everything is still in the records, and contexts with such: process, number.
        self._unseen: tuple[set[tuple[int, int]], set[tuple[int, int]]] = (set(), set())

    @property
    def lost(self) -> int:
        """Operations that found no room in a log."""
        return sum(self._lost_of.values())

    def take(
        self, session: Session, starts: str = "starts", ends: str = "ends", halves: str = "halves"
    ) -> None:
        """What came since the last time: logs, then readings (what they hold was launched before)."""
        for log in session.logs():
            process = self._processes.setdefault(log.process, Process(log.pid, number=log.process))
            process.comm, process.virtual = log.comm, log.virtual
            process.names, process.gpus, process.stacks = log.names, log.gpus, log.stacks
            self._lost_of[log.process] = log.lost
            self.log(process, log.records)
        for reading in session.readings(starts, ends):
            process = self._processes.setdefault(
                reading.process, Process(reading.pid, reading.comm, number=reading.process)
            )
            cells = [reading.instances[name] for name in (starts, ends)]
            if all(cells):
                begun, ended = (found[0].array for found in cells)
                self.reading(process, begun, ended, reading.taken_ns, reading.idle, reading.context)
        if self._filtered:
            self.take_halves(session, halves)

    def take_halves(self, session: Session, halves: str = "halves") -> None:
        """What the host wrote down, and what the GPU did of it that a killed process leaves: before `found`."""
        for shared in session.shared(halves):
            self.host_halves(shared.process, shared.array)

    def log(self, process: Process, records: Records) -> None:
        """Records of the operation log, as they follow each other (`oplog.DTYPE`)."""
        if not len(records):
            return
        self._records.append((process, records))
        met = records[
            (records["kind"] == operation_log.QUEUE) & (records["flags"] & operation_log.FROM_BEFORE != 0)
        ]
        for found, column in zip(self._unseen, ("queue", "context"), strict=True):
            found.update((process.number, number) for number in met[column].tolist()[:MOST_NUMBERED])
        calls = records["call_ns"][(records["kind"] < operation_log.SPAN) & (records["call_ns"] > 0)]
        if len(calls):
            self._origin = min(self._origin, int(calls.min()))

    def host_halves(self, process: int, halves: Any) -> None:
        """The shared array of a process (its number) as the host program fills it (fields `launch`, `start`): launches that passed
        its filters, and starts that outlive the GPU's memory."""
        ids = halves["launch"].astype(np.int64)
        if self._filtered:
            self._passed[process] = np.union1d(
                self._passed.get(process, np.zeros(0, np.int64)), ids[ids != 0]
            )
        if len(halves) == self._slots:
            starts = np.where(ids != 0, halves["start"], 0)
            cells = self._cells.setdefault((process, _HOST), Cells(self._slots))
            cells.update(starts, np.zeros(self._slots, np.uint64), 0, False)

    @property
    def full(self) -> bool:
        """Time to ask for what is `found`, and then to `forget` it."""
        return sum(len(records) for _, records in self._records) >= FULL

    def fresh(self, found: Found, last: bool) -> Integers:
        """Operations that were not given before and are over; the `last` time also those that are not. Of very many that are not, the
        first are given all the same."""
        over = (found.ops.kind != Kind.KERNEL) | (found.ops.end != NONE) | last
        untold = ~np.isin(found.ops.id, self._told)
        over[np.flatnonzero(untold & ~over)[:-KEPT]] = True
        new = np.flatnonzero(over & untold)
        if not last:
            self._told = np.union1d(self._told, found.ops.id[new])
        return new

    def forget(self) -> None:
        """Makes room: of what was given before, only the last matters to what comes."""
        count = sum(len(records) for _, records in self._records)
        if count < 2 * KEPT:
            return
        kept: list[tuple[Process, Records]] = []
        left = KEPT  # of those that are always kept, then of what is still of use
        for process, records in reversed(self._records):
            border = max(0, len(records) - max(left, 0))
            earlier, latest = records[:border], records[border:]
            left -= len(latest)
            told = np.isin(earlier["id"].astype(np.int64), self._told)
            open_ = (earlier["kind"] > operation_log.SPAN) | (earlier["kind"] == operation_log.KERNEL) & ~told
            self._seen(process, earlier[~open_])
            earlier = earlier[open_][-(left + KEPT) :]
            left -= len(earlier)
            kept.append((process, _joined([earlier, latest])))
            if left <= -KEPT:
                break
        self._records = kept[::-1]
        ids = np.concatenate([records["id"].astype(np.int64) for _, records in self._records])
        self._told = np.intersect1d(self._told, ids)
        launched = ids[ids & COUNTER < 1 << 39]
        for number, passed in self._passed.items():
            last = int(launched[launched >> 40 == number].max(initial=0))
            self._passed[number] = passed[np.isin(passed, ids) | (passed > last - KEPT)]
        for cells in self._cells.values():
            cells.forget(np.setdiff1d(ids, self._told) & COUNTER)

    def _seen(self, process: Process, forgotten: Records) -> None:
        """What comes behind these operations does not wait for anything from before the attachment."""
        if any(self._unseen):
            work = forgotten[forgotten["kind"] <= operation_log.GRAPH]
            for found, column in zip(self._unseen, ("queue", "context"), strict=True):
                found.difference_update((process.number, n) for n in np.unique(work[column]).tolist())

    def reading(
        self, process: Process, starts: Any, ends: Any, taken: int, idle: bool, source: Any = None
    ) -> None:
        """The device's arrays (uint64): `starts` [slots], `ends` [slots × shards]. `taken`: when reading began, ns of the host.
        `idle`: nothing ran then, so every end is an end. `source`: tells contexts of a process apart."""
        cells = self._cells.setdefault((process.number, source), Cells(self._slots))
        cells.update(np.asarray(starts, np.uint64), np.asarray(ends, np.uint64), taken, idle)

    def found(self) -> Found:
        """All that is known now. Some seconds for a million operations."""
        passed = np.concatenate([np.zeros(0, np.int64), *self._passed.values()]) if self._filtered else None
        return _Finder(self._records, self._cells, self._slots, self._numbers, self._unseen).found(
            self._origin, self._kernels, passed
        )


def _joined(parts: Sequence[Records]) -> Records:
    """As bytes: field by field, fields that lie over each other would be copied many times."""
    raw = [np.ascontiguousarray(part).view(f"V{operation_log.RECORD}") for part in parts]
    return np.concatenate([np.zeros(0, f"V{operation_log.RECORD}"), *raw]).view(operation_log.DTYPE)


class _Finder:
    """One turn of records and readings into `Found`."""

    def __init__(
        self,
        records: list[tuple[Process, Records]],
        cells: Mapping[tuple[int, Any], Cells],
        slots: int,
        numbers: tuple[Numbers, Numbers, Numbers],
        unseen: tuple[set[tuple[int, int]], set[tuple[int, int]]],
    ) -> None:
        self.unseen_queues, self.unseen_contexts = unseen
        self.processes = list({id(process): process for process, _ in records}.values())
        place = {id(process): n for n, process in enumerate(self.processes)}
        self.raw = _joined([part for _, part in records])
        self.process = np.repeat(
            np.array([place[id(process)] for process, _ in records], np.int64),
            [len(part) for _, part in records],
        )
        self.cells, self.slots = cells, slots
        self.queue_numbers, self.stream_numbers, self.graph_numbers = numbers

    def found(self, origin: int, kernels: Sequence[str], passed: Integers | None) -> Found:
        raw = self.raw
        kind = raw["kind"].astype(np.int64)
        queued = (kind >= Kind.KERNEL) & (kind <= Kind.API)
        ran = queued & ((raw["flags"] & operation_log.CAPTURED) == 0) & (raw["result"] == 0)
        ran[self._joins(kind)] = False
        at = np.flatnonzero(ran)
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
        context = dependencies.numbered(self.owner, contexts)
        nothing = np.zeros(count, np.int64)
        none = np.full(count, -1, np.int64)
        execs = np.where(graph, field("graph", "exec"), field("kernel", "exec"))
        graphs = self._graphs(execs, graph | member)
        link = np.where(kinds == Kind.WAIT, field("event", "record"), field("sync", "record"))
        link = np.where((kinds == Kind.WAIT) | (kinds == Kind.SYNC), link, nothing)
        what = np.where(
            kinds == Kind.SYNC, field("sync", "what"), np.where(graph, field("graph", "others"), 0)
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
        reason = np.where(kernel, field("kernel", "reason"), none)
        times = self._times(ops, reason)
        names, name = self._names(kernel, field("kernel", "slot"))
        # By name, not by what the agent says: kernels that no probe could be put into were asked for as well.
        asked = kernel & np.array([not kernels or matches(kernels, text) for text in names] or [False])[name]
        handles = (kinds == Kind.RECORD) | (kinds == Kind.WAIT)
        sized = np.isin(kinds, dependencies.WORK) & ~kernel
        parent, firsts = self._parents(ops, member), np.where(graph, field("graph", "first"), none)
        waits = dependencies.waits(ops)
        lasted = times.pop("exec")
        waits = dataclasses.replace(waits, exec=np.where(lasted != NONE, lasted, waits.exec))
        wanted = self._wanted(ops, reason, asked, parent, firsts, passed)
        return Found(
            ops=ops, waits=waits, processes=self.processes, process=self.owner, names=names, name=name,
            gpu=self._gpus(at), tid=raw["thread"][at].astype(np.int64), stream=raw["stream"][at], reason=reason,
            bytes=np.where(sized, field("copy", "bytes"), nothing), exec=execs,
            first=firsts, parent=parent,
            event=np.where(handles, raw["event"]["event"][at], np.uint64(0)),
            api=np.where(kinds == Kind.API, field("api", "function"), none), functions=self._functions(at[kinds == Kind.API]),
            queue_keys=queue_keys,
            stack=raw["stack"][at].astype(np.int64), grid=field("kernel", "grid"),
            block_dim=field("kernel", "block"), origin=origin, wanted=wanted, **times,
        )  # fmt: skip

    def _joins(self, kind: Integers) -> list[int]:
        """Waits that took their stream into a capture: for an event whose record was captured. They never ran either."""
        raw = self.raw
        if not ((kind == Kind.RECORD) & ((raw["flags"] & operation_log.CAPTURED) != 0)).any():
            return []
        places = np.flatnonzero((kind == Kind.RECORD) | (kind == Kind.WAIT))
        captured: dict[tuple[int, int], bool] = {}
        found = []
        keys = zip(self.process[places].tolist(), raw["event"]["event"][places].tolist(), strict=True)
        for place, key in zip(places.tolist(), keys, strict=True):
            if kind[place] == Kind.RECORD:
                captured[key] = bool(raw["flags"][place] & operation_log.CAPTURED)
            elif captured.get(key) and not raw["event"]["record"][place]:
                found.append(place)
        return found

    def _wanted(
        self,
        ops: Operations,
        reason: Integers,
        asked: NDArray[np.bool_],
        parent: Integers,
        firsts: Integers,
        passed: Integers | None,
    ) -> NDArray[np.bool_]:
        """Launches of kernels that were asked for, --launch and --sample meant them, and the host program let them through."""
        wanted = asked & ~np.isin(reason, LEFT_OUT)
        if passed is not None:  # the host program runs once for a graph
            wanted &= np.isin(np.where(parent >= 0, firsts[parent], ops.id), passed)
        return wanted

    # --- identities ---

    def _queues(self, at: Integers) -> tuple[Integers, list[Queue], list[tuple[int, str]], list[bool]]:
        """The stream of each operation by number; of each stream its kind, the key as `Found` has it, whether it is `unseen`."""
        known = np.flatnonzero(self.raw["kind"] == operation_log.QUEUE)
        both = np.concatenate([known, at])
        numbers = dependencies.numbered(self.process[both], self.raw["queue"][both].astype(np.int64))
        count = int(numbers.max()) + 1 if len(numbers) else 0
        kinds = [Queue.BLOCKING] * count
        for number, kind in zip(
            numbers[: len(known)].tolist(), self.raw["queue_kind"][known].tolist(), strict=True
        ):
            kinds[number] = Queue(kind) if kind <= Queue.NON_BLOCKING else Queue.BLOCKING
        keys, unseen = [(0, "")] * count, [False] * count
        used, first = np.unique(numbers[len(known) :], return_index=True)
        for number, place in sorted(
            zip(used.tolist(), at[first].tolist(), strict=True), key=lambda pair: pair[1]
        ):
            process = self.processes[int(self.process[place])].number
            queue = int(self.raw["queue"][place])
            name = {Queue.LEGACY: "default", Queue.PER_THREAD: "thread"}.get(kinds[number])
            name = name or str(self.stream_numbers.of(process, queue))
            keys[number] = self.queue_numbers.of(None, (process, queue)), name
            unseen[number] = (process, queue) in self.unseen_queues
        return numbers[len(known) :], kinds, keys, unseen

    def _unseen_contexts(self, numbers: Integers, contexts: Integers) -> frozenset[int]:
        """By number those of which the log's number is unseen."""
        if not self.unseen_contexts:
            return frozenset()
        used, first = np.unique(numbers, return_index=True)
        keys = ((self.processes[self.owner[place]].number, int(contexts[place])) for place in first.tolist())
        return frozenset(n for n, key in zip(used.tolist(), keys, strict=True) if key in self.unseen_contexts)

    def _graphs(self, execs: Integers, used: NDArray[np.bool_]) -> Integers:
        numbers = np.full(len(execs), -1, np.int64)
        self._graph_keys: dict[tuple[int, int], int] = {}
        keys = zip(self.owner[used].tolist(), execs[used].tolist(), strict=True)
        numbers[used] = [self._graph(*key) for key in keys]
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
        launches = np.flatnonzero(ops.kind == Kind.GRAPH).tolist()
        keys = zip(ops.graph[launches].tolist(), ops.replay[launches].tolist(), strict=True)
        by_key = dict(zip(keys, launches, strict=True))
        parents = np.full(len(ops), -1, np.int64)
        places = np.flatnonzero(member)
        keys = zip(ops.graph[places].tolist(), ops.replay[places].tolist(), strict=True)
        parents[places] = [by_key.get(key, -1) for key in keys]
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
        """Names of API calls; those of one process are as good as another's."""
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

    def _times(self, ops: Operations, reason: Integers) -> dict[str, Any]:
        """Fills `start` and `end` of the operations; the rest of what `Found` says of times."""
        count = len(ops)
        method, lasted = np.zeros(count, np.int64), np.full(count, NONE)
        start_error, end_error, exec_error = (np.full(count, UNKNOWN) for _ in range(3))
        end = np.full(count, NONE)
        probed = (ops.kind == Kind.KERNEL) & (reason == operation_log.INSTRUMENTED)
        over = dependencies.over_by(ops)  # as far as the host tells, while no starts are known
        read, cells = self._read(ops, probed)
        steps = 0
        for place, process in enumerate(self.processes):
            mine = np.flatnonzero(self.owner == place)
            gpus = self._gpus(self.at)[mine]
            spans = self._spans(place)
            for gpu in np.unique(gpus).tolist():
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
                # A duration is one of the GPU's clock: how the clocks relate does not blur it.
                lasted[at] = np.where(good, length, NONE)
                exec_error[at] = np.where(good, max(clock.tick - 1, 0), UNKNOWN)
                method[at] = np.where(times.known, DEVICE, NO_METHOD)
                self._stamps(ops, some, spans, clock, method, (start_error, end_error, exec_error))
        # What was read before a launch was over may lack its last threads.
        over = dependencies.over_by(ops)
        virtual = np.array([process.virtual for process in self.processes], bool)[self.owner]
        in_time = (
            (over != NEVER) & (cells["taken"] >= over) & ~virtual
        )  # there, a reading is at no virtual time
        sure = cells["idle"] | in_time | (cells["last"] > self._overtaken(ops, read, cells))
        settled = read & (lasted != NONE) & sure
        ops.end[settled] = end[settled]
        open_ = read & ~settled
        end_error[open_] = exec_error[open_] = UNKNOWN
        lasted[~settled] = NONE
        lost = open_ & cells["past"] | probed & ~read & (method == NO_METHOD)
        return {
            "method": method, "start_error": start_error, "end_error": end_error, "exec_error": exec_error, "exec": lasted,
            "running": open_ & ~cells["past"], "lost": lost, "clock_steps": steps,
        }  # fmt: skip

    def _read(self, ops: Operations, probed: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], NDArray[Any]]:
        """Which operations have a cell, and the cells. What the host's memory holds comes first: the GPU's own arrays know better."""
        read, found = np.zeros(len(ops), bool), np.zeros(len(ops), CELL)
        for (number, source), cells in sorted(self.cells.items(), key=lambda item: item[0][1] != _HOST):
            here = [place for place, process in enumerate(self.processes) if process.number == number]
            at = np.flatnonzero(probed & np.isin(self.owner, here))
            there, cell = cells.lookup(ops.id[at] & COUNTER)
            read[at[there]], found[at[there]] = True, cell[there]
            if source == _HOST:  # no reading came: its process is gone
                found["past"][at[there]] = True
        return read, found

    def _overtaken(self, ops: Operations, read: NDArray[np.bool_], cells: NDArray[Any]) -> Integers:
        """The number of the first reading that showed a later kernel of the same stream at work: what readings after it show of
        this one is all there is. NEVER where none did."""
        result = np.full(len(ops), NEVER)
        position = np.arange(len(ops))
        place = np.where(
            ops.node >= 0, np.maximum(self._parents(ops, ops.node >= 0), 0), position
        )  # of the graph's launch
        order = np.lexsort((place, ops.queue))
        order = order[read[order]]
        for queue in dependencies.runs(ops.queue[order]):
            mine = order[queue]
            first = np.append(np.minimum.accumulate(cells["first"][mine].astype(np.int64)[::-1])[::-1], NEVER)
            result[mine] = first[np.searchsorted(place[mine], place[mine], side="right")]
        return result

    def _brackets(self, place: int, process: Process, gpu: int) -> list[Bracket]:
        """Those that the agent took of one GPU."""
        found = np.flatnonzero((self.raw["kind"] == operation_log.CLOCK) & (self.process == place))
        found = found[[process.gpus.get(n, 0) == gpu for n in self.raw["context"][found].tolist()]]
        clock = self.raw["clock"][found]
        columns = (clock[name].tolist() for name in ("host_before", "gpu", "host_after", "tick_ns"))
        return [Bracket(*values) for values in zip(*columns, strict=True) if max(values) < 1 << 62]

    def _spans(self, place: int) -> tuple[Integers, Integers]:
        """Of one process: the ids that spans are of, sorted, and their records."""
        found = np.flatnonzero((self.raw["kind"] == operation_log.SPAN) & (self.process == place))
        ids = self.raw["span"]["of"][found].astype(np.int64)
        order = np.argsort(ids, kind="stable")
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
        """Times of operations that no probe measured: from timing events around them, or CUPTI's, which says nothing of its error."""
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
        theirs = both & (self.raw["flags"][at] & operation_log.HOST_CLOCK != 0)
        ops.start[some[theirs]], ops.end[some[theirs]] = begin[theirs], end[theirs]
        for wrong in errors:
            wrong[some[theirs]] = UNKNOWN
        method[some[theirs]] = CUPTI


def _of_launches(begin: Integers, length: Integers, call: Integers, over: Integers) -> list[Bracket]:
    """Launches as brackets: a kernel began after its call, and had ended when a host had waited for it. The narrowest of each time."""
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
    """Times of 48 bits → in full: of all that end so the one nearest to the call, by one bracket of the clock. (Without one the
    upper bits are not known, and matter to nobody: any will do that make no time negative.)"""
    near = call + (1 << TIME_BITS) if bracket is None else call - bracket.before + bracket.gpu
    away = (times - near) & MASK
    return near + np.where(away > MASK // 2, away - (MASK + 1), away)

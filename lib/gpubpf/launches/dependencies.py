"""Who waited for whom: operations with their times on the host's clock → for each the wait behind earlier work, and which.

What a stream does comes one after the other; the legacy stream waits for all blocking streams and they for it; events tie streams
together; within a graph its edges count, and a replay comes after the replay before it (CUDA Programming Guide, "Streams",
"Events", "CUDA Graphs"). Everything here works on the columns of `Operations`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers: TypeAlias = NDArray[np.int64]

NONE = np.iinfo(np.int64).min  # a time or duration that is not known
NEVER = np.iinfo(np.int64).max  # as a bound: nothing says that it ended


class Kind(IntEnum):
    """Of an operation, as in the log (docs/timing.md)."""

    KERNEL = 1
    H2D = 2
    D2H = 3
    D2D = 4
    H2H = 5
    MEMSET = 6
    RECORD = 7
    WAIT = 8
    GRAPH = 9
    SYNC = 10
    API = 11


class Queue(IntEnum):
    """How a stream orders itself with others."""

    LEGACY = 0
    PER_THREAD = 1
    BLOCKING = 2
    NON_BLOCKING = 3


class Sync(IntEnum):
    """What the host waited for."""

    STREAM = 0
    EVENT = 1
    CONTEXT = 2


NOTHING = -1  # as a link: the event was over, or never recorded; what waits for it waits for nothing
WORK = (Kind.KERNEL, Kind.H2D, Kind.D2H, Kind.D2D, Kind.H2H, Kind.MEMSET)  # takes time on the GPU


@dataclass(frozen=True)
class Operations:
    """One element of every array for each operation, in the order in which their calls returned. int64.

    id: unique; for `link`. kind: `Kind`. call, ret: ns of the host at the driver call's begin and end. start, end: of the work on the
    GPU, or NONE. waits: whether the call itself waited for the work. queue, context: numbers of the stream and its context, from 0.
    link: of WAIT and event SYNC the id of the record operation (0: not known; or `NOTHING`). what: of SYNC see `Sync`, of GRAPH how
    many nodes are no kernels.
    graph: number of the executable graph, from 0, replay: of its launch, of GRAPH and of the kernels that a replay ran; else -1.
    node: the kernel's node in it, else -1. A replay's kernels may stand before or after its GRAPH operation.
    unseen: of each stream whether it may hold work from before the first operation; unseen_contexts: numbers of contexts in which
    any stream may.
    """

    id: Integers
    kind: Integers
    call: Integers
    ret: Integers
    start: Integers
    end: Integers
    queue: Integers
    context: Integers
    waits: NDArray[np.bool_]
    link: Integers
    what: Integers
    graph: Integers
    replay: Integers
    node: Integers
    queues: Sequence[Queue] = ()  # the kind of each stream
    unseen: Sequence[bool] = ()
    unseen_contexts: frozenset[int] = frozenset()
    edges: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)  # of each graph: (from, to)

    def __len__(self) -> int:
        return len(self.id)


@dataclass(frozen=True)
class Waits:
    """For each operation, in ns, NONE where not known; of what does not run on the GPU NONE. Of a graph: until its first kernel.

    latency = start - call; api = ret - call; wait: from `ret` until what it waited for had ended, 0 where that was over before;
    overhead = latency - api - wait; exec = end - start. waited_for: the operation that it waited for, -1 for none or not known;
    by_event: it waited for that through an event. passed: of RECORD and WAIT when the stream came past. unseen: it may have waited for
    something from before the first operation, so that its wait is not known.
    """

    latency: Integers
    api: Integers
    wait: Integers
    overhead: Integers
    exec: Integers
    waited_for: Integers
    by_event: NDArray[np.bool_]
    passed: Integers
    unseen: NDArray[np.bool_]


def ended_by(ops: Operations, by_work: bool = True) -> Integers:
    """When each operation had certainly ended, by what came later: a host that had waited for it, and (`by_work`) work behind it in
    its stream that had begun. NEVER where nothing says so."""
    count = len(ops)
    bound = np.full(count, NEVER, np.int64)
    position = np.arange(count)
    queued = ops.node < 0
    start, _ = _graph_times(ops)
    synced = ops.kind == Kind.SYNC
    # Of a stream, from its last operation to its first: the least of the begins and of the returns of waits behind.
    says = np.where((start == NONE) | (not by_work), NEVER, start)
    itself = ops.waits & ~synced
    says = np.where(itself | (synced & (ops.what == Sync.STREAM)), ops.ret, says)
    order = np.lexsort((position, ops.queue))
    order = order[queued[order]]
    behind = np.minimum.accumulate(says[order][::-1])[::-1] if len(order) else says[order]
    for part in equal_runs(ops.queue[order]):
        values = says[order[part]]
        behind[part] = np.minimum.accumulate(values[::-1])[::-1]
        after = np.append(behind[part][1:], NEVER)
        own = np.where(itself[order[part]], ops.ret[order[part]], NEVER)
        bound[order[part]] = np.minimum(after, own)
    # A wait for a context is one for all its streams; one for an event bounds what was before the record.
    grouped = np.lexsort((position, ops.context))
    returns = np.where(synced & (ops.what == Sync.CONTEXT), ops.ret, NEVER)[grouped]
    for part in equal_runs(ops.context[grouped]):
        later = np.append(np.minimum.accumulate(returns[part][::-1])[::-1][1:], NEVER)
        bound[grouped[part]] = np.minimum(bound[grouped[part]], later)
    waited = np.flatnonzero(synced & (ops.what == Sync.EVENT) & (ops.link != 0))
    if len(waited):
        by_id = np.argsort(ops.id, kind="stable")
        at = np.minimum(np.searchsorted(ops.id, ops.link[waited], sorter=by_id), count - 1)
        records = by_id[at]
        found = ops.id[records] == ops.link[waited]
        first = np.full(count, NEVER, np.int64)
        np.minimum.at(first, records[found], ops.ret[waited[found]])
        for part in equal_runs(ops.queue[order]):
            mine = order[part]
            bound[mine] = np.minimum(bound[mine], np.minimum.accumulate(first[mine][::-1])[::-1])
    _bound_graph_kernels(ops, bound)
    return bound


def waits(ops: Operations) -> Waits:
    """What each operation waited for, and how long. About 2 s for a million."""
    running = np.isin(ops.kind, (*WORK, Kind.GRAPH))
    start, end = _graph_times(ops)
    begun, ended = running & (start != NONE), running & (end != NONE)
    before, waited_for, by_event, exact = _predecessors(ops)
    latency, api, wait, overhead, exec_ = (np.full(len(ops), NONE, np.int64) for _ in range(5))
    latency[begun] = (start - ops.call)[begun]
    api[running] = (ops.ret - ops.call)[running]
    both = begun & ended
    exec_[both] = (end - start)[both]
    free = running & (before <= ops.ret)
    wait[free] = 0
    # Nobody waits beyond its own start: kernels may be launched to begin before the one before has ended.
    known = running & ~free & exact
    until = np.where(begun, np.minimum(before, start), before)
    wait[known] = np.maximum(until - ops.ret, 0)[known]
    both = begun & (wait != NONE)
    overhead[both] = (latency - api - wait)[both]
    marks = (ops.kind == Kind.RECORD) | (ops.kind == Kind.WAIT)
    passed = np.where(marks & (exact | (before <= ops.ret)), np.maximum(before, ops.ret), NONE)
    behind = np.where(known & (wait > 0), waited_for, -1)
    unseen = running & ~free & (before == NEVER) & (waited_for < 0)
    return Waits(latency, api, wait, overhead, exec_, behind, by_event & known, passed, unseen)


# When something has ended, which operation it is, whether it is waited for through an event.
State: TypeAlias = tuple[int, int, bool]
_LEAST = int(np.iinfo(np.int64).min)
_FREE: State = (_LEAST, -1, False)
_UNKNOWN: State = (NEVER, -1, False)


class _Streams:
    """What the next operation of each stream comes after, operation by operation. Plain lists: there are a million."""

    def __init__(self, ops: Operations, queues: Sequence[int], contexts: Sequence[int]) -> None:
        self.kinds = [*ops.queues] + [Queue.BLOCKING] * (max(queues, default=-1) + 1 - len(ops.queues))
        self.last: list[State] = [_FREE] * len(self.kinds)
        for queue in np.flatnonzero(ops.unseen).tolist():
            self.last[queue] = _UNKNOWN
        self.old = [context in ops.unseen_contexts for context in range(max(contexts, default=-1) + 1)]
        # Of each context: the last of the legacy stream, and of all that wait for each other by it.
        self.legacy: list[State] = [_UNKNOWN if old else _FREE for old in self.old]
        self.blocking = list(self.legacy)
        # When each was used last: what comes behind need not be compared with what is in front of that (times have errors).
        self.used_at = [-2] * len(self.kinds)
        self.legacy_at = [-1 if old else -2 for old in self.old]
        self.recorded: dict[int, State] = {NOTHING: _FREE}  # by id of the record operation
        self._recorded_in: dict[int, int] = {}
        self._contexts = dict(zip(queues, contexts, strict=True)) if any(self.old) else {}

    def ahead(self, queue: int, context: int) -> State:
        """What is in front of the next operation of the stream."""
        kind, state = self.kinds[queue], self.last[queue]
        if kind == Queue.LEGACY:
            return self.blocking[context]
        if kind != Queue.NON_BLOCKING and self.legacy_at[context] > self.used_at[queue]:
            return _later(state, self.legacy[context])
        return state

    def put(self, queue: int, context: int, at: int, state: State) -> None:
        """The operation `at` is the last of the stream now; `state`: what comes behind it comes after."""
        self.last[queue] = state
        kind = self.kinds[queue]
        if kind == Queue.NON_BLOCKING:
            return
        self.used_at[queue] = at
        if kind == Queue.LEGACY:  # behind all of them
            self.legacy[context] = self.blocking[context] = state
            self.legacy_at[context] = at
        elif state[0] >= self.blocking[context][0]:
            self.blocking[context] = state

    def record(self, event: int, queue: int, state: State) -> None:
        self.recorded[event], self._recorded_in[event] = state, queue

    def over(self, what: int, queue: int, context: int, link: int, time: int) -> None:
        """A host has waited until `time` for `what` (`Sync`): what nobody saw is over, too."""
        done = (time, -1, False)
        if what == Sync.CONTEXT:
            some = [queue for queue in range(len(self.last)) if self._contexts.get(queue) == context]
            self.legacy[context], self.blocking[context] = (
                done if state == _UNKNOWN else state
                for state in (self.legacy[context], self.blocking[context])
            )
        else:
            some = [queue] if what == Sync.STREAM else [self._recorded_in.get(link, -1)]
            if self.recorded.get(link) == _UNKNOWN:
                self.recorded[link] = done
        for one in some:
            if one >= 0 and self.last[one] == _UNKNOWN:
                self.last[one] = done
            if one >= 0 and self.kinds[one] == Queue.LEGACY and self.legacy[context] == _UNKNOWN:
                self.legacy[context] = done


def _later(state: State, other: State) -> State:
    return other if other[0] > state[0] else state


def _predecessors(ops: Operations) -> tuple[Integers, Integers, NDArray[np.bool_], NDArray[np.bool_]]:
    """For each operation: when the last of what it has to wait for ended at the latest (NEVER: not known), which that is, whether
    it waits through an event, and whether the time is exact."""
    count = len(ops)
    _, graph_end = _graph_times(ops)
    exact_end = np.where(ops.kind == Kind.GRAPH, graph_end, ops.end)
    exact = exact_end != NONE
    # The clock of a GPU has an error, the return of a host that waited has none.
    ended = np.where(exact, np.minimum(exact_end, ended_by(ops, by_work=False)), ended_by(ops)).tolist()
    columns = (ops.kind, ops.queue, ops.context, ops.link, ops.id, ops.node, ops.what, ops.ret)
    kinds, queues, contexts, links, ids, nodes, whats, returns = (column.tolist() for column in columns)
    members = _members(ops)
    before, last, through = [NEVER] * count, [-1] * count, [False] * count
    streams = _Streams(ops, queues, contexts)
    replayed: dict[int, State] = {}
    for at in range(count):
        kind, queue, context = kinds[at], queues[at], contexts[at]
        if kind == Kind.SYNC and streams.old[context]:
            streams.over(whats[at], queue, context, links[at], returns[at])
        if kind >= Kind.SYNC or nodes[at] >= 0:
            continue
        state = streams.ahead(queue, context)
        if kind == Kind.WAIT:
            time, which, _ = streams.recorded.get(links[at], _UNKNOWN)
            state = _later(state, (time, which, True))
        elif kind == Kind.GRAPH:
            state = _later(state, replayed.get(int(ops.graph[at]), _FREE))
        before[at], last[at], through[at] = state
        if kind <= Kind.MEMSET:
            state = (ended[at], at, False)
        elif kind == Kind.RECORD:
            streams.record(ids[at], queue, state)
        elif kind == Kind.GRAPH:
            state = _replay(ops, members.get(at, {}), state, at, ended, before, last, through)
            replayed[int(ops.graph[at])] = state
        streams.put(queue, context, at, state)
    which_one = np.array(last, np.int64)
    certain = exact[which_one] if count else exact
    return np.array(before, np.int64), which_one, np.array(through, bool), certain & (which_one >= 0)


def _replay(
    ops: Operations,
    members: dict[int, int],
    state: State,
    at: int,
    ended: list[int],
    before: list[int],
    last: list[int],
    through: list[bool],
) -> State:
    """The kernels of one graph launch, by node. `state`: what the graph itself comes after; the result: when it is done."""
    after: dict[int, list[int]] = {}
    for earlier, later in ops.edges.get(int(ops.graph[at]), ()):
        after.setdefault(later, []).append(earlier)
    done = (ended[at], at, False)
    latest = -1
    for node, place in members.items():
        least = state
        open_, seen = [node], {node}
        while open_:
            for earlier in after.get(open_.pop(), ()):
                if earlier in seen:
                    continue
                seen.add(earlier)
                of = members.get(earlier, -1)
                if of < 0:  # switched off: what comes before it counts
                    open_.append(earlier)
                elif least is state or ended[of] > least[0]:
                    least = (ended[of], of, False)
        before[place], last[place], through[place] = least
        if latest < 0 or ended[place] > ended[latest]:
            latest = place
    # The kernel that ended last stands for the graph, if its end is that of the graph.
    return (ended[latest], latest, False) if latest >= 0 and ended[latest] >= done[0] else done


def _members(ops: Operations) -> dict[int, dict[int, int]]:
    """For each GRAPH operation its kernels: node → place."""
    launches = np.flatnonzero(ops.kind == Kind.GRAPH).tolist()
    if not launches:
        return {}
    keys = zip(ops.graph[launches].tolist(), ops.replay[launches].tolist(), strict=True)
    by_key = dict(zip(keys, launches, strict=True))
    members: dict[int, dict[int, int]] = {}
    places = np.flatnonzero(ops.node >= 0)
    columns = (ops.graph[places], ops.replay[places], ops.node[places], places)
    for graph, replay, node, place in zip(*(column.tolist() for column in columns), strict=True):
        launch = by_key.get((graph, replay))
        if launch is not None:
            members.setdefault(launch, {})[node] = place
    return members


def _graph_times(ops: Operations) -> tuple[Integers, Integers]:
    """Start and end of every operation, those of a graph launch from its kernels where nothing else ran in it: the first start,
    and the last end if all are known."""
    start, end = ops.start.copy(), ops.end.copy()
    for launch, kernels in _members(ops).items():
        places = list(kernels.values())
        starts, ends = ops.start[places], ops.end[places]
        if (starts != NONE).any() and (start[launch] == NONE or not ops.what[launch]):
            start[launch] = starts[starts != NONE].min()
        if (ends != NONE).all() and not ops.what[launch]:
            end[launch] = ends.max()
    return start, end


def _bound_graph_kernels(ops: Operations, bound: Integers) -> None:
    """What bounds a graph launch bounds its kernels."""
    for launch, kernels in _members(ops).items():
        places = list(kernels.values())
        bound[places] = np.minimum(bound[places], bound[launch])


def row_numbers(*columns: Integers) -> Integers:
    """Rows of the columns by number: equal ones get equal numbers, in the order of the columns, from 0."""
    numbers = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        _, own = np.unique(column, return_inverse=True)
        _, numbers = np.unique(numbers * (int(own.max(initial=0)) + 1) + own, return_inverse=True)
    return numbers.astype(np.int64)


def equal_runs(values: Integers) -> list[slice]:
    """Where equal neighbours lie."""
    if not len(values):
        return []
    borders = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [slice(a, b) for a, b in itertools.pairwise(borders)]

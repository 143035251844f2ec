"""Find what each operation waited for, and how long, from operations with their times on the host's clock.

The operations of a stream run one after the other. The legacy stream waits for all blocking streams, and they wait for it. Events
connect streams. Within a graph its edges count, and a replay comes after the previous one (CUDA Programming Guide, "Streams",
"Events", "CUDA Graphs"). Everything here works on the columns of `Operations`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from gpubpf.agent.definitions import Kind, QueueKind, SyncTarget

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers: TypeAlias = NDArray[np.int64]

NONE = np.iinfo(np.int64).min  # an unknown time or duration
NEVER = np.iinfo(np.int64).max  # as a bound: it is not known to have ended
NOTHING = -1  # as a link: the event was over or never recorded, so a wait for it ends at once
WORK = (Kind.KERNEL, Kind.H2D, Kind.D2H, Kind.D2D, Kind.H2H, Kind.MEMSET)  # kinds that take time on the GPU


@dataclass(frozen=True)
class Operations:
    """Operations: int64 arrays with an element for each, in the order in which their calls returned.

    id        unique; `link` refers to it
    kind      `Kind`
    call, ret   ns of the host at begin and end of the driver call
    start, end  of the work on the GPU, or NONE
    queue, context   numbers of the stream and its context, from 0
    waits     whether the call itself waited for the work
    link      of WAIT and event SYNC: the id of the record operation (0: unknown), or NOTHING
    what      of SYNC: `SyncTarget`; of GRAPH: the number of nodes that are not kernels
    graph     of GRAPH and the kernels that it ran: number of the executable graph, from 0; else -1
    replay    of GRAPH and the kernels that it ran: number of the graph's launch; else -1
    node      of a kernel in a graph: its node; else -1. Kernels may come before or after their GRAPH operation.
    queues    the kind of each stream
    unseen    of each stream: whether it may hold work from before the first operation
    unseen_contexts   contexts in which any stream may hold such work
    edges     of each graph: (from node, to node)
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
    queues: Sequence[QueueKind] = ()
    unseen: Sequence[bool] = ()
    unseen_contexts: frozenset[int] = frozenset()
    edges: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.id)


@dataclass(frozen=True)
class Waits:
    """The times of each operation in ns; NONE if unknown, or if it does not run on the GPU. A graph starts with its first kernel.

    latency      start - call
    api          ret - call
    wait         from `ret` to the end of what it waited for; 0 if that was over before
    overhead     latency - api - wait
    exec         end - start
    waited_for   the place of the operation that it waited for; -1: none or unknown
    by_event     whether it waited through an event
    passed       of RECORD and WAIT: when the stream reached it
    unseen       it may have waited for work from before the first operation, so its wait is unknown
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
    """Return a time by which each operation had certainly ended; NEVER if there is none.

    It follows from later events: the host had waited for it, or (`by_work`) later work of its stream had started.
    """
    count = len(ops)
    bound = np.full(count, NEVER, np.int64)
    position = np.arange(count)
    queued = ops.node < 0
    start, _ = _graph_times(ops)
    synced = ops.kind == Kind.SYNC
    # By stream, from the last operation to the first: the earliest start, or return of a wait, that comes after it.
    says = np.where((start == NONE) | (not by_work), NEVER, start)
    itself = ops.waits & ~synced
    says = np.where(itself | (synced & (ops.what == SyncTarget.STREAM)), ops.ret, says)
    order = np.lexsort((position, ops.queue))
    order = order[queued[order]]
    behind = np.minimum.accumulate(says[order][::-1])[::-1] if len(order) else says[order]
    for part in equal_runs(ops.queue[order]):
        values = says[order[part]]
        behind[part] = np.minimum.accumulate(values[::-1])[::-1]
        after = np.append(behind[part][1:], NEVER)
        own = np.where(itself[order[part]], ops.ret[order[part]], NEVER)
        bound[order[part]] = np.minimum(after, own)
    # A wait for a context waits for all its streams. A wait for an event bounds what came before the record.
    grouped = np.lexsort((position, ops.context))
    returns = np.where(synced & (ops.what == SyncTarget.CONTEXT), ops.ret, NEVER)[grouped]
    for part in equal_runs(ops.context[grouped]):
        later = np.append(np.minimum.accumulate(returns[part][::-1])[::-1][1:], NEVER)
        bound[grouped[part]] = np.minimum(bound[grouped[part]], later)
    waited = np.flatnonzero(
        synced & np.isin(ops.what, (SyncTarget.EVENT, SyncTarget.OPERATION)) & (ops.link != 0)
    )
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
    """Return what each operation waited for, and how long. A million takes about 2 s."""
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
    # A wait ends at the start at the latest: kernels may be launched so that they start before the previous one ends.
    known = running & ~free & exact
    until = np.where(begun, np.minimum(before, start), before)
    wait[known] = np.maximum(until - ops.ret, 0)[known]
    both = begun & (wait != NONE)
    overhead[both] = (latency - api - wait)[both]
    marks = (ops.kind == Kind.RECORDED) | (ops.kind == Kind.WAIT)
    passed = np.where(marks & (exact | (before <= ops.ret)), np.maximum(before, ops.ret), NONE)
    behind = np.where(known & (wait > 0), waited_for, -1)
    unseen = running & ~free & (before == NEVER) & (waited_for < 0)
    return Waits(latency, api, wait, overhead, exec_, behind, by_event & known, passed, unseen)


# When something ends, the place of the operation, and whether it is waited for through an event.
State: TypeAlias = tuple[int, int, bool]
_LEAST = int(np.iinfo(np.int64).min)
_FREE: State = (_LEAST, -1, False)
_UNKNOWN: State = (NEVER, -1, False)


class _Streams:
    """What the next operation of each stream has to wait for. Plain lists, because NumPy is slow with single elements."""

    def __init__(self, ops: Operations, queues: Sequence[int], contexts: Sequence[int]) -> None:
        self.kinds = [*ops.queues] + [QueueKind.BLOCKING] * (max(queues, default=-1) + 1 - len(ops.queues))
        self.last: list[State] = [_FREE] * len(self.kinds)
        for queue in np.flatnonzero(ops.unseen).tolist():
            self.last[queue] = _UNKNOWN
        self.old = [context in ops.unseen_contexts for context in range(max(contexts, default=-1) + 1)]
        # By context: the last operation of the legacy stream, and of all streams that synchronize with it.
        self.legacy: list[State] = [_UNKNOWN if old else _FREE for old in self.old]
        self.blocking = list(self.legacy)
        # The last use of each stream. Earlier operations need no comparison, which would suffer from the error of times.
        self.used_at = [-2] * len(self.kinds)
        self.legacy_at = [-1 if old else -2 for old in self.old]
        self.recorded: dict[int, State] = {NOTHING: _FREE}  # by id of the record operation
        self._recorded_in: dict[int, int] = {}
        self._contexts = dict(zip(queues, contexts, strict=True)) if any(self.old) else {}

    def ahead(self, queue: int, context: int) -> State:
        """Return what the next operation of the stream has to wait for."""
        kind, state = self.kinds[queue], self.last[queue]
        if kind == QueueKind.LEGACY:
            return self.blocking[context]
        if kind < QueueKind.NON_BLOCKING and self.legacy_at[context] > self.used_at[queue]:
            return _later(state, self.legacy[context])
        return state

    def put(self, queue: int, context: int, at: int, state: State) -> None:
        """Make `at` the last operation of the stream. Later operations wait for `state`."""
        self.last[queue] = state
        kind = self.kinds[queue]
        if kind >= QueueKind.NON_BLOCKING:
            return
        self.used_at[queue] = at
        if kind == QueueKind.LEGACY:  # it has waited for all of them
            self.legacy[context] = self.blocking[context] = state
            self.legacy_at[context] = at
        elif state[0] >= self.blocking[context][0]:
            self.blocking[context] = state

    def record(self, event: int, queue: int, state: State) -> None:
        """Note that the event was recorded in the stream."""
        self.recorded[event], self._recorded_in[event] = state, queue

    def over(self, what: int, queue: int, context: int, link: int, time: int) -> None:
        """Note that the host has waited for `what` (`SyncTarget`) until `time`: unseen work is over, too."""
        done = (time, -1, False)
        if what == SyncTarget.CONTEXT:
            some = [queue for queue in range(len(self.last)) if self._contexts.get(queue) == context]
            self.legacy[context], self.blocking[context] = (
                done if state == _UNKNOWN else state
                for state in (self.legacy[context], self.blocking[context])
            )
        else:
            some = [queue] if what == SyncTarget.STREAM else [self._recorded_in.get(link, -1)]
            if self.recorded.get(link) == _UNKNOWN:
                self.recorded[link] = done
        for one in some:
            if one >= 0 and self.last[one] == _UNKNOWN:
                self.last[one] = done
            if one >= 0 and self.kinds[one] == QueueKind.LEGACY and self.legacy[context] == _UNKNOWN:
                self.legacy[context] = done


def _later(state: State, other: State) -> State:
    return other if other[0] > state[0] else state


def _predecessors(ops: Operations) -> tuple[Integers, Integers, NDArray[np.bool_], NDArray[np.bool_]]:
    """Return what each operation has to wait for.

    These are: the latest time at which that ended (NEVER: unknown), its place, whether the wait is through an event, and whether
    the time is exact.
    """
    count = len(ops)
    _, graph_end = _graph_times(ops)
    exact_end = np.where(ops.kind == Kind.GRAPH, graph_end, ops.end)
    exact = exact_end != NONE
    # GPU times have an error; the return of a waiting host call has none.
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
        elif kind == Kind.RECORDED:
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
    """Set what each kernel of a graph launch waits for. `state`: what the graph waits for. Returns the end of the graph."""
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
                if of < 0:  # a disabled node: its own predecessors count
                    open_.append(earlier)
                elif least is state or ended[of] > least[0]:
                    least = (ended[of], of, False)
        before[place], last[place], through[place] = least
        if latest < 0 or ended[place] > ended[latest]:
            latest = place
    # The kernel that ended last stands for the graph, if it ended with the graph.
    return (ended[latest], latest, False) if latest >= 0 and ended[latest] >= done[0] else done


def _members(ops: Operations) -> dict[int, dict[int, int]]:
    """Return the kernels of each GRAPH operation: places by node."""
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
    """Return start and end of every operation.

    A graph launch that only ran kernels has their first start, and their last end if all ends are known.
    """
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
    """Apply the bounds of graph launches to their kernels."""
    for launch, kernels in _members(ops).items():
        places = list(kernels.values())
        bound[places] = np.minimum(bound[places], bound[launch])


def row_numbers(*columns: Integers) -> Integers:
    """Return a number from 0 for each row of the columns: equal rows have equal numbers, in sorted order."""
    numbers = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        _, own = np.unique(column, return_inverse=True)
        _, numbers = np.unique(numbers * (int(own.max(initial=0)) + 1) + own, return_inverse=True)
    return numbers.astype(np.int64)


def equal_runs(values: Integers) -> list[slice]:
    """Return the runs of equal neighbours."""
    if not len(values):
        return []
    borders = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [slice(a, b) for a, b in itertools.pairwise(borders)]

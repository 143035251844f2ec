"""Find what each operation waited for and how long, given the operations' times on the host's clock.

The operations of a stream run one after the other. The legacy stream waits for all blocking streams, and they wait for it. Events
order work across streams. Within a graph, its edges order the kernels; a replay runs after the previous replay (CUDA Programming
Guide, "Streams", "Events", "CUDA Graphs"). Everything here works on the columns of `Operations`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gpubpf.agent.definitions import Kind, QueueKind, SyncTarget
from gpubpf.launches.arrays import equal_runs, row_numbers, stable_order
from gpubpf.record import Record, field

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers: TypeAlias = NDArray[np.int64]

NONE = np.iinfo(np.int64).min  # an unknown time or duration
NEVER = np.iinfo(np.int64).max  # as a bound: not known to have ended
NOTHING = -1  # as a link: the event was complete or never recorded, so a wait for it ends at once
LONG = 16  # the shortest run of operations for which NumPy pays off
# Kinds of work that takes time in a stream.
WORK = (Kind.KERNEL, Kind.H2D, Kind.D2H, Kind.D2D, Kind.H2H, Kind.MEMSET, Kind.HOST_FUNCTION)


class Operations(Record):
    """Operations: int64 arrays with one element per operation, in the order in which their calls returned.

    If a call waits for its own copy, the copy may be ordered by its call instead, because other threads launch work during the wait.

    id        unique; `link` refers to it
    kind      `Kind`
    call, ret   host time at the beginning and end of the driver call, ns
    start, end  host time at the start and end of the work on the GPU, ns, or NONE
    queue, context   numbers of the stream and its context, from 0
    waits     whether the call itself waited for the work
    link      of WAIT and event SYNC: the id of the record operation (0: unknown), or NOTHING
    what      of SYNC: `SyncTarget`; of GRAPH: the number of nodes that are not kernels; of WAIT: 1 if the runtime makes it to keep its
              own order, 0 if it is for an event of the program
    graph     of GRAPH and the kernels that it ran: the number of the executable graph, from 0; else -1
    replay    of GRAPH and the kernels that it ran: the number of the graph launch; else -1
    node      of a kernel in a graph: its node; else -1. Kernels may come before or after their GRAPH operation.
    queues    the kind of each stream
    unseen    for each stream: whether it may hold work from before the first operation
    unseen_contexts   contexts in which any stream may hold such work
    edges     for each graph: (from node, to node)
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

    @cached_property
    def by_queue(self) -> Integers:
        """The indices of operations outside graphs, by stream, and in order within each stream."""
        order = stable_order(self.queue)
        return order[self.node[order] < 0]

    @cached_property
    def by_context(self) -> Integers:
        """The indices of all operations, by context, and in order within each context."""
        return stable_order(self.context)

    @cached_property
    def members(self) -> Members:
        """The kernels that graph launches ran."""
        return _members(self)


class Members(Record):
    """The kernels of graph launches, by launch, and in order within each launch. A node occurs at most once per launch.

    launches   indices of the graph launches that ran kernels
    firsts     for each of these launches: where its kernels begin in `places`
    places     indices of the kernels
    """

    launches: Integers
    firsts: Integers
    places: Integers

    @cached_property
    def slices(self) -> dict[int, slice]:
        """Index of a graph launch → its kernels in `places`."""
        borders = itertools.pairwise([*self.firsts.tolist(), len(self.places)])
        return {
            launch: slice(*border) for launch, border in zip(self.launches.tolist(), borders, strict=True)
        }


class Waits(Record):
    """The times of each operation in ns; NONE if unknown or if it does not run on the GPU. A graph starts with its first kernel.

    latency      start - call
    api          ret - call
    wait         from `ret` to the end of what it waited for; 0 if that had ended before
    overhead     latency - api - wait
    exec         end - start
    waited_for   the index of the operation that it waited for; -1: none or unknown. A host function that took less than half of
                 the wait is replaced by the operation that the host function waited for.
    by_event     whether it waited through an event
    passed       of RECORDED and WAIT: when the stream reached it
    unseen       whether its wait is unknown because it may have waited for work from before the first operation
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
    """Return a time by which each operation had certainly ended; NEVER if none is known.

    The bound comes from what happened later: the host had waited for it, or (`by_work`) later work of its stream had started.
    """
    count = len(ops)
    bound = np.full(count, NEVER, np.int64)
    synced = ops.kind == Kind.SYNC
    itself = ops.waits & ~synced
    bound[itself] = ops.ret[itself]
    order = ops.by_queue
    streams = equal_runs(ops.queue[order])
    if by_work:  # earlier work of a stream has ended when later work starts
        start, _ = _graph_times(ops)
        starts = np.where((start == NONE) | itself, NEVER, start)
        for part in streams:
            mine = order[part]
            bound[mine] = np.minimum(bound[mine], np.append(_least_from(starts[mine])[1:], NEVER))
    for part in streams:
        _bound_by_waits(ops, order[part], itself | (synced & (ops.what == SyncTarget.STREAM)), bound)
    # A wait for a context bounds all its streams. A wait for an event bounds all operations before its record operation.
    whole = synced & (ops.what == SyncTarget.CONTEXT)
    if whole.any():
        for part in equal_runs(ops.context[ops.by_context]):
            _bound_by_waits(ops, ops.by_context[part], whole, bound)
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
        for part in streams:
            mine = order[part]
            bound[mine] = np.minimum(bound[mine], _least_from(first[mine]))
    _bound_graph_kernels(ops, bound)
    return bound


def _bound_by_waits(ops: Operations, mine: Integers, waiting: NDArray[np.bool_], bound: Integers) -> None:
    """Apply the bounds from those operations of `mine` (in order) that wait for all work launched before their call.

    Work that another thread launches during the wait is not bounded.
    """
    waits = mine[waiting[mine]]
    if not len(waits):
        return
    # A wait that took no time does not bound an operation that returned at the same time, which may have come later.
    calls = np.minimum(ops.call[waits], ops.ret[waits] - 1)
    by_call = np.argsort(calls, kind="stable")
    least = np.append(_least_from(ops.ret[waits[by_call]]), NEVER)
    # The time by which each operation and all operations before it had returned. On the virtual clock, each thread has its own time,
    # so the order also counts.
    returned = np.maximum.accumulate(ops.ret[mine])
    bound[mine] = np.minimum(bound[mine], least[np.searchsorted(calls[by_call], returned)])


def _least_from(values: Integers) -> Integers:
    """Return, for each value, the minimum of it and all later values."""
    return np.minimum.accumulate(values[::-1])[::-1]


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
    # A wait ends at the start at the latest: kernels can be launched so that they start before the previous one ends.
    known = running & ~free & exact
    until = np.where(begun, np.minimum(before, start), before)
    wait[known] = np.maximum(until - ops.ret, 0)[known]
    both = begun & (wait != NONE)
    overhead[both] = (latency - api - wait)[both]
    marks = (ops.kind == Kind.RECORDED) | (ops.kind == Kind.WAIT)
    passed = np.where(marks & (exact | (before <= ops.ret)), np.maximum(before, ops.ret), NONE)
    behind = np.where(known & (wait > 0), waited_for, -1)
    # A host function that only ended the wait is not its cause: most of them are short.
    at = np.flatnonzero(behind >= 0)
    while len(at := at[ops.kind[behind[at]] == Kind.HOST_FUNCTION]):
        called = behind[at]
        own = ops.end[called] - np.maximum(ops.start[called], ops.ret[at])
        timed = (ops.start[called] != NONE) & (ops.end[called] != NONE)
        short = timed & (2 * own < wait[at]) & (waited_for[called] >= 0)
        at, called = at[short], called[short]
        behind[at], by_event[at] = waited_for[called], by_event[at] | by_event[called]
    unseen = running & ~free & (before == NEVER) & (waited_for < 0)
    return Waits(latency, api, wait, overhead, exec_, behind, by_event & known, passed, unseen)


# The time at which something ends, the index of the operation, and whether it is waited for through an event.
State: TypeAlias = tuple[int, int, bool]
_LEAST = int(np.iinfo(np.int64).min)
_FREE: State = (_LEAST, -1, False)
_UNKNOWN: State = (NEVER, -1, False)


class _Streams:
    """What the next operation of each stream must wait for. Plain lists, because NumPy is slow with single elements."""

    def __init__(self, ops: Operations) -> None:
        queues, contexts = int(ops.queue.max(initial=-1)) + 1, int(ops.context.max(initial=-1)) + 1
        self.kinds = [*ops.queues] + [QueueKind.BLOCKING] * (queues - len(ops.queues))
        self.last: list[State] = [_FREE] * len(self.kinds)
        for queue in np.flatnonzero(ops.unseen).tolist():
            self.last[queue] = _UNKNOWN
        self.old = [context in ops.unseen_contexts for context in range(contexts)]
        # By context: the last operation of the legacy stream, and of all streams that synchronize with it.
        self.legacy: list[State] = [_UNKNOWN if old else _FREE for old in self.old]
        self.blocking = list(self.legacy)
        # The last use of each stream. Comparing positions is exact, unlike comparing times, which have an error.
        self.used_at = [-2] * len(self.kinds)
        self.legacy_at = [-1 if old else -2 for old in self.old]
        self.recorded: dict[int, State] = {NOTHING: _FREE}  # by id of the record operation
        self._recorded_in: dict[int, int] = {}
        pairs = zip(ops.queue.tolist(), ops.context.tolist(), strict=True)
        self._contexts = dict(pairs) if any(self.old) else {}

    def ahead(self, queue: int, context: int) -> State:
        """Return what the next operation of the stream must wait for."""
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
        if kind == QueueKind.LEGACY:  # it waited for all blocking streams
            self.legacy[context] = self.blocking[context] = state
            self.legacy_at[context] = at
        else:
            self.block(context, state)

    def block(self, context: int, state: State) -> None:
        """Make the legacy stream wait for `state` too."""
        if state[0] >= self.blocking[context][0]:
            self.blocking[context] = state

    def record(self, event: int, queue: int, state: State) -> None:
        """Record that the event was recorded in the stream."""
        self.recorded[event], self._recorded_in[event] = state, queue

    def over(self, what: int, queue: int, context: int, link: int, time: int) -> None:
        """Record that the host has waited for `what` (`SyncTarget`) until `time`: unseen work has ended, too."""
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


class _Found(Record):
    """What each operation must wait for: the `State` of its stream before the operation, as columns."""

    before: Integers
    last: Integers
    through: NDArray[np.bool_]

    def put(self, at: Any, state: State) -> None:
        self.before[at], self.last[at], self.through[at] = state


def _predecessors(ops: Operations) -> tuple[Integers, Integers, NDArray[np.bool_], NDArray[np.bool_]]:
    """Return what each operation must wait for.

    The columns are: the latest time at which that ended (NEVER: unknown), its index, whether the wait is through an event, and
    whether the time is exact.
    """
    count = len(ops)
    _, graph_end = _graph_times(ops)
    exact_end = np.where(ops.kind == Kind.GRAPH, graph_end, ops.end)
    exact = exact_end != NONE
    # GPU times have an error; the return of a waiting host call has none.
    ended = np.where(exact, np.minimum(exact_end, ended_by(ops, by_work=False)), ended_by(ops))
    found = _Found(np.full(count, NEVER), np.full(count, -1), np.zeros(count, bool))
    streams = _Streams(ops)
    replays: dict[int, tuple[_Graph, State]] = {}
    for places, alike in _stretches(ops, streams):
        if alike:
            _follow_streams(ops, streams, places, ended, found)
        else:
            _follow_each(ops, streams, places, ended, found, replays)
    certain = exact[found.last] if count else exact
    return found.before, found.last, found.through, certain & (found.last >= 0)


def _stretches(ops: Operations, streams: _Streams) -> Iterator[tuple[Integers, bool]]:
    """Yield the indices of all operations that matter to later ones, in order and in parts.

    Each part comes with a flag whether its operations are alike: only work outside graphs, either all in one legacy stream or all in
    other streams. Then each operation waits for the previous one of its stream. Parts that are alike have at least LONG operations.
    """
    old = np.array(streams.old, bool)
    awaited = (ops.kind == Kind.SYNC) & old[ops.context] if old.any() else np.zeros(len(ops), bool)
    in_stream = (ops.kind < Kind.SYNC) | (ops.kind == Kind.HOST_FUNCTION)
    places = np.flatnonzero(in_stream & (ops.node < 0) | awaited)
    legacy = np.array(streams.kinds, np.int64) == QueueKind.LEGACY
    queue = ops.queue[places]
    group = np.where(legacy[queue], 1 + queue, 0)
    group[ops.kind[places] > Kind.MEMSET] = -1
    mixed = 0  # the first operation that was not yielded yet
    for part in equal_runs(group):
        if group[part.start] < 0 or part.stop - part.start < LONG:
            continue
        if mixed < part.start:
            yield places[mixed : part.start], False
        yield places[part], True
        mixed = part.stop
    if mixed < len(places):
        yield places[mixed:], False


def _follow_streams(
    ops: Operations, streams: _Streams, places: Integers, ended: Integers, found: _Found
) -> None:
    """Set what each of `places` waits for. These operations are alike (`_stretches`)."""
    order = places[stable_order(ops.queue[places])]
    for part in equal_runs(ops.queue[order]):
        mine = order[part]
        first, last = int(mine[0]), int(mine[-1])
        queue, context = int(ops.queue[first]), int(ops.context[first])
        found.put(first, streams.ahead(queue, context))
        found.before[mine[1:]], found.last[mine[1:]] = ended[mine[:-1]], mine[:-1]
        streams.put(queue, context, last, (int(ended[last]), last, False))
    # The legacy stream waits for the operation that ends last in all blocking streams.
    kinds = np.array(streams.kinds, np.int64)[ops.queue[places]]
    blocking = places[kinds < QueueKind.NON_BLOCKING]
    for context in np.flatnonzero(np.bincount(ops.context[blocking])).tolist():
        mine = blocking[ops.context[blocking] == context]
        if kinds[0] != QueueKind.LEGACY:
            latest = int(mine[len(mine) - 1 - int(np.argmax(ended[mine][::-1]))])
            streams.block(context, (int(ended[latest]), latest, False))


def _follow_each(
    ops: Operations,
    streams: _Streams,
    places: Integers,
    ended: Integers,
    found: _Found,
    replays: dict[int, tuple[_Graph, State]],
) -> None:
    """For each operation of `places`, in order, set what it waits for. `replays`: for each graph, what its next launch waits for."""
    columns = (ops.kind, ops.queue, ops.context, ops.link, ops.id, ops.what, ops.ret, ended)
    rows = zip(places.tolist(), *(column[places].tolist() for column in columns), strict=True)
    states: list[State] = []
    for at, kind, queue, context, link, number, what, ret, end in rows:
        if kind == Kind.SYNC:
            streams.over(what, queue, context, link, ret)
            states.append(_UNKNOWN)
            continue
        state = streams.ahead(queue, context)
        if kind == Kind.WAIT:
            time, which, _ = streams.recorded.get(link, _UNKNOWN)
            state = _later(state, (time, which, not what))
        elif kind == Kind.GRAPH:
            graph = int(ops.graph[at])
            shape, done = replays.get(graph) or (_Graph(ops.edges.get(graph, ())), _FREE)
            state = _later(state, done)
        states.append(state)
        if kind in WORK:
            state = (end, at, False)
        elif kind == Kind.RECORDED:
            streams.record(number, queue, state)
        elif kind == Kind.GRAPH:
            state = _replay(ops, shape, state, at, ended, found)
            replays[graph] = shape, state
        streams.put(queue, context, at, state)
    if states:
        before, last, through = zip(*states, strict=True)
        found.before[places], found.last[places], found.through[places] = before, last, through


class _Graph:
    """The order of the kernels in an executable graph: which run directly after which others."""

    def __init__(self, edges: Sequence[tuple[int, int]]) -> None:
        self._after: dict[int, list[int]] = {}
        for earlier, later in edges:
            self._after.setdefault(later, []).append(earlier)
        self._nodes: Integers | None = None
        self._pairs = (np.zeros(0, np.int64), np.zeros(0, np.int64))

    def pairs(self, nodes: Integers) -> tuple[Integers, Integers]:
        """Return (later, earlier) as indices in `nodes`, sorted by `later`. `nodes` are the nodes that ran, without disabled ones."""
        if self._nodes is None or not np.array_equal(nodes, self._nodes):
            self._nodes, self._pairs = nodes, self._find(nodes.tolist())
        return self._pairs

    def _find(self, nodes: Sequence[int]) -> tuple[Integers, Integers]:
        place = {node: n for n, node in enumerate(nodes)}
        later, before = [], []
        for n, node in enumerate(nodes):
            open_, seen = [node], {node}
            while open_:
                for earlier in self._after.get(open_.pop(), ()):
                    if earlier in seen:
                        continue
                    seen.add(earlier)
                    if earlier not in place:  # a disabled node: use its predecessors
                        open_.append(earlier)
                        continue
                    later.append(n)
                    before.append(place[earlier])
        return np.array(later, np.int64), np.array(before, np.int64)


def _replay(ops: Operations, graph: _Graph, state: State, at: int, ended: Integers, found: _Found) -> State:
    """Set what each kernel of a graph launch waits for. Return the end of the graph. `state`: what the graph waits for."""
    done = (int(ended[at]), at, False)
    if at not in ops.members.slices:
        return done
    places = ops.members.places[ops.members.slices[at]]
    ends = ended[places]
    found.put(places, state)
    later, earlier = graph.pairs(ops.node[places])
    if len(later):
        # A kernel with several predecessors waits for the one that ends last; if several end together, for the first.
        order = np.lexsort((np.arange(len(later)), -ends[earlier], later))
        order = order[np.append(True, np.diff(later[order]) != 0)]
        waiting, before = places[later[order]], places[earlier[order]]
        found.before[waiting], found.last[waiting], found.through[waiting] = ended[before], before, False
    # The kernel that ended last represents the graph, if it ended with the graph.
    latest = int(places[np.argmax(ends)])
    return (int(ended[latest]), latest, False) if ended[latest] >= done[0] else done


def _members(ops: Operations) -> Members:
    nothing = np.zeros(0, np.int64)
    launches, places = np.flatnonzero(ops.kind == Kind.GRAPH), np.flatnonzero(ops.node >= 0)
    if not len(launches) or not len(places):
        return Members(nothing, nothing, nothing)
    both = np.concatenate([launches, places])
    replay = row_numbers(ops.graph[both], ops.replay[both])
    launch_of = np.full(int(replay.max()) + 1, -1)
    launch_of[replay[: len(launches)]] = launches  # of launches with equal numbers, the last gets the kernels
    launch = launch_of[replay[len(launches) :]]
    places, launch = places[launch >= 0], launch[launch >= 0]
    if not len(places):
        return Members(nothing, nothing, nothing)
    order = np.lexsort((places, ops.node[places], launch))
    same = (np.diff(launch[order]) == 0) & (np.diff(ops.node[places[order]]) == 0)
    order = np.sort(order[~np.append(same, False)])  # if a node occurs twice, keep the last
    order = order[stable_order(launch[order])]
    places, launch = places[order], launch[order]
    firsts = np.flatnonzero(np.append(True, np.diff(launch) != 0))
    return Members(launch[firsts], firsts, places)


def _graph_times(ops: Operations) -> tuple[Integers, Integers]:
    """Return the start and end of every operation.

    A graph launch that ran only kernels gets their first start, and their last end if all ends are known.
    """
    start, end = ops.start.copy(), ops.end.copy()
    members = ops.members
    if len(members.launches):
        launches = members.launches
        starts, ends = ops.start[members.places], ops.end[members.places]
        first = np.minimum.reduceat(np.where(starts == NONE, NEVER, starts), members.firsts)
        last, least = (ufunc.reduceat(ends, members.firsts) for ufunc in (np.maximum, np.minimum))
        plain = ops.what[launches] == 0
        begun = (first != NEVER) & (plain | (start[launches] == NONE))
        over = (least != NONE) & plain
        start[launches[begun]], end[launches[over]] = first[begun], last[over]
    return start, end


def _bound_graph_kernels(ops: Operations, bound: Integers) -> None:
    """Apply the bounds of graph launches to their kernels."""
    members = ops.members
    sizes = np.diff(np.append(members.firsts, len(members.places)))
    least = np.repeat(bound[members.launches], sizes)
    bound[members.places] = np.minimum(bound[members.places], least)

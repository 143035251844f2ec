"""What operations waited for, with made-up times."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from gpubpf.agent.definitions import Kind, QueueKind, SyncTarget
from gpubpf.launches import dependencies
from gpubpf.launches.dependencies import NEVER, NONE, Operations, ended_by, waits
from gpubpf.record import replace

TIMES = {"call": 0, "ret": 0, "start": NONE, "end": NONE}
REST = {"queue": 0, "context": 0, "waits": 0, "link": 0, "what": 0, "graph": -1, "replay": -1, "node": -1}


def operations(
    rows: list[dict[str, Any]],
    queues: tuple[QueueKind, ...] = (QueueKind.NON_BLOCKING,) * 4,
    edges: dict[int, list[tuple[int, int]]] | None = None,
) -> Operations:
    """Return operations. A row has the kind and other fields that differ from the defaults; ids count from 1."""
    full = [{"id": n + 1, **TIMES, **REST, **row} for n, row in enumerate(rows)]
    columns = {name: np.array([row[name] for row in full], np.int64) for name in full[0]}
    columns["waits"] = columns["waits"].astype(bool)
    return Operations(**columns, queues=queues, edges=edges or {})


def kernel(call: int, start: int, end: int, **more: Any) -> dict[str, Any]:
    return {"kind": Kind.KERNEL, "call": call, "ret": call + 10, "start": start, "end": end} | more


def test_two_kernels_behind_each_other() -> None:
    found = waits(operations([kernel(0, 10, 1010), kernel(20, 1010, 1110)]))
    assert found.latency.tolist() == [10, 990] and found.api.tolist() == [10, 10]
    assert found.wait.tolist() == [0, 980] and found.overhead.tolist() == [0, 0]
    assert found.exec.tolist() == [1000, 100] and found.waited_for.tolist() == [-1, 0]


def test_a_copy_then_a_kernel_and_what_was_over_is_not_waited_for() -> None:
    copy = kernel(0, 10, 210) | {"kind": Kind.H2D}
    found = waits(operations([copy, kernel(50, 216, 316), kernel(400, 412, 500)]))
    assert found.wait.tolist() == [0, 150, 0] and found.overhead.tolist() == [0, 6, 2]
    assert found.waited_for.tolist() == [-1, 0, -1]


def test_a_host_function_is_waited_for_unless_most_of_the_wait_was_for_the_work_before_it() -> None:
    for began, ended, cause in ((200, 1000, 1), (900, 1000, 0), (NONE, 1000, 1)):
        function = {"kind": Kind.HOST_FUNCTION, "call": 12, "ret": 15, "start": began, "end": ended}
        found = waits(operations([kernel(0, 10, 200), function, kernel(20, 1005, 1100)]))
        assert found.wait.tolist()[2] == 970 and found.overhead.tolist()[2] == 5
        assert found.waited_for.tolist()[2] == cause
    twice = [function | {"start": 900, "end": 950}, function | {"start": 950, "end": 1000}]
    rows = [kernel(0, 10, 900), *twice, kernel(20, 1005, 1100)]
    assert waits(operations(rows)).waited_for.tolist()[3] == 0
    assert (
        waits(operations(rows[1:])).waited_for.tolist()[2] == 0
    )  # what the first one waited for is not known


def test_streams_do_not_wait_for_each_other_unless_the_legacy_one_is_between() -> None:
    rows = [kernel(0, 10, 1000, queue=0), kernel(20, 30, 50, queue=1), kernel(40, 1000, 1100, queue=2)]
    found = waits(operations(rows, (QueueKind.BLOCKING, QueueKind.BLOCKING, QueueKind.LEGACY)))
    assert found.waited_for.tolist() == [-1, -1, 0] and found.wait.tolist() == [0, 0, 950]
    rows.append(kernel(60, 1100, 1200, queue=1))  # and they wait for it
    assert (
        waits(operations(rows, (QueueKind.BLOCKING, QueueKind.PER_THREAD, QueueKind.LEGACY))).waited_for[3]
        == 2
    )
    free = waits(operations(rows, (QueueKind.NON_BLOCKING, QueueKind.NON_BLOCKING, QueueKind.LEGACY)))
    assert free.waited_for.tolist() == [-1, -1, -1, -1]
    other = [*rows[:2], {**rows[2], "context": 1}]  # each context has its own legacy stream
    assert (
        waits(operations(other, (QueueKind.BLOCKING, QueueKind.BLOCKING, QueueKind.LEGACY))).waited_for[2]
        == -1
    )


def test_within_a_stream_the_order_counts_and_not_times_that_may_be_wrong() -> None:
    rows = [kernel(0, 10, 1000), kernel(20, 990, 995), kernel(40, 996, 999)]
    for kind in QueueKind:
        assert waits(operations(rows, (kind,))).waited_for.tolist() == [-1, 0, 1], kind


def test_what_waits_for_work_from_before_the_attachment_is_not_known() -> None:
    rows = [kernel(0, 900, 1000, queue=0), kernel(20, 1000, 1100, queue=0), kernel(30, 35, 50, queue=1)]
    kinds = (QueueKind.NON_BLOCKING, QueueKind.NON_BLOCKING, QueueKind.BLOCKING)

    def met(
        rows: list[dict[str, Any]], *unseen: int, kinds: tuple[QueueKind, ...] = kinds
    ) -> list[tuple[int, bool]]:
        made = operations(rows, kinds)
        old = [number in unseen for number in range(len(kinds))]
        found = waits(replace(made, unseen=old, unseen_contexts=frozenset({0} if any(old) else ())))
        assert ((found.wait == NONE) == (found.overhead == NONE)).all()
        return list(zip(found.wait.tolist(), found.unseen.tolist(), strict=True))

    assert met(rows, 0) == [(NONE, True), (970, False), (0, False)]
    assert met(rows) == [(0, False), (970, False), (0, False)]
    for what in (SyncTarget.STREAM, SyncTarget.CONTEXT):  # the host has waited: no unseen work is left
        sync = {"kind": Kind.SYNC, "what": what, "queue": 0, "call": 0, "ret": 5}
        assert met([sync, *(row | {"call": 10, "ret": 20} for row in rows)], 0)[1] == (0, False)
    sync = {"kind": Kind.SYNC, "what": SyncTarget.STREAM, "queue": 1, "call": 0, "ret": 5}  # another stream
    assert met([sync, *rows], 0)[1] == (NONE, True)
    mark = [
        {"kind": Kind.RECORDED, "queue": 0},
        {"kind": Kind.SYNC, "what": SyncTarget.EVENT, "link": 1, "call": 0, "ret": 5},
    ]
    assert met([*mark, kernel(10, 900, 1000, queue=0)], 0)[2] == (0, False)
    # A new stream that synchronizes with the legacy one waits for unseen work in that.
    both = [kernel(0, 900, 1000, queue=2), kernel(20, 950, 1100, queue=0), kernel(30, 1000, 1200, queue=2)]
    kinds = (QueueKind.LEGACY, QueueKind.NON_BLOCKING, QueueKind.BLOCKING)
    assert met(both, 0, kinds=kinds) == [(NONE, True), (NONE, True), (960, False)]
    assert met(both, kinds=kinds)[0] == (0, False)


def test_an_event_ties_streams_together() -> None:
    rows = [
        kernel(0, 10, 500, queue=0),
        {"kind": Kind.RECORDED, "queue": 0},
        kernel(20, 500, 900, queue=0),  # after the record: not waited for
        {"kind": Kind.WAIT, "queue": 1, "link": 2},
        kernel(40, 505, 600, queue=1),
        {"kind": Kind.WAIT, "queue": 2, "link": 77},  # recorded before the log began
        kernel(40, 505, 600, queue=2),
    ]
    found = waits(operations(rows))
    assert found.waited_for.tolist() == [-1, -1, 0, -1, 0, -1, -1]
    assert (
        found.wait[4] == 450
        and found.overhead[4] == 5
        and found.by_event.tolist()[4]
        and not found.by_event[2]
    )
    assert found.wait[6] == NONE and found.overhead[6] == NONE and found.latency[6] == 465


def test_unknown_stays_unknown_until_something_bounds_it() -> None:
    rows = [kernel(0, NONE, NONE), kernel(20, 900, 1000), kernel(2000, NONE, NONE)]
    found = waits(operations(rows))
    assert found.latency.tolist() == [NONE, 880, NONE] and found.api.tolist() == [10, 10, 10]
    assert found.wait.tolist() == [0, NONE, 0] and found.exec.tolist() == [NONE, 100, NONE]
    # A copy that the call itself waits for is over when the call returns.
    copy = {"kind": Kind.D2H, "call": 0, "ret": 15, "waits": 1}
    assert waits(operations([copy, kernel(20, 30, 40)])).wait.tolist() == [0, 0]
    # So is what the host waited for, by stream, context or event.
    for sync in (
        {"what": SyncTarget.STREAM},
        {"what": SyncTarget.CONTEXT, "queue": 3},
        {"what": SyncTarget.EVENT, "queue": 3, "link": 2},
    ):
        wait = {"kind": Kind.SYNC, "call": 10, "ret": 500}
        rows = [kernel(0, NONE, NONE), {"kind": Kind.RECORDED}, wait | sync]
        ops = operations([*rows, kernel(600, 700, 800)])
        assert waits(ops).wait.tolist() == [0, NONE, NONE, 0]
        assert ended_by(ops)[0] == 500


def test_a_wait_for_an_event_says_nothing_of_the_stream_that_it_stands_in() -> None:
    rows = [kernel(0, NONE, NONE), {"kind": Kind.RECORDED, "queue": 1}]
    sync = {"kind": Kind.SYNC, "ret": 500, "what": SyncTarget.EVENT, "link": 2, "waits": 1}
    assert ended_by(operations([*rows, sync])).tolist()[:2] == [NEVER, 500]


def test_when_operations_were_over() -> None:
    rows = [kernel(0, 10, 20), kernel(5, 20, 30), kernel(7, 8, 9, queue=1)]
    wait = {"kind": Kind.SYNC, "call": 17, "ret": 50}
    assert ended_by(operations([*rows, wait])).tolist() == [20, 50, NEVER, NEVER]


@pytest.mark.parametrize(
    "wait",
    [
        {"kind": Kind.SYNC, "what": SyncTarget.CONTEXT, "queue": 3},
        {"kind": Kind.SYNC, "what": SyncTarget.STREAM},
        {"kind": Kind.D2H, "waits": 1},
    ],
)
def test_a_wait_says_nothing_of_what_another_thread_launches_meanwhile(wait: dict[str, Any]) -> None:
    rows = [kernel(0, NONE, NONE), kernel(100, NONE, NONE), wait | {"call": 20, "ret": 500}]
    assert ended_by(operations(rows)).tolist()[:2] == [500, NEVER]
    assert ended_by(operations([*rows, wait | {"call": 600, "ret": 700}])).tolist()[:2] == [500, 700]
    # The wait that returns first need not be the one that was called first.
    longer = [*rows[:2], wait | {"call": 120, "ret": 400}, rows[2]]
    assert ended_by(operations(longer)).tolist()[:2] == [400, 400]
    # On the virtual clock, a thread can be far behind the others: what it launches after the wait may have an earlier time.
    late = [kernel(0, NONE, NONE), wait | {"call": 600, "ret": 700}, kernel(100, NONE, NONE)]
    assert ended_by(operations(late)).tolist()[::2] == [700, NEVER]
    at_once = [kernel(0, NONE, NONE), wait | {"call": 600, "ret": 600}, kernel(590, NONE, NONE)]
    assert ended_by(operations(at_once)).tolist()[::2] == [600, NEVER]


def test_bounds_by_waits_are_those_of_a_search_for_each_operation() -> None:
    random = np.random.default_rng(5)
    rows = []
    for _ in range(400):
        call, ret = sorted(int(time) for time in random.choice(4000, 2))
        row = {"call": call, "ret": ret, "queue": int(random.choice(3))}
        kind = random.choice(3)
        rows.append(row | [{"kind": Kind.KERNEL}, {"kind": Kind.SYNC}, {"kind": Kind.D2H, "waits": 1}][kind])
        rows[-1]["what"] = int(random.choice([SyncTarget.STREAM, SyncTarget.CONTEXT])) if kind == 1 else 0
    rows.sort(key=lambda row: row["ret"])
    expected = []
    for row in rows:
        waits_for = [
            later["ret"]
            for later in rows
            if later["kind"] != Kind.KERNEL
            and later["call"] >= row["ret"]
            and (later["what"] == SyncTarget.CONTEXT or later["queue"] == row["queue"])
        ]
        own = [row["ret"]] if row["kind"] == Kind.D2H else []
        expected.append(min([*waits_for, *own], default=NEVER))
    assert ended_by(operations(rows)).tolist() == expected


def replay(
    number: int, at: int, kernels: list[tuple[int, int, int]], queue: int = 0, **more: Any
) -> list[dict[str, Any]]:
    """Return a graph launch whose call takes 10 ns, and its kernels: (node, start, end)."""
    common = {"call": at, "ret": at + 10, "queue": queue, "graph": 0, "replay": number}
    return [
        *(common | {"kind": Kind.KERNEL, "node": n, "start": start, "end": end} for n, start, end in kernels),
        common | {"kind": Kind.GRAPH} | more,
    ]


def test_the_kernels_of_a_graph_wait_for_their_predecessors_and_for_the_replay_before() -> None:
    diamond = [(0, 1), (0, 2), (1, 3), (2, 3)]
    rows = replay(1, 0, [(0, 10, 20), (1, 20, 50), (2, 20, 30), (3, 50, 60)])
    rows += replay(2, 15, [(0, 60, 70), (1, 70, 100), (2, 70, 80), (3, 100, 110)], queue=1)
    rows += [kernel(30, 110, 120, queue=1)]
    found = waits(operations(rows, edges={0: diamond}))
    assert found.waited_for.tolist() == [-1, 0, 0, 1, -1, 3, 5, 5, 6, 3, 8]
    assert found.wait.tolist() == [0, 10, 10, 40, 0, 35, 45, 45, 75, 35, 70]
    assert found.latency.tolist()[4::5] == [10, 45] and found.exec.tolist()[4::5] == [50, 50]  # the graphs
    assert found.overhead.tolist()[:4] == [0, 0, 0, 0]
    # The kernels of a graph with copies do not tell when it ends.
    rows = [*replay(1, 0, [(0, 10, 20)], what=1), kernel(12, 40, 50)]
    assert waits(operations(rows)).wait.tolist() == [0, 0, NONE]


def some_operations(random: np.random.Generator) -> Operations:
    """Return long sequences of kernels in one or several streams of two contexts, with events, waits and graphs between them."""
    kinds = tuple(QueueKind(int(kind)) for kind in random.choice(4, 5))
    rows: list[dict[str, Any]] = []
    records: list[int] = []
    for n in range(30):
        time, queue = 100 * n, int(random.choice(5))
        for step in range(int(random.choice([1, 3, 40]))):
            start = time + 2 * step + int(random.choice(500))
            some = queue if n % 2 else int(random.choice(5))
            end = start + int(random.choice(500)) if random.random() < 0.9 else NONE
            rows.append(kernel(time + 2 * step, start, end, queue=some))
        link = int(random.choice([-1, 0, *records]))
        kind = int(random.choice([Kind.RECORDED, Kind.WAIT]))
        rows.append({"kind": kind, "queue": queue, "link": link})
        if kind == Kind.RECORDED:
            records.append(len(rows))
        what = int(random.choice(4))
        wait = {"call": time + 85, "ret": time + 90}
        rows.append({"kind": Kind.SYNC, "queue": queue, "what": what, "link": link} | wait)
        nodes = [node for node in range(4) if random.random() < 0.8]
        spans = [(node, time + 5 * node, time + int(random.choice(99))) for node in nodes]
        rows += replay(n, time, spans, queue=queue)
    for row in rows:
        row["context"] = int(row.get("queue", 0)) % 2
    ops = operations(rows, kinds, {0: [(0, 1), (0, 2), (1, 3), (2, 3)]})
    old = [bool(flag) for flag in random.random(5) < 0.3]
    return replace(ops, unseen=old, unseen_contexts=frozenset({1} if old[0] else ()))


@pytest.mark.parametrize("seed", range(8))
def test_many_operations_at_once_wait_as_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = some_operations(np.random.default_rng(seed))
    monkeypatch.setattr(dependencies, "LONG", len(ops) + 1)
    one_by_one = waits(ops)
    assert np.count_nonzero(one_by_one.waited_for >= 0) > 100
    for least in (1, 5):
        monkeypatch.setattr(dependencies, "LONG", least)
        at_once = waits(ops)
        for column in at_once.__match_args__:
            same = getattr(at_once, column) == getattr(one_by_one, column)
            assert np.flatnonzero(~same).tolist() == [], column


def test_a_million_launches_take_seconds() -> None:
    count = 1_000_000
    at = np.arange(count, dtype=np.int64) * 1000
    nothing, none = np.zeros(count, np.int64), np.full(count, -1, np.int64)
    ops = Operations(
        np.arange(1, count + 1), np.full(count, int(Kind.KERNEL)), at, at + 10, at + 2000, at + 3000, at // 1000 % 8,
        nothing, nothing.astype(bool), nothing, nothing, none, none, none, (QueueKind.BLOCKING,) * 8, {},
    )  # fmt: skip
    begin = time.process_time()
    found = waits(ops)
    assert time.process_time() - begin < 15
    assert (found.wait == 0).all() and (found.overhead == 1990).all()

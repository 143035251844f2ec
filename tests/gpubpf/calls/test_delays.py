"""The arithmetic of delays: rows are added up and subtracted, and spans explain a time."""

from __future__ import annotations

import numpy as np

from gpubpf.calls import arrays, delays

FUTEX, READ = 202, 0
SPAN = [("start_ns", "<u8"), ("end_ns", "<u8"), ("inode", "<u8"), ("tgid", "<u4"), ("tid", "<u4"), ("function", "<u4"),
        ("reason", "<u4"), ("syscall", "<i4")]  # fmt: skip


def rows(*values: tuple[int, ...]) -> np.ndarray:
    return np.array(list(values), delays.ROW)


def test_reasons_have_names() -> None:
    assert [delays.text(reason, FUTEX) for reason in range(8)] == [
        "preempted",
        "blocked in futex",
        "block I/O in futex",
        "blocked in futex",
        "memory pressure in futex",
        "stopped",
        "page faults",
        "TCP retransmits",
    ]
    assert delays.text(delays.BLOCK_IO, delays.OUTSIDE) == "block I/O in a page fault"
    assert delays.text(delays.BLOCKED, 9999) == "blocked in syscall 9999"
    assert delays.text(delays.MEMORY, delays.UNKNOWN) == "memory pressure"
    assert delays.text(99, 0) == "reason 99"


def test_rows_of_one_key_are_one() -> None:
    made = delays.merge_rows([rows((7, 8, 1, delays.BLOCKED, FUTEX, 2, 30, 20), (7, 8, 1, delays.BLOCKED, READ, 1, 5, 5)),
                         rows((7, 8, 1, delays.BLOCKED, FUTEX, 1, 40, 40))])  # fmt: skip
    assert made.tolist() == [
        (7, 8, 1, delays.BLOCKED, READ, 1, 5, 5),
        (7, 8, 1, delays.BLOCKED, FUTEX, 3, 70, 40),
    ]
    assert delays.merge_rows([]).tolist() == []


def test_what_came_since() -> None:
    before = rows(
        (7, 8, 1, delays.BLOCKED, READ, 1, 5, 5),
        (7, 8, 1, delays.BLOCKED, FUTEX, 3, 70, 40),
        (7, 9, 1, 0, -1, 1, 9, 9),
    )
    now = rows(
        (7, 8, 1, delays.BLOCKED, READ, 1, 5, 5),
        (7, 8, 1, delays.BLOCKED, FUTEX, 3, 90, 60),
        (7, 9, 2, 0, -1, 1, 4, 4),
    )
    assert delays.rows_since(now, before).tolist() == [
        (7, 8, 1, delays.BLOCKED, FUTEX, 0, 20, 20),  # it has not ended
        (7, 9, 2, 0, -1, 1, 4, 4),
    ]
    assert delays.rows_since(now, before[:0]).tolist() == now.tolist()
    assert delays.rows_since(before, now)["ns"].tolist() == [9]  # never negative


def test_causes_of_many_threads() -> None:
    found = delays.causes(
        rows(
            (7, 8, 1, delays.FAULTS, -1, 900, 0, 0),
            (7, 8, 1, delays.BLOCKED, FUTEX, 2, 30, 20),
            (7, 9, 1, delays.BLOCKED, FUTEX, 1, 40, 40),
            (7, 9, 1, delays.PREEMPTED, -1, 5, 80, 30),
            (7, 9, 1, delays.RETRANSMITS, FUTEX, 2, 500, 500),
        )
    )
    assert [(c.text, c.count, c.ns, c.largest_ns, c.timeless) for c in found] == [
        ("preempted", 5, 80, 30, False),
        ("blocked in futex", 3, 70, 40, False),
        ("TCP retransmits", 2, 500, 500, True),
        ("page faults", 900, 0, 0, True),
    ]


def test_causes_by_function() -> None:
    gap = arrays.GAP
    mine = rows(
        (7, 8, 1, delays.BLOCKED, FUTEX, 2, 30, 20),
        (7, 8, 2, delays.BLOCKED, FUTEX, 1, 40, 40),
        (7, 8, gap, delays.BLOCKED, FUTEX, 1, 5, 5),
    )
    found = delays.causes(mine, {1: "hipMalloc", 2: "hipFree", gap: ""}.__getitem__)
    assert [(c.text, c.where, c.ns) for c in found] == [
        ("blocked in futex", "hipFree", 40),
        ("blocked in futex", "hipMalloc", 30),
        ("blocked in futex", "", 5),
    ]


def test_what_a_process_has_is_not_added_to_what_its_threads_have() -> None:
    gap = arrays.GAP
    mine = rows(
        (7, 0, gap, delays.RETRANSMITS, -1, 3, 0, 0), (7, 8, gap, delays.RETRANSMITS, FUTEX, 2, 500, 500)
    )
    assert [(c.text, c.count) for c in delays.causes(mine)] == [("TCP retransmits", 3)]
    assert [(c.text, c.count) for c in delays.causes(mine[1:])] == [("TCP retransmits", 2)]


def test_what_a_process_has_was_in_no_place_of_its_threads() -> None:
    gap, call, whole = (
        rows((7, 7, arrays.GAP, delays.RETRANSMITS, 45, 3, 9, 9)),
        rows((7, 8, 2, delays.BLOCKED, 45, 1, 5, 5)),
        rows((7, 0, arrays.GAP, delays.RETRANSMITS, delays.OUTSIDE, 6, 0, 0)),
    )
    found = delays.by_function(np.concatenate([whole, gap, call]))
    assert {place: own.tolist() for place, own in found.items()} == {
        delays.PROCESS: whole.tolist(),
        2: call.tolist(),
        arrays.GAP: gap.tolist(),
    }


def test_what_calls_between_launches_did_is_known_apart() -> None:
    between = 5 | delays.BETWEEN
    mine = rows(
        (7, 8, 5, delays.BLOCKED, FUTEX, 3, 30, 20),
        (7, 8, between, delays.BLOCKED, FUTEX, 2, 20, 10),
        (7, 8, arrays.GAP, delays.PREEMPTED, -1, 1, 4, 4),
    )
    told, gaps = delays.split_gaps(mine)
    assert told.tolist() == mine[[0, 2]].tolist()
    assert gaps.tolist() == [(7, 8, 5, *mine[1].tolist()[3:]), mine[2].item()]


def test_what_is_too_little_to_be_why() -> None:
    def tells(reason: int, count: int, ns: int) -> bool:
        return delays.Cause(reason, "", count, ns, ns).is_significant(1_000_000)

    assert tells(delays.BLOCKED, 1, 10_000) and not tells(delays.BLOCKED, 900, 9_999)
    assert tells(delays.FAULTS, 20, 0) and not tells(delays.FAULTS, 19, 0)
    assert tells(delays.RETRANSMITS, 1, 0)


def test_a_time_is_explained_by_what_lies_in_it() -> None:
    gap = arrays.GAP
    spans = np.array(
        [
            (500, 700, 0, 7, 8, gap, delays.BLOCKED, FUTEX),
            (100, 300, 0, 7, 8, gap, delays.PREEMPTED, -1),
            (250, 260, 0, 7, 9, gap, delays.BLOCKED, READ),  # another thread
            (250, 260, 0, 6, 8, gap, delays.BLOCKED, READ),  # another process with the same TID
            (650, 650, 77, 7, 0, gap, delays.RETRANSMITS, -1),
            (950, 950, 77, 7, 0, gap, delays.RETRANSMITS, -1),
            (650, 650, 78, 6, 0, gap, delays.RETRANSMITS, -1),
        ],
        SPAN,
    )
    explained = [(c.text, c.count, c.ns) for c in delays.explain(spans, 7, 8, 250, 690)]
    assert explained == [("blocked in futex", 1, 190), ("preempted", 1, 50), ("TCP retransmits", 1, 0)]
    assert delays.explain(spans, 7, 8, 300, 500) == []
    assert delays.explain(spans[:0], 7, 8, 0, 1000) == []


def test_times_are_kept_for_calls_that_end_later() -> None:
    """Only the latest are kept. They are dropped a part at a time."""
    kept = delays.RecentSpans(most=1000, part=10)
    for at in range(0, 3000, 3):
        kept.add(
            np.array(
                [
                    (at * 10 + i * 10, at * 10 + i * 10 + 5, 0, 7, 8, 1, delays.BLOCKED, FUTEX)
                    for i in range(3)
                ],
                SPAN,
            )
        )
    (cause,) = kept.explain(7, 8, 0, 30_000)
    assert 990 <= cause.count <= 1010
    (cause,) = kept.explain(7, 8, 29_982, 29_993)
    assert (cause.text, cause.count, cause.ns) == ("blocked in futex", 2, 6)
    assert kept.explain(7, 9, 0, 30_000) == kept.explain(6, 8, 0, 30_000) == kept.explain(7, 8, 0, 100) == []

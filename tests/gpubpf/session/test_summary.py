"""What the summary says of processes that ended."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpubpf.agent.definitions import SnapshotFlag
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.session import summary
from gpubpf.traced.measurement import Follow
from gpubpf.traced.traced_process import StoredSnapshot

IDLE, RUNNING, UNASKED = SnapshotFlag(0), SnapshotFlag.RUNNING, SnapshotFlag.UNASKED


def _reading(
    sequence: int, flags: SnapshotFlag, launches: int, before: StoredSnapshot | None = None
) -> StoredSnapshot:
    instances: Any = [SimpleNamespace(launches=launches, by_shape=True)]
    snapshot: Any = SimpleNamespace(sequence=sequence, flags=flags, instances=instances)
    return StoredSnapshot(snapshot, os.open(os.devnull, os.O_RDONLY), before)


@pytest.mark.parametrize("dropped", [False, True])
def test_how_a_process_ended_is_unknown_once_the_tool_has_dropped_it(dropped: bool) -> None:
    counters = [SimpleNamespace(instrumented=3)], 0
    stored = _reading(0, RUNNING, 3)
    process = SimpleNamespace(
        failed=False, dropped=dropped, disconnected=True, counters=lambda: counters, snapshots={1: stored}
    )
    measurement: Any = SimpleNamespace(all_processes=lambda: [process], request=1)
    assert list(summary.ended_while_running(measurement)) == ([] if dropped else [process])
    stored.snapshot.flags |= UNASKED  # a reading on the way: kernels may have ended since
    assert not list(summary.ended_while_running(measurement))


@pytest.mark.parametrize(
    ("last", "unread"),
    [
        ((7, IDLE, 900), 100),
        ((7, RUNNING, 900), 600),  # some of them may have run then; the earlier reading is complete
        ((0, RUNNING | UNASKED, 900), 600),
        ((0, RUNNING | UNASKED, 1000), 600),
        ((0, RUNNING, 900), 100),  # when it ended: `ended_while_running`
        ((8, RUNNING, 900), 100),  # when the measurement ended: `partly_counted`
        ((8, IDLE, 1000), 0),
    ],
)
def test_launches_that_ran_at_a_reading_on_the_way_may_be_unread(
    last: tuple[int, SnapshotFlag, int], unread: int
) -> None:
    process = SimpleNamespace(
        counters=lambda: ([SimpleNamespace(instrumented=1000, threads=0)], 0),
        snapshots={1: _reading(*last, before=_reading(6, IDLE, 400))},
    )
    measurement: Any = SimpleNamespace(
        all_processes=lambda: [process],
        request=8,
        definitions=[MapDefinition("counts", "array", 8, 1, 1)],
        follow=Follow(),
    )
    assert [n for _, n in summary.unread_launches(measurement)] == ([unread] if unread else [])
    if unread == 600:
        said = summary.describe_loss(measurement, cast(Any, process), unread)
        late = 1000 - last[2]
        expected = f" ({late} of them began after the last reading)" if late else ""
        assert said == "the counts of up to 600 launches are lost" + expected

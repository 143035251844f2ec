"""What the summary says of processes that ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpubpf.agent.definitions import SnapshotFlag
from gpubpf.session import summary


@pytest.mark.parametrize("dropped", [False, True])
def test_how_a_process_ended_is_unknown_once_the_tool_has_dropped_it(dropped: bool) -> None:
    counters = [SimpleNamespace(instrumented=3)], 0
    stored = SimpleNamespace(snapshot=SimpleNamespace(sequence=0, flags=SnapshotFlag.RUNNING))
    process = SimpleNamespace(
        failed=False, dropped=dropped, disconnected=True, counters=lambda: counters, snapshots={1: stored}
    )
    measurement: Any = SimpleNamespace(all_processes=lambda: [process])
    assert list(summary.ended_while_running(measurement)) == ([] if dropped else [process])
    stored.snapshot.flags |= SnapshotFlag.UNASKED  # a reading on the way: kernels may have ended since
    assert not list(summary.ended_while_running(measurement))

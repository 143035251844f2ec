"""gputop's sums: what is in one interval and not in another, whatever the order in which times become known."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpubpf.agent.definitions import Kind
from gpubpf.launches.dependencies import NEVER, NONE
from gpubpf.launches.launches import LoggedProcess
from gpubpf.top.report import Report
from gpubpf.top.usage import GRAPH, Interval, Usage

GONE = 1 << 30  # no process has this number


class Launch:
    """A launch, or another operation. known: when its start and its end become known to the tool."""

    def __init__(self, number: int, start: int, end: int, **more: Any) -> None:
        self.id, self.start, self.end = number, start, end
        self.call = more.get("call", max(start - 5, 1))
        self.ret = more.get("ret", self.call + 2)
        self.kind = more.get("kind", Kind.KERNEL)
        self.process, self.gpu, self.name = (more.get(name, 0) for name in ("process", "gpu", "name"))
        self.bytes, self.waits = more.get("bytes", 0), more.get("waits", False)
        self.late = more.get("late", 0)  # its times are known so much later


PROCESSES = [LoggedProcess(GONE + n, f"app{n}", gpus={1: 0, 2: 1}, number=n + 1) for n in range(2)]


def view(launches: list[Launch], now: int, graphs: frozenset[int] = frozenset()) -> Any:
    """What the library knows of the launches at a time."""
    there = [one for one in launches if one.ret <= now]
    started = [one.start + one.late <= now for one in there]
    ended = [one.end + one.late <= now for one in there]

    def column(name: str, of: type = np.int64) -> Any:
        return np.array([getattr(one, name) for one in there], of)

    kernel = column("kind") == Kind.KERNEL
    known = [begun and (done or not one.late) for one, begun, done in zip(there, started, ended, strict=True)]
    ops = SimpleNamespace(
        **{name: column(name) for name in ("id", "kind", "call", "ret")},
        start=np.where(known, column("start"), NONE),
        end=np.where(ended, column("end"), NONE),
        waits=column("waits", bool),
    )
    columns = SimpleNamespace(
        origin=min((one.call for one in there), default=NEVER),
        processes=PROCESSES,
        **{name: column(name) for name in ("process", "gpu", "name", "bytes")},
        names=["one", "two"],
        wanted=kernel,
        running=kernel & ~np.array(ended, bool),
        likely_end=np.full(len(there), NONE),
    )
    return SimpleNamespace(columns=columns, ops=ops, opaque_graphs=graphs)


def intervals(launches: list[Launch], ends: list[int], begin: int | None = 0) -> list[Interval]:
    usage = Usage()
    if begin is not None:
        usage.begin(begin)
    found = []
    for end in ends:
        usage.add(view(launches, end), end)
        found.append(usage.close(end, {}))
    return found


def union(launches: list[Launch], begin: int, end: int) -> int:
    """How many moments of an interval have a kernel."""
    return sum(any(one.start <= moment < one.end for one in launches) for moment in range(begin, end))


def test_kernels_that_overlap_count_once() -> None:
    (one,) = intervals([Launch(1, 10, 30), Launch(2, 20, 50), Launch(3, 70, 80, name=1)], [100])
    (use,) = one.processes
    assert (use.busy_ns, use.share, use.launches) == (50, 0.5, 3)
    assert [(kernel.mangled, kernel.gpu_ns, kernel.launches) for kernel in use.kernels] == [
        ("one", 50, 2),
        ("two", 10, 1),
    ]
    assert one.gpus[0].busy_ns == 50 and one.late_ns == 0


def test_a_kernel_runs_through_intervals() -> None:
    found = intervals([Launch(1, 50, 350)], [100, 200, 300, 400])
    uses = [one.processes[0] for one in found]
    assert [use.busy_ns for use in uses] == [50, 100, 100, 50]
    assert [use.kernels[0].gpu_ns for use in uses] == [50, 100, 100, 50]
    assert [use.launches for use in uses] == [1, 0, 0, 0]
    assert [use.running for use in uses] == [1, 1, 1, 0]
    assert [one.late_ns for one in found] == [0] * 4


def test_an_end_that_is_likely_counts_but_only_once() -> None:
    launches = [Launch(1, 20, 60), Launch(2, 70, 90), Launch(3, 95, 150)]
    usage = Usage()
    usage.begin(0)
    unsure = view(launches, 100)
    unsure.ops.end[:] = NONE
    unsure.columns.running[:] = True
    unsure.columns.likely_end[:] = 55, 90, NONE
    usage.add(unsure, 100)
    first = usage.close(100, {})
    (use,) = first.processes
    assert (use.busy_ns, use.running, use.kernels[0].gpu_ns) == (35 + 20 + 5, 1, 60)
    usage.add(view(launches, 200), 200)
    second = usage.close(200, {})
    assert (second.processes[0].busy_ns, second.late_ns) == (50, 5)


def test_what_happens_during_a_reading_is_for_the_next_interval() -> None:
    """The first reading begins at 100. When it is there, more is known of a few processes."""
    launches = [Launch(1, 20, 60), Launch(2, 80, 110), Launch(3, 105, 115), Launch(4, 120, 130)]
    usage = Usage()
    usage.begin(0)
    process = LoggedProcess(GONE, "app", gpus={1: 0}, number=1, taken_ns={1: 100})
    usage.know(process)
    usage.know(LoggedProcess(GONE, "silent", number=2, taken_ns={1: -5}))
    assert usage.known_until(140) == 100
    usage.add(view(launches, 140), 100)
    (use, *_) = (first := usage.close(100, {})).processes
    assert (first.length_ns, use.busy_ns, use.launches, use.running) == (100, 60, 2, 1)
    assert usage.known_until(200) == 200, "no reading since then"
    process.taken_ns[1] = 190
    assert usage.known_until(200) == 190
    usage.add(view(launches, 200), 190)
    (use, *_) = (second := usage.close(190, {})).processes
    assert (use.busy_ns, use.launches, use.running, second.late_ns) == (15 + 10, 2, 0, 0)
    assert first.processes[0].kernels[0].gpu_ns + use.kernels[0].gpu_ns == 40 + 30 + 10 + 10


def test_times_that_come_late_are_in_no_interval_but_are_told() -> None:
    found = intervals([Launch(1, 50, 250, late=60)], [100, 200, 300, 400])
    assert [one.processes[0].busy_ns if one.processes else 0 for one in found] == [0, 0, 0, 0]
    assert [one.late_ns for one in found] == [0, 0, 0, 200]
    found = intervals([Launch(1, 50, 250, late=1)], [100, 200, 300])
    assert found[-1].processes[0].busy_ns == 50 and found[-1].late_ns == 150


def test_what_was_before_the_first_interval_does_not_count() -> None:
    old = Launch(1, 10, 20), Launch(2, 30, 150)
    (one,) = intervals([*old, Launch(3, 160, 170)], [200], begin=100)
    (use,) = one.processes
    assert (use.launches, use.busy_ns, one.late_ns, one.length_ns) == (1, 60, 0, 100)
    (one,) = intervals([*old, Launch(3, 160, 170)], [200], begin=None)
    assert (one.begin_ns, one.processes[0].launches) == (5, 3)


def test_copies_waits_and_memory() -> None:
    others = [
        Launch(1, 10, 20, kind=Kind.H2D, bytes=100),
        Launch(2, 20, 30, kind=Kind.D2H, bytes=50, waits=True, call=15, ret=40),
        Launch(3, 20, 30, kind=Kind.H2H, bytes=1000),
        Launch(4, 20, 30, kind=Kind.SYNC, call=50, ret=150),
    ]
    usage = Usage()
    usage.begin(0)
    for process in PROCESSES:
        usage.know(process)
    usage.add(view(others, 100), 100)
    first = usage.close(100, {(1, 0): 5000, (2, 1): 70})
    rows = {(use.process, use.gpu): use for use in first.processes}
    assert sorted(rows) == [(1, 0), (1, 1), (2, 0), (2, 1)], "a process has a row for each GPU that it uses"
    use = rows[1, 0]
    assert (use.copies, use.copies_bytes, use.memory_bytes) == (2, 150, 5000)
    assert (use.waits, use.wait_ns, use.busy_ns) == (1, 25, 0)
    assert rows[2, 1].memory_bytes == 70
    usage.add(view(others, 200), 200)
    assert [(use.waits, use.wait_ns) for use in usage.close(200, {}).processes if use.waits] == [(1, 100)]


def test_memory_from_before_the_attach_is_not_known() -> None:
    usage = Usage()
    usage.begin(0)
    for number, before in ((1, False), (2, True), (3, True)):
        usage.know(LoggedProcess(GONE, "app", gpus={1: 0}, number=number, from_before=before))
    one = usage.close(100, {(1, 0): 2048, (2, 0): 2048})
    assert [use.memory_complete for use in one.processes] == [True, False, False]
    rows = [
        re.split("  +", line.strip()) for line in Report("pid", None, False).lines(one) if " app " in line
    ]
    assert sorted(row[5] for row in rows) == ["2.00 KB", ">= 2.00 KB", "unknown"]


def test_launches_that_nothing_can_time_have_no_share() -> None:
    launches = [Launch(1, 10, 20)]
    known = view(launches, 100)
    known.ops.start[:] = known.ops.end[:] = NONE
    usage = Usage()
    usage.begin(0)
    usage.add(known, 100)
    one = usage.close(100, {})
    assert (one.processes[0].share, one.gpus[0].share, one.processes[0].launches) == (None, None, 1)


def test_a_launch_that_waits_for_its_start_leaves_its_process_idle() -> None:
    (one,) = intervals([Launch(1, 500, 600, call=10)], [100])
    assert (one.processes[0].share, one.processes[0].running) == (0.0, 0)


def test_graphs_without_times_of_kernels_count_as_a_whole() -> None:
    known = view([Launch(1, 10, 40, kind=Kind.GRAPH)], 100, frozenset({0}))
    usage = Usage()
    usage.begin(0)
    usage.add(known, 100)
    (use,) = usage.close(100, {}).processes
    assert use.busy_ns == 30
    assert [(kernel.mangled, kernel.launches) for kernel in use.kernels] == [(GRAPH, 1)]
    usage = Usage(graphs=False)
    usage.begin(0)
    usage.add(known, 100)
    assert usage.close(100, {}).processes == ()


def test_an_ended_process_has_one_last_row() -> None:
    process = LoggedProcess(GONE, "short", gpus={1: 0}, number=9)
    usage = Usage()
    usage.begin(0)
    usage.know(process)
    assert not usage.close(100, {}).processes[0].ended
    process.ended = True
    assert usage.close(200, {}).processes[0].ended
    assert usage.close(300, {}).processes == ()


@pytest.mark.parametrize("seed", range(20))
def test_sums_over_intervals_are_exact(seed: int) -> None:
    """Whatever kernels run: each moment, launch and nanosecond is in one interval."""
    chance = random.Random(seed)
    launches = []
    for number in range(1, chance.randint(2, 40)):
        start = chance.randrange(10, 900)
        end = start + chance.choice((1, 10, 100, 400))
        who = {"process": chance.randrange(2), "gpu": chance.randrange(2), "name": chance.randrange(2)}
        launches.append(Launch(number, start, end, call=start - chance.randrange(5, 10), **who))
    launches.sort(key=lambda one: one.id)
    ends = sorted({chance.randrange(50, 1300) for _ in range(8)} | {1400})
    found = intervals(launches, ends)
    assert not any(one.late_ns for one in found)
    for one in found:
        for use in one.processes:
            mine = [each for each in launches if (each.process + 1, each.gpu) == (use.process, use.gpu)]
            assert use.busy_ns == union(mine, one.begin_ns, one.end_ns)
        for gpu in one.gpus:
            mine = [each for each in launches if each.gpu == gpu.gpu]
            assert gpu.busy_ns == union(mine, one.begin_ns, one.end_ns)
    uses = [use for one in found for use in one.processes]
    assert sum(use.launches for use in uses) == len(launches)
    for number, name in enumerate(("one", "two")):
        kernels = [kernel for use in uses for kernel in use.kernels if kernel.mangled == name]
        mine = [each for each in launches if each.name == number]
        assert sum(kernel.gpu_ns for kernel in kernels) == sum(each.end - each.start for each in mine)
        assert sum(kernel.launches for kernel in kernels) == len(mine)

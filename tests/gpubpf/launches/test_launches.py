"""Launches from a made-up operation log and made-up readings of the GPU's arrays; their records and text."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpubpf_traces
from gpubpf.agent.definitions import NO_FUNCTION, Vendor
from gpubpf.launches import dependencies, latency, latency_text
from gpubpf.launches.dependencies import NONE
from gpubpf.launches.device_times import MASK
from gpubpf.launches.launch_records import KERNEL_RECORD
from gpubpf.launches.launches import DEVICE, STAMP, Launches, LoggedProcess, OperationColumns
from gpubpf.launches.sums import LaunchLosses, LaunchSums, ValueCounts, kernel_record
from gpubpf.record import replace
from gpubpf.records import operation_log
from gpubpf.records.clock import UNKNOWN
from gpubpf.show import perfetto
from gpubpf.show.owner_columns import Owner, OwnerColumns

PID = 7
SLOTS = 64
SHARDS = 8
FIRST = PID << 40


class Device:
    """The arrays of launchlate's device programs."""

    def __init__(self) -> None:
        self.starts, self.ends = np.zeros(SLOTS, np.uint64), np.zeros(SLOTS * SHARDS, np.uint64)

    def ran(self, launch: int, start: int, end: int | None) -> None:
        generation = (launch // SLOTS & 0xFFFF) << 48
        cell = np.uint64(generation | ~start & MASK)
        self.starts[launch % SLOTS] = max(self.starts[launch % SLOTS], cell)
        if end is not None:
            self.ends[launch % 3 * SLOTS + launch % SLOTS] = np.uint64(generation | end & MASK)


class Log:
    """A log of records in the order in which they are added."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self._next = FIRST

    def put(self, kind: int, parts: dict[str, dict[str, Any]] | None = None, **fields: Any) -> int:
        record = np.zeros((), operation_log.DTYPE)
        fields = {"id": self._next, "kind": kind, "thread": 70, "queue": 1} | fields
        for name, value in fields.items():
            record[name] = value
        for part, values in (parts or {}).items():
            for name, value in values.items():
                record[part][name] = value
        self.records.append(record)
        self._next += 1
        return int(fields["id"])

    def gave(self) -> None:
        """Drop the records: they have been read."""
        self.records = []

    def kernel(self, call: int, ret: int, slot: int = 0, outcome: int = 0, **fields: Any) -> int:
        shape = {"grid": (4, 1, 1), "block": (32, 1, 1)}
        parts = {"kernel": {"slot": slot, "outcome": outcome, **shape} | fields.pop("kernel", {})}
        return self.put(operation_log.KERNEL, parts, call_ns=call, return_ns=ret, **fields)

    def array(self) -> Any:
        return np.array(self.records, operation_log.DTYPE)


def process(virtual: bool = True) -> LoggedProcess:
    names = {0: "_Z5firstPi", 1: "_Z6secondPi"}
    return LoggedProcess(PID, "app", virtual, names, number=PID)


def found(
    log: Log, device: Device, virtual: bool = True, idle: bool = True, taken: int = 10**12, readings: int = 1
) -> OperationColumns:
    launches = Launches(SLOTS)
    launches.log(process(virtual), log.array())
    for _ in range(readings):
        launches.reading(process(virtual), device.starts, device.ends, taken, idle)
    return launches.columns()


def summed(view: latency.LaunchView, *by: str) -> LaunchSums:
    sums = LaunchSums(by)
    sums.add(view, np.flatnonzero(view.columns.wanted))
    return sums


def two_kernels() -> tuple[Log, Device]:
    log, device = Log(), Device()
    log.put(operation_log.QUEUE, queue_kind=operation_log.BLOCKING)
    device.ran(log.kernel(1_000_000, 1_001_000), 1_001_000, 1_050_000)
    device.ran(log.kernel(1_002_000, 1_003_000, slot=1), 1_050_000, 1_060_000)
    return log, device


def test_two_kernels_on_one_clock() -> None:
    seen = found(*two_kernels())
    losses = LaunchLosses()
    losses.add(latency.LaunchView(seen), np.arange(2))
    assert losses.fields(0)["launches_timed"] == {"device": 2} and not losses.fields(0)["launches_untimed"]
    assert seen.names == ["_Z5firstPi", "_Z6secondPi"] and seen.method.tolist() == [DEVICE] * 2
    assert seen.waits.latency.tolist() == [1000, 48000] and seen.waits.wait.tolist() == [0, 47000]
    assert seen.waits.overhead.tolist() == [0, 0] and seen.waits.exec.tolist() == [49000, 10000]
    assert not seen.running.any() and not seen.lost.any() and seen.start_error.tolist() == [0, 0]


def test_an_end_is_believed_only_when_the_launch_was_over() -> None:
    log, device = two_kernels()
    seen = found(log, device, idle=False, taken=1_055_000)
    # A reading has no time on the virtual clock: both kernels may have been running.
    assert seen.running.tolist() == [True, True] and seen.ops.end.tolist() == [NONE, NONE]
    # After a second reading: the first kernel was over when the second was seen running; the second may still run.
    assert found(log, device, idle=False, readings=2).ops.end.tolist() == [1_050_000, NONE]


def test_since_when_a_launch_is_open() -> None:
    log, device = two_kernels()
    launches, app = Launches(SLOTS), process()
    launches.log(app, log.array())
    for idle, since in ((False, 1_000_000), (False, 1_002_000), (True, dependencies.NEVER)):
        launches.reading(app, device.starts, device.ends, 1_055_000, idle)
        columns = launches.columns()
        launches.fresh(columns, last=False)
        assert launches.open_since(columns) == since


def test_no_launch_of_a_process_that_has_ended_is_still_running() -> None:
    log, device = two_kernels()
    launches, ended = Launches(SLOTS), replace(process(), ended=True)
    launches.log(ended, log.array())
    launches.reading(ended, device.starts, device.ends, 1_055_000, False)
    seen = launches.columns()
    assert (seen.running.tolist(), seen.lost.tolist()) == ([False, False], [True, True])


def test_on_the_real_clock_the_time_of_a_reading_tells_what_was_over() -> None:
    log, device = Log(), Device()
    log.put(
        operation_log.CLOCK,
        {"clock": {"host_before": 1_000_000, "gpu": 1_000_000, "host_after": 1_000_000, "tick_ns": 1}},
    )
    device.ran(log.kernel(1_000_000, 1_001_000), 1_001_000, 1_050_000)
    device.ran(log.kernel(1_002_000, 1_003_000, slot=1), 1_050_000, 1_060_000)
    assert found(log, device, False, False, 1_055_000).running.tolist() == [False, True]
    log.put(
        operation_log.SYNC, {"sync": {"what": operation_log.STREAM}}, call_ns=1_004_000, return_ns=1_070_000
    )
    assert found(log, device, False, False, 1_055_000).running.tolist() == [False, True, False]
    late = found(log, device, False, False, 1_080_000)
    assert abs(late.ops.end[:2] - [1_050_000, 1_060_000]).max() <= 100


CLOCK = {"clock": {"host_before": 1_000_000, "gpu": 1_000_000, "host_after": 1_000_000, "tick_ns": 1}}


def test_an_end_is_not_believed_because_another_thread_waited_while_it_was_launched() -> None:
    log, device = Log(), Device()
    log.put(operation_log.CLOCK, CLOCK)
    device.ran(log.kernel(1_050_000, 1_055_000, thread=71), 1_060_000, 2_000_000)  # some blocks have ended
    log.put(operation_log.SYNC, {"sync": {"what": 2}}, call_ns=1_010_000, return_ns=1_900_000, queue=0)
    seen = found(log, device, virtual=False, idle=False, taken=3_000_000)
    assert seen.running.tolist() == [True, False] and seen.ops.end[0] == NONE


def test_what_is_launched_during_a_copy_comes_after_it() -> None:
    log, device = Log(), Device()
    log.put(operation_log.CLOCK, CLOCK)
    device.ran(log.kernel(1_000_000, 1_005_000), 1_005_000, 1_900_000)
    for n in range(2):  # while thread 70 waits for its copy
        start = 2_000_000 + 500_000 * n
        device.ran(
            log.kernel(1_050_000 + 10_000 * n, 1_055_000 + 10_000 * n, thread=71), start, start + 500_000
        )
    flags = operation_log.SYNCHRONOUS
    copy = log.put(operation_log.D2H, call_ns=1_010_000, return_ns=2_001_000, flags=flags)
    log.put(operation_log.SPAN, {"span": {"of": copy, "start": 1_900_000, "end": 2_000_000}})
    view = latency.LaunchView(found(log, device, virtual=False))
    assert [view.op(at) for at in range(4)] == ["kernel", "d2h", "kernel", "kernel"]
    assert view.waits.waited_for.tolist() == [-1, -1, 1, 2]  # the copy waited during its call


def test_the_operations_of_a_call_to_hip_keep_their_order() -> None:
    log, app = Log(), replace(process(virtual=False), vendor=Vendor.AMD)
    times = {"call_ns": 1_000_000, "return_ns": 2_000_000}
    mark = log.put(operation_log.RECORDED, **times)
    log.put(operation_log.WAIT, {"event": {"record": mark}}, queue=2, **times)
    log.put(operation_log.D2H, queue=2, flags=operation_log.SYNCHRONOUS, **times)
    launches = Launches(SLOTS)
    launches.log(app, log.array())
    assert launches.columns().ops.kind.tolist() == [
        operation_log.RECORDED,
        operation_log.WAIT,
        operation_log.D2H,
    ]


def test_a_slot_that_was_used_again_before_it_was_read_is_lost_and_one_that_was_read_is_not() -> None:
    log, device = Log(), Device()
    launches, app = Launches(SLOTS), process()
    old = log.kernel(1000, 2000)
    device.ran(old, 2000, 3000)
    launches.log(app, log.array())
    launches.reading(app, device.starts, device.ends, 5000, True)
    again = Log()
    unread = again.kernel(6000, 7000, id=old + SLOTS)
    device.ran(unread, 7000, 8000)
    newest = again.kernel(9000, 10000, id=old + 2 * SLOTS)
    device.ran(newest, 10000, 11000)
    launches.log(app, again.array())
    launches.reading(app, device.starts, device.ends, 20000, True)
    seen = launches.columns()
    assert seen.lost.tolist() == [False, True, False] and seen.ops.start.tolist() == [2000, NONE, 10000]
    assert seen.waits.latency.tolist() == [1000, NONE, 1000]


@pytest.mark.parametrize("context", [None, 3])
def test_a_launch_that_waits_behind_another_until_the_end_is_not_lost(context: int | None) -> None:
    log, device = Log(), Device()
    log.put(operation_log.CLOCK, CLOCK)
    old = log.kernel(1_000_000, 1_001_000, context=3)
    device.ran(old, 1_001_000, 1_002_000)
    runs = log.kernel(1_003_000, 1_004_000, context=3)
    device.ran(runs, 1_004_000, None)
    log.kernel(1_005_000, 1_006_000, context=3)  # its slot is empty
    log.kernel(1_007_000, 1_008_000, context=3, id=old + SLOTS)  # its slot has an older launch
    log.kernel(1_009_000, 1_010_000, context=3, id=runs - SLOTS)  # its slot has a newer launch
    launches, app = Launches(SLOTS), process(virtual=False)
    launches.log(app, log.array())
    launches.reading(app, device.starts, device.ends, 1_500_000, False, context)
    seen = launches.columns()
    assert seen.running.tolist() == [False, True, True, True, False]
    assert seen.lost.tolist() == [False, False, False, False, True]
    losses, view = LaunchLosses(), latency.LaunchView(seen)
    losses.add(view, np.arange(1, 4))
    fields = losses.fields(0)
    assert (fields["launches_running"], fields["launches_lost"], fields["launches_untimed"]) == (3, 0, 0)
    said = ["3 launches running, or not started, when the measurement ended"]
    assert latency_text.loss_lines(fields) == said
    shown = [latency_text.launch_line(view, at, OwnerColumns()).split()[-1] for at in range(1, 4)]
    assert shown == ["runs", "-", "-"]
    for gone in ("ended", "failed"):
        setattr(app, gone, True)
        assert not launches.columns().running[2:].any() and launches.columns().lost[2:].all()
        setattr(app, gone, False)
    launches = Launches(SLOTS)  # another context was read, so nothing is known
    launches.log(app, log.array())
    launches.reading(app, device.starts, device.ends, 1_500_000, False, 4)
    assert launches.columns().lost[2:].all()


def synchronize(log: Log, call: int, ret: int, what: int = operation_log.CONTEXT, kept: int = 0) -> None:
    log.put(operation_log.SYNC, {"sync": {"what": what, "kept": kept}}, call_ns=call, return_ns=ret)


def kept_of(device: Device) -> Any:
    """Return the shared array of a process whose agent has kept the ends of all launches."""
    ends = device.ends.reshape(SHARDS, SLOTS).max(axis=0)
    launches = np.zeros(SLOTS, [("launch", np.uint64), ("start", np.uint64), ("end", np.uint64)])
    launches["start"], launches["end"] = device.starts, ends
    return launches


@pytest.mark.parametrize("virtual", [True, False])
def test_ends_that_were_kept_after_a_wait_are_known_although_the_context_failed(virtual: bool) -> None:
    log, device = Log(), Device()
    if not virtual:
        clock = {"host_before": 1000, "gpu": 1000, "host_after": 1000, "tick_ns": 1}
        log.put(operation_log.CLOCK, {"clock": clock})
    old = log.kernel(1000, 2000)
    device.ran(old, 2000, 3000)
    long = log.kernel(
        1000, 2000, queue=2
    )  # still runs during the wait: an end that only some of its threads have written
    device.ran(long, 2000, 2500)
    fresh = log.kernel(3000, 4000)
    device.ran(fresh, 4000, 5000)
    synchronize(log, 5000, 6000, operation_log.STREAM, kept=fresh)  # `old` is too old
    known = log.kernel(6000, 7000)
    device.ran(known, 7000, 8000)
    unknown = log.kernel(8000, 9000)
    device.ran(unknown, 9000, 10000)
    launches, app = Launches(SLOTS), process(virtual)
    launches.log(app, log.array())
    launches.host_launches(app.number, kept_of(device))
    seen = launches.columns()
    kernels = np.flatnonzero(seen.wanted)
    assert seen.waits.exec[kernels].tolist() == [NONE, NONE, 1000, NONE, NONE]
    assert seen.lost[kernels].tolist() == [True, True, False, True, True]
    losses = LaunchLosses()
    losses.add(latency.LaunchView(seen), kernels)
    for reasons, said in (
        (([app.number], []), "with an unknown end: the context failed before the end was read"),
        (([], [app.number]), "with an unknown end: the process ended or executed another program"),
        (([], []), "lost: the tool could not keep up; --kernel chooses fewer"),
    ):
        fields = losses.fields(0, *reasons)
        assert fields["launches_lost"] == 4
        assert [fields["launches_lost_by_failure"], fields["launches_lost_by_exit"]] == [
            4 * len(of) for of in reasons
        ]
        assert latency_text.loss_lines(fields) == [f"4 launches {said}"]
    later = Log()
    later.put(
        operation_log.SYNC,
        {"sync": {"what": operation_log.CONTEXT, "kept": old}},
        call_ns=10000,
        return_ns=11000,
    )
    launches.log(app, later.array())
    assert (launches.columns().waits.exec[kernels] != NONE).all()


@pytest.mark.parametrize("copied", [0, 2500])
def test_the_last_reading_of_an_idle_context_has_more_than_what_was_kept(copied: int) -> None:
    """On the virtual clock, another thread may have waited before the agent's copy, by its own time, but after it in truth."""
    log, device = Log(), Device()
    launched = log.kernel(1000, 2000)
    device.ran(launched, 2000, 3000)
    synchronize(log, 3000, 4000, kept=launched)
    kept = kept_of(device)
    kept["end"] = np.where(kept["end"], np.uint64(copied), np.uint64(0))  # the first launches: generation 0
    launches, app = Launches(SLOTS), process()
    launches.log(app, log.array())
    launches.host_launches(app.number, kept)
    assert launches.columns().lost.tolist() == [not copied, False]
    launches.reading(app, device.starts, device.ends, 5000, True)
    seen = launches.columns()
    assert seen.waits.exec.tolist() == [1000, NONE] and not seen.lost.any()


def test_a_place_used_again_between_the_copies_of_its_start_and_of_its_end() -> None:
    log, device = two_kernels()
    launches, app = Launches(SLOTS), process()
    launches.log(app, log.array())
    launches.reading(app, device.starts, device.ends, 5000, False)
    launches.reading(app, device.starts, device.ends, 5000, False)
    ends, later = device.ends.copy(), int(log.records[1]["id"]) + SLOTS
    ends[(later + 1) % SHARDS * SLOTS + later % SLOTS] = np.uint64((later // SLOTS & 0xFFFF) << 48 | 99)
    launches.reading(app, device.starts, ends, 6000, False)
    assert launches.columns().ops.end.tolist() == [1_050_000, NONE]
    alone = Launches(SLOTS)  # some of the ends remain, but not necessarily the last
    alone.log(app, log.array())
    alone.reading(app, device.starts, ends, 6000, True)
    assert alone.columns().ops.end.tolist() == [NONE, 1_060_000]


def test_the_gpus_clock_is_brought_onto_the_hosts() -> None:
    offset, log, device = 1_700_000_000_123_456_789, Log(), Device()
    for at in range(900_000, 1_200_000, 10_000):
        bracket = {"host_before": at, "gpu": at + 400 + offset, "host_after": at + 800, "tick_ns": 1}
        log.put(operation_log.CLOCK, {"clock": bracket})
    device.ran(log.kernel(1_000_000, 1_004_000), 1_009_000 + offset, 1_050_000 + offset)
    span = {"start": 1_060_000 + offset, "end": 1_080_000 + offset, "error_ns": 500}
    copy = log.put(operation_log.H2D, {"copy": {"bytes": 4096}}, call_ns=1_010_000, return_ns=1_011_000)
    log.put(operation_log.SPAN, {"span": {"of": copy} | span})
    refused = log.kernel(1_012_000, 1_013_000, outcome=6)
    log.put(
        operation_log.SPAN, {"span": {"of": refused, "start": 1_080_100 + offset, "end": 1_090_000 + offset}}
    )
    seen = found(log, device, virtual=False)
    assert (
        seen.method.tolist() == [DEVICE, STAMP, STAMP]
        and seen.start_error[0] < 500 < seen.start_error[1] < 1100
    )
    assert abs(seen.ops.start - [1_009_000, 1_060_000, 1_080_100]).max() <= seen.start_error.max()
    assert (seen.waits.exec == seen.ops.end - seen.ops.start).all()
    assert abs(seen.waits.exec[0] - 41000) <= seen.exec_error[0] <= 1
    assert seen.exec_error.tolist()[1:] == [1000, 0]
    assert seen.waits.waited_for.tolist() == [-1, 0, 1] and seen.bytes.tolist() == [0, 4096, 0]
    # Without a clock only the duration is known,
    log.records = [record for record in log.records if record["kind"] != operation_log.CLOCK]
    blind = found(log, device, virtual=False)
    assert blind.ops.start[0] == NONE and (blind.start_error == UNKNOWN).all()
    assert blind.waits.exec[0] == 41000 and not blind.lost.any()
    # unless the host waited: the kernel ran between the call and the end of that.
    log.put(
        operation_log.SYNC, {"sync": {"what": operation_log.CONTEXT}}, call_ns=1_100_000, return_ns=1_110_000
    )
    bounded = found(log, device, virtual=False)
    assert (
        bounded.start_error[0] <= 35_000 and abs(bounded.ops.start[0] - 1_009_000) <= bounded.start_error[0]
    )
    assert bounded.ops.start[0] >= 1_000_000 and bounded.waits.exec[0] == 41000


def test_the_times_of_a_launch_add_up_where_the_clocks_run_at_different_rates() -> None:
    log, device = Log(), Device()
    for at in range(0, 1_000_000_000, 10_000_000):
        gpu = at + at * 460 // 1_000_000  # the GPU's clock runs fast
        bracket = {"host_before": at, "gpu": gpu, "host_after": at, "tick_ns": 1}
        log.put(operation_log.CLOCK, {"clock": bracket})
    device.ran(log.kernel(100_000_000, 100_004_000), 100_100_000, 800_000_000)
    seen = found(log, device, virtual=False)
    assert seen.waits.exec[0] == seen.ops.end[0] - seen.ops.start[0] < 699_600_000
    assert 300_000 < seen.exec_error[0] < 340_000  # against the GPU's own clock


def test_a_log_may_hold_anything() -> None:
    random = np.random.default_rng(5)
    junk = random.integers(0, 256, 500 * operation_log.RECORD).astype(np.uint8).view(operation_log.DTYPE)
    junk["kind"] = random.integers(0, 24, len(junk))
    junk["result"][::2] = 0
    launches = Launches(SLOTS)
    for virtual in (True, False):
        launches.log(process(virtual), junk)
    cells = random.integers(0, 2**63, SLOTS * SHARDS).astype(np.uint64)
    launches.reading(process(), cells[:SLOTS], cells, 5, True)
    launches.reading(process(), cells[:3], cells, 5, True)
    view = latency.LaunchView(launches.columns())
    chosen = np.flatnonzero(view.columns.wanted)
    for group in summed(view, "queue").groups:
        kernel_record(group, True)
    list(latency_text.timeline_lines(view, np.arange(len(view.ops))))
    [json.dumps(view.operation(at)) for at in range(len(view.ops))]
    latency.graph_candidates(view, chosen)


@pytest.mark.every(2)
@pytest.mark.parametrize("of", ["context", "queue", "slot", "exec"])
def test_a_log_of_very_many_things_takes_no_time_without_end(of: str) -> None:
    records = np.zeros(40_000, operation_log.DTYPE)
    everything = np.arange(len(records))
    records["id"], records["call_ns"], records["return_ns"] = FIRST + everything, everything, everything
    records["kind"] = {"context": operation_log.SYNC, "exec": operation_log.GRAPH}.get(
        of, operation_log.KERNEL
    )
    records["sync"]["what"] = operation_log.CONTEXT
    place = {"slot": records["kernel"], "exec": records["graph"]}.get(of, records)
    place[of] = everything
    launches = Launches(SLOTS)
    launches.log(process(), records)
    began = time.process_time()
    view = latency.LaunchView(launches.columns())
    summed(view)
    list(latency_text.timeline_lines(view, everything))
    assert time.process_time() - began < 15  # 30 s when the time grew with the square


# --- records and text ---


def test_the_table_fits_a_terminal_and_says_what_was_waited_for() -> None:
    view = latency.LaunchView(found(*two_kernels()))
    sums = summed(view)
    assert [group.title for group in sums.groups] == ["second", "first"]
    lines = latency_text.kernel_table(sums, False)
    assert (
        max(map(len, lines)) <= 80
        and lines[2].split() == "second 1 48.00 48.00 48.00 1.00 47.00 0.00 10.00".split()
    )
    assert list(latency_text.wait_lines(sums)) == ["  second: 1 of 1 waited behind first, 47.0 us on average"]
    by_stream = latency_text.kernel_table(summed(view, "queue"), True)
    assert max(map(len, by_stream)) <= 80 and by_stream[2].split()[:3] == ["second", "1", "1"]
    assert max(map(len, latency_text.histogram(sums))) <= 80


def test_a_host_function_is_named_as_what_was_waited_for() -> None:
    log, device = two_kernels()
    function = log.put(operation_log.HOST_FUNCTION, call_ns=1_003_000, return_ns=1_004_000)
    log.put(operation_log.SPAN, {"span": {"of": function, "start": 1_060_000, "end": 2_060_000}})
    device.ran(log.kernel(1_005_000, 1_006_000), 2_060_000, 2_070_000)
    view = latency.LaunchView(found(log, device))
    assert view.launch(3)["waited_for"] == {"kind": "host_function", "name": "host function"}
    text = " ".join(" ".join(latency_text.wait_lines(summed(view))).split())
    assert "first: 1 of 2 waited behind a host function, 1.05 ms on average" in text
    timeline = list(latency_text.timeline_lines(view, np.arange(len(view.ops))))
    (line,) = (line for line in timeline if line.endswith("host function, after second"))
    assert line.split()[:3] == ["60.00", "1060.00", "1000.0"]


def test_work_does_not_begin_before_its_call() -> None:
    """In an idle stream, the timing event before a kernel is over long before the kernel is launched."""
    log, call, ret = Log(), 1_000_000, 1_060_000
    for at in range(900_000, 1_200_000, 10_000):
        clock = {"host_before": at, "gpu": at, "host_after": at, "tick_ns": 1}
        log.put(operation_log.CLOCK, {"clock": clock})
    for start in (400_000, 1_020_000, 1_061_000):  # before the call, during it, and after it
        stamped = log.kernel(call, ret, outcome=6)
        log.put(operation_log.SPAN, {"span": {"of": stamped, "start": start, "end": 1_070_000}})
    flags = operation_log.SYNCHRONOUS  # its call waited: its own start is not near the return
    copy = log.put(operation_log.D2H, call_ns=call, return_ns=1_071_000, flags=flags)
    log.put(operation_log.SPAN, {"span": {"of": copy, "start": 990_000, "end": 1_070_000}})
    seen = found(log, Device(), virtual=False)
    by_id = np.argsort(seen.ops.id)
    assert seen.ops.start[by_id].tolist() == [1_030_000, 1_040_000, 1_061_000, call]
    for errors in (seen.start_error, seen.exec_error):
        assert all(0 <= error <= 9 for error in errors[by_id] - [30_000, 20_000, 0, 0])
    kernel = seen.ops.kind == operation_log.KERNEL
    assert (np.abs(np.minimum(seen.waits.overhead[kernel], 0)) <= seen.start_error[kernel]).all()
    row = latency_text.kernel_table(summed(latency.LaunchView(seen)), False)[2].split()
    assert row[-2].startswith("<"), row  # unknown, and not below zero


def test_default_streams_of_threads_are_told_apart() -> None:
    log, device = Log(), Device()
    for queue, thread in ((1, 70), (2, 4194304)):
        log.put(operation_log.QUEUE, queue_kind=operation_log.PER_THREAD, queue=queue)
        device.ran(log.kernel(1000, 2000, queue=queue, thread=thread), 2000, 3000)
    device.ran(log.kernel(4000, 5000, queue=3), 5000, 6000)
    view = latency.LaunchView(found(log, device))
    sums = summed(view, "queue")
    assert [group.stream for group in sums.groups] == ["thread 70", "thread 4194304", "1"]
    header, *rows = latency_text.kernel_table(sums, True)[1:]
    assert [row.split()[1] for row in rows] == ["t70", "t4194304", "1"]
    records = [kernel_record(group, by_stream=True) for group in sums.groups]
    assert [record["stream_name"] for record in records] == ["t70", "t4194304", "1"]
    assert [KERNEL_RECORD.row(record)[-1] for record in records] == ["t70", "t4194304", "1"]
    assert {len(row) for row in rows} == {len(header)}
    lines = list(latency_text.timeline_lines(view, np.arange(3)))
    assert [line.split(" of ")[0] for line in lines if "of app" in line] == [
        "thread 70's default stream", "thread 4194304's default stream", "stream 1 (0x0)",
    ]  # fmt: skip


def test_kernels_that_share_a_name_are_told_apart_everywhere() -> None:
    log, device = two_kernels()
    twins = {0: "_Z4gemmILi64EfLb1EEvPT0_", 1: "_Z4gemmILi128EfLb1EEvPT0_"}
    launches = Launches(SLOTS)
    launches.log(LoggedProcess(PID, "app", True, twins, number=PID), log.array())
    launches.reading(process(), device.starts, device.ends, 10**12, True)
    view = latency.LaunchView(launches.columns())
    both, sums = np.arange(2), summed(view)
    rows = latency_text.kernel_table(sums, False)[2:]
    assert [row.split()[0] for row in rows] == ["gemm<128>", "gemm<64>"]
    assert [row.split()[0] for row in latency_text.kernel_table(summed(view, "queue"), True)[2:]] == [
        "gem...8>",
        "gemm<64>",
    ]
    (waits,) = [" ".join(" ".join(latency_text.wait_lines(sums)).split())]
    assert waits.startswith(
        "gemm<128, float, true>(float*): 1 of 1 waited behind gemm<64, float, true>(float*),"
    )
    lines = [latency_text.launch_line(view, at, OwnerColumns()) for at in both.tolist()]
    assert [line.split()[2] for line in lines] == ["gemm<64>", "gemm<128>"]
    timeline = "\n".join(latency_text.timeline_lines(view, both))
    assert "gemm<128>, after gemm<64>" in timeline
    slow = " ".join("\n".join(latency_text.slow_stories(view, both, both, 1, OwnerColumns())).split())
    assert "behind gemm<64, float, true>(float*)" in slow


def test_of_several_processes_rows_and_lines_say_whose_they_are() -> None:
    launches = Launches(SLOTS)
    for pid, gpu in ((7, 0), (4194304, 1), (4194303, 0)):
        one = LoggedProcess(pid, "a" * 15, True, {0: "first", 1: "second" * 9}, {0: gpu}, number=pid % 1000)
        log, device = two_kernels()
        records = log.array()
        records["id"] += np.uint64((one.number << 40) - FIRST)
        launches.log(one, records)
        launches.reading(one, device.starts, device.ends, 10**12, True)
    view = latency.LaunchView(launches.columns())
    sums, everything = summed(view, "queue"), np.flatnonzero(view.ops.kind == dependencies.Kind.KERNEL)
    whose = OwnerColumns().see(view.owners(everything))
    assert whose.processes and whose.gpus
    rows = latency_text.kernel_table(sums, True, whose)
    assert rows[1].split()[:5] == ["PID", "COMM", "GPU", "KERNEL", "STREAM"]
    assert sorted((row.split()[0], row.split()[2]) for row in rows[2:]) == sorted(
        2 * [("7", "0"), ("4194304", "1"), ("4194303", "0")]
    )
    lines = [latency_text.launch_line(view, at, whose) for at in view.by_call(everything).tolist()]
    said = [
        *latency_text.wait_lines(sums, whose),
        *latency_text.slow_threads(view, everything, everything, whose),
    ]
    assert len(latency_text.slow_threads(view, everything, everything, whose)) == 1 + 3  # each with TID 70
    assert max(map(len, (latency_text.launch_header(whose), *rows, *lines, *said))) <= 80
    assert {line.split()[1] for line in lines} == {"7", "4194304", "4194303"}
    gpus = OwnerColumns().see([view.owner(at) for at in everything.tolist() if view.owner(at).pid == 7])
    assert not gpus.several and "PID" not in latency_text.launch_header(gpus)
    for only in (gpus, OwnerColumns(True), OwnerColumns().see([Owner(7, "a", 0), Owner(7, "a", 1)])):
        line = latency_text.launch_line(view, int(everything[1]), only)
        assert len(latency_text.launch_header(only)) == len(line) <= 80


def test_what_waits_for_work_from_before_the_attachment_is_said_to_be_unknown() -> None:
    log, device = two_kernels()

    def seen(before: bool, forgotten: bool = False) -> latency.LaunchView:
        records = log.array()
        records["flags"][0] = operation_log.FROM_BEFORE if before else 0
        launches = Launches(SLOTS)
        launches.log(process(), records)
        if forgotten:
            launches._note_work(process(), records[1:2])
        launches.reading(process(), device.starts, device.ends, 10**12, True)
        return latency.LaunchView(launches.columns())

    view = seen(before=True)
    first, second = np.flatnonzero(view.ops.kind == dependencies.Kind.KERNEL).tolist()
    assert view.launch(first)["wait_ns"] is None and view.launch(first)["overhead_ns"] is None
    assert view.launch(second)["wait_ns"] == 47_000
    losses = LaunchLosses()
    losses.add(view, np.array([first, second]))
    assert losses.fields(0)["launches_behind_unseen"] == 1
    said = " ".join(latency_text.finding(summed(view)))
    assert said.startswith("1 of 2 launches took 48.0 us in total to start: ")
    assert said.endswith("1 launch is left out of this: its wait or latency is unknown")
    assert "1 launch may have waited for work from before" in latency_text.loss_lines(losses.fields(0))[0]
    for view in (seen(before=False), seen(before=True, forgotten=True)):
        assert view.launch(first)["wait_ns"] == 0


def test_records_have_the_promised_fields() -> None:
    view = latency.LaunchView(found(*two_kernels()))
    launch = view.launch(1)
    promised = """type launch kernel tid stream graph call_ns return_ns start_ns end_ns latency_ns api_ns wait_ns overhead_ns
        exec_ns waited_for method pid comm gpu"""
    assert set(promised.split()) <= set(launch)
    assert launch["waited_for"] == {"kind": "kernel", "name": "first"} and launch["method"] == "device"
    record = kernel_record(summed(view).groups[0], True)
    assert record["latency_ns"] == {"mean": 48000, "p50": 48000, "p99": 48000, "max": 48000}
    assert record["stream"] == "0x0" and record["clock_error_ns"] == 0 and record["count"] == 1
    assert set("type t_ns dur_ns op name stream tid bytes".split()) <= set(view.operation(0))


def test_what_is_less_than_its_error_is_not_shown_as_if_it_were_known() -> None:
    assert [latency_text.at_least(*pair) for pair in ((5000, 700), (500, 700), (None, 700), (5, 0))] == [
        "5.00", "<0.70", "-", "0.01",
    ]  # fmt: skip
    assert [latency_text.us(ns) for ns in (0, 99_994, 123_456, 12_345_678, 5_000_000_000, 70_000_000_000_000)] == [
        "0.00", "99.99", "123.5", "12.3ms", "5.00s", "70000s",
    ]  # fmt: skip
    assert [latency_text.with_unit(ns) for ns in (None, 752, -752, 47_000, 4_003_200, 22_767_000)] == [
        "-", "752 ns", "-752 ns", "47.0 us", "4.00 ms", "22.8 ms",
    ]  # fmt: skip
    assert [latency_text.exactly(us) for us in (10, 1234, 100_000)] == ["10 us", "1.234 ms", "100 ms"]


def test_percentiles_are_values_that_occurred() -> None:
    assert ValueCounts(np.arange(1, 101)).distribution() == {"mean": 50, "p50": 50, "p99": 99, "max": 100}
    assert ValueCounts(np.array([NONE, 7])).distribution() == {"mean": 7, "p50": 7, "p99": 7, "max": 7}
    assert ValueCounts(np.array([NONE])).distribution() is None


def test_of_many_values_percentiles_are_right_to_a_percent() -> None:
    values = np.random.default_rng(3).lognormal(10, 3, 200_000).astype(np.int64) - 5000
    tally = ValueCounts()
    for part in np.split(values, 8):
        tally.add(part)
    found, ordered = tally.distribution(), np.sort(values)
    assert found and tally.count == len(values)
    assert (found["max"], found["mean"]) == (ordered[-1], round(values.sum() / len(values)))
    for name, percent in (("p50", 50), ("p99", 99)):
        exact = int(ordered[len(values) * percent // 100 - 1])
        assert abs(found[name] - exact) <= 0.005 * exact
    assert len(tally._values) < 16_000


def in_parts() -> tuple[LaunchSums, LaunchLosses, Launches]:
    """4,000 launches in two streams, read in parts; a kernel before them runs until the end."""
    log, device, launches = Log(), Device(), Launches(SLOTS)
    sums, losses = LaunchSums(("queue",)), LaunchLosses()
    app = process()

    def look(last: bool) -> None:
        view = latency.LaunchView(launches.columns())
        new = launches.fresh(view.columns, last)
        sums.add(view, new[view.columns.wanted[new]])
        losses.add(view, new)
        launches.forget()

    for queue in (1, 2, 3):
        log.put(operation_log.QUEUE, queue_kind=operation_log.NON_BLOCKING, queue=queue)
    log.kernel(1000, 2000, slot=1, queue=3)
    at = 1_000_000
    for n in range(4000):
        device.ran(log.kernel(at, at + 1000, queue=1 + n % 2), at + 5000 + n, at + 9000 + n)
        at += 20_000
        if n % 20 == 19:
            launches.log(app, log.array())
            launches.reading(app, device.starts, device.ends, at, True)
            log.gave()
            if launches.full:
                look(False)
    look(True)
    return sums, losses, launches


def test_launches_that_are_forgotten_stay_in_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading in parts or at once yields the same launches and sums, and bounded memory."""
    at_once, lost, _ = in_parts()
    monkeypatch.setattr("gpubpf.launches.launches.KEPT", 64)
    monkeypatch.setattr("gpubpf.launches.launches.FULL", 256)
    sums, lost_in_parts, launches = in_parts()
    records = [[kernel_record(group, True) for group in of.groups] for of in (sums, at_once)]
    assert records[0] == records[1] and sum(record["count"] for record in records[0]) == 4001
    assert [group.title for group in sums.groups] == ["first", "first", "second"]
    assert lost_in_parts.fields(0) == lost.fields(0)
    assert sum(len(part) for _, part in launches._records) <= 256 and len(launches._told) <= 256


def crowd(log: Log, of: str) -> None:
    """Add 700 records of a kind that no launch needs."""
    for n in range(700):
        if of == "captured":
            log.kernel(0, 0, queue=2, flags=operation_log.CAPTURED)
        elif of == "failed":
            log.kernel(0, 0, queue=2, result=719)
        elif of == "clock":
            log.put(operation_log.CLOCK, CLOCK)
        elif of == "node":
            log.put(operation_log.NODE, {"kernel": {"exec": 5 + n}})
        else:
            log.put(operation_log.EDGE, {"edge": {"exec": 5 + n}})


@pytest.mark.parametrize("of", ["captured", "failed", "clock", "node", "edge"])
def test_streams_and_graphs_are_not_forgotten_while_they_are_used(
    of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"KEPT": 16, "OPEN": 64, "READINGS": 32, "MOST_EDGES": 64}.items():
        monkeypatch.setattr(f"gpubpf.launches.launches.{name}", value)
    log, device, launches, app = Log(), Device(), Launches(SLOTS), process()
    log.put(operation_log.QUEUE, queue=1, queue_kind=operation_log.BLOCKING)
    log.put(operation_log.QUEUE, queue=2, queue_kind=operation_log.NON_BLOCKING)
    log.put(operation_log.EDGE, {"edge": {"exec": 3, "before": 0, "after": 1}})
    for n in range(5):
        call = 1_000_000 * (n + 1)
        device.ran(log.kernel(call, call + 1000), call + 1000, call + 100_000)
        graph = {"graph": {"exec": 3, "replay": n + 1, "kernels": 2}}
        log.put(operation_log.GRAPH, graph, call_ns=call + 2000, return_ns=call + 3000, queue=2)
        for node in range(2):
            part = {"exec": 3, "replay": n + 1, "node": node}
            of_graph = {"flags": operation_log.GRAPH_NODE, "queue": 2, "kernel": part}
            launch = log.kernel(call + 2000, call + 3000, **of_graph)
            device.ran(launch, call + 10_000 * node + 3000, call + 10_000 * node + 13_000)
        launches.log(app, log.array())
        launches.reading(app, device.starts, device.ends, call + 500_000, True)
        seen = launches.columns()
        launches.fresh(seen, last=False)
        assert [kind.name for kind in seen.ops.queues] == ["BLOCKING", "NON_BLOCKING"], n
        # The graph does not wait for the other stream, and its second kernel waits for the first.
        assert (
            seen.waits.wait[-3:].tolist() == [0, 0, 10_000] and seen.waits.waited_for[-1] == len(seen.ops) - 2
        )
        launches.forget()
        assert len(launches._lasting[id(app)].records()) <= 2 + 64 + 32
        assert sum(len(part) for _, part in launches._records) <= 16
        log.gave()
        crowd(log, of)
    launches.log(app, log.array())
    log.gave()
    app.ended = True
    launches.fresh(launches.columns(), last=False)
    launches._records = []
    launches._count = 64
    launches.forget()
    assert not launches._lasting


@pytest.mark.parametrize(("pause", "said"), [(2000, True), (900_000, False)])
def test_many_short_launches_in_a_row_would_gain_from_a_graph(pause: int, said: bool) -> None:
    log, device = Log(), Device()
    at = 1_000_000
    for _ in range(14):
        device.ran(log.kernel(at, at + 20_000), at + 350_000, at + 360_000)
        log.put(
            operation_log.SYNC, {"sync": {"what": operation_log.CONTEXT}}, call_ns=at, return_ns=at
        ) if not said else None
        at += 20_000 + pause if not said else 355_000
    if said:  # the launch path is the bottleneck, not the host
        for record in log.records:
            record["return_ns"] = record["call_ns"] + 354_000
    view = latency.LaunchView(found(log, device))
    rows = latency.graph_candidates(view, np.flatnonzero(view.columns.wanted))
    text = " ".join(latency_text.graph_hint(summed(view)))
    assert bool(rows) == said and ("14 launches in a row" in text) == said
    if said:
        assert rows[0].took == 13 * 355_000 + 360_000 and rows[0].busy == 140_000


@pytest.mark.parametrize(
    ("what", "thread", "said"),
    [
        (operation_log.CONTEXT, 70, False),
        (operation_log.EVENT, 70, False),
        (operation_log.STREAM, 70, False),
        (operation_log.CONTEXT, 71, True),
    ],
)
def test_launches_that_the_host_waits_for_one_by_one_are_no_graph(what: int, thread: int, said: bool) -> None:
    log, device = Log(), Device()
    for n in range(20):
        call = 1_000_000 + 26_000 * n
        device.ran(log.kernel(call, call + 20_000), call + 19_500, call + 21_500)
        queue = 1 if what == operation_log.STREAM else 0
        wait = {"call_ns": call + 20_500, "return_ns": call + 24_000, "queue": queue, "thread": thread}
        log.put(operation_log.SYNC, {"sync": {"what": what}}, **wait)
    view = latency.LaunchView(found(log, device))
    assert bool(latency.graph_candidates(view, np.flatnonzero(view.columns.wanted))) == said


class Blocked:
    """A host thread that was blocked all the time."""

    def explain(self, thread: int, start_ns: int, end_ns: int) -> list[tuple[str, int]]:
        assert thread == PID << 32 | 70
        return [("off-CPU, blocked in futex", end_ns - start_ns)]


def test_slow_launches_are_told_one_by_one_and_by_thread() -> None:
    view = latency.LaunchView(found(*two_kernels()), Blocked())
    chosen = np.flatnonzero(view.columns.wanted)
    slow = latency.slower(view, chosen, 10_000)
    text = "\n".join(latency_text.slow_stories(view, slow, chosen, 10, OwnerColumns()))
    assert text.startswith("1 of 2 launches took more than 10 us to start")
    assert "T+2.0 us  second: 48.0 us" in text and "47.0 us behind first" in text
    assert "meanwhile the thread: off-CPU, blocked in futex 48.0 us" in text
    assert text.splitlines()[-1].split()[:5] == ["70", "1", "2", "48.00", "48.00"]
    assert max(map(len, text.splitlines())) <= 80
    assert view.launch(int(slow[0]))["meanwhile"] == [{"what": "off-CPU, blocked in futex", "ns": 48000}]


def test_long_names_fit_a_terminal() -> None:
    log, device = two_kernels()
    app = LoggedProcess(PID, "app", True, {0: f"_Z200{'a' * 200}Pi", 1: f"_Z200{'b' * 200}Pi"}, number=PID)
    launches = Launches(SLOTS)
    launches.log(app, log.array())
    launches.reading(app, device.starts, device.ends, 10**12, True)
    view = latency.LaunchView(launches.columns())
    both = np.arange(2)
    sums = summed(view)
    text = [
        *latency_text.slow_stories(view, both, both, 1, OwnerColumns()),
        *latency_text.timeline_lines(view, both),
    ]
    text += [*latency_text.wait_lines(sums), *latency_text.kernel_table(summed(view, "queue"), True)]
    sums.stacks[("c" * 200,)] += 1
    losses = dict.fromkeys(
        (
            "launches_running",
            "launches_lost",
            "launches_lost_by_failure",
            "launches_lost_by_exit",
            "launches_behind_unseen",
            "launches_untimed",
            "operations_lost",
        ),
        10**9,
    )
    text += [*latency_text.stack_lines(sums), *latency_text.loss_lines(losses)]
    assert max(map(len, text)) <= 80 and "waited behind aaaa" in " ".join(" ".join(text).split())


def test_a_timeline_tells_each_streams_story() -> None:
    log, device = two_kernels()
    copy = log.put(operation_log.D2H, {"copy": {"bytes": 4096}}, call_ns=1_003_000, return_ns=1_070_000)
    log.put(operation_log.SPAN, {"span": {"of": copy, "start": 1_060_000, "end": 1_061_000}})
    log.put(
        operation_log.SYNC, {"sync": {"what": operation_log.CONTEXT}}, call_ns=1_070_000, return_ns=1_071_000
    )
    view = latency.LaunchView(found(log, device))
    lines = list(latency_text.timeline_lines(view, np.arange(len(view.ops))))
    assert max(map(len, lines)) <= 80
    assert [line.split()[:3] for line in lines[2:5]] == [
        ["1.00", "50.00", "49.00"], ["50.00", "60.00", "10.00"], ["60.00", "61.00", "1.00"],
    ]  # fmt: skip
    assert "second, after first" in lines[3] and "D->H 4,096 bytes" in lines[4]
    assert any("synchronize context" in line for line in lines)


def graph_of_three() -> tuple[Log, Device]:
    """Return a graph launch with a call of 1 us and three kernels, one behind the other, of 2 us each."""
    log, device = Log(), Device()
    first = FIRST + 100
    for node in range(3):
        fields = {"exec": 5, "replay": 1, "node": node}
        log.kernel(1000, 2000, id=first + node, flags=operation_log.GRAPH_NODE, kernel=fields)
        device.ran(first + node, 2000 + 2000 * node, 4000 + 2000 * node)
        if node:
            log.put(operation_log.EDGE, {"edge": {"exec": 5, "before": node - 1, "after": node}})
    graph = {"exec": 5, "replay": 1, "first": first, "kernels": 3}
    log.put(operation_log.GRAPH, {"graph": graph}, call_ns=1000, return_ns=2000)
    return log, device


def test_the_call_of_a_graph_counts_once() -> None:
    view = latency.LaunchView(found(*graph_of_three()))
    kernels = np.flatnonzero(view.columns.wanted)
    assert view.waits.latency[kernels].tolist() == [1000, 3000, 5000]
    sums = LaunchSums()
    sums.add(view, kernels)
    assert dict(sums.whole) == {"count": 3, "calls": 1, "api": 1000, "wait": 6000, "overhead": 0, "error": 0}
    line, rest, note = latency_text.finding(sums)
    assert f"{line} {rest.strip()}".startswith(
        "3 launches by 1 call took 7.00 us in total to start: 86 % behind earlier work, 14 %"
    )
    assert note == "the call of a graph counts once here, and in API for each of its kernels"
    row = latency_text.kernel_table(sums, False)[2].split()
    assert row[0] == "first" and row[1] == "3" and row[5] == "1.00"


def test_latencies_below_the_clock_error_are_no_finding() -> None:
    clock = {"host_before": 900_000, "gpu": 950_000, "host_after": 1_000_000, "tick_ns": 1}
    for start, said in ((1_002_000, False), (1_200_000, True)):
        log, device = Log(), Device()
        log.put(operation_log.CLOCK, {"clock": clock})
        device.ran(log.kernel(1_000_000, 1_001_000), start, start + 1000)
        device.ran(log.kernel(2_000_000, 2_001_000), 1_990_000, 1_999_000)  # seems to start before its call
        view = latency.LaunchView(found(log, device, virtual=False))
        sums = summed(view)
        assert sums.whole["error"] >= 2 * 50_000 and min(sums.whole[part] for part in latency.SPLIT) >= 0
        assert bool(list(latency_text.finding(sums))) == said
        second = latency_text.launch_line(view, 1, OwnerColumns()).split()
        assert second[-2].startswith("<")  # OVERHEAD


def test_one_start_with_a_large_clock_error_hides_no_other_latency() -> None:
    log, device = Log(), Device()
    log.put(
        operation_log.CLOCK,
        {"clock": {"host_before": 900_000, "gpu": 950_000, "host_after": 1_000_000, "tick_ns": 1}},
    )
    for call in (
        1_000_000,
        2_000_000,
        3_000_000,
        10_000_000_000,
    ):  # the last is far from the reading of the clock
        device.ran(log.kernel(call, call + 1000), call + 300_000, call + 301_000)
    row = latency_text.kernel_table(summed(latency.LaunchView(found(log, device, virtual=False))), False)[2]
    _, count, p50, p99, most, *_ = row.split()
    assert count == "4" and p50 == "300.0" and p99.startswith("<") and most.startswith("<")


def test_notes_about_memory_are_not_shown_as_calls() -> None:
    log, device = two_kernels()
    log.put(operation_log.API, {"api": {"function": 3, "name": b"cuMemAlloc"}}, call_ns=1, return_ns=2)
    log.put(
        operation_log.API, {"api": {"function": NO_FUNCTION, "name": b"variable"}}, call_ns=2, return_ns=2
    )
    view = latency.LaunchView(found(log, device))
    assert [view.name(at) for at in view.listed(np.arange(4)).tolist()] == ["first", "second", "cuMemAlloc"]


def test_in_a_timeline_a_graph_lasts_until_its_last_kernel_has_ended() -> None:
    view = latency.LaunchView(found(*graph_of_three()))
    lines = list(latency_text.timeline_lines(view, np.arange(len(view.ops))))
    assert [line.split()[:4] for line in lines if "graph" in line and "node" not in line] == [
        ["0.00", "7.00", "7.00", "graph"]
    ]


def test_slices_of_a_trace_lie_behind_inside_or_beside_each_other(tmp_path: Path) -> None:
    trace = perfetto.Trace(str(tmp_path / "trace.json"))
    assert trace.place(1, 1, 0, 100) == (0, 0)
    assert trace.place(1, 1, 10, 50) == (0, 10)  # inside
    assert trace.place(1, 1, 20, 60) == (1, 20)  # at the same time
    assert trace.place(1, 1, 95, 120, (5, 0)) == (0, 100)  # moved behind the other, within its error
    assert trace.place(1, 1, 110, 130, (5, 0)) == (1, 110)
    assert trace.place(1, 2, 110, 130) == (0, 110)  # another stream


def test_a_trace_that_viewers_understand(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    view = latency.LaunchView(found(*two_kernels()))
    trace = perfetto.Trace(str(path))
    latency.write_trace(view, trace, np.arange(len(view.ops)))
    trace.close()
    loaded = json.loads(path.read_text())
    assert list(gpubpf_traces.problems(loaded)) == []
    events = loaded["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert [(event["ts"], event["dur"]) for event in kernels] == [(1001.0, 49.0), (1050.0, 10.0)]
    assert sum(event["ph"] == "f" for event in events) == 2
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} >= {"stream 1", "app 70"}


def test_timelines_and_traces_name_the_vendors_of_gpus(tmp_path: Path) -> None:
    launches = Launches(SLOTS)
    for number, vendor in enumerate(Vendor, 1):
        of = LoggedProcess(number, "app", True, {0: "_Z5firstPi"}, number=number, vendor=vendor)
        log, device = two_kernels()
        launches.log(of, log.array())
        launches.reading(of, device.starts, device.ends, 10**12, True)
    view = latency.LaunchView(launches.columns())
    everything = np.arange(len(view.ops))
    titles = [line for line in latency_text.timeline_lines(view, everything) if "GPU 0" in line]
    assert sorted(title.split(", ")[1] for title in titles) == ["AMD GPU 0", "NVIDIA GPU 0"]
    trace = perfetto.Trace(str(tmp_path / "trace.json"))
    latency.write_trace(view, trace, everything)
    trace.close()
    text = (tmp_path / "trace.json").read_text()
    assert "app (pid 1) on NVIDIA GPU 0" in text and "app (pid 2) on AMD GPU 0" in text


def test_full_names_of_kernels_that_the_table_shortens() -> None:
    """Each shortened name once, with the name that c++filt gives; other titles are no kernels."""
    one = {"node": "", "waited": {}, "title": "graph"}
    long, other = "_ZN9multigrid5relaxIfEEvPT_", "_ZN9multigrid5relaxIdEEvPT_"
    groups = [SimpleNamespace(**one, mangled=mangled) for mangled in (long, other, "scale", None)]
    said = list(latency_text.full_names(SimpleNamespace(groups=groups), 16))
    names = latency_text.group_titles(SimpleNamespace(groups=groups), 16)
    assert max(map(len, names)) <= 16 and len(set(names)) == 4
    assert said == [
        f"  {names[0]}: void multigrid::relax<float>(float*)",
        f"  {names[1]}: void multigrid::relax<double>(double*)",
    ]

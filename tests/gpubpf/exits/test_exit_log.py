"""Reports and lines from made-up logs, rings and readings of a session; what is missing is counted."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpubpf.ebpf.maps import GROUPS, SAMPLED
from gpubpf.ebpf.sampling import Sampling
from gpubpf.exits import exit_log
from gpubpf.exits.exit_log import ExitLog
from gpubpf.exits.lateness import CLOCK_BITS, CLOCK_MASK, ROUNDS, SAMPLE_GROUPS
from gpubpf.inject.values import Site
from gpubpf.lower.programs import load
from gpubpf.record import replace
from gpubpf.records import kernel_shapes, operation_log
from gpubpf.records.kernel_shapes import KernelShape, site_names
from gpubpf.records.launch_shape import Shape
from gpubpf.records.results import ProcessLog, Reading, RingRecords
from gpubpf.show import cli
from gpubpf.tools import kernelretsnoop

RECORD = np.dtype(
    [("clock", "<u8"), ("time", "<u8"), ("launch", "<u8"), ("thread", "<u4"), ("sm", "<u2"), ("site", "<u2")]
)
EVERY = ((0, 2**32 - 1),) * 3
PID = 77


def log(*launches: int, virtual: bool = True, brackets: int = 0, fault: bool = False) -> ProcessLog:
    """Return launches of `_Z5scalePf` with 2 blocks of 64 threads, and clock brackets 5 us wide; the GPU is 1 ms behind the host."""
    made = np.zeros(len(launches) + brackets + fault, operation_log.DTYPE)
    for at, number in enumerate(launches):
        made[at]["id"], made[at]["kind"] = number, operation_log.KERNEL
        made[at]["kernel"]["grid"], made[at]["kernel"]["block"] = (2, 1, 1), (64, 1, 1)
    for k in range(brackets):
        row = made[len(launches) + k]
        row["kind"] = operation_log.CLOCK
        gpu = 10**6 * (k + 1)
        row["clock"]["host_before"], row["clock"]["gpu"] = gpu + 10**6 - 2500, gpu
        row["clock"]["host_after"], row["clock"]["tick_ns"] = gpu + 10**6 + 2500, 1
    if fault:
        made[-1]["kind"] = operation_log.FAULT
    return ProcessLog(PID, "app", made, 0, virtual, {0: "_Z5scalePf"}, {0: 0}, {}, False)


def ring(launch: int, threads: Any, times: Any) -> RingRecords:
    records = np.zeros(len(threads), RECORD)
    records["launch"], records["thread"] = launch, threads
    records["clock"] = records["time"] = times
    return RingRecords(PID, "app", 0, 0, records, {})


def reading(process: int, launches: int, comm: str = "app") -> Reading:
    """Return the maps of a process after so many launches of `_Z5scalePf` with 2 blocks of a warp, whose lanes exit together."""
    maps = load(kernelretsnoop.PROGRAM).program.maps
    firsts, rests = (np.zeros((ROUNDS, 2), maps[name].value_dtype) for name in ("firsts", "rests"))
    blocks = np.zeros((1, 2), maps["blocks"].value_dtype)
    for number in range(max(1, launches - ROUNDS + 1), launches + 1):
        clock, rounds = 10**6 * number, blocks["rounds"][0, :, number % ROUNDS]
        firsts[number % ROUNDS] = number << CLOCK_BITS | (~clock & CLOCK_MASK)
        rounds["clock"], rounds["time"], rounds["launch"] = clock, clock, number
        rounds["sm"] = 0, 1
    blocks["exits"] = launches
    chosen = np.zeros((GROUPS, 1), np.uint64)
    chosen[process] = 2 * launches
    arrays = {"firsts": firsts, "rests": rests, "blocks": blocks, SAMPLED: chosen}
    arrays["groups"] = np.zeros((SAMPLE_GROUPS * 32, 1), np.uint64)
    for name in ("lateness", "wholes"):
        arrays[name] = np.zeros((maps[name].max_entries, 1), maps[name].value_dtype)
    place = {"process": process, "pid": PID, "comm": comm, "gpu": 0, "mangled": "_Z5scalePf", "wave": None}
    place |= {"grid": (2, 1, 1), "block_dim": (32, 1, 1), "shape": Shape((2, 1, 1), (32, 1, 1))}
    instances: Any = {
        name: [SimpleNamespace(**place, launches=launches, idle=True, array=array)]
        for name, array in arrays.items()
    }
    return Reading(PID, comm, 0, 1, 0, True, instances, {}, process)


def session(
    logs: list[ProcessLog],
    rings: list[RingRecords],
    stopped: bool = False,
    readings: tuple[Reading, ...] = (),
) -> Any:
    return SimpleNamespace(
        logs=lambda: logs,
        rings=lambda name: rings,
        readings=lambda *names: readings,
        instances=lambda name: [one for reading in readings for one in reading.instances[name]],
        stopped=stopped,
        ring_counts=lambda name: [],
    )


def test_records_may_come_before_their_launch_and_in_parts() -> None:
    found = ExitLog(True, EVERY, EVERY)
    thread = np.arange(128)
    times = 1000 + 40 * (thread == 31)
    found.take(session([], [ring(5, thread[:50], times[:50])]))
    found.take(session([], [ring(5, thread[50:], times[50:])]))
    assert not list(found.reports(since_last=False))
    found.take(session([log(5)], []))
    ((place, report),) = found.reports(since_last=True)
    assert (place.grid, place.block_dim, place.mangled) == ((2, 1, 1), (64, 1, 1), "_Z5scalePf")
    assert (report.launches, report.exits, report.complete, report.lanes[31].late.max) == (1, 128, 1, 40)
    found.take(session([log(6)], [ring(6, thread, thread * 0)]))
    ((_, report),) = found.reports(since_last=True)
    assert (report.launches, report.lanes[31].late.max) == (1, 0)


@pytest.mark.parametrize("since_last", [False, True], ids=["whole run", "intervals"])
def test_a_process_that_executes_another_program_is_the_sum_of_both(since_last: bool) -> None:
    """The second program has the same kernel, and numbers its launches from 1 again."""
    found, reports = ExitLog(False, EVERY, EVERY), []
    for one in (reading(1, 5), reading(2, 3), reading(2, 4)):
        found.take(session([], [], readings=(one,)))
        reports += [report for _, report in found.reports(since_last)]
    launches = [5, 3, 1] if since_last else [5, 8, 9]
    assert [(report.launches, report.exits, report.complete) for report in reports] == [
        (count, count * 64, count) for count in launches
    ]


def test_the_samples_of_programs_with_the_same_pid_add_up() -> None:
    """With the same name, that is; of the third one, the kernel has a report of its own."""
    found = ExitLog(False, EVERY, EVERY, sampling=Sampling("block", 1, 0))
    some = session([], [], readings=(reading(1, 5), reading(2, 3), reading(3, 2, comm="other")))
    found.take(some)
    reports = {kernel.comm: report for kernel, report in found.reports(since_last=True, session=some)}
    for comm, launches, processes in (("app", 8, 2), ("other", 2, 1)):
        sample = reports[comm].sample
        assert sample is not None and (sample.units, sample.count) == (2 * launches, 2 * launches)
        assert np.count_nonzero(sample.chosen) == processes
    some = session([], [], readings=(reading(1, 5), reading(2, 7), reading(3, 2, comm="other")))
    found.take(some)
    ((_, report),) = found.reports(since_last=True, session=some)
    assert report.sample is not None and (report.sample.units, report.sample.count) == (8, 8)


def test_clocks_of_programs_with_the_same_pid_are_not_compared() -> None:
    """The second program uses another GPU, whose clocks have counted for longer."""
    found = ExitLog(False, EVERY, EVERY)
    for process in (1, 2):
        made = replace(log(brackets=200, virtual=False), process=process)
        clock = made.records["clock"]
        clock["clock64"] = 2 * clock["gpu"] + process * 10**8
        found.take(session([made], []))
    kernel = KernelShape(PID, "app", 0, "_Z5scalePf", (2, 1, 1), (64, 1, 1))
    assert found._rate(kernel).ns == pytest.approx(0.5)


def test_names_and_gpus_may_come_later_than_the_log() -> None:
    """Names and GPUs come separately from the log. Until then no launch is attributed to a wrong kernel or GPU."""
    found, thread = ExitLog(True, EVERY, EVERY), np.arange(128)
    early = replace(log(5), names={}, gpus={})
    found.take(session([early], [ring(5, thread, thread)]))
    assert not list(found.reports(since_last=False))
    nothing = replace(early, records=early.records[:0], names={0: "_Z5scalePf"}, gpus={0: 1})
    found.take(session([nothing], []))
    ((place, report),) = found.reports(since_last=False)
    assert (place.mangled, place.gpu, report.exits, report.complete) == ("_Z5scalePf", 1, 128, 1)


def test_kernels_that_share_a_name_are_told_apart() -> None:
    found, thread = ExitLog(True, EVERY, EVERY), np.arange(128)
    twins = ["_Z4twinILi3EiEvPT0_", "_Z4twinILi4EiEvPT0_", "_Z5scalePf"]
    for number, name in enumerate(twins):
        made = replace(log(number), names={0: name}, process=number)
        mine = replace(ring(number, thread, thread), process=number)
        found.take(session([made], [mine]))
    titles = sorted(found.title(place, False) for place, _ in found.reports(since_last=False))
    assert titles == ["scale", "twin<3, int>(int*)", "twin<4, int>(int*)"]


def test_what_cannot_be_told_is_counted() -> None:
    """A launch that the log dropped, thread numbers that do not exist, and a launch that never ended."""
    found = ExitLog(True, EVERY, EVERY)
    thread = np.arange(128)
    rings = [
        ring(9, thread, thread),
        ring(5, np.append(thread[:100], [4_000_000_000]), np.append(thread[:100] * 0, 5)),
    ]
    found.take(session([log(5, fault=True)], rings))
    assert not list(found.reports(since_last=False))
    found.take(session([], [], stopped=True))
    ((_, report),) = found.reports(since_last=False)
    assert report.exits == 96 and report.complete == 0  # three complete warps
    losses = found.losses(session([], []))
    assert losses["records_unknown"] == 128 and losses["faults"] == [PID]
    assert [line.split(":")[0] for line in found.loss_lines(losses)] == [
        f"pid {PID}",
        "records skipped because their launch or time is unknown",
    ]


def test_launches_that_failed_do_not_count() -> None:
    found, thread = ExitLog(True, EVERY, EVERY), np.arange(128)
    made = log(5, 6, 7)
    made.records["result"][1:] = 719
    found.take(session([made], [ring(5, thread, thread)]))
    ((_, report),) = found.reports(since_last=False)
    assert (report.launches, report.complete, found.shapes.of_launch.keys()) == (1, 1, {(0, 5)})


@pytest.mark.parametrize("recorded", [True, False])
def test_what_was_lost_is_said_in_its_unit(recorded: bool) -> None:
    """Next to a number of launches, a number alone would be taken for launches, too."""
    summary = {"launches_seen": 8, "launches_matched": 8, "launches_instrumented": 4, "lost": 64}
    summary |= {"not_instrumented": {"launch failed": 4}}
    shard = SimpleNamespace(shard=2, received=192, lost=10, incomplete=3)
    some = session([], [])
    some.summary = lambda: summary
    some.ring_counts = lambda name: [SimpleNamespace(shards=[shard])]
    record, lines = ExitLog(recorded, EVERY, EVERY).summary(some)
    assert record["lost"] == 64
    text = " ".join(" ".join(lines).split())
    assert text.startswith(
        "counted 4 of 8 matching launches (8 in total) not counted: 4 (launch failed) lost: "
    )
    if recorded:  # the other lines are about records in the ring
        assert (
            "lost: exits of the counted launches, at most 51, because a kernel or process failed, or a"
            in text
        )
        assert "ring was full: 10 (SM 2: 10)" in text and "not finished: at most 3" in text
    else:
        assert (
            "lost: counted launches, or exits of them, at most 64, because a kernel or process failed,"
            in text
        )


@pytest.mark.parametrize("heats", [False, True])
def test_garbage_in_records_does_no_harm(heats: bool, tmp_path: Any) -> None:
    """Data from the traced process is untrusted."""
    random = np.random.default_rng(5)
    out = cli.Output(str(tmp_path / "out"))
    found = ExitLog(True, EVERY, EVERY, heats, exit_log.ExitPrinter(out, "json" if heats else "text"))
    for turn in range(30):
        junk = np.frombuffer(random.bytes(RECORD.itemsize * 200), RECORD).copy()
        junk["launch"] = random.integers(4, 7, 200)
        junk["thread"] %= np.uint32([1, 100, 128, 2**31][turn % 4])
        virtual = turn < 15
        logs = [log(5, 6, brackets=1, virtual=virtual)]
        found.take(session(logs, [RingRecords(PID, "app", 0, 0, junk, {})]))
        list(found.reports(since_last=False))
    found.take(session([], [], stopped=True))
    list(found.reports(since_last=True))
    assert found.unknown > 0 and (tmp_path / "out").read_text().count("scale") > 100


def test_launches_that_never_become_whole_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_log, "MOST_PENDING", 3)
    found = ExitLog(True, EVERY, EVERY)
    numbers = list(range(1, 11))
    found.take(session([log(*numbers)], [ring(n, np.arange(64), np.arange(64)) for n in (*numbers, 99)]))
    assert len(found._pending) == 3
    ((_, report),) = found.reports(since_last=False)
    assert report.exits == 8 * 64


@pytest.mark.parametrize("virtual", [True, False])
def test_times_are_the_host_s(virtual: bool) -> None:
    told: list[Any] = []
    found = ExitLog(True, EVERY, EVERY, each=lambda *one: told.append(one))
    thread = np.arange(128)
    found.take(session([log(5, virtual=virtual, brackets=20)], [ring(5, thread, 8_000_000 + thread)]))
    ((_, records, times),) = told
    offset = 0 if virtual else 1_000_000
    assert len(records) == 128 and np.abs(times - (8_000_000 + thread + offset)).max() <= 2500


@pytest.mark.parametrize("heats", [False, True], ids=["at once", "launch by launch"])
def test_each_program_with_the_same_pid_has_its_own_clocks(heats: bool) -> None:
    """GPU 0 of the second program is another one: its timer is 1 s further behind the host, and ticks every 32 ns."""
    told: list[Any] = []
    found = ExitLog(True, EVERY, EVERY, heats, each=lambda *one: told.append(one))
    logs = [replace(log(5, virtual=False, brackets=20), process=number) for number in (1, 2)]
    clocks = logs[1].records["clock"][1:]
    clocks["host_before"] += 10**9
    clocks["host_after"] += 10**9
    clocks["tick_ns"] = 32
    thread = np.arange(128)
    rings = [replace(ring(5, thread, 8_000_000 + thread), process=number) for number in (1, 2)]
    found.take(session(logs, rings))
    assert [len(times) for _, _, times in told] == [128, 128]
    for (_, _, times), offset in zip(told, (10**6, 10**9 + 10**6), strict=True):
        assert np.abs(times - (8_000_000 + thread + offset)).max() <= 2600
    assert found.shapes.ticks == {(1, 0): 1, (2, 0): 32}


def test_times_that_are_not_known_are_left_out() -> None:
    told: list[Any] = []
    found = ExitLog(True, EVERY, EVERY, each=lambda *one: told.append(one))
    found.take(session([log(5, virtual=False)], [ring(5, np.arange(128), np.arange(128))]))
    assert len(told[0][1]) == 0 and found.unknown == 128


@pytest.mark.parametrize("form", ["json", "csv", "text"])
def test_lines_of_every_exit(form: str, tmp_path: Any) -> None:
    place = KernelShape(PID, 'a "b"', 0, "_Z5scalePf", (2, 3, 1), (8, 8, 1))
    records = ring(5 + (PID << 40), np.array([0, 65, 383]), np.array([7, 8, 90])).records
    records["site"], records["sm"] = [0, 12, 3], [131, 0, 5]
    out = cli.Output(str(tmp_path / "out"))
    write = exit_log.ExitPrinter(out, form)
    for part in (records[:2], records[2:]):
        write(place, part, part["time"].astype(np.int64) + 10**15)
    lines = (tmp_path / "out").read_text().splitlines()
    if form == "json":
        found = [json.loads(line) for line in lines]
        assert found[2] == {
            "type": "exit", "pid": PID, "comm": 'a "b"', "gpu": 0, "vendor": "nvidia", "wave": 32,
            "kernel": "scale", "ts_ns": 10**15 + 90,
            "launch": 5 + (PID << 40), "block": [1, 2, 0], "thread": [7, 7, 0], "warp": 1, "lane": 31, "sm": 5, "site": 3,
        }  # fmt: skip
        assert found[1]["block"] == [1, 0, 0] and found[1]["thread"] == [1, 0, 0] and found[0]["sm"] == 131
    elif form == "csv":
        assert len(lines) == 4 and lines[0].startswith("ts_ns,pid,comm,gpu,kernel,launch,block_x")
        assert lines[3] == f'{10**15 + 90},{PID},"a ""b""",0,scale,{5 + (PID << 40)},1,2,0,7,7,0,1,31,5,3'
    else:
        assert [line.split() for line in lines[1:]] == [
            ["0", "5", "0", "0", "0", "131", "0", "scale"],
            ["1", "5", "1", "1", "1", "0", "12", "scale"],
            ["83", "5", "5", "63", "31", "5", "3", "scale"],
        ]
        assert len({len(line) for line in lines[1:]}) == 1 and len(lines[0]) <= 80


def test_lines_tell_kernels_that_share_a_name_apart(tmp_path: Any) -> None:
    out = cli.Output(str(tmp_path / "out"))
    write = exit_log.ExitPrinter(out, "text")
    for name in ("_Z4twinILi3EiEvPT0_", "_Z4twinILi4EiEvPT0_"):
        records = ring(5, np.array([0]), np.array([7])).records
        write(KernelShape(PID, "app", 0, name, (2, 1, 1), (64, 1, 1)), records, np.array([7]))
    shown = [line.split(maxsplit=7)[7] for line in (tmp_path / "out").read_text().splitlines()[1:]]
    assert shown == ["twin", "twin<4, int>(int*)"]


def test_names_of_exits() -> None:
    sites = {1: Site(1, "k", 40), 2: Site(2, "k", 50, "/home/me/scale.cu", 17)}
    source = site_names(sites)
    assert (source(1), source(2), source(3)) == ("PTX line 40", "scale.cu:17", None)


def test_what_a_log_makes_up_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_shapes, "MOST_SHAPES", 3)
    monkeypatch.setattr(kernel_shapes, "MOST_UNNAMED", 10)
    found = ExitLog(True, EVERY, EVERY, heats=True)
    huge, shapes, nameless = log(5), log(*range(10, 20)), log(*range(30, 50))
    huge.records["kernel"]["grid"] = huge.records["kernel"]["block"] = 2**32 - 1
    shapes.records["kernel"]["grid"][:, 0] = np.arange(1, 11)
    nameless.records["kernel"]["slot"] = 2**32 - 1
    exits = [ring(n, np.arange(64), np.arange(64)) for n in (5, *range(10, 20))]
    found.take(session([huge, shapes, nameless], exits, stopped=True))
    assert [place.grid[0] for place, _ in found.reports(since_last=False)] == [1, 2, 3]
    assert found.unknown == 64 * 8 and not found.shapes._unnamed
    many = log(1, brackets=2 * kernel_shapes.READINGS)
    found.take(session([many], []))
    assert all(len(brackets) <= kernel_shapes.READINGS for brackets in found.shapes._brackets.values())

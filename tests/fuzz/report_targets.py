"""What tools compute from the records of logs and rings, in which any number may have any value. See targets.py."""

from __future__ import annotations

import functools
import json
import random
import struct
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from fuzz.targets import target
from gpubpf.agent.definitions import RECORD_SIZE, Kind
from gpubpf.calls import call_lines, probes, timeline
from gpubpf.calls import records as call_records
from gpubpf.calls.api import cuda, hip
from gpubpf.ebpf.maps import MapDefinition, storage_size
from gpubpf.exits import exit_log, exit_records, exits_text
from gpubpf.held.memory import Memory
from gpubpf.held.report import HELD, Report
from gpubpf.inject.values import Site
from gpubpf.launches import latency, latency_text, profile_files, profile_text
from gpubpf.launches.launch_records import KERNEL_RECORD
from gpubpf.launches.launches import Launches, LoggedProcess
from gpubpf.launches.profile import STACK, Profile
from gpubpf.launches.sums import LaunchLosses, LaunchSums, kernel_record
from gpubpf.lower import programs
from gpubpf.memory import access_text, access_trace
from gpubpf.memory.access_log import AccessLog
from gpubpf.memory.allocations import ALLOCATING, FREEING, Allocations
from gpubpf.process.host_frames import HostFrame
from gpubpf.record import replace
from gpubpf.records import operation_log
from gpubpf.records.kernel_shapes import KernelShapes
from gpubpf.records.launch_shape import Shape
from gpubpf.records.results import Instance, ProcessLog, RingRecords
from gpubpf.show import cli
from gpubpf.show.output import Output
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf.show.parsed import OutputOptions
from gpubpf.show.perfetto import Trace
from gpubpf.show.result_writer import ResultWriter
from gpubpf.threads import thread_counts
from gpubpf.threads.thread_records import ThreadViews
from gpubpf.tools import kernelretsnoop, threadhist

AS_JSON = OutputOptions("kernelretsnoop", json=True)
SLOTS = 16
MOST_RECORDS, LAUNCHES = 128, 3
EVERY = ((0, (1 << 32) - 1),) * 3
NAMES = {slot: f"_Z1{letter}Pf" for slot, letter in enumerate("abc")}
GPUS = {0: 0, 1: 1}
STACKS = {1: (HostFrame(4096, 16, "/bin/app", "main"), HostFrame(1, 0, "", ""))}


def record_seeds() -> Iterable[bytes]:
    """Records of all kinds, whose numbers are small enough to refer to each other."""
    for seed in range(4):
        chance = random.Random(seed)
        records = np.zeros(40, operation_log.DTYPE)
        raw = records.view(np.uint8).reshape(-1, RECORD_SIZE)
        raw[:, 64::4] = [[chance.randrange(4) for _ in range(16)] for _ in records]
        for at, record in enumerate(records):
            begin = 1000 * at + chance.randrange(900)
            kind = chance.choice([Kind.KERNEL, *Kind])
            record["id"] = (chance.choice((0, 1)) << 40) + at + 1
            record["kind"], record["flags"] = kind, chance.choice((0, 0, 1, 2, 4, 8, 16))
            record["thread"], record["queue"], record["context"] = (chance.randrange(3) for _ in range(3))
            record["call_ns"], record["return_ns"] = begin, begin + chance.randrange(3000)
            record["stack"] = chance.randrange(2)
            if kind == Kind.KERNEL:
                record["kernel"]["grid"] = record["kernel"]["block"] = 1 + chance.randrange(3)
            if kind == Kind.API:
                record["api"]["name"] = chance.choice((*ALLOCATING, *FREEING, "cuCtxDestroy")).encode()
                record["api"]["address"], record["api"]["bytes"] = 4096 * chance.randrange(1, 4), 8192
            if kind in (Kind.SPAN, Kind.CLOCK):
                part = record["span" if kind == Kind.SPAN else "clock"]
                for step, name in enumerate(part.dtype.names):
                    part[name] = begin + 100 * step
        yield bytes([seed]) + records.tobytes()


@target(seeds=record_seeds)
def launch_report(data: bytes) -> None:
    """Report the launches of a log as launchlate does: sums, lines, stories, JSON, CSV and a trace."""
    options, records = data[0] if data else 0, _records(data[1:])
    launches = Launches(SLOTS, filtered=bool(options & 1))
    process = LoggedProcess(7, "app", bool(options & 2), NAMES, GPUS, STACKS, 1)
    owners, losses, trace = OwnerColumns(bool(options & 4)), LaunchLosses(), Trace("/dev/null")
    for part, last in ((records[: len(records) // 2], False), (records[len(records) // 2 :], True)):
        launches.log(process, part)
        cells = np.frombuffer(data[1:].ljust(32 * SLOTS, b"\0"), "<u8", 4 * SLOTS).reshape(4, SLOTS)
        launches.reading(process, cells[:1], cells[1:2], int(cells[0, 0]), bool(options & 8), 0)
        columns = launches.columns()
        view = latency.LaunchView(columns)
        new = launches.fresh(columns, last)
        launched = new[columns.wanted[new]]
        owners.see(view.owners(launched))
        chosen = latency.slower(view, launched, 100)
        json.dumps([view.operation(at) for at in new.tolist()])
        json.dumps([view.launch(at, True) for at in view.by_call(chosen).tolist()])
        list(latency_text.timeline_lines(view, new))
        list(latency_text.slow_stories(view, chosen, launched, 100, owners))
        [latency_text.launch_line(view, at, owners) for at in chosen.tolist()]
        latency.write_trace(view, trace, new)
        losses.add(view, new)
        for keys in ((), ("queue", "graph", "node")):
            sums = LaunchSums(keys, bool(keys))
            sums.add(view, chosen, True)
            made = [kernel_record(group, bool(keys), bool(keys)) for group in sums.groups]
            json.dumps([KERNEL_RECORD.row(record) for record in made] + [*made])
            list(latency_text.report(sums, owners, bool(keys), True, True))
        profile = Profile()
        profile.add(view, chosen)
        for by in ("time", "launches"):
            rows = profile.rows(by)
            json.dumps([STACK.record(row) for row in rows])
            list(profile_text.report(rows, by, owners, None, True))
            for form in profile_files.FORMS.values():
                form(rows, by)
        launches.forget()
    json.dumps(losses.fields(launches.lost))
    trace.close()


@target(seeds=record_seeds)
def allocation_log(data: bytes) -> None:
    """Follow the allocations, the shapes of kernels and the clocks in a log, also as gpumem does."""
    records = _records(data[1:])
    memory = Memory()
    allocations, shapes = Allocations(), KernelShapes(numbered=True)
    for part, over in ((records[: len(records) // 2], False), (records[len(records) // 2 :], True)):
        log = ProcessLog(7, "app", part, 0, False, NAMES, GPUS, STACKS, over, 1)
        allocations.add(log)
        memory.add(log)
        assert sum(row.bytes for row in memory.rows()) == memory.live_bytes
        json.dumps([HELD.record(replace(row, grown=0)) for row in memory.rows()])
        list(Report(memory, OwnerColumns(), None, True)._lines(memory.rows(), True))
        assert sum(row.bytes for row in memory.at_peak()) == memory.peak_bytes
        shapes.take(log)
        for allocation in allocations.all():
            assert allocation.bytes > 0 and isinstance(allocation.name, str)
        for gpu in GPUS.values():
            shapes.clock(1, gpu).host(np.arange(0, 1 << 63, 1 << 58, np.uint64))


# --- exits and accesses: rings whose launches are in the log, and maps -----------------------------------------


@functools.cache
def definitions(text: str) -> Mapping[str, MapDefinition]:
    """Return the maps of a tool's program."""
    return programs.load(text).program.maps


def ring_seeds() -> Iterable[bytes]:
    """Two launches of 2 blocks of 64 threads, and records of their threads."""
    log = np.zeros(LAUNCHES, operation_log.DTYPE)
    log["id"], log["kind"] = (5, 6, 7), (Kind.KERNEL, Kind.KERNEL, Kind.CLOCK)
    log["kernel"]["grid"][:2], log["kernel"]["block"][:2] = (2, 1, 1), (64, 1, 1)
    log["clock"][2] = (1000, 1100, 1200, 5000, 1, 32)
    thread = np.arange(128)
    exits = np.zeros(128, definitions(kernelretsnoop.PROGRAM)["exits"].value_dtype)
    exits["clock"], exits["time"], exits["launch"], exits["thread"] = thread, 10 * thread, 5, thread
    moments = np.zeros(128, definitions(access_trace.PROGRAM)["moments"].value_dtype)
    moments["address"], moments["launch"], moments["thread"] = 4 * thread, 6 | 4 << 40, thread
    for ring in (exits, moments):
        for options in range(4):
            yield bytes([options]) + log.tobytes() + ring.tobytes()


def ring_hard() -> Iterable[bytes]:
    """The largest grids that the log may claim."""
    (seed, *_) = ring_seeds()
    at = operation_log.DTYPE.fields["kernel"][1] + operation_log.DTYPE["kernel"].fields["grid"][1]
    for grid in ((2**31 - 1, 1, 1), (1, 2**15, 2**15), (2**32 - 1, 0, 2**32 - 1)):
        yield seed[: 1 + at] + struct.pack("<3I", *grid) + seed[1 + at + 12 :]


def _session(data: bytes, dtype: np.dtype[Any], virtual: bool) -> Any:
    """Return a session with one process, whose log and ring have these bytes."""
    log = _records(data[: LAUNCHES * RECORD_SIZE])
    rest = data[LAUNCHES * RECORD_SIZE :]
    records = np.frombuffer(rest, dtype, min(len(rest) // dtype.itemsize, 1024))
    return SimpleNamespace(
        logs=lambda: [ProcessLog(7, "app", log, 0, virtual, NAMES, GPUS, STACKS, True, 1)],
        rings=lambda name: [RingRecords(7, "app", 0, 0, records, NAMES, 1)],
        ring_counts=lambda name: [],
        sites=lambda mangled, pid, build=None: {0: Site(0, "k", 40)},
        stopped=True,
    )


@target(seeds=ring_seeds, hard=ring_hard)
def exit_report(data: bytes) -> None:
    """Report the exits that records tell of, as kernelretsnoop does: sums, lines, JSON and pictures."""
    options = data[0] if data else 0
    dtype = definitions(kernelretsnoop.PROGRAM)["exits"].value_dtype
    session = _session(data[1:], dtype, bool(options & 1))
    block = ((0, 0), *EVERY[1:]) if options & 2 else EVERY
    out, owners = Output("/dev/null"), OwnerColumns()
    printer = exit_log.ExitPrinter(out, "json" if options & 1 else "text", owners)
    log = exit_log.ExitLog(True, block, EVERY, heats=True, each=printer, owners=owners)
    log.take(session)
    reports = list(log.reports(since_last=False))
    list(exits_text.lines(reports, log.title, lambda kernel: str, owners, True))
    exit_records.write(reports, lambda kernel: str, ResultWriter(AS_JSON, out))
    for picture in log.pictures():
        picture.chart()
    list(log.loss_lines(log.losses(session)))


@target(seeds=ring_seeds, hard=ring_hard)
def access_report(data: bytes) -> None:
    """Report the accesses that records tell of, as memtrace does: lines, JSON and pictures."""
    options = data[0] if data else 0
    timed = bool(options & 2)
    dtype = definitions(access_trace.PROGRAM)["moments" if timed else "accesses"].value_dtype
    session = _session(data[1:], dtype, bool(options & 1))
    out, owners, heatmaps = Output("/dev/null"), OwnerColumns(), access_trace.AddressHeatmaps()
    form = ("text", "json", "csv")[options % 3]
    printer = access_text.AccessPrinter(out, form, timed, owners, 80)
    log = AccessLog(timed, bool(options & 4), [printer, heatmaps], host_times=timed, owners=owners)
    heatmaps.add_allocations(session.logs())
    log.take(session, session.logs())
    for heat in heatmaps.sources():
        heat.chart()
    list(log.loss_lines(log.losses(session) | {"faults": []}))


# --- counts of threads -----------------------------------------------------------------------------------------

SHAPES = [((1, 1, 1), (1, 1, 1)), ((2, 1, 1), (33, 1, 1)), ((1, 2, 1), (8, 4, 2)), ((3, 1, 2), (32, 1, 1))]


def count_seeds() -> Iterable[bytes]:
    """Each thread ran once or twice, and did as much work as its number says; other counts of warps."""
    for which in range(len(SHAPES)):
        counts = np.arange(2 * 256, dtype=np.uint64)
        counts[::2] = 1 + which % 2
        yield bytes([which, which]) + counts.tobytes()
        yield bytes([which, 2 + which]) + np.full(512, (1 << 64) - 1, np.uint64).tobytes()


@target(seeds=count_seeds)
def thread_report(data: bytes) -> None:
    """Report what threads counted, as threadhist does: text, JSON and CSV, of the whole run and of intervals."""
    which, options = data[:2].ljust(2, b"\0")
    grid, block = SHAPES[which % len(SHAPES)]
    shape, maps = Shape(grid, block), definitions(threadhist.PROGRAM)
    intervals, by_warp = bool(options & 1), bool(options & 2)
    chosen = ((0, 0), *EVERY[1:]) if options & 4 else EVERY
    reader = thread_counts.Reader(chosen, EVERY, intervals, by_warp=by_warp)
    look = (["--json"], ["--csv"], ["-v"], ["--top", "3"])[options >> 3 & 3]
    by = ("thread", "lane", "warp", "block")[options >> 5 & 3]
    args = cli.parse(threadhist.build_parser(), ["--by", by, *look, "--", "true"])
    results = cli.ResultWriter(cli.Options.of(args).output, Output("/dev/null"), lambda: 1)
    views = cli.group(ThreadViews, args)
    units = {"tallies": shape.threads, "together": shape.blocks * shape.warps}
    rest = data[2:]
    for launches in (1, 2):
        instances = {}
        for name, capacity in units.items():
            size = storage_size(maps[name], capacity)
            raw, rest = rest[:size].ljust(size, b"\0"), rest[size:]
            owner = (7, "app", 0, NAMES[0], grid, block, launches)
            instances[name] = [Instance(*owner, maps[name], raw, capacity, None, None)]
        session = SimpleNamespace(
            instances=lambda name, now=instances: now.get(name, ()), stopped=launches == 2
        )
        threadhist.report(reader.read(session), OwnerColumns(), views, results)


# --- calls of the driver or runtime, whose arguments and names the program chooses -----------------------------

_TOLD_BY_LINUX = 1 << 40  # ns; eBPF programs take the times


def call_seeds() -> Iterable[bytes]:
    for seed in range(4):
        yield random.Random(seed).randbytes(
            definitions(probes.PROGRAM)["call_events"].value_dtype.itemsize * 8
        )


@target(seeds=call_seeds)
def call_report(data: bytes) -> None:
    """Report calls as hipsnoop and cudasnoop do: lines, JSON, CSV and a timeline."""
    dtype = definitions(probes.PROGRAM)["call_events"].value_dtype
    events = np.frombuffer(data, dtype, min(len(data) // dtype.itemsize, 64)).copy()
    events["start_ns"] %= _TOLD_BY_LINUX
    events["end_ns"] = events["start_ns"] + events["end_ns"] % _TOLD_BY_LINUX
    columns = call_lines.CallColumns(0, several=True)
    for api in (hip(), cuda()):
        events["function"] %= len(api.functions)
        for lines_of in (
            lambda group: call_lines.text_lines(group, columns),
            call_lines.json_lines,
            call_lines.csv_lines,
        ):
            for text in call_records.format_calls(events, api, _name_of, lines_of):
                text.encode()
        found = call_records.call_records(events, api, _name_of)
        json.dumps(found)
        list(timeline.lines(found))


def _name_of(pid: int, handle: int) -> Any:
    return None if handle % 2 else NAMES[handle % 3]


def _records(data: bytes) -> Any:
    count = min(len(data) // RECORD_SIZE, MOST_RECORDS)
    return np.frombuffer(data, operation_log.DTYPE, count)

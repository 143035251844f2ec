"""Everything that gpucount, gpudist and gputrace print of generated maps, logs and records: text that fits a terminal, valid JSON
and CSV."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from gpubpf.ebpf import maps
from gpubpf.ebpf.bytecode import TYPES
from gpubpf.ebpf.maps import SHARDS_SHIFT, MapDefinition
from gpubpf.expressions import specs
from gpubpf.expressions.counts import Counts
from gpubpf.expressions.distributions import Distributions, as_type
from gpubpf.expressions.evaluate import signed
from gpubpf.expressions.events import RING, Events, Printer
from gpubpf.inject.values import Site
from gpubpf.record import replace
from gpubpf.records import operation_log
from gpubpf.records.results import Instance, ProcessLog, RingCounts, RingRecords
from gpubpf.records.rings import ShardCount
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf.show.parsed import LookOptions
from gpubpf.show.table import printable
from gpubpf_properties import LARGEST, generated, numbers, seldom
from gpubpf_text import COMMS, FILES, KERNELS, PIDS, check, opened

LOOKS = ((), ("-v",), ("--json",), ("--csv",), ("-T",), ("-T", "--json"), ("-T", "--csv"))
SUMMARY = {"launches_seen": 3, "launches_matched": 3, "launches_instrumented": 3, "not_instrumented": {}}
SUMMARY |= {"lost": 0, "device": "sim", "duration_ns": 1}
NAMED = [name for name in KERNELS if name]
EXTENTS = (((1, 1, 1), (32, 1, 1)), ((3, 2, 1), (8, 4, 2)), ((2**31 - 1, 1, 1), (1024, 1, 1)))
EXTENTS += (((2**15, 2**15, 1), (1, 1, 64)),)
FEW = 3  # sites of a kernel
# Values whose first or last bit is set, and values of every size.
WORDS = numbers().map(lambda n: n & LARGEST) | numbers().map(lambda n: -n & 2**64 - 1)
TALLY: Any = {"fields": [["count", "<u8", 0], ["threads", "<u8", 8]], "size": 16}
SUM: Any = {"fields": [["count", "<u8", 0], ["low", "<u8", 8], ["high", "<u8", 16]], "size": 24}
LOG2: Any = {"fields": [["sum", SUM, 0], ["negative", "<u8", 24], ["slots", ["<u8", [64]], 32]], "size": 544}
SEEN: Any = {"fields": [["value", "<u8", 0], ["kernel", "<u4", 8], ["site", "<u4", 12]], "size": 16}


@st.composite
def owner(draw: st.DrawFn, process: int) -> tuple[int, str, int, int | None]:
    """Return the process, its GPU, and the lanes of a wave."""
    gpu, wave = draw(st.sampled_from(((0, None), (0, None), (7, None), (0, 64))))
    return PIDS[process], draw(st.sampled_from(COMMS)), gpu, wave


SITES = st.tuples(*(st.sampled_from(("", *FILES)) for _ in range(FEW - 1)))


def sites_of(files: tuple[str, ...]) -> dict[int, Site]:
    """Return the sites of every kernel. The last one is not known."""
    return {number: Site(number, "k", 40, file, 99_999) for number, file in enumerate(files)}


@st.composite
def log(draw: st.DrawFn, process: int, of: tuple[int, str, int, int | None]) -> ProcessLog:
    """Return the log of a process with up to three launches."""
    pid, comm, gpu, wave = of
    made = np.zeros(draw(st.integers(0, 3)), operation_log.DTYPE)
    made["id"], made["kind"] = draw(st.sampled_from((1, 999_999, 2**39))) + np.arange(len(made)), 1
    made["thread"], made["stream"] = PIDS[1], draw(st.sampled_from((0, 2, 2**64 - 1)))
    made["call_ns"] = draw(numbers())
    for row in made:
        row["kernel"]["grid"], row["kernel"]["block"] = draw(st.sampled_from(EXTENTS))
        row["kernel"]["slot"] = draw(st.integers(0, 1))
    names = {slot: draw(st.sampled_from(KERNELS)) for slot in range(2)}
    waves = {name: wave for name in names.values() if wave is not None}
    virtual = not draw(seldom)
    return ProcessLog(pid, comm, made, 0, virtual, names, {0: gpu}, {}, False, process, waves)


def instance(
    definition: MapDefinition, process: int, of: tuple[int, str, int, int | None], mangled: str, values: Any
) -> Instance:
    """Return a site array of a kernel with these values, by shard and site; or a hash."""
    if definition.kind == "hash":
        raw, capacity = maps.initial(definition), 0
    else:
        raw = values.tobytes() + bytes(definition.value_size)
        capacity = values.shape[1] | values.shape[0] - 1 << SHARDS_SHIFT
    place = (*of[:3], mangled, (0, 0, 0), (0, 0, 0), 3, definition, raw, capacity, None, None)
    return Instance(*place, process=process, wave=of[3])


def kernels() -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(NAMED), min_size=1, max_size=3, unique=True)


def processes(one: Any) -> st.SearchStrategy[tuple[Any, ...]]:
    """Return what `one` makes of the number of each of some processes, the first of which is 0."""
    return st.sampled_from((0, 1, 1, 2, 12)).flatmap(lambda n: st.tuples(*map(one, range(n))))


# --- gpucount ---

COUNTED = ("load:*", "kernel:*", "store:ns::scale*:shared (lane == 0 && address % 128 >= 64)", "entry:*")


@st.composite
def counts_of(draw: st.DrawFn, process: int) -> tuple[ProcessLog, dict[str, list[Instance]]]:
    """Return the log of a process, and its maps by name. Some points of its kernels were never reached."""
    of = draw(owner(process))
    most = draw(st.sampled_from((0, 1, 999, 10**11)))
    found: dict[str, list[Instance]] = {}
    for number, text in enumerate(COUNTED):
        if specs.count(text).point.of_launch:
            continue
        definition = MapDefinition(f"counts_{number}", "site_array", 4, 16, 1, "<i4", TALLY)
        for mangled in draw(kernels()):
            values = np.zeros((2, FEW), definition.value_dtype)
            for name in TALLY["fields"]:
                values[name[0]][0, 0], values[name[0]][1, FEW - 1] = draw(numbers(most)), draw(numbers(most))
            found.setdefault(definition.name, []).append(instance(definition, process, of, mangled, values))
    return draw(log(process, of)), found


def session_of(parts: Any, files: tuple[str, ...] = ()) -> Any:
    """Return a session whose processes have these logs and maps."""
    names = {name for _, found in parts for name in found}
    return SimpleNamespace(
        logs=lambda: [log for log, _ in parts],
        has_map=lambda name: name in names,
        instances=lambda name: [one for _, found in parts for one in found.get(name, ())],
        kernel_names=lambda: {log.process: dict(enumerate(NAMED)) for log, _ in parts},
        sites=lambda mangled, pid, build: sites_of(files),
    )


@generated(40, parts=processes(counts_of), asked=seldom, interval=st.booleans())
def test_a_generated_report_of_gpucount(parts: Any, asked: bool, interval: bool) -> None:
    wanted = [specs.count(text) for text in COUNTED]
    counts = Counts(wanted, [()] * len(wanted))
    session = session_of(parts)
    counts.take(session)
    first = counts.read(session_of(parts[:1]), True) if interval else []  # of fewer processes
    found = counts.read(session, interval)
    assert all(one.count > 0 for one in found) or not interval
    for look in LOOKS:
        tool, args, page, results = opened("gpucount", *look, *COUNTED)
        owners = OwnerColumns(asked)
        for some in ([first] if interval else []) + [found]:
            tool.report(some, owners, results)
        results.end(SUMMARY | {"log_lost": counts.launches.lost, "verified_by": ["gpubpf"]})
        lines = check(page, args, verbose=120, names=COUNTED)  # all columns in full
        if args.csv:
            assert len(lines) == 1 + len(first) + len(found)
        elif args.json:
            assert sum(json.loads(line)["type"] == "count" for line in lines) == len(first) + len(found)
        elif not first + found:
            assert "nothing was counted" in lines


# --- gpudist ---

LABELS = ("", "#a label", "#\x1b[31mred", "#" + "l" * 200, "#日本語 50%")
EXPRESSIONS = (
    "exit:*:loads:u64:work",
    "load:*:s32:width",
    "store:* (lane < 5):s64:address",
    "access:*:u8:kind",
)
OF_LAUNCHES = ("kernel:*:u64:threads", "kernel:*:s8:shared - stream")
SHOWN = (("-H",), ("-C",), ("-L",), ("-L", "--width", "7"), ("-L", "--width", str(LARGEST)))


@st.composite
def distributions(draw: st.DrawFn) -> list[str]:
    """Return what a user asks for, as words of a command line."""
    wanted = [
        one + draw(st.sampled_from(("", ", kernel", ", source")))
        for one in draw(st.permutations(EXPRESSIONS))
    ]
    wanted = wanted[: draw(st.integers(0, 2))]
    wanted += [
        one + draw(st.sampled_from(("", ", kernel"))) for one in OF_LAUNCHES[: draw(st.integers(0, 2))]
    ]
    return [one + draw(st.sampled_from(LABELS)) for one in wanted or EXPRESSIONS[:1]]


@st.composite
def sums_of(
    draw: st.DrawFn, process: int, wanted: list[specs.Distribution]
) -> tuple[ProcessLog, dict[str, list[Instance]]]:
    """Return the log of a process, and what its programs added up. In some tables there was no room for all values."""
    of = draw(owner(process))
    found: dict[str, list[Instance]] = {}
    for number, one in enumerate(wanted):
        if one.spec.point.of_launch:
            continue
        kind = one.kind
        layout, size = (LOG2, 544) if kind == "log2" else (SUM, 24)
        sums = MapDefinition(f"sums_{number}", "site_array", 4, size, 1, "<i4", layout)
        table: dict[tuple[int, int, int], int] = {}
        for mangled in draw(kernels()):
            cells = np.zeros((2, FEW), sums.value_dtype)
            parts = cells["sum"] if kind == "log2" else cells
            values = draw(st.lists(WORDS, max_size=8)) + list(range(draw(st.sampled_from((0, 0, 60)))))
            totals: dict[tuple[int, int], int] = {}
            for turn, value in enumerate(values):
                real, at = as_type(value, one.type), (turn % 2, turn % FEW)
                times = draw(st.sampled_from((1, 1, 1, 2, 10**6, 10**15))) if turn < 8 else 1
                totals[at] = total = totals.get(at, 0) + real * times
                low = total & 2**64 - 1
                parts["low"][at] = low
                parts["high"][at] = (total - (signed(low) if one.signed else low) >> 64) & 2**64 - 1
                if kind == "log2" and real < 0:
                    cells["negative"][at] += np.uint64(times)
                elif kind == "log2":
                    cells["slots"][at][max(0, real.bit_length() - 1)] += np.uint64(times)
                else:
                    parts["count"][at] += np.uint64(times)
                    bucket = (real if kind == "values" else real // one.width) & 2**64 - 1
                    slot, site = (NAMED.index(mangled), at[1]) if one.key else (0, 0)
                    key = (bucket, slot, site if one.key == "source" else 0)
                    if not draw(st.integers(0, 9)) > 8:
                        table[key] = table.get(key, 0) + times
            found.setdefault(sums.name, []).append(instance(sums, process, of, mangled, cells))
        if kind != "log2":
            contents = b"".join(
                value.to_bytes(8, "little")
                + kernel.to_bytes(4, "little")
                + site.to_bytes(4, "little")
                + n.to_bytes(8, "little")
                for (value, kernel, site), n in table.items()
            )
            made = MapDefinition(f"values_{number}", "hash", 16, 8, 512, SEEN, "<u8", contents=contents)
            found[made.name] = [instance(made, process, of, "", None)]
    return draw(log(process, of)), found


@st.composite
def dist_reports(draw: st.DrawFn) -> tuple[tuple[str, ...], list[str], Any]:
    """Return the options of gpudist, what it is to show, and a session's parts."""
    options, texts = draw(st.sampled_from(SHOWN)), draw(distributions())
    kind = {"-H": "log2", "-L": "linear", "-C": "values"}[options[0]]
    width = int(options[-1]) if len(options) > 1 else 1
    wanted = [replace(specs.distribution(text), kind=kind, width=width) for text in texts]
    return options, texts, draw(processes(lambda process: sums_of(process, wanted)))


@generated(30, shown=dist_reports(), files=SITES, asked=seldom, interval=st.booleans())
def test_a_generated_report_of_gpudist(shown: Any, files: Any, asked: bool, interval: bool) -> None:
    options, texts, parts = shown
    wanted = [specs.distribution(text) for text in texts]
    session = session_of(parts, files)
    for look in LOOKS:
        tool, args, page, results = opened("gpudist", *options, *look, *texts)
        wanted = tool.distributions_of(args.kinds, args.specs, args.width, LookOptions())
        found = Distributions(wanted, [()] * len(wanted))
        owners = OwnerColumns(asked)
        reports = [session_of(parts[:1], files)] * interval + [session]
        rows = 0
        found.take(session)
        for one in reports:
            read = found.read(one, interval)
            assert all(part.sums.count > 0 for part in read)
            for part in read:
                assert sum(n for *_, n in part.ranges()) + part.sums.missing == part.sums.count
                least, most = (-(2**63), 2**63 - 1) if part.wanted.signed else (0, 2**64 - 1)
                assert all(least <= low <= high <= most for low, high, _ in part.ranges())
            rows += sum(len(part.ranges()) for part in read)
            tool.report(read, owners, results)
        results.end(SUMMARY | {"log_lost": found.launches.lost, "verified_by": ["gpubpf"]})
        labels = [printable(one.label) for one in wanted]
        lines = check(page, args, shares=False, negative=True, names=labels)
        if args.csv:
            assert len(lines) == 1 + rows


# --- gputrace ---

# Events are as wide as their values. All have a colon, unlike the header.
TRACED = (
    "exit:*",
    "kernel:*",
    'kernel:* ": %lu threads of %s, %d", threads, kernel, stream',
    'store:*:global (lane == 0) "at: %p %s\\n%c|%-20u\\t%08.3d|", address, source, active, site, address',
    'load:*:global ": %f %e %g %+05.1f %#x", value, value, value, value, value',
    'float:*:* "%s:%g", kernel, operand0',
)
PLACE: Any = [("launch", "<u8"), ("time", "<u8"), ("thread", "<u8"), ("site", "<u4"), ("spec", "<u4")]
RECORD = np.dtype([("place", PLACE), ("values", "<u8", (6,))])


@st.composite
def events_of(draw: st.DrawFn, process: int) -> tuple[ProcessLog, list[RingRecords]]:
    """Return the log of a process, and records. Some are of launches, threads or programs that there are not."""
    made = draw(log(process, draw(owner(process))))
    records = np.zeros(draw(st.integers(0, 12)), RECORD)
    launches = made.records["id"].tolist() or [1]
    for row in records:
        row["place"]["launch"] = draw(st.sampled_from((*launches, *launches, 7))) | process << 40
        row["place"]["time"], row["place"]["site"] = draw(numbers()), draw(st.integers(0, FEW))
        threads = st.sampled_from([n - 1 for n in (1, 7, 32, 2**32, 2**41)]) | numbers(2**20)
        row["place"]["thread"] = draw(threads)
        row["place"]["spec"] = draw(st.sampled_from([0, *range(3, len(TRACED) + 1)]))
        row["values"] = [draw(WORDS) for _ in range(5)] + [draw(st.integers(0, len(TYPES)))]
    pid, comm, gpu = made.pid, made.comm, made.gpus[0]
    return made, [RingRecords(pid, comm, gpu, 0, records, {}, process)]


@generated(20, parts=processes(events_of), files=SITES, asked=seldom)
def test_a_generated_report_of_gputrace(parts: Any, files: tuple[str, ...], asked: bool) -> None:
    wanted = [specs.trace(text) for text in TRACED]
    for look in LOOKS:
        _, args, page, results = opened("gputrace", *look, *TRACED)
        events, now, late = Events(wanted, [()] * len(wanted)), parts[:1], parts[1:]
        printer = Printer(page, results, OwnerColumns(asked), args.timestamps)
        printed = 0
        for turn, some in enumerate((now, late, ())):
            session: Any = SimpleNamespace(
                logs=lambda some=some: [log for log, _ in some],
                rings=lambda name, some=some: [ring for _, rings in some for ring in rings],
                has_map=lambda name: name == RING,
                sites=lambda mangled, pid, build: sites_of(files),
                stopped=turn == 2,
                ring_counts=lambda name: [RingCounts(1, "app", 0, (ShardCount(3, 9, 8, 1, 1),))],
                summary=lambda: SUMMARY,
            )
            made = events.take(session)
            printed += len(made)
            printer(made)
        assert printed + events.unknown >= sum(len(ring.records) for _, rings in parts for ring in rings)
        shown = page.raw.decode().split("\n")[:-1]
        events.end(session, results, ["gpubpf"])
        lines = check(page, args, shares=False, negative=True, wide=":", values=True)
        if args.csv:
            assert len(shown) == len(lines) == 1 + printed
        elif args.json:
            assert len(shown) == len(lines) - 1 == printed
        else:  # each event is a line, behind its columns, which may be wider than their headers
            headers = [line.index("EVENT") for line in shown if line.endswith("  EVENT")]
            assert len(shown) == printed + len(headers)
            begin = 0
            for line in shown:
                begin = line.index("EVENT") if line.endswith("  EVENT") else begin
                assert re.match(rf".{{{begin - 2}}}\S*  ", line) or re.search(
                    r"\d{7}|\(\d+,\d+,\d+\)|\d{5},", line
                ), line

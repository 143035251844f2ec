"""kernelretsnoop's JSON records and CSV rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gpubpf.exits.lateness import sm_rows
from gpubpf.record import replace
from gpubpf.records.fields import BLOCK, DEMANGLED, KERNEL, MANGLED, OWNER, SAMPLED, SHAPE, STAMP, THREAD
from gpubpf.session.records import BUDGET, LOG_LOST, RINGS, of_every_tool
from gpubpf.session.sampled import rounded
from gpubpf.show.fields import Field, Fields, having, values_of

if TYPE_CHECKING:
    from gpubpf.exits.exits_text import SiteNames
    from gpubpf.exits.lateness import ExitReport
    from gpubpf.records.kernel_shapes import KernelShape
    from gpubpf.show.result_writer import ResultWriter

_OF_KERNEL = (*OWNER, KERNEL, *SHAPE)
LANE = Fields(
    "lane",
    "One for each kernel, launch shape and lane. The record kernel of the same kernel and launch shape follows its lanes.",
    (
        *_OF_KERNEL,
        Field("lane", "integer", "number of the lane in its warp", get="number"),
        Field("exits", "integer", "how many times this lane exited"),
        Field(
            "late_ns",
            "distribution",
            "over the exits whose lateness is known",
            get=lambda lane: lane.late.record(),
        ),
        Field("site", "integer?", "the exit when the lane was latest; null if it never was late"),
        Field("source", "string?", "file and line of this exit, or line of the PTX"),
        Field("standard_error", having(mean="number?"), "in ns; null if unknown", when=SAMPLED.when),
    ),
    csv="pid comm gpu kernel grid block_dim lane exits late_ns site source mangled",
    csv_fields=(MANGLED,),
)


def _spread(name: str, meaning: str) -> Field:
    """Return the field of a spread, which is null if sampling leaves it unknown."""

    def record(report: ExitReport) -> dict[str, float] | None:
        spread = getattr(report, name)
        return None if report.sample is not None and not spread.count else spread.record()

    field = "tail_ns" if name == "tail" else f"{name}_spread_ns"
    return Field(field, "distribution?", meaning, get=record)


_UNKNOWN = "null if sampling leaves it unknown"
KERNEL_RECORD = Fields(
    "kernel",
    "One for each kernel and launch shape.",
    (
        *_OF_KERNEL,
        DEMANGLED,
        MANGLED,
        replace(SAMPLED, get=lambda report: report.sample and report.sample.record()),
        Field("launches", "integer", "instrumented"),
        Field("threads", "integer", "of one launch's grid", get="shape.threads"),
        Field("exits", "integer", "of chosen threads, in all launches; with sampling scaled to all blocks"),
        _spread("warp", f"from first to last exit of a warp; {_UNKNOWN}"),
        _spread("block", f"from first to last warp of a block; {_UNKNOWN}"),
        _spread("grid", f"from first to last block of a grid; {_UNKNOWN}"),
        _spread("tail", f"tail of a grid; {_UNKNOWN}"),
        Field(
            "sm_idle_ns",
            "{ns}",
            "for each multiprocessor, the mean time for which it was done before the launch was",
            get=lambda report: {str(number): round(idle) for number, idle in sorted(sm_rows(report))},
        ),
        Field("launches_whole", "integer", "launches that these times cover", get="complete"),
        Field(
            "lost",
            "integer",
            "exits whose lateness is not known, since launches of one kernel overlapped in more streams than can be distinguished",
        ),
        Field(
            "clock_error_ns",
            "ns",
            "of these times, at most",
            get=lambda report: math.ceil(report.clock_error),
        ),
        STAMP,
    ),
)
EXIT = Fields(
    "exit",
    "With -e, one for each thread that exits.",
    (
        *OWNER,
        KERNEL,
        Field("ts_ns", "ns", STAMP.meaning),
        Field("launch", "integer", "unique in this measurement"),
        BLOCK,
        THREAD,
        Field("warp", "integer", "its number in the block"),
        Field("lane", "integer"),
        Field("sm", "integer", "the multiprocessor"),
        Field("site", "integer", "number of the exit; 65535: a number that is larger, or this one"),
    ),
    csv="ts_ns pid comm gpu kernel launch block thread warp lane sm site",
)
RECORDS = (
    *(LANE, KERNEL_RECORD, EXIT),
    *of_every_tool(
        BUDGET,
        *(replace(one, when="if exits were recorded") for one in (LOG_LOST, *RINGS)),
        Field("faults", "[integer]", "processes in which a kernel failed"),
    ),
)


def write(
    reports: Iterable[tuple[KernelShape, ExitReport]],
    sites: Callable[[KernelShape], SiteNames],
    results: ResultWriter,
) -> None:
    """Write the records of each kernel and launch shape, or its rows of CSV: one for each lane."""
    if results.csv:
        rows = (
            LANE.row(lane, mangled=kernel.mangled)
            for kernel, report in reports
            for lane in lanes(kernel, report, sites(kernel))
        )
        results.table(LANE.columns, rows)
        return
    for kernel, report in reports:
        results.out.records(lanes(kernel, report, sites(kernel)))
        known = values_of((*_OF_KERNEL, DEMANGLED, MANGLED), kernel)
        results.out.records([KERNEL_RECORD.record(report, **known) | results.stamp])


def lanes(kernel: KernelShape, report: ExitReport, source: SiteNames) -> list[dict[str, Any]]:
    """Return the records of the lanes of a kernel and launch shape."""
    known = values_of(_OF_KERNEL, kernel)
    made = []
    for lane in report.lanes:
        more = {} if report.sample is None else {"standard_error": {"mean": rounded(lane.error)}}
        where = None if lane.site is None else source(lane.site)
        made.append(LANE.record(lane, **known, source=where, **more))
    return made

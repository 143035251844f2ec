"""kernelretsnoop's JSON records and CSV rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from gpubpf.exits.lateness import sm_rows
from gpubpf.record import replace
from gpubpf.records.fields import (
    BLOCK,
    DEMANGLED,
    KERNEL,
    MANGLED,
    OWNER,
    SAMPLED,
    SHAPE,
    STAMP,
    THREAD,
)
from gpubpf.session.records import BUDGET, LOG_LOST, RINGS, of_every_tool
from gpubpf.session.sampled import rounded
from gpubpf.show.fields import (
    DISTRIBUTION,
    INTEGER,
    NS,
    NUMBER,
    TEXT,
    Field,
    Fields,
    by_name,
    having,
    many,
    maybe,
    values_of,
)

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
        Field("lane", INTEGER, "number of the lane in its warp", get=attrgetter("number")),
        Field("exits", INTEGER, "how many times this lane exited"),
        Field(
            "late_ns",
            DISTRIBUTION,
            "over the exits whose lateness is known",
            get=lambda lane: lane.late.record(),
        ),
        Field("site", maybe(INTEGER), "the exit when the lane was latest; null if it never was late"),
        Field("source", maybe(TEXT), "file and line of this exit, or line of the PTX"),
        Field(
            "standard_error",
            having(Field("mean", maybe(NUMBER))),
            "in ns; null if unknown",
            when=SAMPLED.when,
        ),
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
    return Field(field, maybe(DISTRIBUTION), meaning, get=record)


_UNKNOWN = "null if sampling leaves it unknown"
KERNEL_RECORD = Fields(
    "kernel",
    "One for each kernel and launch shape.",
    (
        *_OF_KERNEL,
        DEMANGLED,
        MANGLED,
        replace(SAMPLED, get=lambda report: report.sample and report.sample.record()),
        Field("launches", INTEGER, "instrumented"),
        Field("threads", INTEGER, "of one launch's grid", get=attrgetter("shape.threads")),
        Field("exits", INTEGER, "of chosen threads, in all launches; with sampling scaled to all blocks"),
        _spread("warp", f"from first to last exit of a warp; {_UNKNOWN}"),
        _spread("block", f"from first to last warp of a block; {_UNKNOWN}"),
        _spread("grid", f"from first to last block of a grid; {_UNKNOWN}"),
        _spread("tail", f"tail of a grid; {_UNKNOWN}"),
        Field(
            "sm_idle_ns",
            by_name(NS),
            "for each multiprocessor, the mean time for which it was done before the launch was",
            get=lambda report: {str(number): round(idle) for number, idle in sorted(sm_rows(report))},
        ),
        Field("launches_whole", INTEGER, "launches that these times cover", get=attrgetter("complete")),
        Field(
            "lost",
            INTEGER,
            "exits whose lateness is not known, since launches of one kernel overlapped in more streams than can be distinguished",
        ),
        Field(
            "clock_error_ns", NS, "of these times, at most", get=lambda report: math.ceil(report.clock_error)
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
        Field("ts_ns", NS, STAMP.meaning),
        Field("launch", INTEGER, "unique in this measurement"),
        BLOCK,
        THREAD,
        Field("warp", INTEGER, "its number in the block"),
        Field("lane", INTEGER),
        Field("sm", INTEGER, "the multiprocessor"),
        Field("site", INTEGER, "number of the exit"),
    ),
    csv="ts_ns pid comm gpu kernel launch block thread warp lane sm site",
)
RECORDS = (
    *(LANE, KERNEL_RECORD, EXIT),
    *of_every_tool(
        BUDGET, LOG_LOST, *RINGS, Field("faults", many(INTEGER), "processes in which a kernel failed")
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

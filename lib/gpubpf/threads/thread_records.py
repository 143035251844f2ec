"""threadhist's JSON records and CSV rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from gpubpf.record import Record, replace
from gpubpf.records import fields
from gpubpf.records.fields import DEMANGLED, KERNEL, MANGLED, OWNER, REGISTERS, SAMPLED, SHAPE, STAMP
from gpubpf.records.launch_shape import By
from gpubpf.session.records import BUDGET, of_every_tool
from gpubpf.show.bulk_text import CHUNK, joined
from gpubpf.show.fields import Field, Fields, having, maybe, values_of
from gpubpf.threads import imbalance

if TYPE_CHECKING:
    from gpubpf.show.result_writer import ResultWriter
    from gpubpf.threads.imbalance import Groups
    from gpubpf.threads.thread_counts import ThreadCounts

MOST_RECORDS = 1 << 20  # maximum threads of a kernel and launch shape that are written without --all-threads
_COMMON = (*OWNER, KERNEL, *SHAPE)
_SHARES = having(
    Field("empty", "number", "lanes without a thread"),
    Field("waiting", "number", "lanes whose thread is done"),
)


def _of(by: By, about: str, *index: Field) -> Fields:
    """Return the record of a thread, lane, warp or block."""
    threads = () if by == "thread" else (Field("threads", "integer", "how many it has"),)
    sums = (
        *threads,
        Field("runs", "integer", "how often its threads ran the kernel to their end"),
        Field("work", "integer", "what --work counts"),
    )
    own = " ".join(field.name for field in (*index, *sums))
    csv = f"pid comm gpu kernel grid block_dim {own} mangled"
    return Fields(by, about, (*_COMMON, *index, *sums), csv, (MANGLED,))


RECORD_OF: Mapping[By, Fields] = {
    "thread": _of(
        "thread",
        "One for each thread, or for the threads of --top (of very large grids, see --all-threads).",
        fields.BLOCK,
        fields.THREAD,
    ),
    "lane": _of(
        "lane",
        "With --by lane, after the threads (with --top, instead).",
        Field("lane", "integer", "its number"),
    ),
    "warp": _of(
        "warp",
        "With --by warp, after the threads (with --top, instead).",
        fields.BLOCK,
        Field("warp", "integer", "its number in the block"),
    ),
    "block": _of("block", "With --by block, after the threads (with --top, instead).", fields.BLOCK),
}


def _registers(counts: ThreadCounts) -> dict[str, int | None]:
    one = counts.instance
    return fields.registers(one.registers_before, one.registers_after, one.spilled)


def _idle_lanes(counts: ThreadCounts) -> dict[str, float] | None:
    if counts.selected is not None:
        return None
    empty, waiting = imbalance.idle_lanes(counts.shape, counts.work)
    return {"empty": round(empty, 6), "waiting": round(waiting, 6)}


KERNEL_RECORD = Fields(
    "kernel",
    "One for each kernel and launch shape.",
    (
        *_COMMON,
        DEMANGLED,
        MANGLED,
        Field("launches", "integer", "that were counted"),
        Field("threads", "integer", "of the grid", get="shape.threads"),
        Field("selected", "integer", "of these, by --block and --thread", get="wanted"),
        Field("thread_records", "integer", "how many records thread precede this one for it"),
        Field("runs", "integer", "sum over the threads", get="total_runs"),
        Field("work", "integer?", "sum over the threads; null if sampling chose none"),
        SAMPLED,
        Field("standard_error", having(work="number?"), "null if unknown", when=SAMPLED.when),
        Field("imbalance", "number?", "of the threads: largest work, divided by the mean; null as work"),
        Field("work_kind", "string", "the value of --work"),
        replace(REGISTERS, get=_registers),
        Field(
            "idle_lanes", maybe(_SHARES), "as fractions of 1; null if threads are filtered", get=_idle_lanes
        ),
        STAMP,
    ),
    notes="With sampling, work is an estimate, and standard_error has its error; the numbers of launches, threads and runs are exact. "
    "The records of threads, lanes, warps and blocks are scaled from the runs that were measured. "
    "Threads of which no run was measured have no record.",
)
RECORDS = (*RECORD_OF.values(), KERNEL_RECORD, *of_every_tool(BUDGET))


class ThreadViews(Record):
    """What to count, and which records to write.

    work: the value of --work, or what the tool counts without it.
    by: the value of --by.
    top: the number of threads to show, those with the most work; None: all threads.
    all_threads: also those of very large grids.
    """

    work: str = "instructions"
    by: By = "thread"
    top: int | None = None
    all_threads: bool = False


def write(found: Iterable[ThreadCounts], views: ThreadViews, results: ResultWriter) -> None:
    """Write the CSV rows of --by, or the JSON records: of threads, of --by, and of each kernel and launch shape."""
    if results.csv:
        results.header(RECORD_OF[views.by].columns)
    for counts in found:
        if results.csv:
            _write_groups(counts, counts.grouped(views.by), views, results)
        else:
            _write_json(counts, views, results)


def _write_json(counts: ThreadCounts, views: ThreadViews, results: ResultWriter) -> None:
    threads = counts.grouped("thread")
    written = (
        _write_groups(counts, threads, views, results) if views.by == "thread" or views.top is None else 0
    )
    if views.by != "thread":
        _write_groups(counts, counts.grouped(views.by), views, results)
    unknown = counts.sampled is not None and counts.no_thread
    record = KERNEL_RECORD.record(
        counts,
        thread_records=written,
        work=None if unknown else counts.total_work,
        imbalance=None if unknown else round(threads.imbalance, 6),
        work_kind=views.work,
        **counts.sample_fields(),
    )
    results.out.records([record | results.stamp])


def _write_groups(counts: ThreadCounts, groups: Groups, views: ThreadViews, results: ResultWriter) -> int:
    """Write the threads, lanes, warps or blocks that --top and --all-threads choose. Return how many these are."""
    record = RECORD_OF[groups.by]
    known = values_of((*_COMMON, MANGLED), counts)
    if results.csv:
        texts = record.csv_texts(known)
        texts[0] = results.time_cell + texts[0]
    else:
        texts = record.json_texts(known)
    places = _chosen(counts, groups, views, results)
    for begin in range(0, len(places), CHUNK):
        some = places[begin : begin + CHUNK]
        threads = () if groups.by == "thread" else (groups.threads[some],)
        columns = (*groups.indices(some), *threads, groups.runs[some], groups.work[some])
        results.out.write(joined(texts, columns))
    return len(places)


def _chosen(counts: ThreadCounts, groups: Groups, views: ThreadViews, results: ResultWriter) -> np.ndarray:
    """Return the places of the groups to write: all, the N of --top, or the MOST_RECORDS threads with the most work."""
    few = groups.by != "thread" or views.all_threads or len(groups) <= MOST_RECORDS
    if views.top or few:
        return groups.largest(views.top)
    name, many = counts.instance.kernel, f"{len(groups):,} threads"
    if views.by != "thread":
        results.note_once(f"{name}: no records of its {many}; --all-threads writes them")
        return np.empty(0, np.int64)
    results.note_once(
        f"{name}: wrote only the {MOST_RECORDS:,} of {many} with the most work; "
        "add up all with --by warp or --by block, or write all with --all-threads"
    )
    return groups.largest(MOST_RECORDS)

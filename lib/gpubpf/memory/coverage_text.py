"""What kernels touched of allocations, as records and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpubpf import names
from gpubpf.images import symbols
from gpubpf.memory.allocations import FROM_BEFORE
from gpubpf.memory.coverage import Covered, Footprint, Report
from gpubpf.memory.granularity import SECTOR
from gpubpf.show import table
from gpubpf.show.owner_columns import OwnerColumns

if TYPE_CHECKING:
    from gpubpf.agent.protocol import StackFrame
    from gpubpf.memory.traffic import KernelTraffic

WIDTH = 80
MOST_ROWS = 12  # without -v
ROOM = 48 << 20  # granules that the table surely has room for, where they lie side by side
LARGEST_GRANULE = 1 << 20
EXACT = 10_000_000  # from here on numbers are shown in millions and more


def allocation_record(row: Covered, granule: int) -> dict[str, Any]:
    """The record `allocation`."""
    of = row.allocation
    record = {
        "type": "allocation",
        "pid": of.pid,
        "comm": of.comm,
        "gpu": of.gpu,
        "base": f"{of.base:#x}",
        "bytes": of.bytes,
        "read_bytes": row.read,
        "written_bytes": row.written,
        "untouched_bytes": row.untouched,
        "kind": of.kind,
        "call": of.call,
        "freed": of.freed,
        "stack": [symbols.frame_of(frame) for frame in of.stack],
    }
    return record | ({"within_bytes": granule} if granule > 1 else {})


def footprint_record(one: Footprint, requested: int | None) -> dict[str, Any]:
    """The record `footprint`. `requested`: sectors that all requests asked for."""
    name = names.demangle(one.mangled)
    return {
        "type": "footprint",
        "pid": one.pid,
        "comm": one.comm,
        "gpu": one.gpu,
        "kernel": name.short,
        "demangled": name.full,
        "mangled": one.mangled,
        "sectors": one.sectors,
        "bytes": one.bytes,
        "requests": requested,
        "reuse": reuse(one, requested),
    }


def reuse(one: Footprint, requested: int | None) -> float | None:
    """How often a sector was asked for."""
    return round(requested / one.sectors, 3) if requested is not None and one.sectors else None


def requested_sectors(kernels: Sequence[KernelTraffic]) -> dict[tuple[int, int, str], int]:
    """Sectors of global memory that all requests asked for, by process, GPU and kernel."""
    found: dict[tuple[int, int, str], int] = {}
    for kernel in kernels:
        key = (kernel.pid, kernel.gpu, kernel.mangled)
        found[key] = found.get(key, 0) + sum(s.sectors for s in kernel.sites if s.space == "global")
    return found


def records(
    report: Report, kernels: Sequence[KernelTraffic] | None, granule: int, allocations: bool
) -> Iterator[dict[str, Any]]:
    """All records. `kernels`: for footprints; `allocations`: they are wanted."""
    if allocations:
        yield from (allocation_record(row, granule) for row in report.rows)
        for (pid, comm), touched in report.elsewhere.items():
            yield {"type": "unallocated", "pid": pid, "comm": comm, "touched_bytes": touched}
    requested = requested_sectors(kernels or ())
    for one in report.footprints:
        yield footprint_record(one, requested.get((one.pid, one.gpu, one.mangled)))


@dataclass(frozen=True)
class _Row:
    """Allocations of one place in a process and of one GPU, added up; None: not known of one of them."""

    pid: int
    comm: str
    gpu: int
    what: str
    stack: tuple[StackFrame, ...]
    count: int
    bytes: int
    read: int | None
    written: int | None
    untouched: int | None


def allocation_lines(
    report: Report, granule: int, verbose: bool, whose: OwnerColumns | None = None
) -> Iterator[str]:
    """For people: what was never touched first."""
    whose = (whose or OwnerColumns()).see(row.allocation for row in report.rows)
    rows = _folded([row for row in report.rows if _shown(row)])
    if not rows and not report.elsewhere:
        return
    yield "bytes that kernels touched of each allocation (copies by the host do not count)"
    if granule > 1:
        yield f"  to within {granule:,} bytes: --granule 1 tells each byte apart"
    shown = rows if verbose else rows[:MOST_ROWS]
    if shown:
        yield ""
        lines = _rows(shown, whose) if whose.several else _rows_of_one(shown)
        yield lines[0]
        for line, row in zip(lines[1:], shown, strict=True):
            yield line
            if verbose:
                yield from (f"        {table.fit(symbols.frame_of(frame), WIDTH - 8)}" for frame in row.stack)
    if len(rows) > len(shown):
        left = sum(row.untouched or 0 for row in rows[len(shown) :])
        yield f"and {table.count(len(rows) - len(shown), 'place')} more with {left:,} bytes untouched; -v shows them"
    for (pid, comm), touched in report.elsewhere.items():
        yield from table.wrap(
            f"{comm} (pid {pid}): {touched:,} bytes were touched that are in no allocation that was seen"
        )
    yield from _findings(report, granule)
    yield ""


def _rows_of_one(shown: Sequence[_Row]) -> list[str]:
    """The table of one process, in columns whose numbers are exact."""
    several = any(row.count > 1 for row in shown)
    header = ["BYTES", "READ", "WRITTEN", "UNTOUCHED", *(["N"] if several else []), "CALL", "WHERE"]
    room = WIDTH - 4 * 11 - (7 if several else 0)
    places = [symbols.caller(row.stack) for row in shown]
    beside = max((len(place) for place in places), default=0) + 2
    most = min(max((len(row.what) for row in shown), default=0), max(room // 2, room - beside))
    cells = []
    for row, place in zip(shown, places, strict=True):
        numbers = [_number(n) for n in (row.bytes, row.read, row.written, row.untouched)]
        count = [f"{row.count:,}"] if several else []
        cells.append([*numbers, *count, table.fit(row.what, most), table.fit(place, room - most - 2)])
    return table.lines(header, cells, left=("CALL", "WHERE"))


def _rows(shown: Sequence[_Row], whose: OwnerColumns) -> list[str]:
    """The table of several processes, whose columns leave less room."""
    made = []
    for row in shown:
        sizes = {"BYTES": row.bytes, "READ": row.read, "WRITTEN": row.written, "UNTOUCHED": row.untouched}
        cells = {name: "?" if size is None else table.size(size) for name, size in sizes.items()}
        place = {"N": f"{row.count:,}", "CALL": row.what, "WHERE": symbols.caller(row.stack) or "-"}
        made.append(whose.cells(row) | cells | place)
    drop = ("N",) if all(row.count == 1 for row in shown) else ()
    left = ("COMM", "CALL", "WHERE")
    return table.within(
        [{name: cell for name, cell in row.items() if name not in drop} for row in made],
        left,
        drop=("CALL",),
        cut=("WHERE", "COMM"),
    )


def _findings(report: Report, granule: int) -> Iterator[str]:
    """What is beyond doubt."""
    if report.full:
        yield from table.wrap(
            "?: not known, because more memory was touched than the table has room for;"
            f" --granule {_roomier(report, granule)} makes room"
        )
    if any(row.allocation.call == FROM_BEFORE for row in report.rows):
        yield from table.wrap(
            "made before: allocations from before the tool came, as launches mentioned them; what touched them until then is not known"
        )
    if report.partial:
        yield "kernels may have touched more: not every launch, thread and access was probed"
    if report.incomplete:
        yield "some allocations were not seen: there were too many calls"
    if report.partial:
        return
    known = [row for row in report.rows if row.either is not None and row.allocation.kind == "device"]
    known = [
        row for row in known if row.allocation.call != FROM_BEFORE
    ]  # kernels of before may have touched it
    for what, some in (
        ("never touched by kernels", [row for row in known if not row.either]),
        ("written but never read by kernels", [row for row in known if row.written and not row.read]),
    ):
        if some:
            total = sum(row.allocation.bytes for row in some)
            yield f"{what}: {table.count(len(some), 'allocation')} of device memory, {total:,} bytes"


def _roomier(report: Report, granule: int) -> int:
    """A granule with which all that was allocated finds room."""
    by_process: dict[int, int] = {}
    for row in report.rows:
        by_process[row.allocation.process] = by_process.get(row.allocation.process, 0) + row.allocation.bytes
    wanted = max(by_process.values(), default=0) / ROOM
    given = granule
    while granule < LARGEST_GRANULE and (wanted > granule or granule == given):
        granule *= 2
    return granule


def footprint_lines(
    report: Report, kernels: Sequence[KernelTraffic], whose: OwnerColumns | None = None
) -> Iterator[str]:
    """For people: how much of memory each kernel touches."""
    if not report.footprints:
        return
    whose = (whose or OwnerColumns()).see(report.footprints)
    requested = requested_sectors(kernels)
    labels = names.labels(one.mangled for one in report.footprints)
    rows = []
    for one in report.footprints:
        asked = requested.get((one.pid, one.gpu, one.mangled))
        times = reuse(one, asked)
        row = whose.cells(one) | {"KERNEL": table.fit(labels[one.mangled] or "(unknown)", 34)}
        row |= {"BYTES": _number(one.bytes), "SECTORS": _number(one.sectors), "REQUESTED": _number(asked)}
        rows.append(row | {"REUSE": "?" if times is None else f"{times:.2f}"})
    yield f"footprint: memory that each kernel touched in all its launches, {SECTOR}-byte sectors"
    yield ""
    yield from table.within(rows, left=("COMM", "KERNEL"))
    if report.full:
        yield "?: not known, because the table was full; --granule 32 is as exact here"
    yield ""


def _shown(row: Covered) -> bool:
    """Variables and memory of the host are there for other purposes: untouched they say nothing."""
    return row.allocation.kind in ("device", "managed") or row.either != 0


def _folded(rows: Sequence[Covered]) -> list[_Row]:
    """Allocations by where they were made, the most untouched bytes first."""
    groups: dict[tuple[Any, ...], list[Covered]] = {}
    for row in rows:
        of = row.allocation
        groups.setdefault((of.process, of.gpu, of.call, of.stack, 0 if of.stack else of.base), []).append(row)

    def total(values: list[int | None]) -> int | None:
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(values) else None

    folded = [
        _Row(
            some[0].allocation.pid,
            some[0].allocation.comm,
            some[0].allocation.gpu,
            "(made before)"
            if some[0].allocation.call == FROM_BEFORE
            else some[0].allocation.name or some[0].allocation.call,
            some[0].allocation.stack,
            len(some),
            sum(row.allocation.bytes for row in some),
            total([row.read for row in some]),
            total([row.written for row in some]),
            total([row.untouched for row in some]),
        )
        for some in groups.values()
    ]
    return sorted(folded, key=lambda row: (-(row.untouched or 0), -row.bytes))


def _number(count: int | None) -> str:
    """Exact, and from ten million on in three digits or four."""
    if count is None:
        return "?"
    if count < EXACT:
        return f"{count:,}"
    unit = next(u for u in (10**6, 10**9, 10**12, 10**15, 10**18) if count < 1000 * u or u == 10**18)
    return f"{count / unit:,.1f}{'MGTPE'[len(str(unit)) // 3 - 2]}"

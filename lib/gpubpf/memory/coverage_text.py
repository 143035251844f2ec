"""Format the coverage of allocations and the footprints of kernels, as JSON records and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf import names
from gpubpf.images import symbols
from gpubpf.memory.allocations import BEFORE_ATTACH
from gpubpf.memory.coverage import AllocationCoverage, CoverageReport, Footprint
from gpubpf.memory.granularity import SECTOR, WORD_SHIFT
from gpubpf.record import Record
from gpubpf.records.fields import DEMANGLED, KERNEL, MANGLED, OWNER_OF_HOST, owner_of
from gpubpf.show import table
from gpubpf.show.fields import Field, Fields
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf.show.process_records import PROCESS

if TYPE_CHECKING:
    from gpubpf.agent.definitions import Vendor
    from gpubpf.memory.traffic import KernelTraffic
    from gpubpf.process.host_frames import HostFrame

    _Places = Mapping[Sequence[HostFrame], str]  # the names of calls, by stack

WIDTH = 80
MOST_ROWS = 12  # maximum rows without -v
TABLE_GRANULES = 192 << 20  # contiguous granules that certainly fit in the table of touched pages
LARGEST_GRANULE = 1 << 20
MOST_PLACES = 4  # maximum calls in a sentence
_NO_ADDRESS = "accesses to textures and surfaces, and bulk tensor copies, are not seen by address"
EXACT_BELOW = 10_000_000  # larger numbers are shown in millions, billions and so on


_UNSEEN = "without accesses to textures and surfaces, and bulk tensor copies"
ALLOCATION = Fields(
    "allocation",
    "One for each allocation.",
    (
        *OWNER_OF_HOST,
        Field("base", "hex", "its address", get=lambda row: f"{row.allocation.base:#x}"),
        Field("bytes", "bytes", "its size", get="allocation.bytes"),
        Field("read_bytes", "bytes?", f"distinct, {_UNSEEN}; null: not known", get="read"),
        Field("written_bytes", "bytes?", "as read_bytes", get="written"),
        Field("untouched_bytes", "bytes?", "as read_bytes", get="untouched"),
        Field("kind", "string", "device, managed, host, variable", get="allocation.kind"),
        Field("call", "string", "the driver function, or before", get="allocation.call"),
        Field("freed", "boolean", get="allocation.freed"),
        Field(
            "copied",
            "boolean?",
            "whether the program copied from it; null if a graph, a batch of copies or another process may have done so, if calls "
            "were lost, and on AMD GPUs",
            get="allocation.copied",
        ),
        Field(
            "stack",
            "[string]",
            "of the host, innermost first",
            get=lambda row: [symbols.frame_of(frame) for frame in row.allocation.stack],
        ),
        Field("within_bytes", "bytes", "the granule", when="with --granule"),
    ),
)
UNALLOCATED = Fields(
    "unallocated",
    "Bytes that were touched in no known allocation of a process.",
    (
        *PROCESS,
        Field("touched_bytes", "bytes"),
        Field(
            "behind_bytes",
            "bytes",
            "those directly behind the end of an allocation, where no other can begin",
        ),
    ),
)
FOOTPRINT = Fields(
    "footprint",
    "With --footprint, one for each kernel.",
    (
        *(*OWNER_OF_HOST, KERNEL, DEMANGLED, MANGLED),
        Field("sectors", "integer?", "distinct"),
        Field("bytes", "bytes?", "distinct"),
        Field("requests", "integer?", "sectors of all requests"),
        Field("reuse", "number?", "the quotient of requested and distinct sectors"),
    ),
)
RECORDS = (ALLOCATION, UNALLOCATED, FOOTPRINT)


def allocation_record(row: AllocationCoverage, granule: int) -> dict[str, Any]:
    """Return the JSON record `allocation`. `granule`: the size of a granule in bytes."""
    within = {"within_bytes": granule} if granule > 1 else {}
    return ALLOCATION.record(row, **owner_of(row.allocation), **within)


def footprint_record(one: Footprint, requested: int | None) -> dict[str, Any]:
    """Return the JSON record `footprint`. `requested`: the sectors of all requests; None if unknown."""
    return FOOTPRINT.record(one, **owner_of(one), requests=requested, reuse=reuse_of(one, requested))


def reuse_of(one: Footprint, requested: int | None) -> float | None:
    """Return how often a sector was requested on average; None if unknown."""
    return round(requested / one.sectors, 3) if requested is not None and one.sectors else None


def requested_sectors(kernels: Sequence[KernelTraffic]) -> dict[tuple[int, int, str], int]:
    """Return the sectors of all requests to global memory, by pid, GPU and mangled kernel name."""
    found: dict[tuple[int, int, str], int] = {}
    for kernel in kernels:
        key = (kernel.pid, kernel.gpu, kernel.mangled)
        found[key] = found.get(key, 0) + sum(s.sectors for s in kernel.sites if s.space == "global")
    return found


def records(
    report: CoverageReport, kernels: Sequence[KernelTraffic] | None, granule: int, allocations: bool
) -> Iterator[dict[str, Any]]:
    """Yield all JSON records.

    kernels      traffic of kernels, for the reuse in footprints
    allocations  also yield the records of allocations
    """
    if allocations:
        yield from (allocation_record(row, granule) for row in report.allocations)
        for (pid, comm), outside in report.unallocated.items():
            touched = {"touched_bytes": outside.bytes, "behind_bytes": outside.behind}
            yield UNALLOCATED.record(pid=pid, comm=comm, **touched)
    requested = requested_sectors(kernels or ())
    for one in report.footprints:
        yield footprint_record(one, requested.get((one.pid, one.gpu, one.mangled)))


class _CallSite(Record):
    """A row of the table: the sums of all allocations with one call stack, in one process on one GPU.

    what                      driver function, name of a variable, or "(made before)"
    count                     number of allocations
    read, written, untouched  bytes; None if unknown for any of the allocations
    """

    pid: int
    comm: str
    gpu: int
    what: str
    stack: tuple[HostFrame, ...]
    count: int
    bytes: int
    read: int | None
    written: int | None
    untouched: int | None
    vendor: Vendor


def allocation_lines(
    report: CoverageReport, granule: int, verbose: bool, owners: OwnerColumns | None = None
) -> Iterator[str]:
    """Yield the table of allocations, most untouched bytes first, and the findings."""
    owners = (owners or OwnerColumns()).see(row.allocation for row in report.allocations)
    rows = _by_call_site([row for row in report.allocations if _is_shown(row)])
    places = symbols.callers(row.stack for row in rows)
    if not rows and not report.unallocated:
        return
    yield "bytes of each allocation that kernels touched (host copies do not count)"
    if granule > 1:
        yield f"  accurate to {granule:,} bytes; --granule 1 is exact"
    shown = rows if verbose else rows[:MOST_ROWS]
    if shown:
        yield ""
        made = _several_process_table(shown, places, owners) if owners.several else None
        lines = made or _one_process_table(shown, places)
        yield lines[0]
        for line, row in zip(lines[1:], shown, strict=True):
            yield line
            if verbose:
                yield from (f"        {table.fit(symbols.frame_of(frame), WIDTH - 8)}" for frame in row.stack)
    if len(rows) > len(shown):
        left = sum(row.untouched or 0 for row in rows[len(shown) :])
        more = table.count(len(rows) - len(shown), "more place")
        yield f"{more} with {table.count(left, 'byte')} untouched; -v shows them"
    for (pid, comm), outside in report.unallocated.items():
        who = f"{table.process(comm, pid)}: kernels touched"
        if outside.allocation is not None:
            caller = places.get(outside.allocation.stack, "")
            by = f" (made by {table.fit(caller, WIDTH // 2)})" if caller else ""
            of = f"an allocation of {table.count(outside.allocation.bytes, 'byte')}{by}"
            yield from table.wrap(
                f"{who} {table.count(outside.behind, 'byte')} behind the end of {of}: out of bounds"
            )
        if rest := outside.bytes - outside.behind:
            yield from table.wrap(
                f"{who} {table.count(rest, 'byte')} outside of all known allocations,"
                " perhaps on the device heap (malloc, new) or in memory of the runtime"
            )
    yield from _findings(report, places, granule)
    yield ""


def _one_process_table(shown: Sequence[_CallSite], called: _Places) -> list[str]:
    """Return the table for one process, which has room for exact numbers."""
    several = any(row.count > 1 for row in shown)
    header = ["BYTES", "READ", "WRITTEN", "UNTOUCHED", *(["N"] if several else []), "CALL", "WHERE"]
    numbers = [[_number(n) for n in (row.bytes, row.read, row.written, row.untouched)] for row in shown]
    counts = [f"{row.count:,}" for row in shown] if several else []
    widths = [max(map(len, column)) for column in zip(header, *numbers, strict=False)]
    room = WIDTH - sum(width + 2 for width in widths) - (max(map(len, counts)) + 2 if several else 0)
    places = [called[row.stack] for row in shown]
    beside = max((len(place) for place in places), default=0) + 2
    most = min(max((len(row.what) for row in shown), default=0), max(room // 2, room - beside))
    cells = []
    for at, (row, place) in enumerate(zip(shown, places, strict=True)):
        cells.append(
            [*numbers[at], *counts[at : at + 1], table.fit(row.what, most), table.fit(place, room - most - 2)]
        )
    return table.lines(header, cells, left=("CALL", "WHERE"))


def _several_process_table(shown: Sequence[_CallSite], called: _Places, owners: OwnerColumns) -> list[str]:
    """Return the table for several processes or GPUs, whose columns leave room only for rounded sizes."""
    made = []
    for row in shown:
        sizes = {"BYTES": row.bytes, "READ": row.read, "WRITTEN": row.written, "UNTOUCHED": row.untouched}
        cells = {name: "?" if size is None else table.size(size) for name, size in sizes.items()}
        place = {"N": f"{row.count:,}", "CALL": row.what, "WHERE": called[row.stack] or "-"}
        made.append(owners.cells(row) | cells | place)
    drop = ("N",) if all(row.count == 1 for row in shown) else ()
    left = ("COMM", "CALL", "WHERE")
    return table.within(
        [{name: cell for name, cell in row.items() if name not in drop} for row in made],
        left,
        drop=("CALL",),
        cut=("WHERE", "COMM"),
    )


def _findings(report: CoverageReport, called: _Places, granule: int) -> Iterator[str]:
    """Yield what is missing from the table and why, then the allocations that kernels certainly did not use."""
    if report.full:
        yield from table.wrap(
            "?: unknown, because the table of touched memory was full;"
            f" use --granule {_larger_granule(report, granule)}"
        )
    if any(row.allocation.call == BEFORE_ATTACH for row in report.allocations):
        yield from table.wrap(
            "(made before): allocated before memtrace attached, found in launch parameters; earlier accesses are unknown"
        )
    if report.partial:
        yield "kernels may have touched more: not every launch, thread and access was probed"
    if report.hidden:
        yield from table.wrap(f"kernels may have touched more: {_NO_ADDRESS}")
    if report.incomplete:
        yield "some allocations are missing: there were too many calls to record"
    if report.partial or report.hidden:
        return
    known = [row for row in report.allocations if row.touched is not None and row.allocation.kind == "device"]
    # Kernels may have touched these before memtrace attached, or in another process.
    known = [row for row in known if row.allocation.call != BEFORE_ATTACH and not row.allocation.shared]
    # Copying counts as reading.
    unread = [row for row in known if row.written and not row.read and row.allocation.copied is False]
    for what, some in (
        ("never touched by kernels", [row for row in known if not row.touched]),
        ("written, but neither read nor copied", unread),
    ):
        if some:
            total = sum(row.allocation.bytes for row in some)
            said = f"{what}: {table.count(len(some), 'allocation')} of device memory, {table.count(total, 'byte')}"
            yield from table.wrap(said + _made_by(some, called))


def _made_by(some: Iterable[AllocationCoverage], called: _Places) -> str:
    """Return which calls made these allocations, most bytes first, as the end of a sentence; "" if the calls are unknown."""
    made: Counter[str] = Counter()
    for row in some:
        made[called.get(row.allocation.stack, "")] += row.allocation.bytes
    places = [table.fit(name, WIDTH // 2) for name, _ in made.most_common() if name]
    more = f" and {table.count(len(places) - MOST_PLACES, 'more place')}" if len(places) > MOST_PLACES else ""
    return f"; made by {', '.join(places[:MOST_PLACES])}{more}" if places else ""


def _larger_granule(report: CoverageReport, granule: int) -> int:
    """Return a larger granule, in bytes, with which all allocations fit in the table; at most LARGEST_GRANULE."""
    by_process: dict[int, int] = {}
    for row in report.allocations:
        by_process[row.allocation.process] = by_process.get(row.allocation.process, 0) + row.allocation.bytes
    wanted = max(by_process.values(), default=0) / TABLE_GRANULES
    given = granule if granule > 1 else 1 << WORD_SHIFT  # bytes; the largest size of an exact granule
    while granule < LARGEST_GRANULE and (wanted > granule or granule <= given):
        granule *= 2
    return granule


def footprint_lines(
    report: CoverageReport,
    kernels: Sequence[KernelTraffic],
    owners: OwnerColumns | None = None,
    granule: int = 1,
) -> Iterator[str]:
    """Yield the table of footprints. `granule`: the size of a granule in bytes."""
    if not report.footprints:
        return
    owners = (owners or OwnerColumns()).see(report.footprints)
    requested = requested_sectors(kernels)
    labels = names.labels((one.mangled for one in report.footprints), 34)
    rows = []
    for one in report.footprints:
        asked = requested.get((one.pid, one.gpu, one.mangled))
        times = reuse_of(one, asked)
        row = owners.cells(one) | {"KERNEL": labels[one.mangled] or "(unknown)"}
        row |= {"BYTES": _number(one.bytes), "SECTORS": _number(one.sectors), "REQUESTED": _number(asked)}
        rows.append(row | {"REUSE": "?" if times is None else f"{times:.2f}"})
    sizes = sorted({one.vendor.sector for one in report.footprints})
    sectors = " (AMD GPUs: ".join(f"{size}-byte sectors" for size in sizes) + ")" * (len(sizes) - 1)
    yield f"footprint: memory that each kernel touched in all its launches, {sectors}"
    yield ""
    yield from table.within(rows, left=("COMM", "KERNEL"))
    if report.hidden:
        yield from table.wrap(f"incomplete: {_NO_ADDRESS}")
    if report.full:
        exact = f"; --granule {SECTOR} counts sectors as exactly" if granule < SECTOR else ""
        yield f"?: unknown, because the table was full{exact}"
    yield ""


def _is_shown(row: AllocationCoverage) -> bool:
    """Return whether an allocation gets a row. Untouched variables and host memory do not, since they may have other uses."""
    return row.allocation.kind in ("device", "managed") or row.touched != 0


def _by_call_site(rows: Sequence[AllocationCoverage]) -> list[_CallSite]:
    """Return the allocations summed by call stack, or by address without a stack; most untouched bytes first."""
    groups: dict[tuple[Any, ...], list[AllocationCoverage]] = {}
    for row in rows:
        made = row.allocation
        groups.setdefault(
            (made.process, made.gpu, made.call, made.stack, 0 if made.stack else made.base), []
        ).append(row)

    def total(values: list[int | None]) -> int | None:
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(values) else None

    folded = [
        _CallSite(
            some[0].allocation.pid,
            some[0].allocation.comm,
            some[0].allocation.gpu,
            "(made before)"
            if some[0].allocation.call == BEFORE_ATTACH
            else some[0].allocation.name or some[0].allocation.call,
            some[0].allocation.stack,
            len(some),
            sum(row.allocation.bytes for row in some),
            total([row.read for row in some]),
            total([row.written for row in some]),
            total([row.untouched for row in some]),
            some[0].allocation.vendor,
        )
        for some in groups.values()
    ]
    return sorted(folded, key=lambda row: (-(row.untouched or 0), -row.bytes))


def _number(count: int | None) -> str:
    """Return a number as text: exact below EXACT_BELOW, otherwise rounded with a unit prefix; "?" for None."""
    if count is None:
        return "?"
    if count < EXACT_BELOW:
        return f"{count:,}"
    unit = next(u for u in (10**6, 10**9, 10**12, 10**15, 10**18) if count < 1000 * u or u == 10**18)
    return f"{count / unit:,.1f}{'MGTPE'[len(str(unit)) // 3 - 2]}"

"""Count the bytes of each allocation that kernels read, wrote or never touched, and the memory that each kernel touched.

    coverage = Coverage(Grain())
    for _ in session.intervals(…, tick=lambda: coverage.take(session)):
        report = coverage.report(session)
        report.allocations[0].allocation, report.allocations[0].read, report.allocations[0].untouched

Device programs (gpubpf_coverage.h) fill a table of pages. A page has 4096 granules, and a granule has `1 << shift` bytes. If each
byte counts (shift 0), accesses whose width is a multiple of 4 bytes use pages with granules of 4 bytes. Other accesses use narrow
pages, with granules of 1 byte. The map `touched` holds the table. Each of its entries has these fields:

    tag     page number (address / bytes of a page), epoch, and whether the page is narrow; 0: the entry is empty
    owner   number of the kernel + 1; used with --footprint
    bits    128 words: 64 for what was read, then 64 for what was written, with a bit for each granule

Each bit of `missed` stands for 2 MB of addresses, modulo 128 GB. It is set if the table had no room for something in that area.
Epoch and address together identify an allocation (docs/memory.md).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpubpf import names
from gpubpf.agent.definitions import Vendor
from gpubpf.memory.granularity import WORD_SHIFT, Grain
from gpubpf.memory.traffic import UNADDRESSED, may_hide_bytes
from gpubpf.record import Record, replace
from gpubpf.records.launch_shape import wave_of
from gpubpf.records.reasons import LAUNCH_FAILED

if TYPE_CHECKING:
    from gpubpf.memory.allocations import Allocation
    from gpubpf.records.results import Instance
    from gpubpf.session.session import Session

    Integers = npt.NDArray[np.int64]
    Words = npt.NDArray[np.uint64]

MAPS = ("touched", "missed")
GRANULES = 4096  # granules of a page
WORDS = GRANULES // 64
ALIGNED = (
    256  # bytes; allocations begin at multiples of it (CUDA programming guide, "Device Memory Accesses")
)
AREA_BITS, AREAS = 21, 1 << 16  # a bit of `missed` stands for an area of 2 MB
EPOCHS = 1 << 22  # number of epochs that the table can distinguish
NO_KERNEL = -1  # the kernel number if kernels are not tracked separately
_CHUNK = 1 << 13  # pages to process together: about 30 MB
_NARROW = 1 << 8  # in a tag: GPUBPF_NARROW
_BY_PAGE = (
    "page",
    "epoch",
    "kernel",
    "gpu",
    "bits",
    "narrow",
)  # the arrays of `TouchedPages` with an element for each page
# Honest programs stay far below this limit. Without it, a process that lies about its allocations could keep the tool busy.
_MOST_OVERLAPPING = 32  # maximum live allocations that overlap others
_BITS_OF_BYTE = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)
_LOW_BITS = np.array([(1 << bit) - 1 for bit in range(65)], np.uint64)  # element n has the n lowest bits set


class TouchedPages(Record):
    """The pages that kernels of one process touched. Each array has one element per page.

    page    page number: address / bytes of a page
    epoch   epoch of the launches
    kernel  number of the kernel; NO_KERNEL if kernels are not tracked separately
    gpu     ordinal of the GPU
    bits    [page, 128] words: 64 for what was read, then 64 for what was written, with a bit for each granule
    narrow  whether the page's granules are single bytes, although other pages have larger granules
    missed  [AREAS]: whether pages in each area found no room in the table
    """

    process: int
    pid: int
    comm: str
    page: Integers
    epoch: Integers
    kernel: Integers
    gpu: Integers
    bits: Words
    narrow: npt.NDArray[np.bool_]
    missed: npt.NDArray[np.bool_]

    def some(self, chosen: npt.NDArray[np.bool_]) -> TouchedPages:
        """Return the chosen pages."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in _BY_PAGE})

    @property
    def full(self) -> bool:
        """Whether the table had no room for some pages."""
        return bool(self.missed.any())


class AllocationCoverage(Record):
    """An allocation, and how many of its bytes instrumented kernels read, wrote, and touched in either way.

    Counts are None if unknown, because the table was full or could not be read, or there were too many overlaps or epochs.
    """

    allocation: Allocation
    read: int | None
    written: int | None
    touched: int | None

    @property
    def untouched(self) -> int | None:
        return None if self.touched is None else self.allocation.bytes - self.touched


class Footprint(Record):
    """The memory that a kernel touched in one process, on one GPU.

    mangled         mangled name of the kernel; "" if unknown
    sectors, bytes  distinct sectors and distinct bytes; None if unknown because the table was full
    vendor          vendor of the GPU, which determines the size of a sector
    wave            the lanes of the kernel's waves, if it is an AMD GPU
    """

    pid: int
    comm: str
    gpu: int
    mangled: str
    sectors: int | None
    bytes: int | None
    vendor: Vendor = Vendor.NVIDIA
    wave: int | None = None


class Outside(Record):
    """What kernels touched outside all known allocations.

    bytes       number of bytes
    behind      number of these bytes between the end of an allocation in GPU memory and the next address where one can begin
    allocation  the allocation behind which most of the latter lie; None if there are none
    """

    bytes: int
    behind: int = 0
    allocation: Allocation | None = None


class CoverageReport(Record):
    """The coverage at one moment.

    unallocated  what was touched outside all known allocations, by (pid, comm)
    footprints   empty if kernels are not tracked separately
    full         the table had no room for some pages
    incomplete   allocations may be missing
    partial      kernels may have touched more, in launches, threads or accesses that were not probed
    hidden       kernels accessed textures or surfaces, or made bulk tensor copies: they may have touched more, at unknown addresses
    """

    allocations: list[AllocationCoverage]
    unallocated: dict[tuple[int, str], Outside]
    footprints: list[Footprint]
    full: bool
    incomplete: bool
    partial: bool = False
    hidden: bool = False


# Fields of the summary about accesses that were not probed.
_NOT_SEEN = ("not_probed", "launches_by_kernels", "graphs_before", "graphs_unknown")


class Coverage:
    """Collects allocations and kernel names during a session, and joins them with the touched bytes.

    `some_threads`: the programs probe only some threads.
    """

    def __init__(self, grain: Grain, some_threads: bool = False) -> None:
        from gpubpf.memory.allocations import Allocations

        self._grain, self._some_threads = grain, some_threads
        self._allocations = Allocations()
        self._names: dict[int, Mapping[int, str]] = {}
        self._waves: dict[int, Mapping[str | int, int] | None] = {}

    def take(self, session: Session) -> None:
        """Take new allocations and kernel names. Call this from the thread that runs `intervals`."""
        for log in session.logs():
            self._allocations.add(log)
            self._names[log.process] = log.names
            self._waves[log.process] = log.waves if log.vendor is Vendor.AMD else None

    def report(self, session: Session) -> CoverageReport:
        """Return the coverage as of the last time the maps were read."""
        self.take(session)
        tables = read_pages(session, self._grain.by_kernel)
        unread = session.unread() if session.stopped else set()
        rows, rest = join(tables, self._allocations.all(), self._grain.shift, unread)
        who = {t.process: (t.pid, t.comm) for t in tables}
        summary = session.summary()
        # HIP's own kernels are copies and fills by the host, which do not count. Rejected launches touched nothing.
        untouched = sum(
            k.launches - k.instrumented
            if names.is_of_runtime(k.mangled)
            else k.not_instrumented.get(LAUNCH_FAILED, 0)
            for k in session.kernels()
        )
        return CoverageReport(
            rows,
            {who[process]: outside for process, outside in rest.items()},
            footprints(tables, self._names, self._grain.shift, self._waves) if self._grain.by_kernel else [],
            any(t.full for t in tables),
            bool(self._allocations.dropped or self._allocations.incomplete),
            self._some_threads
            or summary["launches_seen"] - untouched != summary["launches_instrumented"]
            or any(map(summary.get, _NOT_SEEN)),
            session.has_map(UNADDRESSED)
            and any(_hides_bytes(session, instance) for instance in session.instances(UNADDRESSED)),
        )


def _hides_bytes(session: Session, instance: Instance) -> bool:
    """Return whether a kernel may have touched bytes at addresses that are unknown."""
    sites = session.sites(instance.mangled, instance.pid, instance.build)
    numbers = np.flatnonzero(instance.array["requests"].any(axis=0)).tolist()  # over all shards
    return any(number not in sites or may_hide_bytes(sites[number]) for number in numbers)


def read_pages(session: Session, owners: bool = False) -> list[TouchedPages]:
    """Return the touched pages of each process, as last read. The contexts of a process are merged.

    `owners`: the table has kernel numbers.
    """
    by_context: dict[tuple[int, int], dict[str, Instance]] = {}
    for name in MAPS:
        for instance in session.instances(name):
            by_context.setdefault((instance.process, instance.context), {})[name] = instance
    found: dict[int, list[TouchedPages]] = {}
    for (process, _), parts in by_context.items():
        if all(name in parts for name in MAPS):
            touched, missed = (parts[name] for name in MAPS)
            found.setdefault(process, []).append(
                decode_pages(
                    process, touched.pid, touched.comm, touched.gpu, touched.array, missed.array, owners
                )
            )
    return [_merge_contexts(tables) for tables in found.values()]


def decode_pages(
    process: int, pid: int, comm: str, gpu: int, touched: Any, missed: Any, owners: bool = False
) -> TouchedPages:
    """Return the touched pages of one context, from the arrays of its maps. `owners`: the table has kernel numbers."""
    there = np.flatnonzero(touched["tag"])
    tags = touched["tag"][there]
    page = tags >> np.uint64(32) | (tags & np.uint64(_NARROW - 1)) << np.uint64(32)
    kernel = touched["owner"][there].astype(np.int64) - 1 if owners else np.full(len(there), NO_KERNEL)
    return TouchedPages(
        process,
        pid,
        comm,
        page.astype(np.int64),
        (tags >> np.uint64(9) & np.uint64(2 * EPOCHS - 1)).astype(np.int64) - 1,
        kernel,
        np.full(len(there), gpu, np.int64),
        touched["bits"][there],
        (tags & np.uint64(_NARROW)).astype(bool),
        np.unpackbits(missed.view(np.uint8), bitorder="little").astype(bool),
    )


def _merge_contexts(tables: Sequence[TouchedPages]) -> TouchedPages:
    """Return the pages of all contexts of a process. A page that several contexts touched remains several elements."""
    if len(tables) == 1:
        return tables[0]
    first = tables[0]
    joined = {name: np.concatenate([getattr(t, name) for t in tables]) for name in _BY_PAGE}
    missed = np.logical_or.reduce([t.missed for t in tables])
    return TouchedPages(first.process, first.pid, first.comm, **joined, missed=missed)


def by_granule(
    table: TouchedPages, shift: int, allocations: Iterable[Allocation] = ()
) -> list[tuple[TouchedPages, int]]:
    """Return the pages in parts, each with the base-2 logarithm of its granule size.

    No address is in two parts. If a part's granules are smaller than `1 << shift` bytes, allocations begin and end between granules.
    """
    if shift:
        return [(table, shift)]
    word, bytes_ = 1 << WORD_SHIFT, GRANULES << WORD_SHIFT
    edges = {edge for a in allocations for edge in (a.base, a.base + a.bytes)}
    split = np.array([edge // bytes_ for edge in edges if edge % word], np.int64)
    mixed = np.isin(table.page, np.concatenate([split, table.page[table.narrow] >> WORD_SHIFT]))
    whole, mixed = ~table.narrow & ~mixed, ~table.narrow & mixed
    parts = [table.some(table.narrow), *_in_bytes(table.some(mixed))]
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in _BY_PAGE
    }
    return [(table.some(whole), WORD_SHIFT), (replace(table, **joined), 0)]


def _in_bytes(table: TouchedPages) -> Iterator[TouchedPages]:
    """Yield pages whose granules have 4 bytes as narrow pages."""
    times = 1 << WORD_SHIFT
    for at in range(0, len(table.page), _CHUNK // 8):
        chosen = np.zeros(len(table.page), bool)
        chosen[at : at + _CHUNK // 8] = True
        some = table.some(chosen)
        bits = np.unpackbits(some.bits.view(np.uint8), axis=1, bitorder="little")
        bits = np.repeat(bits, times, axis=1).reshape(-1, 2, times, GRANULES).swapaxes(1, 2)
        again: dict[str, Any] = {name: np.repeat(getattr(some, name), times, axis=0) for name in _BY_PAGE}
        again["page"] = again["page"] * times + np.tile(np.arange(times), len(some.page))
        again["bits"] = np.packbits(bits.reshape(-1, 2 * GRANULES), axis=1, bitorder="little").view(np.uint64)
        again["narrow"] = np.ones(len(again["page"]), bool)
        yield replace(table, **again)


def join(
    tables: Sequence[TouchedPages],
    allocations: Sequence[Allocation],
    shift: int,
    unread: Collection[int] = (),
) -> tuple[list[AllocationCoverage], dict[int, Outside]]:
    """Return the coverage of each allocation, in order, and what was touched outside all allocations, by process number.

    shift   base-2 logarithm of the granule
    unread  numbers of the processes whose tables lack some launches
    """
    result: list[AllocationCoverage | None] = [None] * len(allocations)
    by_process: dict[int, list[int]] = {}
    for number, allocation in enumerate(allocations):
        by_process.setdefault(allocation.process, []).append(number)
    unallocated = {}
    known = {t.process: t for t in tables}
    for process in known.keys() | by_process.keys():
        numbers = by_process.get(process, [])
        own = [allocations[number] for number in numbers]
        table = known.get(process)
        counts = np.zeros((len(own), 3), np.int64)
        unknown: set[int] = set()
        if table is not None:
            outside = []
            rest = 0
            for part, size in by_granule(table, shift, own):
                some, left, uncounted = _count_bytes(part, own, size)
                counts += some
                unknown |= {*uncounted}
                rest += _distinct_granules(part.page, left) << size
                outside.append((part, left, size))
            if rest:
                behind, nearest = _behind(outside, own, shift)
                unallocated[process] = Outside(rest, min(behind, rest), nearest)
        incomplete = _may_be_incomplete(table, own)
        for place, (number, allocation) in enumerate(zip(numbers, own, strict=True)):
            reads, writes, either = counts[place].tolist()
            if process in unread or place in unknown or incomplete[place]:
                result[number] = AllocationCoverage(allocation, None, None, None)
            else:
                result[number] = AllocationCoverage(allocation, reads, writes, either)
    return [row for row in result if row is not None], unallocated


def _may_be_incomplete(table: TouchedPages | None, allocations: Sequence[Allocation]) -> list[bool]:
    """Return for each allocation whether its counts may be wrong, because pages found no room or there are too many epochs."""
    if table is None:
        return [False] * len(allocations)
    base = np.array([a.base for a in allocations], np.int64)
    last = base + np.array([max(a.bytes, 1) for a in allocations], np.int64) - 1 >> AREA_BITS
    around = np.tile(table.missed, 2)
    before = np.concatenate([[0], np.cumsum(around)])  # element n: areas with a miss among the first n
    first = base >> AREA_BITS
    low, many = first % AREAS, last - first
    missing = before[low + np.minimum(many, AREAS - 1) + 1] - before[low]
    epochs = np.array([a.first_epoch for a in allocations], np.int64)
    return [bool(it) for it in (missing > 0) | (epochs >= EPOCHS)]


def _count_bytes(
    table: TouchedPages, allocations: Sequence[Allocation], shift: int
) -> tuple[Integers, Words, Collection[int]]:
    """Return the bytes as [allocation, (read, written, touched)]; as [page, WORDS] the granules touched outside all allocations; and
    the indices of allocations that were not counted."""
    counts = np.zeros((len(allocations), 3), np.int64)
    allocation_at, page_at, unknown = _overlaps(table, allocations, shift)
    base = np.array([a.base for a in allocations] or [0], np.int64)
    end = base + np.array([a.bytes for a in allocations] or [0], np.int64)
    grain = 1 << shift
    # A page that was touched in several epochs, or by several GPUs or kernels, counts once.
    order = np.lexsort((table.page[page_at], allocation_at))
    allocation_at, page_at = allocation_at[order], page_at[order]
    page = table.page[page_at]
    starts = _group_starts(allocation_at, page)
    for chunk in _group_chunks(starts, len(allocation_at)):
        own, number = allocation_at[chunk], page[chunk]
        first = _group_starts(own, number)
        bits = _or_groups(table.bits[page_at[chunk]], first)
        own, number = own[first], number[first]
        low = np.clip((base[own] >> shift) - number * GRANULES, 0, GRANULES)
        high = np.clip(-(-end[own] >> shift) - number * GRANULES, 0, GRANULES)
        mask = _range_masks(low, high)
        reads, writes = bits[:, :WORDS] & mask, bits[:, WORDS:] & mask
        # The bytes of the first and last granule that do not belong to the allocation.
        over = (number * GRANULES <= base[own] >> shift) * (base[own] % grain)
        under = ((number + 1) * GRANULES >= -(-end[own] >> shift)) * (-end[own] % grain)
        for column, some in enumerate((reads, writes, reads | writes)):
            size = _bit_counts(some) * grain - _bit_at(some, low) * over - _bit_at(some, high - 1) * under
            counts[:, column] += np.bincount(own, size, len(allocations)).astype(np.int64)
    # Bytes outside all allocations, page by page.
    left = table.bits[:, :WORDS] | table.bits[:, WORDS:]
    order = np.argsort(page_at, kind="stable")
    allocation_at, page_at = allocation_at[order], page_at[order]
    starts = _group_starts(page_at)
    for chunk in _group_chunks(starts, len(page_at)):
        some, own, first = page_at[chunk], allocation_at[chunk], _group_starts(page_at[chunk])
        number = table.page[some]
        low = np.clip((base[own] >> shift) - number * GRANULES, 0, GRANULES)
        high = np.clip(-(-end[own] >> shift) - number * GRANULES, 0, GRANULES)
        left[some[first]] &= ~_or_groups(_range_masks(low, high), first)
    return counts, left, unknown


def _behind(
    outside: Iterable[tuple[TouchedPages, Words, int]], allocations: Sequence[Allocation], shift: int
) -> tuple[int, Allocation | None]:
    """Return the number of touched bytes between the end of an allocation and the next address where one can begin.

    Also return the allocation behind which most of these bytes lie.

    outside: parts of `by_granule`, the granules touched outside all allocations, and the base-2 logarithm of a granule.
    """
    owners = [
        a for a in allocations if a.kind in ("device", "managed") and not (a.base + a.bytes) % (1 << shift)
    ]
    ends = [replace(a, base=a.base + a.bytes, bytes=-(a.base + a.bytes) % ALIGNED) for a in owners]
    some = [n for n, end in enumerate(ends) if end.bytes]
    touched = np.zeros(len(some), np.int64)
    for table, left, size in outside:
        rest = replace(table, bits=np.concatenate([left, np.zeros_like(left)], axis=1))
        counts, _, _ = _count_bytes(rest, [ends[n] for n in some], size)
        touched += counts[:, 2]
    return int(touched.sum()), owners[some[int(touched.argmax())]] if touched.any() else None


def _or_groups(words: Words, first: Integers) -> Words:
    """Return one row per group of rows: their bitwise OR. `first`: the index of each group's first row."""
    return words if len(first) == len(words) else np.bitwise_or.reduceat(words, first, axis=0)


def _distinct_granules(page: Integers, words: Words) -> int:
    """Return how many distinct granules were touched. A page counts once, even if several epochs or kernels touched it."""
    if not len(page):
        return 0
    order = np.argsort(page, kind="stable")
    return int(_bit_counts(np.bitwise_or.reduceat(words[order], _group_starts(page[order]), axis=0)).sum())


def _overlaps(
    table: TouchedPages, allocations: Sequence[Allocation], shift: int
) -> tuple[Integers, Integers, Collection[int]]:
    """Return the pairs of an allocation and a page that overlap, and the allocations that were not examined.

    The pairs are two arrays of the same length: indices of allocations, and indices of pages. An allocation pairs with a page only if
    it was live in the page's epoch.

    Many allocations may have had the same address, one after the other. So this processes the epochs in order, with a sorted list of
    live allocations that do not overlap. Live allocations that overlap others (such as a part of a range that is also known as a
    whole) are kept separately, at most _MOST_OVERLAPPING of them.
    """
    if not len(table.page) or not allocations:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), ()
    page_bytes = GRANULES << shift
    pages = np.unique(table.page)
    base = np.array([a.base for a in allocations], np.int64)
    end = base + np.array([max(a.bytes, 1) for a in allocations], np.int64)
    first, last = base // page_bytes, (end - 1) // page_bytes
    some = np.flatnonzero(np.searchsorted(pages, first) < np.searchsorted(pages, last, "right"))
    born = sorted((allocations[n].first_epoch, n) for n in some.tolist())
    died = sorted((gone, n) for n in some.tolist() if (gone := allocations[n].last_epoch) is not None)
    living: list[tuple[int, int]] = []  # (base, index), sorted; they do not overlap
    others: dict[int, None] = {}  # indices of live allocations that overlap others
    unknown: set[int] = set()
    ends = end.tolist()
    bases = base.tolist()
    allocation_at: list[int] = []
    page_at: list[int] = []
    order = np.lexsort((table.page, table.epoch))
    b = d = 0
    for at, epoch, page in zip(
        order.tolist(), table.epoch[order].tolist(), table.page[order].tolist(), strict=True
    ):
        # Remove ended allocations first, because the next allocations may have their addresses.
        while d < len(died) and died[d][0] < epoch:
            n = died[d][1]
            d += 1
            place = bisect.bisect_left(living, (bases[n], n))
            if place < len(living) and living[place][1] == n:
                del living[place]
            else:
                others.pop(n, None)
        while b < len(born) and born[b][0] <= epoch:
            n = born[b][1]
            b += 1
            until = allocations[n].last_epoch
            if until is not None and until < epoch:
                continue
            place = bisect.bisect(living, (bases[n], n))
            if (place and ends[living[place - 1][1]] > bases[n]) or (
                place < len(living) and living[place][0] < ends[n]
            ):
                if len(others) < _MOST_OVERLAPPING:
                    others[n] = None
                else:
                    unknown.add(n)
            else:
                living.insert(place, (bases[n], n))
        start = page * page_bytes
        place = bisect.bisect_left(living, (start + page_bytes, -1))
        while place and ends[living[place - 1][1]] > start:
            place -= 1
            allocation_at.append(living[place][1])
            page_at.append(at)
        for n in others:
            if bases[n] < start + page_bytes and ends[n] > start:
                allocation_at.append(n)
                page_at.append(at)
    return np.array(allocation_at, np.int64), np.array(page_at, np.int64), unknown


def _group_starts(*keys: Integers) -> Integers:
    """Return the index of the first row of each group, in rows sorted by `keys`."""
    if not len(keys[0]):
        return np.zeros(0, np.int64)
    new = np.ones(len(keys[0]), bool)
    new[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return np.flatnonzero(new)


def _group_chunks(starts: Integers, count: int) -> Iterator[slice]:
    """Yield slices of about _CHUNK rows that cover `count` rows and do not split groups. Groups begin at `starts`."""
    if not count:
        return
    borders = np.unique(np.searchsorted(starts, np.arange(_CHUNK, count, _CHUNK)))
    edges = [0, *(starts[borders[borders < len(starts)]].tolist()), count]
    for begin, end in itertools.pairwise(edges):
        if begin < end:
            yield slice(begin, end)


def _range_masks(low: Integers, high: Integers) -> Words:
    """Return words [row, WORDS] in which bits `low` (included) to `high` (excluded) are set."""
    at = 64 * np.arange(WORDS)
    return _LOW_BITS[np.clip(high[:, None] - at, 0, 64)] & ~_LOW_BITS[np.clip(low[:, None] - at, 0, 64)]


def _bit_counts(words: Words) -> Integers:
    """Return the number of set bits in each row."""
    if hasattr(np, "bitwise_count"):  # NumPy 2
        return np.bitwise_count(words).sum(axis=1, dtype=np.int64)
    return _BITS_OF_BYTE[np.ascontiguousarray(words).view(np.uint8)].sum(axis=1, dtype=np.int64)


def _bit_at(words: Words, bit: Integers) -> Integers:
    """Return bit `bit` of each row: 0 or 1."""
    bit = np.clip(bit, 0, GRANULES - 1)
    word = words[np.arange(len(words)), bit // 64]
    return ((word >> (bit % 64).astype(np.uint64)) & np.uint64(1)).astype(np.int64)


def footprints(
    tables: Sequence[TouchedPages],
    names: Mapping[int, Mapping[int, str]],
    shift: int,
    waves: Mapping[int, Mapping[str | int, int] | None] | None = None,
) -> list[Footprint]:
    """Return the footprint of each kernel on each GPU of each process, those with the most sectors first.

    names    mangled names by process number and kernel number
    shift    base-2 logarithm of the granule, which must not be larger than a sector
    waves    see `ProcessLog`, by process number; None: it uses NVIDIA GPUs

    An address counts once, even if it was touched in several epochs, because unrelated allocations end epochs, too.
    """
    result = []
    for table in tables:
        own = names.get(table.process, {})
        of_amd = (waves or {}).get(table.process)
        vendor = Vendor.NVIDIA if of_amd is None else Vendor.AMD
        numbers = np.unique(table.kernel).tolist()
        mangled = sorted({own.get(number, "") for number in numbers})
        place = np.array([mangled.index(own.get(number, "")) for number in numbers], np.int64)
        kernel = place[np.searchsorted(numbers, table.kernel)] if numbers else table.kernel
        gpus, gpu = np.unique(table.gpu, return_inverse=True)
        groups = gpu * len(mangled) + kernel  # a kernel has one group per GPU
        counts = np.zeros((len(gpus) * len(mangled), 2), np.int64)
        for part, size in by_granule(replace(table, kernel=groups), shift):
            group = part.kernel
            order = np.lexsort((part.page, group))
            keys = (group[order], part.page[order])
            for chunk in _group_chunks(_group_starts(*keys), len(order)):
                some = part.bits[order[chunk]]
                first = _group_starts(*(key[chunk] for key in keys))
                either = np.bitwise_or.reduceat(some[:, :WORDS] | some[:, WORDS:], first, axis=0)
                for column, count in enumerate(
                    (_sector_counts(either, vendor.sector >> size), _bit_counts(either) << size)
                ):
                    added = np.bincount(keys[0][chunk][first], count, len(counts))
                    counts[:, column] += added.astype(np.int64)
        for number in np.unique(groups).tolist():
            on, name = divmod(number, len(mangled))
            sectors, bytes_ = (None, None) if table.full else counts[number].tolist()
            ordinal = int(gpus[on])
            wave = wave_of(of_amd or {}, ordinal, mangled[name])
            result.append(
                Footprint(table.pid, table.comm, ordinal, mangled[name], sectors, bytes_, vendor, wave)
            )
    return sorted(result, key=lambda f: -(f.sectors or 0))


def _sector_counts(words: Words, granules: int) -> Integers:
    """Return the number of sectors in each row that have a bit set. `granules`: the granules of a sector."""
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    return bits.reshape(len(words), -1, granules).any(axis=2).sum(axis=1, dtype=np.int64)

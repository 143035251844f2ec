"""Which bytes of each allocation kernels read, wrote, or never touched; and how much of memory each kernel touches.

    coverage = Coverage(Grain())
    for _ in session.intervals(…, tick=lambda: coverage.take(session)):
        report = coverage.report(session)
        report.rows[0].allocation, report.rows[0].read, report.rows[0].untouched

What device programs fill (gpubpf_coverage.h): a table of pages, each of which tells of 4096 granules; a granule is `1 << shift`
bytes. Maps, one element each for a place of the table: `pages` (the page's number, which is its address / its bytes, and the epoch;
0: nothing is there), `owners` (with --footprint: number of the kernel + 1), `touched` (for each place 128 words: 64 of what was read,
then 64 of what was written, a bit for each granule). In `missed` a bit stands for each 2 MB of addresses, modulo 128 GB, of which
something found no room. An epoch and an address together mean one allocation (docs/memory.md).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpubpf.memory.granularity import SECTOR, Grain

if TYPE_CHECKING:
    from gpubpf.memory.allocations import Allocation
    from gpubpf.session.results import Instance
    from gpubpf.session.session import Session

    Integers = npt.NDArray[np.int64]
    Words = npt.NDArray[np.uint64]

MAPS = ("pages", "touched", "missed")
OWNERS = "owners"
GRANULES = 4096  # of a page
WORDS = GRANULES // 64
AREA_BITS, AREAS = 21, 1 << 16  # what `missed` tells of
EPOCHS = 1 << 22  # that the table can tell apart
NOBODY = -1  # as a kernel: not told
_CHUNK = 1 << 13  # pages that are worked on together: some 30 MB
# What no program comes near, and a process that lies must not keep us busy with.
_MOST_OVER = 32  # allocations at one time that lie over others
_MOST_PAIRS = 1 << 20  # of a page and an allocation
_ONES = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)
_BELOW = np.array([(1 << bit) - 1 for bit in range(65)], np.uint64)  # that many low bits


@dataclass(frozen=True)
class Table:
    """What kernels of one process touched, an element for each page: its number (address / bytes of a page), the epoch, the number
    of the kernel (NOBODY where kernels are not kept apart), the GPU, and [page, 128] words of bits. `missed` [AREAS]: where pages
    found no room."""

    process: int
    pid: int
    comm: str
    page: Integers
    epoch: Integers
    kernel: Integers
    gpu: Integers
    bits: Words
    missed: npt.NDArray[np.bool_]

    @property
    def full(self) -> bool:
        return bool(self.missed.any())


@dataclass(frozen=True)
class Covered:
    """An allocation, and how many of its bytes instrumented kernels `read`, `written` and touched in any way (`either`); None:
    not known, because the table was full or could not be read."""

    allocation: Allocation
    read: int | None
    written: int | None
    either: int | None

    @property
    def untouched(self) -> int | None:
        return None if self.either is None else self.allocation.bytes - self.either


@dataclass(frozen=True)
class Footprint:
    """What a kernel (mangled name; "" if it is not known) touched of memory in one process, on one GPU: distinct 32-byte `sectors`
    and `bytes`; None: not known, since the table was full."""

    pid: int
    comm: str
    gpu: int
    mangled: str
    sectors: int | None
    bytes: int | None


@dataclass(frozen=True)
class Report:
    """What is known at one time. rows: of each allocation. elsewhere: by process bytes that were touched in no known allocation.
    footprints: empty where kernels are not kept apart. full: the table had no room for all. incomplete: allocations may be missing.
    partial: kernels may have touched more, in launches, threads or ways that no probe saw.
    """

    rows: list[Covered]
    elsewhere: dict[tuple[int, str], int]
    footprints: list[Footprint]
    full: bool
    incomplete: bool
    partial: bool = False


class Coverage:
    """Collects during a session what tables of touched bytes are to be joined with. some: only some threads are looked at."""

    def __init__(self, grain: Grain, some: bool = False) -> None:
        from gpubpf.memory.allocations import Allocations

        self._grain, self._some = grain, some
        self._allocations = Allocations()
        self._names: dict[int, Mapping[int, str]] = {}

    def take(self, session: Session) -> None:
        """What processes allocated since the last time: from the thread that runs `intervals`."""
        for log in session.logs():
            self._allocations.add(log)
            self._names[log.process] = log.names

    def report(self, session: Session) -> Report:
        """As of the last reading."""
        self.take(session)
        tables = read(session, self._grain.by_kernel)
        unread = session.unread() if session.stopped else set()
        rows, rest = join(tables, self._allocations.all(), self._grain.shift, unread)
        who = {t.process: (t.pid, t.comm) for t in tables}
        launched = {"not_probed": {}} | session.summary()
        return Report(
            rows,
            {who[process]: bytes_ for process, bytes_ in rest.items()},
            footprints(tables, self._names, self._grain.shift) if self._grain.by_kernel else [],
            any(t.full for t in tables),
            bool(self._allocations.dropped or self._allocations.incomplete),
            self._some
            or launched["launches_seen"] != launched["launches_instrumented"]
            or bool(launched["not_probed"]),
        )


def read(session: Session, owners: bool = False) -> list[Table]:
    """The tables as they were read last, one for each process that has any: those of its contexts together."""
    by_context: dict[tuple[int, int], dict[str, Instance]] = {}
    for name in (*MAPS, OWNERS) if owners else MAPS:
        for one in session.instances(name):
            by_context.setdefault((one.process, one.context), {})[name] = one
    found: dict[int, list[Table]] = {}
    for (process, _), parts in by_context.items():
        if all(name in parts for name in MAPS):
            arrays = [parts[name].array for name in (*MAPS, OWNERS) if name in parts]
            first = parts[MAPS[0]]
            found.setdefault(process, []).append(table(process, first.pid, first.comm, first.gpu, *arrays))
    return [_together(tables) for tables in found.values()]


def table(
    process: int, pid: int, comm: str, gpu: int, pages: Any, touched: Any, missed: Any, owners: Any = None
) -> Table:
    """A context's table from its maps' arrays."""
    there = np.flatnonzero(pages)
    tags = pages[there]
    page = tags >> np.uint64(32) | (tags & np.uint64(511)) << np.uint64(32)
    kernel = np.full(len(there), NOBODY) if owners is None else owners[there].astype(np.int64) - 1
    return Table(
        process,
        pid,
        comm,
        page.astype(np.int64),
        (tags >> np.uint64(9) & np.uint64(EPOCHS - 1)).astype(np.int64),
        kernel,
        np.full(len(there), gpu, np.int64),
        touched.reshape(-1, 2 * WORDS)[there],
        np.unpackbits(missed.view(np.uint8), bitorder="little").astype(bool),
    )


def _together(tables: Sequence[Table]) -> Table:
    if len(tables) == 1:
        return tables[0]
    first = tables[0]
    joined = {
        name: np.concatenate([getattr(t, name) for t in tables])
        for name in ("page", "epoch", "kernel", "gpu", "bits")
    }
    missed = np.logical_or.reduce([t.missed for t in tables])
    return Table(first.process, first.pid, first.comm, **joined, missed=missed)


def join(
    tables: Sequence[Table], allocations: Sequence[Allocation], shift: int, unread: Collection[int] = ()
) -> tuple[list[Covered], dict[int, int]]:
    """What was touched of each allocation, in their order; and by process the bytes that were touched in none of them. `unread`:
    processes of which launches are missing in the tables."""
    result: list[Covered | None] = [None] * len(allocations)
    by_process: dict[int, list[int]] = {}
    for number, allocation in enumerate(allocations):
        by_process.setdefault(allocation.process, []).append(number)
    elsewhere = {}
    known = {t.process: t for t in tables}
    for process in known.keys() | by_process.keys():
        numbers = by_process.get(process, [])
        own = [allocations[number] for number in numbers]
        one = known.get(process)
        counts = np.zeros((len(own), 3), np.int64)
        unknown: Collection[int] = ()
        if one is not None:
            counts, rest, unknown = _count(one, own, shift)
            if rest:
                elsewhere[process] = rest
        concerned = _concerned(one, own)
        for place, (number, allocation) in enumerate(zip(numbers, own, strict=True)):
            reads, writes, either = counts[place].tolist()
            if process in unread or place in unknown or concerned[place]:
                result[number] = Covered(allocation, None, None, None)
            else:
                result[number] = Covered(allocation, reads, writes, either)
    return [row for row in result if row is not None], elsewhere


def _concerned(one: Table | None, allocations: Sequence[Allocation]) -> list[bool]:
    """Of each allocation whether something of it may have found no room, or may have been taken for something else."""
    if one is None:
        return [False] * len(allocations)
    base = np.array([a.base for a in allocations], np.int64)
    last = base + np.array([max(a.bytes, 1) for a in allocations], np.int64) - 1 >> AREA_BITS
    around = np.tile(one.missed, 2)
    before = np.concatenate([[0], np.cumsum(around)])  # how many areas up to there miss something
    first = base >> AREA_BITS
    low, many = first % AREAS, last - first
    missing = before[low + np.minimum(many, AREAS - 1) + 1] - before[low]
    epochs = np.array([a.first_epoch for a in allocations], np.int64)
    return [bool(it) for it in (missing > 0) | (epochs >= EPOCHS)]


def _count(
    one: Table, allocations: Sequence[Allocation], shift: int
) -> tuple[Integers, int, Collection[int]]:
    """[allocation, (read, written, either)] in bytes, the bytes that are in none, and places of allocations that were not counted."""
    counts = np.zeros((len(allocations), 3), np.int64)
    of, entry, unknown = _pairs(one, allocations, shift)
    base = np.array([a.base for a in allocations] or [0], np.int64)
    end = base + np.array([a.bytes for a in allocations] or [0], np.int64)
    grain = 1 << shift
    # Touched in several epochs, by several GPUs or kernels, a page counts once.
    order = np.lexsort((one.page[entry], of))
    of, entry = of[order], entry[order]
    page = one.page[entry]
    starts = _starts(of, page)
    for chunk in _chunks(starts, len(of)):
        own, number, first = of[chunk], one.page[entry[chunk]], _starts(of[chunk], page[chunk])
        bits = _united(one.bits[entry[chunk]], first)
        own, number = own[first], number[first]
        low = np.clip((base[own] >> shift) - number * GRANULES, 0, GRANULES)
        high = np.clip(-(-end[own] >> shift) - number * GRANULES, 0, GRANULES)
        mask = _masks(low, high)
        reads, writes = bits[:, :WORDS] & mask, bits[:, WORDS:] & mask
        # What of the first and the last granule is not the allocation's.
        over = (number * GRANULES <= base[own] >> shift) * (base[own] % grain)
        under = ((number + 1) * GRANULES >= -(-end[own] >> shift)) * (-end[own] % grain)
        for column, some in enumerate((reads, writes, reads | writes)):
            size = _ones(some) * grain - _has(some, low) * over - _has(some, high - 1) * under
            counts[:, column] += np.bincount(own, size, len(allocations)).astype(np.int64)
    # What is in no allocation, page by page.
    left = one.bits[:, :WORDS] | one.bits[:, WORDS:]
    order = np.argsort(entry, kind="stable")
    of, entry = of[order], entry[order]
    starts = _starts(entry)
    for chunk in _chunks(starts, len(entry)):
        some, own, first = entry[chunk], of[chunk], _starts(entry[chunk])
        number = one.page[some]
        low = np.clip((base[own] >> shift) - number * GRANULES, 0, GRANULES)
        high = np.clip(-(-end[own] >> shift) - number * GRANULES, 0, GRANULES)
        left[some[first]] &= ~_united(_masks(low, high), first)
    return counts, _distinct(one.page, left) * grain, unknown


def _united(words: Words, first: Integers) -> Words:
    """Rows that belong together (each group begins at one of `first`) as one, with the bits of all."""
    return words if len(first) == len(words) else np.bitwise_or.reduceat(words, first, axis=0)


def _distinct(page: Integers, words: Words) -> int:
    """Granules that were touched, those of one page once, whatever epochs and kernels it has."""
    if not len(page):
        return 0
    order = np.argsort(page, kind="stable")
    return int(_ones(np.bitwise_or.reduceat(words[order], _starts(page[order]), axis=0)).sum())


def _pairs(
    one: Table, allocations: Sequence[Allocation], shift: int
) -> tuple[Integers, Integers, Collection[int]]:
    """Which allocations lie (partly) in which pages: places of both, side by side; and of which allocations that is not known.

    Goes through the epochs in order with a sorted list of those that live in it: of one address there may be any number, one after
    another. Those in the list do not overlap; what does (a part of a range that is known as a whole, too) is kept beside it.
    """
    if not len(one.page) or not allocations:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), ()
    page_bytes = GRANULES << shift
    pages = np.unique(one.page)
    base = np.array([a.base for a in allocations], np.int64)
    end = base + np.array([max(a.bytes, 1) for a in allocations], np.int64)
    first, last = base // page_bytes, (end - 1) // page_bytes
    some = np.flatnonzero(np.searchsorted(pages, first) < np.searchsorted(pages, last, "right"))
    born = sorted((allocations[n].first_epoch, n) for n in some.tolist())
    died = sorted((gone, n) for n in some.tolist() if (gone := allocations[n].last_epoch) is not None)
    living: list[tuple[int, int]] = []  # (base, place), none over another
    others: dict[int, None] = {}  # places of those over another
    unknown: set[int] = set()
    ends = end.tolist()
    bases = base.tolist()
    of: list[int] = []
    entry: list[int] = []
    order = np.lexsort((one.page, one.epoch))
    b = d = 0
    for at, epoch, page in zip(
        order.tolist(), one.epoch[order].tolist(), one.page[order].tolist(), strict=True
    ):
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
                if len(others) < _MOST_OVER:
                    others[n] = None
                else:
                    unknown.add(n)
            else:
                living.insert(place, (bases[n], n))
        while d < len(died) and died[d][0] < epoch:
            n = died[d][1]
            d += 1
            place = bisect.bisect_left(living, (bases[n], n))
            if place < len(living) and living[place][1] == n:
                del living[place]
            else:
                others.pop(n, None)
        start = page * page_bytes
        place = bisect.bisect_left(living, (start + page_bytes, -1))
        while place and ends[living[place - 1][1]] > start:
            place -= 1
            of.append(living[place][1])
            entry.append(at)
        for n in others:
            if bases[n] < start + page_bytes and ends[n] > start:
                of.append(n)
                entry.append(at)
    return np.array(of, np.int64), np.array(entry, np.int64), unknown


def _starts(*keys: Integers) -> Integers:
    """Where in sorted rows another key begins."""
    if not len(keys[0]):
        return np.zeros(0, np.int64)
    new = np.ones(len(keys[0]), bool)
    new[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return np.flatnonzero(new)


def _chunks(starts: Integers, count: int) -> Iterator[slice]:
    """Parts of `count` rows, of about _CHUNK each, that no group (they begin at `starts`) lies across."""
    if not count:
        return
    borders = np.unique(np.searchsorted(starts, np.arange(_CHUNK, count, _CHUNK)))
    edges = [0, *(starts[borders[borders < len(starts)]].tolist()), count]
    for begin, end in itertools.pairwise(edges):
        if begin < end:
            yield slice(begin, end)


def _masks(low: Integers, high: Integers) -> Words:
    """[row, WORDS] words with the bits from `low` to below `high`."""
    at = 64 * np.arange(WORDS)
    return _BELOW[np.clip(high[:, None] - at, 0, 64)] & ~_BELOW[np.clip(low[:, None] - at, 0, 64)]


def _ones(words: Words) -> Integers:
    """Bits that are set, row by row."""
    if hasattr(np, "bitwise_count"):  # NumPy 2
        return np.bitwise_count(words).sum(axis=1, dtype=np.int64)
    return _ONES[np.ascontiguousarray(words).view(np.uint8)].sum(axis=1, dtype=np.int64)


def _has(words: Words, bit: Integers) -> Integers:
    """Of each row whether it has that bit."""
    bit = np.clip(bit, 0, GRANULES - 1)
    word = words[np.arange(len(words)), bit // 64]
    return ((word >> (bit % 64).astype(np.uint64)) & np.uint64(1)).astype(np.int64)


def footprints(
    tables: Sequence[Table], names: Mapping[int, Mapping[int, str]], shift: int
) -> list[Footprint]:
    """Of each process, GPU and kernel, the most sectors first. `names`: mangled names by process and kernel number. An address is the
    same one in every epoch: epochs end because of other allocations, too. A granule must be no larger than a sector."""
    result = []
    for one in tables:
        own = names.get(one.process, {})
        numbers = np.unique(one.kernel).tolist()
        mangled = sorted({own.get(number, "") for number in numbers})
        place = np.array([mangled.index(own.get(number, "")) for number in numbers], np.int64)
        kernel = place[np.searchsorted(numbers, one.kernel)] if numbers else one.kernel
        gpus, gpu = np.unique(one.gpu, return_inverse=True)
        group = gpu * len(mangled) + kernel  # those that are the same on several GPUs have a number on each
        order = np.lexsort((one.page, group))
        keys = (group[order], one.page[order])
        counts = np.zeros((len(gpus) * len(mangled), 2), np.int64)
        for chunk in _chunks(_starts(*keys), len(order)):
            some = one.bits[order[chunk]]
            first = _starts(*(key[chunk] for key in keys))
            either = np.bitwise_or.reduceat(some[:, :WORDS] | some[:, WORDS:], first, axis=0)
            for column, count in enumerate((_sectors(either, shift), _ones(either) << shift)):
                added = np.bincount(keys[0][chunk][first], count, len(counts))
                counts[:, column] += added.astype(np.int64)
        for number in np.unique(group).tolist():
            on, name = divmod(number, len(mangled))
            known = (None, None) if one.full else counts[number].tolist()
            result.append(Footprint(one.pid, one.comm, int(gpus[on]), mangled[name], *known))
    return sorted(result, key=lambda f: -(f.sectors or 0))


def _sectors(words: Words, shift: int) -> Integers:
    """Sectors with any bit, row by row."""
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    return bits.reshape(len(words), -1, SECTOR >> shift).any(axis=2).sum(axis=1, dtype=np.int64)

"""Counts over time for pictures: when threads exit, by block; when memory is accessed, by address."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpubpf.record import Record
from gpubpf.show import table
from gpubpf.show.picture import Chart, Rows

ROWS, COLUMNS = (
    256,
    512,
)  # maximum of a chart, but many bands take more rows; the number of columns must be even
MOST_PAGES = 1024  # maximum pages to count; if there are more, pages get larger
FIRST_PAGE = 5  # log2 of the first page size: 32 bytes
APART = 1 << 20  # bytes; unknown addresses that are farther apart belong to two regions
LEAST_COLUMNS, EVEN = 128, 4  # columns get wider until half of the cells count 4, or 128 columns are left
# Columns also get wider, until 64 are left, while the picture has stripes: an empty column after a busy one in every 8 columns.
LEAST_WITHOUT_STRIPES, STRIPE = 64, 8
BANDS = 64  # maximum allocations in a chart
LEAST_BAND = 11  # minimum rows of a band
FAR, LATEST = 1 << 60, 1 << 62  # ns; times of a GPU are neither farther apart nor later


class BlockHeat:
    """Exits by block and time, of all launches of a kernel and shape. The time of each launch starts at its first exit.

    counts: int64 [rows, COLUMNS]. A column is `width` ns, a power of two that grows when needed.
    """

    def __init__(self, title: str, blocks: int) -> None:
        self.title, self.blocks, self.width = title, blocks, 1
        self.each = -(-blocks // ROWS)  # blocks per row
        self.counts = np.zeros((-(-blocks // self.each), COLUMNS), np.int64)

    def add(self, block: np.ndarray, ns: np.ndarray) -> None:
        """Add exits of one launch: their block numbers, and their times in ns since the first exit of the launch."""
        latest = int(ns.max(initial=0))
        while latest >= self.width * COLUMNS:
            self.counts = _halved(self.counts)
            self.width *= 2
        place = (block // self.each).astype(np.int64) * COLUMNS + (ns // self.width).astype(np.int64)
        self.counts += np.bincount(place, minlength=self.counts.size).reshape(self.counts.shape)

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def chart(self) -> Chart:
        width, counts = _smooth(self.width, _used(self.counts))
        caption = f"A row stands for {self.each:,} blocks." if self.each > 1 else ""
        rows = Rows("", 0, len(counts) * self.each, counts[:, :, None])
        return Chart(
            self.title,
            width * counts.shape[1],
            "time since the first exit of a launch",
            "block",
            lambda block: f"{block:,.0f}" if block == int(block) else "",
            "exits",
            ("exits",),
            (rows,),
            caption,
        )


class Band(Record):
    """A named region of memory, such as an allocation: `size` bytes from `base`."""

    base: int
    size: int
    name: str


class AddressHeat:
    """Accesses to memory by address and time. Its size is bounded: pages and columns grow when there are too many.

    pages    numbers of the accessed pages, ascending; a page has 2^shift bytes
    counts   int64 [page, COLUMNS, 2]: reads and writes
    width    ns of a column; the first column begins at `origin` (ns of the GPU's clock)
    """

    def __init__(self, title: str) -> None:
        self.title, self.shift, self.width = title, FIRST_PAGE, 1
        self.pages = np.zeros(0, np.uint64)
        self.counts = np.zeros((0, COLUMNS, 2), np.int64)
        self.origin = self._latest = self._begin = 0  # _begin: the earliest added time
        self.left_out = 0  # accesses with impossible times

    def add(self, address: np.ndarray, written: np.ndarray, time: np.ndarray) -> None:
        """Add accesses, in any order: u64 addresses, whether each writes, and times (i64, ns of the GPU's clock)."""
        if not len(address):
            return
        if not len(self.pages):
            self.origin = self._latest = self._begin = int(np.clip(time[0], -LATEST, LATEST))
        near = (time > self._begin - FAR) & (time < self._begin + FAR)
        if not near.all():
            self.left_out += int((~near).sum())
            address, written, time = address[near], written[near], time[near]
            if not len(address):
                return
        self._reach(int(time.min()), int(time.max()))
        page = self._places(address)
        column = (time - self.origin) // self.width
        np.add.at(self.counts.reshape(-1), (page * COLUMNS + column) * 2 + written, 1)

    def _places(self, address: np.ndarray) -> np.ndarray:
        """Return the places of the addresses in `pages`. New pages are added."""
        pages = address >> np.uint64(self.shift)
        places = np.searchsorted(self.pages, pages)
        if len(self.pages) and (self.pages[np.minimum(places, len(self.pages) - 1)] == pages).all():
            return places
        new = np.unique(pages)
        while len(both := np.union1d(self.pages, new)) > MOST_PAGES:
            self._coarsen()
            new = np.unique(new >> np.uint64(1))
        counts = np.zeros((len(both), COLUMNS, 2), np.int64)
        counts[np.searchsorted(both, self.pages)] = self.counts
        self.pages, self.counts = both, counts
        return np.searchsorted(self.pages, address >> np.uint64(self.shift))

    def _reach(self, first: int, last: int) -> None:
        """Make the columns cover the times from `first` to `last`."""
        self._latest = max(self._latest, last)
        while True:
            before = max(0, -(-(self.origin - first) // self.width))
            if before + (self._latest - self.origin) // self.width < COLUMNS:
                break
            self.counts = _halved(self.counts)
            self.width *= 2
        if before:
            self.counts = np.roll(self.counts, before, axis=1)  # the columns that wrap around are empty
            self.origin -= before * self.width

    def _coarsen(self) -> None:
        """Double the page size."""
        self.shift += 1
        pages, first = np.unique(self.pages >> np.uint64(1), return_index=True)
        if len(pages):
            self.counts = np.add.reduceat(self.counts, first, axis=0)
        self.pages = pages

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def drawn(self, known: Sequence[Band]) -> _NamedHeat:
        """Return the picture of the accesses, with the names of known regions."""
        return _NamedHeat(self, tuple(known))

    def bands(self, known: Sequence[Band]) -> list[tuple[Band, np.ndarray]]:
        """Return the regions with accesses, by address, each with the places of its pages in `pages`."""
        merged = _merged(known)
        bases = np.array([band.base for band in merged], np.uint64)
        found: list[tuple[Band, list[int]]] = []
        last = -2  # place in `merged` of the latest band; -1: an unknown region
        for place, page in enumerate(self.pages.tolist()):
            start, end = page << self.shift, (page + 1) << self.shift
            number = int(np.searchsorted(bases, np.uint64(start), "right")) - 1
            if number < 0 or start >= merged[number].base + merged[number].size:
                number = number + 1 if number + 1 < len(merged) and merged[number + 1].base < end else -1
            if number == last and number >= 0:
                found[-1][1].append(place)
            elif number < 0 and last == -1 and start - (band := found[-1][0]).base - band.size < APART:
                found[-1] = Band(band.base, end - band.base, band.name), [*found[-1][1], place]
            elif number < 0:
                found.append((Band(start, end - start, "unknown allocation"), [place]))
            else:
                more = int(np.searchsorted(bases, np.uint64(min(end, 2**64 - 1)), "left")) - 1 - number
                band = merged[number]
                if more > 0:  # the page spans several allocations
                    name = f"{band.name} and {more:,} more"
                    band = Band(
                        band.base, merged[number + more].base + merged[number + more].size - band.base, name
                    )
                found.append((band, [place]))
            last = number
        return [(band, np.array(places)) for band, places in found]


class _NamedHeat(Record):
    """An `AddressHeat` with the names of regions."""

    heat: AddressHeat
    known: tuple[Band, ...]

    @property
    def total(self) -> int:
        return self.heat.total

    def chart(self) -> Chart:
        heat = self.heat
        width, counts = _smooth(heat.width, _used(heat.counts))
        bands = heat.bands(self.known)
        weights = [int(counts[places].sum()) for _, places in bands]
        chosen = sorted(sorted(range(len(bands)), key=lambda n: -weights[n])[:BANDS])
        rows: list[Rows] = []
        for n, high in zip(chosen, _heights([bands[n][0].size for n in chosen]), strict=True):
            band, places = bands[n]
            part = np.zeros((high, counts.shape[1], 2), np.int64)
            for place in places.tolist():
                start = (int(heat.pages[place]) << heat.shift) - band.base
                first = min(max(0, start) * high // band.size, high - 1)
                end = min((start + (1 << heat.shift)) * high // band.size, high)
                part[first : max(end, first + 1)] += counts[place]
            label = f"{band.name}, {_short(band.size)} at {band.base:#x}"
            rows.append(Rows(label, 0, band.size, part))
        caption = ""
        if len(chosen) < len(bands):
            rest = 1 - sum(weights[n] for n in chosen) / max(1, sum(weights))
            left_out = len(bands) - len(chosen)
            caption = f"Left out: {table.count(left_out, 'more region')}, with {rest:.1%} of the accesses."
        return Chart(
            heat.title,
            width * counts.shape[1],
            "time since the first access",
            "",
            _short,
            "accesses",
            ("reads", "writes"),
            tuple(rows),
            caption,
            binary=True,
        )


def _merged(known: Sequence[Band]) -> list[Band]:
    """Return regions by address without overlaps: regions that had the same addresses at different times are merged."""
    made: list[Band] = []
    again = 0
    for band in sorted(known, key=lambda one: (one.base, -one.size)):
        if band.size <= 0:
            continue
        if made and band.base < made[-1].base + made[-1].size:
            again += 1
            end = max(made[-1].base + made[-1].size, band.base + band.size)
            name = made[-1].name.split(", then ")[0]
            made[-1] = Band(made[-1].base, end - made[-1].base, f"{name}, then {again:,} more")
        else:
            made.append(band)
            again = 0
    return made


def _heights(sizes: Sequence[int]) -> list[int]:
    """Return the rows of bands by their sizes: each has room for a line of text, larger ones have more."""
    if not sizes:
        return []
    roots = np.sqrt(np.array(sizes, float))
    left = max(0, ROWS - len(sizes) * (LEAST_BAND + 1))
    return [LEAST_BAND + int(left * root / roots.sum()) for root in roots]


def size_text(size: int) -> str:
    """Return ``512 B``, ``4.0 KiB`` or ``1.5 GiB``."""
    if size < 1024:
        return f"{size} B"
    power = min((size.bit_length() - 1) // 10, 5)
    return f"{size / 1024**power:.1f} {'KMGTP'[power - 1]}iB"


def _short(size: float) -> str:
    """Return ``4 KiB`` instead of ``4.0 KiB``."""
    return size_text(int(size)).replace(".0 ", " ")


def _halved(counts: np.ndarray) -> np.ndarray:
    """Return counts with columns of twice the width; the second half is empty."""
    half = counts[:, 0::2] + counts[:, 1::2]
    return np.concatenate([half, np.zeros_like(half)], axis=1)


def _used(counts: np.ndarray) -> np.ndarray:
    """Return the counts up to the last column that is not empty."""
    columns = np.flatnonzero(counts.any(axis=tuple(axis for axis in range(counts.ndim) if axis != 1)))
    return counts[:, : int(columns[-1]) + 1 if len(columns) else 1]


def _smooth(width: int, counts: np.ndarray) -> tuple[int, np.ndarray]:
    """Return wider columns if most cells have small counts, or regular events leave columns empty. Both would look like stripes."""
    while (counts.shape[1] >= 2 * LEAST_COLUMNS and np.median(counts[counts > 0]) < EVEN) or (
        counts.shape[1] >= 2 * LEAST_WITHOUT_STRIPES and _is_striped(counts)
    ):
        odd = counts.shape[1] % 2
        counts = np.pad(counts, [(0, 0), (0, odd), *[(0, 0)] * (counts.ndim - 2)])
        width, counts = 2 * width, counts[:, 0::2] + counts[:, 1::2]
    return width, counts


def _is_striped(counts: np.ndarray) -> bool:
    """Return whether empty columns alternate with others."""
    busy = np.flatnonzero(counts.any(axis=tuple(axis for axis in range(counts.ndim) if axis != 1)))
    return int(np.count_nonzero(np.diff(busy) > 1)) * STRIPE > counts.shape[1]

"""What tables of touched bytes come to: against sets of bytes, for each allocation, kernel and epoch."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

from gpubpf.memory import coverage
from gpubpf.memory.coverage import GRANULES, WORDS

PAGES = 4096


@dataclass(frozen=True)
class Made:
    """An allocation as allocations.py has them, as far as coverage asks."""

    base: int
    bytes: int
    first_epoch: int = 0
    last_epoch: int | None = None
    process: int = 1
    pid: int = 100
    comm: str = "app"
    gpu: int = 0
    call: str = "cuMemAlloc"
    stack: tuple[object, ...] = ()
    freed: bool = False
    kind: str = "device"


@dataclass
class Gpu:
    """The maps of one context, filled as the device program does."""

    shift: int = 0
    only_narrow: bool = False  # as on AMD GPUs
    places: dict[tuple[int, int, int, bool], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fields = [("tag", "<u8"), ("owner", "<u8"), ("bits", "<u8", (2 * WORDS,))]
        self.touched = np.zeros(PAGES, fields)
        self.missed = np.zeros(1024, "<u8")

    def touch(self, address: int, width: int, what: str, epoch: int = 0, kernel: int = 0) -> None:
        narrow = not self.shift and (self.only_narrow or bool((address | width) % 4))
        shift = self.shift or 2 * (not narrow)
        for granule in range(address >> shift, (address + width - 1 >> shift) + 1):
            page, bit = divmod(granule, GRANULES)
            key = (page, epoch, kernel, narrow)
            place = self.places.setdefault(key, 7 * len(self.places) % PAGES)
            tag = (page & 0xFFFFFFFF) << 32 | (epoch + 1) << 9 | narrow << 8 | page >> 32
            self.touched["tag"][place] = tag
            self.touched["owner"][place] = kernel + 1
            for letter, offset in (("r", 0), ("w", WORDS)):
                if letter in what:
                    self.touched["bits"][place, offset + bit // 64] |= np.uint64(1 << bit % 64)

    def miss(self, address: int) -> None:
        area = address >> 21 & 65535
        self.missed[area // 64] |= np.uint64(1 << area % 64)

    def table(self, process: int = 1) -> coverage.TouchedPages:
        return coverage.decode_pages(process, 100, "app", 0, self.touched, self.missed, True)


def rows(gpu: Gpu, *made: Made) -> list[tuple[int | None, int | None, int | None]]:
    found, _ = coverage.join([gpu.table()], made, gpu.shift)
    assert [row.allocation for row in found] == list(made)
    return [(row.read, row.written, row.untouched) for row in found]


def elsewhere(gpu: Gpu, *made: Made) -> int:
    outside = coverage.join([gpu.table()], made, gpu.shift)[1].get(1)
    return 0 if outside is None else outside.bytes


BASE = 0x7F0000000000


def test_bytes_read_written_and_never_touched() -> None:
    gpu = Gpu()
    gpu.touch(BASE, 4, "r")
    gpu.touch(BASE + 2, 4, "w")
    gpu.touch(BASE + 2, 4, "w")
    assert rows(gpu, Made(BASE, 100)) == [(4, 4, 94)]
    assert elsewhere(gpu, Made(BASE, 100)) == 0


def test_an_allocation_ends_where_the_next_begins() -> None:
    gpu = Gpu()
    gpu.touch(BASE + 250, 20, "rw")
    assert rows(gpu, Made(BASE, 256), Made(BASE + 256, 9)) == [(6, 6, 250), (9, 9, 0)]
    assert elsewhere(gpu, Made(BASE, 256), Made(BASE + 256, 9)) == 5


def test_what_lies_behind_an_allocation_is_out_of_bounds() -> None:
    gpu = Gpu()
    gpu.touch(BASE + 90, 20, "r")  # ten bytes too many
    gpu.touch(BASE + 1024 + 300, 4, "w")  # nobody knows
    made = [
        Made(BASE, 100),
        Made(BASE + 512, 300),
        Made(BASE + 1024, 256),
        Made(BASE + 100, 2, kind="variable"),
    ]
    outside = coverage.join([gpu.table()], made, gpu.shift)[1][1]
    assert (outside.bytes, outside.behind, outside.allocation) == (8 + 4, 8, made[0])
    outside = coverage.join([gpu.table()], made[1:], gpu.shift)[1][1]
    assert (outside.behind, outside.allocation) == (0, None)


def test_pages_between_are_counted_once_for_all_epochs_and_kernels() -> None:
    gpu = Gpu()
    for epoch in range(3):
        for kernel in range(2):
            gpu.touch(BASE + GRANULES - 8, 2 * GRANULES, "r", epoch, kernel)
    assert rows(gpu, Made(BASE, 8 * GRANULES)) == [(2 * GRANULES, 0, 6 * GRANULES)]
    assert elsewhere(gpu, Made(BASE, GRANULES)) == 2 * GRANULES - 8


def test_of_one_address_each_epoch_is_another_allocation() -> None:
    gpu = Gpu()
    made = []
    for epoch in range(50):
        gpu.touch(BASE, epoch + 1, "w", epoch)
        made.append(Made(BASE, 256, epoch, epoch))
    made.append(Made(BASE + 256, 16, 0, 20))
    gpu.touch(BASE + 256, 4, "r", 20)
    gpu.touch(BASE + 256, 4, "r", 21)
    assert rows(gpu, *made) == [*((0, n + 1, 255 - n) for n in range(50)), (4, 0, 12)]
    assert elsewhere(gpu, *made) == 4


def test_buffers_that_are_all_allocated_again_are_known() -> None:
    gpu, made = Gpu(), []
    for epoch in range(3):
        for number in range(100):
            gpu.touch(BASE + number * GRANULES, 8, "r", epoch)
            last = epoch if epoch < 2 else None
            made.append(Made(BASE + number * GRANULES, GRANULES, epoch, last))
    assert rows(gpu, *made) == [(8, 0, GRANULES - 8)] * 300
    assert elsewhere(gpu, *made) == 0


def test_what_is_known_as_a_whole_and_in_parts_counts_for_both() -> None:
    gpu = Gpu()
    gpu.touch(BASE + 100, 100, "r")
    made = (Made(BASE, 4096), Made(BASE + 128, 64))
    assert rows(gpu, *made) == [(100, 0, 3996), (64, 0, 0)]
    assert elsewhere(gpu, *made) == 0


def test_a_process_that_lies_about_allocations_does_not_hold_the_tool_up() -> None:
    gpu = Gpu()
    for page in range(PAGES):
        gpu.touch(BASE + page * GRANULES, 1, "r")
    over = [Made(BASE, PAGES * GRANULES) for _ in range(20_000)]
    start = time.process_time()
    found = rows(gpu, *over)
    assert found[0] == (PAGES, 0, PAGES * (GRANULES - 1)) and found[-1] == (None, None, None)
    assert time.process_time() - start < 10  # without a bound minutes


def test_large_allocations_without_number_when_the_table_is_full() -> None:
    gpu = Gpu()
    gpu.miss(BASE)
    made = [Made(BASE + (n + 1) % 4 * (1 << 37), 1 << 36, n) for n in range(30_000)]
    start = time.process_time()
    assert {row[0] for row in rows(gpu, *made)} == {None}
    apart = [Made(BASE + (1 << 21) + n * 256, 256) for n in range(30_000)]
    assert {row[0] for row in rows(gpu, *apart)} == {0}
    assert time.process_time() - start < 5


@pytest.mark.parametrize("shift", (0, 2, 5, 7))
def test_as_sets_of_bytes_say(shift: int) -> None:
    rng = random.Random(shift)
    gpu, made, sets = Gpu(shift), [], []
    at = BASE
    for number in range(40):
        at += rng.choice((0, 1, 3, 17, 300)) << shift
        size = rng.choice((1, 8, 31, 512, 4096, 9000, 20000))
        first = rng.randrange(4)
        made.append(Made(at, size, first, rng.choice((None, first, first + 2)), process=1 + number % 2))
        at += -(-size >> shift << shift)
    touched: dict[int, dict[int, set[int]]] = {0: {}, 1: {}}
    for _ in range(400):
        address = BASE + (rng.randrange(at - BASE) & -16)
        width, epoch, what = rng.choice((1, 4, 16)), rng.randrange(6), rng.choice(("r", "w", "rw"))
        gpu.touch(address, width, what, epoch)
        for side, letter in enumerate("rw"):
            if letter in what:
                granules = range(address >> shift, (address + width - 1 >> shift) + 1)
                touched[side].setdefault(epoch, set()).update(
                    byte for g in granules for byte in range(g << shift, g + 1 << shift)
                )
    for one in made:
        own = set(range(one.base, one.base + one.bytes))
        until = 9 if one.last_epoch is None else one.last_epoch
        sets.append(
            [
                own & set().union(*(b for e, b in t.items() if one.first_epoch <= e <= until))
                for t in touched.values()
            ]
        )
    tables = [gpu.table(1), gpu.table(2)]
    found, rest = coverage.join(tables, made, shift)
    for row, (reads, writes) in zip(found, sets, strict=True):
        assert (row.read, row.written, row.touched) == (len(reads), len(writes), len(reads | writes))
    for process in (1, 2):
        free: set[int] = set()
        for epoch in range(6):
            bytes_ = touched[0].get(epoch, set()) | touched[1].get(epoch, set())
            for one in made:
                if (
                    one.process == process
                    and one.first_epoch <= epoch
                    and (one.last_epoch is None or epoch <= one.last_epoch)
                ):
                    end = -(-(one.base + one.bytes) >> shift << shift)
                    bytes_ = bytes_ - set(range(one.base, end))
            free |= bytes_
        assert getattr(rest.get(process), "bytes", 0) == len(free)


def test_what_may_have_found_no_room_is_not_known() -> None:
    gpu = Gpu()
    gpu.touch(BASE, 4, "r")
    gpu.miss(BASE + (5 << 21))
    before, within, around = Made(BASE, 5 << 21), Made(BASE + (5 << 21), 1), Made(BASE + (6 << 21) - 1, 2)
    assert rows(gpu, before, within, around) == [
        (4, 0, (5 << 21) - 4),
        (None, None, None),
        (None, None, None),
    ]


def test_of_a_process_that_was_not_read_nothing_is_known() -> None:
    gpu = Gpu()
    gpu.touch(BASE, 4, "r")
    found, _ = coverage.join([gpu.table()], [Made(BASE, 8), Made(BASE, 8, process=2)], 0, unread=[2])
    assert [row.untouched for row in found] == [4, None]


def test_an_epoch_that_the_table_cannot_tell_apart_is_not_known() -> None:
    gpu = Gpu()
    gpu.touch(BASE, 4, "r")
    assert rows(gpu, Made(BASE, 8), Made(BASE, 8, first_epoch=1 << 22)) == [(4, 0, 4), (None, None, None)]


@pytest.mark.parametrize("shift", (0, 3, 5))
def test_a_kernel_s_distinct_sectors(shift: int) -> None:
    gpu = Gpu(shift)
    for n in range(100):
        gpu.touch(BASE + 128 * n, 32, "r", kernel=3)
        gpu.touch(BASE + 128 * n, 32, "w", kernel=3)
    gpu.touch(BASE + 64, 32, "r", epoch=1, kernel=4)
    gpu.touch(BASE + 64, 32, "r", epoch=2, kernel=4)
    gpu.touch(BASE + 64, 4, "r", epoch=2, kernel=5)
    gpu.touch(BASE + 68, 4, "r", epoch=2, kernel=6)
    names = {1: {3: "a", 4: "b", 5: "c", 6: "c"}}
    found = [(f.mangled, f.sectors, f.bytes) for f in coverage.footprints([gpu.table()], names, shift)]
    assert found == [("a", 100, 3200), ("b", 1, 32), ("c", 1, 8 if shift < 3 else 1 << shift)]
    gpu.miss(BASE)
    assert {f.sectors for f in coverage.footprints([gpu.table()], names, shift)} == {None}


def test_nothing_was_touched() -> None:
    assert rows(Gpu(), Made(BASE, 8)) == [(0, 0, 8)]
    assert coverage.join([], [Made(BASE, 8)], 0)[0][0].untouched == 8
    assert coverage.footprints([Gpu().table()], {}, 0) == []

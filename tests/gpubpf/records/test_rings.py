"""The ring reader returns every committed record once, whatever the writer does, and is fast."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Iterator

import numpy as np
import pytest

from gpubpf.agent.protocol import Place, RingPlace
from gpubpf.ebpf.maps import DISCARDED
from gpubpf.errors import Error
from gpubpf.records.rings import RingReader

EVENT = np.dtype([("number", "<u8"), ("rest", "<u8", 4)])  # 40 bytes
CAPACITY = 4096


class Writer:
    """Writes records into a ring as a GPU does, but slowly and one at a time."""

    def __init__(self, shards: int = 2, capacity: int = CAPACITY) -> None:
        self.place = RingPlace(0, 0, 0, Place.HOST_RING, shards, capacity, 8 + EVENT.itemsize)
        self.file = os.memfd_create("ring")
        os.ftruncate(self.file, self.place.size)
        self.area = mmap.mmap(self.file, self.place.size)
        kind = np.dtype([("mark", "<u4"), ("size", "<u4"), ("event", EVENT)])
        self.data = np.frombuffer(self.area, kind, shards * capacity, self.place.first).reshape(
            shards, capacity
        )
        self.heads = np.frombuffer(self.area, "<u8", 8 * shards).reshape(shards, 8)[:, 0]
        self.reader = RingReader(self.place, EVENT, self.file)

    def put(self, shard: int, position: int, number: int, size: int = EVENT.itemsize) -> None:
        record = self.data[shard, position % self.place.capacity : position % self.place.capacity + 1]
        record["event"]["number"] = number
        record["size"] = size
        record["mark"] = (position + 1) % (1 << 32)

    def fill(self, shard: int, first: int, count: int) -> None:
        """Records that hold their position."""
        positions = np.arange(first, first + count, dtype=np.uint64)
        at = positions % np.uint64(self.place.capacity)
        self.data["event"]["number"][shard, at] = positions
        self.data["size"][shard, at] = EVENT.itemsize
        self.data["mark"][shard, at] = (positions + np.uint64(1)).astype(np.uint32)

    def control(self, *shards: tuple[int, int]) -> None:
        """A snapshot of the control block: reserved and lost of each shard."""
        block = np.zeros((1 + self.place.shards, 8), np.uint64)
        block[1:, :2] = shards
        self.reader.control(block.tobytes())


@pytest.fixture
def ring() -> Iterator[Writer]:
    writer = Writer()
    yield writer
    os.close(writer.file)


def test_records_come_once_and_room_is_given_back(ring: Writer) -> None:
    assert len(ring.reader.read()) == 0
    ring.fill(0, 0, 3)
    ring.fill(1, 0, 5)
    assert ring.reader.read()["number"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert ring.heads.tolist() == [3, 5] and len(ring.reader.read()) == 0


def test_what_is_behind_a_short_record_is_not_shown(ring: Writer) -> None:
    """Its room holds what an earlier record left there."""
    ring.fill(0, 0, 4)
    ring.data["event"]["rest"][0, :4] = 0x0101010101010101
    for position, size in ((1, 8), (2, 20), (3, 1 << 30)):  # a wrong size is no worse than a right one
        ring.put(0, position, position + 5, size)
    found = ring.reader.read()
    assert found["number"].tolist() == [0, 6, 7, 8]
    full, part = [0x0101010101010101] * 4, [0x0101010101010101, 0x01010101, 0, 0]
    assert found["rest"].tolist() == [full, [0] * 4, part, full]


def test_a_ring_goes_round(ring: Writer) -> None:
    random.seed(3)
    position = 0
    for _ in range(60):
        n = random.choice([1, 255, 256, 257, 1000, CAPACITY])
        ring.fill(0, position, n)
        assert ring.reader.read()["number"].tolist() == list(range(position, position + n))
        position += n
    assert ring.heads[0] == position


def test_positions_pass_32_bits(ring: Writer) -> None:
    first = (1 << 32) - 3
    ring.reader._positions[0] = first
    ring.fill(0, first, 6)
    assert ring.reader.read()["number"].tolist() == list(range(first, first + 6))
    assert len(ring.reader.read()) == 0


def test_nothing_is_taken_from_behind_a_record_that_is_being_written(ring: Writer) -> None:
    ring.fill(0, 0, 10)
    ring.fill(0, 11, 10)
    assert len(ring.reader.read()) == 10 and len(ring.reader.read()) == 0
    ring.put(0, 10, 10)
    assert ring.reader.read()["number"].tolist() == list(range(10, 21))


def test_the_dead_leave_gaps(ring: Writer) -> None:
    ring.fill(0, 0, 10)
    ring.fill(0, 11, 10)
    ring.put(0, 25, 25)
    ring.control((28, 7), (0, 0))
    assert ring.reader.read(last=True)["number"].tolist() == [*range(10), *range(11, 21), 25]
    first, second = ring.reader.counts()
    assert (first.reserved, first.received, first.lost, first.incomplete) == (28, 21, 7, 7)
    assert (second.reserved, second.received, second.lost, second.incomplete) == (0, 0, 0, 0)


def test_what_a_killed_process_wrote_is_found_without_its_counts(ring: Writer) -> None:
    ring.fill(1, 0, 100)
    ring.put(1, 105, 105)
    assert ring.reader.read(last=True)["number"].tolist() == [*range(100), 105]
    assert [count.incomplete for count in ring.reader.counts()] == [0, 5]
    assert len(ring.reader.read(last=True)) == 0


def test_discarded_records_are_left_out(ring: Writer) -> None:
    ring.fill(0, 0, 4)
    ring.put(0, 2, 2, EVENT.itemsize | DISCARDED)
    assert ring.reader.read()["number"].tolist() == [0, 1, 3]
    assert ring.reader.counts()[0].received == 4


def test_a_copy_of_a_ring_in_gpu_memory(ring: Writer) -> None:
    reader = RingReader(ring.place, EVENT, None)
    ring.fill(0, 0, 100)
    assert len(reader.read_copy(bytes(ring.area))) == 100 and reader.consumed == [100, 0]
    ring.fill(0, 100, 50)
    assert reader.read_copy(bytes(ring.area))["number"].tolist() == list(range(100, 150))
    assert len(reader.read()) == 0


def test_garbage_is_only_garbage() -> None:
    for seed in range(20):
        ring = Writer(1)
        noise = np.random.default_rng(seed)
        ring.area[:] = noise.bytes(ring.place.size)
        ring.fill(0, 0, int(noise.integers(CAPACITY)))
        first = len(ring.reader.read())
        assert first + len(ring.reader.read(last=True)) <= CAPACITY
        ring.reader.control(noise.bytes(128))
        assert all(count.received <= CAPACITY for count in ring.reader.counts())
        os.close(ring.file)


def test_records_of_another_size_are_refused(ring: Writer) -> None:
    with pytest.raises(Error, match="records of 48 bytes, not 16"):
        RingReader(ring.place, np.dtype("<u8"), ring.file)


def test_reading_keeps_up() -> None:
    """30 million records of 40 bytes in a second on one quiet core; here others are at work, too."""
    ring = Writer(16, 1 << 14)
    times = []
    for turn in range(4):
        for shard in range(16):
            ring.fill(shard, turn << 14, 1 << 14)
        start = time.process_time()
        assert len(ring.reader.read()) == 1 << 18
        times.append(time.process_time() - start)
    assert (1 << 18) / min(times) > 4e6
    os.close(ring.file)

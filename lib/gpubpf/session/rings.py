"""Rings of device programs (docs/timing.md): the tool reads records while the GPU writes them.

A record is there when its mark, which depends on its position, is. Who writes is untrusted, so nothing is believed that would make
the reader wait, allocate without bound or fail; records are only data.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf.ebpf.maps import DISCARDED, RECORD_HEADER, pad8
from gpubpf.errors import Error

if TYPE_CHECKING:
    from gpubpf.agent.protocol import RingPlace

    Records = np.ndarray[Any, Any]

# Records that are looked at in one go, at first and later: what lies in the processor's cache.
_FIRST, _CHUNK = 256, 16384


class _Marks:
    """The marks of a ring of `capacity` records, and where the next record is read."""

    def __init__(self, marks: np.ndarray[Any, Any]) -> None:
        self._marks = marks
        self._ramp = np.arange(1, _CHUNK + 1, dtype=marks.dtype)
        self._mask = len(marks) - 1
        self.position = 0

    def committed(self) -> int:
        """How many records from `position` on are there without a gap."""
        count, step, capacity = 0, _FIRST, len(self._marks)
        while count < capacity:
            n = self._piece(count, step)
            there = self._matching(count, n)
            if there.all():
                count, step = count + n, _CHUNK
            else:
                return count + int(there.argmin())
        return count

    def places(self, limit: int | None) -> np.ndarray[Any, Any]:
        """Of all records that are there, gaps or none, their places from `position` on, at most `limit`."""
        count, found = 0, []
        most = min(len(self._marks), limit if limit is not None else len(self._marks))
        while count < most:
            n = min(self._piece(count, _CHUNK), most - count)
            found.append(np.flatnonzero(self._matching(count, n)) + count)
            count += n
        return np.concatenate(found) if found else np.empty(0, np.intp)

    def _piece(self, count: int, step: int) -> int:
        """Not over the end of the ring, where the next ones begin anew."""
        capacity = len(self._marks)
        return min(step, capacity - count, capacity - ((self.position + count) & self._mask))

    def _matching(self, count: int, n: int) -> np.ndarray[Any, Any]:
        position = self.position + count
        at = position & self._mask
        bits = 8 * self._marks.dtype.itemsize
        return self._marks[at : at + n] == self._ramp[:n] + self._marks.dtype.type(
            position & ((1 << bits) - 1)
        )


def _copy(to: Records, ring: Records, position: int) -> None:
    """`len(to)` records from `position` on, over the ring's end where that comes before."""
    at = position & (len(ring) - 1)
    first = min(len(to), len(ring) - at)
    to[:first] = ring[at : at + first]
    to[first:] = ring[: len(to) - first]


@dataclass(frozen=True)
class ShardCount:
    """Records of one shard: `reserved` places, of which `received` came, `lost` that found none, as last known (a process that was
    killed did not say). `incomplete`: reserved, and will never come; 0 while the process lives."""

    shard: int
    reserved: int
    received: int
    lost: int
    incomplete: int


class RingReader:
    """A ring of one context. `dtype` is that of a record's payload; the file of a ring in host memory (sealed) stays the caller's.

    A ring in GPU memory is read from copies of it, `take`.
    """

    def __init__(self, place: RingPlace, dtype: np.dtype[Any], file: int | None) -> None:
        stride = RECORD_HEADER + pad8(dtype.itemsize)
        if place.stride != stride:
            raise Error(f"a ring has records of {place.stride} bytes, not {stride}")
        self.place = place
        self._kind = np.dtype(
            {
                "names": ["mark", "size", "payload"],
                "formats": ["<u4", "<u4", dtype],
                "offsets": [0, 4, RECORD_HEADER],
                "itemsize": place.stride,
            }
        )
        self._area: mmap.mmap | None = None
        self._heads: np.ndarray[Any, Any] | None = None
        self._positions = [0] * place.shards
        self._received = [0] * place.shards
        self._control = np.zeros((place.shards, 2), np.uint64)  # reserved, lost
        self._known = self._ended = False
        self.full = 0.0  # the part of the fullest shard that the last reading found taken
        if file is not None:
            self._area = mmap.mmap(file, place.size)
            self._heads = np.frombuffer(self._area, "<u8", 8 * place.shards).reshape(place.shards, 8)[:, 0]

    @property
    def consumed(self) -> Sequence[int]:
        """By shard: up to where it was read."""
        return self._positions

    def control(self, raw: bytes) -> None:
        """The control block, as a snapshot has it."""
        numbers = np.frombuffer(raw, "<u8", 8 * (1 + self.place.shards)).reshape(-1, 8)[1:, :2]
        self._control, self._known = np.maximum(self._control, numbers), True

    def read(self, last: bool = False) -> Records:
        """The records that came since the last time, by shard, in the order of reservation. `last`: nobody writes any more, so gaps
        are passed over."""
        return self._read(self._area, last) if self._area is not None else np.empty(0, self._kind)["payload"]

    def read_copy(self, copy: bytes | mmap.mmap, last: bool = False) -> Records:
        """As `read`, from a copy of a ring in GPU memory."""
        return self._read(copy, last)

    def _read(self, data: bytes | mmap.mmap, last: bool) -> Records:
        place = self.place
        self.full = 0.0
        ring = np.frombuffer(data, self._kind, place.shards * place.capacity, place.first).reshape(
            place.shards, place.capacity
        )
        self._ended |= last
        found: list[tuple[int, int | np.ndarray[Any, Any]]] = []
        total = 0
        for shard in range(place.shards):
            marks = _Marks(ring[shard]["mark"])
            marks.position = self._positions[shard]
            count = marks.committed()
            if count:
                found.append((shard, count))
                total += count
                self.full = max(self.full, count / place.capacity)
            if last and count < place.capacity:
                marks.position += count
                reserved = int(self._control[shard, 0])
                places = marks.places(max(reserved - marks.position, 0) if self._known else None)
                if len(places):
                    found.append((shard, places))
                    total += len(places)
        records = np.empty(total, self._kind)
        at = 0
        for shard, what in found:
            start = self._positions[shard]
            if isinstance(what, int):
                _copy(records[at : at + what], ring[shard], start)
                at += what
                self._positions[shard] = start + what
                self._received[shard] += what
                if self._heads is not None:
                    self._heads[shard] = start + what
            else:  # behind a gap
                records[at : at + len(what)] = ring[shard][(start + what) & (place.capacity - 1)]
                at += len(what)
                self._received[shard] += len(what)
                self._positions[shard] = start + int(what[-1]) + 1
        discarded = (records["size"] & DISCARDED) != 0
        return records[~discarded]["payload"] if discarded.any() else records["payload"]

    def counts(self) -> list[ShardCount]:
        made = []
        for shard, (reserved, lost) in enumerate(self._control.tolist()):
            received = self._received[shard]
            reserved = max(reserved, self._positions[shard])
            incomplete = reserved - received if self._ended else 0
            made.append(ShardCount(shard, reserved, received, lost, incomplete))
        return made

    def close(self) -> None:
        self._heads = None
        _close(self._area)
        self._area = None


def _close(area: mmap.mmap | None) -> None:
    if area is not None:
        with contextlib.suppress(BufferError):  # an array of the caller's is still in it: it goes with that
            area.close()

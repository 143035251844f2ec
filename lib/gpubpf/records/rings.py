"""Read the rings of device programs (docs/timing.md) while the GPU writes them.

A record is complete when its mark has the value for its position. The writer is untrusted: no value in a ring can make the reader
wait, fail or allocate without bound. traced_process.py creates a `RingReader`, and readout.py reads from it.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf.ebpf.maps import DISCARDED, HEADER, RECORD_HEADER, RING_SHARD, pad8
from gpubpf.errors import Error
from gpubpf.record import Record

if TYPE_CHECKING:
    from gpubpf.agent.protocol import RingPlace

    Records = np.ndarray[Any, Any]

# Marks to compare at a time, at first and later; few enough for the processor's cache.
_FIRST, _CHUNK = 256, 16384
_WORDS = RING_SHARD // 8


class _Marks:
    """The marks of one shard. `position`: the position of the next record to read."""

    def __init__(self, marks: np.ndarray[Any, Any]) -> None:
        self._marks = marks
        self._ramp = np.arange(1, _CHUNK + 1, dtype=marks.dtype)
        self._mask = len(marks) - 1
        self.position = 0

    def committed(self) -> int:
        """Return how many complete records follow from `position` on, without a gap."""
        count, step, capacity = 0, _FIRST, len(self._marks)
        while count < capacity:
            n = self._piece(count, step)
            complete = self._matching(count, n)
            if complete.all():
                count, step = count + n, _CHUNK
            else:
                return count + int(complete.argmin())
        return count

    def places(self, limit: int | None) -> np.ndarray[Any, Any]:
        """Return the offsets from `position` of all complete records, also behind gaps. `limit`: how many records to check."""
        count, found = 0, []
        most = min(len(self._marks), limit if limit is not None else len(self._marks))
        while count < most:
            n = min(self._piece(count, _CHUNK), most - count)
            found.append(np.flatnonzero(self._matching(count, n)) + count)
            count += n
        return np.concatenate(found) if found else np.empty(0, np.intp)

    def _piece(self, count: int, step: int) -> int:
        """Return how many of `step` marks lie before the end of the shard, where positions wrap around."""
        capacity = len(self._marks)
        return min(step, capacity - count, capacity - ((self.position + count) & self._mask))

    def _matching(self, count: int, n: int) -> np.ndarray[Any, Any]:
        """Return whether each of `n` records, starting `count` after `position`, is complete."""
        position = self.position + count
        at = position & self._mask
        bits = 8 * self._marks.dtype.itemsize
        return self._marks[at : at + n] == self._ramp[:n] + self._marks.dtype.type(
            position & ((1 << bits) - 1)
        )


def _copy(to: Records, ring: Records, position: int) -> None:
    """Copy `len(to)` records from `position` on, wrapping around at the end of the ring."""
    at = position & (len(ring) - 1)
    first = min(len(to), len(ring) - at)
    to[:first] = ring[at : at + first]
    to[first:] = ring[: len(to) - first]


class ShardCount(Record):
    """The last known record counts of one shard. A killed process does not report its final counts.

    reserved: records that got space. received: records that the tool has read. lost: records that found no space.
    incomplete: reserved records that will never be complete; 0 while the process lives.
    """

    shard: int
    reserved: int
    received: int
    lost: int
    incomplete: int


class RingReader:
    """Reads a ring of one context.

    dtype: the type of a record's payload.
    file: the sealed file of a ring in host memory, which the caller keeps. None: the ring is in GPU memory; use `read_copy`.

    Raises Error if records have another size than `dtype`. Only one thread at a time may use the reader.
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
        self.full = 0.0  # how full the fullest shard was at the last reading, from 0 to 1
        if file is not None:
            self._area = mmap.mmap(file, place.size)
            heads = np.frombuffer(self._area, "<u8", _WORDS * place.shards)
            self._heads = heads.reshape(place.shards, _WORDS)[:, 0]

    @property
    def consumed(self) -> Sequence[int]:
        """The position up to which each shard was read."""
        return self._positions

    def control(self, raw: bytes) -> None:
        """Update the counts of reserved and lost records from a snapshot's control block."""
        numbers = np.frombuffer(raw, "<u8", _WORDS * self.place.shards, HEADER).reshape(-1, _WORDS)[:, :2]
        self._control, self._known = np.maximum(self._control, numbers), True

    def read(self, last: bool = False) -> Records:
        """Return the payloads of new records, by shard, in the order in which they were reserved.

        last: writing has ended, so records after a gap are also returned."""
        return self._read(self._area, last) if self._area is not None else np.empty(0, self._kind)["payload"]

    def read_copy(self, copy: bytes | mmap.mmap, last: bool = False) -> Records:
        """Do the same as `read`, on a copy of a ring in GPU memory."""
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
            else:  # after a gap
                records[at : at + len(what)] = ring[shard][(start + what) & (place.capacity - 1)]
                at += len(what)
                self._received[shard] += len(what)
                self._positions[shard] = start + int(what[-1]) + 1
        self._clear(records)
        discarded = (records["size"] & DISCARDED) != 0
        return records[~discarded]["payload"] if discarded.any() else records["payload"]

    def _clear(self, records: Records) -> None:
        """Set the rest of records that are shorter than the longest to zero, because it still has data of earlier records."""
        payload = self._kind["payload"].itemsize
        sizes = records["size"] & ~np.uint32(DISCARDED)
        content = records.view(np.uint8).reshape(-1, self._kind.itemsize)
        shorter = np.flatnonzero(sizes < payload)
        for begin in range(0, len(shorter), _CHUNK):
            some = shorter[begin : begin + _CHUNK]
            behind = np.arange(payload) >= sizes[some, None]
            payloads = content[some, RECORD_HEADER : RECORD_HEADER + payload]
            content[some, RECORD_HEADER : RECORD_HEADER + payload] = np.where(behind, 0, payloads)

    def counts(self) -> list[ShardCount]:
        """Return the counts of all shards."""
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
        with contextlib.suppress(BufferError):  # an array of the caller still uses the map, and will free it
            area.close()

"""A ring for tests, as an agent makes it: control block and data in this process, read by the tool's reader."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import Any

import numpy as np

from gpubpf.agent.protocol import Place, RingPlace
from gpubpf.ebpf.maps import HEADER, RING_SHARD, MapDefinition, record_stride
from gpubpf.records.rings import RingReader


def control(place: RingPlace, data: int) -> bytes:
    """The control block of a new ring whose data lies at an address."""
    head = struct.pack("<3Q", place.shards, place.capacity, data)
    return head.ljust(HEADER + RING_SHARD * place.shards, b"\0")


def place_of(definition: MapDefinition, shards: int, capacity: int) -> RingPlace:
    return RingPlace(0, 0, 0, Place.HOST_RING, shards, capacity, record_stride(definition))


class Ring:
    def __init__(self, definition: MapDefinition, shards: int = 1, capacity: int = 4096) -> None:
        self.definition, self.place = definition, place_of(definition, shards, capacity)
        self.file = os.memfd_create("ring")
        os.ftruncate(self.file, self.place.size)
        self.data = mmap.mmap(self.file, self.place.size)
        self.at = ctypes.addressof(ctypes.c_char.from_buffer(self.data))
        block = control(self.place, self.at)
        self.control = ctypes.create_string_buffer(block, len(block))
        self.reader = RingReader(self.place, definition.value_dtype, self.file)

    def given(self, **more: int) -> dict[str, int]:
        """The arguments of a fragment that writes it, and more."""
        return {"map_" + self.definition.name: ctypes.addressof(self.control), **more}

    def begin_at(self, position: int) -> None:
        """As if so many records had come and gone."""
        for at in (0, 16):  # reserved and consumed
            ctypes.memmove(ctypes.addressof(self.control) + HEADER + at, struct.pack("<Q", position), 8)
        self.reader._positions = [position] * self.place.shards

    def counts(self) -> list[tuple[int, int]]:
        """Reserved and lost, by shard."""
        numbers = np.frombuffer(self.control.raw, "<u8", 8 * (1 + self.place.shards)).reshape(-1, 8)
        return [(int(reserved), int(lost)) for reserved, lost in numbers[1:, :2]]

    def take(self) -> Any:
        return self.reader.read()

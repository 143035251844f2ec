"""The sums that the exporter reads from GPU memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from gpubpf.exporter.gpu_time import Measured, measured

SLOTS, SHARDS, BITS = 64, 16, 44
TIME = (1 << BITS) - 1
HOUR = 3600 * 10**9


class Shape:
    """The maps of one kernel and launch shape."""

    def __init__(self, launches: int = 0, ns: int = 0) -> None:
        self.starts = np.zeros(SLOTS, np.uint64)
        self.ends = np.zeros((SLOTS, SHARDS), np.uint64)
        self.sums = np.array([[(launches, ns)]], [("launches", "<u8"), ("ns", "<u8")])

    def launch(self, number: int, start: int, *ends: int) -> None:
        slot, turn = number % SLOTS, (number // SLOTS) << BITS & (1 << 64) - 1
        self.starts[slot] = turn | (~start & TIME)
        for shard, end in enumerate(ends):
            self.ends[slot, shard] = turn | (end & TIME)

    def read(self) -> Measured:
        maps: Any = [
            SimpleNamespace(process=1, mangled="k", array=array.reshape(-1, 1))
            for array in (self.starts, self.ends, self.sums)
        ]
        return measured(*([one] for one in maps))[1, "k"]


def test_launches_in_slots_count_beside_those_in_the_sum() -> None:
    shape = Shape(launches=10, ns=5000)
    shape.launch(641, 1_000_000, 1_000_320, 1_000_640)
    shape.launch(7, 2_000_000, 2_000_032)
    assert shape.read() == Measured(12, 5672, 32)


def test_a_launch_without_an_end_does_not_count_yet() -> None:
    shape = Shape()
    shape.launch(5, 1000)
    assert shape.read() == Measured(0, 0, 0)
    shape.launch(5, 1000, 1500)
    assert shape.read() == Measured(1, 500, 500)


def test_ends_of_an_earlier_launch_in_the_slot_do_not_count() -> None:
    shape = Shape()
    shape.launch(5, 1000, 9000, 9000, 9000)
    shape.launch(5 + SLOTS, 1200, 1500)
    assert shape.read() == Measured(1, 300, 300)


def test_times_that_cannot_be_are_left_out() -> None:
    shape = Shape()
    shape.launch(1, 5000, 4000)
    shape.launch(2, 0, HOUR + 1)
    shape.launch(3, 1, HOUR + 1)
    assert shape.read() == Measured(1, HOUR, 1)

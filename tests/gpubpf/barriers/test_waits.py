"""Times at barriers, as the maps of barrierlate have them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpubpf.barriers import text
from gpubpf.barriers.waits import Barrier, Times, cycle_of, middles
from gpubpf.show.owner_columns import OwnerColumns

BINS = 512
LOOKS = np.dtype([("looks", [("clock", "<u8"), ("time", "<u8")], 2)])


def times(*values: int) -> Times:
    bins = np.zeros(BINS, np.int64)
    for value in values:
        shift = max((value >> 4 | 1).bit_length() - 1, 0)  # as the device program
        bins[shift * 16 + (value >> shift)] += 1
    return Times(len(values), sum(values), max(values), bins)


def barrier(waits: Times, skews: Times, last: dict[int, int], **other: Any) -> Barrier:
    known = {"number": 3, "site": None, "barrier": 0, "unknown": 0, "cycle": 0.5} | other
    owner = {"process": 1, "pid": 2, "comm": "app", "gpu": 0, "wave": None, "mangled": "_Z1av"}
    return Barrier(**owner, **known, waits=waits, skews=skews, last=last)


def test_a_value_is_within_three_percent_of_the_middle_of_its_bin() -> None:
    for value in (*range(70), 1000, 123_456, 2**31 + 5):
        at = times(value).bins.nonzero()[0][0]
        assert abs(middles(BINS)[at] - value) <= value / 32
        assert value >= 32 or middles(BINS)[at] == value


def test_a_distribution_is_converted_to_ns() -> None:
    assert times(0, 10, 20, 30).record(0.5) == {"mean": 7.5, "p50": 5, "p99": 15, "max": 15}
    assert times(0).record(None) is None


def test_an_interval_has_only_new_times() -> None:
    one, both = times(500, 5), times(500, 5, 7, 7)
    new = both.since(one)
    assert (new.count, new.total, new.most) == (2, 14, 7)
    nothing = both.since(both)
    assert (nothing.count, nothing.most, nothing.record(1.0)) == (0, 0, None)


def test_the_length_of_a_cycle_is_measured_on_each_multiprocessor() -> None:
    far = 2**53  # beyond what a float has exactly
    looks = np.zeros((8, 3), LOOKS)
    for shard in range(8):
        begin = far + 10**9 * shard
        looks["looks"]["clock"][shard, 1] = begin, begin + 2_000_000
        looks["looks"]["time"][shard, 1] = far + 32 * shard, far + 32 * shard + 1_000_000
    one = SimpleNamespace(process=1, gpu=0, array=looks)
    assert cycle_of([one], 1, 0) == pytest.approx(0.5, rel=1e-6)
    assert cycle_of([SimpleNamespace(process=1, gpu=0, array=np.zeros((2, 3), LOOKS))], 1, 0) is None


@pytest.mark.parametrize(
    "last, waits, is_told",
    [
        ({2: 8}, times(*[4000, 4000, 4000, 0] * 8), True),
        ({2: 5, 1: 3}, times(*[4000, 4000, 4000, 0] * 8), False),  # not often the same warp
        ({2: 8}, times(*[100, 100, 100, 0] * 8), False),  # 50 ns
        ({}, times(*[0] * 32), False),
        ({2: 8}, times(*[4000, 0, 0, 0] * 8), False),  # three warps come late together
        ({2: 8}, times(*[4000] * 8), True),  # the last warp only arrives
    ],
)
def test_a_warp_is_named_only_if_it_is_late_each_time(
    last: dict[int, int], waits: Times, is_told: bool
) -> None:
    lines = list(text.lines([barrier(waits, times(*[waits.most] * 8), last)], None, False, OwnerColumns()))
    assert any("warp 2 arrives last 8 of 8 times" in line for line in lines) == is_told


def test_times_are_unknown_without_the_length_of_a_cycle() -> None:
    one = barrier(times(*[4000, 0] * 8), times(*[4000] * 8), {1: 8}, cycle=None)
    lines = list(text.lines([one], None, False, OwnerColumns()))
    assert "unknown" in lines[1] and len(lines) == 2

"""Lateness of lanes, spreads of warps and blocks, on exits whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from gpubpf import exits
from gpubpf.exits import Clock, Launch, Rows, Spread
from gpubpf.imbalance import Shape


def rows(shape: Shape, time: np.ndarray, site: np.ndarray | None = None) -> Rows:
    """Of one launch in which each thread leaves at `time`, in an order that is mixed up."""
    order = np.random.default_rng(1).permutation(shape.threads)
    site = np.zeros(shape.threads, np.int64) if site is None else site
    return exits.rows_of_records(shape, order, time[order], site[order])


def reported(shape: Shape, time: np.ndarray, site: np.ndarray | None = None) -> exits.Report:
    block = np.arange(shape.threads) // shape.block_size
    whole = exits.launch_of_records(
        7, shape, np.arange(shape.threads), time, block % 3, shape.threads, error=0.0
    )
    assert whole is not None
    return exits.report(shape, 1, rows(shape, time, site), [whole], Clock())


def said(found: exits.Report) -> str:
    return "\n".join(exits.findings(found, {4: "scale.cu:17"}.get))


def test_bins_are_as_fine_as_they_say() -> None:
    """On both sides of each power of two, up to the largest value; the device's arithmetic, slowly."""
    values = sorted({v for e in range(37) for v in (2**e - 1, 2**e, 2**e + 1, 3 * 2**e // 2)} | {5 * 10**9})
    values = [value for value in values if value < 2**36]
    found = exits.bins_of(np.array(values))
    for value, place in zip(values, found, strict=True):
        shift = next(shift for shift in range(31) if value >> shift < 64)
        assert place == shift * 32 + (value >> shift) < exits.BINS
        assert abs(exits.middles()[place] - value) <= value / 64
    assert exits.bins_of(np.array([2**50]))[0] == exits.BINS - 1


@pytest.mark.parametrize("scale", [1.0, 0.55])
def test_percentiles_of_bins_are_those_of_the_values(scale: float) -> None:
    values = np.random.default_rng(2).lognormal(8, 2, 5000).astype(np.int64)
    values[:2000] = 0
    bins = np.bincount(exits.bins_of(values[values > 0]), minlength=exits.BINS)
    found = Spread.of_bins(len(values), float(values.sum()), bins, float(values.max()), scale)
    true = Spread.of(values * scale)
    assert found.count == true.count == 5000
    for name in ("mean", "p50", "p99", "max"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.016)


def test_lane_31_is_late() -> None:
    shape = Shape((4, 1, 1), (256, 1, 1))
    thread = np.arange(shape.threads)
    time = 5000 + 752 * (thread % 32 == 31)
    found = reported(shape, time, np.where(thread % 32 == 31, 4, 3))
    for lane in found.lanes:
        late = 752 if lane.number == 31 else 0
        assert (lane.late.count, lane.late.mean, lane.late.p50, lane.late.p99, lane.late.max) == (
            32,
            *[late] * 4,
        )
    assert found.lanes[31].site == 4 and found.lanes[0].site is None
    assert found.warp == Spread(32, 752, 752, 752, 752) and found.block.max == found.grid.max == 0
    assert said(found) == "lane 31 leaves 752 ns after the rest of its warp, at scale.cu:17"
    assert [
        (label, lane.late.max, way) for label, lane, way in exits.lane_rows(found, {4: "scale.cu:17"}.get)
    ] == [
        ("0-30", 0, ""),
        ("31", 752, "scale.cu:17"),
    ]


def test_all_lanes_together() -> None:
    found = reported(Shape((3, 1, 1), (64, 1, 1)), np.full(192, 5))
    assert said(found) == "the lanes of a warp leave together"
    assert found.threads == 192 and found.blocks == found.blocks_there == 3


def test_every_fourth_lane() -> None:
    time = 100 * (np.arange(64) % 4 == 3)
    assert said(reported(Shape((1, 1, 1), (64, 1, 1)), time)).startswith(
        "every 4th lane (3 to 31) leave 100 ns after the rest of their warp"
    )


def test_partial_warps_and_single_threads() -> None:
    """Blocks of 40: the second warp has 8 lanes. The last of them is late."""
    shape = Shape((2, 1, 1), (8, 5, 1))
    time = 10 + 90 * (np.arange(80) % 40 == 39)
    found = reported(shape, time)
    assert [lane.late.count for lane in found.lanes] == [4] * 8 + [2] * 24
    assert (found.lanes[7].late.mean, found.lanes[7].late.max, found.warp.count) == (45, 90, 4)
    assert found.block == Spread(2, 90, 90, 90, 90) and found.last.tolist() == [0, 2] + [0] * 30
    single = reported(Shape((5, 1, 1), (1, 1, 1)), np.arange(5))
    assert len(single.lanes) == 1 and single.warp.max == 0 and single.grid.max == 4


def test_one_slow_warp() -> None:
    shape = Shape((8, 1, 1), (128, 1, 1))
    thread = np.arange(shape.threads)
    found = reported(shape, 1000 * (thread % 128 // 32 == 2))
    assert found.block == Spread(8, 1000, 1000, 1000, 1000) and found.worst_warp == 2
    assert "warp 2 is the last in 100 % of the blocks" in said(found)


def test_one_slow_block() -> None:
    shape = Shape((3, 2, 1), (32, 1, 1))
    found = reported(shape, 1000 + 9000 * (np.arange(192) // 32 == 4))
    assert found.whole[0].last_block == 4
    assert "block (1,1) finishes last and alone: 9.00 us after all other blocks" in said(found)


def test_the_tail_begins_when_blocks_are_fewer_than_multiprocessors() -> None:
    finish = np.array([0, 10, 20, 30, 70, 90])
    launch = Launch.of_blocks(1, np.arange(6), finish, np.array([0, 1, 2, 0, 1, 2]))
    # From 30, when two of six blocks were left for three multiprocessors.
    assert (launch.spread, launch.tail, launch.last_block, launch.alone) == (90, 60, 5, 20)
    assert launch.sm_finish.tolist() == [0, 40, 60]
    alone = Launch.of_blocks(1, np.array([9]), np.array([5]), np.array([3]))
    assert (alone.spread, alone.tail, alone.alone) == (0, 0, 0)


def test_incomplete_warps_and_launches_do_not_count() -> None:
    shape = Shape((2, 1, 1), (64, 1, 1))
    thread = np.arange(127)  # the last thread never left
    found = exits.rows_of_records(shape, thread, thread * 0 + (thread == 100) * 5, thread * 0)
    assert found.last.sum() == 1 and found.sums[:32].sum() == 0
    assert exits.launch_of_records(1, shape, thread, thread, thread, 128, 0.0) is None
    nothing = exits.report(shape, 1, Rows.nothing(), [], Clock())
    assert nothing.threads == 0 and said(nothing) == "no block of it has finished"


def test_chosen_threads_only() -> None:
    """--thread 0:9: ten lanes of each first warp."""
    shape = Shape((2, 1, 1), (64, 1, 1))
    mask = np.arange(64) < 10
    thread = np.concatenate([np.arange(10), 64 + np.arange(10)])
    found = exits.rows_of_records(shape, thread, 7 * (thread == 67), thread * 0, mask)
    report = exits.report(shape, 1, found, [], Clock(), None, mask)
    assert [lane.number for lane in report.lanes] == list(range(10))
    assert report.lanes[3].late == Spread(2, 3.5, 0, 7, 7)


def test_launches_of_the_map_that_were_read_whole() -> None:
    finished = np.zeros((8, 4), exits.FINISH)
    for block in range(4):
        finished[3, block] = (11, 1000 * block + 50, 1000 * block + 50, 50 << 16 | block)
        finished[4, block] = (12 + (block == 3), 0, 0, 0)  # overwritten while it was read
    (launch,) = exits.launches_of_map(finished, None, Clock())
    assert (launch.number, launch.spread, launch.tail) == (11, 3000, 3000)
    assert len(exits.launches_of_map(finished, np.array([0, 1, 2]), Clock())) == 2


def test_the_rate_of_the_clocks() -> None:
    """1.98 GHz, read now and then by a timer that ticks 32 ns."""
    true = np.sort(np.random.default_rng(3).integers(0, 2_000_000, 200))
    cycles = np.rint(true * 1.98).astype(np.int64)
    clock = Clock.measured(np.zeros(200, np.int64), cycles, true // 32 * 32)
    assert clock is not None and abs(clock.ns * 1.98 - 1) <= clock.error < 1e-3
    assert Clock.measured(np.zeros(2, np.int64), cycles[:2], true[:2]) is None


def test_an_interval_is_the_difference() -> None:
    shape = Shape((1, 1, 1), (64, 1, 1))
    thread = np.arange(64)
    first, second = rows(shape, 500 * (thread == 5)), rows(shape, 20 * (thread == 6))
    report = exits.report(shape, 1, first.plus(second).since(first), [], Clock())
    assert report.lanes[6].late.max == 20 and report.lanes[5].late.max == 0 and report.threads == 64
    again = exits.report(shape, 1, first.plus(second).plus(second).since(first.plus(second)), [], Clock())
    assert again.lanes[6].late.max == 20


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (752, "752 ns"),
        (999.6, "1.00 us"),
        (1250, "1.25 us"),
        (13_170, "13.2 us"),
        (2.5e8, "250 ms"),
    ],
)
def test_durations_have_three_digits(ns: float, text: str) -> None:
    assert exits.duration(ns) == text

"""Lateness of lanes, spreads of warps and blocks: exits with known answers, as records and as contents of the maps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpubpf.exits import findings
from gpubpf.exits import lateness as exits
from gpubpf.exits.exit_records import lanes
from gpubpf.exits.lateness import (
    BINS,
    CLOCK_BITS,
    CLOCK_MASK,
    BinnedValues,
    CycleLength,
    Distribution,
    ExitReport,
    Exits,
    LaneLateness,
)
from gpubpf.record import replace
from gpubpf.records.kernel_shapes import KernelShape
from gpubpf.records.launch_shape import Shape

RECORD = np.dtype(
    [("clock", "<u8"), ("time", "<u8"), ("launch", "<u8"), ("thread", "<u4"), ("sm", "<u2"), ("site", "<u2")]
)
BLOCK = np.dtype(
    [
        ("exits", "<u4", (32,)),
        ("rounds", [("left", "<u8"), ("clock", "<u8"), ("time_sm", "<u8")], (8,)),
    ]
)
LATE = np.dtype([("sum", "<u8"), ("worst", "<u8"), ("lost", "<u8"), ("bins", "<u4", (BINS,))])
WARP = np.dtype([("first", "<u8"), ("late", "<u8")])
SMS = 3


def records(shape: Shape, time: Any, site: Any = 0, launch: int = 7, chosen: Any = None) -> Any:
    """Return the records of a launch in which each thread exits at its `time`, in random order."""
    order = np.random.default_rng(1).permutation(shape.threads)
    made = np.zeros(shape.threads, RECORD)
    made["thread"] = order
    made["time"] = made["clock"] = np.broadcast_to(np.asarray(time) + 10**6, shape.threads)[order]
    made["site"] = np.broadcast_to(site, shape.threads)[order]
    made["sm"] = order // shape.block_size % SMS
    made["launch"] = launch
    return made if chosen is None else made[chosen[order]]


def run_device(shape: Shape, launches: list[tuple[int, Any]], site: int = 0) -> tuple[Any, Any, Any]:
    """Return the maps `warps`, `blocks`, `lateness` after launches (number, time of each thread), as the C text fills them."""
    warps = np.zeros((8, shape.blocks * shape.warps), WARP)
    blocks = np.zeros((1, shape.blocks), BLOCK)
    lateness = np.zeros((32, 1), LATE)
    for number, times in launches:
        launch, slot = number << CLOCK_BITS, number % 8
        for thread in np.argsort(times, kind="stable").tolist():
            now = int(times[thread]) + 10**6
            block, own = divmod(thread, shape.block_size)
            warp, lane = divmod(own, 32)
            cell = warps[slot, block * shape.warps + warp : block * shape.warps + warp + 1]
            blocks[0, block]["exits"][lane] += 1
            was, earlier = int(cell["first"][0]), launch | (~now & CLOCK_MASK)
            cell["first"] = max(was, earlier)
            late = (was - earlier) & CLOCK_MASK
            if was >= launch and late:
                cell["late"] = max(int(cell["late"][0]), launch | late)
                row = lateness[lane : lane + 1, 0]
                row["sum"] += np.uint64(late)
                row["bins"][0, exits.bins_of(np.array([late]))[0]] += 1
                row["worst"] = max(int(row["worst"][0]), late << 24 | site)
            rounds = blocks["rounds"][0, block, slot : slot + 1]
            rounds["left"] = max(int(rounds["left"][0]), launch) + 1
            if was < launch and warp == 0:
                rounds["clock"], rounds["time_sm"] = now + 5, (now + 5) << 16 | block % SMS
    return warps, blocks, lateness


def both(shape: Shape, time: Any, site: int = 0) -> ExitReport:
    """Return the report of one launch, which must be the same from records and from maps."""
    time = np.broadcast_to(time, shape.threads)
    one, other = Exits(shape), Exits(shape)
    assert one.take_records(records(shape, time, site), CycleLength())
    warps, blocks, lateness = run_device(shape, [(7, time)], site)
    other.take_maps(warps, blocks, CycleLength())
    recorded = ExitReport.of(one, 1, CycleLength())
    added = ExitReport.of(other, 1, CycleLength(), LaneLateness.of_maps(lateness, blocks))
    assert recorded == added
    return recorded


def said(found: ExitReport) -> str:
    return "\n".join(findings.findings(found, {4: "scale.cu:17"}.get))


def test_bins_are_as_fine_as_they_say() -> None:
    """Both sides of each power of two, up to the largest value, against the arithmetic of the device program."""
    values = sorted({v for e in range(37) for v in (2**e - 1, 2**e, 2**e + 1, 3 * 2**e // 2)} | {5 * 10**9})
    values = [value for value in values if value < 2**36]
    found = exits.bins_of(np.array(values))
    for value, place in zip(values, found, strict=True):
        shift = (value >> 5 | 1).bit_length() - 1
        assert place == shift * 32 + (value >> shift) < BINS
        assert abs(exits.middles()[place] - value) <= value / 64
    assert exits.bins_of(np.array([2**50]))[0] == BINS - 1


@pytest.mark.parametrize("scale", [1.0, 0.55])
def test_percentiles_of_bins_are_those_of_the_values(scale: float) -> None:
    values = np.random.default_rng(2).lognormal(8, 2, 5000).astype(np.int64)
    values[:2000] = 0
    tally = BinnedValues()
    tally.add(values[:300])
    tally.add(values[300:])
    found, ordered = tally.distribution(scale), np.sort(values * scale)
    true = {"mean": ordered.mean(), "p50": ordered[2499], "p99": ordered[4949], "max": ordered[-1]}
    assert found.count == 5000
    for name, time in true.items():
        assert getattr(found, name) == pytest.approx(time, rel=0.016)
    for limit in (0.0, 700.0, 20000.0):
        count, mean = found.above(limit)
        assert count == pytest.approx((ordered > limit).sum(), rel=0.02)
        assert mean == pytest.approx(ordered[ordered > limit].mean(), rel=0.02)
    assert found.above(found.max) == (0, 0.0)


def test_lane_31_is_late() -> None:
    shape = Shape((4, 1, 1), (256, 1, 1))
    found = both(shape, 752 * (np.arange(shape.threads) % 32 == 31), 4)
    for lane in found.lanes:
        assert lane.late == Distribution(32, *[752 if lane.number == 31 else 0] * 4)
    assert found.lanes[31].site == 4 and found.lanes[0].site is None
    assert found.warp == Distribution(32, 752, 752, 752, 752) and found.block.max == found.grid.max == 0
    assert said(found) == "lane 31 exits 752 ns after the rest of its warp, at scale.cu:17"
    rows = exits.lane_rows(found, {4: "scale.cu:17"}.get)
    assert [(label, lane.late.max, way) for label, lane, way in rows] == [
        ("0-30", 0, ""),
        ("31", 752, "scale.cu:17"),
    ]


def test_lanes_within_the_error_of_their_clock_share_a_row() -> None:
    """The error of the GPU's timer says nothing about them: all lanes of a warp read the same clock."""
    shape, lanes = Shape((1, 1, 1), (32, 1, 1)), np.arange(32)
    found = Exits(shape)
    found.take_records(records(shape, 1000 * (lanes >= 16) + lanes % 4), CycleLength(), error=5000.0)

    def rows(clock: CycleLength) -> list[str]:
        report = ExitReport.of(found, 1, clock)
        assert report.clock_error == 5000 and said(report).startswith("lanes 16 to 31 exit 998 ns to")
        return [label for label, _, _ in exits.lane_rows(report, {0: "scale.cu:17"}.get)]

    assert len(rows(CycleLength())) == 8
    assert rows(CycleLength(1.0, 0.01)) == ["0,4..12", "1-3,5-7,9-11,...", "16-31"]  # some are never late


def test_all_lanes_together() -> None:
    found = both(Shape((3, 1, 1), (64, 1, 1)), 5)
    assert said(found) == "the lanes of a warp exit together"
    assert found.exits == 192 and found.complete == 1


def test_lanes_whose_times_are_shown_the_same_share_a_row() -> None:
    shape = Shape((256, 1, 1), (64, 1, 1))
    warp, lane = np.divmod(np.arange(shape.threads), 32)
    found = both(shape, 9 * (warp < np.array([1, 2, 1, 0] * 8)[lane]), 4)  # lanes late in 0 to 2 of 512 warps
    assert [label for label, _, _ in exits.lane_rows(found, {}.get)] == ["0-2,4-6,8-10,...", "3,7..31"]


def test_times_that_are_shown_as_0_ns_are_no_finding() -> None:
    shape = Shape((64, 1, 1), (64, 1, 1))
    thread = np.arange(shape.threads)
    found = both(shape, 64 * (thread == 3))  # in one of 128 warps
    assert said(found).splitlines() == [
        "the lanes of a warp exit less than 1 ns apart (mean; at most 64 ns)",
        "block 0 finishes last and alone, 64 ns after all other blocks",
    ]
    assert "the warps" not in said(both(shape, 32 * (thread < 32)))  # warp 0 of 64 blocks: 0.5 ns
    assert "in 1 of 64 blocks, the warps exit within 64 ns" in said(both(shape, 64 * (thread < 32)))
    assert said(both(shape, 128 * (thread == 3))).startswith(
        "in 1 of 128 warps (warp 0 of a block), lane 3 exits 128 ns after"
    )


def test_lanes_that_are_late_in_different_numbers_of_warps() -> None:
    shape = Shape((5, 1, 1), (64, 1, 1))
    warp, lane = np.divmod(np.arange(shape.threads), 32)

    def late(*warps: int) -> str:
        """Return what is said if lane 0 exits 40 ns late in the first number of 10 warps, lane 1 in the second ..."""
        return said(both(shape, 40 * (warp < np.array([*warps, *[0] * 32])[lane])))

    assert late(2, 1, 1).startswith("in 2 of 10 warps, lane 0 exits 40 ns after the rest of its warp\n")
    assert late(10, 8, 6, 4, 2, 1).startswith(
        "lanes 0 to 5 exit 40 ns after the rest of their warp, each in 1 to 10 of 10 warps"
    )


def test_every_fourth_lane() -> None:
    found = both(Shape((1, 1, 1), (64, 1, 1)), 100 * (np.arange(64) % 4 == 3))
    assert said(found).startswith("every 4th lane (3 to 31) exits 100 ns after the rest of its warp")


def test_most_lanes_are_late() -> None:
    found = both(Shape((1, 1, 1), (64, 1, 1)), 100 * (np.arange(64) % 32 > 1))
    assert said(found).startswith("lanes 0 and 1 exit 100 ns before the rest of their warp")


def test_lanes_that_leave_one_after_the_other() -> None:
    found = both(Shape((1, 1, 1), (64, 1, 1)), 10 * (np.arange(64) % 32))
    assert said(found) == (
        "the lanes of a warp exit at different times; lane 31 is the latest, 310 ns after the first exit"
    )
    found = both(Shape((1, 1, 1), (64, 1, 1)), 10 * (np.arange(64) % 7))
    assert "is the latest" not in said(
        found
    )  # lanes 6, 13, 20 and 27 of warp 0, lanes 2, 9, 16, 23 and 30 of warp 1
    found = both(Shape((1, 1, 1), (32, 1, 1)), 10 * (np.arange(32) % 7))
    assert said(found).endswith("; every 7th lane (6 to 27) is the latest, 60 ns after the first exit")


def test_lanes_that_are_the_latest_by_chance() -> None:
    shape = Shape((8, 1, 1), (128, 1, 1))
    found = both(shape, np.random.default_rng(3).integers(0, 1000, shape.threads))
    (lanes, *_) = findings.findings(found, {}.get)
    assert lanes == "the lanes of a warp exit 938 ns apart; the latest lane varies from warp to warp"
    # One lane of each warp is late, another one each time; or none.
    thread = np.arange(shape.threads)
    found = both(shape, 500 * (thread % 32 == thread // 32 * 7 % 32))
    assert said(found).startswith(
        "the lanes of a warp exit 500 ns apart; the latest lane varies from warp to warp"
    )
    found = both(shape, 500 * (thread % 32 == thread // 32 * 7 % 32) * (thread // 32 % 4 == 1))
    assert "the latest" not in said(found)


def test_the_scale_of_lateness_does_not_hide_which_lane_is_the_latest() -> None:
    shape = Shape((10, 1, 1), (32, 1, 1))
    found = both(shape, np.arange(320) % 32 * (1 + np.arange(320) // 32))
    assert said(found).startswith(
        "the lanes of a warp exit at different times; lane 31 is the latest, 170 ns after the first exit (mean; at"
    )


@pytest.mark.parametrize("base", [0, 20])
def test_a_lane_that_is_late_in_few_warps(base: int) -> None:
    """Its mean says little. The others may be late by a little, each time."""
    shape = Shape((4, 1, 1), (128, 1, 1))
    thread = np.arange(shape.threads)
    time = base * (thread % 32 >= 8)
    found = both(shape, time + 340 * (thread == 13), 4)
    assert said(found).startswith("in 1 of 16 warps (warp 0 of a block), lane 13 exits 3")
    assert said(found).splitlines()[0].endswith(" ns after the rest of its warp, at scale.cu:17")
    found = both(shape, time + 340 * (thread // 32 % 4 == 1) * (thread % 32 >= 28))
    assert said(found).startswith("in 4 of 16 warps (warp 1 of a block), lanes 28 to 31 exit 3")
    found = both(shape, 340 * (thread // 32 == 2) * (thread % 32 != 5))
    assert said(found).startswith(
        "in 1 of 16 warps (warp 2 of a block), lane 5 exits 340 ns before the rest of its warp\n"
    )


def test_lanes_that_end_with_all_others_are_not_late() -> None:
    """At a bounds check, most lanes of one warp leave early. The others take as long as all other warps."""
    shape = Shape((4, 1, 1), (128, 1, 1))
    thread = np.arange(shape.threads)
    leaves = thread > 3 * 128 + 4
    found = both(shape, 900 * ~leaves)
    assert said(found).startswith(
        "in 1 of 16 warps (warp 0 of a block), lanes 5 to 31 exit 900 ns before the rest of their warp;"
    )
    # Blocks that end at different times: the last one's other warps take as long as these lanes.
    found = both(shape, 900 * (thread <= 3 * 128 + 100) + 500 * (thread // 128))
    assert said(found).startswith(
        "in 1 of 16 warps (warp 3 of a block), lanes 5 to 31 exit 900 ns before the rest of their warp;"
    )
    # The same lanes, in a block that ends later than the others.
    found = both(shape, 900 * (thread // 128 == 3) * (thread % 128 < 5))
    assert said(found).startswith(
        "in 1 of 16 warps (warp 0 of a block), lanes 0 to 4 exit 900 ns after the rest of their warp"
    )


def test_lanes_that_are_late_in_different_warps() -> None:
    shape = Shape((4, 1, 1), (128, 1, 1))
    thread = np.arange(shape.threads)
    found = both(shape, 340 * np.isin(thread, [3, 40]))
    assert said(found).startswith(
        "lanes 3 and 8 exit 340 ns after the rest of their warp, each in 1 of 16 warps\n"
    )
    # Each of the others is late, but never in the same warp: lane 5 is not early.
    found = both(shape, 340 * (thread % 32 == thread // 32 + 6))
    assert "before" not in said(found)


def test_a_few_lanes_that_are_late_each_in_its_own_time() -> None:
    late = np.zeros(32, int)
    late[[3, 7, 29]] = 3005, 6008, 1510
    found = both(Shape((1, 1, 1), (64, 1, 1)), np.tile(late + np.arange(32) % 8, 2))
    assert said(found).startswith("3 lanes (3, 7, 29) exit 1.51 us to 6.01 us after the rest of their warp")


def test_what_was_not_read_whole_is_no_zero() -> None:
    shape = Shape((2, 1, 1), (64, 1, 1))
    _, blocks, lateness = run_device(shape, [(7, np.zeros(128, int))])
    found = ExitReport.of(Exits(shape), 1, CycleLength(), LaneLateness.of_maps(lateness, blocks))
    assert found.exits == 128 and not exits.spreads(found)
    assert exits.caveats(found) == [
        "times from first to last count only launches that were read completely: 0 of 1"
    ]


def test_partial_warps_and_single_threads() -> None:
    """Blocks of 40: the second warp has 8 lanes. The last of them is late."""
    found = both(Shape((2, 1, 1), (8, 5, 1)), 90 * (np.arange(80) % 40 == 39))
    assert [lane.late.count for lane in found.lanes] == [4] * 8 + [2] * 24
    assert (found.lanes[7].late.mean, found.lanes[7].late.max, found.warp.count) == (45, 90, 4)
    single = both(Shape((5, 1, 1), (1, 1, 1)), 10 * np.arange(5))
    assert len(single.lanes) == 1 and single.warp.max == 0 and single.grid.max == 40
    assert said(single).startswith(
        "the blocks of a grid finish within 40 ns of each other; for the last 20 ns"
    )
    assert not exits.lane_rows(single, {}.get)
    assert [row for row, _ in exits.spreads(single)] == ["blocks of a grid", "tail of a grid"]
    together = both(Shape((5, 1, 1), (1, 1, 1)), 7)
    assert said(together) == "the blocks of a grid finish together"
    of_blocks = replace(together, selected=(5, 1), shape=Shape((5, 1, 1), (64, 1, 1)))
    assert said(of_blocks) == "the selected threads exit together"
    alone = both(Shape((1, 1, 1), (1, 1, 1)), 7)
    assert said(alone) == "one exit in each launch: there is no other one to compare it with"
    assert not exits.lane_rows(alone, {}.get) and not exits.spreads(alone)


def test_one_slow_warp() -> None:
    shape = Shape((8, 1, 1), (128, 1, 1))
    found = both(shape, 1000 * (np.arange(shape.threads) % 128 // 32 == 2))
    assert found.block == Distribution(8, 1000, 1000, 1000, 1000)
    assert "of each other; warp 2 is last in every block" in said(found)
    thread = np.arange(shape.threads)
    most = both(shape, 1000 * (thread % 128 // 32 == np.where(thread < 896, 2, 1)))
    assert "of each other; warp 2 is last in 87 % of the blocks" in said(most)
    assert "is last" not in said(both(shape, 1000 * (thread % 128 >= 32)))  # warps 1 to 3 together
    few = both(shape, 1000 * (thread % 128 // 32 == 2) * (thread < 512))
    assert said(few).startswith(
        "the lanes of a warp exit together\nin 4 of 8 blocks, the warps exit within 1.00 us of each other; warp 2 is last\n"
    )
    parted = both(shape, 1000 * (thread % 128 // 32 == 2) + 5000 * (thread % 32 == 31))
    assert "\nthe warps of a block begin to exit within 1.00 us of each other; warp 2" in said(parted)


def test_one_slow_block() -> None:
    found = both(Shape((3, 2, 1), (32, 1, 1)), 9000 * (np.arange(192) // 32 == 4))
    assert "block (1,1) finishes last and alone, 9.00 us after all other blocks" in said(found)
    found = both(Shape((2, 1, 1), (32, 1, 1)), 9000 * (np.arange(64) // 32))
    assert said(found).endswith("\nblock 1 finishes last and alone, 9.00 us after the other block")


def test_a_block_that_is_slow_in_some_launches() -> None:
    shape = Shape((4, 1, 1), (32, 1, 1))

    def launches(*slow: int | None) -> str:
        found = Exits(shape)
        for number, block in enumerate(slow):
            made = records(shape, 9000 * (np.arange(128) // 32 == block), launch=number)
            assert found.take_records(made, CycleLength())
        report = ExitReport.of(found, len(slow), CycleLength())
        return findings.findings(report, {}.get)[-1]

    alone = "finishes last and alone, 9.00 us after all other blocks"
    assert launches(3, 3, 3) == f"block 3 {alone}"
    assert launches(3, None, 3) == launches(3, 3, 1) == f"in 2 of 3 launches, block 3 {alone}"
    assert launches(None, 3, None) == f"in 1 of 3 launches, block 3 {alone}"
    assert launches(2, 3, 1).startswith("the blocks of a grid finish within 9.00 us of each other; for")
    assert launches(2, None, 1).startswith(
        "in 2 of 3 launches, the blocks finish within 9.00 us of each other"
    )


def test_the_tail_begins_when_blocks_are_fewer_than_multiprocessors() -> None:
    found = Exits(Shape((6, 1, 1), (32, 1, 1)))
    found.add_launch(np.arange(6), np.array([0, 10, 20, 30, 70, 90]), np.array([0, 1, 2, 0, 1, 2]))
    # From 30, when two of six blocks were left for three multiprocessors.
    assert (found.grid.total, found.tail.total, found.alone[5]) == (90, 60, 20)
    report = ExitReport.of(found, 1, CycleLength())
    assert exits.sm_rows(report) == [(0, 60), (1, 20), (2, 0)]
    tail = "for the last 60 ns, fewer than 3 blocks remain, so some of the 3 multiprocessors are idle"
    assert findings._blocks(report)[0].endswith(f"; {tail}")
    alone = Exits(Shape((1, 1, 1), (32, 1, 1)))
    alone.add_launch(np.array([0]), np.array([5]), np.array([3]))
    assert alone.grid.total == alone.tail.total == alone.alone[0] == 0


def test_incomplete_warps_and_launches_do_not_count() -> None:
    """The last of 128 threads never exits: its warp, block and launch do not count."""
    shape = Shape((2, 1, 1), (64, 1, 1))
    made = records(shape, 5 * (np.arange(128) == 100))
    found = Exits(shape)
    assert not found.take_records(made[made["thread"] != 127], CycleLength())
    assert found.lateness.exits.sum() == 96 and found.block.count == 1 and not found.complete
    assert said(ExitReport.of(Exits(shape), 1, CycleLength())) == "no thread has exited"


def test_chosen_threads_only() -> None:
    """--thread 0:9 --block 1: ten lanes of one warp."""
    shape = Shape((2, 1, 1), (64, 1, 1))
    blocks, threads = np.array([False, True]), np.arange(64) < 10
    found = Exits(shape)
    made = records(shape, 7 * (np.arange(128) == 67), chosen=np.outer(blocks, threads).ravel())
    assert found.take_records(made, CycleLength(), int(blocks.sum()), threads)
    report = ExitReport.of(found, 1, CycleLength())
    assert [lane.number for lane in report.lanes] == list(range(10))
    assert report.lanes[3].late == Distribution(1, 7, 7, 7, 7)


def test_only_whole_launches_are_taken_from_the_maps_and_each_once() -> None:
    shape = Shape((2, 1, 1), (64, 1, 1))
    late = 50 * (np.arange(128) == 100)
    launches = [(number, late * number) for number in (3, 4, 12)]  # 12 reuses the cells of 4
    warps, blocks, lateness = run_device(shape, launches)
    found = Exits(shape)
    found.take_maps(warps, blocks, CycleLength())
    assert found.seen == {(0, 3), (0, 12)} and found.warp.largest == 600
    found.take_maps(warps, blocks, CycleLength())
    assert found.complete == 2
    blocks["rounds"]["left"][0, 1, 3] -= np.uint64(1)  # a thread is still running
    another = Exits(shape)
    another.take_maps(warps, blocks, CycleLength())
    assert another.seen == {(0, 12)}
    assert LaneLateness.of_maps(lateness, blocks).sums[4] == 50 * (3 + 4 + 12)


def test_timers_may_wrap_between_blocks() -> None:
    """The map keeps 48 bits of the timer and 36 of a clock."""
    shape = Shape((2, 1, 1), (64, 1, 1))
    warps, blocks, _ = run_device(shape, [(3, 100 * (np.arange(128) // 64))])
    blocks["rounds"]["time_sm"][0, :, 3] = [((1 << 48) - 10) << 16, (90 << 16) | 1]
    found = Exits(shape)
    found.take_maps(warps, blocks, CycleLength())
    assert found.grid.total == 100


def test_garbage_in_the_maps_does_no_harm() -> None:
    """Data from the traced process is untrusted."""
    shape = Shape((3, 1, 1), (70, 1, 1))
    random = np.random.default_rng(4)
    for _ in range(20):
        raw = [random.integers(0, 256, size=kind.itemsize * count, dtype=np.uint8).tobytes()
               for kind, count in ((WARP, 72), (BLOCK, 3), (LATE, 32))]  # fmt: skip
        warps, blocks = (
            np.frombuffer(raw[0], WARP).reshape(8, 9),
            np.frombuffer(raw[1], BLOCK).reshape(1, 3).copy(),
        )
        blocks["rounds"]["left"] = (5 << CLOCK_BITS) + 70
        found = Exits(shape)
        found.take_maps(warps, blocks, CycleLength(0.5, 0.1))
        late = LaneLateness.of_maps(np.frombuffer(raw[2], LATE), blocks)
        said(ExitReport.of(found, 1, CycleLength(0.5, 0.1), late.since(LaneLateness.none(32))))
        junk = np.frombuffer(random.bytes(RECORD.itemsize * 50), RECORD).copy()
        junk["thread"] %= shape.threads
        found.take_records(junk, CycleLength())
        junk = np.resize(junk, shape.threads)
        junk["thread"] = np.arange(shape.threads)
        assert found.take_records(junk, CycleLength()) and not found.take_records(junk[:0], CycleLength())
        said(ExitReport.of(found, 1, CycleLength()))


def test_the_rate_of_the_clocks() -> None:
    """A clock of 1.98 GHz, and a timer with a resolution of 32 ns."""
    true = np.sort(np.random.default_rng(3).integers(0, 2_000_000, 200))
    cycles = np.rint(true * 1.98).astype(np.int64)
    clock = CycleLength.measured(np.zeros(200, np.int64), cycles, true // 32 * 32)
    assert clock is not None and abs(clock.ns * 1.98 - 1) <= clock.error < 1e-3
    assert CycleLength.measured(np.zeros(2, np.int64), cycles[:2], true[:2]) is None


def test_exits_that_met_a_later_launch_are_not_counted_as_on_time() -> None:
    """The lateness of lane 31 is known for one exit in eight; the other seven count as lost."""
    shape = Shape((2, 1, 1), (128, 1, 1))
    _, blocks, lateness = run_device(shape, [(7, 1000 * (np.arange(256) % 32 == 31))])
    lateness["sum"][31], lateness["lost"][31] = 1000, 7
    lateness["bins"][31] //= 8
    found = ExitReport.of(Exits(shape), 1, CycleLength(), LaneLateness.of_maps(lateness, blocks))
    assert (found.exits, found.lost, found.lanes[31].exits, found.lanes[30].exits) == (256, 7, 8, 8)
    assert found.lanes[31].late == Distribution(1, 1000.0, 1000.0, 1000.0, 1000.0)
    place = KernelShape(1, "app", 0, "kernel", shape.grid, shape.block_dim)
    record = lanes(place, found, lambda site: None)[31]
    assert (record["exits"], record["late_ns"]["p50"]) == (8, 1000)


def test_an_interval_is_the_difference() -> None:
    shape = Shape((1, 1, 1), (64, 1, 1))
    thread = np.arange(64)
    states = []
    for count in (1, 2, 3):
        launches = [(1, 500 * (thread == 5)), (2, 20 * (thread == 6)), (3, 20 * (thread == 6))][:count]
        _, blocks, lateness = run_device(shape, launches)
        states.append(LaneLateness.of_maps(lateness, blocks))
    for before, after in ((states[0], states[1]), (states[1], states[2])):
        report = ExitReport.of(Exits(shape), 1, CycleLength(), after.since(before))
        assert report.lanes[6].late.max == 20 and report.lanes[5].late.max == 0 and report.exits == 64


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


def test_clocks_that_a_process_made_up_are_no_harm() -> None:
    sm, times = np.repeat(np.arange(3), 100), np.tile(np.append(np.arange(99), (1 << 63) - 1), 3)
    measured = CycleLength.measured(sm, times, times)
    assert measured and measured.ns == 1

"""The text of kernelretsnoop over generated reports: it never fails, fits a terminal, and says something."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from gpubpf.exits import exits_text, lateness
from gpubpf.exits.findings import _blocks as block_findings
from gpubpf.exits.findings import _warps as warp_findings
from gpubpf.exits.findings import findings
from gpubpf.exits.lateness import CycleLength, ExitReport, Exits, LaneLateness
from gpubpf.record import replace
from gpubpf.records.kernel_shapes import KernelShape
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf.show.table import WIDTH
from gpubpf_properties import generated, noise, rare, rngs
from gpubpf_text import NO_TIME

KERNEL = KernelShape(4711, "app", 0, "_Z5scalePfi", (4, 1, 1), (256, 1, 1))
HUGE = lateness.LARGEST


def report(
    kernel: KernelShape, times: np.ndarray, launches: int = 1, clock: CycleLength | None = None
) -> ExitReport:
    """The report of lanes [exit, lane] that are late by `times` (cycles; below 0: the lane has no such exit)."""
    exits = Exits(kernel.shape)
    for lane in range(times.shape[1]):
        own = times[times[:, lane] >= 0, lane]
        exits.lateness.add(np.full(len(own), lane), own, np.full(len(own), 3))
    for row in times:
        some = row[row >= 0]
        if len(some):
            exits.warp.add(np.array([np.ptp(some)]))
    return ExitReport.of(exits, launches, clock or CycleLength())


def text(
    *reports: tuple[KernelShape, ExitReport], site: str | None = "scale.cu:17", verbose: bool = False
) -> list[str]:
    owners = OwnerColumns()
    return list(
        exits_text.lines(reports, lambda kernel, _: "scale", lambda _: lambda _: site, owners, verbose)
    )


def check(kernel: KernelShape, found: ExitReport, site: str | None = "scale.cu:17") -> None:
    for verbose in (False, True):
        lines = text((kernel, found), site=site, verbose=verbose)
        assert max(map(len, lines)) <= WIDTH, max(lines, key=len)
    said = findings(found, lambda _: site)
    assert (said or found.single_lane) and all(
        len(one) > 10 and " ()" not in one and "nan" not in one for one in said
    )
    assert not any(NO_TIME.search(one) for one in said), said


@pytest.mark.parametrize("late", [40, 120, 12_345, HUGE])
@pytest.mark.parametrize("lanes", [1, 2, 31, 32])
def test_lanes_that_are_equally_late(late: int, lanes: int) -> None:
    """On average: in each warp, another lane is the first."""
    times = np.full((lanes, lanes), late)
    np.fill_diagonal(times, 0)
    found = report(KERNEL, times, launches=lanes)
    check(KERNEL, found)
    said = " ".join(findings(found, lambda _: None))
    assert ("equally late" in said) is (lanes > 2)
    assert ("the latest lane varies from warp to warp" in said) is (lanes == 2)


def test_lanes_that_are_nearly_equally_late() -> None:
    """The branch `if (x[i] < 0) x[i] = 0;` over sin(i): each lane takes it as often as the others, but not at the same time."""
    lane = np.arange(64_000).reshape(-1, 32)
    times = np.where(np.sin(lane) < 0, 2, 0)
    check(KERNEL, report(KERNEL, times - times.min(axis=1, keepdims=True)))


def test_one_lane_differs_a_little() -> None:
    times = np.full((100, 32), 1000)
    times[:, 5] = 1049
    assert "equally late" in findings(report(KERNEL, times), lambda _: None)[0]
    times[:, 5] = 2000
    assert "lane 5" in findings(report(KERNEL, times), lambda _: None)[0]


@pytest.mark.parametrize(
    ("late", "said"), [(31, "exit together: at most 31 ns apart"), (32, "lane 5 exits 32 ns")]
)
def test_a_few_ns_are_no_finding(late: int, said: str) -> None:
    times = np.zeros((100, 32), int)
    times[:, 5] = late
    assert said in findings(report(KERNEL, times), lambda _: None)[0]
    exits = Exits(KERNEL.shape)
    exits.add_warps(np.tile([0, 0, 0, late], (4, 1)), np.zeros((4, 4), int), np.ones((4, 4), bool))
    found = ExitReport.of(exits, 1, CycleLength())
    assert bool(warp_findings(found)) is (late >= 32)


def test_blocks_are_compared_with_the_clock_error() -> None:
    exits = Exits(KERNEL.shape)
    exits.add_launch(np.arange(4), np.array([0, 0, 0, 900]), np.arange(4), error=1000.0)
    assert block_findings(ExitReport.of(exits, 1, CycleLength())) == []
    exits.error = 800.0
    (said,) = block_findings(ExitReport.of(exits, 1, CycleLength()))
    assert said == "block 3 finishes last and alone, 900 ns after all other blocks"


@pytest.mark.parametrize("clock", [0.5, 1.0])
@pytest.mark.parametrize("late", [[1, 0, 1], [0, 1, 1]], ids=["one warp", "two warps"])
def test_differences_that_are_shown_as_0_ns_are_no_findings(late: list[int], clock: float) -> None:
    times = np.array([[1, 0, 1], late])
    check(KERNEL, report(KERNEL, times, clock=CycleLength(clock)))


def test_a_tail_that_few_launches_have_is_not_0_ns() -> None:
    kernel = KernelShape(1, "app", 0, "k", (3, 1, 1), (32, 1, 1))
    exits = Exits(kernel.shape)
    exits.lateness.add(np.arange(32), np.zeros(32, np.int64), np.zeros(32, np.int64))
    for launch in range(10):
        exits.add_launch(np.arange(3), np.array([0, int(launch > 0), 1]), np.array([0, 1, 1]))
    check(kernel, ExitReport.of(exits, 10, CycleLength()))


@generated(80, rng=rngs, source=noise)
def test_generated_reports(rng: random.Random, source: np.random.Generator) -> None:
    block = rng.choice((1, 7, 32, 33, 256, 1024))
    blocks = rng.choice((1, 2, 1000))
    kernel = KernelShape(
        rng.choice((1, 4194304)), "x" * rng.randrange(1, 16), 7, "_Z1kv", (blocks, 1, 1), (block, 1, 1)
    )
    lanes = min(block, 32)
    scale = rng.choice((1, 10, 10**4, 10**9, HUGE))
    times = source.integers(0, scale, (rng.choice((1, 3, 50)), lanes), endpoint=True)
    how = rng.randrange(6)
    if how == 0:
        times[:] = scale
    elif how == 1:
        times[:] = 0
    elif how == 2:
        times[:, rng.randrange(lanes)] = scale
    elif how == 3:
        times[source.random(times.shape) < 0.7] = -1  # exits that are missing
    elif how == 4:
        times[:] = scale + source.integers(0, 2, times.shape)
    clock = CycleLength(rng.choice((0.5, 1.0, 40.0)), rng.choice((0.0, 0.1)))
    found = report(kernel, np.minimum(times, HUGE), rng.randrange(1, 5), clock)
    site = rng.choice((None, "a.cu:1", "a_file_with_a_long_name_in_a_deep_directory.cuh:12345"))
    check(kernel, found, site)


def test_seconds_of_many_ranges_of_lanes_in_one_of_several_processes() -> None:
    """The ranges of lanes are shortened before a column is left out."""
    kernel = replace(KERNEL, pid=4194304, comm="c" * 15)
    times = np.full((3, 32), 10**9)
    times[:, [11, 14, 20, 21, 25]] = 0, 1, *[5 * 10**9] * 3
    owners = OwnerColumns(True).see([kernel, replace(kernel, gpu=7)])
    found = report(kernel, times)
    lines = list(
        exits_text.lines([(kernel, found)], lambda *_: "k", lambda _: lambda _: "a.cu:1", owners, False)
    )
    assert max(map(len, lines)) <= WIDTH, max(lines, key=len)
    (row,) = (line for line in lines if " 0-10,... " in line)
    assert row.endswith("1,000,000,000.0  1,000,000,000  a.cu:1")


def times_of_causes(rng: random.Random, source: np.random.Generator) -> np.ndarray:
    """Return times [warp, lane] of a few causes: noise, a late lane, a lane that is late once, loops of different lengths."""
    warps, lanes = rng.choice((1, 2, 4, 16, 100)), rng.choice((2, 4, 8, 32))
    lane, times = np.arange(lanes), np.zeros((warps, lanes), np.int64)
    for _ in range(rng.randint(1, 3)):
        cause, most = rng.randrange(6), rng.choice((1, 5, 50, 1000, 20_000))
        if cause == 0:
            times[:, rng.randrange(lanes)] += most
        elif cause == 1:
            times[rng.randrange(warps), rng.randrange(lanes)] += most
        elif cause == 2:
            times += most * (lane >= lanes // 2)
        elif cause == 3:
            times += lane * source.integers(0, most + 1, (warps, 1))
        elif cause == 4:
            times += source.integers(0, most + 1, times.shape)
        else:
            times += most * (source.random(times.shape) < 0.1)
    return times - times.min(axis=1, keepdims=True)


@generated(200, rng=rngs, source=noise)
def test_findings_are_true(rng: random.Random, source: np.random.Generator) -> None:
    late = times_of_causes(rng, source)
    said = " ".join(findings(report(KERNEL, late), lambda _: None))
    apart = late.max(axis=1)
    latest = (late == apart[:, None])[apart > 0]
    if "the latest lane varies" in said:
        assert not latest.all(axis=0).any()
    if found := re.search(r"; lane (\d+) is the latest,", said):
        assert late[:, int(found[1])].mean() >= 0.95 * apart.mean()
    if found := re.match(r"(?:in (\d+) of \d+ warps, )?lane (\d+) exits", said):
        lane, rest = late[:, int(found[2])], np.delete(late, int(found[2]), axis=1)
        differ = (lane > rest.mean(axis=1)) if " after the rest" in said else (lane < rest.mean(axis=1))
        assert differ.sum() >= (int(found[1]) if found[1] else 0.75 * len(late))


@generated(40, rng=rngs, source=noise)
def test_generated_blocks_and_launches(rng: random.Random, source: np.random.Generator) -> None:
    warps, blocks = rng.choice((1, 2, 32)), rng.choice((1, 2, 50))
    kernel = KernelShape(1, "app", 0, "k", (blocks, 1, 1), (32 * warps, 1, 1))
    exits = Exits(kernel.shape)
    scale = rng.choice((0, 1, 10**5, 10**11))
    for _ in range(rng.randrange(4)):
        first = source.integers(0, scale, (blocks, warps), endpoint=True)
        late = source.integers(0, min(scale, HUGE), (blocks, warps), endpoint=True)
        exits.add_warps(first, late, np.ones((blocks, warps), bool))
        if not rare(rng):
            sms = source.integers(0, rng.choice((1, 132)), blocks, endpoint=True)
            exits.add_launch(np.arange(blocks), (first + late).max(axis=1), sms, rng.choice((0.0, 32.0)))
    exits.lateness.add(np.arange(32), np.arange(32) * scale % HUGE, np.zeros(32, np.int64))
    check(kernel, ExitReport.of(exits, 3, CycleLength()))


def test_a_single_thread_has_no_table() -> None:
    kernel = KernelShape(1, "app", 0, "k", (1, 1, 1), (1, 1, 1))
    found = Exits(kernel.shape)
    found.add_warps(np.zeros((1, 1), int), np.zeros((1, 1), int), np.ones((1, 1), bool))
    found.add_launch(np.array([0]), np.array([7]), np.array([0]))
    found.lateness.add(np.array([0]), np.array([0]), np.array([0]))
    assert text((kernel, ExitReport.of(found, 1, CycleLength()))) == [
        "scale: when its threads exit",
        "  grid 1 x 1 x 1, block 1 x 1 x 1; app (pid 1)",
        "  1 launch, 1 exit",
        "  one exit in each launch: there is no other one to compare it with",
        "",
    ]


def test_selected_threads() -> None:
    """What is known only of some lanes and blocks is not said of all."""
    kernel = KernelShape(1, "app", 0, "k", (8, 1, 1), (64, 1, 1))
    found = Exits(kernel.shape)
    found.add_warps(np.zeros((2, 2), int), np.full((2, 2), 900), np.ones((2, 2), bool))
    found.add_launch(np.array([3, 4]), np.array([900, 1700]), np.array([0, 1]))
    lane = np.repeat(np.arange(16, 32), 2)
    found.lateness.add(lane, 10 * lane, np.zeros(32, int))
    report = ExitReport.of(found, 1, CycleLength(), selected=(2, 16))
    lines = text((kernel, report))
    assert lines[2:6] == [
        "  1 launch, 32 exits of selected threads",
        "  the selected lanes of a warp exit at different times, up to 310 ns after the",
        "    first exit of the warp",
        "  block 4 finishes last and alone, 800 ns after the other selected block",
    ]
    found.lateness = LaneLateness.none(32)
    found.lateness.add(np.array([31]), np.array([900]), np.array([0]))
    report = ExitReport.of(found, 1, CycleLength(), selected=(8, 1))
    assert text((kernel, report))[3] == "  lane 31 exits 900 ns after the first exit of its warp"


def test_warps_that_were_not_read_whole() -> None:
    """With sampled warps, how far the lanes of a warp are apart is not known: it is not 0 ns."""
    times = np.random.default_rng(1).integers(0, 1000, (40, 32))
    found = report(KERNEL, times - times.min(axis=1, keepdims=True))
    assert "varies" in findings(found, lambda _: None)[0]
    unknown = replace(found, warp=lateness.BinnedValues().distribution())
    assert findings(unknown, lambda _: None)[0].startswith(
        "the lanes of a warp exit at different times, up to 9"
    )


def test_nothing_was_read() -> None:
    empty = LaneLateness.none(32)
    found = ExitReport.of(Exits(KERNEL.shape), 0, CycleLength(), empty)
    check(KERNEL, found)
    assert findings(found, lambda _: None) == ["no thread has exited"]


def test_several_processes() -> None:
    others = [
        KernelShape(pid, "a_long_command", pid % 3, "_Z5scalePfi", (4, 1, 1), (256, 1, 1)) for pid in range(9)
    ]
    reports = [(kernel, report(kernel, np.full((3, 32), 10**9))) for kernel in others]
    assert max(map(len, text(*reports, verbose=True))) <= WIDTH

"""The sentences of kernelretsnoop's reports: which lanes, warps and blocks keep the others waiting.

A mean hides lanes that are late in few warps, and lanes that take turns in being late. So the sentences also use the distribution of
each lane's times, and compare the lanes' means with the mean time from a warp's first exit to its last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from gpubpf.exits.lateness import Distribution, ExitReport, LaneReport
from gpubpf.show import table
from gpubpf.show.table import duration

GAP = 0.25  # share of the largest lateness: late lanes differ from the others by at least this
NOTABLE = 0.05  # share of the largest; smaller differences are not reported
REGULAR = 0.75  # share of the blocks in which a warp must be last to be named; see also `_lanes`
ALWAYS = 0.9  # a lane is always the latest if its mean lateness is this share of the warp's mean spread
UNSEEN = 0.5  # ns; times up to this are shown as 0 ns
LEAST = 32  # ns; shorter times are not a finding: the GPU's timer has steps of at least 32 ns, and a launch takes microseconds


def findings(report: ExitReport, source: Callable[[int], str | None]) -> list[str]:
    """Return sentences about what keeps the others waiting: lanes, warps, blocks.

    `source` names a site (``scale.cu:17``; None: unknown).
    """
    if not report.exits:
        return ["no thread has exited"]
    said = [*_lanes(report, source), *_warps(report), *_blocks(report)]
    if not said and report.exits <= report.launches:
        return ["one exit in each launch: there is no other one to compare it with"]
    if not said and report.blocks > 1 and report.grid.count:  # blocks of a single thread
        if report.selected_threads:
            return ["the selected threads exit together"]
        return [f"the {report.selected_blocks}blocks of a grid finish together"]
    return said


def _lanes(report: ExitReport, source: Callable[[int], str | None]) -> list[str]:
    """Return sentences: which lanes exit later than the rest of their warp or, if none stands out, how far apart the lanes exit."""
    lanes = [lane for lane in report.lanes if lane.late.count]
    if not lanes or report.single_lane:
        return []
    word, means = report.shape.warp_word, [lane.late.mean for lane in lanes]
    who, least, most = f"the {report.selected_threads}lanes of a {word}", min(means), max(means)
    latest = max(lane.late.max for lane in lanes)
    if latest <= UNSEEN:
        return [f"{who} exit together"]
    if latest < LEAST:
        return [f"{who} exit together: at most {duration(latest)} apart"]
    # The spreads of some warps, or of all lanes, do not describe these exits.
    covered = not report.selected_threads and 10 * report.warp.count >= 9 * max(
        lane.late.count for lane in lanes
    )
    apart = report.warp if covered else None
    if max(most, apart.mean if apart else 0.0) < 1:
        return [f"{who} exit less than 1 ns apart (mean; at most {duration(latest)})"]
    # The mean lateness of a lane that is the latest of every warp is the mean time from first to last exits.
    regular = apart is not None and most >= ALWAYS * apart.mean
    late, early = _parted(lanes)
    if late and (said := _late_lanes(report, late, early, apart, regular, source)):
        return [said]
    if max(most, apart.above()[1] if apart else 0.0) < LEAST:
        return [f"{who} exit less than {LEAST} ns apart (mean; at most {duration(latest)})"]
    uneven = _uneven(most, latest)
    if most - least <= NOTABLE * most and (regular or apart is None):
        if len(lanes) == 1:
            return [
                f"lane {lanes[0].number} exits {duration(most)} after the first exit of its {word}{uneven}"
            ]
        return [f"{who} exit equally late: {duration(most)} after the first exit of the {word}{uneven}"]
    if regular or (apart is None and least <= most / 2):
        last, several = _named(lane for lane in lanes if duration(lane.late.mean) == duration(most))
        last += f" {'are' if several else 'is'} the latest"
        if apart is None or duration(most) != duration(apart.mean):
            last += " on average"
        return [f"{who} exit at different times; {last}, {duration(most)} after the first exit{uneven}"]
    if apart is None:
        return [f"{who} exit at different times, up to {duration(latest)} after the first exit of the {word}"]
    # If its mean lateness is clearly below that time, other lanes are the latest of some warps.
    times, mean = apart.above()
    who = f"{_share(times, apart.count, word)}the lanes" if times < apart.count else who
    said = f"{who} exit {duration(mean)} apart{_uneven(mean, latest)}"
    return [said if most >= REGULAR * apart.mean else f"{said}; the latest lane varies from {word} to {word}"]


def _parted(lanes: list[LaneReport]) -> tuple[list[LaneReport], list[LaneReport]]:
    """Return the lanes that are late, and the lanes that are not. Without a clear border between them, no lane counts as late."""
    means = [lane.late.mean for lane in lanes]
    least, most = min(means), max(means)
    late = [lane for lane in lanes if lane.late.mean > (most + least) / 2]
    early = [lane for lane in lanes if lane not in late]
    if late and min(lane.late.mean for lane in late) - max(lane.late.mean for lane in early) >= GAP * most:
        return late, early
    together = [lane for lane in lanes if lane.late.mean - least <= NOTABLE * most]
    if 2 * len(together) >= len(lanes):  # most are early, and the others are late by different times
        return [lane for lane in lanes if lane not in together], together
    return [], lanes


def _late_lanes(
    report: ExitReport,
    late: list[LaneReport],
    early: list[LaneReport],
    apart: Distribution | None,
    regular: bool,
    source: Callable[[int], str | None],
) -> str | None:
    """Return ``in 1 of 16 warps, lane 13 exits 340 ns after the rest of its warp``.

    Return nothing if other lanes are often as late, or if the difference is below LEAST.

    apart: the times from the first exit of a warp to its last; None: unknown.
    regular: one lane is always the latest.
    """
    word = report.shape.warp_word
    before = float(np.mean([lane.late.mean for lane in early]))
    half = (before + min(lane.late.mean for lane in late)) / 2
    limit = min(half, max(lane.late.max for lane in early))
    found = [lane.late.above(limit) for lane in late]
    if not all(count for count, _ in found):  # the limit is in the bin of all times
        found = [(lane.late.count, lane.late.mean) for lane in late]
    counts, means = [count for count, _ in found], [mean for _, mean in found]
    if not regular and max(lane.late.p99 for lane in early) >= min(means):
        return None
    everywhere = counts == [lane.late.count for lane in late]
    # If first and last exits are not apart in any other warp, all these lanes are late in the same warps.
    same = len(late) == 1 or everywhere or (apart is not None and {*counts} == {apart.above(limit)[0]})
    usual = not everywhere and _end_with_others(report, max(counts) if same else None, min(means) - before)
    few, when = (early, "before") if usual or (same and len(early) < len(late)) else (late, "after")
    who, several = _named(few)
    exits, rest = ("exit", "their") if several else ("exits", "its")
    low, high = duration(min(means) - before), duration(max(means) - before)
    if max(means) - before < LEAST:
        return None
    time = low if low == high else f"up to {high}" if low == duration(0) else f"{low} to {high}"
    uneven = _uneven(max(means), max(lane.late.max for lane in late), f" after the first exit of the {word}")
    ways = {source(lane.site) for lane in late if lane.site is not None} - {None}
    at = f", at {ways.pop()}" if len(ways) == 1 and when == "after" else ""
    said = f"{who} {exits} {time} {when} the rest of {rest} {word}{uneven}{at}"
    warps = max(lane.late.count for lane in (*early, *late))  # not every warp may have all lanes
    if usual:
        share = f"in {_range(counts)} of {table.count(warps, word)}{_which(report)}"
        return f"{share}, {said}; the rest exits with other {word}s"
    if everywhere or same:
        return said if everywhere else _share(counts[0], warps, word, _which(report)) + said
    return f"{said}, each in {_range(counts)} of {table.count(warps, word)}"


def _end_with_others(report: ExitReport, times: int | None, late: float) -> bool:
    """Return whether late lanes end at the same time as other warps, or as blocks without late lanes.

    Then the rest of their warp left early, as at a bounds check.

    times: number of warps in which lanes are late; None: unknown.
    late: how late the lanes are, in ns."""
    if 2 * report.left_early > report.parted.total():
        return True
    return (
        times is not None
        and times < report.block.count
        and report.grid.count > 0
        and report.grid.max < late / 2
    )


def _which(report: ExitReport) -> str:
    """Return which warp of a block has lanes that exit apart; "" if it is not always the same warp."""
    (warp, times), *_ = [*report.parted.most_common(1), (0, 0)]
    always = 0 < times >= ALWAYS * report.parted.total() and report.shape.warps > 1
    return f" ({report.shape.warp_word} {warp} of a block)" if always else ""


def _warps(report: ExitReport) -> list[str]:
    """Return sentences: how far apart the first exits of a block's warps are, and which warp is last."""
    if report.block.mean <= UNSEEN:
        return []
    word, count = report.shape.warp_word, report.block.count
    times, mean = report.block.above()
    if mean < LEAST:
        return []
    exits = "begin to exit" if report.warp.mean > UNSEEN else "exit"
    among = "" if times < count else " of a block"
    said = (
        f"{_share(times, count, 'block')}the {word}s{among} {exits} within {_each_other(mean, report.block)}"
    )
    (warp, last), *_ = [*report.last_warp.most_common(1), (0, 0)]
    if last < REGULAR * times:
        return [said]
    often = ""
    if last < times:
        often = f" in {last:,} of them" if times < count else f" in {100 * last // count} % of the blocks"
    elif times == count > 1:
        often = " in every block"
    return [f"{said}; {word} {warp} is last{often}"]


def _blocks(report: ExitReport) -> list[str]:
    """Return sentences: which block ends a launch alone or, if none does regularly, how far apart the ends of blocks are."""
    if report.grid.mean <= UNSEEN:
        return []
    blocks, count = f"{report.selected_blocks}block", report.grid.count
    times, mean = report.grid.above()
    if mean < max(LEAST, report.clock_error):
        return []
    (block, last), *_ = [*report.last_block.most_common(1), (0, 0)]
    if 2 * last > times and (alone := report.alone[block] / last) > mean / 2:
        others = f"the other {blocks}" if report.blocks == 2 else f"all other {blocks}s"
        index, after = report.shape.block_index(block), duration(alone)
        return [
            f"{_share(last, count, 'launch')}block {index} finishes last and alone, {after} after {others}"
        ]
    among = "" if times < count else " of a grid"
    said = (
        f"{_share(times, count, 'launch')}the {blocks}s{among} finish within {_each_other(mean, report.grid)}"
    )
    tail, sms = report.tail.mean * count / times, len(report.sm)
    if report.tail.mean > NOTABLE * report.grid.mean and tail > UNSEEN and report.blocks > sms:
        said += f"; for the last {duration(tail)}, fewer than {sms} blocks remain,"
        said += f" so some of the {sms} {report.shape.sm_word}s are idle"
    return [said]


def _each_other(mean: float, spread: Distribution) -> str:
    return f"{duration(mean)} of each other{' (mean)' if duration(mean) != duration(spread.max) else ''}"


def _uneven(mean: float, worst: float, after: str = "") -> str:
    """Return a remark on a mean if the largest time is clearly above it."""
    return f" (mean; at most {duration(worst)}{after})" if worst > 1.1 * mean else ""


def _share(times: int, of: int, noun: str, which: str = "") -> str:
    """Return ``in 1 of 16 warps, `` for the beginning of a sentence; "" if the sentence is about all."""
    return "" if times >= of else f"in {times:,} of {table.count(of, noun)}{which}, "


def _range(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _named(lanes: Iterable[LaneReport]) -> tuple[str, bool]:
    """Return the name of lanes, and whether it is a plural."""
    who = named("lane", [lane.number for lane in lanes])
    return who, not who.startswith(("lane ", "every "))


def named(what: str, numbers: Sequence[int]) -> str:
    """Return ``lane 31``, ``lanes 3 and 7``, ``lanes 16 to 31``, ``every 4th lane (3 to 31)``, ``12 lanes (0, 3, 4, 9 ...)``."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    if len(numbers) == 2:
        return f"{what}s {numbers[0]} and {numbers[1]}"
    steps = set(np.diff(numbers).tolist())
    if steps == {1}:
        return f"{what}s {numbers[0]} to {numbers[-1]}"
    if len(steps) == 1:
        return f"every {table.ordinal(steps.pop())} {what} ({numbers[0]} to {numbers[-1]})"
    more = " ..." if len(numbers) > 4 else ""
    return f"{len(numbers)} {what}s ({', '.join(map(str, numbers[:4]))}{more})"

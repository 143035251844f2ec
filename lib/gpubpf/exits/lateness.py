"""When threads leave a kernel: lanes of a warp, warps of a block, blocks of a grid, and who keeps the others waiting.

What kernelretsnoop's device programs add up (`take_maps`) or write down one by one (`take_records`) → `Exits` of a kernel and
launch shape → `Report` → sentences and tables. A lane's lateness is its exit after the first exit in its warp. The spread of a
warp is from its first to its last exit; of a block from the first exit of its first warp to the first exit of its last; of a grid
from the end of its first block to the end of its last. The tail is the end of a launch, in which fewer blocks are left than
multiprocessors took part.

Times are counted into histograms whose bins are 1 wide below 64 and then 32 for each power of two, so the middle of a bin is
within 1.6 % of what was counted. Threads, warps and blocks are numbered as in `imbalance`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpubpf.session.launch_shape import WARP, Shape
from gpubpf.show.table import duration

BINS = 1024
LARGEST = 2**36 - 1  # counted as this, what is larger
NOWHERE = 0xFFFF  # a site's number that does not fit
GAP = 0.25  # of the largest lateness: a smaller one does not part lanes that are late from those that are not
NOTABLE = 0.05  # of the largest: what is less is not worth a sentence
ROUNDS = 8  # launches of one kernel and shape that the maps tell apart
CLOCK_BITS = 36
CLOCK_MASK = (1 << CLOCK_BITS) - 1


def bins_of(values: np.ndarray) -> np.ndarray:
    """The bin of each value (integers from 0), as the device program computes it."""
    values = np.minimum(values, LARGEST).astype(np.int64)
    # Up to 2**36 a float64 is exact, and its exponent is the position of the highest bit.
    shift = np.maximum(np.frexp(values.astype(np.float64))[1] - 6, 0)
    return shift * 32 + (values >> shift)


def middles() -> np.ndarray:
    """The middle of each bin."""
    number = np.arange(BINS)
    shift = np.maximum(number // 32 - 1, 0)
    return (number - shift * 32) * 2.0**shift + (2.0**shift - 1) / 2


@dataclass(frozen=True)
class Spread:
    """A distribution, in ns."""

    count: int
    mean: float
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Spread:
        """Of values one by one."""
        if not len(values):
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        ordered = np.sort(np.asarray(values, np.float64))
        p50, p99 = (float(ordered[_rank(len(ordered), share) - 1]) for share in (0.50, 0.99))
        return cls(len(ordered), float(ordered.mean()), p50, p99, float(ordered[-1]))

    @classmethod
    def of_bins(
        cls, count: int, total: float, bins: np.ndarray, largest: float, scale: float = 1.0
    ) -> Spread:
        """Of `count` values whose sum is `total`: those that are not 0 are in `bins`. `scale`: ns of a unit."""
        late = int(bins.sum())
        count = max(count, late)
        if not late:
            return cls(count, 0.0, 0.0, 0.0, 0.0)
        below = np.cumsum(bins) + (count - late)
        found = []
        for share in (0.50, 0.99):
            rank = _rank(count, share)
            if rank <= count - late:
                found.append(0.0)
                continue
            at = int(np.searchsorted(below, rank))
            middle = total / late if int(bins[at]) == late else float(_MIDDLES[at])
            found.append(min(middle, largest) * scale)
        return cls(count, total * scale / count, found[0], found[1], largest * scale)

    def record(self) -> dict[str, float]:
        """As JSON has it: ns, whole ones but for the mean."""
        return {"mean": round(self.mean, 1)} | {
            name: round(getattr(self, name)) for name in ("p50", "p99", "max")
        }


_MIDDLES = middles()


def _rank(count: int, share: float) -> int:
    return max(1, -int(-count * share // 1))


@dataclass
class Tally:
    """Values that were counted: integers in a clock's unit, 0 and more. `where` tells of the largest where that was."""

    count: int = 0
    total: int = 0
    largest: int = 0
    where: int = 0
    bins: np.ndarray = field(default_factory=lambda: np.zeros(BINS, np.int64))

    def add(self, values: np.ndarray, where: np.ndarray | None = None) -> None:
        """More values."""
        if not len(values):
            return
        self.count += len(values)
        self.total += int(values.sum())
        above = values[values > 0]
        self.bins += np.bincount(bins_of(above), minlength=BINS)
        place = int(values.argmax())
        if values[place] > self.largest:
            self.largest, self.where = int(values[place]), 0 if where is None else int(where[place])

    def spread(self, scale: float = 1.0) -> Spread:
        """`scale`: ns of a unit."""
        return Spread.of_bins(self.count, float(self.total), self.bins, float(self.largest), scale)


@dataclass(frozen=True)
class Lateness:
    """By lane, since the program began: uint64 `sums`, `worst` (cycles << 24 | site), int64 `bins` [32, BINS] of those that
    were late, `exits`; lost: those of the exits whose lateness is not known."""

    sums: np.ndarray
    worst: np.ndarray
    bins: np.ndarray
    exits: np.ndarray
    lost: np.ndarray

    @classmethod
    def nothing(cls) -> Lateness:
        lanes, none = np.zeros(WARP, np.uint64), np.zeros(WARP, np.int64)
        return cls(lanes, lanes.copy(), np.zeros((WARP, BINS), np.int64), none, none.copy())

    @classmethod
    def of_maps(cls, lateness: np.ndarray, blocks: np.ndarray) -> Lateness:
        """From the maps `lateness` [lane] and `blocks` [1, block] of the device program."""
        late, blocks = lateness.reshape(-1), blocks.reshape(-1)
        bins = late["bins"].astype(np.int64)
        exits = blocks["exits"].astype(np.int64).sum(axis=0)
        return cls(late["sum"].copy(), late["worst"].copy(), bins, exits, late["lost"].astype(np.int64))

    def plus(self, other: Lateness) -> Lateness:
        return Lateness(
            self.sums + other.sums,
            np.maximum(self.worst, other.worst),
            self.bins + other.bins,
            self.exits + other.exits,
            self.lost + other.lost,
        )

    def since(self, before: Lateness) -> Lateness:
        """What was added after `before`. Where the largest of all came before, that of the highest bin stands for it."""
        bins = (self.bins - before.bins) & 0xFFFFFFFF  # the device counts in 32 bits
        highest = BINS - 1 - np.argmax(bins[:, ::-1] > 0, axis=1)
        largest = np.where(bins.any(axis=1), _MIDDLES[highest], 0).astype(np.uint64) << np.uint64(24)
        where = self.worst & np.uint64(0xFFFFFF)
        same = np.minimum(largest | where, self.worst)
        worst = np.where(self.worst == before.worst, same, self.worst)
        exits, lost = self.exits - before.exits, self.lost - before.lost
        return Lateness(self.sums - before.sums, worst, bins, exits, lost)

    def add(self, lane: np.ndarray, late: np.ndarray, site: np.ndarray) -> None:
        """Exits one by one."""
        self.exits[:] += np.bincount(lane, minlength=WARP)
        some = late > 0
        lane, late, site = lane[some], late[some], np.minimum(site[some], NOWHERE)
        np.add.at(self.sums, lane, late.astype(np.uint64))
        np.add.at(self.bins, (lane, bins_of(late)), 1)
        worst = np.minimum(late, LARGEST).astype(np.uint64) << np.uint64(24) | site.astype(np.uint64)
        np.maximum.at(self.worst, lane, worst)


@dataclass(frozen=True)
class Clock:
    """How long a cycle of the multiprocessors takes: ns, and the error of that, relative."""

    ns: float = 1.0
    error: float = 0.0

    @classmethod
    def measured(cls, sm: np.ndarray, cycles: np.ndarray, time: np.ndarray) -> Clock | None:
        """From readings of a multiprocessor's clock and the GPU's timer (ns) next to each other: how both advance between
        the first and the last reading of each multiprocessor. None: too close together to tell."""
        from gpubpf.session.clock import CYCLE, estimated_tick

        tick = max(estimated_tick(time), 1)
        rates, weights = [], []
        order = np.argsort(sm, kind="stable")
        borders = np.flatnonzero(np.diff(sm[order])) + 1
        for mine in np.split(order, borders) if len(order) else ():
            ran, took = int(np.ptp(cycles[mine])), int(np.ptp(time[mine]))
            if ran > 0 and took >= 50 * tick and CYCLE[0] <= took / ran <= CYCLE[1]:
                rates.append(took / ran)
                weights.append(float(took))
        if not rates:
            return None
        by_rate = np.argsort(rates)
        half = np.searchsorted(np.cumsum(np.array(weights)[by_rate]), sum(weights) / 2)
        middle = float(np.array(rates)[by_rate][half])
        # Multiprocessors read at different times: where their rates differ, the frequency changes.
        apart = float(np.average(np.abs(np.array(rates) / middle - 1), weights=weights))
        return cls(middle, max(2 * tick / max(weights), apart))


@dataclass
class Exits:
    """What is known of the exits of one kernel and launch shape.

    warp, block: spreads in cycles; grid, tail: of each launch that was `whole`, ns. last_warp: how often a warp was the last of
    its block, last_block: a block of its grid; alone: how long that ran by itself, ns, summed by block. sm: by multiprocessor
    the sum of its last exits before the launch's end (ns), and of how many launches. error: ns, of grid and tail.
    """

    shape: Shape
    lateness: Lateness = field(default_factory=Lateness.nothing)
    warp: Tally = field(default_factory=Tally)
    block: Tally = field(default_factory=Tally)
    grid: Tally = field(default_factory=Tally)
    tail: Tally = field(default_factory=Tally)
    whole: int = 0
    last_warp: Counter[int] = field(default_factory=Counter)
    last_block: Counter[int] = field(default_factory=Counter)
    alone: Counter[int] = field(default_factory=Counter)
    sm: dict[int, tuple[float, int]] = field(default_factory=dict)
    error: float = 0.0
    seen: set[int] = field(default_factory=set)  # launches that the maps were read of

    def add_warps(self, first: np.ndarray, late: np.ndarray, there: np.ndarray) -> None:
        """Of whole blocks [block, warp]: first exits (cycles), the last one after that; `there`: the warps that have threads."""
        self.warp.add(late[there])
        latest = np.where(there, first, np.iinfo(np.int64).min)
        earliest = np.where(there, first, np.iinfo(np.int64).max).min(axis=1)
        who = latest.argmax(axis=1)
        spread = latest.max(axis=1) - earliest
        self.block.add(spread, who)
        self.last_warp.update(who[spread > 0].tolist())

    def add_launch(self, block: np.ndarray, end: np.ndarray, sm: np.ndarray, error: float = 0.0) -> None:
        """Of a whole launch: each block's number, last exit (ns), multiprocessor; at least one block."""
        order = np.argsort(end, kind="stable")
        ends = (end[order] - end[order[0]]).astype(np.int64)
        numbers, index = np.unique(sm[order], return_inverse=True)
        # Before the block of `begin` was done there were as many blocks left as multiprocessors.
        begin = ends[len(ends) - len(numbers)]
        self.grid.add(ends[-1:])
        self.tail.add(ends[-1:] - begin)
        last = int(block[order[-1]])
        self.last_block[last] += 1
        self.alone[last] += int(ends[-1] - ends[-2]) if len(ends) > 1 else 0
        of_sm = np.zeros(len(numbers), np.int64)
        np.maximum.at(of_sm, index, ends)
        for number, idle in zip(numbers.tolist(), (ends[-1] - of_sm).tolist(), strict=True):
            total, times = self.sm.get(number, (0.0, 0))
            self.sm[number] = total + idle, times + 1
        self.error = max(self.error, error)
        self.whole += 1

    def take_maps(
        self,
        warps: np.ndarray,
        blocks: np.ndarray,
        clock: Clock,
        chosen: np.ndarray | None = None,
        error: float = 0.0,
    ) -> None:
        """The launches that the maps `warps` [ROUNDS, warp] and `blocks` [1, block] hold whole and that were not taken before. Of the
        threads all count, chosen or not; `chosen`, a mask, says of which blocks."""
        shape = self.shape
        rounds = blocks.reshape(-1)["rounds"]  # [block, round]
        cells = warps.reshape(ROUNDS, shape.blocks, shape.warps)
        for number in range(ROUNDS):
            left = rounds["left"][:, number]
            launch = int(left[0]) >> CLOCK_BITS
            if not launch or launch in self.seen:
                continue
            first, late = cells["first"][number], cells["late"][number]
            # Complete: every thread of every block has left, and the launch has had all cells to itself.
            if bool((left != (launch << CLOCK_BITS) + shape.block_size).any()):
                continue
            if bool((first >> np.uint64(CLOCK_BITS) != launch).any()):
                continue
            self.seen.add(launch)
            late = np.where(late >> np.uint64(CLOCK_BITS) == launch, late & np.uint64(CLOCK_MASK), 0)
            anchor = rounds["clock"][:, number].astype(np.int64)
            time_sm = rounds["time_sm"][:, number]
            sm = (time_sm & np.uint64(0xFFFF)).astype(np.int64)
            time = _unwrapped((time_sm >> np.uint64(16)).astype(np.int64), 48)
            # 36 bits of a clock, taken near the anchor.
            cycles = (~first & np.uint64(CLOCK_MASK)).astype(np.int64) - (anchor & CLOCK_MASK)[:, None]
            cycles = _wrapped(cycles, CLOCK_BITS)
            late = late.astype(np.int64)
            some = np.arange(shape.blocks) if chosen is None else np.flatnonzero(chosen)
            self.add_warps(cycles[some], late[some], np.ones((len(some), shape.warps), bool))
            end = time + np.rint((cycles + late).max(axis=1) * clock.ns).astype(np.int64)
            if len(some):
                self.add_launch(some, end[some], sm[some], error)

    def take_records(
        self,
        records: np.ndarray,
        clock: Clock,
        blocks: np.ndarray | None = None,
        threads: np.ndarray | None = None,
        error: float = 0.0,
    ) -> bool:
        """The records of one launch; the masks say which blocks, and which threads of a block, were chosen (None: all). Warps and
        blocks of which threads are missing do not count. Whether the launch is whole."""
        shape = self.shape
        there = np.zeros((shape.warps, WARP), bool)
        there.ravel()[: shape.block_size] = True if threads is None else threads
        cycles, time = (_since_first(records[name]) for name in ("clock", "time"))
        block, own = np.divmod(records["thread"].astype(np.int64), shape.block_size)
        warp, lane = np.divmod(own, WARP)
        groups, index = np.unique(block * shape.warps + warp, return_inverse=True)
        first = np.full(len(groups), np.iinfo(np.int64).max)
        final = np.zeros(len(groups), np.int64)
        np.minimum.at(first, index, cycles)
        np.maximum.at(final, index, cycles)
        whole = np.bincount(index, minlength=len(groups)) == there.sum(axis=1)[groups % shape.warps]
        kept = whole[index]
        self.lateness.add(lane[kept], (cycles - first[index])[kept], records["site"][kept].astype(np.int64))
        some = there.any(axis=1)
        numbers, place = np.unique(groups[whole] // shape.warps, return_inverse=True)
        of_block = np.zeros((2, len(numbers), shape.warps), np.int64)
        of_block[:, place, groups[whole] % shape.warps] = first[whole], (final - first)[whole]
        complete = np.bincount(place, minlength=len(numbers)) == some.sum()
        self.add_warps(
            of_block[0][complete],
            of_block[1][complete],
            np.broadcast_to(some, (int(complete.sum()), shape.warps)),
        )
        if int(complete.sum()) != (shape.blocks if blocks is None else int(blocks.sum())) or not len(numbers):
            return False
        number, place = np.unique(block, return_inverse=True)
        latest = np.zeros(len(number), np.int64)
        np.maximum.at(latest, place, time)
        sm = np.zeros(len(number), np.int64)
        sm[place] = records["sm"]  # a block stays on its multiprocessor
        self.add_launch(number, latest, sm, error)
        return True


def _wrapped(values: np.ndarray, bits: int) -> np.ndarray:
    """Differences of numbers of so many bits, the small ones in either direction."""
    half = 1 << (bits - 1)
    return (values + half) % (2 * half) - half


def _since_first(values: np.ndarray) -> np.ndarray:
    """uint64 → int64 since the least, whatever they are."""
    return np.minimum(
        values - values.min(initial=values[0] if len(values) else 0), np.uint64(1 << 60)
    ).astype(np.int64)


def _unwrapped(values: np.ndarray, bits: int) -> np.ndarray:
    """Times of which only so many bits are known, near each other: since the first in the array."""
    return _wrapped(values - values[:1], bits)


@dataclass(frozen=True)
class Lane:
    """exits: how often it left; late: of those of which it is known. site: the way it took when it was latest, None where it
    never was late."""

    number: int
    exits: int
    late: Spread
    site: int | None


@dataclass(frozen=True)
class Report:
    """When the threads of one kernel and launch shape left it.

    launches: those that were instrumented. warp, block, grid and tail are of the `whole` ones: read with all their blocks. lost: exits
    of which it is not known how late they were. clock_error: ns, of the largest of all these times.
    """

    shape: Shape
    launches: int
    lanes: tuple[Lane, ...]
    warp: Spread
    block: Spread
    grid: Spread
    tail: Spread
    whole: int
    lost: int
    last_warp: Counter[int]
    last_block: Counter[int]
    alone: Counter[int]
    sm: dict[int, tuple[float, int]]
    clock_error: float

    @property
    def exits(self) -> int:
        return sum(lane.exits for lane in self.lanes)

    @classmethod
    def of(cls, exits: Exits, launches: int, clock: Clock, lateness: Lateness | None = None) -> Report:
        """`lateness`: of the interval, where that is not all that `exits` has."""
        late = exits.lateness if lateness is None else lateness
        lanes = []
        for number in np.flatnonzero(late.exits).tolist():
            largest = float(int(late.worst[number]) >> 24)
            left = int(late.exits[number])
            spread = Spread.of_bins(
                left - int(late.lost[number]), float(late.sums[number]), late.bins[number], largest, clock.ns
            )
            site = int(late.worst[number]) & NOWHERE if late.worst[number] else NOWHERE
            lanes.append(Lane(number, left, spread, None if site == NOWHERE else site))
        warp, block = exits.warp.spread(clock.ns), exits.block.spread(clock.ns)
        largest = max(one.max for one in (warp, block, *(lane.late for lane in lanes)))
        return cls(
            exits.shape,
            launches,
            tuple(lanes),
            warp,
            block,
            exits.grid.spread(),
            exits.tail.spread(),
            exits.whole,
            int(late.lost.sum()),
            exits.last_warp,
            exits.last_block,
            exits.alone,
            exits.sm,
            max(exits.error, largest * clock.error),
        )


# --- for people ---


def findings(found: Report, source: Callable[[int], str | None]) -> list[str]:
    """Who keeps whom waiting, worst first. `source` of a site: such as ``scale.cu:17``; None where it is not known."""
    if not found.exits:
        return ["no thread has left it"]
    return [*_lanes(found, source), *_warps(found), *_blocks(found)]


def _lanes(found: Report, source: Callable[[int], str | None]) -> list[str]:
    means = np.array([lane.late.mean for lane in found.lanes])
    least, most = float(means.min()), float(means.max())
    if not most:
        return ["the lanes of a warp leave together"]
    late = [lane for lane in found.lanes if lane.late.mean > (most + least) / 2]
    early = [lane for lane in found.lanes if lane not in late]
    gap = min(lane.late.mean for lane in late) - max(lane.late.mean for lane in early) if early else 0.0
    together = [lane for lane in found.lanes if lane.late.mean - least <= NOTABLE * most]
    if gap < GAP * most and 2 * len(together) >= len(found.lanes):  # the others leave each in its time
        late, early = [lane for lane in found.lanes if lane not in together], together
    elif gap < GAP * most:
        last = max(found.lanes, key=lambda lane: lane.late.mean)
        return [
            f"the lanes of a warp leave one after the other, {duration(found.warp.mean)} from the first to the last (mean);"
            f" lane {last.number} is {duration(most)} behind the first"
        ]
    few, when = (late, "after") if len(late) <= len(early) else (early, "before")
    who = named("lane", [lane.number for lane in few])
    leaves, rest = ("leave", "their") if who.startswith(("lanes", f"{len(few)} ")) else ("leaves", "its")
    low, high = duration(min(lane.late.mean for lane in late)), duration(most)
    worst = max(lane.late.max for lane in late)
    uneven = f" (mean; at most {duration(worst)})" if worst > 1.1 * most else ""
    ways = {source(lane.site) for lane in late if lane.site is not None} - {None}
    at = f", at {ways.pop()}" if len(ways) == 1 and when == "after" else ""
    time = low if low == high else f"{low} to {high}"
    return [f"{who} {leaves} {time} {when} the rest of {rest} warp{uneven}{at}"]


def _warps(found: Report) -> list[str]:
    if not found.block.mean:
        return []
    said = f"the warps of a block leave within {duration(found.block.mean)} of each other (mean)"
    (warp, times), *_ = found.last_warp.most_common(1)
    if times >= 0.75 * found.block.count:
        said += f"; warp {warp} is the last in {100 * times / found.block.count:.0f} % of the blocks"
    return [said]


def _blocks(found: Report) -> list[str]:
    if not found.grid.mean:
        return []
    (block, times), *_ = found.last_block.most_common(1)
    alone = found.alone[block] / times
    if 2 * times > found.whole and alone > found.grid.mean / 2:
        index = found.shape.block_index(block)
        return [f"block {index} finishes last and alone, {duration(alone)} after all other blocks"]
    said = f"the blocks of a grid finish within {duration(found.grid.mean)} of each other (mean)"
    if found.tail.mean > NOTABLE * found.grid.mean and found.shape.blocks > len(found.sm):
        said += f"; for the last {duration(found.tail.mean)} there are fewer blocks left than multiprocessors ({len(found.sm)})"
    return [said]


def named(what: str, numbers: Sequence[int]) -> str:
    """``lane 31``, ``lanes 3 and 7``, ``lanes 16 to 31``, ``every 4th lane (3 to 31)``, ``12 lanes (0, 3, 4, 9 ...)``."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    if len(numbers) == 2:
        return f"{what}s {numbers[0]} and {numbers[1]}"
    steps = set(np.diff(numbers).tolist())
    if steps == {1}:
        return f"{what}s {numbers[0]} to {numbers[-1]}"
    if len(steps) == 1:
        step = steps.pop()
        ordinal = {2: "2nd", 3: "3rd"}.get(step, f"{step}th")
        return f"every {ordinal} {what} ({numbers[0]} to {numbers[-1]})"
    more = " ..." if len(numbers) > 4 else ""
    return f"{len(numbers)} {what}s ({', '.join(map(str, numbers[:4]))}{more})"


def lane_rows(found: Report, source: Callable[[int], str | None]) -> list[tuple[str, Lane, str]]:
    """What the table shows, lanes that do not differ as one row: their numbers, one of them, where it was latest."""
    rows: dict[tuple[int, Spread, str], list[Lane]] = {}
    for lane in found.lanes:
        way = "" if lane.site is None else source(lane.site) or f"site {lane.site}"
        rows.setdefault((lane.exits, lane.late, way), []).append(lane)
    return [(numbered([lane.number for lane in lanes]), lanes[0], way) for (*_, way), lanes in rows.items()]


def numbered(numbers: Sequence[int]) -> str:
    """``31``, ``0-30``, ``3,7..31`` (every 4th), ``0-2,4-6,8,...``: short enough for a column."""
    steps = set(np.diff(numbers).tolist())
    if len(numbers) > 2 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]},{numbers[1]}..{numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ",".join(parts if len(parts) <= 3 else [*parts[:3], "..."])


def sm_rows(found: Report) -> list[tuple[int, float]]:
    """Multiprocessors with how long they were done before the launch was (mean, ns), the first to be done first."""
    idle = [(number, total / times) for number, (total, times) in found.sm.items()]
    return sorted(idle, key=lambda one: (-one[1], one[0]))


def cells(value: Spread) -> list[str]:
    """Of a table: mean, p50, p99, max in ns."""
    return [f"{value.mean:,.1f}", *(f"{getattr(value, name):,.0f}" for name in ("p50", "p99", "max"))]


def spreads(found: Report) -> list[tuple[str, Spread]]:
    """Rows of the second table, those that say something."""
    rows = [("lanes of a warp", found.warp), ("warps of a block", found.block)]
    rows += [("blocks of a grid", found.grid), ("tail of a grid", found.tail)]
    rows = rows[: 1 if found.shape.warps == 1 else 2] + (rows[2:] if found.shape.blocks > 1 else [])
    return [row for row in rows if row[1].count]


def caveats(found: Report) -> list[str]:
    """What the numbers leave out, and how far they can be trusted."""
    said = []
    if found.whole < found.launches:
        which = f"{found.whole:,} of {found.launches:,} launches" if found.whole else "no launch yet"
        said.append(f"read whole, so that first and last are known: {which}")
    if found.lost:
        said.append(
            f"not known: how late {found.lost:,} exits were, of launches that overlapped others of the same kernel; -e tells"
        )
    if found.clock_error:
        said.append(f"clock error: {duration(found.clock_error)}")
    return said


# --- for programs ---


def lane_record(lane: Lane, source: Callable[[int], str | None]) -> dict[str, Any]:
    way = None if lane.site is None else source(lane.site)
    return {
        "lane": lane.number,
        "exits": lane.exits,
        "late_ns": lane.late.record(),
        "site": lane.site,
        "source": way,
    }


def kernel_record(found: Report) -> dict[str, Any]:
    names = ("warp", "block", "grid")
    return {
        "launches": found.launches,
        "threads": found.exits,
        **{f"{name}_spread_ns": getattr(found, name).record() for name in names},
        "tail_ns": found.tail.record(),
        "sm_idle_ns": {str(number): round(idle) for number, idle in sorted(sm_rows(found))},
        "launches_whole": found.whole,
        "lost": found.lost,
        "clock_error_ns": math.ceil(found.clock_error),
    }

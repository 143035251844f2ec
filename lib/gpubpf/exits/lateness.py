"""When threads exit a kernel: the lanes of a warp, the warps of a block, the blocks of a grid, and which of them others wait for.

kernelretsnoop's device programs sum exits (`take_maps`) or record each of them (`take_records`). These become the `Exits` of a kernel
and launch shape, then an `ExitReport`, then tables, and the sentences of `findings.py`.

- The lateness of a lane is the time from the first exit in its warp to its own.
- The spread of a warp is the time from its first exit to its last.
- The spread of a block is the time from the first exit of its first warp to the first exit of its last warp.
- The spread of a grid is the time from the end of its first block to the end of its last block.
- The tail is the end of a launch, when fewer blocks are left than multiprocessors that took part.

Times are counted in histograms. Bins are 1 wide below 64; above that, each power of two has 32 bins. So the middle of a bin is within
1.6 % of every value in it. Threads, warps and blocks are numbered as in `records/launch_shape.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from gpubpf.record import MutableRecord, Record, field
from gpubpf.records.clock import CycleLength
from gpubpf.records.launch_shape import Shape
from gpubpf.session.sampled import Sample
from gpubpf.show import table
from gpubpf.show.table import duration

BINS = 1024
LARGEST = 2**36 - 1  # larger values count as this
NOWHERE = 0xFFFF  # stands for a site number that does not fit into 16 bits
APART = 32  # cycles from the first to the last exit of a warp from which on its lanes exit apart
ROUNDS = 8  # launches of one kernel and shape that the maps keep apart
CLOCK_BITS = 36
CLOCK_MASK = (1 << CLOCK_BITS) - 1
SAMPLE_GROUPS = 32  # groups of sampled blocks or warps, see session/sampled.py


def bins_of(values: np.ndarray) -> np.ndarray:
    """Return the bin of each value (integers from 0), as the device program computes it."""
    values = np.minimum(values, LARGEST).astype(np.int64)
    # A float64 is exact up to 2**36; its exponent is the position of the highest bit.
    shift = np.maximum(np.frexp(values.astype(np.float64))[1] - 6, 0)
    return shift * 32 + (values >> shift)


def middles() -> np.ndarray:
    """Return the middle of each bin."""
    number = np.arange(BINS)
    shift = np.maximum(number // 32 - 1, 0)
    return (number - shift * 32) * 2.0**shift + (2.0**shift - 1) / 2


class Distribution(Record):
    """A distribution of times, in ns. bins: the middles of its bins above 0, and the number of times in each."""

    count: int
    mean: float
    p50: float
    p99: float
    max: float
    bins: tuple[tuple[float, int], ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of_bins(
        cls, count: int, total: float, bins: np.ndarray, largest: float, scale: float = 1.0
    ) -> Distribution:
        """Return the distribution of `count` values with the sum `total`. `bins`: those above 0. `scale`: ns per unit."""
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
        used = np.flatnonzero(bins)
        middles = np.minimum(_MIDDLES[used], largest) * scale
        parts = tuple(zip(middles.tolist(), bins[used].tolist(), strict=True))
        return cls(count, total * scale / count, found[0], found[1], largest * scale, parts)

    def above(self, limit: float = 0.0) -> tuple[int, float]:
        """Return how many times are above `limit` ns, and their mean. The bin of the limit counts as a whole."""
        below = [(middle, count) for middle, count in self.bins if middle <= limit]
        count = sum(count for _, count in self.bins) - sum(count for _, count in below)
        total = self.mean * self.count - sum(middle * count for middle, count in below)
        return (count, total / count) if count else (0, 0.0)

    def record(self) -> dict[str, float]:
        """Return the JSON fields in ns: integers, except for the mean."""
        return {"mean": round(self.mean, 1)} | {
            name: round(getattr(self, name)) for name in ("p50", "p99", "max")
        }


_MIDDLES = middles()


def _rank(count: int, share: float) -> int:
    return max(1, -int(-count * share // 1))


class BinnedValues(MutableRecord):
    """Counted values: integers from 0 in units of a clock. `where` is the location of the largest."""

    count: int = 0
    total: int = 0
    largest: int = 0
    where: int = 0
    bins: np.ndarray = field(default_factory=lambda: np.zeros(BINS, np.int64))

    def add(self, values: np.ndarray, where: np.ndarray | None = None) -> None:
        """Add values. `where`: the location of each."""
        if not len(values):
            return
        self.count += len(values)
        self.total += int(values.sum())
        above = values[values > 0]
        self.bins += np.bincount(bins_of(above), minlength=BINS)
        place = int(values.argmax())
        if values[place] > self.largest:
            self.largest, self.where = int(values[place]), 0 if where is None else int(where[place])

    def distribution(self, scale: float = 1.0) -> Distribution:
        """Return the distribution. `scale`: ns per unit."""
        return Distribution.of_bins(self.count, float(self.total), self.bins, float(self.largest), scale)


class LaneLateness(Record):
    """The lateness of each lane since the program began.

    sums    uint64 [lane]        cycles
    worst   uint64 [lane]        cycles << 24 | site of the exit
    bins    int64 [lane, BINS]   exits that were late
    exits   int64 [lane]
    lost    int64 [lane]         exits with unknown lateness
    groups  uint64 [group, lane] with sampling: cycles, by group of the sampled blocks or warps
    """

    sums: np.ndarray
    worst: np.ndarray
    bins: np.ndarray
    exits: np.ndarray
    lost: np.ndarray
    groups: np.ndarray

    @classmethod
    def none(cls, warp: int) -> LaneLateness:
        """Return the initial lateness, for warps of `warp` lanes."""
        lanes, none = np.zeros(warp, np.uint64), np.zeros(warp, np.int64)
        groups = np.zeros((SAMPLE_GROUPS, warp), np.uint64)
        return cls(lanes, lanes.copy(), np.zeros((warp, BINS), np.int64), none, none.copy(), groups)

    @classmethod
    def of_maps(
        cls,
        lateness: np.ndarray,
        blocks: np.ndarray,
        groups: np.ndarray | None = None,
        together: np.ndarray | int = 0,
    ) -> LaneLateness:
        """Return the lateness in the device program's maps: `lateness` [shard, lane], `blocks` [1, block] and, with sampling,
        `groups` [group << 5 | lane]. together: further exits, by lane (`cells.together`)."""
        blocks = blocks.reshape(-1)
        late = lateness.reshape(-1, blocks.dtype["exits"].shape[0])
        bins = late["bins"].astype(np.int64).sum(axis=0)
        exits = blocks["exits"].astype(np.int64).sum(axis=0) + together
        grouped = np.zeros((SAMPLE_GROUPS, late.shape[1]), np.uint64)
        if groups is not None:
            grouped[:] = groups.reshape(SAMPLE_GROUPS, -1)
        return cls(
            late["sum"].sum(axis=0),
            late["worst"].max(axis=0),
            bins,
            exits,
            late["lost"].astype(np.int64).sum(axis=0),
            grouped,
        )

    def plus(self, other: LaneLateness) -> LaneLateness:
        return LaneLateness(
            self.sums + other.sums,
            np.maximum(self.worst, other.worst),
            self.bins + other.bins,
            self.exits + other.exits,
            self.lost + other.lost,
            self.groups + other.groups,
        )

    def since(self, before: LaneLateness) -> LaneLateness:
        """Return what was added after `before`. A maximum that is not new is replaced by the middle of the highest new bin."""
        bins = (self.bins - before.bins) & 0xFFFFFFFF  # the device counts in 32 bits
        highest = BINS - 1 - np.argmax(bins[:, ::-1] > 0, axis=1)
        largest = np.where(bins.any(axis=1), _MIDDLES[highest], 0).astype(np.uint64) << np.uint64(24)
        where = self.worst & np.uint64(0xFFFFFF)
        same = np.minimum(largest | where, self.worst)
        worst = np.where(self.worst == before.worst, same, self.worst)
        exits, lost = self.exits - before.exits, self.lost - before.lost
        return LaneLateness(self.sums - before.sums, worst, bins, exits, lost, self.groups - before.groups)

    def add(
        self, lane: np.ndarray, late: np.ndarray, site: np.ndarray, group: np.ndarray | None = None
    ) -> None:
        """Add individual exits. group: with sampling, the group of each."""
        if group is not None:
            np.add.at(self.groups, (group, lane), late.astype(np.uint64))
        self.exits[:] += np.bincount(lane, minlength=len(self.exits))
        some = late > 0
        lane, late, site = lane[some], late[some], np.minimum(site[some], NOWHERE)
        np.add.at(self.sums, lane, late.astype(np.uint64))
        np.add.at(self.bins, (lane, bins_of(late)), 1)
        worst = np.minimum(late, LARGEST).astype(np.uint64) << np.uint64(24) | site.astype(np.uint64)
        np.maximum.at(self.worst, lane, worst)


class Exits(MutableRecord):
    """What is known about the exits of one kernel and launch shape.

    warp, block   spreads in cycles
    grid, tail    of each complete launch, ns
    complete      the number of complete launches
    last_warp     how often a warp exited later than all others of its block
    parted        how often the lanes of a warp exited apart, by the warp's number in its block
    left_early    how often, in these cases, a warp's early lanes left before the other warps, and its late lanes with the other warps
    last_block    how often a block finished later than all others of its grid
    alone         how much later, ns, summed by block
    sm            by multiprocessor: time from its last exit to the end of the launch (ns, summed), number of launches
    error         of grid and tail, ns
    seen          (process, launch) that were read from the maps
    """

    shape: Shape
    warp: BinnedValues = field(default_factory=BinnedValues)
    block: BinnedValues = field(default_factory=BinnedValues)
    grid: BinnedValues = field(default_factory=BinnedValues)
    tail: BinnedValues = field(default_factory=BinnedValues)
    complete: int = 0
    last_warp: Counter[int] = field(default_factory=Counter)
    parted: Counter[int] = field(default_factory=Counter)
    left_early: int = 0
    last_block: Counter[int] = field(default_factory=Counter)
    alone: Counter[int] = field(default_factory=Counter)
    sm: dict[int, tuple[float, int]] = field(default_factory=dict)
    error: float = 0.0
    seen: set[tuple[int, int]] = field(default_factory=set)

    @cached_property
    def lateness(self) -> LaneLateness:
        """How late each lane of a warp was."""
        return LaneLateness.none(self.shape.warp)

    def add_warps(self, first: np.ndarray, late: np.ndarray, there: np.ndarray) -> None:
        """Add complete blocks. Arrays are [block, warp]: the first exit, the time to the last exit (cycles), and whether the warp has
        threads.
        """
        self.warp.add(late[there])
        latest = np.where(there, first, np.iinfo(np.int64).min)
        earliest = np.where(there, first, np.iinfo(np.int64).max).min(axis=1)
        who, last = latest.argmax(axis=1), latest.max(axis=1)
        self.block.add(last - earliest, who)
        alone = ((latest == last[:, None]).sum(axis=1) == 1) & (last > earliest)
        self.last_warp.update(who[alone].tolist())
        parted = there & (late > APART)
        self.parted.update(np.nonzero(parted)[1].tolist())
        # Compare the last exits of warps whose lanes exit together with those of the other warps.
        whole = there & (2 * late < late.max(axis=1, initial=0)[:, None])
        usual = np.where(whole, first + late, np.iinfo(np.int64).min).max(axis=1)
        self.left_early += int((parted & (usual[:, None] > first + late // 2)).sum())

    def add_launch(self, block: np.ndarray, end: np.ndarray, sm: np.ndarray, error: float = 0.0) -> None:
        """Add a complete launch with at least one block: each block's number, last exit (ns) and multiprocessor."""
        order = np.argsort(end, kind="stable")
        ends = (end[order] - end[order[0]]).astype(np.int64)
        numbers, index = np.unique(sm[order], return_inverse=True)
        # Until `begin`, at least as many blocks were left as there are multiprocessors.
        begin = ends[len(ends) - len(numbers)]
        self.grid.add(ends[-1:])
        self.tail.add(ends[-1:] - begin)
        if len(ends) > 1 and ends[-1] > ends[-2]:
            last = int(block[order[-1]])
            self.last_block[last] += 1
            self.alone[last] += int(ends[-1] - ends[-2])
        of_sm = np.zeros(len(numbers), np.int64)
        np.maximum.at(of_sm, index, ends)
        for number, idle in zip(numbers.tolist(), (ends[-1] - of_sm).tolist(), strict=True):
            total, times = self.sm.get(number, (0.0, 0))
            self.sm[number] = total + idle, times + 1
        self.error = max(self.error, error)
        self.complete += 1

    def take_maps(
        self,
        warps: np.ndarray,
        blocks: np.ndarray,
        clock: CycleLength,
        chosen: np.ndarray | None = None,
        error: float = 0.0,
        sampled: Callable[[int], np.ndarray] | None = None,
        process: int = 0,
    ) -> None:
        """Add the complete, new launches in the maps `warps` [ROUNDS, warp] and `blocks` [1, block] of a process.

        `chosen` is a mask of the blocks to count; all of their threads count. `sampled` returns a mask of the blocks that the launch
        with this number chose; None: all. Unless a launch chose all blocks, the times of its grid are unknown.
        """
        shape = self.shape
        rounds = blocks.reshape(-1)["rounds"]  # [block, round]
        cells = warps.reshape(ROUNDS, shape.blocks, shape.warps)
        for number in range(ROUNDS):
            left = rounds["left"][:, number]
            launch = int(left.max(initial=0)) >> CLOCK_BITS
            if not launch or (process, launch) in self.seen:
                continue
            there = np.ones(shape.blocks, bool) if sampled is None else sampled(launch)
            first, late = cells["first"][number], cells["late"][number]
            # Complete: every thread of these blocks has exited, and no other launch has used the cells.
            if bool((left != (launch << CLOCK_BITS) + shape.block_size)[there].any()):
                continue
            if bool((first >> np.uint64(CLOCK_BITS) != launch)[there].any()):
                continue
            self.seen.add((process, launch))
            late = np.where(late >> np.uint64(CLOCK_BITS) == launch, late & np.uint64(CLOCK_MASK), 0)
            anchor = rounds["clock"][:, number].astype(np.int64)
            time_sm = rounds["time_sm"][:, number]
            sm = (time_sm & np.uint64(0xFFFF)).astype(np.int64)
            time = _unwrapped((time_sm >> np.uint64(16)).astype(np.int64), 48)
            # Only 36 bits of the clock are stored; the anchor supplies the rest.
            cycles = (~first & np.uint64(CLOCK_MASK)).astype(np.int64) - (anchor & CLOCK_MASK)[:, None]
            cycles = _wrapped(cycles, CLOCK_BITS)
            late = late.astype(np.int64)
            some = np.flatnonzero(there if chosen is None else there & chosen)
            self.add_warps(cycles[some], late[some], np.ones((len(some), shape.warps), bool))
            end = time + np.rint((cycles + late).max(axis=1) * clock.ns).astype(np.int64)
            if len(some) and there.all():
                self.add_launch(some, end[some], sm[some], error)

    def take_records(
        self,
        records: np.ndarray,
        clock: CycleLength,
        blocks: int | None = None,
        threads: np.ndarray | None = None,
        error: float = 0.0,
        group: np.ndarray | None = None,
        partial: bool = False,
    ) -> bool:
        """Add the records of one launch. Return whether the launch is complete.

        blocks   how many blocks were chosen; None: all
        threads  a mask of the chosen threads of a block; None: all
        group    with sampling, the group of each record
        partial  not all blocks have records, so the times of the grid are unknown

        Warps and blocks with missing threads do not count.
        """
        shape = self.shape
        there = np.zeros((shape.warps, shape.warp), bool)
        there.ravel()[: shape.block_size] = True if threads is None else threads
        cycles, time = (_since_first(records[name]) for name in ("clock", "time"))
        block, own = np.divmod(records["thread"].astype(np.int64), shape.block_size)
        warp, lane = np.divmod(own, shape.warp)
        groups, index = np.unique(block * shape.warps + warp, return_inverse=True)
        first = np.full(len(groups), np.iinfo(np.int64).max)
        final = np.zeros(len(groups), np.int64)
        np.minimum.at(first, index, cycles)
        np.maximum.at(final, index, cycles)
        whole = np.bincount(index, minlength=len(groups)) == there.sum(axis=1)[groups % shape.warps]
        kept = whole[index]
        late, site = (cycles - first[index])[kept], records["site"][kept].astype(np.int64)
        self.lateness.add(lane[kept], late, site, None if group is None else group[kept])
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
        if partial or int(complete.sum()) != (shape.blocks if blocks is None else blocks) or not len(numbers):
            return False
        number, place = np.unique(block, return_inverse=True)
        latest = np.zeros(len(number), np.int64)
        np.maximum.at(latest, place, time)
        sm = np.zeros(len(number), np.int64)
        sm[place] = records["sm"]  # a block stays on its multiprocessor
        self.add_launch(number, latest, sm, error)
        return True


def _wrapped(values: np.ndarray, bits: int) -> np.ndarray:
    """Return differences of counters of `bits` bits as signed numbers."""
    half = 1 << (bits - 1)
    return (values + half) % (2 * half) - half


def _since_first(values: np.ndarray) -> np.ndarray:
    """Return uint64 values as int64 since the smallest one, limited to 2**60."""
    return np.minimum(
        values - values.min(initial=values[0] if len(values) else 0), np.uint64(1 << 60)
    ).astype(np.int64)


def _unwrapped(values: np.ndarray, bits: int) -> np.ndarray:
    """Return times of `bits` bits, which must be close together, as differences from the first."""
    return _wrapped(values - values[:1], bits)


class LaneReport(Record):
    """A lane's exits.

    exits: number of exits; with sampling, an estimate for all blocks.
    late: the distribution of its known lateness.
    site: where the lane was latest; None: never late, or unknown.
    error: with sampling, the standard error of the mean lateness; None: unknown.
    """

    number: int
    exits: int
    late: Distribution
    site: int | None
    error: float | None = None


class ExitReport(Record):
    """When the threads of one kernel and launch shape exited.

    launches      instrumented launches
    warp, block, grid, tail   spreads of the `complete` launches: those that were read with all their blocks
    lost          exits with unknown lateness
    clock_error   error of the largest of all these times, ns
    lane_error    error of the largest lateness of a lane, ns: a warp reads one clock, so the GPU's timer adds nothing
    sample        which blocks or warps were measured; None: all
    selected      how many blocks, and threads of each, are selected; None: all
    """

    shape: Shape
    launches: int
    lanes: tuple[LaneReport, ...]
    warp: Distribution
    block: Distribution
    grid: Distribution
    tail: Distribution
    complete: int
    lost: int
    last_warp: Counter[int]
    parted: Counter[int]
    left_early: int
    last_block: Counter[int]
    alone: Counter[int]
    sm: dict[int, tuple[float, int]]
    clock_error: float
    lane_error: float
    sample: Sample | None = None
    selected: tuple[int, int] | None = None

    @property
    def blocks(self) -> int:
        """The number of selected blocks of a launch."""
        return self.selected[0] if self.selected else self.shape.blocks

    @property
    def selected_blocks(self) -> str:
        """The word before "blocks": "selected " if not all are."""
        return "selected " if self.blocks < self.shape.blocks else ""

    @property
    def selected_threads(self) -> str:
        """The word before "lanes": "selected " if not all threads of a block are."""
        return "selected " if self.selected and self.selected[1] < self.shape.block_size else ""

    @property
    def single_lane(self) -> bool:
        """Whether there is only one lane, so that no lane can be late."""
        return len(self.lanes) == 1 and not self.lanes[0].late.max

    @property
    def unit(self) -> str:
        """The word for the unit that sampling chooses."""
        warps = self.sample is not None and self.sample.sampling.unit == "warp"
        return self.shape.warp_word if warps else "block"

    @property
    def exits(self) -> int:
        return sum(lane.exits for lane in self.lanes)

    @classmethod
    def of(
        cls,
        exits: Exits,
        launches: int,
        clock: CycleLength,
        lateness: LaneLateness | None = None,
        sample: Sample | None = None,
        selected: tuple[int, int] | None = None,
    ) -> ExitReport:
        """Return the report of `exits`. `lateness` replaces their lateness, for example by that of an interval."""
        late = exits.lateness if lateness is None else lateness
        lanes = []
        for number in np.flatnonzero(late.exits).tolist():
            largest = float(int(late.worst[number]) >> 24)
            left = int(late.exits[number])
            spread = Distribution.of_bins(
                left - int(late.lost[number]), float(late.sums[number]), late.bins[number], largest, clock.ns
            )
            site = int(late.worst[number]) & NOWHERE if late.worst[number] else NOWHERE
            error = None
            if sample is not None:
                # Each unit has the same number of exits of this lane; with sampled warps, nearly the same.
                exits_of_groups = sample.folded(SAMPLE_GROUPS) * (left / max(sample.count, 1))
                error = sample.error_of_ratio(late.groups[:, number], exits_of_groups)
                error, left = None if error is None else error * clock.ns, sample.scaled(left)
            lanes.append(LaneReport(number, left, spread, None if site == NOWHERE else site, error))
        warp, block = exits.warp.distribution(clock.ns), exits.block.distribution(clock.ns)
        largest = max(one.max for one in (warp, block, *(lane.late for lane in lanes)))
        return cls(
            exits.shape,
            launches,
            tuple(lanes),
            warp,
            block,
            exits.grid.distribution(),
            exits.tail.distribution(),
            exits.complete,
            int(late.lost.sum()),
            exits.last_warp,
            exits.parted,
            exits.left_early,
            exits.last_block,
            exits.alone,
            exits.sm,
            max(exits.error, largest * clock.error),
            max((lane.late.max for lane in lanes), default=0.0) * clock.error,
            sample,
            selected,
        )


# --- tables ---


def lane_rows(
    report: ExitReport, source: Callable[[int], str | None], ranges: int = 3
) -> list[tuple[str, LaneReport, str]]:
    """Return the rows of the table: the numbers of lanes with equal times, one of these lanes, and where it was latest.

    Times are equal if the table would show the same, or if they differ by less than the clock error."""
    rows: list[tuple[str, list[LaneReport]]] = []
    for lane in () if report.single_lane else report.lanes:
        way = "" if lane.site is None else source(lane.site) or f"site {lane.site}"
        for known, lanes in rows:
            if (known, lanes[0].exits) == (way, lane.exits) and _same_times(
                lanes[0], lane, report.lane_error
            ):
                lanes.append(lane)
                break
        else:
            rows.append((way, [lane]))
    return [(numbered([lane.number for lane in lanes], ranges), lanes[0], way) for way, lanes in rows]


def _same_times(one: LaneReport, other: LaneReport, error: float) -> bool:
    times = ("mean", "p50", "p99", "max")
    return cells(one.late) == cells(other.late) or all(
        abs(getattr(one.late, time) - getattr(other.late, time)) <= error / 2 for time in times
    )


def numbered(numbers: Sequence[int], ranges: int) -> str:
    """Return ``31``, ``0-30``, ``3,7..31`` (every 4th), ``0-2,4-6,8,...`` (with 3 ranges): short enough for a column."""
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
    return ",".join(parts if len(parts) <= ranges else [*parts[:ranges], "..."])


def sm_rows(report: ExitReport) -> list[tuple[int, float]]:
    """Return the multiprocessors with the mean time (ns) from their last exit to the end of the launch, longest first."""
    idle = [(number, total / times) for number, (total, times) in report.sm.items()]
    return sorted(idle, key=lambda one: (-one[1], one[0]))


def cells(value: Distribution) -> list[str]:
    """Return the cells of a table: mean, p50, p99 and max in ns."""
    return [f"{value.mean:,.1f}", *(f"{getattr(value, name):,.0f}" for name in ("p50", "p99", "max"))]


def spreads(report: ExitReport) -> list[tuple[str, Distribution]]:
    """Return the rows of the table of spreads, without those that do not apply."""
    word = report.shape.warp_word
    rows = [(f"lanes of a {word}", report.warp), (f"{word}s of a block", report.block)]
    rows += [("blocks of a grid", report.grid), ("tail of a grid", report.tail)]
    applies = (
        not report.single_lane or report.warp.max > 0,
        report.shape.warps > 1,
        *[report.shape.blocks > 1] * 2,
    )
    return [row for row, applied in zip(rows, applies, strict=True) if applied and row[1].count]


def caveats(report: ExitReport) -> list[str]:
    """Return sentences about what the numbers leave out, and how exact they are."""
    said = []
    if report.sample is not None and report.sample.count != report.sample.units:
        said.append("blocks of a grid: unknown, because not all blocks were measured")
        if report.sample.sampling.unit == "warp":
            word = report.shape.warp_word
            said.append(f"other times from first to last: only of blocks whose {word}s were all measured")
    elif report.complete < report.launches:
        launches = f"{report.complete:,} of {report.launches:,}"
        said.append(f"times from first to last count only launches that were read completely: {launches}")
    if report.lost:
        said.append(
            f"unknown lateness: {table.count(report.lost, 'exit')} of launches that overlapped others of the same kernel; use -e"
        )
    if report.clock_error:
        said.append(f"clock error: {duration(report.clock_error)}")
    return said

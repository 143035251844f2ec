"""When threads leave a kernel: lanes of a warp, warps of a block, blocks of a grid, and who keeps the others waiting.

What kernelretsnoop's device program adds up (`Rows`) or what its records say (`rows_of_records`) → `Report`. A lane's lateness is its
exit after the first exit in its warp; a warp leaves with its last lane, a block with its last warp.

Lateness is counted into histograms whose bins are 1 wide below 64 and then 32 for each power of two, so the middle of a bin is
within 1.6 % of what was counted. Numbers of threads, warps and blocks are those of `imbalance`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpubpf.imbalance import WARP, Shape

BINS = 1024
LARGEST = 2**36 - 1  # counted as this, what is larger
WARPS, BLOCKS, ROWS = 32, 33, 34  # rows behind those of the lanes: spread of a warp, of a block
NOWHERE = 0xFFFF  # a site's number where there is none
NOTABLE = 0.05  # of the largest: what is less is not worth a sentence


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
        if not count or not late:
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


@dataclass(frozen=True)
class Rows:
    """What was added up, by row: lanes 0 to 31, WARPS, BLOCKS. Sums and bins in units of a clock.

    sums     uint64 [ROWS]
    worst    uint64 [ROWS]        unit << 24 | where: the exit's site, or of BLOCKS the warp
    bins     int64 [ROWS, BINS]   values that are not 0
    last     int64 [32]           how often each warp was the last of its block; together the blocks that are complete
    """

    sums: np.ndarray
    worst: np.ndarray
    bins: np.ndarray
    last: np.ndarray

    @classmethod
    def nothing(cls) -> Rows:
        return cls(
            np.zeros(ROWS, np.uint64),
            np.zeros(ROWS, np.uint64),
            np.zeros((ROWS, BINS), np.int64),
            np.zeros(32, np.int64),
        )

    @classmethod
    def of_maps(cls, lateness: np.ndarray, last: np.ndarray) -> Rows:
        """From the maps `lateness` and `last` of the device program."""
        bins = lateness["bins"].astype(np.int64).reshape(ROWS, BINS)
        return cls(lateness["sum"].ravel().copy(), lateness["worst"].ravel().copy(), bins, _signed(last))

    def plus(self, other: Rows) -> Rows:
        return Rows(
            self.sums + other.sums,
            np.maximum(self.worst, other.worst),
            self.bins + other.bins,
            self.last + other.last,
        )

    def since(self, before: Rows) -> Rows:
        """What was added after `before`. The largest is not known where it was there before: then it is that of the highest bin."""
        bins = (self.bins - before.bins) & 0xFFFFFFFF  # the device counts in 32 bits
        highest = BINS - 1 - np.argmax(bins[:, ::-1] > 0, axis=1)
        largest = np.where(bins.any(axis=1), _MIDDLES[highest].astype(np.uint64) << np.uint64(24), 0)
        same = self.worst == before.worst
        where = self.worst & np.uint64(0xFFFFFF)
        worst = np.where(same, np.minimum(largest | where, self.worst), self.worst).astype(np.uint64)
        return Rows(self.sums - before.sums, worst, bins, self.last - before.last)


def _signed(values: np.ndarray) -> np.ndarray:
    return np.asarray(values).astype(np.int64).ravel()


@dataclass(frozen=True)
class Launch:
    """How the blocks of one launch finished, in ns.

    spread: last block after the first. tail: from when fewer blocks were left than multiprocessors took part, to the end.
    last_block: its number; alone: how long it ran after the one before it. sm_numbers, sm_finish: of each multiprocessor its
    last exit, after that of the first to finish. error: how wrong a time may be.
    """

    number: int
    spread: float
    tail: float
    last_block: int
    alone: float
    sm_numbers: np.ndarray = field(repr=False)
    sm_finish: np.ndarray = field(repr=False)
    error: float = 0.0

    @classmethod
    def of_blocks(
        cls, number: int, blocks: np.ndarray, finish: np.ndarray, sm: np.ndarray, error: float = 0.0
    ) -> Launch:
        """From each block's number, last exit (ns) and multiprocessor; at least one block."""
        order = np.argsort(finish, kind="stable")
        ends = (finish[order] - finish[order[0]]).astype(np.float64)
        numbers, index = np.unique(sm, return_inverse=True)
        ends_of_sm = np.zeros(len(numbers))
        np.maximum.at(ends_of_sm, index[order], ends)
        # Before this one was done there were as many blocks left as multiprocessors.
        begin = ends[len(ends) - len(numbers)]
        return cls(
            number,
            float(ends[-1]),
            float(ends[-1] - begin),
            int(blocks[order[-1]]),
            float(ends[-1] - ends[-2]) if len(ends) > 1 else 0.0,
            numbers,
            ends_of_sm - ends_of_sm.min(),
            error,
        )


FINISH = [("launch", "<u8"), ("clock", "<u8"), ("time", "<u8"), ("since_sm", "<u8")]


def launches_of_map(finished: np.ndarray, chosen: np.ndarray | None, clock: Clock) -> list[Launch]:
    """The launches whose blocks (`chosen` of them, numbers; None: all) are all there, of the map `finished`: [entry, block]."""
    found = []
    for entry in finished.reshape(-1, finished.shape[-1]):
        rows = entry if chosen is None else entry[chosen]
        number = int(rows["launch"][0]) if len(rows) else 0
        if not number or not bool((rows["launch"] == number).all()):
            continue
        since = rows["since_sm"].astype(np.int64) >> 16
        sm = (rows["since_sm"] & np.uint64(0xFFFF)).astype(np.int64)
        ends, error = clock.times(sm, rows["clock"].astype(np.int64), rows["time"].astype(np.int64), since)
        blocks = np.arange(len(entry)) if chosen is None else chosen
        found.append(Launch.of_blocks(number, blocks, ends, sm, error))
    return found


@dataclass(frozen=True)
class Clock:
    """How long a cycle of the multiprocessors takes.

    ns: of a cycle; error: of that, relative. exact: cycles are ns of the virtual clock.
    """

    ns: float = 1.0
    error: float = 0.0
    exact: bool = True

    @classmethod
    def measured(cls, sm: np.ndarray, cycles: np.ndarray, time: np.ndarray) -> Clock | None:
        """From readings of a multiprocessor's clock and the GPU's timer (ns) next to each other: how both advance between
        the first and the last reading of each multiprocessor. None: too close together to tell."""
        from gpubpf.clock import CYCLE, estimated_tick

        tick = max(estimated_tick(time), 1)
        rates, weights = [], []
        for number in np.unique(sm):
            mine = sm == number
            ran, took = np.ptp(cycles[mine]), np.ptp(time[mine])
            if ran > 0 and took >= 50 * tick and CYCLE[0] <= took / ran <= CYCLE[1]:
                rates.append(took / ran)
                weights.append(took)
        if not rates:
            return None
        order = np.argsort(rates)
        half = np.searchsorted(np.cumsum(np.array(weights)[order]), sum(weights) / 2)
        return cls(float(np.array(rates)[order][half]), tick / max(weights), False)

    def times(
        self, sm: np.ndarray, cycles: np.ndarray, time: np.ndarray, since: np.ndarray
    ) -> tuple[np.ndarray, float]:
        """GPU time (ns) `since` cycles before readings of clock and timer, and the largest error."""
        if self.exact:
            return time - since, 0.0
        from gpubpf.clock import SmClock

        fine = SmClock(sm, cycles, time).gpu(sm, cycles, time)
        return fine.at - np.rint(since * self.ns).astype(np.int64), float(fine.error.max(initial=0))


def rows_of_records(
    shape: Shape, thread: np.ndarray, time: np.ndarray, site: np.ndarray, chosen: np.ndarray | None = None
) -> Rows:
    """Of the records of one launch: number of the thread, exit (ns, integers), site. Warps of which a thread that has
    to be there (`chosen`: bool [threads of a block]; None: all) is missing do not count."""
    places = np.zeros((shape.warps, WARP), bool)
    places.ravel()[: shape.block_size] = True if chosen is None else chosen
    block, own = np.divmod(thread.astype(np.int64), shape.block_size)
    warp, lane = np.divmod(own, WARP)
    groups, index = np.unique(block * shape.warps + warp, return_inverse=True)
    first = np.full(len(groups), np.iinfo(np.int64).max)
    final = np.full(len(groups), np.iinfo(np.int64).min)
    np.minimum.at(first, index, time)
    np.maximum.at(final, index, time)
    whole = np.bincount(index, minlength=len(groups)) == places.sum(axis=1)[groups % shape.warps]
    late = time - first[index]
    rows = Rows.nothing()
    counted = whole[index] & (late > 0)
    _add(rows, lane[counted], late[counted], site[counted].astype(np.int64))
    groups, first, final = groups[whole], first[whole], final[whole]
    several = final > first
    _add(rows, np.full(several.sum(), WARPS), (final - first)[several], np.zeros(several.sum(), np.int64))
    # Blocks: their warps, as far as they have threads that were chosen.
    blocks, index = np.unique(groups // shape.warps, return_inverse=True)
    whole = np.bincount(index, minlength=len(blocks)) == places.any(axis=1).sum()
    order = np.lexsort((-(groups % shape.warps), final, index))
    ends = np.append(np.flatnonzero(np.diff(index[order])), len(order) - 1) if len(order) else order
    begins = np.append(0, ends[:-1] + 1) if len(order) else order
    earliest, latest = final[order[begins]], final[order[ends]]
    who = (groups % shape.warps)[order[ends]]
    rows.last[:] = np.bincount(who[whole], minlength=32)[:32]
    several = whole & (latest > earliest)
    _add(rows, np.full(several.sum(), BLOCKS), (latest - earliest)[several], who[several])
    return rows


def _add(rows: Rows, row: np.ndarray, value: np.ndarray, where: np.ndarray) -> None:
    np.add.at(rows.sums, row, value.astype(np.uint64))
    np.maximum.at(rows.worst, row, (np.minimum(value, LARGEST) << 24 | (where & 0xFFFF)).astype(np.uint64))
    np.add.at(rows.bins, (row, bins_of(value)), 1)


def launch_of_records(
    number: int,
    shape: Shape,
    thread: np.ndarray,
    time: np.ndarray,
    sm: np.ndarray,
    threads: int,
    error: float,
) -> Launch | None:
    """The same records as a `Launch`, where all `threads` are there."""
    if not len(thread) or len(thread) != threads:
        return None
    blocks, index = np.unique(thread.astype(np.int64) // shape.block_size, return_inverse=True)
    finish = np.full(len(blocks), np.iinfo(np.int64).min)
    np.maximum.at(finish, index, time)
    where = np.zeros(len(blocks), np.int64)
    where[index] = sm  # a block stays on its multiprocessor
    return Launch.of_blocks(number, blocks, finish, where, error)


@dataclass(frozen=True)
class Lane:
    """late: of its exits. site: the way it took when it was latest, None where it never was late."""

    number: int
    late: Spread
    site: int | None


@dataclass(frozen=True)
class Report:
    """When the threads of one kernel and launch shape left it.

    launches: those that are instrumented; blocks: of them, how many are in the numbers, of how many there were.
    grid, tail: of the launches `whole`, whose blocks were all read. last: how often each warp was the last of its block.
    clock_error: ns, of the times in `grid` and `tail`.
    """

    shape: Shape
    launches: int
    blocks: int
    blocks_there: int
    lanes: tuple[Lane, ...]
    warp: Spread
    block: Spread
    grid: Spread
    tail: Spread
    last: np.ndarray
    worst_warp: int
    whole: tuple[Launch, ...]
    clock_error: float

    @property
    def threads(self) -> int:
        """Exits that are in the numbers."""
        return sum(lane.late.count for lane in self.lanes)


def report(
    shape: Shape,
    launches: int,
    rows: Rows,
    whole: Iterable[Launch],
    clock: Clock,
    block_mask: np.ndarray | None = None,
    thread_mask: np.ndarray | None = None,
) -> Report:
    """What it all means. The masks (bool, by block, and by thread of a block) say what --block and --thread chose; None: all."""
    whole = tuple(whole)
    complete = int(rows.last.sum())
    places = np.zeros((shape.warps, WARP), bool)
    places.ravel()[: shape.block_size] = True if thread_mask is None else thread_mask
    blocks = shape.blocks if block_mask is None else int(block_mask.sum())

    def spread(row: int, count: int) -> Spread:
        largest = float(int(rows.worst[row]) >> 24)
        return Spread.of_bins(count, float(rows.sums[row]), rows.bins[row], largest, clock.ns)

    lanes = []
    for number in range(WARP):
        with_thread = int(places[:, number].sum())
        if with_thread:
            site = int(rows.worst[number]) & NOWHERE if rows.worst[number] else None
            lanes.append(
                Lane(number, spread(number, complete * with_thread), None if site == NOWHERE else site)
            )
    error = max((launch.error for launch in whole), default=0.0)
    warp, block = spread(WARPS, complete * shape.warps), spread(BLOCKS, complete)
    largest = max(one.max for one in (warp, block, *(lane.late for lane in lanes)))
    return Report(
        shape,
        launches,
        complete,
        launches * blocks,
        tuple(lanes),
        warp,
        block,
        Spread.of([launch.spread for launch in whole]),
        Spread.of([launch.tail for launch in whole]),
        rows.last,
        int(rows.worst[BLOCKS]) & 31,
        whole,
        max(error, largest * clock.error),
    )


# --- for people ---


def duration(ns: float) -> str:
    """``752 ns``, ``1.25 us``, ``13.2 ms``: three digits."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= 0.9995 * size:
            value = ns / size
            return f"{value:.{max(0, 3 - len(str(int(value + 0.0005))))}f} {unit}"
    return f"{ns:.0f} ns"


def findings(found: Report, source: Callable[[int], str | None]) -> list[str]:
    """Who keeps whom waiting, worst first. `source` of a site: such as ``scale.cu:17``; None where it is not known."""
    said = [*_lanes(found, source), *_warps(found), *_blocks(found)]
    if not found.blocks:
        return ["no block of it has finished"]
    return said or ["even: lanes, warps and blocks leave together"]


def _lanes(found: Report, source: Callable[[int], str | None]) -> list[str]:
    means = np.array([lane.late.mean for lane in found.lanes])
    most = float(means.max(initial=0.0))
    if not most:
        return ["the lanes of a warp leave together"]
    usual = float(np.median(means))
    late = [lane for lane, mean in zip(found.lanes, means, strict=True) if mean > (most + usual) / 2]
    if usual > most / 2 or 2 * len(late) >= len(means):
        first, last = found.lanes[int(means.argmin())], found.lanes[int(means.argmax())]
        return [
            f"the lanes of a warp leave one after the other, {duration(found.warp.mean)} from the first to the last (mean); "
            f"lane {first.number} is {duration(first.late.mean)} behind the first, lane {last.number} {duration(last.late.mean)}"
        ]
    least = min(lane.late.mean for lane in late)
    time = duration(least) if duration(least) == duration(most) else f"{duration(least)} to {duration(most)}"
    ways = {source(lane.site) for lane in late if lane.site is not None} - {None}
    at = f", at {ways.pop()}" if len(ways) == 1 else ""
    numbers = [lane.number for lane in late]
    leaves, rest = ("leaves", "its warp") if len(late) == 1 else ("leave", "their warp")
    return [f"{named('lane', numbers)} {leaves} {time} after the rest of {rest}{at}"]


def _warps(found: Report) -> list[str]:
    if found.shape.warps == 1 or not found.block.mean:
        return []
    often = float(found.last.max()) / max(found.blocks, 1)
    said = f"the warps of a block finish {duration(found.block.mean)} apart (mean)"
    if often >= 0.75 and found.block.mean > NOTABLE * found.block.max:
        said += f"; warp {int(found.last.argmax())} is the last in {often * 100:.0f} % of the blocks"
    return [said]


def _blocks(found: Report) -> list[str]:
    if not found.whole or found.shape.blocks == 1 or not found.grid.max:
        return []
    said = [f"the blocks of a grid finish {duration(found.grid.mean)} apart (mean)"]
    last = [launch.last_block for launch in found.whole]
    number = max(set(last), key=last.count)
    alone = float(np.mean([launch.alone for launch in found.whole if launch.last_block == number]))
    if 2 * last.count(number) > len(last) and alone > found.grid.mean / 2:
        said = [
            f"block {found.shape.block_index(number)} finishes last and alone: {duration(alone)} after all other blocks"
        ]
    elif found.tail.mean > NOTABLE * found.grid.mean:
        sms = max(len(launch.sm_numbers) for launch in found.whole)
        said[0] += (
            f"; for the last {duration(found.tail.mean)} there are fewer blocks left than multiprocessors ({sms})"
        )
    return said


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
    """What the table shows: neighbouring lanes that do not differ as one row; numbers, one of them, its site."""
    rows: list[tuple[str, Lane, str]] = []
    begin = 0

    def same(a: Lane, b: Lane) -> bool:
        return a.late == b.late and a.site == b.site and b.number == a.number + 1

    for at in range(1, len(found.lanes) + 1):
        if at < len(found.lanes) and same(found.lanes[at - 1], found.lanes[at]):
            continue
        first, final = found.lanes[begin], found.lanes[at - 1]
        label = str(first.number) if begin == at - 1 else f"{first.number}-{final.number}"
        way = "" if first.site is None else source(first.site) or f"site {first.site}"
        rows.append((label, first, way))
        begin = at
    return rows


def table_of(value: Any) -> list[str]:
    """Cells of a Spread: mean, p50, p99, max in ns."""
    return [f"{value.mean:,.1f}", *(f"{getattr(value, name):,.0f}" for name in ("p50", "p99", "max"))]

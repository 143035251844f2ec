"""Convert GPU times to the host's clock, with an error bound, and `clock64` of each multiprocessor to GPU time.

Both are the same problem. At some moments, a clock is known to lie within an interval. In between, it is linear. All lines that pass
through all intervals bound the clock at any time. The result is the middle of the bounds, and the error is half their distance.

The bounds assume that the rate of one clock against the other changes slowly (`WANDER`). If brackets contradict that, a clock was set
or jumped, and a new segment begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gpubpf.record import Record

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers: TypeAlias = NDArray[np.int64]
    Reals: TypeAlias = NDArray[np.float64]

UNKNOWN = np.iinfo(np.int64).max  # the error of an unknown time
RATE = (1 - 1e-3, 1 + 1e-3)  # limits for the rate between two ns clocks; every crystal is more accurate
WANDER = 0.5e-6  # rate change within seconds, from temperature and NTP corrections of CLOCK_MONOTONIC
REACH = 4e9  # ns; a time is bounded by the brackets within this distance
SPACING = 0.5e9  # ns between the starts of adjacent pieces of the bound
BURST = 16  # brackets on each side that a piece always uses, at any distance
WINDOW = 64  # most brackets per piece; the narrowest are used
ENOUGH = 8192  # most brackets per clock; the narrowest are used
STEP_LIMIT = 1_000_000  # ns; a time between two segments is known only if its error is below this
SENSIBLE = 1e17  # ns from the first bracket, about three years
CYCLE = (0.2, 10.0)  # limits for the length of a GPU's cycle in ns
TICKS = 64  # GPU timer ticks in one window of a multiprocessor's clock


class Times(Record):
    """Times on the target clock and the error of each, in ns (UNKNOWN: the time is not known). int64 arrays of the same shape."""

    at: Integers
    error: Integers

    @property
    def known(self) -> NDArray[np.bool_]:
        return self.error != UNKNOWN


class Bracket(Record):
    """The GPU's clock showed `gpu` at some moment between `before` and `after` on the host's clock; all in ns.

    tick   resolution of the GPU's clock: the true time was at least `gpu` and less than `gpu + tick`; 0: unknown
    back   only `gpu - back` is known to be after `before`; for a kernel, `back` is its duration
    """

    before: int
    gpu: int
    after: int
    tick: int = 0
    back: int = 0

    @property
    def width(self) -> int:
        return self.after - self.before - self.back


class GpuClock:
    """Converts GPU time to host time.

    brackets    the brackets of one GPU, in any order
    rate        lower and upper limit of host ns per GPU ns
    tick        resolution of the GPU's clock in ns
    narrowest   width of the narrowest bracket in ns
    steps       jumps of a clock: (last bracket before, first bracket after) in GPU ns

        clock = GpuClock(brackets)
        times = clock.host(gpu_times)
    """

    def __init__(self, brackets: Sequence[Bracket], rate: tuple[float, float] = RATE) -> None:
        # Sort by host time, because the GPU's clock may have been set back.
        usable = [
            b
            for b in brackets
            if 0 <= b.before <= b.after < 2**63 and 0 <= b.gpu < 2**63 and min(b.tick, b.back) >= 0
        ]
        usable = _narrowest(sorted(usable, key=lambda b: (b.before + b.after, b.gpu)))
        self._origin_gpu = usable[0].gpu if usable else 0
        self._origin_host = usable[0].before if usable else 0
        told = max((b.tick for b in usable), default=0)
        self.tick = told or estimated_tick(np.array([b.gpu for b in usable], np.int64))
        self.narrowest = min((b.width for b in usable), default=0)
        ticks = np.full(len(usable), float(self.tick))
        gpu = np.array([b.gpu - self._origin_gpu for b in usable], np.float64)
        low_at = gpu + ticks - np.array([b.back for b in usable], np.float64)
        low = np.array([b.before - self._origin_host for b in usable], np.float64)
        high = np.array([b.after - self._origin_host for b in usable], np.float64)
        self._identity = False
        self._segments = [
            _Segment(gpu[a:b], low_at[a:b], low[a:b], high[a:b], rate)
            for a, b in _segments(gpu, low_at, low, high, rate)
        ]
        ends = itertools.pairwise(self._segments)
        self.steps = [(int(a.last) + self._origin_gpu, int(b.first) + self._origin_gpu) for a, b in ends]

    @classmethod
    def same(cls) -> GpuClock:
        """Return the identity, for the embedded device's virtual clock, which host and device share."""
        made = cls([])
        made._identity = True
        return made

    def host(self, gpu: Any) -> Times:
        """Convert readings of the GPU's clock (array of ns) to CLOCK_MONOTONIC. Each result is the middle of its bounds."""
        readings = np.asarray(gpu).astype(np.int64)
        if self._identity:
            return Times(readings, np.zeros_like(readings))
        at, error = np.zeros(readings.shape, np.int64), np.full(readings.shape, UNKNOWN)
        if not self._segments or not readings.size:
            return Times(at, error)
        x = (readings - self._origin_gpu).astype(np.float64)
        low, high = self._bounds(x)
        if self.tick > 1:  # the reading may be from any moment of the tick
            _, later = self._bounds(x + (self.tick - 1))
            high = np.maximum(high, later)
        fine = np.isfinite(low) & np.isfinite(high) & (np.abs(x) < SENSIBLE)
        low, high = low[fine], high[fine]
        at[fine] = np.rint((low + high) / 2).astype(np.int64) + self._origin_host
        error[fine] = np.ceil((high - low) / 2 + 0.5).astype(np.int64)
        return Times(at, error)

    def _bounds(self, x: Reals) -> tuple[Reals, Reals]:
        """Return the least and largest host time at GPU times `x`; not finite if unknown."""
        last = len(self._segments) - 1
        if not last:
            return self._segments[0].bounds(x)
        low, high = np.full(x.shape, np.nan), np.full(x.shape, np.nan)
        covered = np.zeros(x.shape, np.int64)
        for number, segment in enumerate(self._segments):
            first = -np.inf if number == 0 else segment.first
            end = np.inf if number == last else segment.last
            mine = (x >= first) & (x <= end)
            covered += mine
            low[mine], high[mine] = segment.bounds(x[mine])
        for before, after in itertools.pairwise(self._segments):
            gap = (covered == 0) & (x > before.last) & (x < after.first)
            if gap.any():  # the jump is somewhere in the gap, so either line may be right
                a, b = before.bounds(x[gap]), after.bounds(x[gap])
                low[gap], high[gap] = np.minimum(a[0], b[0]), np.maximum(a[1], b[1])
                covered[gap] = np.where(high[gap] - low[gap] <= STEP_LIMIT, 1, 0)
        low[covered != 1] = np.nan  # in no segment, or in several because the GPU's clock was set back
        return low, high


class SmClock:
    """Converts `clock64` of each multiprocessor to GPU time, with a finer resolution than the GPU's own timer.

    sm, cycles, gpu: one-dimensional arrays with the multiprocessor, `clock64` and the timer (ns) of each record. Both clocks were
    read within `apart` ns. The true time was at least `gpu` and less than a tick more, so every record bounds the clock of its
    multiprocessor.

    The clock is assumed to keep its frequency for a while. If records contradict that, only the record itself bounds its time. A
    change is not detected shortly before the first or last record, or between few records.
    """

    def __init__(self, sm: Any, cycles: Any, gpu: Any, tick: int = 0, apart: int = 0) -> None:
        numbers, cycles, gpu = (np.asarray(part).astype(np.int64) for part in (sm, cycles, gpu))
        self.tick = tick or estimated_tick(gpu) or 1
        self._apart = apart
        self._windows: dict[int, tuple[int, int, list[_Window]]] = {}
        order = np.lexsort((gpu, cycles, numbers))
        borders = np.flatnonzero(np.diff(numbers[order])) + 1
        for part in np.split(order, borders) if len(order) else ():
            self._windows[int(numbers[part[0]])] = self._fit(cycles[part], gpu[part])

    def _fit(self, cycles: Integers, gpu: Integers) -> tuple[int, int, list[_Window]]:
        """Fit one multiprocessor. Among records with the same timer value, the first gives a lower bound, the last an upper bound."""
        origin_cycles, origin_gpu = int(cycles[0]), int(gpu[0])
        new = np.flatnonzero(np.diff(gpu)) + 1
        firsts, lasts = np.append(0, new), np.append(new, len(gpu)) - 1
        high_at = (cycles[lasts] - origin_cycles).astype(np.float64)
        low_at = (cycles[firsts] - origin_cycles).astype(np.float64)
        # Allow for a small frequency change that is not visible yet.
        slack = self._apart + self.tick / 128
        low = (gpu[firsts] - origin_gpu).astype(np.float64) - slack
        high = (gpu[lasts] - origin_gpu).astype(np.float64) + self.tick + slack
        made = []
        for at in range(0, len(low), TICKS):
            # A frequency change becomes visible with a delay, so a window must agree with its neighbours.
            wide, own = slice(max(0, at - TICKS), at + 2 * TICKS), slice(at, at + TICKS)
            agreed = _Piece.of(high_at[wide], low_at[wide], low[wide], high[wide], CYCLE)
            made.append(_Window(float(low_at[own][0]), float(high_at[own][-1]), agreed))
        return origin_cycles, origin_gpu, made

    def gpu(self, sm: Any, cycles: Any, gpu: Any) -> Times:
        """Convert records, given as in the constructor. Return their times in ns of the GPU's timer."""
        numbers, cycles, gpu = (np.asarray(part).astype(np.int64) for part in (sm, cycles, gpu))
        base = int(gpu[0]) if len(gpu) else 0
        low, high = (
            (gpu - base - self._apart).astype(np.float64),
            (gpu - base + self.tick + self._apart).astype(np.float64),
        )
        for number, (origin_cycles, origin_gpu, windows) in self._windows.items():
            mine = np.flatnonzero(numbers == number)
            x = (cycles[mine] - origin_cycles).astype(np.float64)
            which = np.searchsorted([window.begin for window in windows], x, side="right") - 1
            order = np.argsort(which, kind="stable")
            for part in np.split(order, np.flatnonzero(np.diff(which[order])) + 1) if len(mine) else ():
                window = windows[max(int(which[part[0]]), 0)]
                if window.lines is None:
                    continue
                bottom, top = window.bounds(x[part])
                at, away = mine[part], origin_gpu - base
                bottom, top = np.maximum(low[at], bottom + away), np.minimum(high[at], top + away)
                agree = bottom <= top
                low[at], high[at] = np.where(agree, bottom, low[at]), np.where(agree, top, high[at])
        return Times(_integers(np.rint((low + high) / 2)) + base, _integers(np.ceil((high - low) / 2 + 0.5)))


class _Window(Record):
    """A window of a multiprocessor's clock: its range in cycles, and the lines that fit it and its neighbours."""

    begin: float
    end: float
    lines: _Piece | None

    def bounds(self, x: Reals) -> tuple[Reals, Reals]:
        assert self.lines is not None
        end = max(self.end, self.begin + 1.0)
        share = (x - self.begin) / (end - self.begin)
        low = self.lines.bottom(self.begin) * (1 - share) + self.lines.bottom(end) * share
        high = self.lines.top(self.begin) * (1 - share) + self.lines.top(end) * share
        inside = (share >= 0) & (share <= 1)  # a chord is a safe bound only between its ends
        return np.where(inside, low, -np.inf), np.where(inside, high, np.inf)


def _integers(times: Reals) -> Integers:
    """Return times as integers. Those beyond all limits, which only a false log gives, become the limits."""
    return np.clip(np.nan_to_num(times), -(2.0**62), 2.0**62).astype(np.int64)


_LONGEST_TICK = 1 << 40  # ns; no clock has steps this long


def estimated_tick(readings: Integers) -> int:
    """Return the resolution of a clock from its readings (ns). It is not too small if the true steps vary by less than half."""
    steps = np.diff(np.unique(readings.astype(np.int64))).view(np.uint64)  # steps may be 2^63 or more
    if not len(steps):
        return 0
    least = int(steps.min())
    return min(int(steps[steps <= least + least // 2].max()), _LONGEST_TICK)


def _narrowest(brackets: list[Bracket]) -> list[Bracket]:
    """Return at most about `ENOUGH` of sorted brackets: the narrowest in each stretch of time."""
    size = 4 * -(-len(brackets) // ENOUGH)
    if size <= 4:
        return brackets
    kept = []
    for at in range(0, len(brackets), size):
        few = sorted(range(at, min(at + size, len(brackets))), key=lambda n: brackets[n].width)
        kept += [brackets[n] for n in sorted(few[:4])]
    return kept


# --- lines through intervals ---


class _Piece(Record):
    """All lines y = a + b x with y <= high at `high_at`, y >= low at `low_at`, and `slopes[0]` <= b <= `slopes[1]`."""

    high_at: Reals
    low_at: Reals
    low: Reals
    high: Reals
    slopes: tuple[float, float]

    @classmethod
    def of(
        cls, high_at: Reals, low_at: Reals, low: Reals, high: Reals, rate: tuple[float, float]
    ) -> _Piece | None:
        """Return the set of lines with their possible slopes; None if there is no such line."""
        run = low_at[None, :] - high_at[:, None]
        rise = low[None, :] - high[:, None]  # the line rises at least this much over `run`
        if (rise[run == 0] > 0).any():
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = rise / run
        least = max(rate[0], float(np.max(slope[run > 0], initial=-np.inf)))
        most = min(rate[1], float(np.min(slope[run < 0], initial=np.inf)))
        if least > most * (1 + 1e-12):
            return None
        return cls(high_at, low_at, low, high, (least, max(least, most)))

    def top(self, x: float) -> float:
        """Return the largest y of any line at `x`."""
        return _top(x, self.high_at, self.high, self.slopes)

    def bottom(self, x: float) -> float:
        """Return the least y of any line at `x`."""
        return -_top(x, self.low_at, -self.low, (-self.slopes[1], -self.slopes[0]))


def _top(x: float, at: Reals, limit: Reals, slopes: tuple[float, float]) -> float:
    """Return the largest y at `x` of lines that are at most `limit` at each `at` and have a slope within `slopes`.

    This is linear programming in two dimensions: one point and a slope, or one point on each side, limit the line.
    """
    away = x - at
    best = float(np.min(limit + away * np.where(away >= 0, slopes[1], slopes[0])))
    left, right = away > 0, away < 0
    if left.any() and right.any():
        a, b = away[left][:, None], -away[right][None, :]
        best = min(best, float(np.min((limit[left][:, None] * b + limit[right][None, :] * a) / (a + b))))
    return best


class _Segment:
    """A stretch of time without contradictory intervals. Its bounds consist of linear pieces.

    At the ends of a piece, the bounds are exact for the intervals that the piece uses. The largest y of all lines is convex in x, and
    the smallest is concave. So a chord between the ends is a safe bound for both.
    """

    def __init__(
        self,
        high_at: Reals,
        low_at: Reals,
        low: Reals,
        high: Reals,
        rate: tuple[float, float],
    ) -> None:
        order = np.argsort(high_at, kind="stable")
        high_at, low_at, low, high = (part[order] for part in (high_at, low_at, low, high))
        self.first, self.last = float(high_at[0]), float(low_at.max())
        self._rate = rate
        knots = [self.first]
        for x in high_at.tolist():
            if x >= knots[-1] + SPACING:
                knots.append(x)
        if self.last > knots[-1]:
            knots.append(self.last)
        if len(knots) == 1:
            knots.append(knots[0] + 1.0)
        self._knots = np.array(knots)
        # [piece, its two ends]
        self._low, self._high = np.empty((len(knots) - 1, 2)), np.empty((len(knots) - 1, 2))
        for number, ends in enumerate(itertools.pairwise(knots)):
            piece = self._piece(high_at, low_at, low, high, *ends)
            self._low[number] = [piece.bottom(x) for x in ends]
            self._high[number] = [piece.top(x) for x in ends]
            if number == 0:
                self._slopes_before = piece.slopes
            self._slopes_after = piece.slopes

    def _piece(
        self, high_at: Reals, low_at: Reals, low: Reals, high: Reals, begin: float, end: float
    ) -> _Piece:
        at = np.searchsorted(high_at, [begin - REACH, begin, end + REACH, end + 1]).tolist()
        first, last = min(at[0], max(0, at[1] - BURST)), max(at[2], at[3] + BURST)
        chosen = np.arange(first, min(last, len(high_at)))
        if len(chosen) > WINDOW:
            width = (high - low + low_at - high_at)[chosen]
            chosen = np.sort(chosen[np.argsort(width, kind="stable")[:WINDOW]])
        at = high_at[chosen]
        slack = WANDER * np.maximum(np.maximum(begin - at, at - end), 0.0)
        while True:
            found = _Piece.of(at, low_at[chosen], low[chosen] - slack, high[chosen] + slack, self._rate)
            if found is not None:
                return found
            # The rate changed slowly, which is not a contradiction, so widen the bounds until a line fits.
            slack = 2 * slack + 1.0

    def bounds(self, x: Reals) -> tuple[Reals, Reals]:
        """Return the least and largest y at each `x`. Outside the pieces, they follow from the possible slopes."""
        knots = self._knots
        which = np.clip(np.searchsorted(knots, x, side="right") - 1, 0, len(self._low) - 1)
        begin, end = knots[which], knots[which + 1]
        share = np.clip((x - begin) / (end - begin), 0.0, 1.0)
        low = self._low[which, 0] * (1 - share) + self._low[which, 1] * share
        high = self._high[which, 0] * (1 - share) + self._high[which, 1] * share
        before, after = np.maximum(begin - x, 0.0), np.maximum(x - end, 0.0)
        near = np.minimum(np.abs(x - begin), np.abs(end - x))
        slack = WANDER * near
        low += after * self._slopes_after[0] - before * self._slopes_before[1] - slack
        high += after * self._slopes_after[1] - before * self._slopes_before[0] + slack
        return low, high


def _segments(
    high_at: Reals, low_at: Reals, low: Reals, high: Reals, rate: tuple[float, float]
) -> list[tuple[int, int]]:
    """Return ranges of brackets without contradictions. A bracket that contradicts those before it starts a new range."""
    found: list[tuple[int, int]] = []
    begin = 0
    for at in range(1, len(high_at)):
        back = max(begin, at - BURST)
        while begin < back and high_at[at] - high_at[back - 1] <= REACH and at - back < WINDOW:
            back -= 1
        near = slice(back, at + 1)
        slack = WANDER * np.abs(high_at[near] - high_at[at])
        if _Piece.of(high_at[near], low_at[near], low[near] - slack, high[near] + slack, rate) is None:
            found.append((begin, at))
            begin = at
    if len(high_at):
        found.append((begin, len(high_at)))
    return found


class CycleLength(Record):
    """The length of a multiprocessor cycle in ns, and its relative error."""

    ns: float = 1.0
    error: float = 0.0

    @classmethod
    def measured(cls, sm: np.ndarray, cycles: np.ndarray, time: np.ndarray) -> CycleLength | None:
        """Return the cycle length from paired readings of a multiprocessor's clock and the GPU's timer (ns).

        Both are compared between the first and the last reading of each multiprocessor. Return None if these are too close.
        """
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
        # Multiprocessors are read at different times, so different rates mean that the frequency has changed.
        apart = float(np.average(np.abs(np.array(rates) / middle - 1), weights=weights))
        return cls(middle, max(2 * tick / max(weights), apart))

"""Clocks with injected offset, drift, jitter and coarse ticks: the true error is within the reported bound."""

from __future__ import annotations

import time

import numpy as np
import pytest

from gpubpf.records.clock import RATE, UNKNOWN, Bracket, GpuClock, SmClock, Times, estimated_tick

TICKS = (1, 32, 1000, 1024)
CASES = 1000


class World:
    """A host clock and a GPU clock with known, different rates."""

    def __init__(self, seed: int) -> None:
        self.random = random = np.random.default_rng(seed)
        self.tick = int(random.choice(TICKS))
        self.rate = 1 + random.uniform(-200e-6, 200e-6)
        self.offset = int(random.integers(0, 2**60))
        self.start = int(random.integers(0, 2**50))
        self.seconds = float(random.choice([0.05, 1.0, 6.0]))
        # The rate changes slowly, as with temperature.
        self.swing, self.period = random.uniform(0, 0.05e-6), random.uniform(2, 20)
        self.noise = float(random.choice([200, 2000, 20000]))

    def gpu(self, host: np.ndarray) -> np.ndarray:
        """Return the true GPU time (ns, rounded down) at a host time (ns since the start)."""
        wave = self.period * 1e9 / (2 * np.pi)
        return host * self.rate + self.swing * wave * (1 - np.cos(host / wave))

    def brackets(self) -> list[Bracket]:
        random, made = self.random, []
        bursts = [0.0, *np.arange(1.0, self.seconds, 1.0), self.seconds]
        for begin in bursts:
            at = begin * 1e9
            for _ in range(20):
                before, after = random.exponential(self.noise) + 300, random.exponential(self.noise) + 300
                shown = int(self.gpu(np.array(at + before))) // self.tick * self.tick
                told = self.tick if random.random() < 0.9 or self.tick == 1 else 0
                made.append(
                    Bracket(
                        self.start + int(np.floor(at)),
                        self.offset // self.tick * self.tick + shown,
                        self.start + int(np.ceil(at + before + after)),
                        told,
                    )
                )
                at += before + after + random.exponential(1000)
        return made

    def errors(self, clock: GpuClock, hosts: np.ndarray) -> tuple[np.ndarray, Times]:
        shown = self.gpu(hosts).astype(np.int64) // self.tick * self.tick
        times = clock.host(self.offset // self.tick * self.tick + shown)
        return np.abs(times.at - self.start - hosts), times


@pytest.mark.long
def test_the_true_error_is_within_the_bound_in_all_cases() -> None:
    useful = 0
    for seed in range(CASES):
        world = World(seed)
        clock = GpuClock(world.brackets())
        hosts = world.random.uniform(0, world.seconds * 1e9, 50)
        wrong, times = world.errors(clock, hosts)
        assert times.known.all(), seed
        assert (wrong <= times.error + 1).all(), (seed, wrong.max(), times.error.max())
        # The best error of a single bracket is half of its width, plus a tick for the resolution of the reading.
        best = clock.narrowest / 2 + world.tick
        useful += bool(np.median(times.error) <= best + 1000 * world.seconds)
        assert not clock.steps, seed
    assert useful >= 0.98 * CASES


def test_before_and_behind_the_brackets_the_bound_widens_with_the_rates_that_are_possible() -> None:
    for seed in range(50):
        world = World(seed)
        clock = GpuClock(world.brackets())
        hosts = np.array([-1e9, world.seconds * 1e9 + 1e9])
        wrong, times = world.errors(clock, hosts)
        assert (wrong <= times.error + 1).all()
    one = GpuClock([Bracket(1000, 5000, 1100, 1)])
    times = one.host([5000, 5000 + 10**9])
    assert times.error[0] <= 52 and abs(times.at[1] - 10**9 - 1050) <= times.error[1] <= 1.01e6
    exact = GpuClock([Bracket(1000, 5000, 1100, 1)], rate=(1.0, 1.0))
    assert exact.host([5000 + 10**9]).error[0] <= 552


def test_a_step_begins_a_segment_and_is_said() -> None:
    brackets = [Bracket(n * 10**8, n * 10**8, n * 10**8 + 1000, 1) for n in range(20)]
    moved = [
        Bracket(b.before + (10**10 if n >= 10 else 0), b.gpu, b.after + (10**10 if n >= 10 else 0), 1)
        for n, b in enumerate(brackets)
    ]
    clock = GpuClock(moved)
    assert clock.steps == [(9 * 10**8 + 1, 10**9)]
    times = clock.host([5 * 10**8, 95 * 10**7, 15 * 10**8])
    assert times.known.tolist() == [True, False, True]
    assert abs(times.at[0] - 5 * 10**8) <= 1000 and abs(times.at[2] - 115 * 10**8) <= 1000
    # A GPU clock that was set back shows the same time twice, and nobody can know which of the two a reading is.
    back = [
        Bracket(b.before, b.gpu - (5 * 10**8 if n >= 10 else 0), b.after, 1) for n, b in enumerate(brackets)
    ]
    clock = GpuClock(back)
    assert len(clock.steps) == 1 and not clock.host([7 * 10**8]).known[0]


def test_a_small_step_is_bounded_from_both_sides() -> None:
    brackets = [
        Bracket(n * 10**8 + (20_000 if n > 9 else 0), n * 10**8, n * 10**8 + 20_500, 1) for n in range(20)
    ]
    brackets = [Bracket(b.before, b.gpu, b.before + 500, 1) for b in brackets]
    clock = GpuClock(brackets)
    assert len(clock.steps) == 1
    times = clock.host([95 * 10**7])
    assert (
        times.known[0]
        and times.at[0] - times.error[0] <= 95 * 10**7 + 250 <= times.at[0] + times.error[0] + 20_000
    )
    assert 9_000 <= times.error[0] <= 100_000


def test_nothing_known_and_nonsense() -> None:
    assert GpuClock([]).host([1, 2]).error.tolist() == [UNKNOWN] * 2
    assert (
        not GpuClock([Bracket(10, 5, 3, 0), Bracket(-1, 5, 3, 0), Bracket(1, 2**63, 2, 0)])
        .host([1])
        .known.any()
    )
    assert GpuClock.same().host([7]).at.tolist() == [7] and GpuClock.same().host([7]).error.tolist() == [0]
    assert GpuClock([Bracket(0, 0, 10, 1)]).host([]).at.shape == (0,)
    assert RATE[0] < 1 < RATE[1]


def test_very_many_brackets_take_little_time() -> None:
    random = np.random.default_rng(1)
    at = np.cumsum(random.integers(10_000, 60_000_000, 100_000))
    begin = time.perf_counter()
    clock = GpuClock([Bracket(int(t), int(t) + 500, int(t) + 1000, 32) for t in at])
    times = clock.host(random.integers(int(at[0]), int(at[-1]), 1_000_000))
    assert times.known.all() and np.median(times.error) < 1000
    assert time.perf_counter() - begin < 30


@pytest.mark.filterwarnings("error")
def test_false_records_give_times_without_a_warning() -> None:
    records = [1, 0, 1], [-1, -1, -1], [1, 2**63 - 1, 0]
    assert len(SmClock(*records).gpu(*records).at) == 3


@pytest.mark.parametrize(
    ("readings", "tick"),
    [
        ([0, 1024, 4096], 1024),
        ([0, 992, 2016], 1024),
        ([5], 0),
        ([], 0),
        ([3, 4, 9], 1),
        ([-(2**63), 2**62], 1 << 40),
    ],
)
def test_the_tick_is_estimated_from_what_was_read(readings: list[int], tick: int) -> None:
    assert estimated_tick(np.array(readings, np.int64)) == tick


def exits(seed: int, changes: bool) -> tuple[np.ndarray, ...]:
    """Return records of some multiprocessors: sm, cycles and timer; the tick; the true times."""
    random = np.random.default_rng(seed)
    tick = int(random.choice([32, 1000, 1024]))
    parts = []
    for sm in range(2):
        span = tick * int(random.choice([40, 400] if changes else [3, 40, 400]))
        true = np.sort(
            random.uniform(0, span, int(random.choice([2000, 5000] if changes else [5, 300, 2000])))
        )
        mhz = random.uniform(1000, 2000)
        cycles = true * mhz / 1000
        if changes:
            when = random.uniform(0.25, 0.75) * span
            cycles += np.maximum(true - when, 0) * float(random.choice([-0.3, -0.05, 0.01, 0.2])) * mhz / 1000
        cycles = np.floor(cycles).astype(np.int64) + int(random.integers(0, 2**40))
        base = 10**18 // tick * tick
        timer = true.astype(np.int64) // tick * tick + base
        parts.append((np.full(len(true), sm), cycles, timer, true, np.full(len(true), tick)))
    sm, cycles, timer, true, ticks = (np.concatenate(part) for part in zip(*parts, strict=True))
    return sm, cycles, timer, true, ticks


@pytest.mark.parametrize("changes", [False, True])
def test_exits_resolve_finer_than_the_timer_counts(changes: bool) -> None:
    finer = 0
    for seed in range(200):
        sm, cycles, timer, true, ticks = exits(seed, changes)
        clock = SmClock(sm, cycles, timer, tick=int(ticks[0]) if seed % 2 else 0)
        times = clock.gpu(sm, cycles, timer)
        wrong = np.abs(times.at - timer[0] - true + true[0] // ticks[0] * ticks[0])
        assert (wrong <= times.error + 1.5).all(), (seed, (wrong - times.error).max())
        assert (times.error <= clock.tick / 2 + 1).all()
        finer += bool(np.median(times.error) < ticks[0] / 8)
    assert finer > (30 if changes else 100)

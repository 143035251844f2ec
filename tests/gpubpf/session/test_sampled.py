"""Estimates from sampled blocks: over many seeds they are right on average, and as far off as their standard errors say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gpubpf.ebpf.maps import GROUPS
from gpubpf.ebpf.sampling import Sampling, hashes
from gpubpf.session.sampled import Estimate, Sample

SEEDS = range(100)
BLOCKS, LAUNCHES = 500, 8
# What each block does in each launch: uneven over the blocks, the same pattern in each launch, and a part that differs.
WORK = (10 + np.arange(BLOCKS) % 10 * 7) * np.ones((LAUNCHES, 1)) + np.random.default_rng(1).integers(
    0, 30, (LAUNCHES, BLOCKS)
)
OTHER = 3 * WORK + np.random.default_rng(2).integers(0, 50, WORK.shape)


def drawn(
    one_in: int, seed: int, groups: int = GROUPS, known: bool = True
) -> tuple[Sample, np.ndarray, np.ndarray]:
    """The sample with this seed, and the sums of WORK and OTHER by group."""
    sampling = Sampling("block", one_in, seed)
    of = np.array([hashes(np.arange(BLOCKS), launch, seed) for launch in range(1, LAUNCHES + 1)])
    there = of <= sampling.limit
    chosen = np.bincount(of[there] % GROUPS, minlength=GROUPS)
    sums = (np.bincount(of[there] % groups, values[there], groups) for values in (WORK, OTHER))
    return Sample(sampling, WORK.size if known else None, chosen), *sums


@pytest.mark.parametrize("known", [True, False], ids=["all blocks ended", "some run"])
@pytest.mark.parametrize("groups", [16, GROUPS])
@pytest.mark.parametrize("one_in", [4, 32])
def test_the_standard_error_is_that_of_the_estimates(one_in, groups, known):
    truth, found = float(WORK.sum()), []
    for seed in SEEDS:
        sample, work, _ = drawn(one_in, seed, groups, known)
        found.append(sample.total(work))
    off = np.array([one.value - truth for one in found])
    errors = np.array([one.error for one in found])
    real = math.sqrt(float((off**2).mean()))
    assert 0.8 < math.sqrt(float((errors**2).mean())) / real < 1.25  # 100 draws tell a deviation to 7 %
    assert abs(off.mean()) < 3 * real / math.sqrt(len(SEEDS))
    assert 0.5 < float((np.abs(off) < errors).mean()) < 0.86  # 68 % of a normal distribution, to 5 %


def test_few_groups_have_the_right_error_on_average():
    """Their sums deviate less from a mean to which they themselves contribute much."""
    ratios = [
        np.square(
            [drawn(8, seed, groups)[0].total(drawn(8, seed, groups)[1]).error for seed in range(400)]
        ).mean()
        / np.square([drawn(8, seed)[0].total(drawn(8, seed)[1]).error for seed in range(400)]).mean()
        for groups in (2, 4)
    ]
    assert ratios == [pytest.approx(1, abs=0.25)] * 2  # 400 draws tell the first to 7 %


def test_the_error_shrinks_with_the_root_of_the_sample():
    def error(one_in: int) -> float:
        samples = [drawn(one_in, seed) for seed in SEEDS]
        return math.sqrt(float(np.mean([sample.total(work).error ** 2 for sample, work, _ in samples])))

    for one_in in (2, 8, 32):
        expected = math.sqrt((4 * one_in - 1) / (one_in - 1))  # n is a quarter; 1 - n/M changes, too
        assert error(4 * one_in) / error(one_in) == pytest.approx(expected, rel=0.1)


def test_the_error_of_a_ratio():
    truth = float(OTHER.sum() / WORK.sum())
    off, errors = [], []
    for seed in SEEDS:
        sample, work, other = drawn(16, seed)
        off.append(other.sum() / work.sum() - truth)
        errors.append(sample.error_of_ratio(other, work))
    real = math.sqrt(float(np.mean(np.square(off))))
    assert 0.8 < math.sqrt(float(np.mean(np.square(errors)))) / real < 1.25


def test_blocks_that_do_the_same_are_known_exactly():
    sample, _, _ = drawn(8, 3)
    total = sample.total(sample.chosen * 12)
    assert (total.value, total.error) == (12 * WORK.size, pytest.approx(0, abs=1e-6))


def test_every_block_is_no_estimate():
    sample, work, other = drawn(1, 3)
    assert sample.total(work) == Estimate(int(WORK.sum()), 0.0)
    assert sample.error_of_ratio(other, work) == 0.0


def test_what_is_unknown_is_not_guessed():
    sampling, chosen = Sampling("block", 8, 0), np.zeros(GROUPS, np.int64)
    none = Sample(sampling, 100, chosen)
    assert none.total(chosen) == Estimate(0, None)
    one = Sample(sampling, 100, np.eye(1, GROUPS, 5, dtype=np.int64)[0])
    assert one.total(one.chosen * 7) == Estimate(700, None)
    assert one.error_of_ratio(chosen, chosen) is None
    many = Sample(sampling, 10, chosen + 1)  # more than there can be
    assert many.total(chosen + 1).error is None
    assert "+- unknown" in one.total(one.chosen * 7).text("loads")


@pytest.mark.parametrize("one_in", [4, 32])
def test_the_standard_error_of_an_interval(one_in):
    """A reading in the midst of a launch: units whose number is even have done a third of their work in it, others nothing."""
    first = np.where(np.arange(BLOCKS) % 2, 0, WORK[0] // 3)
    later = WORK[0] - first  # the other launches are in the next interval, too
    truth, found = float(later.sum() + WORK[1:].sum()), []
    for seed in SEEDS:
        of = hashes(np.arange(BLOCKS), 1, seed)
        there = of <= Sampling("block", one_in, seed).limit
        chosen = np.bincount(of[there] % GROUPS, minlength=GROUPS)
        sums = np.bincount(of[there] % GROUPS, first[there], GROUPS)
        whole, work, _ = drawn(one_in, seed)
        before = Sample(whole.sampling, None, chosen)
        interval = whole.since(before)
        assert interval.units is None and interval.count == whole.count - before.count
        found.append(interval.total(work - sums))
        assert before.total(sums).value + found[-1].value == pytest.approx(one_in * work.sum(), abs=2)
    off = np.array([one.value - truth for one in found])
    errors = np.array([one.error for one in found])
    real = math.sqrt(float((off**2).mean()))
    assert 0.8 < math.sqrt(float((errors**2).mean())) / real < 1.25
    assert abs(off.mean()) < 3 * real / math.sqrt(len(SEEDS))


def test_an_interval_between_known_numbers_of_units():
    whole, _, _ = drawn(4, 1)
    before = Sample(whole.sampling, 500, whole.chosen // 2)
    assert whole.since(None) is whole
    assert whole.since(before).units == WORK.size - 500
    assert whole.since(before).count == whole.count - before.count


def test_while_launches_run_the_number_of_units_is_unknown():
    early, work, _ = drawn(4, 1)
    running = Sample(early.sampling, None, 3 * early.chosen)
    assert running.total(3 * work).value == round(4 * 3 * work.sum())

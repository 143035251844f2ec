"""Which blocks a launch chooses: at random, one in N, independently in each launch, and the same for the same seed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gpubpf.ebpf.sampling import Sampling, hashes, of_options
from gpubpf.show.parsed import SamplingOptions

BLOCKS, LAUNCHES = 4096, 64


def chosen(one_in: int, seed: int) -> np.ndarray:
    """Whether each launch (row) chooses each block."""
    limit = Sampling("block", one_in, seed).limit
    return np.array([hashes(np.arange(BLOCKS), launch, seed) <= limit for launch in range(1, LAUNCHES + 1)])


@pytest.mark.parametrize("one_in", [1, 2, 16, 256])
@pytest.mark.parametrize("seed", [0, 1, 0xFFFFFFFF])
def test_one_in_n_is_chosen(one_in, seed):
    """Of all blocks, of each launch, and of each block over all launches, within what chance allows."""
    found, share = chosen(one_in, seed), 1 / one_in
    for axis, many in ((None, found.size), (0, LAUNCHES), (1, BLOCKS)):
        deviation = math.sqrt(many * share * (1 - share))
        z = (found.sum(axis=axis) - many * share) / (deviation or 1)
        assert np.abs(z).max() <= (0 if one_in == 1 else 3.5 if axis is None else 8)
        if axis is not None and one_in > 1:
            assert 0.7 < float(np.mean(z**2)) < 1.35  # the variance of a binomial distribution


@pytest.mark.parametrize("one_in", [2, 16])
def test_launches_and_neighbours_choose_independently(one_in):
    found, share = chosen(one_in, 5).astype(float) - 1 / one_in, 1 / one_in
    for a, b in (
        (found[1:], found[:-1]),
        (found[:, 1:], found[:, :-1]),
        (found[:, 32:], found[:, :-32]),
        (found[1:, 1:], found[:-1, :-1]),
        (found, chosen(one_in, 6) - share),
    ):
        correlation = float((a * b).mean()) / (share * (1 - share))
        assert abs(correlation) < 4 / math.sqrt(a.size)


def test_the_groups_of_the_chosen_are_even():
    of = hashes(np.arange(1 << 18), 3, 9)
    groups = np.bincount(of[of <= Sampling("block", 16, 9).limit] % 256, minlength=256)
    mean = groups.mean()
    assert 0.7 < float(((groups - mean) ** 2).mean() / mean) < 1.35


def test_the_command_line_says_what_is_chosen():
    assert of_options(SamplingOptions()) is None
    assert of_options(SamplingOptions(blocks=4, seed=7)) == Sampling("block", 4, 7)
    assert of_options(SamplingOptions(warps=8, seed=0)) == Sampling("warp", 8, 0)
    assert len({of_options(SamplingOptions(warps=8)).seed for _ in range(4)}) > 1
    assert Sampling("block", 1, 2).parameter == b"\xff\xff\xff\xff\2\0\0\0"
    assert Sampling("block", 65536, 2).limit == 65535

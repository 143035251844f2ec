"""Everything that threadhist prints of generated counts: text that fits a terminal, valid JSON and CSV."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gpubpf.session.launch_shape import Shape
from gpubpf.session.results import Instance
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf.threads.thread_counts import ThreadCounts
from gpubpf_text import COMMS, KERNELS, check, number, opened, seeds

GRIDS = ((1, 1, 1), (3, 1, 1), (5, 2, 1), (20, 1, 3), (2**10, 1, 1))
BLOCKS = ((1, 1, 1), (7, 1, 1), (32, 1, 1), (33, 1, 1), (8, 4, 2), (1024, 1, 1))
BY = ("thread", "lane", "warp", "block")
LOOKS = ((), ("-v",), ("--json",), ("--csv",), ("--top", "3"), ("-T", "--top", "1"))


def counts(rng: random.Random, grid: tuple[int, int, int], block: tuple[int, int, int]) -> ThreadCounts:
    shape = Shape(grid, block)
    most = number(rng) // shape.threads  # their sum is in 64 bits
    work = np.full(shape.threads, most, np.uint64)
    how = rng.randrange(5)
    if how == 0:
        work[:] = 0
        work[rng.randrange(shape.threads)] = most
    elif how == 1:
        work[:] = np.random.default_rng(rng.random().hex().encode()[0]).integers(
            0, most, shape.threads, np.uint64, True
        )
    elif how == 2:
        work[::32] = most // 2
    selected = None
    if rng.random() < 0.2:
        selected = np.random.default_rng(1).random(shape.threads) < rng.choice((0.0, 0.5))
    registers = rng.choice(((None, None), (10, 32)))
    instance = Instance(
        *(
            rng.choice((1, 4194304)),
            rng.choice(COMMS),
            rng.choice((0, 0, 7)),
            rng.choice([name for name in KERNELS if name]),
        ),
        *(grid, block, 3, None, b"", 0, *registers),  # type: ignore[arg-type]
    )
    runs = np.full(shape.threads, number(rng) // shape.threads, np.uint64)
    wanted = shape.threads if selected is None else int(selected.sum())
    return ThreadCounts(instance, shape, max(number(rng, 10**10), 1), runs, work, selected, wanted)


@pytest.mark.every(2)
@pytest.mark.parametrize("seed", seeds(60))
def test_a_generated_report(seed: int) -> None:
    rng = random.Random(seed)
    small = [(grid, block) for grid in GRIDS for block in BLOCKS if Shape(grid, block).threads <= 40_000]
    found = [counts(rng, *rng.choice(small)) for _ in range(rng.choice((0, 1, 1, 2, 12)))]
    for look in LOOKS:
        by = rng.choice(BY)
        tool, args, page, results = opened("threadhist", "--by", by, *look)
        tool.report(found, OwnerColumns(rng.random() < 0.3), args, results)
        lines = check(page, args, shares=False)
        if not args.json and not args.csv and found:
            assert sum(line.endswith(f"per {by}") for line in lines) >= min(len(found), 8)


@pytest.mark.parametrize("by", BY)
def test_a_million_threads(by: str) -> None:
    one = counts(random.Random(3), (2**10, 1, 1), (1024, 1, 1))
    tool, args, page, results = opened("threadhist", "--by", by, "--top", "2")
    tool.report([one], OwnerColumns(), args, results)
    assert any("1,048,576 threads" in line for line in check(page, args, shares=False))


@pytest.mark.parametrize("by", BY)
def test_the_sums_of_all_groups_are_those_of_the_threads(by: str) -> None:
    rng = random.Random(4)
    for grid in GRIDS[:4]:
        one = counts(rng, grid, rng.choice(BLOCKS))
        groups, threads = one.grouped(by), one.grouped("thread")  # type: ignore[arg-type]
        assert int(groups.work.sum()) == int(threads.work.sum())
        assert int(groups.runs.sum()) == int(threads.runs.sum()) and groups.threads.sum() == len(threads)

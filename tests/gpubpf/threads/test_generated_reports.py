"""Everything that threadhist prints of generated counts: text that fits a terminal, valid JSON and CSV."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from gpubpf.records.launch_shape import Shape
from gpubpf.records.results import Instance
from gpubpf.show import cli
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf.threads.thread_counts import ThreadCounts
from gpubpf.threads.thread_records import ThreadViews
from gpubpf_properties import LARGEST, generated, lanes, numbers, seldom
from gpubpf_text import COMMS, KERNELS, PIDS, check, opened

GRIDS = ((1, 1, 1), (3, 1, 1), (5, 2, 1), (20, 1, 3), (2**10, 1, 1))
BLOCKS = ((1, 1, 1), (7, 1, 1), (32, 1, 1), (33, 1, 1), (8, 4, 2), (1024, 1, 1))
BY = ("thread", "lane", "warp", "block")
LOOKS = ((), ("-v",), ("--json",), ("--csv",), ("--top", "3"), ("-T", "--top", "1"))


@st.composite
def counts(draw: st.DrawFn, grid: tuple[int, int, int], block: tuple[int, int, int]) -> ThreadCounts:
    shape = Shape(grid, block)
    most = LARGEST // shape.threads  # their sum is in 64 bits
    selected = None
    if draw(seldom):
        selected = np.random.default_rng(1).random(shape.threads) < draw(st.sampled_from((0.0, 0.5)))
    registers = draw(st.sampled_from(((None, None), (10, 32))))
    owner = (
        draw(st.sampled_from(PIDS[:2])),
        draw(st.sampled_from(COMMS)),
        draw(st.sampled_from((0, 7))),
        draw(st.sampled_from([name for name in KERNELS if name])),
    )
    instance = Instance(*owner, grid, block, 3, None, b"", 0, *registers)  # type: ignore[arg-type]
    launches = draw(st.integers(1, 10**10))
    runs = np.full(shape.threads, draw(numbers(most)), np.uint64)
    wanted = shape.threads if selected is None else int(selected.sum())
    return ThreadCounts(instance, shape, launches, runs, draw(lanes(shape.threads, most)), selected, wanted)


SHAPES = [(grid, block) for grid in GRIDS for block in BLOCKS if Shape(grid, block).threads <= 40_000]
ANY = st.sampled_from(SHAPES).flatmap(lambda shape: counts(*shape))
SEVERAL = st.sampled_from((0, 1, 1, 2, 12)).flatmap(lambda n: st.tuples(*[ANY] * n))


@generated(30, found=SEVERAL, ways=st.tuples(*(st.sampled_from(BY) for _ in LOOKS)), asked=seldom)
def test_a_generated_report(found: Any, ways: tuple[str, ...], asked: bool) -> None:
    for look, by in zip(LOOKS, ways, strict=True):
        tool, args, page, results = opened("threadhist", "--by", by, *look)
        tool.report(list(found), OwnerColumns(asked), cli.group(ThreadViews, args), results)
        lines = check(page, args, shares=False)
        if not args.json and not args.csv and found:
            assert sum(line.endswith(f"per {by}") for line in lines) >= min(len(found), 8)


@pytest.mark.parametrize("by", BY)
@generated(2, one=counts((2**10, 1, 1), (1024, 1, 1)))
def test_a_million_threads(by: str, one: ThreadCounts) -> None:
    tool, args, page, results = opened("threadhist", "--by", by, "--top", "2")
    tool.report([one], OwnerColumns(), cli.group(ThreadViews, args), results)
    lines = check(page, args, shares=False)
    assert one.selected is not None or any("1,048,576 threads" in line for line in lines)


@pytest.mark.parametrize("by", BY)
@generated(10, one=ANY)
def test_the_sums_of_all_groups_are_those_of_the_threads(by: str, one: ThreadCounts) -> None:
    groups, threads = one.grouped(by), one.grouped("thread")  # type: ignore[arg-type]
    assert int(groups.work.sum()) == int(threads.work.sum())
    assert int(groups.runs.sum()) == int(threads.runs.sum()) and groups.threads.sum() == len(threads)

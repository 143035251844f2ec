"""The text of threadhist over generated counts: it never fails, fits a terminal, and says something."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpubpf.ebpf.maps import GROUPS, SAMPLED
from gpubpf.ebpf.sampling import Sampling
from gpubpf.records.launch_shape import Shape
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf.show.table import WIDTH
from gpubpf.threads import imbalance, thread_counts
from gpubpf.threads.thread_counts import Reader, ThreadCounts
from gpubpf_properties import generated, noise, rare, rngs

EVERYTHING = ((0, 1 << 31),) * 3
BY = ("thread", "lane", "warp", "block")
BLOCKS = ((1, 1, 1), (3, 1, 1), (5, 2, 1), (20, 1, 3))
SIZES = ((1, 1, 1), (7, 1, 1), (32, 1, 1), (33, 1, 1), (8, 4, 2), (1024, 1, 1))


def counts(grid: tuple[int, int, int], block: tuple[int, int, int], work: Any, **more: Any) -> ThreadCounts:
    shape = Shape(grid, block)
    instance = SimpleNamespace(
        pid=more.get("pid", 1), comm="c" * 15, gpu=0, mangled="_Z1kPf", demangled="k(float*)",
        grid=grid, block_dim=block, registers_before=1, registers_after=None, waits=more.get("waits", False),
    )  # fmt: skip
    values = np.broadcast_to(np.asarray(work, np.uint64), shape.threads).copy()
    selected = more.get("selected")
    wanted = shape.threads if selected is None else int(selected.sum())
    runs = np.full(shape.threads, 3, np.uint64)
    return ThreadCounts(instance, shape, 3, runs, values, selected, wanted)  # type: ignore[arg-type]


def check(by: Any, *all_counts: ThreadCounts, top: int | None = None) -> None:
    for verbose in (False, True):
        lines = list(thread_counts.lines(all_counts, "instructions", by, top, OwnerColumns(), verbose))
        assert lines
        assert max(map(len, lines)) <= WIDTH, max(lines, key=len)
        assert not any("nan" in line or "inf " in line for line in lines)
    for one in all_counts:
        threads = one.grouped("thread")
        said = imbalance.findings(threads, "instructions")
        assert (said or len(threads) == 1) and all(len(sentence) > 10 for sentence in said)


@pytest.mark.parametrize(
    ("work", "mean"),
    [
        ([1] * 64, "mean 1 load per thread"),
        ([2] * 64, "mean 2 loads per thread"),
        ([2] * 63 + [10], "mean 2.1 loads per thread"),
        ([2] * 63 + [3], "mean 2.0 loads per thread"),
        ([1] + [0] * 63, "mean 0.016 loads per thread"),
    ],
)
def test_the_mean(work: list[int], mean: str) -> None:
    one = counts((1, 1, 1), (64, 1, 1), work)
    lines = thread_counts.lines([one], "loads", "thread", None, OwnerColumns(), False)
    assert any(line.endswith(mean) for line in lines)


@pytest.mark.parametrize(
    ("work", "what", "waits", "said"),
    [
        ([2] * 63 + [10], "instructions", True, True),
        ([2] * 63 + [10], "instructions", False, False),
        ([2] * 63 + [10], "stores", True, False),  # a loop that waits does not store
        ([100] * 63 + [101], "instructions", True, False),
    ],
)
def test_uneven_work_may_be_waiting(work: list[int], what: str, waits: bool, said: bool) -> None:
    one = counts((1, 1, 1), (64, 1, 1), work, waits=waits)
    lines = list(thread_counts.lines([one], what, "thread", None, OwnerColumns(), False))
    assert (f"  blocks may wait for each other in loops; those {what} count as work" in lines) is said


def test_without_work_there_is_no_table() -> None:
    one = counts((1, 1, 1), (64, 1, 1), [0] * 64)
    lines = list(thread_counts.lines([one], "loads", "thread", None, OwnerColumns(), False))
    assert lines[-2:] == ["  no thread did any loads", ""] and not any("mean" in line for line in lines)


@generated(100, rng=rngs, source=noise)
def test_generated_counts(rng: random.Random, source: np.random.Generator) -> None:
    grid, block = rng.choice(BLOCKS), rng.choice(SIZES)
    threads = Shape(grid, block).threads
    scale = rng.choice((1, 2, 100, 10**6, 10**12, 10**15))
    work = source.integers(0, scale, threads, endpoint=True)
    how = rng.randrange(6)
    if how == 0:
        work[:] = scale
    elif how == 1:
        work[:] = 0
    elif how == 2:
        work[:] = 0
        work[rng.randrange(threads)] = scale
    elif how == 3:
        work[:] = scale
        work[rng.randrange(threads)] = rng.choice((0, scale // 2, 3 * scale))
    elif how == 4:
        work[:] = np.arange(threads)
    selected = None
    if rare(rng):
        selected = source.random(threads) < rng.choice((0.0, 0.1, 0.9))
    for by in BY:
        check(by, counts(grid, block, work, selected=selected), top=rng.choice((None, 1, 5)))


@pytest.mark.parametrize("work", [0, 1, 10**15])
def test_several_processes(work: int) -> None:
    check("thread", *(counts((3, 1, 1), (7, 1, 1), work, pid=4194000 + n) for n in range(10)))


@pytest.mark.parametrize("sampled", [False, True], ids=["all blocks", "sampled"])
def test_a_launch_that_ends_in_the_last_interval_is_counted(sampled: bool) -> None:
    """An earlier report counted its launch; the last one has the runs and work of its threads."""
    sampling = Sampling("block", 2, 0) if sampled else None
    place = {"process": 1, "pid": 1, "gpu": 0, "mangled": "_Z1kPf", "grid": (2, 1, 1), "block_dim": (3, 1, 1)}
    session: Any = SimpleNamespace(stopped=False)

    def reading(ran: int) -> None:
        """Two launches have begun; in block 1, which is chosen, `ran` of them have ended. Each thread did 5 in each."""
        runs = np.array([0, 0, 0, ran, ran, ran] if sampled else [ran] * 6, np.uint64)
        tallies = np.array([list(zip(runs, 5 * runs, strict=True))], [("runs", "u8"), ("work", "u8")])
        chosen, work = np.zeros((2, GROUPS, 1), np.uint64)
        chosen[3], work[3] = 2, runs[3:].sum() * 5
        arrays = {"tallies": tallies, "groups": work, SAMPLED: chosen}
        found = {
            name: SimpleNamespace(**place, launches=2, idle=False, shape=Shape((2, 1, 1), (3, 1, 1)), array=a)
            for name, a in arrays.items()
        }
        session.instances = lambda name: [found[name]]

    reader = Reader(EVERYTHING, EVERYTHING, since_last=True, sampling=sampling)
    reading(0)
    assert reader.read(session) == []  # none has ended
    reading(1)
    (first,) = reader.read(session)
    reading(2)
    assert reader.read(session) == []  # a later report includes it
    session.stopped = True
    (last,) = reader.read(session)
    assert (first.launches, last.launches) == (2, 0)
    assert first.total_work == last.total_work == 30
    assert last.grouped("thread").work.tolist() == [5] * (3 if sampled else 6)
    assert reader.read(session) == []


@pytest.mark.parametrize("since_last", [False, True])
def test_programs_with_the_same_pid_have_samples_of_their_own(since_last: bool) -> None:
    """A process executed another program with the same kernel. In block 1, which is chosen, each thread did 1,000 or 5 per launch."""
    shape = Shape((2, 1, 1), (3, 1, 1))
    maps: dict[str, list[Any]] = {"tallies": [], "groups": [], SAMPLED: []}
    for process, launches, each in ((1, 100, 1000), (2, 10, 5)):
        runs = np.array([0, 0, 0] + [launches] * 3, np.uint64)
        tallies = np.array([list(zip(runs, each * runs, strict=True))], [("runs", "u8"), ("work", "u8")])
        chosen, work = np.zeros((2, GROUPS, 1), np.uint64)
        chosen[3], work[3] = launches, runs.sum() * each
        place = {"process": process, "context": 1, "pid": 1, "gpu": 0, "mangled": "_Z1kPf"}
        place |= {
            "grid": shape.grid,
            "block_dim": shape.block_dim,
            "shape": shape,
            "launches": launches,
            "idle": True,
        }
        for name, array in (("tallies", tallies), ("groups", work), (SAMPLED, chosen)):
            maps[name].append(SimpleNamespace(**place, array=array))
    session: Any = SimpleNamespace(stopped=True, instances=maps.__getitem__)
    first, second = Reader(EVERYTHING, EVERYTHING, since_last, Sampling("block", 2, 0)).read(session)
    assert (first.total_work, second.total_work) == (100 * 6 * 1000, 10 * 6 * 5)
    assert [one.sampled[0].count for one in (first, second) if one.sampled] == [100, 10]


@pytest.mark.parametrize("block", [64, 40, 3], ids=["whole warps", "a part of a warp", "no whole warp"])
def test_what_lanes_did_together_is_added_to_what_each_did(block: int) -> None:
    shape = Shape((2, 1, 1), (block, 1, 1))
    source, kind = np.random.default_rng(block), [("runs", "u8"), ("work", "u8")]
    own, warps = (np.zeros((1, n), kind) for n in (shape.threads, shape.blocks * shape.warps))
    for cells in (own, warps):
        for field in ("runs", "work"):
            cells[field] = source.integers(0, 100, cells.shape)
    place = {
        "process": 1,
        "context": 2,
        "pid": 1,
        "gpu": 0,
        "mangled": "_Z1kPf",
        "launches": 1,
        "shape": shape,
    }
    place |= {"grid": shape.grid, "block_dim": shape.block_dim}
    elsewhere = SimpleNamespace(**place | {"context": 3}, array=np.ones_like(warps))
    found = {
        "tallies": [SimpleNamespace(**place, array=own)],
        "together": [elsewhere, SimpleNamespace(**place, array=warps)],
    }
    session: Any = SimpleNamespace(stopped=True, instances=found.__getitem__)
    (made,) = Reader(EVERYTHING, EVERYTHING, since_last=False, by_warp=True).read(session)
    for field in ("runs", "work"):
        right = [
            own[field][0, b * block + t] + warps[field][0, b * shape.warps + t // 32]
            for b in range(2)
            for t in range(block)
        ]
        assert getattr(made, field).tolist() == right

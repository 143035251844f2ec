"""How evenly work is spread over the threads of a grid, by thread, lane, warp and block.

Threads, lanes, warps and blocks are numbered as in `records/launch_shape.py`.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from gpubpf.record import Record
from gpubpf.records.launch_shape import By, Shape, unravel
from gpubpf.show import table

FAR_OFF = 0.10  # share of the median; threads or groups that differ more are named
NAMED = 4  # maximum to name individually


class Groups(Record):
    """Threads, lanes, warps or blocks and their work. Arrays have one element for each.

    numbers  int64   number of the thread, warp or block in the grid, or of the lane in its warp
    threads  int64   number of its (selected) threads, at least 1
    runs     uint64  sum over these threads: how often the thread ran the kernel to its end
    work     uint64  sum over these threads: their work
    """

    by: By
    shape: Shape
    numbers: np.ndarray
    threads: np.ndarray
    runs: np.ndarray
    work: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def mean(self) -> float:
        """The mean work."""
        return float(self.work.mean()) if len(self) else 0.0

    @cached_property
    def imbalance(self) -> float:
        """The largest work divided by the mean; 1 if there is no work."""
        return float(self.work.max()) / self.mean if self.mean else 1.0

    def name(self, place: int) -> str:
        """Return the name of the group at this index of the arrays."""
        return self.shape.name(self.by, int(self.numbers[place]))

    def labels(self, place: int) -> dict[str, str]:
        """Return the group's index as table columns: ``{"BLOCK": "2", "THREAD": "(4,1)"}``."""
        block, own = self.shape.place(self.by, int(self.numbers[place]))
        label = {"thread": self.shape.thread_index, "block": self.shape.block_index}.get(self.by, str)
        outer = self.by in ("thread", "warp") and self.shape.blocks > 1
        return ({"BLOCK": self.shape.block_index(block)} if outer else {}) | {self.by.upper(): label(own)}

    def indices(self, places: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the groups' indices as columns, which do not depend on the grid: of a warp, block x, y, z, and its number."""
        numbers = self.numbers[places]
        if self.by == "thread":
            return self.shape.coordinates(numbers)
        if self.by == "lane":
            return (numbers,)
        block, own = np.divmod(numbers, self.shape.warps) if self.by == "warp" else (numbers, None)
        return (*unravel(block, self.shape.grid), *(() if own is None else (own,)))

    def alike(self) -> list[tuple[int, int]]:
        """Return the first and last index of each span of neighbours in a block that have equal runs and work."""
        if not len(self):
            return []
        own = self.shape.block_size if self.by == "thread" else self.shape.warps if self.by == "warp" else 0
        same = np.diff(self.numbers) == 1
        if own:
            same &= self.numbers[1:] % own != 0
        for values in (self.threads, self.runs, self.work):
            same &= values[1:] == values[:-1]
        begins = np.flatnonzero(np.concatenate([[True], ~same]))
        ends = np.concatenate([begins[1:], [len(self)]]) - 1
        return list(zip(begins.tolist(), ends.tolist(), strict=True))

    def largest(self, top: int | None) -> np.ndarray:
        """Return the indices of the `top` groups with the most work, largest first. Without `top`: all, in grid order."""
        if top is None:
            return np.arange(len(self))
        places = np.arange(len(self))
        if top < len(self) // 8:  # no need to sort all of them
            least = np.partition(self.work, len(self) - top)[len(self) - top]
            above = np.flatnonzero(self.work > least)
            places = np.concatenate([above, np.flatnonzero(self.work == least)[: top - len(above)]])
        return places[np.lexsort((places, ~self.work[places]))[:top]]


def group(
    shape: Shape, runs: np.ndarray, work: np.ndarray, by: By = "thread", selected: np.ndarray | None = None
) -> Groups:
    """Sum the runs and work of the selected threads by thread, lane, warp or block. Arrays have one element per thread of the grid."""
    if by == "thread":
        numbers = np.arange(shape.threads) if selected is None else np.flatnonzero(selected)
        if selected is not None:
            runs, work = runs[selected], work[selected]
        return Groups(by, shape, numbers, np.ones(len(numbers), dtype=np.int64), runs, work)
    taking_part = np.ones(shape.threads, dtype=np.uint64) if selected is None else selected.astype(np.uint64)
    if selected is not None:
        runs, work = runs * taking_part, work * taking_part
    threads = _fold(shape, taking_part, by).astype(np.int64)
    there = np.flatnonzero(threads)
    return Groups(
        by, shape, there, threads[there], _fold(shape, runs, by)[there], _fold(shape, work, by)[there]
    )


def _fold(shape: Shape, values: np.ndarray, by: By) -> np.ndarray:
    table = values.reshape(shape.blocks, shape.block_size)
    if by == "block":
        return table.sum(axis=1)
    if by == "warp":
        return np.add.reduceat(table, np.arange(0, shape.block_size, shape.warp), axis=1).ravel()
    places = np.zeros(shape.warps * shape.warp, dtype=values.dtype)
    places[: shape.block_size] = table.sum(axis=0)
    return places.reshape(shape.warps, shape.warp).sum(axis=0)


def idle_lanes(shape: Shape, work: np.ndarray) -> tuple[float, float]:
    """Return two shares of lanes that are idle while their warp works: lanes without a thread, and lanes whose thread is done.

    A warp is assumed to work as long as its busiest lane, so the second share is a lower bound if threads diverge. Without any
    work, both are 0.
    """
    table = work.reshape(shape.blocks, shape.block_size)
    busiest = np.maximum.reduceat(table, np.arange(0, shape.block_size, shape.warp), axis=1).astype(
        np.float64
    )
    lanes = np.full(shape.warps, shape.warp)
    lanes[-1] = shape.block_size - shape.warp * (shape.warps - 1)
    whole = shape.warp * float(busiest.sum())
    if not whole:
        return 0.0, 0.0
    with_thread = float((busiest * lanes).sum())
    return 1 - with_thread / whole, (with_thread - float(work.sum(dtype=np.float64))) / whole


def idle_findings(shape: Shape, work: np.ndarray) -> list[str]:
    """Return sentences about idle lanes, if there are any, with advice only if it is certain."""
    empty, waiting = idle_lanes(shape, work)
    parts = [f"{_percent_of_all(empty)} have no thread"] if empty >= 0.01 else []
    parts += (
        [f"{_percent_of_all(waiting)} wait for the busiest lane of their {shape.warp_word}"]
        if waiting >= 0.01
        else []
    )
    said = [f"idle lanes: {', '.join(parts)}"] if parts else []
    if empty >= 0.05:
        size = shape.block_size
        said.append(
            f"blocks of {size} leave {-size % shape.warp} of a {shape.warp_word}'s {shape.warp} lanes empty:"
            f" use a multiple of {shape.warp}"
        )
    return said


def findings(found: Groups, what: str, sampled: bool = False) -> list[str]:
    """Return up to three sentences about which threads or groups do more or less than the others.

    For threads, the sentences name blocks, lanes or warps if these account for nearly all of the difference. For other groups, they
    name the groups themselves.

    what: the unit of work in the plural.
    sampled: there may be groups that were not measured.
    """
    by, work = found.shape.word(found.by), found.work.astype(np.float64)
    if len(work) and not found.runs.any():
        return [f"no {by} ran the kernel to its end"]
    if len(work) == 0 or not work.any():
        return [f"no {by} did any {what}"]
    if len(work) == 1:
        return []  # a single group cannot be compared with others
    fewest, largest = int(found.threads.min()), int(found.threads.max())
    if fewest < largest and not _far_off(work / found.threads).any():
        return [f"the {by}s' work differs because they have {fewest:,} to {largest:,} threads"]
    groups, each = found, work
    if found.by == "thread":
        groups = _level(found, work)
        each = groups.work.astype(np.float64) / groups.threads
    median, far = float(np.median(each)), _far_off(each)
    others = each[~far]
    more = float(work.max()) / float(work.mean()) - 1
    even = f"the work is even: the busiest {by} did {_percent(more)} more than the mean"
    if not more:
        who = f"every {'sampled ' if sampled else ''}{by}"
        return [f"the work is even: {who} did the same ({counted(int(found.work[0]), what)})"]
    if not far.any():
        return [even]
    if 2 * len(others) < len(each):  # most groups are far off: name the two extremes
        most, least = (
            f"{_who(groups, np.flatnonzero(each == level))} did {_times(level / float(each.mean()))}"
            for level in (float(each.max()), float(each.min()))
        )
        return [f"the work is uneven: {most} the mean, {least}"]
    usual = float(others.mean())
    said = []
    for side in (far & (each > median), far & (each < median)):
        if side.any():
            who = _who(groups, np.flatnonzero(side))
            said.append((float(np.abs(each[side] - usual).sum()), f"{who} {_did(each[side], usual)}"))
    # A few threads that do less, such as a grid's last threads without elements, do not delay any others.
    return [even] * (more < 0.01) + [sentence for _, sentence in sorted(said, reverse=True)]


def is_uneven(found: Groups) -> bool:
    """Return whether the threads of some groups did far more or less than those of the others."""
    return bool(_far_off(found.work / found.threads).any())


def _far_off(each: np.ndarray) -> np.ndarray:
    """Return a mask of the values that differ from the median by more than FAR_OFF."""
    median = float(np.median(each))
    return np.abs(each - median) > FAR_OFF * median


def _level(threads: Groups, work: np.ndarray) -> Groups:
    """Return the coarsest grouping that accounts for nearly all of the differences between threads."""
    deviation = float(((work - work.mean()) ** 2).sum())
    if deviation and len(threads) == threads.shape.threads:
        for by in ("block", "lane", "warp"):
            groups = group(threads.shape, threads.runs, threads.work, by)
            if not 1 < len(groups) <= len(threads) // 2:
                continue
            means = groups.work.astype(np.float64) / groups.threads
            if float((groups.threads * (means - work.mean()) ** 2).sum()) >= 0.98 * deviation:
                return groups
    return threads


def _who(groups: Groups, places: np.ndarray) -> str:
    """Return ``thread 4``, ``warps 1 and 3``, ``threads 19 to 31 of block 0``, ``warp 2 of each block``, ``every 2nd lane (0 to 30)``,
    or ``12 of 1,024 threads``."""
    shape, by, word = groups.shape, groups.by, groups.shape.word(groups.by)
    numbers = groups.numbers[places]
    if len(numbers) == 1:
        return shape.name(by, int(numbers[0]))
    per_block = {"thread": shape.block_size, "warp": shape.warps}.get(by)
    label = {"thread": shape.thread_index, "block": shape.block_index}.get(by, str)
    block = int(numbers[0]) // per_block if per_block else 0
    if per_block and block != int(numbers[-1]) // per_block:
        inside = np.unique(numbers % per_block).astype(int).tolist()
        if len(inside) * shape.blocks == len(numbers):
            *names, last = map(label, inside[:NAMED])
            if len(inside) == 1:
                return f"{word} {last} of each block"
            if len(inside) <= NAMED:
                return f"{word}s {', '.join(names)} and {last} of each block"
            if inside[-1] - inside[0] < len(inside):
                return f"{word}s {label(inside[0])} to {label(inside[-1])} of each block"
        return f"{len(numbers):,} of {len(groups):,} {word}s"
    own = [
        int(number) - block * per_block if per_block else int(number)
        for number in (*numbers[:NAMED], numbers[-1])
    ]
    where = f" of block {shape.block_index(block)}" if per_block and shape.blocks > 1 else ""
    if len(numbers) <= NAMED:
        names = [label(number) for number in own[:-1]]
        return f"{word}s {', '.join(names[:-1])} and {names[-1]}{where}"
    steps = np.unique(np.diff(numbers.astype(np.int64)))
    if len(steps) == 1 and steps[0] == 1:
        return f"{word}s {label(own[0])} to {label(own[-1])}{where}"
    if len(steps) == 1 and per_block is None:
        return f"every {table.ordinal(int(steps[0]))} {word} ({label(own[0])} to {label(own[-1])})"
    return f"{len(numbers):,} of {len(groups):,} {word}s"


def _did(each: np.ndarray, usual: float) -> str:
    if not usual:
        return "did all of it"
    low, high = float(each.min()) / usual, float(each.max()) / usual
    if high == 0:
        return "did nothing"
    if low < 1:
        less, least = _percent_of_all(1 - low), _percent_of_all(1 - high)
        return (
            f"did {less} less than the others"
            if less == least
            else f"did {least} to {less} less than the others"
        )
    if high < 2:
        more, most = _percent(low - 1), _percent(high - 1)
        return (
            f"did {most} more than the others"
            if more == most
            else f"did {more} to {most} more than the others"
        )
    few, many = _times(low), _times(high)
    return (
        f"did {many} the work of the others" if few == many else f"did {few} to {many} the work of the others"
    )


def counted(number: int, what: str) -> str:
    """Return ``1 store`` or ``23 stores``. `what`: the unit of work in the plural."""
    return table.count(number, what.removesuffix("s"))


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %" if share >= 0.01 or share == 0 else "less than 1 %"


def _percent_of_all(share: float) -> str:
    """Return a percentage that is 100 only if nothing is missing."""
    return "more than 99 %" if 0.995 <= share < 1 else _percent(share)


def _times(ratio: float) -> str:
    """Return ``2.5x`` or ``1,234x``."""
    if ratio < 0.05:
        return "almost nothing" if ratio else "nothing"
    return f"{ratio:.1f}x" if ratio < 99.95 else f"{ratio:,.0f}x"

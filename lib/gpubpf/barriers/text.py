"""barrierlate's results for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from gpubpf import names
from gpubpf.barriers.waits import by_line, line_of
from gpubpf.show import table

if TYPE_CHECKING:
    from gpubpf.barriers.waits import Barrier, Times
    from gpubpf.show.owner_columns import OwnerColumns

WORST = 3  # barriers to explain
LEAST_NS = 100  # mean wait from which on a barrier is explained; waits below it are what starting warps one by one costs
OFTEN = 0.75  # share of the rounds in which one warp is last, from which on it is named; the same share of other waits must be long
LEAST_ROUNDS = 4  # rounds from which on that is not chance


def lines(found: Sequence[Barrier], top: int | None, full: bool, owners: OwnerColumns) -> Iterator[str]:
    """Yield the report: a row for each barrier, then a sentence about those for which warps wait long.

    Without `full`, the barriers of one source line share a row.

    top: the maximum number of rows. full: a row for each instruction, and whole kernel names.
    """
    each = found
    if not full:
        found = by_line(found)
    if not found:
        yield "no warp waited at a barrier in an instrumented kernel"
        return
    owners.see(found)
    labels = names.labels((one.mangled for one in found), full=full)
    cells = [_cells(one, owners, labels) for one in found[:top]]
    yield from table.within(cells, left=("COMM", "KERNEL", "SOURCE"), drop=("NO", "WAIT", "MAX"))
    told = False
    for one in found[: top or WORST][:WORST]:
        # The copies together may have no warp that is always late, although one of them has.
        alike = [] if full else [other for other in each if line_of(other) == line_of(one)]
        if sentence := next(filter(None, map(_late, (one, *alike))), ""):
            if not told:
                yield ""
                told = True
            yield from table.wrap(sentence)


def _cells(one: Barrier, owners: OwnerColumns, labels: Mapping[str, str]) -> dict[str, str]:
    worst = next(iter(one.last.items()), None)
    return owners.cells(one) | {
        "SOURCE": one.source,
        "KERNEL": labels[one.mangled],
        "NO": "-" if one.barrier is None else str(one.barrier),
        "WAITS": f"{one.waits.count:,}",
        "LOST": "unknown" if one.cycle is None else table.duration(one.waits.total * one.cycle),
        "WAIT": _mean(one.waits, one.cycle),
        "SKEW": _mean(one.skews, one.cycle),
        "MAX": "-"
        if one.cycle is None or not one.skews.count
        else table.duration(one.skews.most * one.cycle),
        "LAST": "-" if worst is None else f"{worst[0]} ({_percent(worst[1] / max(one.skews.count, 1))})",
    }


def _mean(times: Times, cycle: float | None) -> str:
    return "-" if cycle is None or not times.count else table.duration(times.total / times.count * cycle)


def _late(one: Barrier) -> str:
    """Return a sentence about the warp that a barrier waits for; "" if that warp is not always the same, or waits are short.

    If several warps come late together, most waits are short: then no single warp is to blame."""
    warp, times = next(iter(one.last.items()), (0, 0))
    rounds = one.skews.count
    if rounds < LEAST_ROUNDS or times < OFTEN * rounds or one.cycle is None:
        return ""
    # The last warp of a round does not wait, or, if it only arrives, its wait does not count.
    others = one.waits.count - min(rounds, one.waits.shorter_than(1))
    short = one.waits.shorter_than(LEAST_NS / one.cycle) - (one.waits.count - others)
    if others <= 0 or short > (1 - OFTEN) * others:
        return ""
    mean = table.duration(one.waits.total * one.cycle / others)
    each = f"the other {one.warp.word}s of its block wait {mean} on average"
    return f"{one.source}: {one.warp.word} {warp} arrives last {times:,} of {rounds:,} times; {each}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"

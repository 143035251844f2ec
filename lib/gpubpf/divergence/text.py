"""warpdiv's results for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from gpubpf import names
from gpubpf.divergence import branches
from gpubpf.show import table

if TYPE_CHECKING:
    from gpubpf.divergence.branches import Branch, Found, Place, Work
    from gpubpf.divergence.launchers import Launcher
    from gpubpf.show.owner_columns import OwnerColumns
    from gpubpf.show.result_writer import ResultWriter

WORST = 3  # branches to explain
LEAST = 0.01  # share of the kernel's lane-instructions from which on a branch is explained
# What the condition of a branch depends on (ptx/causes.py), and what follows from it.
CAUSES = {
    "data": "the condition depends on data",
    "grid": "the condition depends on the thread's place in the grid",
    "lane": "the condition depends on the thread's place in its block",
}


def report(
    found: Found, by: str, top: int | None, full: bool, owners: OwnerColumns, results: ResultWriter
) -> None:
    """Write what was found since the last report. Parameters: see `lines`."""
    results.begin()
    if results.form == "text":
        results.out.lines([*lines(found, by, top, full, owners), ""])
        return
    if results.json and by != "kernel":
        results.records(branches.KERNEL_WORK, found.kernels)
    if by == "branch":
        results.records(branches.BRANCH, found.branches[:top])
    elif by == "line":
        results.records(branches.LINE_WORK, found.lines[:top])
    elif by == "function":
        results.records(branches.FUNCTION_WORK, found.functions[:top])
    else:
        results.records(branches.KERNEL_WORK, found.kernels[:top])


def report_launchers(rows: Sequence[Launcher], full: bool, results: ResultWriter) -> None:
    """Write which host threads launched the kernels."""
    if results.json:
        results.records(branches.LAUNCHER, rows)
    elif results.form == "text" and rows:
        results.out.lines([*_launchers(rows, full), ""])


def _launchers(rows: Sequence[Launcher], full: bool) -> Iterator[str]:
    """Yield a sentence for each kernel: the threads that launched it most."""
    labels = names.labels((one.place.mangled for one in rows), full=full)
    for place in dict.fromkeys(one.place for one in rows):
        of = [one for one in rows if one.place == place]
        count = sum(one.launches for one in of)
        parts = [f"thread {one.tid} ({one.name or 'ended'}) {one.launches:,}" for one in of[:WORST]]
        if len(of) > WORST:
            parts.append(f"{table.count(len(of) - WORST, 'other thread')} the rest")
        yield from table.wrap(
            f"{labels[place.mangled]}: of {table.count(count, 'launch')}: {', '.join(parts)}"
        )
        yield from (
            line
            for one in of[:WORST]
            if one.stack
            for line in table.wrap(f"  {one.tid}: {' > '.join(one.stack)}")
        )


def lines(found: Found, by: str, top: int | None, full: bool, owners: OwnerColumns) -> Iterator[str]:
    """Yield the report: the efficiency of each kernel, then the rows for --by, then the worst branches.

    top: the maximum number of rows. full: whole kernel names.
    """
    if not found.kernels:
        yield "no instrumented kernel ran"
        return
    # Lanes of a kernel that executed nothing in an interval may have waited.
    places = [*(one.place for one in found.kernels), *(one.place for one in found.branches)]
    owners.see(places)
    labels = names.labels((place.mangled for place in places), full=full)
    yield from _table([_work(one, owners, labels) for one in found.kernels])
    if by in ("function", "line"):
        parts = found.functions if by == "function" else found.lines
        yield ""
        yield from _table([_work(one, owners, labels) for one in parts[:top]])
    if by == "branch":
        whole = {one.place: one.place.warp.lanes * one.instructions for one in found.kernels}
        split = [one for one in found.branches if one.diverged]
        yield ""
        if not split:
            yield f"no branch split a warp (branches that were executed: {len(found.branches):,})"
            return
        yield from _table([_branch(one, owners, labels, whole) for one in split[:top]])
        yield from _causes(split[: top or WORST], whole)


def _table(cells: Sequence[Mapping[str, object]]) -> list[str]:
    return table.within(
        cells, left=("COMM", "KERNEL", "FUNCTION", "SOURCE"), cut=("FUNCTION", "KERNEL", "COMM")
    )


def _work(one: Work, owners: OwnerColumns, labels: Mapping[str, str]) -> dict[str, str]:
    cells = owners.cells(one.place) | {"KERNEL": labels[one.place.mangled]}
    if one.source:
        cells["SOURCE"] = one.source
    elif one.function:
        cells["FUNCTION"] = one.function
    if one.launches is not None:
        cells["LAUNCHES"] = f"{one.launches:,}"
    return cells | {"INSTRUCTIONS": f"{one.instructions:,}", "EFFICIENCY": _percent(one.efficiency)}


def _branch(
    one: Branch, owners: OwnerColumns, labels: Mapping[str, str], whole: Mapping[Place, int]
) -> dict[str, str]:
    return owners.cells(one.place) | {
        "SOURCE": one.source,
        "KERNEL": labels[one.place.mangled],
        "EXECUTED": f"{one.executed:,}",
        "DIVERGED": f"{one.diverged:,}",
        "LANES": f"{one.lanes / max(one.executed, 1):.1f}",
        "TAKEN": _percent(one.taken / max(one.lanes, 1)),
        "LOST": "unknown" if one.lost is None else f"{one.lost:,}",
        "OF ALL": "-" if (share := _share(one, whole)) is None else _percent(share),
    }


def _share(one: Branch, whole: Mapping[Place, int]) -> float | None:
    """Return what is lost at a branch, as a share of its kernel's lane-instructions; None if it is unknown.

    whole: the kernels' lane-instructions. A kernel that executed nothing in an interval, while lanes still waited, has none.
    """
    return None if one.lost is None or not whole.get(one.place) else one.lost / whole[one.place]


def _causes(split: Sequence[Branch], whole: Mapping[Place, int]) -> Iterator[str]:
    """Yield a sentence about each of the worst branches whose cost and cause are known."""
    told = False
    for one in split[:WORST]:
        share = _share(one, whole)
        if share is None or share < LEAST:
            continue
        about = [f"{_percent(share)} of the kernel's lane-instructions are lost here"]
        if one.loop:
            about.append("lanes leave the loop after different numbers of turns")
        if one.cause in CAUSES:
            about.append(CAUSES[one.cause])
        if not told:
            yield ""
            told = True
        yield from table.wrap(f"{one.source}: {'; '.join(about)}")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"

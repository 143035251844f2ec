"""What kernelretsnoop says of kernels to people: who leaves late, and what that comes to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from gpubpf import names
from gpubpf.exits import lateness
from gpubpf.exits.lateness import Report, Spread
from gpubpf.session.kernel_shapes import Place
from gpubpf.session.launch_shape import shape_cells
from gpubpf.show import table
from gpubpf.show.owner_columns import MOST_SECTIONS, Whose

Source: TypeAlias = Callable[[int], str | None]
HEADER = ("MEAN (ns)", "P50", "P99", "MAX")


def lines(
    found: Sequence[tuple[Place, Report]],
    title: Callable[[Place, bool], str],
    source: Callable[[Place], Source],
    whose: Whose,
    verbose: bool,
) -> Iterator[str]:
    """Of each kernel and launch shape. Of several processes or GPUs first a table of all, then those with the latest threads one by
    one. `title`: what a place is called (in full), `source`: the names of its sites."""
    whose.see(place for place, _ in found)
    shown = found if verbose or not whose.processes else found[:MOST_SECTIONS]
    if whose.several and len(found) > 1:
        yield f"when threads leave, by {'process' if whose.processes else 'GPU'}: from the first to the last, mean ns"
        yield ""
        yield from _overview(found, whose)
        if len(found) > len(shown):
            yield f"the {len(shown)} whose threads are latest one by one; -v shows the others, too"
        yield ""
    for place, report in shown:
        yield from _section(place, report, title(place, verbose), source(place), whose, verbose)


def _overview(found: Sequence[tuple[Place, Report]], whose: Whose) -> list[str]:
    rows = []
    labels = names.labels(place.mangled for place, _ in found)
    places = [place for place, _ in found]
    shapes = shape_cells([(whose.cells(p), p.mangled) for p in places], [p.shape for p in places])
    for (place, report), shape in zip(found, shapes, strict=True):
        row = whose.cells(place) | {"KERNEL": labels[place.mangled]} | shape
        row |= {"LAUNCHES": f"{report.launches:,}", "EXITS": f"{report.exits:,}"}
        spreads = {"LANES": report.warp, "WARPS": report.block, "BLOCKS": report.grid}
        rows.append(row | {name: f"{one.mean:,.0f}" if one.count else "-" for name, one in spreads.items()})
    return table.within(rows, left=("COMM", "KERNEL"), drop=("EXITS",))


def _section(
    place: Place, found: Report, title: str, source: Source, whose: Whose, verbose: bool
) -> Iterator[str]:
    """Who is late; a row for each lane, neighbours that do not differ in one; the spreads."""
    yield f"{title}: when its threads leave"
    grid, block_dim = (" x ".join(map(str, extents)) for extents in (place.grid, place.block_dim))
    said = [
        f"grid {grid}, block {block_dim}; {whose.name(place)}",
        f"{table.count(found.launches, 'launch')}, {table.count(found.exits, 'exit')}",
        *lateness.findings(found, source),
    ]
    for sentence in said:
        yield from table.wrap(sentence, indent=2)
    yield ""
    own = whose.cells(place)
    rows = [
        own | {"LANE": label, "EXITS": f"{lane.exits:,}"} | _spread(lane.late) | {"LATEST AT": way}
        for label, lane, way in lateness.lane_rows(found, source)
    ]
    yield from table.within(rows, left=("COMM", "LATEST AT"), cut=("LATEST AT", "COMM"))
    yield ""
    rows = [
        own | {"FROM FIRST TO LAST": what, "OF": f"{spread.count:,}"} | _spread(spread)
        for what, spread in lateness.spreads(found)
    ]
    yield from table.within(rows, left=("COMM", "FROM FIRST TO LAST"), cut=("COMM",))
    if verbose and found.sm:
        yield ""
        idle = [
            own | {"SM": str(sm), "DONE BEFORE THE END (ns)": f"{ns:,.0f}"}
            for sm, ns in lateness.sm_rows(found)
        ]
        yield from table.within(idle, left=("COMM",))
    for line in lateness.caveats(found):
        yield from table.wrap(line)
    yield ""


def _spread(value: Spread) -> dict[str, str]:
    return dict(zip(HEADER, lateness.cells(value), strict=True))

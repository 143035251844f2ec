"""kernelretsnoop's text report: who exits late in each kernel, and how far first and last exits are apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from gpubpf import names
from gpubpf.exits import lateness
from gpubpf.exits.findings import findings
from gpubpf.exits.lateness import Distribution, ExitReport, LaneReport
from gpubpf.records.kernel_shapes import KernelShape
from gpubpf.records.launch_shape import shape_cells
from gpubpf.show import table
from gpubpf.show.owner_columns import MOST_SECTIONS, OwnerColumns

SiteNames: TypeAlias = Callable[[int], str | None]  # site number → ``scale.cu:17``; None: unknown
HEADER = ("MEAN (ns)", "P50", "P99", "MAX")
DROP = ("P50", "EXITS", "OF", "P99")  # columns to drop for space: lateness of seconds has many digits in ns


def lines(
    reports: Sequence[tuple[KernelShape, ExitReport]],
    title: Callable[[KernelShape, bool], str],
    sites: Callable[[KernelShape], SiteNames],
    owners: OwnerColumns,
    verbose: bool,
) -> Iterator[str]:
    """Yield a section for each kernel and launch shape.

    With several processes or GPUs, a table of all kernels comes first. With several processes, only the kernels with the latest
    threads then get sections, unless `verbose`.

    title: returns a kernel's heading; the full one on request.
    sites: returns the names of a kernel's exits.
    """
    owners.see(kernel for kernel, _ in reports)
    shown = reports if verbose or not owners.processes else reports[:MOST_SECTIONS]
    if owners.several and len(reports) > 1:
        by = "process" if owners.processes else "GPU"
        yield f"when threads exit, by {by}: mean time from the first exit to the last, ns"
        yield ""
        yield from _overview(reports, owners)
        if len(reports) > len(shown):
            yield f"details of the {len(shown)} with the latest threads; -v shows all"
        yield ""
    for kernel, report in shown:
        yield from _section(kernel, report, title(kernel, verbose), sites(kernel), owners, verbose)


def _about(report: ExitReport) -> str:
    """Return the word before a number of exits, which is an estimate with sampling."""
    return "about " if report.sample is not None and report.sample.factor != 1 else ""


def _selected(report: ExitReport) -> str:
    """Return which threads a number of exits counts, as words to follow the number; "" for all threads."""
    return " of selected threads" if report.selected_blocks or report.selected_threads else ""


def _overview(reports: Sequence[tuple[KernelShape, ExitReport]], owners: OwnerColumns) -> list[str]:
    rows = []
    kernels = [kernel for kernel, _ in reports]
    labels = names.labels(kernel.mangled for kernel in kernels)
    shapes = shape_cells([(owners.cells(k), k.mangled) for k in kernels], [k.shape for k in kernels])
    for (kernel, report), shape in zip(reports, shapes, strict=True):
        row = owners.cells(kernel) | {"KERNEL": labels[kernel.mangled]} | shape
        row |= {"LAUNCHES": f"{report.launches:,}", "EXITS": f"{report.exits:,}"}
        spreads = {"LANES": report.warp, "WARPS": report.block, "BLOCKS": report.grid}
        rows.append(row | {name: _mean(one) for name, one in spreads.items()})
    return table.within(rows, left=("COMM", "KERNEL"), drop=("EXITS",))


def _mean(times: Distribution) -> str:
    """Return the mean in ns. From 100 ms on, which has too many digits in ns, return it with a unit."""
    if not times.count:
        return "-"
    return f"{times.mean:,.0f}" if times.mean < 1e8 else table.duration(times.mean)


def _section(
    kernel: KernelShape,
    report: ExitReport,
    title: str,
    sites: SiteNames,
    owners: OwnerColumns,
    verbose: bool,
) -> Iterator[str]:
    """Yield the findings, a row for each lane (lanes that do not differ share one), and the spreads."""
    yield f"{title}: when its threads exit"
    grid, block_dim = (" x ".join(map(str, extents)) for extents in (kernel.grid, kernel.block_dim))
    said = [
        f"grid {grid}, block {block_dim}; {owners.name(kernel)}",
        f"{table.count(report.launches, 'launch')}, {_about(report)}{table.count(report.exits, 'exit')}{_selected(report)}",
        *([report.sample.sentence(report.unit)] if report.sample else []),
        *findings(report, sites),
    ]
    for sentence in said:
        yield from table.wrap(sentence, indent=2)
    owner = owners.cells(kernel)
    for ranges, drop in ((3, DROP), (1, DROP), (1, (*DROP, "MAX"))):
        lanes = _lanes(report, sites, owner, ranges, drop)
        if max(map(len, lanes), default=0) <= table.WIDTH:
            break
    tables = [lanes]
    rows = [
        owner | {"FROM FIRST TO LAST": what, "OF": f"{spread.count:,}"} | _cells(spread)
        for what, spread in lateness.spreads(report)
    ]
    for drop in (DROP, (*DROP, "MAX")):
        made = table.cut_first(rows, left=("COMM", "FROM FIRST TO LAST"), cut=("COMM",), drop=drop)
        if max(map(len, made), default=0) <= table.WIDTH:
            break
    tables.append(made)
    if verbose:
        rows = [
            owner | {"SM": str(sm), "DONE BEFORE THE END (ns)": f"{ns:,.0f}"}
            for sm, ns in lateness.sm_rows(report)
        ]
        tables.append(table.within(rows, left=("COMM",)))
    for printed in filter(None, tables):
        yield ""
        yield from printed
    for line in lateness.caveats(report):
        yield from table.wrap(line)
    yield ""


def _lanes(
    report: ExitReport, sites: SiteNames, owner: Mapping[str, str], ranges: int, drop: Sequence[str]
) -> list[str]:
    """Return the table of lanes, with up to `ranges` ranges of lanes in a row, and without columns in `drop` that have no room."""
    rows = [
        {**owner, "LANE": label, "EXITS": f"{lane.exits:,}"}
        | _with_error(_cells(lane.late), lane, report.sample is not None)
        | {"LATEST AT": site}
        for label, lane, site in lateness.lane_rows(report, sites, ranges)
    ]
    return table.cut_first(rows, left=("COMM", "LATEST AT"), cut=("LATEST AT", "COMM"), drop=drop)


def _cells(value: Distribution) -> dict[str, str]:
    return dict(zip(HEADER, lateness.cells(value), strict=True))


def _with_error(cells: dict[str, str], lane: LaneReport, sampled: bool) -> dict[str, str]:
    """Return the cells; with sampling, with the standard error after the mean."""
    if not sampled:
        return cells
    mean, *others = cells.items()
    return dict([mean, ("+-", "?" if lane.error is None else f"{lane.error:,.1f}"), *others])

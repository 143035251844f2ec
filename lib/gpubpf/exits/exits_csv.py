"""Exits as CSV.

    results.table(exits_csv.COLUMNS, exits_csv.rows(reports, sites))

There is a row for each lane of each kernel and launch shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from gpubpf.exits import lateness
from gpubpf.show.result_writer import SHAPE_COLUMNS

if TYPE_CHECKING:
    from gpubpf.exits.exits_text import SiteNames
    from gpubpf.exits.lateness import ExitReport
    from gpubpf.records.kernel_shapes import KernelShape

_LATE = tuple(f"late_{name}_ns" for name in ("mean", "p50", "p99", "max"))
COLUMNS = (
    *("pid", "comm", "gpu", "kernel", *SHAPE_COLUMNS),
    *("lane", "exits", *_LATE, "site", "source", "mangled"),
)


def rows(
    reports: Iterable[tuple[KernelShape, ExitReport]], sites: Callable[[KernelShape], SiteNames]
) -> Iterator[list[object]]:
    """Return the cells of each row. Those with several numbers, such as a grid, take several columns."""
    for kernel, exits in reports:
        place, where = kernel.record(), sites(kernel)
        owner = [place[name] for name in ("pid", "comm", "gpu", "kernel", "grid", "block_dim")]
        for lane in exits.lanes:
            record = lateness.lane_record(lane, where)
            late = tuple(record["late_ns"].values())
            yield [*owner, lane.number, lane.exits, late, record["site"], record["source"], kernel.mangled]

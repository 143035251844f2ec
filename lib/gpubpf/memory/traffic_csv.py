"""The traffic of kernels as CSV.

    results.table(traffic_csv.columns(sampled), traffic_csv.rows(kernels, sampled))

There is a row for each instruction that accesses memory, and each kind of memory that its address led to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf.memory.sampled_part import SUMS

if TYPE_CHECKING:
    from gpubpf.memory.traffic import KernelTraffic, SiteTraffic

_PLACE = ("pid", "comm", "gpu", "vendor", "wave", "kernel")
_SITE = ("site", "op", "space", "width", "opcode", "source", "ptx_line", "offset", *SUMS.values())
_MEASURES = ("ratio", "lanes_mean", "pattern", "gaps", "contention_max", "addresses_mean", "addresses", "hot")
_COSTS = ("share", "wasted_bytes", "stride_min", "stride_max", "bank_ways_mean", "bank_ways_max")
_ERRORS = tuple(f"{name}_error" for name in (*SUMS.values(), "ratio"))


def columns(sampled: bool) -> tuple[str, ...]:
    """Return the names of the columns. `sampled`: whether blocks or warps are sampled, which adds the standard errors."""
    return (*_PLACE, *_SITE, *_MEASURES, *_COSTS, *(_ERRORS if sampled else ()), "mangled")


def rows(kernels: Sequence[KernelTraffic], sampled: bool) -> Iterator[list[object]]:
    """Return the cells of each row; None: an empty cell."""
    names = columns(sampled)
    for kernel in kernels:
        place = kernel.place() | {"mangled": kernel.mangled}
        for site in kernel.sites:
            cells = place | _cells(kernel, site)
            yield [cells.get(name) for name in names]


def _cells(kernel: KernelTraffic, site: SiteTraffic) -> dict[str, Any]:
    """Return the cells of a site by column: its JSON fields, with a column for each number in an object or list."""
    record = site.record(kernel.share([site]))
    record["stride_min"], record["stride_max"] = record["strides"] or (None, None)
    for name, value in (record["bank_ways"] or {}).items():
        record[f"bank_ways_{name}"] = value
    for name, error in record.get("standard_error", {}).items():
        record[f"{name}_error"] = error
    return record

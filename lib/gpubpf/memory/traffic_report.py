"""memtrace's report: text, JSON or CSV."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpubpf.memory import coverage_text, traffic_records, traffic_text
from gpubpf.memory.traffic import Traffic

if TYPE_CHECKING:
    from gpubpf.memory.coverage import Coverage
    from gpubpf.memory.memory_options import CoverageViews, MemoryOptions
    from gpubpf.memory.traffic import KernelTraffic
    from gpubpf.session.session import Session
    from gpubpf.show.owner_columns import OwnerColumns
    from gpubpf.show.result_writer import ResultWriter


def show(
    kernels: list[KernelTraffic], owners: OwnerColumns, options: MemoryOptions, results: ResultWriter
) -> None:
    """Print what was counted since the last report."""
    results.begin()
    if not kernels and not results.options.interval and options.shared.threads.filtered:
        results.note_once("no thread that accessed memory matches --block and --thread")
    if results.form == "text":
        results.out.lines(traffic_text.report(kernels, owners, results.options.verbose))
    else:
        traffic_records.write(kernels, options.shared.sampling.given, results)


def show_coverage(
    covered: Coverage, session: Session, owners: OwnerColumns, views: CoverageViews, results: ResultWriter
) -> None:
    """Print which bytes of allocations have been touched so far, and how much memory each kernel touches: not as CSV."""
    if results.csv:
        return
    found = covered.report(session)
    kernels = Traffic().read(session, since_last=False) if views.footprint else []
    if results.json:
        results.out.records(coverage_text.records(found, kernels, views.granule, views.allocations))
        return
    if views.allocations:
        verbose = results.options.verbose
        results.out.lines(coverage_text.allocation_lines(found, views.granule, verbose, owners))
    results.out.lines(coverage_text.footprint_lines(found, kernels, owners, views.granule))

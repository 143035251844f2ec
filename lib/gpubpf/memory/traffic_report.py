"""memtrace's report: text, JSON or CSV."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from gpubpf.memory import coverage_text, traffic_records, traffic_text
from gpubpf.memory.traffic import Traffic
from gpubpf.show import cli

if TYPE_CHECKING:
    from gpubpf.memory.coverage import Coverage
    from gpubpf.memory.traffic import KernelTraffic
    from gpubpf.session.session import Session
    from gpubpf.show.owner_columns import OwnerColumns
    from gpubpf.show.result_writer import ResultWriter


def show(
    kernels: list[KernelTraffic], owners: OwnerColumns, args: argparse.Namespace, results: ResultWriter
) -> None:
    """Print what was counted since the last report."""
    results.begin()
    if not kernels and not args.interval and cli.chooses_threads(args):
        cli.note(args.tool, "no thread that accessed memory matches --block and --thread")
    if results.form == "text":
        results.out.lines(traffic_text.report(kernels, owners, args.verbose))
    else:
        traffic_records.write(kernels, bool(args.sample_blocks or args.sample_warps), results)


def show_coverage(
    covered: Coverage, session: Session, owners: OwnerColumns, args: argparse.Namespace, results: ResultWriter
) -> None:
    """Print which bytes of allocations have been touched so far, and how much memory each kernel touches: not as CSV."""
    if results.csv:
        return
    found = covered.report(session)
    kernels = Traffic().read(session, since_last=False) if args.footprint else []
    if results.json:
        results.out.records(coverage_text.records(found, kernels, args.granule, args.allocations))
        return
    if args.allocations:
        results.out.lines(coverage_text.allocation_lines(found, args.granule, args.verbose, owners))
    results.out.lines(coverage_text.footprint_lines(found, kernels, owners, args.granule))

"""kernelretsnoop's report: text, JSON or CSV."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from gpubpf.exits import exit_records, exits_text
from gpubpf.records.kernel_shapes import site_names
from gpubpf.show import cli

if TYPE_CHECKING:
    from gpubpf.exits.exit_log import ExitLog
    from gpubpf.exits.exits_text import SiteNames
    from gpubpf.records.kernel_shapes import KernelShape
    from gpubpf.session.session import Session
    from gpubpf.show.owner_columns import OwnerColumns
    from gpubpf.show.result_writer import ResultWriter


def show(
    session: Session, log: ExitLog, owners: OwnerColumns, args: argparse.Namespace, results: ResultWriter
) -> None:
    """Print the exits since the last report."""

    def sites(kernel: KernelShape) -> SiteNames:
        return site_names(session.sites(kernel.mangled, kernel.pid))

    results.begin()
    reports = list(log.reports(since_last=bool(args.interval), session=session))
    if not reports and not args.interval and cli.chooses_threads(args):
        cli.note(args.tool, "no thread that left a kernel matches --block and --thread")
    if results.form == "text":
        results.out.lines(exits_text.lines(reports, log.title, sites, owners, args.verbose))
    else:
        exit_records.write(reports, sites, results)

"""kernelretsnoop's report: text, JSON or CSV."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpubpf.exits import exit_records, exits_text
from gpubpf.records.kernel_shapes import site_names

if TYPE_CHECKING:
    from gpubpf.exits.exit_log import ExitLog
    from gpubpf.exits.exits_text import SiteNames
    from gpubpf.records.kernel_shapes import KernelShape
    from gpubpf.session.session import Session
    from gpubpf.show.owner_columns import OwnerColumns
    from gpubpf.show.parsed import ThreadOptions
    from gpubpf.show.result_writer import ResultWriter


def show(
    session: Session, log: ExitLog, owners: OwnerColumns, threads: ThreadOptions, results: ResultWriter
) -> None:
    """Print the exits since the last report."""

    def sites(kernel: KernelShape) -> SiteNames:
        return site_names(session.sites(kernel.mangled, kernel.pid))

    results.begin()
    options = results.options
    reports = list(log.reports(since_last=bool(options.interval), session=session))
    if not reports and not options.interval and threads.filtered:
        results.note_once("no thread that left a kernel matches --block and --thread")
    if results.form == "text":
        results.out.lines(exits_text.lines(reports, log.title, sites, owners, options.verbose))
    else:
        exit_records.write(reports, sites, results)

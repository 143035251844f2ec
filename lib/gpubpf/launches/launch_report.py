"""launchlate's report: text, JSON or CSV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpubpf.launches import latency_text, overlap
from gpubpf.launches.launch_records import KERNEL_RECORD
from gpubpf.launches.sums import kernel_record
from gpubpf.record import Record
from gpubpf.show import cli

if TYPE_CHECKING:
    from gpubpf.launches.latency import LaunchView
    from gpubpf.launches.sums import LaunchSums
    from gpubpf.session.session import Session
    from gpubpf.show.owner_columns import OwnerColumns
    from gpubpf.show.result_writer import ResultWriter


class LaunchViews(Record):
    """How launches are shown.

    slow: show only launches slower than this, in microseconds, and what the host did meanwhile; None: all launches.
    stacks: with the host stacks that launched them.
    range: show the ranges of these launches, too, as with `stacks`; empty: not because of --range.
    streams: sums for each stream.
    graphs: sums for each node of CUDA graphs.
    timeline: what each stream did.
    trace: FILE of --trace; None: no trace.
    """

    slow: int | None = None
    stacks: bool = False
    range: Sequence[str] = ()
    streams: bool = False
    graphs: bool | None = None
    timeline: bool = False
    trace: str | None = None


def show_each(
    view: LaunchView,
    new: Any,
    chosen: Any,
    launched: Any,
    owners: OwnerColumns,
    views: LaunchViews,
    results: ResultWriter,
) -> None:
    """Print single launches and operations.

    new: places of new operations that the program knows. launched: places of launches of matching kernels. chosen: those to show.
    """
    if owners.processes:
        chosen = view.by_call(chosen)
    if results.json:
        if views.timeline:
            results.out.records(view.operation(at) for at in new.tolist())
        if results.options.verbose or views.slow:
            results.out.records(
                view.launch(at, views.stacks, views.stacks or bool(views.range)) for at in chosen.tolist()
            )
    elif not results.csv:
        if views.timeline:
            results.out.lines(latency_text.timeline_lines(view, new))
        if views.slow:
            results.out.lines(latency_text.slow_stories(view, chosen, launched, views.slow, owners))
        elif results.options.verbose:
            lines = (latency_text.launch_line(view, at, owners) for at in chosen.tolist())
            results.out.lines((latency_text.launch_header(owners), *lines, ""))


def show_sums(sums: LaunchSums, owners: OwnerColumns, views: LaunchViews, results: ResultWriter) -> None:
    """Print the sums of the interval."""
    records = (kernel_record(group, views.streams, bool(views.graphs)) for group in sums.groups)
    if results.json:
        results.out.records(record | results.stamp for record in records)
    elif results.csv:
        results.table(KERNEL_RECORD.columns, map(KERNEL_RECORD.row, records))
    elif sums.groups:
        verbose = results.options.verbose
        results.out.lines(latency_text.report(sums, owners, views.streams, views.stacks, verbose))


def show_summary(
    session: Session,
    losses: dict[str, Any],
    copy_overlap: list[dict[str, Any]],
    results: ResultWriter,
) -> None:
    """Print the summary. `losses` counts each lost launch; the session only knows an upper bound."""
    summary = session.summary()
    summary["lost"] = losses["launches_lost"] + losses["operations_lost"]
    lines = [*overlap.lines(copy_overlap), *cli.summary_lines(summary | losses | {"lost": 0})]
    lines += latency_text.loss_lines(losses)
    lines += cli.host_program_lines(summary) if results.options.verbose else []
    results.end(summary | losses | {"copy_overlap": copy_overlap}, lines)

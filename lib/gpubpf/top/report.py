"""gputop's report for people, and what it writes for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf import names
from gpubpf.show import summary_text, table
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf.top.records import GPU, GRAPHS, PROCESS, kernel_name
from gpubpf.top.usage import GRAPH, GpuUse, Interval, KernelUse, Use

if TYPE_CHECKING:
    from gpubpf.show.result_writer import ResultWriter

# What rows are sorted by: the word of --sort, which begins with the key on the screen.
SORTS: dict[str, Callable[[Use], float]] = {
    "time": lambda use: use.busy_ns or 0,
    "launches": lambda use: use.launches,
    "copies": lambda use: use.copies_bytes,
    "memory": lambda use: use.memory_bytes,
    "waits": lambda use: use.wait_ns,
    "pid": lambda use: -use.pid,
}
PROCESSES, KERNELS = 20, 10  # maximum rows of the tables, without --top
_LEFT = ("COMM", "KERNEL")


def by(interval: Interval, sort: str) -> list[Use]:
    """Return the rows of the processes, sorted. sort: a key of SORTS."""
    return sorted(interval.processes, key=SORTS[sort], reverse=True)


def share(value: float | None) -> str:
    """Return a share for a table."""
    return "unknown" if value is None else f"{100 * value:.1f} %"


def per_second(number: float, interval_ns: int, form: Callable[[float], str]) -> str:
    """Return a rate for a table."""
    return form(number * 1e9 / interval_ns if interval_ns else 0)


def head(interval: Interval, owners: OwnerColumns) -> Iterator[str]:
    """Yield what the report is about, and a line for each GPU."""
    processes = table.count(len({use.process for use in interval.processes}), "process")
    yield f"{processes} on {table.count(len(interval.gpus), 'GPU')}, {table.duration(interval.length_ns)}"
    for one in interval.gpus:
        yield f"{gpu_name(one, owners)}: kernels ran for {share(one.share)} of the time"


def gpu_name(one: GpuUse, owners: OwnerColumns) -> str:
    """Return the name of a GPU for a line: ``GPU 1``, or ``AMD GPU 1`` among GPUs of both vendors."""
    return owners.gpu_name(Use(0, 0, "", one.gpu, one.vendor, None))


def process_lines(uses: Sequence[Use], owners: OwnerColumns) -> list[str]:
    """Return the table of processes: a header, and a line for each row."""
    cells = [
        owners.cells(use)
        | {
            "SHARE": share(use.share),
            "LAUNCH/s": per_second(use.launches, use.interval_ns, table.number),
            "COPIED/s": per_second(use.copies_bytes, use.interval_ns, table.size),
            "MEMORY": table.size(use.memory_bytes),
            "WAITED": table.duration(use.wait_ns) if use.waits else "-",
        }
        for use in uses
    ]
    return table.within(cells, left=_LEFT, drop=("WAITED",))


def kernel_lines(uses: Iterable[Use], owners: OwnerColumns, most: int) -> list[str]:
    """Return the table of kernels, those with the most GPU time first; [] without a kernel. most: maximum rows."""
    rows = [(use, one) for use in uses for one in use.kernels]
    rows.sort(key=lambda row: (-row[1].gpu_ns, -row[1].launches, row[0].pid, row[0].gpu, row[1].mangled))
    labels = names.labels(dict.fromkeys(one.mangled for _, one in rows if one.mangled != GRAPH))
    cells = [_kernel_cells(use, one, labels, owners) for use, one in rows[:most]]
    made = table.within(cells, left=_LEFT)
    if len(rows) > most:
        made.append(f"and {table.count(len(rows) - most, 'other kernel')}")
    return made


def full_names(uses: Iterable[Use]) -> Iterator[str]:
    """Yield the full names of kernels whose short names say less."""
    for mangled in sorted({one.mangled for use in uses for one in use.kernels} - {GRAPH}):
        name = names.demangle(mangled)
        if name.full != name.short:
            yield from table.wrap(f"{name.short}: {name.full}", indent=2)


def _kernel_cells(
    use: Use, one: KernelUse, labels: Mapping[str, str], owners: OwnerColumns
) -> dict[str, str]:
    cells = {name: cell for name, cell in owners.cells(use).items() if name != "COMM"}
    return cells | {
        "GPU TIME": table.duration(one.gpu_ns),
        "LAUNCHES": f"{one.launches:,}",
        "KERNEL": GRAPHS if one.mangled == GRAPH else labels[one.mangled] or "?",
    }


def lines(
    interval: Interval, sort: str, owners: OwnerColumns, top: int | None, full: bool = False
) -> Iterator[str]:
    """Yield the report of an interval.

    top: maximum rows of each table; None: PROCESSES and KERNELS.
    full: add the full names of kernels.
    """
    if not interval.processes:
        yield from ("no process used a GPU", "")
        return
    owners.see(interval.processes)
    uses = by(interval, sort)
    yield from head(interval, owners)
    yield ""
    shown = uses[: top or PROCESSES]
    yield from process_lines(shown, owners)
    if len(uses) > len(shown):
        yield f"and {table.count(len(uses) - len(shown), 'other row')}"
    yield ""
    if made := kernel_lines(uses, owners, top or KERNELS):
        yield from made
        yield from full_names(uses) if full else ()
        yield ""
    if interval.late_ns:
        yield from (*table.wrap(late(interval.late_ns)), "")


def late(ns: int) -> str:
    """Return a sentence about GPU time that no report has."""
    return f"{table.duration(ns)} of GPU time became known only after the report of its interval"


def show(
    interval: Interval, sort: str, owners: OwnerColumns, top: int | None, full: bool, results: ResultWriter
) -> None:
    """Write the report of an interval in the form that the user chose."""
    if results.form == "text":
        results.out.lines(lines(interval, sort, owners, top, full))
        return
    uses = by(interval, sort)[:top]
    if results.json:
        results.records(GPU, interval.gpus)
        results.records(PROCESS, uses)
    else:
        cells = ((PROCESS.record(use), kernel_name(use.kernels[0]) if use.kernels else "") for use in uses)
        results.table(PROCESS.columns, (PROCESS.row(record, kernel=kernel) for record, kernel in cells))


def end(summary: Mapping[str, Any], loss_lines: Sequence[str], results: ResultWriter) -> None:
    """Write the summary of the whole measurement. loss_lines: see `latency_text.loss_lines`."""
    said = [*summary_text.summary_lines(dict(summary) | {"lost": 0}), *loss_lines]
    if summary["late_ns"]:
        said += table.wrap(late(summary["late_ns"]))
    results.end(summary, said)

"""gputop's report for people, and what it writes for programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gpubpf import names
from gpubpf.gpus import devices
from gpubpf.launches import latency_text
from gpubpf.show import summary_text, table
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf.top.records import DEVICE, GPU, GRAPHS, PROCESS, kernel_name
from gpubpf.top.usage import GRAPH, GpuUse, Interval, KernelUse, Use

if TYPE_CHECKING:
    from gpubpf.session.session import Session
    from gpubpf.show.result_writer import ResultWriter

# What rows are sorted by: the words of --sort. The first letter of each is its key on the screen.
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
PID = 7  # columns, so that reports of other processes look alike
NOTHING = "no process used a GPU"


class Line(NamedTuple):
    """A line of the screen. style: "title", "header" or ""."""

    text: str
    style: str = ""


class Report:
    """What to show of intervals, and how.

    sort: a key of SORTS.
    top: maximum rows of each table; None: as many as fit, or PROCESSES and KERNELS.
    full: add the full names of kernels.
    notice: a line about the whole measurement; "": none.
    """

    def __init__(self, sort: str, top: int | None, full: bool, notice: str = "") -> None:
        self.sort, self._top, self._full, self.notice = sort, top, full, notice
        self._owners = OwnerColumns(asked=True)

    def write(self, interval: Interval, results: ResultWriter) -> None:
        """Write the report of an interval in the form that the user chose."""
        if results.form == "text":
            results.out.lines(self.lines(interval))
            return
        uses = self._sorted(interval)[: self._top]
        if results.json:
            results.records(DEVICE, interval.devices)
            results.records(GPU, interval.gpus)
            results.records(PROCESS, uses)
        else:
            cells = (
                (PROCESS.record(use), kernel_name(use.kernels[0]) if use.kernels else "") for use in uses
            )
            results.table(PROCESS.columns, (PROCESS.row(record, kernel=kernel) for record, kernel in cells))

    def lines(self, interval: Interval) -> Iterator[str]:
        """Yield the report of an interval as text."""
        said = [part for one in interval.devices for part in table.wrap(devices.line(one))]
        if not interval.processes:
            yield from (NOTHING, *said, "")
            return
        self._owners.see(interval.processes)
        uses = self._sorted(interval)
        yield from (_measured(interval), *self._gpus(interval), *said, "")
        yield from (*self._processes(uses, self._top or PROCESSES, table.WIDTH), "")
        if made := self._kernels(uses, self._top or KERNELS, table.WIDTH):
            yield from made
            yield from _full_names(uses) if self._full else ()
            yield ""
        if interval.late_ns:
            yield from (*table.wrap(late(interval.late_ns)), "")

    def screen(self, interval: Interval | None, width: int, height: int) -> list[Line]:
        """Return the report of an interval as at most `height` lines for a screen; None: nothing is measured yet."""
        title = f"gputop {time.strftime('%H:%M:%S')}"
        notice = [Line(self.notice)] if self.notice else []
        if interval is None or not interval.processes:
            said = f"{NOTHING} in {table.duration(interval.length_ns)}" if interval else "measuring ..."
            return [Line(title, "title"), *notice, *_devices(interval, width), Line(""), Line(said)][:height]
        self._owners.see(interval.processes)
        uses = self._sorted(interval)
        title += f": {_measured(interval)}; sorted by {self.sort}"
        gpus = [*map(Line, self._gpus(interval)), *_devices(interval, width)]
        if len(gpus) > height // 3:
            gpus = [
                Line(text) for part in self._gpus_in_short(interval) for text in table.wrap(part, 0, width)
            ]
        above = [Line(title, "title"), *notice, *gpus, Line("")]
        room = height - len(above) - 3  # an empty line, and the headers of both tables
        kernels = sum(len(use.kernels) for use in uses)
        half = min(kernels, max(room // 2, room - len(uses)))
        first = self._processes(uses, self._fitting(len(uses), room - half), width)
        second = self._kernels(uses, self._fitting(kernels, room + 1 - len(first)), width)
        lines = [*above, *self._table(first), Line(""), *self._table(second)]
        return lines[:height]

    def _fitting(self, rows: int, room: int) -> int:
        """Return how many rows to show in `room` lines. If rows are left out, the last line is for their number."""
        most = min(rows, self._top or rows)
        return most if most + (most < rows) <= room else max(room - 1, 1)

    def _table(self, lines: Sequence[str]) -> list[Line]:
        return [Line(line, "" if number else "header") for number, line in enumerate(lines)]

    def _sorted(self, interval: Interval) -> list[Use]:
        return sorted(interval.processes, key=SORTS[self.sort], reverse=True)

    def _gpus(self, interval: Interval) -> Iterator[str]:
        """Yield a line for each GPU."""
        for one in interval.gpus:
            yield f"{self._gpu_name(one)}: kernels ran for {_share(one.share)} of the time"

    def _gpus_in_short(self, interval: Interval) -> Iterator[str]:
        """Yield a sentence about all GPUs, and one about what drivers say of them."""
        shares = (f"{self._gpu_name(one)} {_share(one.share)}" for one in interval.gpus)
        yield f"kernels ran: {', '.join(shares)}"
        if interval.devices:
            used = (f"{devices.driver_name(one)} {_share(one.utilization)}" for one in interval.devices)
            yield f"util: {', '.join(used)}"

    def _gpu_name(self, one: GpuUse) -> str:
        return self._owners.gpu_name(Use(0, 0, "", one.gpu, one.vendor, None))

    def _processes(self, uses: Sequence[Use], most: int, width: int) -> list[str]:
        """Return the table of processes: a header, and a line for each row. most: maximum rows."""
        cells = [
            self._owner(use)
            | {
                "SHARE": _share(use.share),
                "LAUNCH/s": _per_second(use.launches, use.interval_ns, table.number),
                "COPIED/s": _per_second(use.copies_bytes, use.interval_ns, table.size),
                "MEMORY": _memory(use),
                "WAITED": table.duration(use.wait_ns) if use.waits else "-",
            }
            for use in uses[:most]
        ]
        made = table.within(cells, left=_LEFT, drop=("WAITED", "COPIED/s"), width=width)
        return [*made, *_others(len(uses) - most, "row")]

    def _owner(self, use: Use) -> dict[str, str]:
        cells = self._owners.cells(use)
        return cells | {"PID": cells["PID"].rjust(PID)}

    def _kernels(self, uses: Iterable[Use], most: int, width: int) -> list[str]:
        """Return the table of kernels, those with the most GPU time first; [] without a kernel. most: maximum rows."""
        rows = [(use, one) for use in uses for one in use.kernels]
        rows.sort(key=lambda row: (-row[1].gpu_ns, -row[1].launches, row[0].pid, row[0].gpu, row[1].mangled))
        labels = names.labels(dict.fromkeys(one.mangled for _, one in rows if one.mangled != GRAPH))
        cells = [self._kernel_cells(use, one, labels) for use, one in rows[:most]]
        return [*table.within(cells, left=_LEFT, width=width), *_others(len(rows) - most, "kernel")]

    def _kernel_cells(self, use: Use, one: KernelUse, labels: Mapping[str, str]) -> dict[str, str]:
        cells = {name: cell for name, cell in self._owner(use).items() if name != "COMM"}
        return cells | {
            "GPU TIME": table.duration(one.gpu_ns),
            "LAUNCHES": f"{one.launches:,}",
            "KERNEL": GRAPHS if one.mangled == GRAPH else labels[one.mangled] or "?",
        }


def _devices(interval: Interval | None, width: int) -> list[Line]:
    return [Line(table.fit(devices.line(one), max(width, 8))) for one in interval.devices] if interval else []


def _others(number: int, noun: str) -> list[str]:
    return [f"and {table.count(number, f'other {noun}')}"] if number > 0 else []


def _measured(interval: Interval) -> str:
    processes = table.count(len({use.process for use in interval.processes}), "process")
    return f"{processes} on {table.count(len(interval.gpus), 'GPU')}, {table.duration(interval.length_ns)}"


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{100 * value:.1f} %"


def _memory(use: Use) -> str:
    if use.memory_complete:
        return table.size(use.memory_bytes)
    return f">= {table.size(use.memory_bytes)}" if use.memory_bytes else "unknown"


def _per_second(number: float, interval_ns: int, form: Callable[[float], str]) -> str:
    return form(number * 1e9 / interval_ns if interval_ns else 0)


def _full_names(uses: Iterable[Use]) -> Iterator[str]:
    """Yield the full names of kernels whose short names say less."""
    for mangled in sorted({one.mangled for use in uses for one in use.kernels} - {GRAPH}):
        name = names.demangle(mangled)
        if name.full != name.short:
            yield from table.wrap(f"{name.short}: {name.full}", indent=2)


def late(ns: int) -> str:
    """Return a sentence about GPU time that no report has."""
    return f"{table.duration(ns)} of GPU time became known only after the report of its interval"


def end(session: Session, losses: dict[str, Any], late_ns: int, results: ResultWriter) -> None:
    """Write the summary of the whole measurement.

    losses: see `LaunchLosses.fields`. The session knows only an upper bound of the lost launches.
    late_ns: GPU time that no report has.
    """
    summary = session.summary() | losses | {"late_ns": late_ns}
    summary["lost"] = losses["launches_lost"] + losses["operations_lost"]
    lines = summary_text.summary_lines(summary | {"lost": 0})
    lines += latency_text.loss_lines(losses | {"launches_behind_unseen": 0})
    lines += table.wrap(late(late_ns)) if late_ns else []
    if losses["launches_timed"]:
        lines.append(clock(session.device.virtual, losses["clock_error_ns"], losses["clock_steps"]))
    results.end(summary, lines)


def clock(virtual: bool, error_ns: int | None, steps: int) -> str:
    """Return a line about the largest error of the times of kernels. steps: how often a clock was set or jumped."""
    if virtual:
        return "virtual clock: times are exact"
    known = "unknown" if error_ns is None else f"up to {table.duration(error_ns)}"
    return f"clock error: {known}" + (f"; {table.count(steps, 'clock step')}" if steps else "")

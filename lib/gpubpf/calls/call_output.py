"""Print individual calls: each call (-e), and slow calls with the causes of their latency (--slow)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf.calls import call_lines, delay_text, kfd, records
from gpubpf.calls.call_fields import CALL
from gpubpf.calls.delays import Cause, RecentSpans
from gpubpf.calls.statistics import NameOrAddress
from gpubpf.names import KernelName, Labels
from gpubpf.show import cli
from gpubpf.show.owner_columns import Owner, OwnerColumns

if TYPE_CHECKING:
    from gpubpf.calls.api import Api
    from gpubpf.calls.driver_log import DriverLog
    from gpubpf.calls.snoop_options import SnoopOptions

MOST_SLOW = 10_000  # maximum slow calls of an interval in the table of threads


class CallOutput:
    """Where and how to print calls, and the names that this needs.

    name_of: returns the name of a kernel, given process and handle.
    comm: returns the name of a process.
    owners: decides whether rows name their process.
    """

    def __init__(
        self,
        api: Api,
        name_of: Callable[[int, int], NameOrAddress],
        comm: Callable[[int], str],
        owners: OwnerColumns,
        options: SnoopOptions,
        out: cli.Output,
    ) -> None:
        self._api, self.name_of, self._comm = api, name_of, comm
        self.owners, self.options, self.out = owners, options, out
        self._form = options.shared.output
        self.origin_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self._clock_ns = time.time_ns() - self.origin_ns
        self._labels = Labels()
        self._headed: bool | None = None  # whether the last header has columns for processes

    @property
    def columns(self) -> call_lines.CallColumns:
        """The current columns of text lines."""
        return call_lines.CallColumns(
            self.origin_ns,
            self.owners.processes,
            self._clock_ns if self._form.timestamps else None,
            self._form.verbose,
            self._labels.cut,
        )

    def _label_of(self, pid: int, handle: int) -> NameOrAddress:
        """Return the label of a kernel for text, which distinguishes kernels with the same name."""
        name = self.name_of(pid, handle)
        return self._labels.label(name.mangled) if isinstance(name, KernelName) else name

    def see_owners(self, events: Any) -> None:
        """Record which processes made these calls, since lines name the process if there are several."""
        import numpy as np

        pids = np.unique(events["tgid"]).tolist()
        self.owners.see(Owner(pid, self._comm(pid), 0) for pid in pids)

    def call_records(self, events: Any) -> list[dict[str, Any]]:
        """Return the record "call" of each event. For text, kernels have their labels."""
        name_of = self.name_of if self._form.json or self._form.csv else self._label_of
        return records.call_records(events, self._api, name_of)

    def texts(self, events: Any) -> list[str]:
        """Return a description of each event."""
        groups = records.group_calls(events, self._api, self._label_of)
        return records.in_call_order((group.positions, call_lines.call_texts(group)) for group in groups)

    def csv_header(self, columns: tuple[str, ...]) -> None:
        """Print the header unless something was already printed."""
        if not self.out.began:
            self.out.write(cli.csv_cells(columns) + "\n")

    def print_calls(self, events: Any) -> None:
        """Print a line for each event."""
        if self._form.json:
            self._write(events, call_lines.json_lines, self.name_of)
        elif self._form.csv:
            self.csv_header(CALL.columns)
            self._write(events, call_lines.csv_lines, self.name_of)
        else:
            self.see_owners(events)
            columns = self.columns
            if columns.several != self._headed:
                self._headed = columns.several
                self.out.line(columns.header)
            self._write(events, lambda group: call_lines.text_lines(group, columns), self._label_of)

    def _write(
        self,
        events: Any,
        lines: Callable[[records.CallGroup], Iterable[str]],
        name_of: Callable[[int, int], NameOrAddress],
    ) -> None:
        for text in records.format_calls(events, self._api, name_of, lines):
            self.out.write(text)

    def print_dispatches(self, dispatches: Sequence[dict[str, Any]]) -> None:
        """Print kernel dispatches as JSON or text. CSV has no place for them."""
        if self._form.json:
            self.out.records(dispatches)
        elif not self._form.csv:
            columns = self.columns
            self.out.lines(call_lines.dispatch_line(record, columns) for record in dispatches)


class SlowCalls:
    """The calls of --slow, with the causes of their latency."""

    def __init__(self, output: CallOutput, driver: DriverLog | None) -> None:
        self._output, self._driver = output, driver
        self._spans = RecentSpans()
        self._slow: list[tuple[dict[str, Any], list[Cause]]] = []  # since the last report

    def add_spans(self, spans: Any) -> None:
        """Add delays of threads. Add them before the calls that contain them."""
        self._spans.add(spans)

    def print_calls(self, events: Any, call_records: Sequence[dict[str, Any]]) -> None:
        """Print slow calls with their causes, and keep them for `threads`. With -e, text and CSV show them
        without causes.
        """
        explained = [(record, self._causes(record)) for record in call_records]
        if len(self._slow) < MOST_SLOW:
            self._slow += explained
        output = self._output
        form = output.options.shared.output
        if form.json:
            output.out.records(
                record | {"why": [delay_text.cause_record(cause) for cause in causes]}
                for record, causes in explained
            )
        elif explained and not form.csv and not output.options.calls.each:
            output.see_owners(events)
            for text, (record, causes) in zip(output.texts(events), explained, strict=True):
                several = output.owners.processes
                output.out.lines(delay_text.slow_call_lines(record, text, causes, output.origin_ns, several))

    def _causes(self, record: dict[str, Any]) -> list[Cause]:
        """Return why the call's thread was off the CPU, and what the GPU's driver did meanwhile."""
        pid, start, end = record["pid"], record["ts_ns"], record["ts_ns"] + record["lat_ns"]
        found = self._spans.explain(pid, record["tid"], start, end)
        return found + (kfd.causes_during(self._driver.recent, pid, start, end) if self._driver else [])

    def threads(self) -> Iterable[str]:
        """Return the table of threads that made slow calls since the last report."""
        slow, self._slow = self._slow, []
        return delay_text.slow_threads(slow, self._output.owners.processes)

"""What hipsnoop and cudasnoop print, from the beginning of a measurement to its end.

report = CallReport(ReportInputs(api, calls, delay_probes, kernels, processes, vendor), options, out)
with processes.follow(calls):
    report.begin()
    for _ in processes.intervals(report.tick, calls.stop):
        report.show()
    report.end()
sys.exit(processes.status or report.status)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf.calls import delay_text, statistics_text, summary_text
from gpubpf.calls.attached_processes import AttachedProcesses
from gpubpf.calls.call_fields import FUNCTION
from gpubpf.calls.call_output import CallOutput, SlowCalls
from gpubpf.calls.driver_log import DriverLog
from gpubpf.calls.kernel_times import with_gpu_times
from gpubpf.calls.selection import KernelSelection, LaunchSelection
from gpubpf.calls.statistics import CallStatistics, by_function, by_kernel, merge_sums, sums_of_events
from gpubpf.calls.timeline import PendingTimeline, TraceFile
from gpubpf.gpus import hip_devices
from gpubpf.record import Record, replace
from gpubpf.show import cli
from gpubpf.show.owner_columns import OwnerColumns

if TYPE_CHECKING:
    from gpubpf.calls.api import Api
    from gpubpf.calls.delay_probes import DelayProbes
    from gpubpf.calls.kernel_names import KernelNames
    from gpubpf.calls.kernel_times import KernelTimes
    from gpubpf.calls.kfd import DriverEvents
    from gpubpf.calls.probes import CallProbes
    from gpubpf.calls.snoop_options import SnoopOptions
    from gpubpf.calls.traced_processes import TracedProcesses
    from gpubpf.gpus.hip_devices import HipDevices

TICK = 0.1  # seconds between two readings of the programs' records
# Seconds: how often and for how long to look for the first call, as the process may be short.
EARLY_TICK, EARLY = 0.005, 1.0


class VendorInterfaces(Record):
    """A GPU vendor's own interfaces, which report more than the calls. None: the vendor has no such interface.

    kernel_times: when kernels ran on the GPU.
    driver: what the vendor's driver in the Linux kernel reports.
    devices: which GPUs there are.
    device_notice: a notice about the device, printed as soon as a process uses it.
    """

    kernel_times: KernelTimes | None = None
    driver: DriverEvents | None = None
    devices: HipDevices | None = None
    device_notice: str | None = None


class ReportInputs(Record):
    """What a report reads."""

    api: Api
    calls: CallProbes
    delay_probes: DelayProbes
    kernels: KernelNames
    processes: TracedProcesses
    vendor: VendorInterfaces


class SelectedSums:
    """The sums of the launches that --launch and --sample select. The programs in the kernel do not know this
    selection.
    """

    def __init__(self, launches: LaunchSelection, empty: Any) -> None:
        self._launches, self._empty = launches, empty
        self._sums = empty

    def add(self, events: Any, kernels: KernelSelection, name_of: Any) -> Any:
        """Add the selected launches among new events, and return these launches."""
        chosen = self._launches.select(kernels.select(events, name_of), name_of)
        if len(chosen):
            self._sums = merge_sums([self._sums, sums_of_events(chosen, self._empty.dtype)])
        return chosen

    def take(self) -> Any:
        """Return the sums since the last call."""
        found, self._sums = self._sums, self._empty
        return found


class CallReport:
    """Prints the results of a measurement, and notices about it. `status`: the exit status if something
    failed, else 0.
    """

    def __init__(self, inputs: ReportInputs, options: SnoopOptions, out: cli.Output) -> None:
        self._inputs, self._options, self._out = inputs, options, out
        self._form, views = options.shared.output, options.calls
        self._processes = AttachedProcesses(
            inputs.processes,
            inputs.calls,
            inputs.kernels,
            options,
            out,
            self._note,
            inputs.vendor.device_notice,
        )
        self._owners = OwnerColumns(inputs.processes.everyone or len(set(options.shared.targets.pids)) > 1)
        self._kernels = KernelSelection(options.shared.kernels.wanted)
        self._selected = _selected_sums(inputs.calls, options)
        self._output = CallOutput(
            inputs.api, inputs.kernels.name, self._processes.comm, self._owners, options, out
        )
        self._driver = (
            DriverLog(inputs.vendor.driver, views.why) if inputs.vendor.driver is not None else None
        )
        self._slow = SlowCalls(self._output, self._driver) if views.slow else None
        self._delays = delay_text.DelayReport(inputs.api, self._processes.comm) if views.why else None
        self._timeline = PendingTimeline(self._note) if views.timeline else None
        self._trace = TraceFile(views.trace, self._complain) if views.trace else None
        self._listed_devices = False
        self._counted = 0
        self.status = 0

    def _note(self, text: str) -> None:
        cli.note(self._form.tool, text)

    def _complain(self, text: str) -> None:
        cli.complain(self._form.tool, text)

    # --- while the programs run ---

    def begin(self) -> None:
        """Announce what is traced."""
        self._processes.begin()

    def tick(self) -> float:
        """Read what the programs recorded, and print single calls. Return the seconds until the next call."""
        inputs = self._inputs
        self._processes.check_maps()
        early = time.monotonic_ns() - inputs.processes.started_ns < EARLY * 1e9
        if self._processes.waiting and early and not inputs.processes.stopped and not inputs.calls.seen:
            return EARLY_TICK
        self._processes.check_calls()
        events = inputs.calls.events() if inputs.calls.options.events else None
        launched = inputs.calls.launched() if events is None else ()
        inputs.kernels.read(inputs.calls.host)  # after reading launches: their kernels were named before
        inputs.delay_probes.tick()
        if self._driver is not None:
            self._driver.read(self._processes.is_traced)
        if events is not None:
            self._take_events(events)
        else:
            for pid, handle in launched:  # look names up now, since the process may end before the report
                inputs.kernels.name(pid, handle)
            self._read_dispatches(None)
        inputs.processes.unread = self._out.closed and (self._trace is None or not self._trace.open)
        return TICK

    def _read_dispatches(self, events: Any) -> list[dict[str, Any]]:
        """Return the records of kernel dispatches that have ended. `events`: new ones, or None if calls are
        not recorded.
        """
        times = self._inputs.vendor.kernel_times
        if times is None:
            return []
        return times.take(events, self._inputs.processes.stopped, self._inputs.calls.ended_ns)

    def _take_events(self, events: Any) -> None:
        views, name_of = self._options.calls, self._inputs.kernels.name
        if self._selected is not None:
            events = self._selected.add(events, self._kernels, name_of)
        if self._slow is not None:
            self._slow.add_spans(self._inputs.delay_probes.spans())
        dispatches = self._read_dispatches(events)
        if not views.needs_events:
            return
        events = self._kernels.select(events, name_of)
        records: list[dict[str, Any]] = []  # made only if needed, because it is slow
        if views.slow or views.timeline or views.trace:
            records = self._output.call_records(events)
        if self._trace is not None:
            self._trace.add(records, dispatches)
        if self._timeline is not None:
            self._timeline.add(records, dispatches)
        if self._slow is not None:
            self._slow.print_calls(events, records)
        if (
            views.each and len(events) and not (self._form.json and views.slow)
        ):  # `SlowCalls` has printed these
            self._output.print_calls(events)
        if views.each and dispatches:
            self._output.print_dispatches(dispatches)

    # --- reports ---

    def show(self) -> None:
        """Print the report of an interval."""
        form, out, inputs = self._form, self._out, self._inputs
        sums = inputs.calls.sums()
        if self._selected is not None:
            sums = self._selected.take()
        sums = self._kernels.select(sums, inputs.kernels.name)
        functions = by_function(sums, self._processes.comm, inputs.api)
        self._counted += sum(row.times.count for row in functions)
        rows, between = inputs.delay_probes.delays() if self._delays is not None else (None, None)
        if self._timeline is not None:
            self._timeline.show(form, out, self._output.origin_ns)
        if self._options.calls.each and self._delays is None:
            return
        kernels = self._kernel_rows(sums)
        if form.json:
            self._print_records(functions, kernels, rows)
        elif form.csv:
            if not self._options.calls.each:
                self._print_csv(functions)
        else:
            out.lines(self._device_lines())
            if form.timestamps:
                out.line(time.strftime("%H:%M:%S"))
            out.lines(self._tables(functions, kernels))
            if self._delays is not None and rows is not None and (len(rows) or functions):
                out.lines(self._delays.lines(rows, between, functions, kernels))
                if self._driver is not None:
                    out.lines(delay_text.driver_event_lines(self._driver.unreported(), self._processes.comm))

    def _kernel_rows(self, sums: Any) -> list[CallStatistics]:
        inputs, comm = self._inputs, self._processes.comm
        rows = by_kernel(sums, comm, inputs.kernels.name, inputs.api)
        return (
            with_gpu_times(rows, inputs.vendor.kernel_times.runs(), comm)
            if inputs.vendor.kernel_times
            else rows
        )

    def _print_records(
        self, functions: Sequence[CallStatistics], kernels: Sequence[CallStatistics], rows: Any
    ) -> None:
        out, comm = self._out, self._processes.comm
        now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        stamp = {"ts_ns": now} if self._form.timestamps else {}
        if not self._options.calls.each:
            out.records(row.function_record() | stamp for row in functions)
            out.records(row.kernel_record() | stamp for row in kernels)
        if self._delays is not None:
            delays = self._delays
            out.records(delays.record(row) | stamp for row in rows)
            if self._driver is not None:
                events = self._driver.unreported()
                out.records(delay_text.driver_record(event, comm(event.pid)) for event in events)

    def _print_csv(self, functions: Sequence[CallStatistics]) -> None:
        stamped = self._form.timestamps
        cells = (time.clock_gettime_ns(time.CLOCK_BOOTTIME),) if stamped else ()
        self._output.csv_header((*(("ts_ns",) if stamped else ()), *FUNCTION.columns))
        rows = (FUNCTION.row(row.function_record()) for row in functions)
        lines = (cli.csv_cells("" if cell is None else cell for cell in (*cells, *row)) for row in rows)
        self._out.write("".join(line + "\n" for line in lines))

    def _device_lines(self) -> Iterator[str]:
        """Yield the GPUs, once, above the first report after they are known."""
        devices = self._inputs.vendor.devices
        if devices is None or self._listed_devices:
            return
        if found := devices.devices(hip_devices.TIMEOUT if self._inputs.processes.stopped else 0.0):
            self._listed_devices = True
            yield from map(hip_devices.describe, found)
            yield ""

    def _tables(
        self, functions: Sequence[CallStatistics], kernels: Sequence[CallStatistics]
    ) -> Iterator[str]:
        if not functions or self._options.calls.each:
            return
        self._owners.see(functions)
        if self._slow is not None:
            yield from self._slow.threads()
        yield from statistics_text.time_and_errors(functions)
        yield ""
        yield from statistics_text.function_table(functions, self._owners, self._form.verbose)
        yield ""
        if kernels:
            yield from statistics_text.kernel_table(kernels, self._owners, self._form.verbose)
            yield ""

    # --- the end ---

    def end(self) -> None:
        """Print the last lines, or the summary record."""
        form, out = self._form, self._out
        if self._trace is not None:
            self._trace.close()
            self.status = self._trace.status
            if not self.status:
                self._note(f"wrote {self._options.calls.trace}")
        if self._inputs.vendor.kernel_times is not None:
            self._inputs.vendor.kernel_times.close()
        summary = self._summary()
        if form.json:
            out.record(**({"type": "summary", "tool": form.tool} | summary))
        elif not form.csv:
            filters = self._options.filters
            out.lines(summary_text.coverage_lines(summary, filters))
            out.lines(summary_text.device_lines(summary, filters))
            out.lines(cli.host_program_lines(summary) if form.verbose else ())
        if self._inputs.processes.terminated:
            return
        from gpubpf.images.listing import no_match

        seen = self._kernels.seen
        if self._kernels.globs and not self._counted:
            self._complain(no_match(self._kernels.globs, seen) if seen else "no kernel was launched")
            self.status = 1
        elif unmatched := self._kernels.unmatched():
            self._note(no_match(unmatched, seen) if seen else "no kernel was launched")
        elif not (
            self._processes.attached
            or self._inputs.calls.incomplete
            or any("late" in one for one in summary["libraries"])
        ):
            self._note(f"no traced process has loaded {self._processes.library}")

    def _summary(self) -> dict[str, Any]:
        """Return the fields of the summary record, without `type` and `tool`."""
        inputs = self._inputs
        calls, processes = inputs.calls, inputs.processes
        counts, lost_by = calls.counts, calls.lost_by
        device = inputs.vendor.kernel_times.summary() if inputs.vendor.kernel_times is not None else {}
        if inputs.vendor.devices is not None and (
            found := inputs.vendor.devices.devices(hip_devices.TIMEOUT)
        ):
            device["devices"] = list(found)
        return device | {
            "calls": self._counted,
            "lost": sum(lost_by.values()),
            "duration_ns": processes.ended_ns - processes.started_ns,
            "lost_by": lost_by,
            "lost_why": inputs.delay_probes.lost,
            "lost_names": inputs.kernels.lost(calls.host),
            "lost_processes": counts.processes,
            "missed": calls.missed,
            "processes": len(calls.seen),
            "nested": counts.nested,
            "abandoned": counts.abandoned,
            "libraries": self._libraries(),
            "host_programs": {
                r.function: {"runs": r.runs, "mean_ns": round(r.mean_ns)} for r in calls.host.runs()
            },
        }

    def _libraries(self) -> list[dict[str, Any]]:
        """Return the files that have probes. `late`: a traced process had mapped the file before it was
        probed.
        """
        found: dict[str, dict[str, Any]] = {}  # several kinds of programs may probe the same file
        for file in self._inputs.calls.placed:
            library = found.setdefault(
                file.path, {"path": file.path, "functions": len(file.functions), "refused": {}}
            )
            library["refused"].update(file.refused)
            if file.late is not None and self._inputs.calls.may_trace(file.late):
                library["late"] = {"pid": file.late, "comm": self._processes.comm(file.late)}
        return list(found.values())


def _selected_sums(calls: CallProbes, options: SnoopOptions) -> SelectedSums | None:
    """Return None unless --launch or --sample selects some launches."""
    if not options.selects_launches:
        return None
    kernels = options.shared.kernels
    return SelectedSums(LaunchSelection(kernels.launches, kernels.sample), calls.sums()[:0])


def without_views_that_csv_lacks(options: SnoopOptions, note: Callable[[str], None]) -> SnoopOptions:
    """Return the options, with --csv without the views for which CSV has no table. Print a notice about these."""
    calls = options.calls
    views = {"--why": calls.why, "--timeline": calls.timeline, "the causes of --slow": calls.slow}
    if not options.shared.output.csv or not (dropped := [view for view in views if views[view]]):
        return options
    note(f"CSV holds only one table, without {' and '.join(dropped)}; use --json for these")
    return replace(options, calls=replace(calls, why=False, timeline=False))

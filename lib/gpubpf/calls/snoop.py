"""Trace the calls of the processes that a command line selects, and print the results: what cudasnoop and hipsnoop share.

status = trace(api.cuda(), PROGRAM, SnoopOptions.of(args), out)
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from gpubpf.calls import command_libraries
from gpubpf.calls.delay_probes import DelayProbes
from gpubpf.calls.kernel_names import KernelNames
from gpubpf.calls.probes import CallOptions, CallProbes
from gpubpf.calls.report import CallReport, ReportInputs, VendorInterfaces, without_views_that_csv_lacks
from gpubpf.calls.traced_processes import TracedProcesses
from gpubpf.gpus.hip_devices import TIMEOUT
from gpubpf.process import users
from gpubpf.show import cli

if TYPE_CHECKING:
    from gpubpf.calls.api import Api
    from gpubpf.calls.snoop_options import SnoopOptions


def trace(
    api: Api,
    program: str,
    options: SnoopOptions,
    out: cli.Output,
    vendor: VendorInterfaces | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Attach the eBPF programs, trace the processes, print the results, and return the exit status.

    api: the functions to trace.
    program: the C text of the eBPF programs call_*, delay_* and kernel_*.
    options: the command line.
    out: where the results go.
    vendor: the vendor's own interfaces; None if it has none.
    environment: variables to add to the command's environment.

    Raises UsageError and SessionError.
    """

    def note(text: str) -> None:
        cli.note(options.shared.output.tool, text)

    vendor = vendor or VendorInterfaces()
    options = without_views_that_csv_lacks(options, note)
    targets, wanted = options.shared.targets, options.calls
    with ExitStack() as stack:
        times = vendor.kernel_times
        counted = CallOptions.of(options, events=times is not None and times.needs_calls)
        if options.everyone and vendor.devices is not None:
            vendor.devices.devices(TIMEOUT)  # wait until this process has ended: its calls would count, too
        processes = TracedProcesses(options.shared, environment or {}, note)

        # Attach to the libraries that the command is likely to load, and to others as soon as a process maps them.
        if targets.command:
            user = users.command_user(targets.user)
            api = command_libraries.with_command_libraries(api, targets.command, user)
        functions = api.choose(wanted.api)
        calls = stack.enter_context(closing(CallProbes(api, functions, counted, note, program)))  # call_*
        delay_probes = DelayProbes(calls, note, why=wanted.why, spans=bool(wanted.slow))  # delay_*
        kernels = KernelNames(api, calls.bpf)  # kernel_*
        calls.start()

        # Start the command, or find the processes. Read the maps every 0.1 s, and print a report each interval.
        report = CallReport(ReportInputs(api, calls, delay_probes, kernels, processes, vendor), options, out)
        with processes.follow(calls):
            report.begin()
            for _ in processes.intervals(report.tick, calls.stop):
                report.show()
                if out.closed:
                    break
            report.end()
        return processes.status or report.status

"""Trace the calls of the processes that a command line selects, and print the results: what cudasnoop and hipsnoop share.

status = trace(api.cuda(), PROGRAM, args, out)
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from gpubpf.calls import command_libraries
from gpubpf.calls.delay_probes import DelayProbes
from gpubpf.calls.hip_devices import TIMEOUT
from gpubpf.calls.kernel_names import KernelNames
from gpubpf.calls.probes import CallOptions, CallProbes
from gpubpf.calls.report import CallReport, ReportInputs, VendorInterfaces, drop_views_without_csv
from gpubpf.calls.traced_processes import TracedProcesses
from gpubpf.process import users
from gpubpf.show import cli

if TYPE_CHECKING:
    from gpubpf.calls.api import Api


def trace(
    api: Api,
    program: str,
    args: argparse.Namespace,
    out: cli.Output,
    vendor: VendorInterfaces | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Attach the eBPF programs, trace the processes, print the results, and return the exit status.

    api: the functions to trace.
    program: the C text of the eBPF programs call_*, delay_* and kernel_*.
    args: the command line.
    out: where the results go.
    vendor: the vendor's own interfaces; None if it has none.
    environment: variables to add to the command's environment.

    Raises UsageError and SessionError.
    """

    def note(text: str) -> None:
        cli.note(args.tool, text)

    vendor = vendor or VendorInterfaces()
    drop_views_without_csv(args, note)
    with ExitStack() as stack:
        times = vendor.kernel_times
        options = CallOptions.from_arguments(args, events=times is not None and times.needs_calls)
        if options.everybody and vendor.devices is not None:
            vendor.devices.devices(TIMEOUT)  # wait until this process has ended: its calls would count, too
        processes = TracedProcesses(args, environment or {}, note)

        # Attach to the libraries that the command is likely to load, and to others as soon as a process maps them.
        if args.command:
            user = users.command_user(args.user)
            api = command_libraries.with_command_libraries(api, args.command, user)
        functions = api.choose(args.api)
        calls = stack.enter_context(closing(CallProbes(api, functions, options, note, program)))  # call_*
        delay_probes = DelayProbes(calls, note, why=args.why, spans=bool(args.slow))  # delay_*
        kernels = KernelNames(api, calls.bpf)  # kernel_*
        calls.start()

        # Start the command, or find the processes. Read the maps every 0.1 s, and print a report each interval.
        report = CallReport(ReportInputs(api, calls, delay_probes, kernels, processes, vendor), args, out)
        with processes.follow(calls):
            report.begin()
            for _ in processes.intervals(report.tick, calls.stop):
                report.show()
                if out.closed:
                    break
            report.end()
        return processes.status or report.status

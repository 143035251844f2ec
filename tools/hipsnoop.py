#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""hipsnoop   HIP calls and kernels, and why a call, or a gap between launches, was long.

USAGE: hipsnoop [options] [interval [count]] [-p PID[,PID...] | -- COMMAND [ARG...]]

eBPF programs in the Linux kernel run when a thread enters or leaves a function of AMD's HIP runtime library.
Other programs, at tracepoints, measure why the thread was off the CPU meanwhile. Nothing is injected into the
process, with one exception: if rocprofiler-sdk is installed, on hipsim, or with GPUBPF_HSA_TIMES=1, ROCm
loads a small library into COMMAND, which reports when kernels ran on the GPU.
"""

from __future__ import annotations

import os.path
import sys

if __package__ in (None, ""):  # run as tools/hipsnoop.py: the library is in ../lib
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "lib"))

from gpubpf.show import cli  # early: Ctrl-C is answered quietly from here on

TYPE_CHECKING = False
from contextlib import ExitStack, closing  # noqa: E402

if TYPE_CHECKING:
    from gpubpf.calls.snoop_options import SnoopOptions

TOOL = "hipsnoop"
WHAT = "Trace HIP calls and kernels: why a call, or a gap between launches, was long."
EXAMPLES = """examples:
    hipsnoop -- ./app                       which calls take how long
    hipsnoop -p 4711 1                      a running process, every second
    hipsnoop -e -- ./app                    a line for each call
    hipsnoop -e --api '*Memcpy*' -- ./app   only copies
    hipsnoop --errors -e                    failed calls, all processes (root)
    hipsnoop --slow 500 -- ./app            calls over 500 us, and why
    hipsnoop --why -d 10 -p 4711            what calls and gaps wait for
    hipsnoop --kernel 'gemm*' -- ./app      only launches of these kernels
    hipsnoop --trace t.json -- ./app        a trace for ui.perfetto.dev
    hipsnoop --json -e -o f -- ./app        each call, as JSON Lines
"""
PROGRAM = r"""
#include <gpubpf.h>

/*
 * call_entry, call_return     uprobes at entry and returns of every chosen function: count the call, measure its latency, and
 *                             with -e, --slow, --timeline or --trace record its arguments and its result
 * call_newtask                task_newtask: trace the processes that a traced process starts
 * call_exec, call_exit        sched_process_exec, sched_process_exit: forget threads that end
 */
#include <gpubpf_calls.h>

/*
 * delay_switch_time           sched_switch: how long threads that make calls are off the CPU
 * delay_switch                with --why or --slow in its place: also why, and in which system call
 * delay_reclaim, delay_reclaimed, delay_fault, delay_retransmit
 *                             with --why or --slow, at mm_vmscan_*_reclaim_*, page_fault_user and tcp_retransmit_skb:
 *                             memory pressure, page faults and TCP retransmits
 */
#include <gpubpf_delays.h>

/*
 * kernel_told, kernel_given   uprobes at entry and returns of functions that register or find kernels: the name behind a handle
 */
#include <gpubpf_kernels.h>
"""


def build_parser() -> cli.Parser:
    """Return the parser: the options that all tools share, which calls to trace, and what to show."""
    parser = cli.parser(TOOL, WHAT, EXAMPLES)
    cli.add_targets(parser, in_linux=True)
    cli.add_calls(parser)
    cli.add_call_views(parser)
    cli.add_host_filters(parser, "calls")
    cli.add_embedded_device(parser)
    cli.add_looks(parser, device_programs=False)
    cli.add_output(parser, "gpubpf.calls.call_fields:HIP")
    return parser


def measure(options: SnoopOptions, out: cli.Output) -> int:
    """Attach the programs, trace the processes, and print. Return the exit status."""
    from gpubpf.calls import api, kfd, snoop
    from gpubpf.calls.kernel_times import kernel_times_of_command
    from gpubpf.calls.report import VendorInterfaces
    from gpubpf.calls.traced_processes import check_privileges
    from gpubpf.gpus.hip_devices import HipDevices
    from gpubpf.traced import amd_device

    check_privileges(options.shared.targets)
    with ExitStack() as stack:
        simulated, notice = amd_device.of_command(options.shared)
        # AMD's own interfaces: when kernels ran on the GPU, which GPUs there are, and what the driver does to processes.
        kernel_times = stack.enter_context(closing(kernel_times_of_command(api.hip(), options, simulated)))
        devices = stack.enter_context(closing(HipDevices()))
        asks_driver = options.calls.why or options.calls.slow
        driver = kfd.open_devices(lambda text: cli.note(TOOL, text)) if asks_driver else None
        if driver is not None:
            stack.enter_context(closing(driver))
        vendor = VendorInterfaces(kernel_times, driver, devices, notice)
        environment = {**simulated, **kernel_times.environment}
        return snoop.trace(api.hip(), PROGRAM, options, out, vendor, environment)


@cli.command(TOOL)
def main(argv: list[str] | None = None) -> int:
    args = cli.parse(build_parser(), argv)
    from gpubpf.calls.snoop_options import SnoopOptions

    options = SnoopOptions.of(args)
    out = cli.open_results(options.shared.output)
    if args.ebpf:
        from gpubpf.ebpf import headers

        out.write(headers.self_contained(PROGRAM).lstrip())
        return 0
    if args.list:
        from gpubpf.calls import api, listing
        from gpubpf.traced import amd_device

        simulated, notice = amd_device.of_command(options.shared)
        if notice:
            cli.note(TOOL, notice)
        return listing.show(api.hip(), PROGRAM, options, out, simulated)
    return measure(options, out)


if __name__ == "__main__":
    sys.exit(main())

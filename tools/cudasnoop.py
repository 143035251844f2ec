#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""cudasnoop   CUDA calls and kernels, and why a call, or a gap between launches, was long.

USAGE: cudasnoop [options] [interval [count]] [-p PID[,PID...] | -- COMMAND [ARG...]]

This is hipsnoop for CUDA. eBPF programs in the Linux kernel run when a thread enters or leaves a function of
NVIDIA's driver or runtime library. Other programs, at tracepoints, measure why the thread was off the CPU
meanwhile. Nothing is injected into the process.
"""

from __future__ import annotations

import os.path
import sys

if __package__ in (None, ""):  # run as tools/cudasnoop.py: the library is in ../lib
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "lib"))

from gpubpf.show import cli  # early: Ctrl-C is answered quietly from here on

TYPE_CHECKING = False
import shlex  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpubpf.calls.snoop_options import SnoopOptions

TOOL = "cudasnoop"
WHAT = "Trace CUDA calls and kernels: why a call, or a gap between launches, was long."
EXAMPLES = """examples:
    cudasnoop -- ./app                       which calls take how long
    cudasnoop -p 4711 1                      a running process, every second
    cudasnoop -e -- ./app                    a line for each call
    cudasnoop -e --api '*Memcpy*' -- ./app   only copies
    cudasnoop --errors -e                    failed calls, all processes (root)
    cudasnoop --slow 500 -- ./app            calls over 500 us, and why
    cudasnoop --why -d 10 -p 4711            what calls and gaps wait for
    cudasnoop --kernel 'gemm*' -- ./app      only launches of these kernels
    cudasnoop --trace t.json -- ./app        a trace for ui.perfetto.dev
    cudasnoop --json -e -o f -- ./app        each call, as JSON Lines
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
    cli.add_looks(parser, device_programs=False)
    cli.add_output(parser, "gpubpf.calls.call_fields:CUDA")
    return parser


def measure(options: SnoopOptions, out: cli.Output) -> int:
    """Attach the programs, trace the processes, and print. Return the exit status."""
    from gpubpf.calls import api, snoop
    from gpubpf.calls.traced_processes import check_privileges

    check_privileges(options.shared.targets)
    status = snoop.trace(api.cuda(), PROGRAM, options, out)
    if (command := options.shared.targets.command) and status:
        say_if_no_gpu(command)
    return status


def say_if_no_gpu(command: Sequence[str]) -> None:
    """Say how to run a command that has failed on the embedded device, if there is no GPU."""
    from gpubpf.traced import device

    if any("cudasim" in word for word in command) or not isinstance(reason := device.ask_driver(), str):
        return
    if reason != device.EMBEDDED:
        cli.note(TOOL, f"no GPU here; use {TOOL} -- cudasim -- {shlex.join(command)}")


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

        return listing.show(api.cuda(), PROGRAM, options, out)
    return measure(options, out)


if __name__ == "__main__":
    sys.exit(main())

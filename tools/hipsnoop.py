#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""hipsnoop   HIP calls and kernels, and why a call, or a gap between launches, was long.

USAGE: hipsnoop [options] [interval [count]] [-p PID[,PID...] | -- COMMAND [ARG...]]

Programs in the Linux kernel run where a process enters a function of AMD's runtime library and where it returns. Others see what its
threads did meanwhile. Nothing is put into the process; but where rocprofiler-sdk is installed, ROCm loads a small library into a
command, which tells when kernels ran.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as tools/hipsnoop.py: the library is beside
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "lib"))

from gpubpf.show import cli

TOOL = "hipsnoop"
WHAT = "HIP calls and kernels, and why a call, or a gap between launches, was long."
EXAMPLES = """examples:
    hipsnoop -- ./app                        which calls ./app makes, how long they take
    hipsnoop -p 4711 1                       a program that runs already, each second
    hipsnoop -e -- ./app                     a line for each call
    hipsnoop -e --api '*Memcpy*' -- ./app    copies only
    hipsnoop --errors -e                     calls that fail, of every process (as root)
    hipsnoop --slow 500 -- ./app             calls of more than 500 us, and what happened inside
    hipsnoop --why -d 10 -p 4711             what calls and gaps between launches wait for
    hipsnoop --kernel 'gemm*' -- ./app       launches of these kernels
    hipsnoop --trace t.json -- ./app         a trace for ui.perfetto.dev
    hipsnoop --json -e -o f -- ./app         each call, as JSON Lines
"""
PROGRAM = r"""
#include <gpubpf.h>
#include <gpubpf_calls.h>                        /* at each call's entry and return: what it was, how long it took */
#include <gpubpf_context.h>                      /* at tracepoints: what the thread did meanwhile */
#include <gpubpf_kernels.h>                      /* where programs say what their kernels are called */
"""


def build_parser() -> cli.Parser:
    """Options: the shared ones; which calls, and what to show of them."""
    parser = cli.parser(TOOL, WHAT, EXAMPLES)
    cli.add_targets(parser)
    cli.add_calls(parser)
    cli.add_call_views(parser)
    cli.add_host_filters(parser, "calls")
    cli.add_looks(parser, device_programs=False)
    cli.add_output(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    with cli.errors(TOOL):
        args = cli.parse(build_parser(), argv)
        out = cli.open_results(args)
        if args.ebpf:
            out.write(PROGRAM.lstrip())
            return 0
        from gpubpf.calls import hip, tool

        return tool.run(hip.API, PROGRAM, args, out)


if __name__ == "__main__":
    sys.exit(main())

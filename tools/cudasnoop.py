#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""cudasnoop   CUDA calls and kernels, and why a call, or a gap between launches, was long.

USAGE: cudasnoop [options] [interval [count]] [-p PID[,PID...] | -- COMMAND [ARG...]]

hipsnoop with CUDA's functions: programs in the Linux kernel run where a process enters a function of NVIDIA's driver or runtime
library and where it returns. Others see what its threads did meanwhile. Nothing is put into the process.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as tools/cudasnoop.py: the library is beside
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "lib"))

from gpubpf.show import cli

TOOL = "cudasnoop"
WHAT = "CUDA calls and kernels, and why a call, or a gap between launches, was long."
EXAMPLES = """examples:
    cudasnoop -- ./app                       which calls ./app makes, how long they take
    cudasnoop -p 4711 1                      a program that runs already, each second
    cudasnoop -e -- ./app                    a line for each call
    cudasnoop -e --api '*Memcpy*' -- ./app   copies only
    cudasnoop --errors -e                    calls that fail, of every process (as root)
    cudasnoop --slow 500 -- ./app            calls of more than 500 us, and what happened inside
    cudasnoop --why -d 10 -p 4711            what calls and gaps between launches wait for
    cudasnoop --kernel 'gemm*' -- ./app      launches of these kernels
    cudasnoop --trace t.json -- ./app        a trace for ui.perfetto.dev
    cudasnoop --json -e -o f -- ./app        each call, as JSON Lines
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
        from gpubpf.calls import cuda, tool

        return tool.run(cuda.API, PROGRAM, args, out)


if __name__ == "__main__":
    sys.exit(main())

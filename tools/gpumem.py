#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""gpumem   Show who holds GPU memory, and what is never freed, by the host's call stack.

USAGE: gpumem [options] [interval [count]] [-p PID[,PID...] | -- COMMAND [ARG...]]

The agent logs each call that allocates or frees GPU memory, with its host stack. The tool adds up what is live.
"""

from __future__ import annotations

import os.path
import sys

if __package__ in (None, ""):  # run as tools/gpumem.py: the library is in ../lib
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "lib"))

from gpubpf.show import cli  # early: Ctrl-C is answered quietly from here on

TOOL = "gpumem"
EXAMPLES = """examples:
    gpumem -- ./app                        who holds memory at the end
    gpumem -v --top 5 -- ./app             with all frames of five stacks
    gpumem 10 -- ./app                     also every 10 s, with the growth
    gpumem --snapshot -- ./app             also each live allocation
    gpumem -p 1234 -d 60                   what a running program allocates
    gpumem --json -o held.jsonl -- ./app   a record for each stack
    gpumem --csv -o held.csv -- ./app      a table for other programs
"""
LOG_RECORDS = 1 << 20


def build_parser() -> cli.Parser:
    """Return the parser: the shared options, and how much to show."""
    parser = cli.parser(TOOL, "Show who holds GPU memory, by the host's call stack.", EXAMPLES)
    cli.add_targets(parser)
    shown = parser.add_argument_group("what to show")
    shown.add_argument(
        "--top", type=cli.positive, metavar="N", help="show only the N rows with the most bytes"
    )
    shown.add_argument(
        "--snapshot",
        action="store_true",
        help="also print each live allocation, with its address and how long it has been held",
    )
    cli.add_device(parser, times=True)
    cli.add_output(parser, "gpubpf.held.report")
    return parser


@cli.command(TOOL)
def main(argv: list[str] | None = None) -> int:
    """Run the tool; return its exit status."""
    parser = build_parser()
    args = cli.parse(parser, argv)
    if args.snapshot and args.csv:
        parser.error("--csv has no allocations, only what each stack holds; use --json with --snapshot")
    options = cli.Options.of(args)
    out = cli.open_results(options.output)
    from gpubpf.session import tracing
    from gpubpf.traced.measurement import Follow

    follow = Follow(log_records=LOG_RECORDS, allocation_stacks=True)
    session = tracing.trace(options, None, (), {}, out, follow)
    with session:
        from gpubpf.held.memory import Memory  # NumPy would delay the first hook
        from gpubpf.held.report import Report
        from gpubpf.show.owner_columns import OwnerColumns

        memory = Memory()
        results = cli.ResultWriter(options.output, out, session.now_ns)
        if session.targets.pids or session.targets.all_processes:
            cli.note(TOOL, "what a program allocated before the attach is unknown, and in no sum")
        report = Report(memory, OwnerColumns(session.several), args.top, args.verbose, args.snapshot)

        def take() -> None:
            for log in session.logs():
                memory.add(log)

        for _ in session.intervals(args.interval, args.count, tick=take):
            take()
            results.begin()
            report.show(results, bool(args.interval))
            if out.closed:
                break
        report.end(session, results)
    return session.status


if __name__ == "__main__":
    sys.exit(main())

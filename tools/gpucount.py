#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""gpucount   Count how often GPU kernels reach a point: a launch, an exit, a load, a barrier, a function.

USAGE: gpucount [options] SPEC... [interval [count]] [-p PID[,PID...] | -- COMMAND [ARG...]]

A SPEC names a point, kernels and a filter. gpucount makes a device program of each; a warp adds up its lanes, and one of them counts
for all. The traced program needs no change and no rebuild.
"""

from __future__ import annotations

import os.path
import sys

if __package__ in (None, ""):  # run as tools/gpucount.py: the library is in ../lib
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "lib"))

from gpubpf.show import cli  # early: Ctrl-C is answered quietly from here on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpubpf.expressions.counts import Count
    from gpubpf.show.owner_columns import OwnerColumns

TOOL = "gpucount"
EXAMPLES = """examples:
    gpucount 'kernel:*' -- ./app                launches and threads
    gpucount 'store:scale:global' 'barrier:*' -- ./app
    gpucount 'load:ns::* (lane == 0)' -- ./app  loads by lane 0
    gpucount 'access:*:atom.shared' -- ./app    atomics in shared memory
    gpucount 'store:* (isnan(value))' -- ./app  stores of NaN
    gpucount 'float:*:*.f64' -- ./app           arithmetic on doubles
    gpucount 'func:*:*norm*' -- ./app           calls of these functions
    gpucount --json -o out.jsonl 'exit:*' -- ./app
    gpucount --sass 'store:*:global' -- ./app   also kernels without PTX
    gpucount 'kernel:*' 1 10 -p 1234            each second, ten times
"""
PROGRAM = r"""
#include <gpubpf.h>

struct tally { u64 count, threads; };            /* warps, or barriers of warps; active lanes */

/* What a SPEC counts at one place in one kernel. The lowest lane counts for all that the filter lets pass. */
static inline int add(struct tally *to, gpu_mask lanes) {
    if (!to || !gpu_first(lanes))
        return 0;
    __sync_fetch_and_add(&to->count, 1);
    __sync_fetch_and_add(&to->threads, gpu_popcount(lanes));
    return 0;
}

/* For each SPEC, a map and a program follow: gpucount --ebpf SPEC... prints them. */
"""


def build_parser() -> cli.Parser:
    """Return the parser: specifications, and the shared options."""
    parser = cli.parser(TOOL, "Count how often GPU kernels reach a point.", EXAMPLES, cli.spec_usage(TOOL))
    cli.add_targets(parser, "POINT:KERNEL[:DETAIL] [(FILTER)], such as 'load:scale:global (lane == 0)'")
    cli.add_kernels(parser)
    cli.add_patches(parser)
    cli.add_threads(parser)
    cli.add_budget(parser)
    cli.add_device(parser)
    cli.add_looks(parser)
    cli.add_output(parser, "gpubpf.expressions.counts")
    return parser


@cli.command(TOOL)
def main(argv: list[str] | None = None) -> int:
    """Run the tool; return its exit status."""
    args = cli.parse(build_parser(), argv)
    options = cli.Options.of(args)
    from gpubpf.expressions import programs, specs

    wanted = specs.read(args.specs, options.looks, specs.count)
    kernels = specs.choose_kernels(args.kernel, wanted)
    options = options.with_kernels(specs.union(kernels))
    text = programs.counting(PROGRAM, wanted, options.threads.filtered)
    out = cli.open_results(options.output)
    if args.ebpf:
        out.write(text)
        return 0
    from gpubpf.program import BPF
    from gpubpf.show.owner_columns import OwnerColumns
    from gpubpf.traced.measurement import Follow

    b = BPF(text=text, any_user=True)
    b.say_verdict(args.tool)
    b.limit(options.kernels)
    programs.attach(b, wanted, kernels, args.tool)
    if args.list or args.ptx:
        return b.show_kernels(options, out)
    follow = Follow(log_records=1 << 17 if specs.any_launches(wanted) else 0)
    with b.trace(options, out, follow) as session:
        from gpubpf.expressions.counts import Counts  # imports NumPy, which would delay the first probe

        counts = Counts(wanted, kernels)
        results, owners = cli.ResultWriter(options.output, out, session.now_ns), OwnerColumns(session.several)
        for _ in session.intervals(args.interval, args.count, tick=lambda: counts.take(session)):
            report(counts.read(session, bool(args.interval)), owners, results)
            if out.closed:
                break
        counts.launches.say_lost(args.tool)
        results.end(session.summary() | {"log_lost": counts.launches.lost, "verified_by": b.verified_by})
    return session.status


def report(found: list[Count], owners: OwnerColumns, results: cli.ResultWriter) -> None:
    """Print what was counted since the last report."""
    from gpubpf.expressions import counts

    results.begin()
    if results.form == "text":
        results.out.lines([*counts.lines(found, owners, results.options.verbose), ""])
    else:
        results.records(counts.COUNT, found)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""gputrace   Print a line for each event in a GPU kernel that a filter lets pass, with values that you choose.

USAGE: gputrace [options] 'SPEC [(FILTER)] ["FORMAT", EXPR...]'... [-p PID[,PID...] | -- COMMAND [ARG...]]

A SPEC names a point and kernels; FILTER and EXPR are C expressions over what is known there, and FORMAT is that of printf. gputrace
makes a device program of each, which sends a record of each event. The traced program needs no change and no rebuild.
"""

from __future__ import annotations

import os.path
import sys

if __package__ in (None, ""):  # run as tools/gputrace.py: the library is in ../lib
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "lib"))

from gpubpf.show import cli  # early: Ctrl-C is answered quietly from here on

TOOL = "gputrace"
EXAMPLES = """examples:
    gputrace 'exit:vectorAdd (lane == 31) "%u %lu", block, globaltimer' -- ./app
    gputrace 'kernel:* "%lu threads in %lu blocks", threads, grid' -- ./app
    gputrace 'store:*:global (address % 4) "%p %s", address, source' -- ./app
    gputrace 'barrier:*:leave (waited > 1000) "%lu cycles", waited' -- ./app
    gputrace 'store:* (isnan(value)) "NaN at %s", source' -- ./app
    gputrace 'load:*:global "%f", value' -- ./app
    gputrace --block 0 --thread 0 'entry:*' 'exit:*' -- ./app
    gputrace --json -o out 'exit:*:loads (work > 100) "%lu", work' -- ./app
    gputrace --sass 'store:*:global "%p", address' -- ./app
    gputrace -T -d 5 'atomic:*:global (lane == 0)' -p 1234
"""
PAGES = 16384  # of the ring buffer, 4096 bytes each
PROGRAM = r"""
#include <gpubpf.h>

struct place { u64 launch, time, thread; u32 site, spec; };  /* spec: the number of the SPEC, from 0 */

/* Where and when an event is; its values follow in the record. */
static inline void describe(struct place *to, u64 launch, u32 site, u32 spec, u64 time) {
    to->launch = launch;
    to->time = time;
    to->thread = gpu_global_thread();
    to->site = site;
    to->spec = spec;
}

/* For each SPEC, a program follows: gputrace --ebpf SPEC... prints them. */
"""


def build_parser() -> cli.Parser:
    """Return the parser: specifications, and the shared options."""
    parser = cli.parser(
        TOOL, "Print events in GPU kernels, with values that you choose.", EXAMPLES, cli.spec_usage(TOOL)
    )
    cli.add_targets(parser, "'POINT:KERNEL[:DETAIL] [(FILTER)] [\"FORMAT\"[, EXPR...]]'")
    cli.add_kernels(parser)
    cli.add_patches(parser)
    cli.add_threads(parser)
    cli.add_budget(parser)
    cli.add_device(parser, times=True, default="default with -T, or if an expression reads a clock")
    cli.add_rings(parser)
    cli.add_looks(parser)
    cli.add_output(parser, "gpubpf.expressions.events")
    return parser


@cli.command(TOOL)
def main(argv: list[str] | None = None) -> int:
    """Run the tool; return its exit status."""
    args = cli.parse(build_parser(), argv)
    options = cli.Options.of(args)
    from gpubpf.expressions import programs, specs

    wanted = specs.read(args.specs, options.looks, specs.trace)
    kernels = specs.choose_kernels(args.kernel, [one.spec for one in wanted])
    times = args.timestamps or any(specs.tells_times(*one.numbers, one.spec.filter) for one in wanted)
    options = options.with_kernels(specs.union(kernels)).with_times(times)
    text = programs.tracing(PROGRAM, wanted, PAGES, options.threads.filtered)
    out = cli.open_results(options.output)
    if args.ebpf:
        out.write(text)
        return 0
    from gpubpf.program import BPF
    from gpubpf.session import tracing
    from gpubpf.show.owner_columns import OwnerColumns
    from gpubpf.traced.measurement import Follow

    b = BPF(text=text, any_user=True)
    b.say_verdict(args.tool)
    b.limit(options.kernels)
    programs.attach(b, [one.spec for one in wanted], kernels, args.tool)
    if args.list or args.ptx:
        return b.show_kernels(options, out)
    follow = Follow(log_records=1 << 17, ring_size=(1 << 28) if tracing.virtual(options) else None)
    with b.trace(options, out, follow) as session:
        from gpubpf.expressions.events import (  # imports NumPy, which would delay the first probe
            Events,
            Printer,
        )

        results = cli.ResultWriter(options.output, out, session.now_ns)
        if times:
            results.head(session.device.clock_notice)
        events = Events(wanted, kernels)
        printer = Printer(out, results, OwnerColumns(session.several), args.timestamps)
        for _ in session.intervals(args.interval, args.count, tick=lambda: printer(events.take(session))):
            if out.closed:
                break
        events.end(session, results, b.verified_by)
    return session.status


if __name__ == "__main__":
    sys.exit(main())

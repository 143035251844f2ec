#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""gpudist   The distribution of a value inside GPU kernels: a histogram, or how often each value occurs.

USAGE: gpudist [options] -H|-L|-C SPEC:TYPE:EXPR... [interval [count]] [-p PID[,PID...] | -- COMMAND [ARG...]]

A SPEC names a point, kernels and a filter; EXPR is a C expression over what is known there. gpudist makes a device program of each,
which adds up on the GPU. The traced program needs no change and no rebuild.
"""

from __future__ import annotations

import os.path
import sys

if __package__ in (None, ""):  # run as tools/gpudist.py: the library is in ../lib
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "lib"))

from gpubpf.show import cli  # early: Ctrl-C is answered quietly from here on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpubpf.expressions.distributions import Found
    from gpubpf.expressions.specs import Distribution
    from gpubpf.show.owner_columns import OwnerColumns
    from gpubpf.show.parsed import LookOptions

TOOL = "gpudist"
EXAMPLES = """examples:
    gpudist -H 'exit:*:loads:u64:work' -- ./app    loads per thread
    gpudist -C 'load:spmv:u64:address % 128' -- ./app
    gpudist -C 'entry:*:u32:smid#threads by multiprocessor' -- ./app
    gpudist -C 'load:*:u32:popcount(active), source' -- ./app
    gpudist -C 'store:*:u32:value' -- ./app        the values that are stored
    gpudist -L --width 256 'kernel:*:u64:threads, kernel' -- ./app
    gpudist -H 'exit:*:loads:u64:work' -C 'entry:*:u32:smid' -- ./app
    gpudist -H 'barrier:*:leave:u64:waited' --json -o out.jsonl -- ./app
    gpudist --sass -H 'store:*:u64:address % 128' -- ./app
    gpudist -H 'store:* (lane == 0):u64:address' 1 10 -p 1234
"""
ENTRIES = 65536  # values, or linear buckets, that there is room for
PROGRAM = r"""
#include <gpubpf.h>

struct sum { u64 count, low, high; };            /* the sum of the values, and how often it overflowed: downwards counts -1 */
struct log2 { struct sum sum; u64 negative, slots[64]; };    /* -H: how many are negative, and by their highest bit */
struct seen { u64 value; u32 kernel, site; };    /* a value or linear bucket; kernel and site if they are the key */

static inline void add_value(struct sum *to, u64 value, int is_signed) {
    u64 old = __sync_fetch_and_add(&to->low, value), sum = old + value;
    if (is_signed ? (s64)((old ^ sum) & (value ^ sum)) < 0 : sum < old)
        __sync_fetch_and_add(&to->high, is_signed && (s64)value < 0 ? -1 : 1);
}

/* Add the values of these lanes. Lanes with the same slot let their lowest one count for all. */
static inline int add_log2(struct log2 *to, u64 value, int is_signed, int mine, gpu_mask lanes) {
    u64 negative = is_signed ? value >> 63 : 0, slot = gpu_log2(value);
    gpu_mask same = gpu_match(slot | negative << 6) & lanes;
    if (!to || !mine)
        return 0;
    add_value(&to->sum, value, is_signed);
    if (!gpu_first(same))
        return 0;
    if (negative)
        __sync_fetch_and_add(&to->negative, gpu_popcount(same));
    else
        __sync_fetch_and_add(&to->slots[slot & 63], gpu_popcount(same));
    return 0;
}

static inline int add_sum(struct sum *to, u64 value, int is_signed, int mine, gpu_mask lanes) {
    if (!to || !mine)
        return 0;
    add_value(to, value, is_signed);
    if (gpu_first(lanes))
        __sync_fetch_and_add(&to->count, gpu_popcount(lanes));
    return 0;
}

/* The number of the linear bucket that holds a value, rounded down. */
static inline u64 bucket(u64 value, int is_signed, u64 width) {
    u64 sign = is_signed ? (u64)((s64)value >> 63) : 0;
    return (value ^ sign) / width ^ sign;
}

/* For each SPEC, maps and a program follow: gpudist --ebpf -H SPEC... prints them. */
"""


def build_parser() -> cli.Parser:
    """Return the parser: specifications, the kind of distribution, and the shared options."""
    parser = cli.parser(
        TOOL,
        "Show the distribution of a value inside GPU kernels.",
        EXAMPLES,
        cli.spec_usage(TOOL, "-H|-L|-C"),
    )
    cli.add_targets(parser, "POINT:KERNEL[:DETAIL] [(FILTER)]:TYPE:EXPR[, KEY][#LABEL]")
    shown = parser.add_argument_group("which distribution")
    for letter, kind, about in (
        ("-H", "log2", "histograms in powers of two of the SPECs behind it"),
        ("-L", "linear", "histograms with buckets of equal width"),
        ("-C", "values", "how often each value occurs"),
    ):
        shown.add_argument(
            letter,
            dest="kinds",
            action=cli.SpecsBehind,
            const=kind,
            nargs="*",
            default=[],
            metavar="SPEC",
            help=about,
        )
    shown.add_argument(
        "--width", type=cli.positive, metavar="N", help="with -L: values in a bucket (default 1)"
    )
    cli.add_kernels(parser)
    cli.add_patches(parser)
    cli.add_threads(parser)
    cli.add_budget(parser)
    cli.add_device(parser, times=True, default="default if an expression reads a clock")
    cli.add_looks(parser)
    cli.add_output(parser, "gpubpf.expressions.distributions")
    return parser


@cli.command(TOOL)
def main(argv: list[str] | None = None) -> int:
    """Run the tool; return its exit status."""
    parser = build_parser()
    args = cli.parse(parser, argv)
    options = cli.Options.of(args)
    if args.width and args.width >> 63:
        parser.error("--width must be below 2^63")
    kinds = {kind for kind, _ in args.kinds}
    if args.width and "linear" not in kinds:
        parser.error("--width is the width of the buckets of -L; add -L")
    if not kinds and args.specs:
        parser.error("choose a distribution: -H (powers of two), -L (equal widths) or -C (each value)")
    if len(kinds) > 1 and (args.specs or not all(own for _, own in args.kinds)):
        parser.error("with several of -H, -L and -C, put each SPEC behind its own: -H SPEC... -C SPEC...")
    from gpubpf.expressions import programs, specs

    wanted = distributions_of(args.kinds, args.specs, args.width, options.looks)
    kernels = specs.choose_kernels(args.kernel, [one.spec for one in wanted])
    times = any(specs.tells_times(one.value, one.spec.filter) for one in wanted)
    options = options.with_kernels(specs.union(kernels)).with_times(times)
    text = programs.distributing(PROGRAM, wanted, ENTRIES, options.threads.filtered)
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
    programs.attach(b, [one.spec for one in wanted], kernels, args.tool)
    if args.list or args.ptx:
        return b.show_kernels(options, out)
    launches = specs.any_launches(one.spec for one in wanted)
    with b.trace(options, out, Follow(log_records=1 << 17 if launches else 0)) as session:
        from gpubpf.expressions.distributions import (
            Distributions,
        )  # imports NumPy, which would delay the first probe

        found = Distributions(wanted, kernels)
        results, owners = cli.ResultWriter(options.output, out, session.now_ns), OwnerColumns(session.several)
        if times:
            results.head(session.device.clock_notice)
        for _ in session.intervals(args.interval, args.count, tick=lambda: found.take(session)):
            report(found.read(session, bool(args.interval)), owners, results)
            if out.closed:
                break
        found.launches.say_lost(args.tool)
        results.end(session.summary() | {"log_lost": found.launches.lost, "verified_by": b.verified_by})
    return session.status


def distributions_of(
    behind: list[tuple[str, list[str]]], others: list[str], width: int | None, looks: LookOptions
) -> list[Distribution]:
    """Return what the command line asks for. Raises UsageError.

    behind: each of -H, -L and -C, with the SPECs behind it.
    others: the other SPECs, since other options may be between -H and its SPECs.
    """
    from gpubpf.expressions import specs
    from gpubpf.record import replace

    chosen = [(behind[0][0] if behind else "log2", others), *behind]
    texts = [spec for _, own in chosen for spec in own]
    kinds = [kind for kind, own in chosen for _ in own] or ["log2"]
    read = specs.read(texts, looks, specs.distribution, listed="entry:*:u32:lane")
    return [replace(one, kind=kind, width=width or 1) for one, kind in zip(read, kinds, strict=False)]


def report(found: list[Found], owners: OwnerColumns, results: cli.ResultWriter) -> None:
    """Print what was added up since the last report."""
    from gpubpf.expressions import distributions

    results.begin()
    if results.json:
        results.records(distributions.DIST, found)
    elif results.csv:
        results.table(distributions.DIST.columns, distributions.rows(found))
    else:
        results.out.lines(distributions.lines(found, owners, results.options.verbose))


if __name__ == "__main__":
    sys.exit(main())

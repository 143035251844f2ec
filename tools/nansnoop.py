#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""nansnoop   Find the instruction of a GPU kernel that makes the first NaN or infinity.

USAGE: nansnoop [options] [interval [count]] [-p PID[,PID...] | -- COMMAND [ARG...]]

A probe after each floating-point instruction looks at the bits of the result. With --stores, probes are only where numbers are written
to memory, which costs less. The traced program needs no change and no rebuild.
"""

from __future__ import annotations

import os.path
import sys

if __package__ in (None, ""):  # run as tools/nansnoop.py: the library is in ../lib
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "lib"))

from gpubpf.show import cli  # early: Ctrl-C is answered quietly from here on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpubpf.floats.findings import Finding, Findings
    from gpubpf.show.owner_columns import OwnerColumns

TOOL = "nansnoop"
EXAMPLES = """examples:
    nansnoop -- ./app                         where NaN and infinities come from
    nansnoop --stores -- ./app                only what is stored: less overhead
    nansnoop --kernel 'softmax*' -- python3 train.py
    nansnoop --check --kinds nan -- ./test    exit status 1 if there was a NaN
    nansnoop --kinds inf,overflow,denormal -- ./app
    nansnoop --block 0 --thread 0:31 -- ./app    only what one warp computes
    nansnoop --json -o found.jsonl -- ./app      a record for each instruction
    nansnoop --budget 10 -- ./app                at most 10 % more instructions
    nansnoop -p 1234 10                          a running program, every 10 s
"""
PROGRAM = r"""
#include <gpubpf.h>
#include <gpubpf_floats.h>

enum kind { NANS, INFS, OVERFLOWS, DENORMALS, KINDS };
struct tally { u64 count[KINDS]; };
GPU_SITE_ARRAY(tallies, struct tally);           /* GPU memory: how many threads got each kind, for each instruction */

struct place { u64 kernel, site, kind; };
struct first {                                   /* the first number of a kind at an instruction */
    u64 order, launch, low, high, operand[4];    /* order: 1 for the first number of all */
    u32 block[3], thread[3];
    u32 type, operand_type, operands, operation;
};
GPU_HASH(firsts, struct place, struct first, 16384);
GPU_ARRAY(orders, u64, 1);

struct wanted { u64 kinds; };                    /* --kinds: a bit for each kind */
GPU_PARAM(wanted, struct wanted);
GPU_PARAM(filter, struct gpu_filter);            /* --block and --thread */

#define NOT_OVERFLOWS 255                        /* operation of a store: nobody knows how its value was computed */
#define VALUE(_context) ((struct first){.launch = (_context)->launch, .type = (_context)->type, \
                                        .low = (_context)->low, .high = (_context)->high})

/* The elements of the result that are infinite, although all operands are finite and nothing is divided by 0. */
static inline u64 overflowed(const struct first *it, u64 infinite) {
    u64 type = it->operand_type, operation = it->operation, divisor = it->operand[0];
    u64 bad = gpu_not_finite(type, it->operand[0]) | gpu_not_finite(type, it->operand[1]) |
              gpu_not_finite(type, it->operand[2]);
    if (operation == GPU_FLOAT_MMA || operation == NOT_OVERFLOWS)
        return 0;                                /* other lanes have a part of the operands */
    if (operation == GPU_FLOAT_DIV)
        divisor = it->operand[1];
    if (operation == GPU_FLOAT_DIV || operation == GPU_FLOAT_RCP || operation == GPU_FLOAT_RSQRT || operation == GPU_FLOAT_LG2)
        bad |= gpu_zeros(type, divisor);
    return type == it->type ? infinite & ~bad : bad ? 0 : infinite;
}

/* Counts a value of the wanted kinds, if it is one, and keeps the first. All lanes come here that execute the instruction together. */
static inline int look(u64 site, struct first *it) {
    u64 nans = gpu_nans(it->type, it->low) | gpu_nans(it->type, it->high), kind = KINDS, order = 0;
    u64 low = gpu_not_finite(it->type, it->low) & ~gpu_nans(it->type, it->low);
    u64 infinite = low | gpu_not_finite(it->type, it->high) & ~gpu_nans(it->type, it->high);
    u64 denormal = gpu_denormals(it->type, it->low) | gpu_denormals(it->type, it->high);
    int key = 0;
    struct gpu_filter *chosen = filter.lookup(&key);
    struct wanted *kinds = wanted.lookup(&key);
    struct tally *tally = tallies.lookup(&site);

    if (!chosen || !kinds || !tally || !gpu_selected(chosen))
        return 0;
    if (denormal && kinds->kinds & 1 << DENORMALS)
        kind = DENORMALS;
    if (infinite && kinds->kinds & 1 << INFS)
        kind = INFS;
    if (infinite && kinds->kinds & 1 << OVERFLOWS && overflowed(it, low))
        kind = OVERFLOWS;
    if (nans && kinds->kinds & 1 << NANS)
        kind = NANS;
    if (kind >= KINDS)
        return 0;

    gpu_mask same = gpu_match(kind);             /* the lowest lane of these adds for all */
    if (!gpu_first(same) || __sync_fetch_and_add(&tally->count[kind & 3], gpu_popcount(same)))
        return 0;
    u64 bx, by, bz, tx, ty, tz;                  /* the first of this multiprocessor: perhaps the first of all */
    u64 *next = orders.lookup(&key);
    struct place place = {.kernel = gpu_kernel(), .site = site, .kind = kind};
    bpf_get_block_idx(&bx, &by, &bz);
    bpf_get_thread_idx(&tx, &ty, &tz);
    it->block[0] = bx, it->block[1] = by, it->block[2] = bz;
    it->thread[0] = tx, it->thread[1] = ty, it->thread[2] = tz;
    if (next)
        it->order = 1 + __sync_fetch_and_add(next, 1);
    firsts.insert(&place, it);
    return 0;
}

/* Most values are ordinary. So the rest is apart from what every execution needs. */
#define SNOOP(_bits)                                          \
    do {                                                      \
        if (!gpu_any(_bits(ctx->type, ctx->low) | _bits(ctx->type, ctx->high))) \
            return 0;                                         \
        gpu_seldom();                                         \
    } while (0)
#define SKIP_BITS (GPU_TYPE(B16) | GPU_TYPE(B32) | GPU_TYPE(B64))  /* these may be anything */
#define UNUSUAL(_type, _word) (gpu_not_finite(_type, _word) | gpu_denormals(_type, _word))

static inline int computed(u64 site, struct gpu_float *ctx) {
    struct first it = VALUE(ctx);
    it.operand_type = ctx->operand_type, it.operands = ctx->operands, it.operation = ctx->operation;
    it.operand[0] = ctx->operand0, it.operand[1] = ctx->operand1;
    it.operand[2] = ctx->operand2, it.operand[3] = ctx->operand3;
    return look(site, &it);
}
static inline int stored(u64 site, struct gpu_value *ctx) {
    struct first it = VALUE(ctx);
    it.operation = NOT_OVERFLOWS;
    return look(site, &it);
}
int on_float(struct gpu_float *ctx) { SNOOP(gpu_not_finite); return computed(ctx->site, ctx); }
int on_store(struct gpu_value *ctx) {
    if (SKIP_BITS >> (ctx->type & 63) & 1)
        return 0;
    SNOOP(gpu_not_finite);
    return stored(ctx->site, ctx);
}
/* The same with denormal numbers, which cost a few instructions more. */
int on_unusual_float(struct gpu_float *ctx) { SNOOP(UNUSUAL); return computed(ctx->site, ctx); }
int on_unusual_store(struct gpu_value *ctx) {
    if (SKIP_BITS >> (ctx->type & 63) & 1)
        return 0;
    SNOOP(UNUSUAL);
    return stored(ctx->site, ctx);
}
"""
KINDS = ("nan", "inf", "overflow", "denormal")  # as in enum kind


def parse_kinds(text: str) -> tuple[str, ...]:
    """Return the kinds of --kinds, in the order of KINDS."""
    import argparse

    chosen = text.split(",")
    if unknown := [one for one in chosen if one not in KINDS]:
        raise argparse.ArgumentTypeError(f"there is no kind {unknown[0]!r}; use some of: {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in chosen)


def build_parser() -> cli.Parser:
    """Return the parser: which numbers to look for, and the shared options."""
    parser = cli.parser(
        TOOL, "Find the instruction of a GPU kernel that makes the first NaN or infinity.", EXAMPLES
    )
    parser.no_patches = "needs results of instructions, which Compute Sanitizer does not give"
    cli.add_targets(parser)
    looking = parser.add_argument_group("what to look for")
    looking.add_argument(
        "--kinds",
        type=parse_kinds,
        default=KINDS[:2],
        metavar="KIND[,KIND...]",
        help="nan, inf, overflow (an infinity from finite operands) and denormal (default nan,inf)",
    )
    looking.add_argument(
        "--stores",
        action="store_true",
        help="look only at numbers that are written to memory: less overhead, but not the origin",
    )
    looking.add_argument(
        "--check", action="store_true", help="exit with status 1 if any was found and COMMAND succeeded"
    )
    cli.add_kernels(parser)
    cli.add_threads(parser)
    cli.add_sampling(parser)
    cli.add_budget(parser)
    cli.add_device(parser)
    cli.add_looks(parser)
    cli.add_output(parser, "gpubpf.floats.findings")
    return parser


@cli.command(TOOL)
def main(argv: list[str] | None = None) -> int:
    """Run the tool; return its exit status."""
    parser = build_parser()
    args = cli.parse(parser, argv)
    options = cli.Options.of(args)
    if args.stores and "overflow" in args.kinds:
        parser.error("--stores does not see how a number was computed; leave out --stores, or overflow")
    out = cli.open_results(options.output)
    if args.ebpf:
        out.write(PROGRAM.lstrip())
        return 0
    from gpubpf.program import BPF
    from gpubpf.show.owner_columns import OwnerColumns

    b = BPF(text=PROGRAM)
    b.sample(options.sampling)
    b.limit(options.kernels)
    which = "_unusual" if "denormal" in args.kinds else ""
    name = f"on{which}_{'store' if args.stores else 'float'}"
    if args.stores:
        b.attach_gpu_value(kernel=args.kernel, fn_name=name, kinds=("store", "atomic"))
    else:
        b.attach_gpu_float(kernel=args.kernel, fn_name=name)
    b.attached.titles[name] = TOOL
    b["wanted"].set({"kinds": sum(1 << KINDS.index(kind) for kind in args.kinds)})
    if args.list or args.ptx:
        return b.show_kernels(options, out)
    with b.trace(options, out) as session:
        from gpubpf.floats.findings import Findings  # imports NumPy, which would delay the first probe

        findings = Findings(KINDS, args.stores)
        results, owners = cli.ResultWriter(options.output, out, session.now_ns), OwnerColumns(session.several)
        for _ in session.intervals(args.interval, args.count):
            report(findings.read(session, bool(args.interval)), findings, owners, args.kinds, results)
            if out.closed:
                break
        summary = findings.summary(session)
        results.end(summary, findings.summary_lines(summary))
    return session.status or int(args.check and findings.any)


def report(
    found: list[Finding],
    findings: Findings,
    owners: OwnerColumns,
    kinds: Sequence[str],
    results: cli.ResultWriter,
) -> None:
    """Print what was found since the last report."""
    from gpubpf.floats import findings as shown

    results.begin()
    if results.form == "text":
        verbose = results.options.verbose
        results.out.lines([*shown.lines(found, kinds, owners, verbose, findings.measured), ""])
    else:
        results.records(shown.NAN, found)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""barrierlate   Find the warps that keep barriers of GPU kernels waiting.

USAGE: barrierlate [options] [interval [count]] [-p PID[,PID...] | -- COMMAND [ARG...]]

A probe before each barrier notes when warps arrive. A probe after it counts how long each warp has waited for the last one. The traced
program needs no change and no rebuild.
"""

from __future__ import annotations

import os.path
import sys

if __package__ in (None, ""):  # run as tools/barrierlate.py: the library is in ../lib
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "lib"))

from gpubpf.show import cli  # early: Ctrl-C is answered quietly from here on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpubpf.barriers.waits import Barrier
    from gpubpf.show.owner_columns import OwnerColumns

TOOL = "barrierlate"
EXAMPLES = """examples:
    barrierlate -- ./app                       barriers where warps wait
    barrierlate --kernel 'gemm*' -- ./app      of some kernels only
    barrierlate --top 3 -- ./app               the three worst barriers
    barrierlate --sample-blocks 1/16 -- ./app  look at every 16th block
    barrierlate --json -o found.jsonl -- ./app a record for each barrier
    barrierlate -p 1234 10                     a running program, every 10 s
"""
PROGRAM = r"""
#include <gpubpf.h>

#define BINS 512        /* 1 wide below 32; above that, each power of two has 16 */
#define WARPS 32        /* of a block */
#define CLOCK 0x1fffffffffffull
/*
 * When something arrived: a bit that is 1, 13 bits of the barrier's round, 45 bits of the clock, 5 bits of the warp's number. So words
 * of one round compare as their times do, and a word that another round has left is recognized.
 */
#define ROUND(_round) ((((_round) & 0x1fff) | 0x2000) << 50)
#define WORD(_round, _clock, _warp) (ROUND(_round) | ((_clock) & CLOCK) << 5 | (_warp))
#define IS_OF(_word, _round) (((_word) ^ ROUND(_round)) >> 50 == 0)
#define TIME(_word) ((_word) >> 5 & CLOCK)

/*
 * Of each block and barrier number. open: launch << 32 | round, the round of the barrier that warps can join. Rounds go on in the next
 * launch. Those of even and odd numbers have places of their own: a warp can come to the next round before another has left this one.
 * first: ~time, so that the largest is the earliest. displaced: the largest number of a launch that another one has displaced. Such a
 * launch does not come back, since some of its warps may have arrived before.
 */
struct cell { u64 open, first[2], last[2], displaced; };
GPU_BLOCK_ARRAY(cells, struct cell, 16);
GPU_WARP_ARRAY(warps, u64, 16);                  /* when the warp's last lane arrived; 0: it was counted */
GPU_THREAD_ARRAY(joined, u32, 1);                /* the round in which the thread waits */

struct times { u64 count, sum, most; u32 bins[BINS]; };  /* in cycles */
struct look { u64 clock, time; };                /* both clocks, at one time */
struct site {
    struct times waits, skews;
    u64 unknown, numbers;                        /* waits that could not be measured; the barrier's numbers, as bits */
    struct look looks[2];                        /* the first and the latest */
    u32 last[WARPS];                             /* by warp: barriers that it kept waiting */
};
GPU_SITE_ARRAY(sites, struct site);

/* Raises a word of a round. What another round has left is replaced. */
static inline void raise(u64 *word, u64 to) {
    u64 was = *word;

    if ((was ^ to) >> 50 && __sync_val_compare_and_swap(word, was, to) == was)
        return;
    if ((was ^ to) >> 50 || was < to)
        gpu_max(word, to);
}

static inline void count(struct times *times, u64 cycles) {
    u32 shift = gpu_log2(cycles >> 4 | 1);
    u64 bin = shift * 16 + (cycles >> shift);

    __sync_fetch_and_add(&times->count, 1);
    __sync_fetch_and_add(&times->sum, cycles);
    __sync_fetch_and_add(&times->bins[bin < BINS ? bin : BINS - 1], 1);
    if (times->most < cycles)
        gpu_max(&times->most, cycles);
}

int on_arrive(struct gpu_barrier_arrive *ctx) {
    u64 now = gpu_clock(), launch = (u32)ctx->launch;
    int number = ctx->barrier & 15, key = 0;
    gpu_mask together = gpu_match(now << 5 | (ctx->barrier & 31));
    struct cell *cell = cells.lookup(&number);
    u64 *warp = warps.lookup(&number);
    u32 *mine = joined.lookup(&key);

    if (!cell || !warp || !mine || ctx->barrier > 15)
        return 0;
    u64 open = cell->open;
    u32 waits = IS_OF(cell->last[open & 1], (u32)open); /* a warp has arrived in the open round, and none has left it */
    if (open >> 32 != launch && cell->displaced < launch && (open >> 32 < launch || !waits)) { /* this block's first arrival */
        gpu_max(&cell->displaced, open >> 32);
        u64 next = launch << 32 | (u32)(open + 2);
        u64 was = __sync_val_compare_and_swap(&cell->open, open, next);
        open = was == open ? next : was;
    }
    if (open >> 32 != launch)
        return 0;
    u64 round = (u32)open;
    *mine = round;
    if (gpu_first(together)) {
        raise(&cell->first[round & 1], WORD(round, ~now, 0));
        raise(&cell->last[round & 1], WORD(round, now, gpu_warp() & (WARPS - 1)));
        raise(warp, WORD(round, now, 0));
    }
    return 0;
}

int on_leave(struct gpu_barrier_leave *ctx) {
    u64 id = ctx->site, launch = (u32)ctx->launch;
    int number = ctx->barrier & 15, key = 0;
    gpu_mask together = gpu_match(ctx->barrier);
    struct cell *cell = cells.lookup(&number);
    u64 *warp = warps.lookup(&number);
    u32 *mine = joined.lookup(&key);
    struct site *site = sites.lookup(&id);

    if (!cell || !warp || !mine || !site || ctx->barrier > 15 || !gpu_first(together))
        return 0;
    u64 open = cell->open, round = *mine, arrived = *warp;
    if (open >> 32 != launch) {                  /* the same block of a later launch runs at the same time */
        __sync_fetch_and_add(&site->unknown, 1);
        return 0;
    }
    if (open == (launch << 32 | round))
        __sync_val_compare_and_swap(&cell->open, open, open + 1);
    if (!IS_OF(arrived, round) || __sync_val_compare_and_swap(warp, arrived, 0) != arrived)
        return 0;                                /* other lanes have counted the warp */
    u64 last = cell->last[round & 1], first = cell->first[round & 1];
    u64 waited = (TIME(last) - TIME(arrived)) & CLOCK;
    if (!IS_OF(last, round) || waited > CLOCK / 2) {
        __sync_fetch_and_add(&site->unknown, 1);
        return 0;
    }
    count(&site->waits, waited);
    if (!IS_OF(first, round) || __sync_val_compare_and_swap(&cell->first[round & 1], first, 0) != first)
        return 0;                                /* another warp has counted the round */
    u64 skew = (TIME(last) - (~TIME(first) & CLOCK)) & CLOCK;
    count(&site->skews, skew);
    if (skew)
        __sync_fetch_and_add(&site->last[last & (WARPS - 1)], 1);
    if (!(site->numbers >> number & 1))
        __sync_fetch_and_or(&site->numbers, 1ull << number);
    u64 clock = GPUBPF_HERE(u64, gpu_clock()), time = bpf_get_globaltimer();
    struct look *look = &site->looks[site->looks[0].time != 0];
    look->clock = clock;
    look->time = time;
    return 0;
}
"""


def build_parser() -> cli.Parser:
    """Return the parser: what to show, and the shared options."""
    parser = cli.parser(TOOL, "Find the warps that keep barriers of GPU kernels waiting.", EXAMPLES)
    parser.no_patches = "needs the time of arrival at barriers, which Compute Sanitizer does not give"
    cli.add_targets(parser)
    shown = parser.add_argument_group("what to show")
    shown.add_argument(
        "--top", type=cli.positive, metavar="N", help="show only the N barriers that cost most (default: all)"
    )
    cli.add_kernels(parser)
    cli.add_sampling(parser, warps=False)  # a barrier needs all warps of its block
    cli.add_budget(parser)
    cli.add_device(parser, times=True)
    cli.add_looks(parser)
    cli.add_output(parser, "gpubpf.barriers.waits")
    return parser


@cli.command(TOOL)
def main(argv: list[str] | None = None) -> int:
    """Run the tool; return its exit status."""
    args = cli.parse(build_parser(), argv)
    options = cli.Options.of(args)
    out = cli.open_results(options.output)
    if args.ebpf:
        out.write(PROGRAM.lstrip())
        return 0
    from gpubpf.program import BPF
    from gpubpf.show.owner_columns import OwnerColumns

    b = BPF(text=PROGRAM)
    b.sample(options.sampling)
    b.limit(options.kernels)
    b.attach_gpu_barrier_arrive(kernel=args.kernel, fn_name="on_arrive")
    b.attach_gpu_barrier_leave(kernel=args.kernel, fn_name="on_leave")
    b.attached.titles["on_arrive"] = b.attached.titles["on_leave"] = TOOL
    if args.list or args.ptx:
        return b.show_kernels(options, out)
    with b.trace(options, out) as session:
        from gpubpf.barriers.waits import Waits  # imports NumPy, which would delay the first probe

        waits = Waits()
        results, owners = cli.ResultWriter(options.output, out, session.now_ns), OwnerColumns(session.several)
        for _ in session.intervals(args.interval, args.count):
            report(waits.read(session, bool(args.interval)), owners, args.top, results)
            if out.closed:
                break
        summary = waits.summary(session)
        results.end(summary, waits.summary_lines(summary))
    return session.status


def report(found: list[Barrier], owners: OwnerColumns, top: int | None, results: cli.ResultWriter) -> None:
    """Print what was found since the last report."""
    from gpubpf.barriers import text, waits

    results.begin()
    if results.form == "text":
        results.out.lines([*text.lines(found, top, results.options.verbose, owners), ""])
    elif results.json:
        results.records(waits.BARRIER, found[:top])
    else:
        results.table(waits.BARRIER.columns, map(waits.row, found[:top]))


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""kernelretsnoop   When the threads of a GPU kernel exit, and which of them keep the others waiting.

USAGE: kernelretsnoop [options] [interval [count]] [-p PID[,PID...] | -- COMMAND [ARG...]]

Every thread reads the clock of its multiprocessor when it leaves the kernel. The GPU adds these times up by lane, warp and block, or
with -e records each of them. The traced program needs no change and no rebuild.
"""

from __future__ import annotations

import os.path
import sys

if __package__ in (None, ""):  # run as tools/kernelretsnoop.py: the library is in ../lib
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "lib"))

from gpubpf.show import cli  # early: Ctrl-C is answered quietly from here on

TOOL = "kernelretsnoop"
EXAMPLES = """examples:
    kernelretsnoop -- ./app                     late lanes, warps and blocks
    kernelretsnoop --kernel 'ns::*' -- ./app    these kernels only
    kernelretsnoop -e --block 0 -- ./app        each exit of a thread in block 0
    kernelretsnoop -e --json -o exits.jsonl -- ./app
    kernelretsnoop --heatmap app.svg -- ./app   a picture: blocks by time
    kernelretsnoop --sample-blocks 1/16 -- ./app     less overhead
    kernelretsnoop --launch 10:20 -v -- ./app   these launches; more details
    kernelretsnoop --sass -- python3 infer.py   also kernels without PTX
    kernelretsnoop 1 10 -- python3 train.py     print each second, ten times
"""
PROGRAM = r"""
#include <gpubpf.h>

#define LAUNCHES 8      /* slots, which keep the latest launches of a kernel and shape apart; see slot_of */
#define SHARDS 8        /* of the lateness, so that multiprocessors do not all wait for the same words */
#define LINES 256       /* of 32 words: likewise for the warps that left together. A line for each multiprocessor */
#define BINS 1024       /* of a histogram; each power of two has 32 */
#define BITS 36         /* of a clock; a cell is launch number << BITS | cycles, so that the largest is of the latest launch */
#define CLOCK ((1ull << BITS) - 1)

struct rest { u64 late, left; };                 /* of a warp whose lanes do not exit together: first to last exit; exits */
struct round { u64 clock, time; u32 launch, sm; u64 none; };  /* readings of clock and timer */
struct block { struct round rounds[LAUNCHES]; u32 exits[GPU_LANES]; };  /* exits: by lane, if not all together */
struct late { u64 sum, worst, lost; u32 bins[BINS]; };  /* sum: cycles; worst: cycles << 24 | site; lost: when launches overlap */
struct record { u64 clock, time, launch; u32 thread; u16 sm, site; };
GPU_WARP_ARRAY(firsts, u64, LAUNCHES);           /* ~(first exit). Side by side, so that a launch touches little memory */
GPU_WARP_ARRAY(rests, struct rest, LAUNCHES);
GPU_BLOCK_ARRAY(blocks, struct block, 1);
GPU_KERNEL_ARRAY(wholes, u64, LINES * 32);       /* warps that left together: in the first word of each line */
GPU_KERNEL_ARRAY(lateness, struct late, SHARDS * GPU_LANES); /* [shard][lane] */
GPU_RINGBUF(exits, struct record, 16384);
GPU_KERNEL_ARRAY(groups, u64, 1024);             /* with sampling: cycles late, by lane and group of blocks: group << 5 | lane */
GPU_PARAM(filter, struct gpu_filter);            /* --block and --thread */

/* Kernels that a loop launches in turn have numbers that are as far apart as there are kernels: these must not share a slot. */
static inline int slot_of(u64 number) {
    u32 low = number;
    return (low ^ low >> 3) & (LAUNCHES - 1);
}

static inline struct late *late_of(u32 lane) {
    int here = gpu_sm() % SHARDS * GPU_LANES + (lane & (GPU_LANES - 1));
    return lateness.lookup(&here);
}

static inline void count(int lane, u64 cycles, u64 site) {
    struct late *late = late_of(lane);
    u32 shift = gpu_log2(cycles >> 5 | 1);
    if (!late)
        return;
    __sync_fetch_and_add(&late->sum, cycles);
    __sync_fetch_and_add(&late->bins[(shift * 32 + (cycles >> shift)) & (BINS - 1)], 1);
    gpu_max(&late->worst, cycles << 24 | (site < 0xffff ? site : 0xffff));
}

static inline void count_in_group(int lane, u64 cycles) {
    int key = (gpu_group() & 31) << 5 | (lane & 31);
    u64 *sum = groups.lookup(&key);
    if (sum)
        __sync_fetch_and_add(sum, cycles);
}

static inline void count_exit(void) {
    u32 lane = gpu_lane();
    int key = 0;
    struct block *block = blocks.lookup(&key);
    if (block)
        __sync_fetch_and_add(&block->exits[lane & (GPU_LANES - 1)], 1);
}

static inline struct round *round_of(u64 number) {
    int key = 0;
    struct block *block = blocks.lookup(&key);
    return block ? &block->rounds[slot_of(number)] : 0;
}

static inline void look(struct round *round, u64 number) {  /* in the first warp of a block: relates the clock to the timer */
    if (!round || gpu_warp())
        return;
    u64 clock = GPUBPF_HERE(u64, gpu_clock()), time = bpf_get_globaltimer();
    round->clock = clock;
    round->time = time;
    round->launch = number;
    round->sm = gpu_sm();
}

static inline void leave(u64 *first, u64 number, u64 site, u64 now, gpu_mask leaving, int chosen, int sampled) {
    u64 launch = number << BITS, earlier = launch | (~now & CLOCK);
    u32 lane = gpu_lane();
    int slot = slot_of(number);
    struct rest *rest = rests.lookup(&slot);
    if (!rest)
        return;
    u64 was = 0;
    int acts = gpu_first(leaving);               /* this lane acts for all that exit with it */
    if (acts) {
        gpu_max(&rest->left, launch);            /* before the first exit: it says that lanes are counted */
        was = gpu_max(first, earlier);
    }
    if (gpu_active() == leaving)
        was = gpu_shuffle(was, gpu_log2(leaving & -leaving));
    else if (!acts) {
        gpu_max(&rest->left, launch);
        was = gpu_max(first, earlier);
    }
    u64 late = (was - earlier) & CLOCK;
    if (was < launch) {                          /* the first of its warp */
        if (acts) {
            __sync_fetch_and_add(&rest->left, gpu_popcount(leaving));
            look(round_of(number), number);
        }
    } else if (was >> BITS != number % (1 << (64 - BITS))) {  /* a later launch uses the slot: the lateness is unknown */
        struct late *unknown = late_of(lane);
        if (unknown && chosen)
            __sync_fetch_and_add(&unknown->lost, 1);
    } else {
        int known = late - 1 < CLOCK - (1 << 24) - 1;  /* not 0, nor negative: an earlier exit that arrived later */
        if (known)
            gpu_max(&rest->late, launch | late);
        if (acts)
            __sync_fetch_and_add(&rest->left, gpu_popcount(leaving));
        if (known && chosen)
            count(lane, late, site);
        if (known && chosen && sampled)
            count_in_group(lane, late);
    }
}

static inline void leave_together(u64 *first, u64 number, u64 now, u64 *counts) {  /* one lane acts for all: none is late */
    if (counts)
        __sync_fetch_and_add(counts, 1);
    gpu_max(first, number << BITS | (~now & CLOCK));
    look(round_of(number), number);
}

static inline int whole(gpu_mask lanes) {
    return lanes == (gpu_mask)~0ull >> (GPU_LANES - gpu_warp_size());
}

int on_exit(struct gpu_exit *ctx) {
    int line = gpu_sm() % LINES * 32;
    u64 *counts = wholes.lookup(&line);          /* before the clock, so that ptxas can do it while the kernel's loads are under way */
    u64 now = gpu_clock(), number = ctx->launch; /* in this order: in a graph, the number is loaded from GPU memory */
    int slot = slot_of(number);
    u64 *first = firsts.lookup(&slot);
    gpu_mask leaving = gpu_active();
    if (first && !whole(leaving)) {
        leave(first, number, ctx->site, now, leaving, 1, 0);
        count_exit();
    } else if (first && !gpu_lane()) {
        leave_together(first, number, now, counts);
    }
    return 0;
}

static inline int leave_chosen(int sampled, struct gpu_exit *ctx) {
    u64 now = gpu_clock(), number = ctx->launch;
    gpu_mask leaving = gpu_active();
    int key = 0, slot = slot_of(number);
    struct gpu_filter *filtered = filter.lookup(&key);
    u64 *first = firsts.lookup(&slot);
    int chosen = filtered && gpu_selected(filtered);
    if (chosen)
        count_exit();
    if (first && !whole(leaving))
        leave(first, number, ctx->site, now, leaving, chosen, sampled);
    else if (first && !gpu_lane())
        leave_together(first, number, now, 0);
    return 0;
}

int on_chosen_exit(struct gpu_exit *ctx) { return leave_chosen(0, ctx); }  /* with --block or --thread */
int on_sampled_exit(struct gpu_exit *ctx) { return leave_chosen(1, ctx); } /* in the chosen blocks or warps */

int on_record(struct gpu_exit *ctx) {            /* with -e, --heatmap, and on the virtual clock, where each lane has its own */
    u64 now = gpu_clock(), time = bpf_get_globaltimer();
    int key = 0;
    struct gpu_filter *chosen = filter.lookup(&key);
    struct record *record = 0;

    if (chosen && gpu_selected(chosen))
        record = exits.ringbuf_reserve(sizeof *record);
    if (!record)
        return 0;                                /* the ring counts it as lost */
    record->clock = now;
    record->time = time;
    record->launch = ctx->launch;
    record->thread = gpu_global_thread();
    record->sm = gpu_sm();
    record->site = ctx->site < 0xffff ? ctx->site : 0xffff;
    exits.ringbuf_submit(record, 0);
    return 0;
}
"""


def build_parser() -> cli.Parser:
    """Return the parser: the shared options, and what to show of exits."""
    parser = cli.parser(
        TOOL, "Show when the threads of a GPU kernel exit, and which keep the others waiting.", EXAMPLES
    )
    cli.add_targets(parser)
    shown = parser.add_argument_group("what to show")
    shown.add_argument("-e", dest="each", action="store_true", help="print a line for each thread that exits")
    shown.add_argument(
        "--heatmap",
        type=cli.parse_picture,
        metavar="FILE",
        help="draw exits by block and time (.svg, .png or .pdf)",
    )
    cli.add_kernels(parser)
    cli.add_patches(parser)
    cli.add_threads(parser)
    cli.add_sampling(parser)
    cli.add_budget(parser)
    cli.add_device(parser, times=True)
    cli.add_rings(parser)
    cli.add_looks(parser)
    cli.add_output(parser, "gpubpf.exits.exit_records")
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
    from gpubpf.session import tracing
    from gpubpf.show.owner_columns import OwnerColumns
    from gpubpf.traced.measurement import Follow

    if args.heatmap:
        from gpubpf.show import picture

        picture.check(args.heatmap)  # now, not at the end
    virtual = tracing.virtual(options)
    recorded = bool(args.each or args.heatmap or virtual)
    b = BPF(text=PROGRAM)
    sampling = b.sample(options.sampling)
    b.limit(options.kernels)
    added = "on_sampled_exit" if sampling else "on_chosen_exit" if options.threads.filtered else "on_exit"
    on_exit = "on_record" if recorded else added
    b.attach_gpu_exit(kernel=args.kernel, fn_name=on_exit)
    if args.list or args.ptx:
        return b.show_kernels(options, out)
    pump, size = 0 if recorded else 256, (1 << 28) if virtual else None
    follow = Follow(log_records=1 << 17, pump=pump, ring_size=size, per_thread={"exits": 1})
    with b.trace(options, out, follow) as session:
        from gpubpf.exits import exit_log, exit_report  # they import NumPy, which would delay the first probe

        results, owners = cli.ResultWriter(options.output, out, session.now_ns), OwnerColumns(session.several)
        results.head(session.device.clock_notice)
        printer = exit_log.ExitPrinter(out, results.form, owners) if args.each else None
        log = exit_log.ExitLog(
            recorded, args.block, args.thread, bool(args.heatmap), printer, owners, sampling
        )
        for _ in session.intervals(args.interval, args.count, tick=lambda: log.take(session)):
            if not args.each:
                exit_report.show(session, log, owners, options.threads, results)
            if out.closed:
                break
        if args.heatmap:
            picture.write(args.heatmap, log.pictures())
            cli.note(TOOL, f"wrote {args.heatmap}")
        results.end(*log.summary(session))
    return session.status


if __name__ == "__main__":
    sys.exit(main())

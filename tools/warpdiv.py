#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""warpdiv   Find the branches that split the warps of GPU kernels, and what they cost.

USAGE: warpdiv [options] [interval [count]] [-p PID[,PID...] | -- COMMAND [ARG...]]

A probe at each conditional branch counts how many lanes take it. A probe at each basic block counts the instructions that the warp
executes there, and the lanes that wait meanwhile. The traced program needs no change and no rebuild.
"""

from __future__ import annotations

import os.path
import sys

if __package__ in (None, ""):  # run as tools/warpdiv.py: the library is in ../lib
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "lib"))

from gpubpf.show import cli  # early: Ctrl-C is answered quietly from here on

TOOL = "warpdiv"
EXAMPLES = """examples:
    warpdiv -- ./app                       branches that split warps, by cost
    warpdiv --kernel 'bfs*' -- ./app       of some kernels only
    warpdiv --top 3 -- ./app               the three worst branches
    warpdiv --by line -- ./app             how much of each warp works, by line
    warpdiv --sample-blocks 1/16 -- ./app  look at every 16th block
    warpdiv --json -o found.jsonl -- ./app a record for each branch and kernel
    warpdiv --threads -- ./app             and which threads launch the kernels
    warpdiv -p 1234 10                     a running program, every 10 s
"""
PROGRAM = r"""
#include <gpubpf.h>

#define WHOLE ((gpu_mask)~0ull)                  /* what whole warps do is counted by one atomic, and added to the rest by the tool */
struct branch { u64 executed, diverged, lanes, taken, lost, unknown, whole_taken, whole_not; };
GPU_SITE_ARRAY(branches, struct branch);         /* for each conditional branch */
struct block { u64 instructions, lane_instructions, whole; };
GPU_SITE_ARRAY(blocks, struct block);            /* for each basic block */

/* Of each warp: instructions that it executed without some of its lanes while apart; how many of its threads have not left the kernel;
 * how often it began while the same warp of another launch had not ended; and whether a branch parted lanes since they were last
 * together. Launches of one kernel and shape share these maps. */
struct warp { u64 issued, inside, mixed; u32 apart, unused; };
GPU_WARP_ARRAY(warps, struct warp, 1);
/* Of each lane: `issued` when it last executed something, the open regions as bits, and a number that grows with each divergence. */
struct lane { u32 seen, open, time; };
GPU_THREAD_ARRAY(lanes, struct lane, 1);
#if GPU_LANES > 32
/* On AMD GPUs the branches that parted the lane and have not ended: the innermost is last, `open` is their number. A branch ends once
 * all lanes that came to it are together again, or when the lane comes to it again. */
#define PARTED 8
struct parted { u64 together; u32 site, unused; };
#else
#define PARTED GPU_REGIONS
struct parted { u32 site, time; };               /* the branch that parted lanes last in a region, and when */
#endif
GPU_THREAD_ARRAY(regions, struct parted, PARTED);

int on_entry(struct gpu_entry *ctx) {
    gpu_mask active = gpu_active();
    int key = 0;
    struct warp *warp = warps.lookup(&key);
    if (warp && gpu_first(active) && __sync_fetch_and_add(&warp->inside, gpu_popcount(active)))
        __sync_fetch_and_add(&warp->mixed, 1);
    return 0;
}

int on_exit(struct gpu_exit *ctx) {
    int key = 0;
    struct warp *warp = warps.lookup(&key);
    if (warp)
        __sync_fetch_and_sub(&warp->inside, 1);
    return 0;
}

#if GPU_LANES > 32
static inline void lose(struct lane *lane, u32 waited) {
    u32 last = lane->open - 1;
    struct parted *parted = regions.lookup(&last);
    u64 site = parted ? parted->site : 0;
    struct branch *branch = branches.lookup(&site);
    if (branch && parted)
        __sync_fetch_and_add(&branch->lost, waited);
}

static inline void join(struct lane *lane, struct gpu_basic_block *ctx) {
#pragma nounroll
    for (u32 turn = 0; turn < PARTED; turn++) {
        u32 last = lane->open - 1;
        struct parted *parted = regions.lookup(&last);
        if (parted && lane->open && !(parted->together & ~ctx->active))
            lane->open--;
    }
}

/* Returns whether there was room to remember the branch. */
static inline u32 part(struct lane *lane, struct gpu_branch *ctx) {
    u32 open = lane->open, at = open;

#pragma nounroll
    for (u32 number = 0; number < PARTED; number++) {
        struct parted *parted = regions.lookup(&number);
        if (parted && number < open && parted->site == ctx->site)
            at = number;
    }
    struct parted *parted = regions.lookup(&at);
    if (!parted)
        return 0;
    parted->together = ctx->active, parted->site = ctx->site;
    lane->open = at + 1;
    return 1;
}
#else
/* What the warp executed without this lane is lost to the branch that parted the lane last, of those whose region it is in. */
static inline void lose(struct lane *lane, u32 waited) {
    u32 last = 0, found = 0;

#pragma nounroll
    for (u32 region = 0; region < GPU_REGIONS; region++) {
        struct parted *parted = regions.lookup(&region);
        if (parted && lane->open >> region & 1 && parted->time > last)
            last = parted->time, found = parted->site;
    }
    u64 site = found;
    struct branch *branch = branches.lookup(&site);
    if (branch && last)
        __sync_fetch_and_add(&branch->lost, waited);
}

static inline void join(struct lane *lane, struct gpu_basic_block *ctx) {
    if (lane->open & ~ctx->regions)
        lane->open &= ctx->regions;
}

static inline u32 part(struct lane *lane, struct gpu_branch *ctx) {
    u32 region = ctx->region;
    struct parted *parted = regions.lookup(&region);
    if (!parted || region >= GPU_REGIONS)
        return 0;
    parted->site = ctx->site;
    parted->time = ++lane->time;
    lane->open |= 1 << region;
    return 1;
}
#endif

/* For a warp with lanes that a branch has parted. */
static inline void follow(struct warp *warp, struct lane *lane, struct gpu_basic_block *ctx) {
    gpu_mask active = ctx->active;
    u32 before = lane->seen;
    s32 waited = (u32)warp->issued - before;         /* below 0: the lane that adds for others has not added yet */
    if (waited > 0 && lane->open)
        lose(lane, waited);
    if (lane->open)
        join(lane, ctx);
    u32 seen = before + (waited > 0 ? waited : 0) + (active == WHOLE ? 0 : ctx->instructions);
    if (before != seen)
        lane->seen = seen;
    u32 is_apart = gpu_any(lane->open);
    if (active != WHOLE && gpu_first(active))
        __sync_fetch_and_add(&warp->issued, ctx->instructions);
    else if (active == WHOLE && !is_apart)
        warp->apart = 0;
}

int on_block(struct gpu_basic_block *ctx) {
    u64 site = ctx->site, instructions = ctx->instructions;
    gpu_mask active = ctx->active;
    int key = 0;
    struct block *block = blocks.lookup(&site);
    struct warp *warp = warps.lookup(&key);
    if (!block || !warp)
        return 0;
    if (gpu_any(warp->apart)) {
        gpu_seldom();
        struct lane *lane = lanes.lookup(&key);
        if (lane)
            follow(warp, lane, ctx);
    }
    if (!gpu_first(active))
        return 0;
    __sync_fetch_and_add(active == WHOLE ? &block->whole : &block->instructions, instructions);
    if (active != WHOLE)
        __sync_fetch_and_add(&block->lane_instructions, instructions * gpu_popcount(active));
    return 0;
}

int on_branch(struct gpu_branch *ctx) {
    u64 site = ctx->site;
    gpu_mask active = ctx->active, taken = ctx->taken;
    u32 known = 1;
    int key = 0;
    struct branch *branch = branches.lookup(&site);
    if (!branch)
        return 0;
    if (taken && taken != active) {
        gpu_seldom();
        struct lane *lane = lanes.lookup(&key);
        struct warp *warp = warps.lookup(&key);
        if (lane && warp)
            known = part(lane, ctx), warp->apart = 1;
        if (gpu_first(active))
            __sync_fetch_and_add(&branch->diverged, 1);
    }
    if (!gpu_first(active))
        return 0;
    if (active == WHOLE && (!taken || taken == active)) {
        __sync_fetch_and_add(taken ? &branch->whole_taken : &branch->whole_not, 1);
        return 0;
    }
    __sync_fetch_and_add(&branch->executed, 1);
    __sync_fetch_and_add(&branch->lanes, gpu_popcount(active));
    if (taken)
        __sync_fetch_and_add(&branch->taken, gpu_popcount(taken));
    if (!known)
        __sync_fetch_and_add(&branch->unknown, 1);
    return 0;
}
"""
BY = ("branch", "line", "function", "kernel")


def build_parser() -> cli.Parser:
    """Return the parser: what to show, and the shared options."""
    parser = cli.parser(
        TOOL, "Find the branches that split the warps of GPU kernels, and what they cost.", EXAMPLES
    )
    parser.no_patches = "needs branches, at which Compute Sanitizer has no patches"
    cli.add_targets(parser)
    shown = parser.add_argument_group("what to show")
    shown.add_argument(
        "--by",
        choices=BY,
        default=BY[0],
        help="a row for each branch, source line, function or kernel (default branch)",
    )
    shown.add_argument(
        "--top", type=cli.positive, metavar="N", help="show only the N rows that cost most (default: all)"
    )
    shown.add_argument(
        "--threads", action="store_true", help="also show which host threads launch the kernels"
    )
    cli.add_kernels(parser)
    cli.add_sampling(parser)
    cli.add_budget(parser)
    cli.add_device(parser, times=True)
    cli.add_looks(parser)
    cli.add_output(parser, "gpubpf.divergence.branches")
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
    from gpubpf.traced.measurement import Follow

    b = BPF(text=PROGRAM)
    b.sample(options.sampling)
    b.limit(options.kernels)
    b.attach_gpu_branch(kernel=args.kernel, fn_name="on_branch")
    b.attach_gpu_basic_block(kernel=args.kernel, fn_name="on_block")
    b.attach_gpu_entry(kernel=args.kernel, fn_name="on_entry")
    b.attach_gpu_exit(kernel=args.kernel, fn_name="on_exit")
    for name in ("on_branch", "on_block", "on_entry", "on_exit"):
        b.attached.titles[name] = TOOL
    if args.list or args.ptx:
        return b.show_kernels(options, out)
    with b.trace(options, out, Follow(log_records=args.threads << 16, stacks=args.threads)) as session:
        from gpubpf.divergence import launchers, text  # these import NumPy, which would delay the first probe
        from gpubpf.divergence.branches import Divergence

        divergence, threads = Divergence(), launchers.Launchers() if args.threads else None
        results, owners = cli.ResultWriter(options.output, out, session.now_ns), OwnerColumns(session.several)
        tick = (lambda: threads.read(session)) if threads else None
        for _ in session.intervals(args.interval, args.count, tick=tick, every=0.25):
            found = divergence.read(session, bool(args.interval))
            text.report(found, args.by, args.top, args.verbose, owners, results)
            if threads:
                threads.read(session)
                text.report_launchers(threads.rows(one.place for one in found.kernels), args.verbose, results)
            if out.closed:
                break
        if divergence.mixed:
            results.note_once("launches of a kernel overlapped, so what its branches cost is unknown")
        more = {"log_lost": threads.lost} if threads else {}
        results.end(session.summary() | {"mixed_warps": divergence.mixed} | more)
    return session.status


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""gpuhang   Find where the warps of a GPU kernel stand that does not end.

USAGE: gpuhang [options] [-p PID[,PID...] | -- COMMAND [ARG...]]

Each warp writes where it is to host memory: at barriers, and now and then at heads of loops. The tool reads that while the kernel
runs, and also after the process was killed. The traced program needs no change and no rebuild.
"""

from __future__ import annotations

import os.path
import sys

if __package__ in (None, ""):  # run as tools/gpuhang.py: the library is in ../lib
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "lib"))

from gpubpf.show import cli  # early: Ctrl-C is answered quietly from here on

TOOL = "gpuhang"
EXAMPLES = """examples:
    gpuhang -- ./app                        where warps stand after 10 s
    gpuhang --after 60 -- ./app             kernels may run for a minute
    gpuhang --kernel 'solve*' -- ./app      of some kernels only
    gpuhang --check --after 30 -- ./test  status 1 if one hangs; use timeout
    gpuhang -p 1234                         launches of a running program
    gpuhang --json -o hang.jsonl -- ./app   a record for each place
"""
PROGRAM = r"""
#include <gpubpf.h>

#define LAUNCHES 1024                            /* launch number N uses row N modulo LAUNCHES; the tool remembers older rows */
#define WARPS 65536                              /* warps that can stand somewhere at once; GPUs run fewer than 20,000 */
#define EVERY 64                                 /* a warp counts and writes one in 64 turns of a loop */
#define LOCKS 4096                               /* words that are remembered at once */
#define NOWHERE ~0u
enum { SWAPS = 8, COMPARES = 16 };               /* in the effect of an atomic: it stores low, if memory has high */
enum { NONE, BEGUN, BARRIER, LEFT, LOOP, CALL, EXITED };

/* In host memory, which the tool can read while the kernel runs, and after it. */
struct launch { u64 launch, kernel, grid[3], block[3], exited, untracked; };
GPU_SHARED_ARRAY(launches, struct launch, LAUNCHES);
struct stand { u64 launch, warp, place, turns, events, polls, changes, address; };  /* turns: at a barrier, arrivals at any */
GPU_SHARED_ARRAY(stands, struct stand, WARPS);
struct taken { u64 address, by; };               /* the word that an atomic in a loop that waits changed, and the warp's name */
GPU_SHARED_ARRAY(locks, struct taken, LOCKS);

/* In GPU memory: the same of a warp, and how many of its threads are in the kernel. name: the launch and the warp; 0: no warp. */
struct own { u64 name; u32 site, arrivals; u64 inside, turns, events, address; u32 polls, changes, poll, unused; };
GPU_ARRAY(owns, struct own, WARPS);
struct seen { u64 value[2]; };                   /* what a lane last loaded in a loop that waits; two loads may alternate */
GPU_ARRAY(loaded, struct seen, WARPS * GPU_LANES);
struct count { u64 latest, exited; };
GPU_ARRAY(counts, struct count, LAUNCHES);

#define SLOT(_launch, _warp) (((u32)(_launch) * 40503 + (_warp)) % WARPS)
#define NAME(_launch, _warp) ((_launch) << 32 | (_warp)) /* identifies the warp in its process */
#define PLACE(_kind, _barrier, _site) ((u64)(_kind) << 61 | ((u64)(_barrier) & 0xff) << 32 | (u32)(_site))

/* Returns this warp's words in GPU memory to its first active lane; 0 to others, and if another warp stands there. */
static inline struct own *mine(gpu_mask active, u64 launch, u32 *slot) {
    u32 warp = gpu_global_warp();
    *slot = SLOT(launch, warp);
    struct own *own = gpu_first(active) ? owns.lookup(slot) : 0;
    return own && own->name == NAME(launch, warp) ? own : 0;
}

int on_entry(struct gpu_entry *ctx) {
    gpu_mask active = gpu_active();
    u64 launch = ctx->launch;
    u32 warp = gpu_global_warp(), slot = SLOT(launch, warp);
    int row = launch % LAUNCHES;
    if (!gpu_first(active))
        return 0;
    struct own *own = owns.lookup(&slot);
    struct stand *stand = stands.lookup(&slot);
    struct count *count = counts.lookup(&row);
    struct launch *head = launches.lookup(&row);
    if (!own || !stand || !count || !head)
        return 0;
    if (count->latest < launch && gpu_max(&count->latest, launch) < launch) { /* the launch's first warp that has programs */
        u64 x, y, z;
        head->exited = 0, head->untracked = 0, count->exited = 0;
        head->kernel = gpu_kernel();
        gpu_grid_dim(&x, &y, &z);
        head->grid[0] = x, head->grid[1] = y, head->grid[2] = z;
        bpf_get_block_dim(&x, &y, &z);
        head->block[0] = x, head->block[1] = y, head->block[2] = z;
        head->launch = launch;
    }
    u64 name = NAME(launch, warp), other = __sync_val_compare_and_swap(&own->name, 0, name);
    if (other && other != name) {                /* another warp stands there: this one is not seen */
        head->untracked = 1;
        return 0;
    }
    __sync_fetch_and_add(&own->inside, gpu_popcount(active));
    if (other)                                   /* other lanes of this warp were here before */
        return 0;
    own->site = NOWHERE, own->turns = 0, own->events = 0, own->address = 0;
    own->polls = 0, own->changes = 0, own->arrivals = 0, own->poll = NOWHERE;
    stand->warp = warp;
    stand->place = PLACE(BEGUN, 0, ctx->site);
    stand->launch = launch;
    return 0;
}

int on_exit(struct gpu_exit *ctx) {
    gpu_mask active = gpu_active();
    u64 launch = ctx->launch, leaving = gpu_popcount(active);
    u32 slot;
    int row = launch % LAUNCHES;
    struct own *own = mine(active, launch, &slot);
    if (!own || __sync_fetch_and_add(&own->inside, -leaving) != leaving)
        return 0;
    struct stand *stand = stands.lookup(&slot);
    struct count *count = counts.lookup(&row);
    struct launch *head = launches.lookup(&row);
    if (!stand || !count || !head)
        return 0;
    stand->place = PLACE(EXITED, 0, ctx->site);
    head->exited = __sync_fetch_and_add(&count->exited, 1) + 1;
    __sync_lock_test_and_set(&own->name, 0);     /* now another warp may stand there */
    return 0;
}

static inline void write(struct own *own, u32 slot, u64 place) {
    struct stand *stand = stands.lookup(&slot);
    if (!stand)
        return;
    stand->turns = own->turns, stand->events = own->events, stand->polls = own->polls;
    stand->changes = own->changes, stand->address = own->address;
    stand->place = place;
}

/* Whether this turn is in a chosen span of 128 cycles: one in EVERY, in an order that loops seldom have, too. */
static inline u32 is_chosen(void) {
    u32 clock = gpu_clock();
    return !((clock ^ clock >> 6) & (EVERY - 1) << 7);
}

static inline int turn(u32 each, gpu_mask active, struct gpu_basic_block *ctx) {
    u32 slot;
    struct own *own = mine(active, ctx->launch, &slot);
    u64 site = ctx->site;
    if (!own)
        return 0;
    own->turns = own->site == site ? own->turns + each : each;
    own->site = site;
    own->events += each;
    if (each == 1 && own->events % EVERY)
        return 0;
    write(own, slot, PLACE(LOOP, 0, site) | ((u64)own->poll & 0x1fffff) << 40); /* and where it polled last */
    return 0;
}

int on_loop(struct gpu_basic_block *ctx) { return is_chosen() ? turn(EVERY, gpu_active(), ctx) : 0; }
int on_wait(struct gpu_basic_block *ctx) { return turn(1, ctx->active, ctx); } /* loops that wait, and those around them: each turn */

int on_call(struct gpu_function_entry *ctx) {
    u32 slot;
    struct own *own = mine(gpu_active(), ctx->launch, &slot);
    if (!own)
        return 0;
    own->site = NOWHERE;                         /* a loop in the function begins anew */
    own->events++;
    if (is_chosen())
        write(own, slot, PLACE(CALL, 0, ctx->site));
    return 0;
}

/* After a load or atomic in a loop that only its value can end: count whether a lane has loaded another value than before. */
int on_poll(struct gpu_value *ctx) {
    u64 returns = ctx->effect & GPU_RETURNS, high = returns ? ctx->old_high : ctx->high;
    u64 value = ((returns ? ctx->old_low : ctx->low) + high * 0xff51afd7ed558ccd) * 0x9e3779b97f4a7c15 + ctx->address + 1;
    u64 site = ctx->site, address = ctx->address;
    u32 slot;
    u32 takes = ctx->effect & COMPARES ? ctx->old_low == ctx->high : ctx->effect & SWAPS && ctx->old_low != ctx->low;
    u32 index = (u32)(address >> 2) % LOCKS;
    struct taken *lock = returns && takes ? locks.lookup(&index) : 0;
    if (lock)
        lock->by = NAME(ctx->launch, gpu_global_warp()), lock->address = address;
    struct own *own = mine(ctx->active, ctx->launch, &slot);
    u32 cell = slot * GPU_LANES + gpu_lane();
    struct seen *seen = loaded.lookup(&cell);
    u32 is_new = seen && seen->value[site & 1] != value;
    if (seen && is_new)
        seen->value[site & 1] = value;
    u32 any = gpu_any(is_new);
    if (!own)
        return 0;
    own->polls++;
    own->changes += any;
    own->address = address;
    own->poll = site;
    return 0;
}

int on_arrive(struct gpu_barrier_arrive *ctx) {
    u32 slot;
    struct own *own = mine(gpu_active(), ctx->launch, &slot);
    struct stand *stand = own ? stands.lookup(&slot) : 0;
    if (!own || !stand)
        return 0;
    own->site = NOWHERE;
    stand->turns = ++own->arrivals;
    stand->place = PLACE(BARRIER, ctx->barrier, ctx->site);
    return 0;
}

int on_leave(struct gpu_barrier_leave *ctx) {
    u32 slot;
    struct own *own = mine(gpu_active(), ctx->launch, &slot);
    struct stand *stand = own ? stands.lookup(&slot) : 0;
    if (stand)
        stand->place = PLACE(LEFT, ctx->barrier, ctx->site);
    return 0;
}
"""


def build_parser() -> cli.Parser:
    """Return the parser: when a kernel counts as hanging, and the shared options."""
    parser = cli.parser(TOOL, "Find where the warps of a GPU kernel stand that does not end.", EXAMPLES)
    parser.no_patches = "needs the heads of loops, at which Compute Sanitizer has no patches"
    cli.add_targets(parser)
    looking = parser.add_argument_group("what to look for")
    looking.add_argument(
        "--after",
        type=cli.seconds,
        default=10.0,
        metavar="S",
        help="look at launches that have run for S seconds (default 10)",
    )
    looking.add_argument(
        "--check",
        action="store_true",
        help="exit with status 1 if a launch has not ended that seems never to end (deadlock or spinning)",
    )
    cli.add_kernels(parser)
    cli.add_sampling(parser)
    cli.add_device(parser)
    cli.add_looks(parser)
    cli.add_output(parser, "gpubpf.hangs.stands")
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
    sampling = b.sample(options.sampling)
    b.attach_gpu_entry(kernel=args.kernel, fn_name="on_entry", may_hang=True)
    b.attach_gpu_exit(kernel=args.kernel, fn_name="on_exit", may_hang=True)
    b.attach_gpu_function_entry(kernel=args.kernel, fn_name="on_call")
    b.attach_gpu_basic_block(kernel=args.kernel, fn_name="on_loop", loops="others")
    b.attach_gpu_basic_block(kernel=args.kernel, fn_name="on_wait", loops="waiting")
    b.attach_gpu_value(kernel=args.kernel, fn_name="on_poll", kinds=("load", "atomic"), loops="waiting")
    b.attach_gpu_barrier_arrive(kernel=args.kernel, fn_name="on_arrive")
    b.attach_gpu_barrier_leave(kernel=args.kernel, fn_name="on_leave")
    b.attached.titles |= dict.fromkeys((probe.program for probe in b.attached.probes), TOOL)
    if args.list or args.ptx:
        return b.show_kernels(options, out)
    with b.trace(options, out, Follow(only_shared=True)) as session:
        from gpubpf.hangs import stands, text  # these import NumPy, which would delay the first probe

        hangs = stands.Hangs(args.after, whole=sampling is None)
        results, owners = cli.ResultWriter(options.output, out, session.now_ns), OwnerColumns(session.several)

        def look() -> None:
            text.report(hangs.look(session), owners, args.verbose, results)
            for notice in text.notices(hangs):
                results.note_once(notice)

        for _ in session.intervals(args.interval, args.count, tick=look, every=0.25):
            if args.interval and not session.stopped:
                text.report(hangs.again(), owners, args.verbose, results)
            if out.closed:
                break
        if results.csv:
            results.header(stands.PLACE.columns)
        if not hangs.told and results.form == "text":
            out.line(f"no launch ran for {args.after:g} s")
        results.end(session.summary())
    return session.status or int(args.check and hangs.stuck)


if __name__ == "__main__":
    sys.exit(main())

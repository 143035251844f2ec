#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""threadhist   Count how often each GPU thread runs a kernel, and how much work it does.

USAGE: threadhist [options] [interval [count]] [-p PID[,PID...] | -- COMMAND [ARG...]]

Every thread counts in its own registers, and adds the count to its own cell in GPU memory when it leaves the kernel. The traced
program needs no change and no rebuild.
"""

from __future__ import annotations

import os.path
import sys

if __package__ in (None, ""):  # run as tools/threadhist.py: the library is in ../lib
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "lib"))

from gpubpf.show import cli  # early: Ctrl-C is answered quietly from here on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpubpf.show.owner_columns import OwnerColumns
    from gpubpf.threads.thread_counts import ThreadCounts
    from gpubpf.threads.thread_records import ThreadViews

TOOL = "threadhist"
EXAMPLES = """examples:
    threadhist -- ./app                          instructions per thread
    threadhist --kernel vectorAdd -- ./app       this kernel only
    threadhist --kernel 'ns::*' --work stores -- python3 train.py
    threadhist --by warp --top 10 -- ./app       ten warps with the most work
    threadhist --json -o counts.jsonl -- ./app   every thread, as JSON Lines
    threadhist --sample-blocks 1/16 -- ./app     less overhead: an estimate
    threadhist --budget 5 -- ./app               at most 5 % more instructions
    threadhist --sass --work loads -- ./app      also kernels without PTX
    threadhist --list ./app                      which kernels it can measure
    threadhist 1 10 -- ./app                     print each second, ten times
"""
PROGRAM = r"""
#include <gpubpf.h>

struct tally { u64 runs, work; };
GPU_THREAD_ARRAY(tallies, struct tally, 1);      /* GPU memory: a cell for each thread of the grid */
GPU_WARP_ARRAY(together, struct tally, 1);       /* for each warp: when all lanes exited together and did the same */
GPU_KERNEL_ARRAY(groups, u64, 256);              /* with sampling: work of the chosen blocks, which are grouped at random */
GPU_PARAM(filter, struct gpu_filter);            /* --block and --thread */

static inline int add(u64 work) {                /* on the GPU, in each thread, when it exits the kernel */
    int key = 0;
    struct tally *mine = tallies.lookup(&key);   /* the cell of this thread */
    if (mine) {                                  /* otherwise the map counts it as lost */
        __sync_fetch_and_add(&mine->runs, 1);    /* launches in several streams may overlap */
        __sync_fetch_and_add(&mine->work, work);
    }
    return 0;
}

int on_exit(struct gpu_exit *ctx) {              /* ctx->work counts what --work asks for */
    u64 work = ctx->work, lane = gpu_lane() & (GPU_LANES - 1);
    int key = 0;
    struct tally *all = together.lookup(&key);
    if (!all || !gpu_uniform(work))
        return add(work);
    if (lane < 2)                                /* two lanes add for all: a 32nd of the memory traffic */
        __sync_fetch_and_add(lane ? &all->work : &all->runs, lane ? work : 1);
    return 0;
}

int on_chosen_exit(struct gpu_exit *ctx) {       /* with --block or --thread */
    int key = 0;
    struct gpu_filter *chosen = filter.lookup(&key);
    return chosen && gpu_selected(chosen) ? add(ctx->work) : 0;
}

int on_sampled_exit(struct gpu_exit *ctx) {      /* with --sample-blocks or --sample-warps: only in the chosen ones */
    int key = 0, group = gpu_group() & 255;
    struct gpu_filter *chosen = filter.lookup(&key);
    u64 *work = groups.lookup(&group);
    if (!chosen || !work || !gpu_selected(chosen))
        return 0;
    __sync_fetch_and_add(work, ctx->work);
    return add(ctx->work);
}

/* With --sass, nothing counts instructions: ctx->work is 0, and each access or barrier adds 1 to its thread's work. */
static inline int add_one(void) {
    int key = 0;
    struct tally *mine = tallies.lookup(&key);
    if (mine)
        __sync_fetch_and_add(&mine->work, 1);
    return 0;
}

static inline int add_chosen(void) {
    int key = 0;
    struct gpu_filter *chosen = filter.lookup(&key);
    return chosen && gpu_selected(chosen) ? add_one() : 0;
}

static inline int add_sampled(void) {
    int group = gpu_group() & 255;
    u64 *work = groups.lookup(&group);
    int key = 0;
    struct gpu_filter *chosen = filter.lookup(&key);
    if (!chosen || !work || !gpu_selected(chosen))
        return 0;
    __sync_fetch_and_add(work, 1);
    return add_one();
}

int on_access(struct gpu_access *ctx) { return add_one(); }
int on_chosen_access(struct gpu_access *ctx) { return add_chosen(); }
int on_sampled_access(struct gpu_access *ctx) { return add_sampled(); }
int on_barrier(struct gpu_barrier_arrive *ctx) { return add_one(); }
int on_chosen_barrier(struct gpu_barrier_arrive *ctx) { return add_chosen(); }
int on_sampled_barrier(struct gpu_barrier_arrive *ctx) { return add_sampled(); }
"""
KINDS = ("instructions", "loads", "stores", "atomics", "barriers", "blocks")
RUNS = "runs"
PATCHED = {"loads": "load", "stores": "store", "atomics": "atomic", "barriers": ""}  # what --sass counts


def build_parser() -> cli.Parser:
    """Return the parser: the shared options, what to count, and how to show it."""
    parser = cli.parser(
        TOOL, "Count how often each GPU thread runs a kernel, and how much work it does.", EXAMPLES
    )
    cli.add_targets(parser)
    counting = parser.add_argument_group("what to count, and how to show it")
    counting.add_argument(
        "--work",
        choices=(*KINDS, RUNS),
        help="what counts as work (default: PTX instructions; with --sass: runs of the kernel)",
    )
    by = ("thread", "lane", "warp", "block")
    counting.add_argument(
        "--by", choices=by, default=by[0], help="one row for each of these (default thread)"
    )
    counting.add_argument(
        "--top", type=cli.positive, metavar="N", help="show only the N rows with the most work"
    )
    counting.add_argument(
        "--all-threads",
        action="store_true",
        help="with --json or --csv: write every thread, even of very large grids",
    )
    cli.add_kernels(parser)
    cli.add_patches(parser)
    cli.add_threads(parser)
    cli.add_sampling(parser)
    cli.add_budget(parser)
    cli.add_device(parser)
    cli.add_looks(parser)
    cli.add_output(parser, "gpubpf.threads.thread_records")
    return parser


@cli.command(TOOL)
def main(argv: list[str] | None = None) -> int:
    """Run the tool; return its exit status."""
    parser = build_parser()
    args = cli.parse(parser, argv)
    options = cli.Options.of(args)
    if args.sass and args.work not in (None, RUNS, *PATCHED):
        parser.error(
            f"--sass cannot count {args.work}, which need PTX; choose --work {', '.join(PATCHED)} or {RUNS}"
        )
    work = args.work or (RUNS if args.sass else KINDS[0])
    if work == RUNS and options.sampling.given:
        parser.error(
            "--work runs counts how often threads run, which a sample does not show; "
            + ("choose another --work" if args.sass else "leave out the sampling")
        )
    out = cli.open_results(options.output)
    if args.ebpf:
        out.write(PROGRAM.lstrip())
        return 0
    from gpubpf.program import BPF
    from gpubpf.show.owner_columns import OwnerColumns

    b = BPF(text=PROGRAM)
    sampling = b.sample(options.sampling)
    b.limit(options.kernels)
    which = "on_sampled_" if sampling else "on_chosen_" if options.threads.filtered else "on_"
    counted = work in KINDS and not args.sass
    b.attach_gpu_exit(kernel=args.kernel, fn_name=f"{which}exit", accumulate=work if counted else None)
    if args.sass and work == "barriers":
        b.attach_gpu_barrier_arrive(args.kernel, f"{which}barrier")
    elif args.sass and work in PATCHED:
        b.attach_gpu_access(args.kernel, f"{which}access", PATCHED[work], ("global", "shared", "local"))
    if args.list or args.ptx:
        return b.show_kernels(options, out)
    with b.trace(options, out) as session:
        # These import NumPy, which would delay the first probe.
        from gpubpf.threads.thread_counts import Account, Reader
        from gpubpf.threads.thread_records import ThreadViews

        since_last, by_warp = bool(args.interval), which == "on_"
        reader = Reader(args.block, args.thread, since_last, sampling, by_warp, work == RUNS)
        results, owners = cli.ResultWriter(options.output, out, session.now_ns), OwnerColumns(session.several)
        views = ThreadViews(work, args.by, args.top, args.all_threads)
        account = Account()
        for _ in session.intervals(args.interval, args.count):
            counts = reader.read(session)
            account.add(counts)
            report(counts, owners, views, results)
            if out.closed:
                break
        for notice in account.notices() if args.sass else ():
            cli.note(TOOL, notice)
        results.end(session.summary())
    return session.status


def report(
    counts: list[ThreadCounts], owners: OwnerColumns, views: ThreadViews, results: cli.ResultWriter
) -> None:
    """Print what was counted since the last report."""
    from gpubpf.threads import thread_counts, thread_records

    results.begin()
    if results.json or results.csv:
        for kernel in counts:
            if kernel.no_thread:
                extents = (kernel.shape.grid, kernel.shape.block_dim)
                grid, block = (" x ".join(map(str, extent)) for extent in extents)
                cli.note(TOOL, f"{kernel.instance.kernel}, grid {grid}, block {block}: {kernel.nothing}")
        thread_records.write(counts, views, results)
    else:
        # A report is also about blocks of threads.
        what = "basic blocks" if views.work == "blocks" else views.work
        verbose = results.options.verbose
        results.out.lines(thread_counts.lines(counts, what, views.by, views.top, owners, verbose))


if __name__ == "__main__":
    sys.exit(main())

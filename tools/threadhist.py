#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""threadhist   Count how often each GPU thread runs a kernel, and how much work it does.

USAGE: threadhist [options] [interval [count]] [-p PID[,PID...] | -- COMMAND [ARG...]]

Every thread counts in its own registers and adds to its own place in GPU memory as it leaves the kernel. The program
that is watched needs no change and no rebuild.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as tools/threadhist.py: the library is beside
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "lib"))

from gpubpf.show import cli

if TYPE_CHECKING:
    import argparse

    from gpubpf.session.session import Session
    from gpubpf.show.owner_columns import Whose
    from gpubpf.threads.thread_counts import Tally

TOOL = "threadhist"
EXAMPLES = """examples:
    threadhist -- ./app                          instructions per thread, every kernel of ./app
    threadhist --kernel vectorAdd -- ./app       this kernel only
    threadhist --kernel 'ns::*' --work stores -- python3 train.py
    threadhist --by warp --top 10 -- ./app       the ten warps with the most work
    threadhist --json -o counts.jsonl -- ./app   every thread, as JSON Lines
    threadhist --list ./app                      its kernels; which can be instrumented
    threadhist 1 10 -- ./app                     print each second, ten times
"""
PROGRAM = r"""
#include <gpubpf.h>

struct tally { u64 runs, work; };
GPU_THREAD_ARRAY(tallies, struct tally, 1);      /* GPU memory: one for each thread of the grid */
GPU_PARAM(filter, struct gpu_filter);            /* --block and --thread */

static inline int add(u64 work) {                /* on the GPU, in each thread, as it leaves the kernel */
    int key = 0;
    struct tally *mine = tallies.lookup(&key);   /* this thread's own */
    if (mine) {                                  /* else the map counts it as lost */
        __sync_fetch_and_add(&mine->runs, 1);    /* launches in several streams may overlap */
        __sync_fetch_and_add(&mine->work, work);
    }
    return 0;
}

int on_exit(struct gpu_exit *ctx) { return add(ctx->work); }  /* an accumulator: what --work chose */

int on_chosen_exit(struct gpu_exit *ctx) {       /* with --block or --thread */
    int key = 0;
    struct gpu_filter *chosen = filter.lookup(&key);
    return chosen && gpu_selected(chosen) ? add(ctx->work) : 0;
}
"""
KINDS = ("instructions", "loads", "stores", "atomics", "barriers", "blocks")


def build_parser() -> cli.Parser:
    """Options: the shared ones, and how to count and show."""
    parser = cli.parser(
        TOOL, "Count how often each GPU thread runs a kernel, and how much work it does.", EXAMPLES
    )
    cli.add_targets(parser)
    counting = parser.add_argument_group("what to count, how to show it")
    counting.add_argument(
        "--work", choices=KINDS, default=KINDS[0], help="what counts as work (default: PTX instructions)"
    )
    by = ("thread", "lane", "warp", "block")
    counting.add_argument("--by", choices=by, default=by[0], help="show each of these (default thread)")
    counting.add_argument("--top", type=cli.positive, metavar="N", help="show the N with the most work")
    cli.add_kernels(parser)
    cli.add_threads(parser)
    cli.add_device(parser)
    cli.add_looks(parser)
    cli.add_output(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    with cli.errors(TOOL):
        args = cli.parse(build_parser(), argv)
        out = cli.open_results(args)
        if args.ebpf:
            out.write(PROGRAM.lstrip())
            return 0
        from gpubpf.program import BPF
        from gpubpf.show.owner_columns import Whose

        b = BPF(text=PROGRAM)
        on_exit = "on_chosen_exit" if cli.chooses_threads(args) else "on_exit"
        b.attach_gpu_exit(kernel=args.kernel, fn_name=on_exit, accumulate=args.work)
        if args.list or args.ptx:
            from gpubpf.images import listing

            return listing.show(b, args, out)
        with b.trace(args) as session:
            from gpubpf.threads.thread_counts import (
                Tallies,  # loads NumPy, which is no part of the way to the first probe
            )

            tallies = Tallies(args.block, args.thread, anew=bool(args.interval))
            whose = Whose(session.several)
            for _ in session.intervals(args.interval, args.count):
                report(tallies.read(session), whose, args, out)
                if out.closed:
                    break
            show_summary(session, args, out)
    return session.status


def report(tallies: list[Tally], whose: Whose, args: argparse.Namespace, out: cli.Output) -> None:
    """What was counted since the last report, in the form asked for."""
    if args.json or args.csv:
        (show_json if args.json else show_csv)(tallies, args, out)
        return
    from gpubpf.threads import thread_counts as text

    if args.timestamps:
        out.line(time.strftime("%H:%M:%S"))
    out.lines(text.lines(tallies, args.work, args.by, args.top, whose, args.verbose))


# --- for programs ---


def show_json(tallies: list[Tally], args: argparse.Namespace, out: cli.Output) -> None:
    """A record for each thread (and each group of --by), then one for the kernel and launch shape."""
    import json

    from gpubpf.threads import imbalance
    from gpubpf.threads.thread_counts import write_threads

    for tally in tallies:
        instance, shape = tally.instance, tally.shape
        threads = imbalance.group(shape, tally.runs, tally.work, "thread", tally.selected)
        common = {"pid": instance.pid, "comm": instance.comm, "gpu": instance.gpu, "kernel": instance.kernel}
        common |= {"grid": shape.grid, "block_dim": shape.block_dim}
        if args.by == "thread" or args.top is None:
            start = json.dumps({"type": "thread", **common}, separators=(",", ":"))[:-1]
            parts = (start + ',"block":[', ",", ",", '],"thread":[', ",", ",", '],"runs":', ',"work":', "}\n")
            write_threads(out, threads, threads.largest(args.top), parts)
        if args.by != "thread":
            groups = imbalance.group(shape, tally.runs, tally.work, args.by, tally.selected)
            names = ("threads", "runs", "work")
            out.records(
                {"type": args.by, **common, **groups.indices(place)}
                | {name: int(getattr(groups, name)[place]) for name in names}
                for place in groups.largest(args.top)
            )
        idle = None
        if tally.selected is None:
            empty, waiting = imbalance.idle_lanes(shape, tally.work)
            idle = {"empty": round(empty, 6), "waiting": round(waiting, 6)}
        out.record(
            type="kernel",
            **common,
            demangled=instance.demangled,
            mangled=instance.mangled,
            launches=tally.launches,
            threads=len(threads),
            runs=int(threads.runs.sum()),
            work=int(threads.work.sum()),
            imbalance=round(threads.imbalance, 6),
            work_kind=args.work,
            registers={"before": instance.registers_before, "after": instance.registers_after},
            idle_lanes=idle,
            **({"ts_ns": time.clock_gettime_ns(time.CLOCK_MONOTONIC)} if args.timestamps else {}),
        )


def show_csv(tallies: list[Tally], args: argparse.Namespace, out: cli.Output) -> None:
    """The table of --by, every row of it unless --top."""
    from gpubpf.threads import imbalance
    from gpubpf.threads.thread_counts import write_threads

    block, thread = "block_x,block_y,block_z", "thread_x,thread_y,thread_z"
    who = {"thread": f"{block},{thread}", "warp": f"{block},warp,threads", "block": f"{block},threads"}
    now = (time.clock_gettime_ns(time.CLOCK_MONOTONIC),) if args.timestamps else ()
    if not out.began:
        first = "ts_ns,pid,comm,gpu,kernel" if now else "pid,comm,gpu,kernel"
        shape_names = "grid_x,grid_y,grid_z,block_dim_x,block_dim_y,block_dim_z"
        out.write(f"{first},{shape_names},{who.get(args.by, 'lane,threads')},runs,work\n")
    for tally in tallies:
        instance, shape = tally.instance, tally.shape
        groups = imbalance.group(shape, tally.runs, tally.work, args.by, tally.selected)
        process = (instance.pid, instance.comm, instance.gpu)
        start = cli.csv_cells((*now, *process, instance.kernel, shape.grid, shape.block_dim)) + ","
        order: Any = groups.largest(args.top)
        if args.by == "thread":
            write_threads(out, groups, order, (start, *",,,,,,,", "\n"))
            continue
        for place in order:
            sums = (groups.threads[place], groups.runs[place], groups.work[place])
            out.write(start + cli.csv_cells((*groups.indices(place).values(), *sums)) + "\n")


def show_summary(session: Session, args: argparse.Namespace, out: cli.Output) -> None:
    """How much of what ran was seen, and why not all."""
    summary = session.summary()
    if args.json:
        out.record(**({"type": "summary", "tool": TOOL} | summary))
    elif not args.csv:
        for line in cli.coverage(summary):
            out.line(line)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""threadhist   Count how often each GPU thread runs a kernel, and how much work it does.

USAGE: threadhist [options] [interval [count]] -- COMMAND [ARG...]

Every thread counts in its own registers and adds to its own place in GPU memory as it leaves the kernel. The program
that is watched needs no change and no rebuild.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if __package__ in (None, ""):  # run as tools/threadhist.py: the library is beside
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "lib"))

from gpubpf import cli

if TYPE_CHECKING:
    from gpubpf.imbalance import Groups, Shape
    from gpubpf.program import Instance, Session

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
SCREEN = 32  # more threads than this are shown as a histogram


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
    args = cli.parse(build_parser(), argv)
    with cli.errors(TOOL):
        out = cli.open_results(args)
        if args.ebpf:
            out.write(PROGRAM.lstrip())
            return 0
        from gpubpf.program import BPF

        b = BPF(text=PROGRAM)
        on_exit = "on_chosen_exit" if cli.chooses_threads(args) else "on_exit"
        b.attach_gpu_exit(kernel=args.kernel, fn_name=on_exit, accumulate=args.work)
        if args.list or args.ptx:
            from gpubpf import listing

            return listing.show(b, args, out)
        before: dict = {}
        with b.trace(args) as session:
            for _ in session.intervals(args.interval, args.count):
                report(session, args, out, before)
                if out.closed:
                    break
            show_summary(session, args, out)
    return session.status


def report(session: Session, args: argparse.Namespace, out: cli.Output, before: dict) -> None:
    """What was counted since the last report, in the form asked for."""
    show = show_json if args.json else show_csv if args.csv else show_text
    show(interval_tallies(session, args, before), args, out)


class Tally(NamedTuple):
    """What the threads of one kernel and launch shape did in one interval; all of the run is one interval by default."""

    instance: Instance
    shape: Shape
    launches: int
    runs: Any  # NumPy arrays, one element for each thread of the grid
    work: Any
    selected: Any  # which threads --block and --thread chose; None: all


def interval_tallies(session: Session, args: argparse.Namespace, before: dict) -> list[Tally]:
    """What was counted since the last call, busiest kernel first. Counts on the device only grow: `before` remembers."""
    from gpubpf.imbalance import Shape

    found = []
    for instance in session.instances("tallies"):
        key = (instance.pid, instance.gpu, instance.mangled, instance.grid, instance.block_dim)
        launches, runs, work = instance.launches, instance.array[0]["runs"], instance.array[0]["work"]
        if args.interval:
            was_launches, was_runs, was_work = before.get(key, (0, 0, 0))
            before[key] = launches, runs.copy(), work.copy()
            launches, runs, work = launches - was_launches, runs - was_runs, work - was_work
        if launches:
            shape = Shape(instance.grid, instance.block_dim)
            found.append(
                Tally(instance, shape, launches, runs, work, shape.selection(args.block, args.thread))
            )
    return sorted(found, key=lambda tally: -int(tally.work.sum()))


# --- for people ---


def show_text(tallies: list[Tally], args: argparse.Namespace, out: cli.Output) -> None:
    """Per kernel and launch shape: what is uneven, then a row for each thread, or a histogram where these are many."""
    from gpubpf import hist, imbalance, names, table

    if args.timestamps:
        out.line(time.strftime("%H:%M:%S"))
    labels = names.labels(tally.instance.mangled for tally in tallies)
    for tally in tallies:
        instance, shape = tally.instance, tally.shape
        threads = imbalance.group(shape, tally.runs, tally.work, "thread", tally.selected)
        groups = imbalance.group(shape, tally.runs, tally.work, args.by, tally.selected)
        grid, block_dim = (" x ".join(map(str, extents)) for extents in (shape.grid, shape.block_dim))
        name = instance.demangled if args.verbose else table.fit(labels[instance.mangled], 46)
        out.line(f"{name}: {args.work} per {args.by}")
        said = [
            f"grid {grid}, block {block_dim}; {instance.comm} (pid {instance.pid})",
            f"{table.count(tally.launches, 'launch')}, {table.count(len(threads), 'thread')}"
            + (" chosen" if tally.selected is not None else ""),
            *imbalance.findings(threads, args.work),
            f"imbalance {groups.imbalance:.2f} (most / mean), mean {groups.mean:,.1f} {args.work} per {args.by}",
            *(imbalance.idle_findings(shape, tally.work) if tally.selected is None else ()),
        ]
        if args.verbose and instance.registers_after is not None:
            said.append(
                f"registers: {instance.registers_before} as built, {instance.registers_after} with the probe"
            )
        for sentence in said:
            for line in table.wrap(sentence, indent=2):
                out.line(line)
        out.line()
        order: Any = groups.largest(args.top)
        if len(groups) > SCREEN:
            for line in hist.lines(hist.log2_slots(groups.work), args.work, f"{args.by}s"):
                out.line(line)
            out.line()
            if args.top is None:  # the extremes
                order = sorted(
                    {groups.work.argmax(), groups.work.argmin()}, key=lambda at: -int(groups.work[at])
                )
        show_rows(groups, order, args.work, out)
        out.line()


def show_rows(groups: Groups, order: Any, what: str, out: cli.Output) -> None:
    """One row for each place in `order`: who, runs, work, its share of the mean with a bar."""
    from gpubpf import table

    rows = []
    for place in order:
        work = int(groups.work[place])
        row = groups.labels(place) | ({} if groups.by == "thread" else {"THREADS": groups.threads[place]})
        row |= {"RUNS": groups.runs[place], f"WORK ({what})": work}
        rows.append(row | {"OF MEAN": f"{100 * work / groups.mean:.0f} %" if groups.mean else "-"})
    if rows:
        lines = table.lines(list(rows[0]), [list(row.values()) for row in rows])
        for line in table.with_bars(
            lines, [float(groups.work[place]) for place in order], float(groups.work.max())
        ):
            out.line(line)


# --- for programs ---


def show_json(tallies: list[Tally], args: argparse.Namespace, out: cli.Output) -> None:
    """A record for each thread (and each group of --by), then one for the kernel and launch shape."""
    import json

    from gpubpf import imbalance
    from gpubpf.output import write_threads

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
    from gpubpf import imbalance
    from gpubpf.output import write_threads

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

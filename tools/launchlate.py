#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""launchlate   How long GPU kernels take from the call that launches them to their start, and why.

USAGE: launchlate [options] [interval [count]] [-p PID[,PID...] | -- COMMAND [ARG...]]

The agent logs each call that gives the GPU work; a host program notes who launches; device programs note when the first thread of
a kernel starts and the last one ends. The clocks of both sides are tied together, and the error that is left is printed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as tools/launchlate.py: the library is beside
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "lib"))

from gpubpf.show import cli

if TYPE_CHECKING:
    import argparse

    from gpubpf.launches.latency import View
    from gpubpf.launches.off_cpu import OffCpu
    from gpubpf.launches.sums import Sums
    from gpubpf.session.session import Session
    from gpubpf.show.owner_columns import Whose
    from gpubpf.show.perfetto import Trace

TOOL = "launchlate"
EXAMPLES = """examples:
    launchlate -- ./app                   how long kernels take to start, and why
    launchlate -s --kernel 'ns::*' -- ./app   these kernels, stream by stream
    launchlate -v -- ./app                a line for each launch
    launchlate --timeline -- ./app        what each stream did, in order
    launchlate --trace t.json -- ./app    a trace for ui.perfetto.dev
    launchlate --slow 500 -- ./app        launches slower than 500 us, and why
    launchlate 1 10 -- python3 train.py   print each second, ten times
"""
SLOTS = 65536
PROGRAM = r"""
#include <gpubpf.h>

#define SLOTS 65536                              /* launch number N has slot N modulo this */
#define SHARDS 8                                 /* of a launch's end, so that warps do not queue for one word */
#define TIME ((1ULL << 48) - 1)                  /* a cell: number of the slot's round << 48 | time */

struct half { u64 launch, call_ns, cgroup, start; u32 pid, tid; char comm[16]; };
GPU_SHARED_ARRAY(halves, struct half, SLOTS);    /* host memory: what both sides know of a launch; outlives the program */
GPU_ARRAY(starts, u64, SLOTS);                   /* GPU memory: ~time of the first thread, so that the largest is the first */
GPU_ARRAY(ends, u64, SLOTS * SHARDS);            /* time of the last thread */
GPU_PARAM(hosts, struct gpu_host_filter);        /* --cgroup, --comm, -t */
GPU_PARAM(each, u64);                            /* lanes of a warp have clocks of their own: the virtual clock */

int on_launch(struct gpu_launch *ctx) {          /* on the host, in the thread that launches, before the driver's call */
    int key = 0, slot = ctx->launch % SLOTS;
    struct gpu_host_filter *chosen = hosts.lookup(&key);
    struct half *half = halves.lookup(&slot);
    if (!chosen || !half || !gpu_host_selected(chosen))
        return 0;
    u64 id = bpf_get_current_pid_tgid();
    half->start = 0;
    half->pid = id >> 32;
    half->tid = id;
    half->cgroup = bpf_get_current_cgroup_id();
    half->call_ns = ctx->call_ns;
    bpf_get_current_comm(&half->comm, sizeof(half->comm));
    half->launch = ctx->launch;
    return 0;
}

int on_entry(struct gpu_entry *ctx) {            /* on the GPU, in the first thread of each block */
    u64 x, y, z, launch = ctx->launch, now = bpf_get_globaltimer();
    u64 cell = (launch / SLOTS) << 48 | (~now & TIME);
    int slot = launch % SLOTS;
    bpf_get_thread_idx(&x, &y, &z);
    if (x | y | z)
        return 0;
    u64 *start = starts.lookup(&slot);
    if (start && *start < cell && gpu_max(start, cell) < cell) {
        struct half *half = halves.lookup(&slot);
        if (half)
            half->start = cell;
    }
    return 0;
}

int on_exit(struct gpu_exit *ctx) {              /* on the GPU, in one lane of those that leave together */
    u64 launch = ctx->launch, now = bpf_get_globaltimer();
    u64 cell = (launch / SLOTS) << 48 | (now & TIME);
    int key = 0, shard = launch % SLOTS * SHARDS + gpu_sm() % SHARDS;
    u32 last = gpu_log2(gpu_active());
    u64 *all = each.lookup(&key);
    if (!all || (!*all && gpu_lane() != last))
        return 0;
    u64 *end = ends.lookup(&shard);
    if (end && *end < cell)
        gpu_max(end, cell);
    return 0;
}
"""


def build_parser() -> cli.Parser:
    """Options: the shared ones, and what to show of launches."""
    parser = cli.parser(
        TOOL, "How long GPU kernels take from the call that launches them to their start, and why.", EXAMPLES
    )
    cli.add_targets(parser)
    shown = parser.add_argument_group("what to show")
    shown.add_argument("-s", dest="streams", action="store_true", help="each stream by itself")
    shown.add_argument("--timeline", action="store_true", help="what each stream did, in order")
    shown.add_argument(
        "--trace", metavar="FILE", help="write a trace for ui.perfetto.dev: threads, streams, arrows between"
    )
    shown.add_argument("--stacks", action="store_true", help="the host's stacks that launched")
    shown.add_argument(
        "--slow",
        type=cli.positive,
        metavar="US",
        help="only launches slower than that, with what the host did",
    )
    shown.add_argument(
        "--cupti",
        nargs="?",
        const="",
        metavar="LIBRARY",
        help="time what no probe can by CUPTI's activity records, not timing events (untried on a GPU)",
    )
    cli.add_kernels(parser)
    cli.add_host_filters(parser)
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

        b = BPF(text=PROGRAM)
        b.attach_launch(fn_name="on_launch")
        b.attach_gpu_entry(kernel=args.kernel, fn_name="on_entry")
        b.attach_gpu_exit(kernel=args.kernel, fn_name="on_exit")
        if args.list or args.ptx:
            from gpubpf.images import listing

            return listing.show(b, args, out)
        from gpubpf.session import tracing
        from gpubpf.session.session import Follow
        from gpubpf.show import perfetto

        b["each"].set(int(tracing.device_of(args).kind == "sim").to_bytes(8, "little"))
        meanwhile = None
        if args.slow:
            from gpubpf.launches.off_cpu import OffCpu

            meanwhile = OffCpu(b)
        trace = perfetto.Trace(args.trace) if args.trace else None
        follow = Follow(log_records=1 << 17, stamps=True, stacks=args.stacks, pump=SLOTS // 8)
        with b.trace(args, follow) as session:
            measure(session, meanwhile, trace, args, out)
    return session.status


def measure(
    session: Session, meanwhile: OffCpu | None, trace: Trace | None, args: argparse.Namespace, out: cli.Output
) -> None:
    """Shows launches until the measurement ends. What it takes loads NumPy, which is no part of the way to the first probe."""
    from gpubpf.launches import latency
    from gpubpf.launches.launches import Launches
    from gpubpf.launches.sums import Losses, Sums
    from gpubpf.show.owner_columns import Whose

    launches = Launches(SLOTS, args.kernel, filtered=bool(args.cgroup or args.comm or args.tid))
    by = (("queue",) if args.streams else ()) + (("graph", "node") if args.graphs else ())
    sums, losses, whose = Sums(by, bool(args.graphs)), Losses(), Whose(session.several)

    def look(last: bool) -> None:
        """Lists what is new, as far as that is wanted, and adds it up."""
        found = launches.found()
        view = latency.View(found, meanwhile.activity() if meanwhile else None)
        new = launches.fresh(found, last)
        launched = new[found.wanted[new]]
        whose.see(view.owners(launched))
        chosen = latency.slower(view, launched, 1000 * args.slow) if args.slow else launched
        show_each(view, new, chosen, launched, whose, args, out)
        if trace:
            latency.write_trace(view, trace, new)
        sums.add(view, chosen, bool(args.stacks))
        losses.add(view, new)
        launches.forget()

    def take() -> None:
        launches.take(session)
        if launches.full:
            look(last=False)

    for _ in session.intervals(args.interval, args.count, tick=take):
        launches.take_halves(session)
        if args.timestamps and not args.json and not args.csv:
            out.line(time.strftime("%H:%M:%S"))
        look(last=session.stopped)
        show_sums(sums, whose, args, out)
        sums = Sums(by, bool(args.graphs))
        if out.closed:
            break
    if trace:
        trace.close()
    show_summary(session, losses.fields(launches.lost), args, out)


def show_each(
    view: View, new: Any, chosen: Any, launched: Any, whose: Whose, args: argparse.Namespace, out: cli.Output
) -> None:
    """What is listed one by one. `new`: places of operations, `launched` those of kernels that were asked for, `chosen` of these."""
    from gpubpf.launches import latency_text

    if whose.processes:
        chosen = view.by_call(chosen)
    if args.json:
        if args.timeline:
            out.records(view.operation(at) for at in new.tolist())
        if args.verbose or args.slow:
            out.records(view.launch(at, args.stacks) for at in chosen.tolist())
    elif not args.csv:
        if args.timeline:
            out.lines(latency_text.timeline_lines(view, new))
        if args.slow:
            out.lines(latency_text.slow_stories(view, chosen, launched, args.slow, whose))
        elif args.verbose:
            lines = (latency_text.launch_line(view, at, whose) for at in chosen.tolist())
            out.lines((latency_text.launch_header(whose), *lines, ""))


def show_sums(sums: Sums, whose: Whose, args: argparse.Namespace, out: cli.Output) -> None:
    """What happened since the last report, added up."""
    from gpubpf.launches import latency
    from gpubpf.launches.sums import kernel_record

    records = (kernel_record(group, args.streams, bool(args.graphs)) for group in sums.groups)
    stamp = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    if args.json:
        out.records(record | ({"ts_ns": stamp} if args.timestamps else {}) for record in records)
    elif args.csv:
        now = (stamp,) if args.timestamps else ()
        if not out.began:
            out.write(cli.csv_cells((*(("ts_ns",) if now else ()), *latency.CSV_COLUMNS)) + "\n")
        out.write("".join(cli.csv_cells((*now, *latency.csv_row(record))) + "\n" for record in records))
    elif sums.groups:
        out.lines(text(sums, whose, args))


def text(sums: Sums, whose: Whose, args: argparse.Namespace) -> Iterator[str]:
    """For people: the table, what was waited for, a histogram, what to do about it."""
    from gpubpf.launches import latency_text

    yield from latency_text.finding(sums)
    yield from latency_text.kernel_table(sums, args.streams, whose)
    yield from latency_text.wait_lines(sums, whose)
    yield from (latency_text.clock_line(sums), "")
    yield from (*latency_text.histogram(sums), "")
    yield from latency_text.stack_lines(sums) if args.stacks else ()
    yield from latency_text.graph_hint(sums)


def show_summary(session: Session, more: dict[str, Any], args: argparse.Namespace, out: cli.Output) -> None:
    """How much of what ran was seen, and why not all. `more`: what was lost, launch by launch (the session knows a bound)."""
    from gpubpf.launches import latency_text

    summary = session.summary()
    summary["lost"] = more["launches_lost"] + more["operations_lost"]
    if args.json:
        out.record(**({"type": "summary", "tool": TOOL} | summary | more))
    elif not args.csv:
        out.lines([*cli.coverage(summary | {"lost": 0}), *latency_text.loss_lines(more)])
        out.lines(cli.host_programs(summary) if args.verbose else ())


if __name__ == "__main__":
    sys.exit(main())

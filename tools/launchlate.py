#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""launchlate   How long GPU kernels take from the call that launches them to their start, and why.

USAGE: launchlate [options] [interval [count]] [-p PID[,PID...] | -- COMMAND [ARG...]]

The agent logs each call that gives the GPU work. Device programs record when the first thread of a kernel starts and the last one
ends. With --cgroup, --comm or -t, a host program chooses launches. The tool relates the clocks of host and GPU, and prints the
remaining error.
"""

from __future__ import annotations

import os.path
import sys

if __package__ in (None, ""):  # run as tools/launchlate.py: the library is in ../lib
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "lib"))

from gpubpf.show import cli  # early: Ctrl-C is answered quietly from here on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpubpf.launches.launch_report import LaunchViews
    from gpubpf.launches.off_cpu import OffCpu
    from gpubpf.session.session import Session
    from gpubpf.show.perfetto import Trace

TOOL = "launchlate"
EXAMPLES = """examples:
    launchlate -- ./app                       how long kernels take to start
    launchlate -s --kernel 'ns::*' -- ./app   these kernels, by stream
    launchlate -v -- ./app                    a line for each launch
    launchlate --timeline -- ./app            what each stream did, in order
    launchlate --trace t.json -- ./app        a trace for ui.perfetto.dev
    launchlate --slow 500 -- ./app            starts after more than 500 us
    launchlate --sass -- python3 infer.py     also kernels without PTX
    launchlate 1 10 -- python3 train.py       print each second, ten times
"""
SLOTS = 131072
PROGRAM = r"""
#include <gpubpf.h>

#define SLOTS 131072                             /* launch number N uses slot N modulo SLOTS */
#define SHARDS 64                                /* words for the end of a launch, so that warps do not all wait for one */
#define FIRST 256                                /* blocks that can be the first to begin: GPUs start them in order */
#define TIME ((1ULL << 48) - 1)                  /* a cell is how often the slot was reused << 48 | time */

struct launch { u64 launch, start, end; };       /* launch: of one that the filters let through. end: the agent copies it */
GPU_SHARED_ARRAY(launches, struct launch, SLOTS);  /* host memory, for host and GPU; outlives the traced process */
GPU_ARRAY(starts, u64, SLOTS);                   /* GPU memory: ~time, so that the first thread has the largest value */
GPU_ARRAY(ends, u64, SHARDS * SLOTS);            /* time of the last thread; a shard's words lie far from another's */
GPU_PARAM(hosts, struct gpu_host_filter);        /* --cgroup, --comm, -t */
GPU_PARAM(every_lane, u64);                      /* 1: the lanes of a warp may have different clocks (embedded device) */

int on_launch(struct gpu_launch *ctx) {          /* on the host, in the launching thread, before the driver's call */
    int key = 0, slot = ctx->launch % SLOTS;
    struct gpu_host_filter *chosen = hosts.lookup(&key);
    struct launch *mine = launches.lookup(&slot);
    if (chosen && mine && gpu_host_selected(chosen))
        mine->launch = ctx->launch;
    return 0;
}

int on_entry(struct gpu_entry *ctx) {            /* on the GPU, in the first thread of each block */
    u64 x, y, z;
    bpf_get_thread_idx(&x, &y, &z);
    if (x | y | z)
        return 0;
    int key = 0;
    u64 *all = every_lane.lookup(&key);
    bpf_get_block_idx(&x, &y, &z);
    if (!all || (!*all && (x >= FIRST || y | z)))
        return 0;
    u64 launch = ctx->launch, cell = (launch / SLOTS) << 48 | (~bpf_get_globaltimer() & TIME);
    int slot = launch % SLOTS;
    u64 *start = starts.lookup(&slot);
    struct launch *mine = launches.lookup(&slot);
    if (!start || !mine)
        return 0;
    gpu_max(start, cell);
    if (!(x | y | z))                            /* the first block: known even if the context fails */
        mine->start = cell;
    return 0;
}

int on_exit(struct gpu_exit *ctx) {              /* on the GPU, in one of the lanes that exit together */
    int key = 0;
    u64 *all = every_lane.lookup(&key);
    gpu_mask active = gpu_active();
    u32 last = gpu_log2(active), shard = gpu_sm() % SHARDS;
    if (!all || (!*all && gpu_lane() != last))
        return 0;
    u64 now = bpf_get_globaltimer(), launch = ctx->launch;  /* in this order: in a graph, the number is loaded from GPU memory */
    int word = shard * SLOTS + launch % SLOTS;
    u64 *end = ends.lookup(&word);
    if (end)
        gpu_max(end, (launch / SLOTS) << 48 | (now & TIME));
    return 0;
}
"""


def build_parser() -> cli.Parser:
    """Return the parser: the shared options, and what to show of launches."""
    parser = cli.parser(
        TOOL, "Measure how long GPU kernels take to start after their launch call, and why.", EXAMPLES
    )
    cli.add_targets(parser)
    shown = parser.add_argument_group("what to show")
    shown.add_argument("-s", dest="streams", action="store_true", help="show each stream separately")
    shown.add_argument("--timeline", action="store_true", help="print what each stream did, in order")
    shown.add_argument(
        "--trace",
        type=cli.parse_file,
        metavar="FILE",
        help="write a trace for ui.perfetto.dev to FILE: threads, streams, and arrows between them",
    )
    shown.add_argument("--stacks", action="store_true", help="print the host stacks that launched kernels")
    shown.add_argument(
        "--slow",
        type=cli.positive,
        metavar="US",
        help="only launches that took more than US microseconds to start, with what the host did",
    )
    shown.add_argument(
        "--cupti",
        nargs="?",
        const="",
        metavar="LIBRARY",
        help="for work without a probe, use CUPTI activity records, even if the program may use CUPTI itself"
        " (by default only if it cannot)",
    )
    shown.add_argument(
        "--no-cupti",
        dest="cupti",
        action="store_false",
        default=None,
        help="for work without a probe, use timing events only",
    )
    cli.add_kernels(parser, "show CUDA graphs node by node; measure their kernels")
    cli.add_patches(parser)
    cli.add_host_filters(parser)
    cli.add_device(parser, times=True)
    cli.add_looks(parser)
    cli.add_output(parser, "gpubpf.launches.launch_records")
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

    b = BPF(text=PROGRAM)
    if options.threads.host_filters:
        b.attach_launch(fn_name="on_launch")
    b.attach_gpu_entry(kernel=args.kernel, fn_name="on_entry")
    b.attach_gpu_exit(kernel=args.kernel, fn_name="on_exit")
    if args.list or args.ptx:
        return b.show_kernels(options, out)
    from gpubpf.session import tracing
    from gpubpf.show import perfetto
    from gpubpf.traced.measurement import Follow, Kept

    b["every_lane"].set(int(tracing.device_of(options).kind == "sim").to_bytes(8, "little"))
    off_cpu = None
    if args.slow:
        from gpubpf.launches.off_cpu import OffCpu

        off_cpu = OffCpu(b)
    trace = perfetto.Trace(args.trace) if args.trace else None
    kept = Kept("ends", "launches", offset=16, slots=SLOTS)
    follow = Follow(
        log_records=1 << 18, stamps=True, stacks=args.stacks, ranges=args.stacks, pump=SLOTS // 4, kept=kept
    )
    with b.trace(options, out, follow) as session:
        from gpubpf.launches.launch_report import LaunchViews  # NumPy would delay the first probe

        results = cli.ResultWriter(options.output, out, session.now_ns)
        results.head(session.device.clock_notice)
        measure(session, off_cpu, trace, options, cli.group(LaunchViews, args), results)
    return session.status


def measure(
    session: Session,
    off_cpu: OffCpu | None,
    trace: Trace | None,
    options: cli.Options,
    views: LaunchViews,
    results: cli.ResultWriter,
) -> None:
    """Print launches until the measurement ends. The imports load NumPy, which would delay the first probe."""
    from gpubpf.launches import latency, latency_text, launch_report
    from gpubpf.launches.launches import Launches
    from gpubpf.launches.overlap import Overlap
    from gpubpf.launches.sums import LaunchLosses, LaunchSums
    from gpubpf.show.owner_columns import OwnerColumns

    launches = Launches(SLOTS, options.kernels.wanted, filtered=bool(options.threads.host_filters))
    by = (("queue",) if views.streams else ()) + (("graph", "node") if views.graphs else ())
    sums, losses, overlap = LaunchSums(by, bool(views.graphs)), LaunchLosses(), Overlap()
    owners = OwnerColumns(session.several)

    def look(last: bool) -> None:
        """List what is new, as far as the user asked for it, and add it up."""
        columns = launches.columns()
        view = latency.LaunchView(columns, off_cpu.activity() if off_cpu else None)
        new = launches.fresh(columns, last)
        launched = new[columns.wanted[new]]
        owners.see(view.owners(launched))
        chosen = latency.slower(view, launched, 1000 * views.slow) if views.slow else launched
        listed = view.listed(new)
        launch_report.show_each(view, listed, chosen, launched, owners, views, results)
        if trace:
            latency.write_trace(view, trace, listed)
        sums.add(view, chosen, bool(views.stacks))
        losses.add(view, new)
        overlap.add(view, new)
        if off_cpu:
            off_cpu.forget(launches.open_since(columns))
        launches.forget()

    def take() -> None:
        launches.take(session)
        if launches.full or (off_cpu and off_cpu.full):
            launches.take_shared(session)
            look(last=False)

    for _ in session.intervals(options.output.interval, options.output.count, tick=take):
        launches.take_shared(session)
        results.begin()
        look(last=session.stopped)
        launch_report.show_sums(sums, owners, views, results)
        sums = LaunchSums(by, bool(views.graphs))
        if results.out.closed:
            break
    if trace:
        trace.close()
        cli.note(TOOL, f"wrote {views.trace}")
    if off_cpu and (missing := off_cpu.activity().lost):
        cli.note(TOOL, f"unknown times off the CPU of launching threads: {missing:,}")
    if losses.others and not losses.wanted:
        cli.note(TOOL, latency_text.none_chosen(options.threads.host_filters, losses.others))
    lost = losses.fields(launches.lost, session.failed(), session.ended_unread())
    launch_report.show_summary(session, lost, overlap.records(), results)


if __name__ == "__main__":
    sys.exit(main())

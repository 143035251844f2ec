#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""memtrace   How each instruction of a GPU kernel touches memory, and what of it is wasted.

USAGE: memtrace [options] [interval [count]] [-p PID[,PID...] | -- COMMAND [ARG...]]

Each warp works out on the GPU what a load, store or atomic of its lanes comes to, and adds it to the numbers of that place in the
kernel. The program that is watched needs no change and no rebuild.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # run as tools/memtrace.py: the library is beside
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "lib"))

from gpubpf.show import cli

if TYPE_CHECKING:
    import argparse

    from gpubpf.memory.coverage import Coverage
    from gpubpf.memory.granularity import Grain
    from gpubpf.memory.traffic import KernelTraffic
    from gpubpf.program import BPF
    from gpubpf.session.session import Session
    from gpubpf.show.owner_columns import Whose

TOOL = "memtrace"
EXAMPLES = """examples:
    memtrace -- ./app                           what is wasted where, every kernel of ./app
    memtrace --kernel 'ns::*' -- ./app          these kernels only
    memtrace --launch 1 -v -- ./app             the first launch of each kernel; places that waste nothing, too
    memtrace --json -o sites.jsonl -- ./app     every place, as JSON Lines
    memtrace --footprint -- ./app               how much memory each kernel touches, and how often
    memtrace -e --site 3 --warps 64 -- ./app    each access at place 3, by one warp in 64
    memtrace --parquet app.parquet -- ./app     every access, into a file for pandas, DuckDB, ...
    memtrace --heatmap app.svg -- ./app         a picture: addresses by time
    memtrace 1 10 -- python3 train.py           print each second, ten times
"""
PROGRAM = r"""
#include <gpubpf.h>
#include <gpubpf_traffic.h>                      /* what a warp's request comes to */
#include <gpubpf_coverage.h>                     /* which bytes were touched */

GPU_SITE_ARRAY(global_cells, struct gpu_traffic);  /* constants, too */
GPU_SITE_ARRAY(local_cells, struct gpu_traffic);
GPU_SITE_ARRAY(shared_cells, struct gpu_shared_traffic);
GPU_PARAM(filter, struct gpu_filter);            /* --block and --thread */

/* A request of these lanes, as if the others had a false predicate. Copies vary in width. */
static inline int in_global(u32 lanes, struct gpu_access *ctx, int varies) {
    int site = ctx->site;
    struct gpu_request request = {ctx->address, ctx->width, lanes, varies};
    struct gpu_traffic *cell = global_cells.lookup(&site);
    return cell ? gpu_add_request(cell, &request) : 0;
}

/* The same, and which bytes it touches; and by which kernel. */
static inline int in_covered(u32 lanes, struct gpu_access *ctx, int varies, int by_kernel) {
    int site = ctx->site;
    u64 effect = ctx->effect, space = ctx->space;
    struct gpu_traffic *cell = global_cells.lookup(&site);
    struct gpu_request request = {ctx->address, ctx->width, lanes, varies};
    return !cell ? 0 : space == GPU_GLOBAL ? gpu_add_covered(cell, &request, effect, by_kernel) : gpu_add_request(cell, &request);
}

static inline int in_local(u32 lanes, struct gpu_access *ctx) {
    int site = ctx->site;
    struct gpu_traffic *cell = local_cells.lookup(&site);
    struct gpu_request request = {ctx->address, ctx->width, lanes, .local = 1};
    return cell ? gpu_add_request(cell, &request) : 0;
}

static inline int in_shared(u32 lanes, struct gpu_access *ctx) {
    int site = ctx->site;
    struct gpu_shared_traffic *cell = shared_cells.lookup(&site);
    struct gpu_request request = {ctx->address, ctx->width, lanes};
    return cell ? gpu_add_shared_request(cell, &request) : 0;
}

int on_global(struct gpu_access *ctx) { return in_global(ctx->active, ctx, 0); }
int on_copied(struct gpu_access *ctx) { return in_global(ctx->active, ctx, 1); }
int on_covered_global(struct gpu_access *ctx) { return in_covered(ctx->active, ctx, 0, 0); }
int on_covered_copied(struct gpu_access *ctx) { return in_covered(ctx->active, ctx, 1, 0); }
int on_owned_global(struct gpu_access *ctx) { return in_covered(ctx->active, ctx, 0, 1); }
int on_owned_copied(struct gpu_access *ctx) { return in_covered(ctx->active, ctx, 1, 1); }
int on_local(struct gpu_access *ctx) { return in_local(ctx->active, ctx); }
int on_shared(struct gpu_access *ctx) { return in_shared(ctx->active, ctx); }

/* With --block or --thread: the lanes that are chosen; of the others 0. */
static inline u32 chosen(void) {
    int key = 0;
    struct gpu_filter *wanted = filter.lookup(&key);
    int mine = wanted && gpu_selected(wanted);
    u32 lanes = gpu_ballot(mine);
    return mine ? lanes : 0;
}

#define CHOSEN(_in, _more...) ({ u32 lanes = chosen(); lanes ? _in(lanes, ctx, ##_more) : 0; })

int on_chosen_global(struct gpu_access *ctx) { return CHOSEN(in_global, 0); }
int on_chosen_copied(struct gpu_access *ctx) { return CHOSEN(in_global, 1); }
int on_chosen_covered_global(struct gpu_access *ctx) { return CHOSEN(in_covered, 0, 0); }
int on_chosen_covered_copied(struct gpu_access *ctx) { return CHOSEN(in_covered, 1, 0); }
int on_chosen_owned_global(struct gpu_access *ctx) { return CHOSEN(in_covered, 0, 1); }
int on_chosen_owned_copied(struct gpu_access *ctx) { return CHOSEN(in_covered, 1, 1); }
int on_chosen_local(struct gpu_access *ctx) { return CHOSEN(in_local); }
int on_chosen_shared(struct gpu_access *ctx) { return CHOSEN(in_shared); }

/* What is copied in bulk, in any of these cases. */
int on_bulk(struct gpu_access *ctx) {
    if (ctx->width > 32 && chosen())
        gpu_cover_bulk(ctx->address, ctx->width, ctx->effect);
    return 0;
}
"""


def build_parser() -> cli.Parser:
    """Options: the shared ones, and what to show of accesses."""
    parser = cli.parser(
        TOOL, "How each instruction of a GPU kernel touches memory, and what of it is wasted.", EXAMPLES
    )
    cli.add_targets(parser)
    cli.add_kernels(parser)
    cli.add_threads(parser)
    cli.add_coverage(parser)
    cli.add_accesses(parser)
    cli.add_device(parser)
    cli.add_rings(parser)
    cli.add_looks(parser)
    cli.add_output(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    with cli.errors(TOOL):
        args = cli.parse(build_parser(), argv)
        out = cli.open_results(args)
        if cli.records_accesses(args):
            from gpubpf.memory import access_trace

            return access_trace.trace(args, out)
        if args.ebpf:
            out.write(PROGRAM.lstrip())
            return 0
        from gpubpf.program import BPF
        from gpubpf.show.owner_columns import Whose

        b = BPF(text=PROGRAM)
        attach(b, args)
        if args.list or args.ptx:
            from gpubpf.images import listing

            return listing.show(b, args, out)
        grain = grain_of(b, args)
        with b.trace(args, grain.follow if grain else None) as session:
            from gpubpf.memory.traffic import (
                Traffic,  # loads NumPy, which is no part of the way to the first probe
            )

            traffic = Traffic()
            covered = coverage_of(grain, args)
            tick = (lambda: covered.take(session)) if covered else None
            whose = Whose(session.several)
            for _ in session.intervals(args.interval, args.count, tick=tick):
                report(traffic.read(session, since_last=bool(args.interval)), whose, args, out)
                if covered:
                    report_coverage(covered, session, whose, args, out)
                if out.closed:
                    break
            show_end(session, args, out)
    return session.status


def attach(b: BPF, args: argparse.Namespace) -> None:
    """The programs that add up: for each space one of its own, so that none carries what it does not need."""
    which = "chosen_" if cli.chooses_threads(args) else ""
    covers = "owned_" if args.footprint else "covered_" if args.allocations else ""
    own = ("load", "store", "atomic")
    b.attach_gpu_access(args.kernel, f"on_{which}{covers}global", kinds=own, spaces=("global", "const"))
    b.attach_gpu_access(args.kernel, f"on_{which}{covers}copied", kinds=("async",), spaces=("global",))
    if covers:
        b.attach_gpu_access(args.kernel, "on_bulk", kinds=("async",), spaces=("global",))
    b.attach_gpu_access(args.kernel, f"on_{which}local", kinds=own, spaces=("local",))
    b.attach_gpu_access(args.kernel, f"on_{which}shared", kinds=(*own, "async"), spaces=("shared",))


def grain_of(b: BPF, args: argparse.Namespace) -> Grain | None:
    """How finely touched bytes are kept, which the programs are told; None: they are not asked for."""
    if not (args.allocations or args.footprint):
        return None
    from gpubpf.memory.granularity import Grain

    made = Grain(args.granule, args.footprint)
    b["grain"].set(made.parameter)
    return made


def coverage_of(grain: Grain | None, args: argparse.Namespace) -> Coverage | None:
    """What collects which bytes are touched, where that is asked for."""
    if grain is None:
        return None
    from gpubpf.memory.coverage import Coverage

    return Coverage(grain, cli.chooses_threads(args))


def report_coverage(
    covered: Coverage, session: Session, whose: Whose, args: argparse.Namespace, out: cli.Output
) -> None:
    """Which bytes of allocations were touched so far, and how much of memory each kernel touches."""
    from gpubpf.memory import coverage_text
    from gpubpf.memory.traffic import Traffic

    if args.csv:
        return
    found = covered.report(session)
    kernels = Traffic().read(session, since_last=False) if args.footprint else []
    if args.json:
        out.records(coverage_text.records(found, kernels, args.granule, args.allocations))
        return
    if args.allocations:
        out.lines(coverage_text.allocation_lines(found, args.granule, args.verbose, whose))
    out.lines(coverage_text.footprint_lines(found, kernels, whose))


def report(kernels: list[KernelTraffic], whose: Whose, args: argparse.Namespace, out: cli.Output) -> None:
    """What was counted since the last report, in the form asked for."""
    if args.json or args.csv:
        for kernel in kernels:
            (show_json if args.json else show_csv)(kernel, args, out)
        return
    if args.timestamps:
        out.line(time.strftime("%H:%M:%S"))
    from gpubpf.memory import traffic_text

    out.lines(traffic_text.report(kernels, whose, args.verbose))


# --- for programs ---


def show_json(kernel: KernelTraffic, args: argparse.Namespace, out: cli.Output) -> None:
    """A record for each place, then one for the kernel."""
    from gpubpf.memory import traffic_text

    place = kernel.place()
    out.records(
        {"type": "site", **place, **site.record(kernel.share([site])), "advice": traffic_text.advice([site])}
        for site in kernel.sites
    )
    stamp = {"ts_ns": time.clock_gettime_ns(time.CLOCK_MONOTONIC)} if args.timestamps else {}
    out.record(**({"type": "kernel", **place} | kernel.record() | stamp))


def show_csv(kernel: KernelTraffic, args: argparse.Namespace, out: cli.Output) -> None:
    """A line for each place."""
    now = (time.clock_gettime_ns(time.CLOCK_MONOTONIC),) if args.timestamps else ()
    for site in kernel.sites:
        record = kernel.place() | site.record(kernel.share([site]))
        del record["patterns"]
        banks = record.pop("bank_ways") or {"mean": "", "max": ""}
        record |= {"bank_ways_mean": banks["mean"], "bank_ways_max": banks["max"]}
        if not out.began:
            out.write(",".join([*(["ts_ns"] if now else []), *record]) + "\n")
        cells = ("" if value is None else value for value in record.values())
        out.write(cli.csv_cells((*now, *cells)) + "\n")


def show_end(session: Session, args: argparse.Namespace, out: cli.Output) -> None:
    """How much of what ran was seen, and why not all."""
    summary = session.summary()
    if args.json:
        out.record(**({"type": "summary", "tool": TOOL} | summary))
    elif not args.csv:
        out.lines(cli.coverage(summary))


if __name__ == "__main__":
    sys.exit(main())

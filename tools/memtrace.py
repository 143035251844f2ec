#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""memtrace   How each instruction of a GPU kernel touches memory, and what of it is wasted.

USAGE: memtrace [options] [interval [count]] -- COMMAND [ARG...]

Each warp works out on the GPU what a load, store or atomic of its lanes comes to, and adds it to the numbers of that place in the
kernel. The program that is watched needs no change and no rebuild.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # run as tools/memtrace.py: the library is beside
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "lib"))

from gpubpf import cli

if TYPE_CHECKING:
    from gpubpf.program import BPF
    from gpubpf.session import Session
    from gpubpf.traffic import KernelTraffic

TOOL = "memtrace"
EXAMPLES = """examples:
    memtrace -- ./app                           what is wasted where, every kernel of ./app
    memtrace --kernel 'ns::*' -- ./app          these kernels only
    memtrace --launch 1 -v -- ./app             the first launch of each kernel; places that waste nothing, too
    memtrace --json -o sites.jsonl -- ./app     every place, as JSON Lines
    memtrace -e --site 3 --warps 64 -- ./app    each access at place 3, by one warp in 64
    memtrace --parquet app.parquet -- ./app     every access, into a file for pandas, DuckDB, ...
    memtrace --heatmap app.svg -- ./app         a picture: addresses by time
    memtrace 1 10 -- python3 train.py           print each second, ten times
"""
MOST_ROWS = 24  # of a kernel, without -v
PROGRAM = r"""
#include <gpubpf.h>

#define FULL 0xffffffffu
#define COUNT(_place, _more) __sync_fetch_and_add(&(_place), _more)

/* What the requests of a site come to; a request is one execution by a warp. What follows from their number and the width is not
   added up here, see traffic.py. */
enum pattern { UNIT, SHIFTED, BROADCAST, STRIDED, GATHER, SINGLE };  /* SHIFTED: unit, from within a sector on */
struct cell {
    u64 whole[6];                   /* requests by all 32 lanes, and by one alone */
    u64 part[6];                    /* by other numbers of lanes; where the width varies; in local memory at several offsets */
    u64 accesses, least;            /* of part: lanes, fewest sectors */
    u64 sectors;                    /* of part, and of whole STRIDED and GATHER */
    u64 bytes;                      /* where the width varies */
    u64 steps, squares;             /* of STRIDED: sum of the bytes from lane to lane, and of their squares */
    u64 contention_max;             /* most lanes on one address, of part and GATHER */
};
struct banked {                     /* of shared memory */
    struct cell cell;
    u64 phases, ways;               /* of part; of part, and of whole STRIDED and GATHER */
    u64 ways_max;
};
GPU_SITE_ARRAY(global_cells, struct cell);       /* constants, too */
GPU_SITE_ARRAY(local_cells, struct cell);
GPU_SITE_ARRAY(shared_cells, struct banked);
GPU_PARAM(filter, struct gpu_filter);            /* --block and --thread */

static inline u32 ones(u32 bits) { return __builtin_popcount(bits); }

static inline u64 length(s64 step) { return step < 0 ? -step : step; }

static inline void raise(u64 *most, u64 value) {
    if (value > *most)
        gpu_max(most, value);
}

static inline void add_step(struct cell *cell, s64 step) {
    COUNT(cell->steps, step);
    COUNT(cell->squares, step * step);
}

/* All 32 lanes at first + lane * step. */
static inline int add_whole(struct cell *cell, struct banked *banked, u64 address, u64 width, s64 step) {
    if (step == width)
        COUNT(cell->whole[address & 31 ? SHIFTED : UNIT], 1);
    else if (!step)
        COUNT(cell->whole[BROADCAST], 1);
    else {
        u64 size = length(step), low = step < 0 ? address - 31 * size : address;
        COUNT(cell->whole[STRIDED], 1);
        COUNT(cell->sectors, size > 32 ? 32 : ((low + 31 * size + width - 1) >> 5) - (low >> 5) + 1);
        add_step(cell, step);
        if (banked) {                            /* the step's lowest bit says how many lanes meet in a bank */
            u64 bit = size & -size, ways = bit < 128 ? bit : 128;
            COUNT(banked->ways, ways >> 2);
            raise(&banked->ways_max, ways >> gpu_log2(width | 4));
        }
    }
    return 0;
}

/* Adds the most words in one bank, for each phase. In a phase lanes take 128 bytes together, in words of 1 << shift. */
static inline void add_ways(struct banked *banked, u64 address, u32 shift, u32 active, u32 before) {
    u32 lane = gpu_lane() & 31, together = 128 >> (shift & 7), phase = lane << shift >> 7;
    u32 phase_lanes = (u32)((1ull << together) - 1) << (phase * together & 31);
    u64 word = address >> shift;
    u32 words = gpu_ballot(!(gpu_match(word << 3 | phase) & before));  /* a lane for each */
    u64 ways = ones(gpu_match((word & (together - 1)) << 3 | phase) & words), most = 0;

    for (u32 least = 1; least <= 32; least++) {
        u64 such = gpu_ballot(ways >= least);
        if (!such)
            break;
        most += (0 - (such & phase_lanes)) >> 63;
    }
    raise(&banked->ways_max, ways);
    if (!(before & phase_lanes)) {
        COUNT(banked->ways, most);
        if (active != FULL)
            COUNT(banked->phases, 1);
    }
}

/* A copy of many bytes by each lane. */
static inline int add_bulk(struct cell *cell, struct banked *banked, u64 address, u64 width) {
    u32 active = gpu_active(), lanes = ones(active);
    COUNT(cell->sectors, ((address + width - 1) >> 5) - (address >> 5) + 1);
    COUNT(cell->least, (width + 31) >> 5);
    COUNT(cell->bytes, width);
    COUNT(cell->accesses, 1);
    if (banked) {
        COUNT(banked->phases, 1);
        COUNT(banked->ways, 1);
    }
    if (!(active & ((1u << (gpu_lane() & 31)) - 1)))
        COUNT(cell->part[lanes == 1 ? SINGLE : GATHER], 1);
    return 0;
}

static inline int request(u64 address, u64 width, u32 active, struct cell *cell, struct banked *banked, int local, int varies) {
    u32 lane = gpu_lane() & 31, before = active & ((1u << lane) - 1), lanes = 32, apart = 1, lowest = 0;
    int linear;
    s64 away, step;

    if (width > 32)
        return add_bulk(cell, banked, address, width);
    if (active == FULL) {
        away = address - gpu_shuffle(address, 0);
        step = (s32)gpu_shuffle(away, 1);
        linear = gpu_ballot(away == step * lane) == FULL;
        if (linear && !varies && !(local && step) && !(banked && width < 4 && step & 3 && step != width))
            return lane ? 0 : add_whole(cell, banked, address, width, step);
    } else {
        lanes = ones(active);
        if (lanes == 1 && !varies) {
            COUNT(cell->whole[SINGLE], 1);
            return 0;
        }
        u32 others = active & (active - 1);
        lowest = gpu_log2(active & -active);     /* apart: from there to the next lane */
        apart = gpu_log2(others & -others) - lowest;
        away = address - gpu_shuffle(address, lowest);
        step = gpu_shuffle(away, lowest + apart);
        linear = gpu_ballot(away * apart == step * (lane - lowest)) == active && step == (s32)step;
        u32 size = length(step), one = size / apart;
        linear = linear && one * apart == size && !(one & (width - 1));
        step = step < 0 ? -(s64)one : one;
    }
    u32 pattern = lanes == 1 ? SINGLE : !linear ? GATHER : step == width ? UNIT : step ? STRIDED : BROADCAST;
    u64 *requests = varies || local || active != FULL ? cell->part : cell->whole;
    u32 same = pattern == GATHER ? ones(gpu_match(address)) : pattern == BROADCAST ? lanes : 1;
    u32 shift = gpu_log2(width | 4), asked = lanes * width;
    u64 sector = local ? address >> shift << 2 | lane >> 3 : address >> 5;
    u32 sectors = ones(gpu_ballot(!(gpu_match(sector) & before)));

    if (varies)
        for (int bit = asked = 0; bit < 5; bit++)
            asked += ones(gpu_ballot(width >> bit & 1)) << bit;
    raise(&cell->contention_max, same);
    if (banked)
        add_ways(banked, address, shift, active, before);
    if (before)
        return 0;                                /* the lowest lane speaks for all */
    asm("" : "+r"(pattern));                     /* or the compiler drops the mask, which the verifier needs */
    COUNT(requests[pattern & 7], 1);
    COUNT(cell->sectors, local ? sectors << (shift - 2) : sectors);
    if (pattern == STRIDED)
        add_step(cell, step);
    if (requests == cell->part) {
        COUNT(cell->accesses, lanes);
        COUNT(cell->least, (asked + 31) >> 5);
    }
    if (varies)
        COUNT(cell->bytes, asked);
    return 0;
}

static inline int in_global(u64 number, u64 address, u64 width, u32 active, int varies) {
    int site = number;
    struct cell *cell = global_cells.lookup(&site);
    return cell ? request(address, width, active, cell, 0, 0, varies) : 0;
}

static inline int in_local(u64 number, u64 address, u64 width, u32 active) {
    int site = number;
    struct cell *cell = local_cells.lookup(&site);
    return cell ? request(address, width, active, cell, 0, 1, 0) : 0;
}

static inline int in_shared(u64 number, u64 address, u64 width, u32 active) {
    int site = number;
    struct banked *banked = shared_cells.lookup(&site);
    return banked ? request(address, width, active, &banked->cell, banked, 0, 0) : 0;
}

int on_global(struct gpu_access *ctx) { return in_global(ctx->site, ctx->address, ctx->width, ctx->active, 0); }
int on_copied(struct gpu_access *ctx) { return in_global(ctx->site, ctx->address, ctx->width, ctx->active, 1); }
int on_local(struct gpu_access *ctx) { return in_local(ctx->site, ctx->address, ctx->width, ctx->active); }
int on_shared(struct gpu_access *ctx) { return in_shared(ctx->site, ctx->address, ctx->width, ctx->active); }

/* With --block or --thread: the others are as if they had a false predicate. */
static inline u32 chosen(void) {
    int key = 0;
    struct gpu_filter *wanted = filter.lookup(&key);
    int mine = wanted && gpu_selected(wanted);
    u32 lanes = gpu_ballot(mine);
    return mine ? lanes : 0;
}

int on_chosen_global(struct gpu_access *ctx) {
    u32 lanes = chosen();
    return lanes ? in_global(ctx->site, ctx->address, ctx->width, lanes, 0) : 0;
}

int on_chosen_copied(struct gpu_access *ctx) {
    u32 lanes = chosen();
    return lanes ? in_global(ctx->site, ctx->address, ctx->width, lanes, 1) : 0;
}

int on_chosen_local(struct gpu_access *ctx) {
    u32 lanes = chosen();
    return lanes ? in_local(ctx->site, ctx->address, ctx->width, lanes) : 0;
}

int on_chosen_shared(struct gpu_access *ctx) {
    u32 lanes = chosen();
    return lanes ? in_shared(ctx->site, ctx->address, ctx->width, lanes) : 0;
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
    cli.add_accesses(parser)
    cli.add_device(parser)
    cli.add_rings(parser)
    cli.add_looks(parser)
    cli.add_output(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = cli.parse(build_parser(), argv)
    with cli.errors(TOOL):
        out = cli.open_results(args)
        if args.each or args.parquet or args.heatmap:
            from gpubpf import accesstrace

            return accesstrace.trace(args, out)
        if args.ebpf:
            out.write(PROGRAM.lstrip())
            return 0
        from gpubpf.program import BPF
        from gpubpf.traffic import Traffic

        b = BPF(text=PROGRAM)
        attach(b, args)
        if args.list or args.ptx:
            from gpubpf import listing

            return listing.show(b, args, out)
        traffic = Traffic()
        with b.trace(args) as session:
            for _ in session.intervals(args.interval, args.count):
                report(traffic.read(session, anew=bool(args.interval)), args, out)
                if out.closed:
                    break
            show_end(session, args, out)
    return session.status


def attach(b: BPF, args: argparse.Namespace) -> None:
    """The programs that add up: for each space one of its own, so that none carries what it does not need."""
    which = "chosen_" if cli.chooses_threads(args) else ""
    own = ("load", "store", "atomic")
    b.attach_gpu_access(args.kernel, f"on_{which}global", kinds=own, spaces=("global", "const"))
    b.attach_gpu_access(args.kernel, f"on_{which}copied", kinds=("async",), spaces=("global",))
    b.attach_gpu_access(args.kernel, f"on_{which}local", kinds=own, spaces=("local",))
    b.attach_gpu_access(args.kernel, f"on_{which}shared", kinds=(*own, "async"), spaces=("shared",))


def report(kernels: list[KernelTraffic], args: argparse.Namespace, out: cli.Output) -> None:
    """What was counted since the last report, in the form asked for."""
    if args.json or args.csv:
        for kernel in kernels:
            (show_json if args.json else show_csv)(kernel, args, out)
        return
    if args.timestamps:
        out.line(time.strftime("%H:%M:%S"))
    from gpubpf import names

    labels = names.labels(kernel.mangled for kernel in kernels)
    for kernel in kernels:
        show_text(kernel, kernel.demangled if args.verbose else labels[kernel.mangled], args.verbose, out)


# --- for people ---


def show_text(kernel: KernelTraffic, title: str, verbose: bool, out: cli.Output) -> None:
    """What is wasted; a row for each place, the worst first; what can be done about it."""
    from gpubpf import table, traffic

    rows = traffic.folded(kernel.sites)
    shown = rows if verbose else rows[:MOST_ROWS]
    out.line(f"{title if verbose else table.fit(title, 46)}: how it touches memory")
    for sentence in (f"{kernel.comm} (pid {kernel.pid})", *traffic.findings(kernel, rows)):
        out.lines(table.wrap(sentence, indent=2))
    out.line()
    header = ["WHERE", "OP", "REQUESTS", "BYTES", "RATIO", "PATTERN", "LANES", "BANKS", "SHARE"]
    cells = [traffic.cells(kernel, row) for row in shown]
    out.lines(table.lines(header, cells, left=("WHERE", "OP", "PATTERN")))
    if len(rows) > len(shown):
        out.line(f"and {table.count(len(rows) - len(shown), 'place')} more; -v shows them")
    said = [text for row in shown if (text := traffic.advice(row.sites))]
    out.line()
    for text in said:
        out.lines(table.wrap(text))
    if said:
        out.line()


# --- for programs ---


def show_json(kernel: KernelTraffic, args: argparse.Namespace, out: cli.Output) -> None:
    """A record for each place, then one for the kernel."""
    place = kernel.place()
    out.records({"type": "site", **place, **site.record(kernel.share([site]))} for site in kernel.sites)
    stamp = {"ts_ns": time.clock_gettime_ns(time.CLOCK_MONOTONIC)} if args.timestamps else {}
    out.record(**({"type": "kernel", **place} | kernel.record() | stamp))


def show_csv(kernel: KernelTraffic, args: argparse.Namespace, out: cli.Output) -> None:
    """A line for each place."""
    now = (time.clock_gettime_ns(time.CLOCK_MONOTONIC),) if args.timestamps else ()
    for site in kernel.sites:
        record = kernel.place() | site.record(kernel.share([site]))
        banks = record.pop("bank_ways") or {"mean": "", "max": ""}
        record |= {"bank_ways_mean": banks["mean"], "bank_ways_max": banks["max"]}
        if not out.began:
            out.write(",".join([*(["ts_ns"] if now else []), *record]) + "\n")
        cells = ("" if value is None else value for value in record.values())
        out.write(cli.csv_cells((*now, *cells)) + "\n")


def show_end(session: Session, args: argparse.Namespace, out: cli.Output) -> None:
    """How much of what ran was seen, and why not all."""
    from gpubpf import table

    summary = session.summary()
    if args.json:
        out.record(**({"type": "summary", "tool": TOOL} | summary))
    elif not args.csv:
        out.lines(cli.coverage(summary))
        if unseen := summary.get("not_probed"):
            places = ", ".join(f"{opcode} ({number:,})" for opcode, number in unseen.items())
            out.lines(table.wrap(f"not probed, since no address says what they touch: {places}"))


if __name__ == "__main__":
    sys.exit(main())

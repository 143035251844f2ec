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
    from gpubpf.coverage import Coverage
    from gpubpf.program import BPF
    from gpubpf.session import Session
    from gpubpf.traffic import KernelTraffic

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

#define FULL 0xffffffffu
#define PAGES 16384                              /* of the table of touched bytes, each of 4096 granules */
#define PROBES 32                                /* places at which a page may be */
#define COPY_PAGES 5                             /* that one bulk copy is followed into */
#define BEGUN 256
#define COUNT(_place, _more) __sync_fetch_and_add(&(_place), _more)

/* What the requests of a site come to; a request is one execution by a warp. What follows from their number and the width is not
   added up here, see traffic.py. */
enum pattern { UNIT, SHIFTED, BROADCAST, STRIDED, GATHER, SINGLE, PART };  /* SHIFTED: unit, from within a sector on */
struct cell {
    u64 requests[2 * PART];         /* by all 32 lanes, and by one alone; from PART on by other numbers of lanes, where the
                                       width varies, and in local memory at several offsets */
    u64 accesses, least;            /* from PART on: lanes, fewest sectors */
    u64 sectors;                    /* from PART on, and of STRIDED and GATHER */
    u64 bytes;                      /* where the width varies */
    u64 steps, squares;             /* of STRIDED: sum of the bytes from lane to lane, and of their squares */
    u64 contention_max;             /* most lanes on one address, from PART on and of GATHER */
};
struct banked {                     /* of shared memory */
    struct cell cell;
    u64 phases, ways;               /* from PART on; from PART on, and of STRIDED and GATHER */
    u64 ways_max;
};
GPU_SITE_ARRAY(global_cells, struct cell);       /* constants, too */
GPU_SITE_ARRAY(local_cells, struct cell);
GPU_SITE_ARRAY(shared_cells, struct banked);
GPU_PARAM(filter, struct gpu_filter);            /* --block and --thread */

/* Which bytes were touched, see coverage.py. */
struct page { u64 words[128]; };                 /* a bit for each granule: 64 words of what was read, 64 of what was written */
struct grain {
    u64 shift, word, page;          /* bytes of a granule, as a shift; of a word of 64, less 1; of a page, as a shift */
    u64 kernels;                    /* ~0 with --footprint: keep kernels apart; else 0 */
};
GPU_ARRAY(pages, u64, PAGES);                    /* what is where: page << 32 | 1 << 31 | epoch << 9 | page >> 32; 0: nothing */
GPU_ARRAY(owners, u32, PAGES);                   /* --footprint: the kernel's number + 1 */
GPU_ARRAY(touched, struct page, PAGES);
GPU_ARRAY(missed, u64, 1024);                    /* a bit for each 2 MB, modulo 128 GB: something of it found no room */
GPU_PARAM(grain, struct grain);

static inline u64 length(s64 step) { return step < 0 ? -step : step; }

static inline void raise(u64 *most, u64 value) {
    if (value > *most)
        gpu_max(most, value);
}

static inline void add_step(struct cell *cell, s64 step) {
    COUNT(cell->steps, step);
    COUNT(cell->squares, step * step);
}

/* Adds the most words in one bank, for each phase. In a phase lanes take 128 bytes together, in words of 1 << shift. */
static inline void add_ways(struct banked *banked, u64 address, u32 shift, u32 active, u32 before) {
    u32 lane = gpu_lane() & 31, together = 128 >> (shift & 7), phase = lane << shift >> 7;
    u32 phase_lanes = (u32)((1ull << together) - 1) << (phase * together & 31);
    u64 word = address >> shift;
    u32 words = gpu_ballot(!(gpu_match(word << 3 | phase) & before));  /* a lane for each */
    u64 ways = gpu_popcount(gpu_match((word & (together - 1)) << 3 | phase) & words), most = 0;

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

/* As add_ways, of 32 lanes: the lowest bit of their step says how many meet in a bank. */
static inline void add_strided(struct banked *banked, u32 step, u32 shift, u32 before) {
    u32 bit = step & -step, ways = bit < 128 ? bit : 128;
    raise(&banked->ways_max, ways >> (shift & 7));
    if (!before)
        COUNT(banked->ways, ways >> 2);
}

/* A copy of many bytes by each lane. */
static inline int add_bulk(struct cell *cell, struct banked *banked, u64 address, u64 width) {
    u32 active = gpu_active(), lanes = gpu_popcount(active);
    COUNT(cell->sectors, ((address + width - 1) >> 5) - (address >> 5) + 1);
    COUNT(cell->least, (width + 31) >> 5);
    COUNT(cell->bytes, width);
    COUNT(cell->accesses, 1);
    if (banked) {
        COUNT(banked->phases, 1);
        COUNT(banked->ways, 1);
    }
    if (!(active & ((1u << (gpu_lane() & 31)) - 1)))
        COUNT(cell->requests[PART + (lanes == 1 ? SINGLE : GATHER)], 1);
    return 0;
}

/* `run`: how many lanes from this one on have accesses side by side, 0 if another has the same; and BEGUN, if there is one before. */
static inline int request(u64 address, u64 width, u32 active, struct cell *cell, struct banked *banked, int local, int varies,
                          u32 *run) {
    u32 lane = gpu_lane() & 31, before = active & ((1u << lane) - 1), lanes = gpu_popcount(active);

    if (width > 32)
        return add_bulk(cell, banked, address, width);
    if (active == FULL) {
        u64 start = address - lane * width, first = gpu_shuffle(start, 0);
        if (gpu_ballot(start == first) == FULL && !varies && !local) {
            if (run)
                *run = 32 - lane + (lane ? BEGUN : 0);
            if (gpu_first(FULL))                 /* `first` would do, but ptxas would see that all lanes go to one place */
                COUNT(cell->requests[address & 31 ? SHIFTED : UNIT], 1);
            return 0;
        }
        if (run && varies && gpu_ballot(start == first && width == gpu_shuffle(width, 0)) == FULL)
            *run = 32 - lane + (lane ? BEGUN : 0);
    } else if (lanes == 1 && !varies) {
        COUNT(cell->requests[SINGLE], 1);
        return 0;
    }
    u32 others = active & (active - 1), lowest = gpu_log2(active & -active);
    u32 apart = gpu_log2(others & -others) - lowest;         /* from the lowest lane to the next */
    s64 away = address - gpu_shuffle(address, lowest), step = gpu_shuffle(away, lowest + apart);
    u32 size = length(step), one = size / apart;             /* from any lane to the next */
    int linear = gpu_ballot(away * apart == step * (lane - lowest)) == active && step == (s32)step && one * apart == size &&
                 !(one & (width - 1));
    step = step < 0 ? -(s64)one : one;
    if (run && linear && !varies && !step)
        *run = !before;
    if (run && linear && !varies && step == width && !(active & (active + (active & -active))))
        *run = lanes - gpu_popcount(before) + (before ? BEGUN : 0);
    if (active == FULL && linear && !step && !varies) {
        if (gpu_first(FULL))
            COUNT(cell->requests[BROADCAST], 1);
        return 0;
    }
    u32 pattern = lanes == 1 ? SINGLE : !linear ? GATHER : step == width ? UNIT : step ? STRIDED : BROADCAST;
    u32 shift = gpu_log2(width | 4), asked = lanes * width;
    u64 sector = local ? address >> shift << 2 | lane >> 3 : address >> 5;
    u32 sectors = gpu_popcount(gpu_ballot(!(gpu_match(sector) & before)));

    if (varies)
        for (int bit = asked = 0; bit < 5; bit++)
            asked += gpu_popcount(gpu_ballot(width >> bit & 1)) << bit;
    if (pattern == GATHER || pattern == BROADCAST)
        raise(&cell->contention_max, pattern == GATHER ? gpu_popcount(gpu_match(address)) : lanes);
    if (banked && active == FULL && pattern == STRIDED && !(step & 3))
        add_strided(banked, one, shift, before);
    else if (banked)
        add_ways(banked, address, shift, active, before);
    if (!gpu_first(active))
        return 0;                                /* the lowest lane speaks for all */
    u32 place = varies || local || active != FULL ? PART + pattern : pattern;
    asm("" : "+r"(place));                       /* or the compiler drops the mask, which the verifier needs */
    COUNT(cell->requests[place & 15], 1);
    COUNT(cell->sectors, local ? sectors << (shift - 2) : sectors);
    if (pattern == STRIDED)
        add_step(cell, step);
    if (varies || local || active != FULL) {
        COUNT(cell->accesses, lanes);
        COUNT(cell->least, (asked + 31) >> 5);
    }
    if (varies)
        COUNT(cell->bytes, asked);
    return 0;
}

static inline u64 *area_of(u64 address) {
    int at = (u32)(address >> 27) & 1023;
    return missed.lookup(&at);
}

static inline void miss(u64 address) {
    u64 *area = area_of(address), bit = 1ull << (address >> 21 & 63);
    if (area && !(*area & bit))
        __sync_fetch_and_or(area, bit);
}

/* The place of an address's page, PAGES where there is no room. What is there stays: a stale copy of it is right, or 0. */
static inline u32 place_of(struct grain *grain, u64 address, int by_kernel, u32 probes) {
    u64 page = address >> grain->page, epoch = (gpu_epoch() << 9 & 0x7ffffe00) | 0x80000000;
    u64 wanted = page << 32 | epoch | (page >> 32 & 511);
    u32 kernel = by_kernel ? (gpu_kernel() + 1) & grain->kernels : 0;
    u32 place = ((u32)page * 0x9e3779b1u + (u32)epoch * 0x85ebca77u + kernel * 0xc2b2ae3du) >> 18;
#pragma nounroll
    for (u32 turn = 0; turn < probes; turn++) {
        u64 *cell = pages.lookup(&place);
        u32 *owner = by_kernel ? owners.lookup(&place) : 0;
        if (!cell || (by_kernel && !owner))
            break;
        u64 seen = *cell;
        if (seen == wanted && (!by_kernel || *owner == kernel))
            return place;
        if (!seen) {
            seen = __sync_val_compare_and_swap(cell, 0, wanted);
            if (!seen && by_kernel)
                *owner = kernel;
            if (!seen || (seen == wanted && (!by_kernel || *owner == kernel)))
                return place;
        }
        if (!turn) {                             /* where something is missed already, do not search in vain */
            u64 *area = area_of(address);
            if (!area || *area >> (address >> 21 & 63) & 1)
                break;
        }
        place = (place + 1) & (PAGES - 1);
    }
    return PAGES;
}

static inline void set_bits(u64 *word, u64 mask) {
    if ((*word & mask) != mask)                  /* most were touched before */
        __sync_fetch_and_or(word, mask);
}

/* A copy of many bytes: page by page, word by word. */
static inline void cover_bulk(struct grain *grain, u64 address, u64 bytes, u64 effect) {
    u32 side = effect & GPU_READS ? 0 : 64;
    u64 next = address >> grain->shift, end = (address + bytes - 1) >> grain->shift;
#pragma nounroll
    for (u32 turn = 0; turn < COPY_PAGES && next <= end; turn++) {
        u64 page = next & ~4095ull, last = page + 4095 < end ? page + 4095 : end;
        u32 place = place_of(grain, page << grain->shift, 1, 8);
        struct page *own = place < PAGES ? touched.lookup(&place) : 0;
        u32 word = next >> 6 & 63, until = last >> 6 & 63;
        u64 mask = ~0ull << (next & 63);
        if (!own)
            miss(page << grain->shift);
#pragma nounroll
        for (u32 turn = 0; turn < 64 && own; turn++) {
            if (word == until)
                mask &= ~0ull >> (63 - (last & 63));
            __sync_fetch_and_or(&own->words[(word + side) & 127], mask);
            if (effect == (GPU_READS | GPU_WRITES))
                __sync_fetch_and_or(&own->words[(word + 64) & 127], mask);
            if (word == until)
                break;
            mask = ~0ull;
            word++;
        }
        next = page + 4096;
    }
    if (next <= end) {
        miss(next << grain->shift);
        miss(end << grain->shift);
    }
}

/* One lane for each word of 64 granules marks what lanes in a row touch; where they are in none, each its own. */
static inline void cover(u64 address, u32 width, u64 effect, u32 run, int by_kernel) {
    int key = 0;
    struct grain *fine = grain.lookup(&key);
    if (!fine || !run || !width || (run & BEGUN && address & fine->word))
        return;
    u32 start = address & fine->word, first = start >> fine->shift;
    u32 last = (start + width * (run & 63) - 1) >> fine->shift, word = address >> (fine->page - 6);
    u64 mask = (2ull << (last < 63 ? last : 63)) - (1ull << first);
    u32 place = place_of(fine, address, by_kernel, PROBES);
    struct page *own = place < PAGES ? touched.lookup(&place) : 0;
    if (!own)
        return miss(address);
    asm("" : "+r"(word));                        /* as above */
    if (effect & GPU_READS)
        set_bits(&own->words[word & 63], mask);
    if (effect & GPU_WRITES)
        set_bits(&own->words[(word & 63) + 64], mask);
}

static inline int in_global(u64 number, u64 address, u64 width, u32 active, int varies, u32 *run) {
    int site = number;
    struct cell *cell = global_cells.lookup(&site);
    return cell ? request(address, width, active, cell, 0, 0, varies, run) : 0;
}

static inline int in_covered(u64 site, u64 address, u64 width, u32 active, u64 effect, u64 space, int varies, int by_kernel) {
    u32 run = 1;
    in_global(site, address, width, active, varies, &run);
    if (space == GPU_GLOBAL && width <= 32)       /* what is larger is for on_bulk */
        cover(address, width, effect, run, by_kernel);
    return 0;
}

static inline int in_local(u64 number, u64 address, u64 width, u32 active) {
    int site = number;
    struct cell *cell = local_cells.lookup(&site);
    return cell ? request(address, width, active, cell, 0, 1, 0, 0) : 0;
}

static inline int in_shared(u64 number, u64 address, u64 width, u32 active) {
    int site = number;
    struct banked *banked = shared_cells.lookup(&site);
    return banked ? request(address, width, active, &banked->cell, banked, 0, 0, 0) : 0;
}

int on_global(struct gpu_access *ctx) {
    return in_global(ctx->site, ctx->address, ctx->width, ctx->active, 0, 0);
}

int on_copied(struct gpu_access *ctx) {
    return in_global(ctx->site, ctx->address, ctx->width, ctx->active, 1, 0);
}

/* The same, and which bytes are touched. */
int on_covered_global(struct gpu_access *ctx) {
    return in_covered(ctx->site, ctx->address, ctx->width, ctx->active, ctx->effect, ctx->space, 0, 0);
}

int on_covered_copied(struct gpu_access *ctx) {
    return in_covered(ctx->site, ctx->address, ctx->width, ctx->active, ctx->effect, ctx->space, 1, 0);
}

/* The same, and by which kernel. */
int on_owned_global(struct gpu_access *ctx) {
    return in_covered(ctx->site, ctx->address, ctx->width, ctx->active, ctx->effect, ctx->space, 0, 1);
}

int on_owned_copied(struct gpu_access *ctx) {
    return in_covered(ctx->site, ctx->address, ctx->width, ctx->active, ctx->effect, ctx->space, 1, 1);
}

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
    return lanes ? in_global(ctx->site, ctx->address, ctx->width, lanes, 0, 0) : 0;
}

int on_chosen_copied(struct gpu_access *ctx) {
    u32 lanes = chosen();
    return lanes ? in_global(ctx->site, ctx->address, ctx->width, lanes, 1, 0) : 0;
}

int on_chosen_covered_global(struct gpu_access *ctx) {
    u32 lanes = chosen();
    return lanes ? in_covered(ctx->site, ctx->address, ctx->width, lanes, ctx->effect, ctx->space, 0, 0) : 0;
}

int on_chosen_covered_copied(struct gpu_access *ctx) {
    u32 lanes = chosen();
    return lanes ? in_covered(ctx->site, ctx->address, ctx->width, lanes, ctx->effect, ctx->space, 1, 0) : 0;
}

/* What is copied in bulk, in any of these cases. */
int on_bulk(struct gpu_access *ctx) {
    int key = 0;
    struct grain *fine = grain.lookup(&key);
    if (fine && ctx->width > 32 && chosen())
        cover_bulk(fine, ctx->address, ctx->width, ctx->effect);
    return 0;
}

int on_chosen_owned_global(struct gpu_access *ctx) {
    u32 lanes = chosen();
    return lanes ? in_covered(ctx->site, ctx->address, ctx->width, lanes, ctx->effect, ctx->space, 0, 1) : 0;
}

int on_chosen_owned_copied(struct gpu_access *ctx) {
    u32 lanes = chosen();
    return lanes ? in_covered(ctx->site, ctx->address, ctx->width, lanes, ctx->effect, ctx->space, 1, 1) : 0;
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
    cli.add_coverage(parser)
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
        if cli.records_accesses(args):
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
        covered = coverage_of(b, args)
        with b.trace(args, covered.follow if covered else None) as session:
            tick = (lambda: covered.take(session)) if covered else None
            for _ in session.intervals(args.interval, args.count, tick=tick):
                report(traffic.read(session, anew=bool(args.interval)), args, out)
                if covered:
                    report_coverage(covered, session, args, out)
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


def coverage_of(b: BPF, args: argparse.Namespace) -> Coverage | None:
    """What collects which bytes are touched, where that is asked for."""
    if not (args.allocations or args.footprint):
        return None
    from gpubpf.coverage import Coverage

    made = Coverage(args.granule, args.footprint, cli.chooses_threads(args))
    b["grain"].set(made.parameter)
    return made


def report_coverage(covered: Coverage, session: Session, args: argparse.Namespace, out: cli.Output) -> None:
    """Which bytes of allocations were touched so far, and how much of memory each kernel touches."""
    from gpubpf import coverage_text
    from gpubpf.traffic import Traffic

    if args.csv:
        return
    found = covered.report(session)
    kernels = Traffic().read(session, anew=False) if args.footprint else []
    if args.json:
        out.records(coverage_text.records(found, kernels, args.granule, args.allocations))
        return
    if args.allocations:
        out.lines(coverage_text.allocation_lines(found, args.granule, args.verbose))
    out.lines(coverage_text.footprint_lines(found, kernels))


def report(kernels: list[KernelTraffic], args: argparse.Namespace, out: cli.Output) -> None:
    """What was counted since the last report, in the form asked for."""
    if args.json or args.csv:
        for kernel in kernels:
            (show_json if args.json else show_csv)(kernel, args, out)
        return
    if args.timestamps:
        out.line(time.strftime("%H:%M:%S"))
    from gpubpf import names, traffic_text

    labels = names.labels(kernel.mangled for kernel in kernels)
    for kernel in kernels:
        title = kernel.demangled if args.verbose else labels[kernel.mangled]
        out.lines(traffic_text.lines(kernel, title, args.verbose))


# --- for programs ---


def show_json(kernel: KernelTraffic, args: argparse.Namespace, out: cli.Output) -> None:
    """A record for each place, then one for the kernel."""
    from gpubpf import traffic_text

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

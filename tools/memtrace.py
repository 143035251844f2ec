#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""memtrace   How each instruction of a GPU kernel accesses memory, and how much of the traffic is wasted.

USAGE: memtrace [options] [interval [count]] [-p PID[,PID...] | -- COMMAND [ARG...]]

For each load, store or atomic, each warp works out on the GPU what its lanes access, and adds that to the counts of the instruction.
The traced program needs no change and no rebuild.
"""

from __future__ import annotations

import functools
import os.path
import sys

if __package__ in (None, ""):  # run as tools/memtrace.py: the library is in ../lib
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "lib"))

from gpubpf.show import cli  # early: Ctrl-C is answered quietly from here on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpubpf.memory.memory_options import MemoryOptions
    from gpubpf.program import BPF

TOOL = "memtrace"
EXAMPLES = """examples:
    memtrace -- ./app                          wasted traffic, by instruction
    memtrace --kernel 'ns::*' -- ./app         these kernels only
    memtrace --launch 1 -v -- ./app            the first launch, with all rows
    memtrace --json -o sites.jsonl -- ./app    every instruction, as JSON Lines
    memtrace --footprint -- ./app              how much memory kernels touch
    memtrace --sample-blocks 1/16 -- ./app     less overhead: an estimate
    memtrace --sass -- python3 infer.py        also kernels without PTX
    memtrace -e --site 3 --warps 64 -- ./app   one place, by one warp in 64
    memtrace --parquet app.parquet -- ./app    every access, for pandas, DuckDB
    memtrace --heatmap app.svg -- ./app        a picture: addresses by time
    memtrace 1 10 -- python3 train.py          print each second, ten times
"""
PROGRAM = r"""
#include <gpubpf.h>
#include <gpubpf_traffic.h>                      /* sectors, patterns and bank conflicts of a request */
#include <gpubpf_coverage.h>                     /* which bytes were touched */
#include <gpubpf_updates.h>                      /* how often atomics update each address */

GPU_SITE_ARRAY(global_cells, struct gpu_traffic);  /* global and constant memory */
GPU_SITE_ARRAY(local_cells, struct gpu_traffic);
GPU_SITE_ARRAY(shared_cells, struct gpu_shared_traffic);
GPU_SITE_ARRAY(unaddressed_cells, struct gpu_unaddressed_traffic);
GPU_PARAM(filter, struct gpu_filter);            /* --block and --thread */

enum kind { PLAIN, BYTES, COPIED, UPDATED, KEPT };  /* BYTES: of --granule 1; the width of copies may vary; KEPT: for on_…_again */

enum coverage { COUNTED, COVERED, OWNED };       /* also the bytes that a request touches; and the kernel that touches them */

/* Add a request of these lanes, as if the others had a false predicate; 0: of all lanes. */
static inline int in_global(gpu_mask lanes, struct gpu_access *ctx, int kind, int coverage) {
    int site = ctx->site;
    u64 address = ctx->address;
    gpu_mask together = kind == UPDATED ? gpu_match(address) : 0;
    struct gpu_traffic *cell = global_cells.lookup(&site);
    struct gpu_request request = {address, ctx->width, lanes, .varies = kind == COPIED, .updates = kind == UPDATED,
                                  .bytes = kind == BYTES, .keeps = kind == KEPT};
    if (!cell)
        return 0;
    if (kind == KEPT)
        return gpu_keep_request(cell, &request);
    if (coverage == COUNTED)
        gpu_add_request(cell, &request);
    else
        gpu_add_covered(cell, &request, ctx->effect, coverage == OWNED);
    if (kind == UPDATED)
        gpu_count_updates(cell, site, address, together);
    return 0;
}

int on_global_again(struct gpu_access_again *ctx) {
    int site = ctx->site;
    struct gpu_traffic *cell = global_cells.lookup(&site);
    return cell ? gpu_add_again(cell, 0, ctx->kept, ctx->width, ctx->count) : 0;
}

/* The bytes that a request touches, where another one stands for it. */
static inline int in_repeated(gpu_mask lanes, struct gpu_access *ctx, int kind, int coverage) {
    struct gpu_request request = {ctx->address, ctx->width, lanes, .bytes = kind == BYTES};
    return gpu_mark(&request, ctx->effect, coverage == OWNED);
}

static inline int in_local(gpu_mask lanes, struct gpu_access *ctx) {
    int site = ctx->site;
    struct gpu_traffic *cell = local_cells.lookup(&site);
    struct gpu_request request = {ctx->address, ctx->width, lanes, .local = 1};
    return cell ? gpu_add_request(cell, &request) : 0;
}

static inline int in_shared(gpu_mask lanes, struct gpu_access *ctx, int kind) {
    int site = ctx->site;
    struct gpu_shared_traffic *cell = shared_cells.lookup(&site);
    struct gpu_request request = {ctx->address, ctx->width, lanes, .updates = kind == UPDATED, .keeps = kind == KEPT};
    return !cell ? 0 : kind == KEPT ? gpu_keep_shared_request(cell, &request) : gpu_add_shared_request(cell, &request);
}

int on_shared_again(struct gpu_access_again *ctx) {
    int site = ctx->site;
    struct gpu_shared_traffic *cell = shared_cells.lookup(&site);
    return cell ? gpu_add_again(&cell->cell, cell, ctx->kept, ctx->width, ctx->count) : 0;
}

static inline int in_unaddressed(gpu_mask lanes, struct gpu_access *ctx) {
    int site = ctx->site;
    struct gpu_unaddressed_traffic *cell = unaddressed_cells.lookup(&site);
    return cell ? gpu_add_unaddressed_request(cell, lanes) : 0;
}

int on_global(struct gpu_access *ctx) { return in_global(0, ctx, PLAIN, COUNTED); }
int on_copied(struct gpu_access *ctx) { return in_global(0, ctx, COPIED, COUNTED); }
int on_updated(struct gpu_access *ctx) { return in_global(0, ctx, UPDATED, COUNTED); }
int on_covered_global(struct gpu_access *ctx) { return in_global(0, ctx, BYTES, COVERED); }
int on_covered_coarse(struct gpu_access *ctx) { return in_global(0, ctx, PLAIN, COVERED); }
int on_covered_copied(struct gpu_access *ctx) { return in_global(0, ctx, COPIED, COVERED); }
int on_covered_updated(struct gpu_access *ctx) { return in_global(0, ctx, UPDATED, COVERED); }
int on_owned_global(struct gpu_access *ctx) { return in_global(0, ctx, BYTES, OWNED); }
int on_owned_coarse(struct gpu_access *ctx) { return in_global(0, ctx, PLAIN, OWNED); }
int on_owned_copied(struct gpu_access *ctx) { return in_global(0, ctx, COPIED, OWNED); }
int on_owned_updated(struct gpu_access *ctx) { return in_global(0, ctx, UPDATED, OWNED); }
int on_covered_repeated_global(struct gpu_access *ctx) { return in_repeated(0, ctx, BYTES, COVERED); }
int on_covered_repeated_coarse(struct gpu_access *ctx) { return in_repeated(0, ctx, PLAIN, COVERED); }
int on_owned_repeated_global(struct gpu_access *ctx) { return in_repeated(0, ctx, BYTES, OWNED); }
int on_owned_repeated_coarse(struct gpu_access *ctx) { return in_repeated(0, ctx, PLAIN, OWNED); }
int on_local(struct gpu_access *ctx) { return in_local(0, ctx); }
int on_shared(struct gpu_access *ctx) { return in_shared(0, ctx, PLAIN); }
int on_shared_updated(struct gpu_access *ctx) { return in_shared(0, ctx, UPDATED); }
int on_kept_global(struct gpu_access *ctx) { return in_global(0, ctx, KEPT, COUNTED); }
int on_kept_shared(struct gpu_access *ctx) { return in_shared(0, ctx, KEPT); }
int on_unaddressed(struct gpu_access *ctx) { return in_unaddressed(0, ctx); }

/* With --block or --thread: the chosen lanes; 0 in lanes that are not chosen. */
static inline gpu_mask chosen(void) {
    int key = 0;
    struct gpu_filter *wanted = filter.lookup(&key);
    int mine = wanted && gpu_selected(wanted);
    gpu_mask lanes = gpu_ballot(mine);
    return mine ? lanes : 0;
}

#define CHOSEN(_in, _more...) ({ gpu_mask lanes = chosen(); lanes ? _in(lanes, ctx, ##_more) : 0; })

int on_chosen_global(struct gpu_access *ctx) { return CHOSEN(in_global, PLAIN, COUNTED); }
int on_chosen_copied(struct gpu_access *ctx) { return CHOSEN(in_global, COPIED, COUNTED); }
int on_chosen_updated(struct gpu_access *ctx) { return CHOSEN(in_global, UPDATED, COUNTED); }
int on_chosen_covered_global(struct gpu_access *ctx) { return CHOSEN(in_global, BYTES, COVERED); }
int on_chosen_covered_coarse(struct gpu_access *ctx) { return CHOSEN(in_global, PLAIN, COVERED); }
int on_chosen_covered_copied(struct gpu_access *ctx) { return CHOSEN(in_global, COPIED, COVERED); }
int on_chosen_covered_updated(struct gpu_access *ctx) { return CHOSEN(in_global, UPDATED, COVERED); }
int on_chosen_owned_global(struct gpu_access *ctx) { return CHOSEN(in_global, BYTES, OWNED); }
int on_chosen_owned_coarse(struct gpu_access *ctx) { return CHOSEN(in_global, PLAIN, OWNED); }
int on_chosen_owned_copied(struct gpu_access *ctx) { return CHOSEN(in_global, COPIED, OWNED); }
int on_chosen_owned_updated(struct gpu_access *ctx) { return CHOSEN(in_global, UPDATED, OWNED); }
int on_chosen_covered_repeated_global(struct gpu_access *ctx) { return CHOSEN(in_repeated, BYTES, COVERED); }
int on_chosen_covered_repeated_coarse(struct gpu_access *ctx) { return CHOSEN(in_repeated, PLAIN, COVERED); }
int on_chosen_owned_repeated_global(struct gpu_access *ctx) { return CHOSEN(in_repeated, BYTES, OWNED); }
int on_chosen_owned_repeated_coarse(struct gpu_access *ctx) { return CHOSEN(in_repeated, PLAIN, OWNED); }
int on_chosen_local(struct gpu_access *ctx) { return CHOSEN(in_local); }
int on_chosen_shared(struct gpu_access *ctx) { return CHOSEN(in_shared, PLAIN); }
int on_chosen_shared_updated(struct gpu_access *ctx) { return CHOSEN(in_shared, UPDATED); }
int on_chosen_kept_global(struct gpu_access *ctx) { return CHOSEN(in_global, KEPT, COUNTED); }
int on_chosen_kept_shared(struct gpu_access *ctx) { return CHOSEN(in_shared, KEPT); }
int on_chosen_unaddressed(struct gpu_access *ctx) { return CHOSEN(in_unaddressed); }

/* With --sass: what nothing else tells about an access of machine code. It is the same each time. */
struct seen { u64 width_max, kind_max; };        /* bytes of a lane; 1 + its enum gpu_kind */
GPU_SITE_ARRAY(seen, struct seen);

int on_seen(struct gpu_access *ctx) {
    int site = ctx->site;
    struct seen *cell = seen.lookup(&site);
    if (cell && cell->width_max < ctx->width)
        gpu_max(&cell->width_max, ctx->width);
    if (cell && cell->kind_max < ctx->kind + 1)
        gpu_max(&cell->kind_max, ctx->kind + 1);
    return 0;
}

/* Bulk copies, in all of these cases. */
int on_bulk(struct gpu_access *ctx) {
    if (ctx->width > 16 && chosen())
        gpu_cover_bulk(ctx->address, ctx->width, ctx->effect);
    return 0;
}
"""


def build_parser() -> cli.Parser:
    """Return the parser: the shared options, and what to show of accesses."""
    what = "Show how the instructions of GPU kernels access memory, and how much they waste."
    parser = cli.parser(TOOL, what, EXAMPLES)
    cli.add_targets(parser)
    cli.add_kernels(parser)
    cli.add_patches(parser)
    cli.add_threads(parser)
    cli.add_sampling(parser)
    cli.add_budget(parser)
    cli.add_coverage(parser)
    cli.add_accesses(parser)
    cli.add_device(parser, times=True, default="default with --heatmap")
    cli.add_rings(parser)
    cli.add_looks(parser)
    cli.add_output(parser, "gpubpf.memory.traffic_records")
    return parser


@cli.command(TOOL)
def main(argv: list[str] | None = None) -> int:
    """Run the tool; return its exit status."""
    parser = build_parser()
    args = cli.parse(parser, argv)
    from gpubpf.memory.memory_options import MemoryOptions

    chosen = MemoryOptions.of(args).sampled_by_default()
    options, views = chosen.shared, chosen.coverage
    if args.sass and (chosen.accesses.given or views.footprint):
        parser.error(
            "--sass adds up accesses by instruction; leave out -e, --parquet, --heatmap and --footprint"
        )
    out = cli.open_results(options.output)
    if chosen.accesses.given:
        from gpubpf.memory import access_trace

        return access_trace.trace(chosen, out)
    if args.ebpf:
        out.write(PROGRAM.lstrip())
        return 0
    from gpubpf.program import BPF
    from gpubpf.show.owner_columns import OwnerColumns

    b = BPF(text=PROGRAM)
    sampling = b.sample(options.sampling)
    b.limit(options.kernels)
    attach(b, chosen)
    if args.list or args.ptx:
        return b.show_kernels(options, out)
    grain = None  # how finely to track touched bytes
    if views.given:
        from gpubpf.memory.granularity import Grain

        grain = Grain(views.granule, views.footprint)
        b["grain"].set(grain.parameter)
    with b.trace(options, out, grain.follow if grain else None) as session:
        from gpubpf.memory import coverage, traffic, traffic_report  # NumPy would delay the first probe

        counted = traffic.Traffic(sampling)
        covered = coverage.Coverage(grain, options.threads.filtered) if grain else None
        tick = (lambda: covered.take(session)) if covered else None
        results, owners = cli.ResultWriter(options.output, out, session.now_ns), OwnerColumns(session.several)
        for _ in session.intervals(args.interval, args.count, tick=tick):
            traffic_report.show(counted.read(session, bool(args.interval)), owners, chosen, results)
            if covered:
                traffic_report.show_coverage(covered, session, owners, views, results)
            if out.closed:
                break
        results.end(session.summary())
    return session.status


def attach(b: BPF, options: MemoryOptions) -> None:
    """Attach the programs that add up: one for each memory space, so that none carries code that it does not need."""
    from gpubpf.ebpf.bytecode import UNADDRESSED_SPACES

    shared, views = options.shared, options.coverage
    kernels, sass = shared.kernels.wanted, shared.kernels.sass
    access = functools.partial(b.attach_gpu_access, kernels)
    which = "chosen_" if shared.threads.filtered else ""
    covers = "owned_" if views.footprint else "covered_" if views.allocations else ""
    moves = ("load", "store")
    alike = 32  # so many bytes further on, a request begins at the same place in a sector, and its lanes meet in banks alike
    access(f"on_{which}global", moves, ("const",) if covers else ("global", "const"), alike)
    if covers:  # no bytes are tracked in constant memory
        moved = "coarse" if views.granule > 1 else "global"
        access(f"on_{which}{covers}{moved}", moves, ("global",), alike)
        access(f"on_{which}{covers}repeated_{moved}", moves, ("global",), alike, repeats=True)
    for name, kind in (("updated", "atomic"), ("copied", "async")):
        access(f"on_{which}{covers}{name}", (kind,), ("global",), 0 if covers else alike)
    if covers:
        access("on_bulk", ("async",), ("global",))
    access(f"on_{which}local", (*moves, "atomic"), ("local",), alike)
    access(f"on_{which}shared", (*moves, "async"), ("shared",), alike)
    access(f"on_{which}shared_updated", ("atomic",), ("shared",))
    access(f"on_{which}unaddressed", spaces=UNADDRESSED_SPACES)
    if sass:
        access("on_seen", spaces=("global", "shared", "local", "tensor"))
        return
    for space in ("global", "shared"):  # in loops
        access(f"on_{which}kept_{space}", moves, (space,), alike, keeps=True)
        b.attach_gpu_access_again(kernels, f"on_{space}_again", moves, (space,))


if __name__ == "__main__":
    sys.exit(main())

"""Record every memory access: the device programs and the measurement of memtrace -e, --parquet and --heatmap."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf.ebpf.bytecode import KINDS, SPACES, UNADDRESSED_SPACES
from gpubpf.memory import access_text
from gpubpf.memory.access_log import AccessLog
from gpubpf.show import cli, picture
from gpubpf.show.heatmap import AddressHeat, Band
from gpubpf.show.option_values import SITE_RANGES
from gpubpf.show.owner_columns import OwnerColumns

if TYPE_CHECKING:
    from gpubpf.memory.access_log import Accesses, AccessSink, SiteLabels
    from gpubpf.memory.memory_options import MemoryOptions
    from gpubpf.program import BPF
    from gpubpf.show.picture import Source

PROGRAM = r"""
#include <gpubpf.h>

#define NUMBER_BITS 40              /* of the number of a launch in its process */

GPU_PARAM(filter, struct gpu_filter);            /* --block and --thread */

struct access {
    u64 address, launch;            /* launch: its number in the process, above it the width */
    u32 thread;
    u16 site, how;                  /* how: space, kind << 2, multiprocessor << 4 */
};
struct moment { u64 address, launch; u32 thread; u16 site, how; u64 time; };
struct wanted {
    u64 first, last;                /* addresses */
    struct gpu_range site[8];
    u64 warps;                      /* one in so many */
};
GPU_RINGBUF(accesses, struct access, 32768);
GPU_RINGBUF(moments, struct moment, 32768);
GPU_PARAM(wanted, struct wanted);

static __always_inline int is_wanted(u64 address, u64 width, u32 site) {
    int key = 0, i;
    struct gpu_filter *threads = filter.lookup(&key);
    struct wanted *w = wanted.lookup(&key);
    u64 bx, by, bz, x, y, z, gx, gy, gz;

    if (!threads || !w)
        return 0;
    u32 chosen = 0;
#pragma unroll
    for (i = 0; i < 8; i++)
        chosen |= GPUBPF_IN(site, w->site[i]);
    if (!(chosen & gpu_selected(threads) & (address <= w->last) & (address + width > w->first)))
        return 0;
    if (w->warps < 2)
        return 1;
    bpf_get_block_idx(&bx, &by, &bz);
    bpf_get_block_dim(&x, &y, &z);
    gpu_grid_dim(&gx, &gy, &gz);
    u32 block = (bz * gy + by) * gx + bx, warps = (x * y * z + gpu_warp_size() - 1) / gpu_warp_size();  /* at most GPU_LANES */
    return (block * warps + gpu_warp()) % (u32)w->warps == 0;
}

static __always_inline void describe(struct access *to, u64 address, u64 width, u64 launch, u64 site, u64 how) {
    to->address = address;
    to->launch = (launch & ((1ull << NUMBER_BITS) - 1)) | width << NUMBER_BITS;
    to->thread = gpu_global_thread();
    to->site = site < 0xffff ? site : 0xffff;
    to->how = how | gpu_sm() << 4;
}

/* What finds no room the ring counts as lost. */
static __always_inline int put(u64 address, u64 width, u64 launch, u64 site, u64 how) {
    struct access record;
    describe(&record, address, width, launch, site, how);
    accesses.ringbuf_output(&record, sizeof(record), 0);
    return 0;
}

static __always_inline int put_timed(u64 address, u64 width, u64 launch, u64 site, u64 how) {
    struct moment record;
    record.time = bpf_get_globaltimer();
    describe((struct access *)&record, address, width, launch, site, how);
    moments.ringbuf_output(&record, sizeof(record), 0);
    return 0;
}

#define WHICH(_ctx) (_ctx)->address, (_ctx)->width
#define WHAT(_ctx) WHICH(_ctx), (_ctx)->launch, (_ctx)->site, (_ctx)->space | (_ctx)->kind << 2

int on_record(struct gpu_access *ctx) { return put(WHAT(ctx)); }
int on_timed_record(struct gpu_access *ctx) { return put_timed(WHAT(ctx)); }
int on_chosen_record(struct gpu_access *ctx) { return is_wanted(WHICH(ctx), ctx->site) ? put(WHAT(ctx)) : 0; }
int on_chosen_timed_record(struct gpu_access *ctx) { return is_wanted(WHICH(ctx), ctx->site) ? put_timed(WHAT(ctx)) : 0; }
int on_unaddressed(struct gpu_access *ctx) { return 0; }   /* these have no address, but get numbers as in the tables */
"""
HEATMAP_SPACES = ("global", "const")  # in these spaces, an address identifies a byte of device memory
MOST_HEATMAPS = 16  # maximum pairs of process and GPU that get a heatmap


def trace(options: MemoryOptions, out: cli.Output) -> int:
    """Attach the programs, measure and write the results. Return the exit status. Raises Error."""
    shared, views, output = options.shared, options.accesses, options.shared.output
    if shared.looks.ebpf:
        out.write(PROGRAM.lstrip())
        return 0
    from gpubpf.memory import parquet
    from gpubpf.session import tracing
    from gpubpf.traced.measurement import Follow

    virtual = tracing.virtual(shared)
    timed = bool(output.timestamps or views.heatmap or virtual)
    b = attach(options, timed)
    if shared.looks.list or shared.looks.ptx:
        return b.show_kernels(shared, out)
    if views.heatmap:
        picture.check(views.heatmap)  # fail now rather than after the measurement
    if views.parquet:
        parquet.check(views.parquet)
    sinks: list[AccessSink] = []
    owners = OwnerColumns()
    heatmaps = AddressHeatmaps()
    if views.heatmap:
        sinks.append(heatmaps)
    log = AccessLog(timed, virtual, sinks, host_times=output.timestamps, owners=owners)
    follow = Follow(
        log_records=1 << 17,
        ring_size=(1 << 28) if virtual else None,
        allocation_stacks=bool(views.heatmap),
    )
    with b.trace(shared, out, follow) as session, contextlib.ExitStack() as stack:
        owners.asked = session.several
        results = cli.ResultWriter(output, out)
        if views.each:
            printer = access_text.AccessPrinter(out, results.form, output.timestamps, owners, out.width)
            sinks.append(printer)
        if views.parquet:
            sinks.append(stack.enter_context(parquet.Writer(views.parquet, output.timestamps)))

        def tick() -> None:
            logs = session.logs()
            if views.heatmap:
                heatmaps.add_allocations(logs)
            log.take(session, logs)

        for _ in session.intervals(output.interval, output.count, tick=tick):
            if out.closed:
                break
        stack.close()  # complete the file now: the command may continue to run
        if views.heatmap:
            picture.write(views.heatmap, heatmaps.sources())
        for file in filter(None, (views.parquet, views.heatmap)):
            cli.note(output.tool, f"wrote {file}")
        log.show_end(session, results)
    return session.status


def attach(options: MemoryOptions, timed: bool) -> BPF:
    """Attach the program that records what the command line requests. `timed`: records have times."""
    shared, views, kernels = options.shared, options.accesses, options.shared.kernels.wanted
    from gpubpf.program import BPF

    b = BPF(text=PROGRAM)
    b.sample(shared.sampling)
    b.limit(shared.kernels)
    b["wanted"].set(filter_fields(views.site, views.address, views.warps))
    chosen = shared.threads.filtered or views.filtered
    # Only probed sites get numbers. Unless all spaces are probed, the numbers differ from those in memtrace's tables.
    only_heatmap = views.heatmap and not (views.each or views.parquet or views.site)
    b.attach_gpu_access(
        kernel=kernels,
        fn_name=f"on{'_chosen' if chosen else ''}{'_timed' if timed else ''}_record",
        spaces=HEATMAP_SPACES if only_heatmap else SPACES,
    )
    if not only_heatmap:
        b.attach_gpu_access(kernel=kernels, fn_name="on_unaddressed", spaces=UNADDRESSED_SPACES)
    return b


def filter_fields(
    sites: Sequence[tuple[int, int]], addresses: tuple[int, int] | None, warps: int
) -> dict[str, Any]:
    """Return the fields of `struct wanted`, for `Map.set`.

    sites      at most SITE_RANGES ranges of site numbers, both ends included; empty: all sites
    addresses  first and last address, both included; None: all addresses
    warps      record one warp in this many
    """
    ranges = list(sites) or [(0, 2**32 - 1)]
    ranges += [ranges[-1]] * (SITE_RANGES - len(ranges))
    first, last = addresses or (0, 2**64 - 1)
    site = np.zeros(SITE_RANGES, [("lo", "<u4"), ("span", "<u4")])
    site["lo"] = [low for low, _ in ranges]
    site["span"] = [high - low for low, high in ranges]
    return {"first": first, "last": last, "site": site, "warps": warps}


class AddressHeatmaps:
    """A sink that draws accesses to global and constant memory by address and time, for each process and GPU."""

    def __init__(self) -> None:
        from gpubpf.memory.allocations import Allocations

        self._heats: dict[tuple[int, int], AddressHeat] = {}
        self._allocations = Allocations()

    def add_allocations(self, logs: Sequence[Any]) -> None:
        """Take the allocations from the logs. They name the bands of a heatmap."""
        for log in logs:
            self._allocations.add(log)

    def __call__(self, accesses: Accesses, where: SiteLabels, times: Any) -> None:
        place = accesses.place
        key = place.pid, place.gpu
        if accesses.time is None or (key not in self._heats and len(self._heats) >= MOST_HEATMAPS):
            return
        title = f"{place.comm} (pid {place.pid}), GPU {place.gpu}: accesses to global and constant memory"
        heat = self._heats.setdefault(key, AddressHeat(title))
        writes = np.array(where.writes)[where.codes(accesses.site)]
        written = np.where(
            accesses.kind == KINDS.index("async"), writes, accesses.kind != KINDS.index("load")
        )
        there = np.isin(accesses.space, [SPACES.index(space) for space in HEATMAP_SPACES])
        heat.add(accesses.address[there], written[there], accesses.time[there])

    def sources(self) -> list[Source]:
        """Return the heatmaps, with the names and bounds of allocations."""
        from gpubpf.images import symbols

        known: dict[int, list[Band]] = {}
        names: dict[Any, str] = {}  # callers by host stack: many allocations share one
        for one in self._allocations.all():
            if one.stack not in names:
                names[one.stack] = symbols.caller(one.stack)
            name = " ".join(part for part in (one.call, names[one.stack]) if part)
            known.setdefault(one.pid, []).append(Band(one.base, one.bytes, name))
        return [heat.drawn(known.get(pid, ())) for (pid, _), heat in self._heats.items()]

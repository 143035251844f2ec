"""memtrace -e, --parquet, --heatmap: the device programs that record every access, and the measurement with them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf import accesslog, cli, heatmap
from gpubpf.accesslog import OPS, SPACES, AccessLog
from gpubpf.heatmap import AddressHeat, Band

if TYPE_CHECKING:
    import argparse

    from gpubpf.accesslog import Accesses, Sink, Where
    from gpubpf.heatmap import Drawn
    from gpubpf.program import BPF

PROGRAM = r"""
#include <gpubpf.h>

GPU_PARAM(filter, struct gpu_filter);            /* --block and --thread */

struct access {
    u64 address, launch;            /* launch: its number in the process (40 bits), above it the width */
    u32 thread;
    u16 site, how;                  /* how: space, kind << 2, multiprocessor << 4 */
};
struct moment { u64 address, launch; u32 thread; u16 site, how; u64 time; };
struct wanted {
    u64 some;                       /* 0: all */
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
    if (!w->some)
        return 1;
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
    u32 block = (bz * gy + by) * gx + bx, warps = (x * y * z + 31) >> 5;
    return (block * warps + gpu_warp()) % (u32)w->warps == 0;
}

#define DESCRIBE(_record, _ctx)                                                          \
    do {                                                                                \
        (_record).address = (_ctx)->address;                                            \
        (_record).launch = ((_ctx)->launch & ((1ull << 40) - 1)) | (_ctx)->width << 40; \
        (_record).thread = gpu_global_thread();                                         \
        (_record).site = (_ctx)->site < 0xffff ? (_ctx)->site : 0xffff;                 \
        (_record).how = (_ctx)->space | (_ctx)->kind << 2 | gpu_sm() << 4;              \
    } while (0)

int on_record(struct gpu_access *ctx) {
    struct access record;
    if (!is_wanted(ctx->address, ctx->width, ctx->site))
        return 0;
    DESCRIBE(record, ctx);
    accesses.ringbuf_output(&record, sizeof(record), 0);  /* or the ring counts it as lost */
    return 0;
}

int on_timed_record(struct gpu_access *ctx) {
    struct moment record;
    record.time = bpf_get_globaltimer();
    if (!is_wanted(ctx->address, ctx->width, ctx->site))
        return 0;
    DESCRIBE(record, ctx);
    moments.ringbuf_output(&record, sizeof(record), 0);
    return 0;
}
"""
PICTURED = ("global", "const")  # spaces whose addresses are those of memory
MOST_HEATS = 16


def trace(args: argparse.Namespace, out: cli.Output) -> int:
    """Attaches, runs the command, writes what was asked for. Gives the exit status. Raises Error."""
    if args.ebpf:
        out.write(PROGRAM.lstrip())
        return 0
    from gpubpf import listing, parquet, tracing
    from gpubpf.session import Follow

    virtual = tracing.virtual(args)
    timed = bool(args.timestamps or args.heatmap or virtual)
    b = attached(args, timed)
    if args.list or args.ptx:
        return listing.show(b, args, out)
    if args.heatmap:
        heatmap.write(args.heatmap, [])  # better an error now than at the end
    if args.parquet:
        parquet.check(args.parquet)
    sinks: list[Sink] = []
    if args.each:
        form = "json" if args.json else "csv" if args.csv else "text"
        sinks.append(accesslog.Printer(out, form, args.timestamps))
    pictures = Pictures()
    if args.heatmap:
        sinks.append(pictures)
    log = AccessLog(timed, virtual, sinks, host_times=args.timestamps)
    follow = Follow(log_records=1 << 17, ring_size=(1 << 28) if virtual else None)
    with b.trace(args, follow) as session, contextlib.ExitStack() as stack:
        if args.parquet:
            sinks.append(stack.enter_context(parquet.Writer(args.parquet, args.timestamps)))

        def tick() -> None:
            logs = session.logs()
            if args.heatmap:
                pictures.learn(logs)
            log.take(session, logs)

        for _ in session.intervals(args.interval, args.count, tick=tick):
            if out.closed:
                break
        stack.close()  # the command may run on: what was measured is whole
        if args.heatmap:
            heatmap.write(args.heatmap, pictures.drawn())
        log.show_end(session, args, out)
    return session.status


def attached(args: argparse.Namespace, timed: bool) -> BPF:
    """The program that records what the command line asks for, attached. `timed`: with times."""
    from gpubpf.program import BPF

    b = BPF(text=PROGRAM)
    b["wanted"].set(wanted(args.site, args.address, args.warps, cli.chooses_threads(args)))
    only_pictured = args.heatmap and not (args.each or args.parquet)
    b.attach_gpu_access(
        kernel=args.kernel,
        fn_name="on_timed_record" if timed else "on_record",
        spaces=PICTURED if only_pictured else SPACES,
    )
    return b


def wanted(
    sites: Sequence[tuple[int, int]], addresses: tuple[int, int] | None, warps: int, threads: bool
) -> dict[str, Any]:
    """The fields of `struct wanted`, as `Map.set` takes them: ranges of sites (none: all), the addresses from first to last (None:
    all), one warp in so many; `threads`: --block or --thread leave something out."""
    ranges = list(sites) or [(0, 2**32 - 1)]
    ranges += [ranges[-1]] * (cli.SITE_RANGES - len(ranges))
    first, last = addresses or (0, 2**64 - 1)
    site = np.zeros(cli.SITE_RANGES, [("lo", "<u4"), ("span", "<u4")])
    site["lo"] = [low for low, _ in ranges]
    site["span"] = [high - low for low, high in ranges]
    some = bool(sites) or addresses is not None or warps > 1 or threads
    return {"some": some, "first": first, "last": last, "site": site, "warps": warps}


class Pictures:
    """A sink: global memory by address and time, for each process and GPU."""

    def __init__(self) -> None:
        from gpubpf.allocations import Allocations

        self._heats: dict[tuple[int, int], AddressHeat] = {}
        self._allocations = Allocations()

    def learn(self, logs: Sequence[Any]) -> None:
        """What was allocated."""
        for log in logs:
            self._allocations.add(log)

    def __call__(self, accesses: Accesses, where: Where, times: Any) -> None:
        place = accesses.place
        key = place.pid, place.gpu
        if accesses.time is None or (key not in self._heats and len(self._heats) >= MOST_HEATS):
            return
        title = f"{place.comm} (pid {place.pid}), GPU {place.gpu}: accesses to global memory"
        heat = self._heats.setdefault(key, AddressHeat(title))
        writes = np.array(where.writes)[where.codes(accesses.site)]
        written = np.where(accesses.kind == OPS.index("async"), writes, accesses.kind != OPS.index("load"))
        there = np.isin(accesses.space, [SPACES.index(space) for space in PICTURED])
        heat.add(accesses.address[there], written[there], accesses.time[there])

    def drawn(self) -> list[Drawn]:
        known: dict[int, list[Band]] = {}
        for one in self._allocations.all():
            known.setdefault(one.pid, []).append(Band(one.base, one.bytes, one.call))
        return [heat.drawn(known.get(pid, ())) for (pid, _), heat in self._heats.items()]

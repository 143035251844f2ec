"""Collect what kernelretsnoop's device programs write: maps that are read periodically, or records in ring buffers. They become the
`Exits` of each kernel and launch shape, lines of records, and pictures.

    log = ExitLog(…)
    for _ in session.intervals(…, tick=lambda: log.take(session)):
        for kernel, report in log.reports(since_last):
            …
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf import names
from gpubpf.agent.definitions import NO_SM, NUMBER_MASK
from gpubpf.ebpf.sampling import hashes
from gpubpf.exits import cells
from gpubpf.exits.exit_records import EXIT
from gpubpf.exits.lateness import SAMPLE_GROUPS, ExitReport, Exits, LaneLateness
from gpubpf.records import operation_log
from gpubpf.records.clock import CycleLength, SmClock, estimated_tick
from gpubpf.records.fields import KERNEL, OWNER
from gpubpf.records.kernel_shapes import READINGS, KernelShape, KernelShapes
from gpubpf.records.launch_shape import Index, Ranges
from gpubpf.session.sampled import samples as samples_of
from gpubpf.show import bulk_text, table
from gpubpf.show.fields import values_of
from gpubpf.show.heatmap import BlockHeat
from gpubpf.show.option_values import EVERYTHING
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf.show.summary_text import summary_lines

if TYPE_CHECKING:
    from gpubpf.ebpf.sampling import Sampling
    from gpubpf.records.results import ProcessLog, Reading, RingRecords
    from gpubpf.session.sampled import Sample
    from gpubpf.session.session import Session
    from gpubpf.show.output import Output

RING = "exits"  # the ring buffer that on_record writes to
COARSE = 256  # ns; if the timer's steps are at least this long, multiprocessor clocks refine its times
CHUNK = 1 << 16  # records to print at once
MOST_PENDING = 4096  # maximum launches that are not complete yet
MOST_HEATS = 64
MOST_UNITS = (
    1 << 22
)  # maximum blocks or warps of a launch to compute its sample; records of larger launches wait for the end
MOST_SHARDS = 6  # maximum shards of a ring buffer that a line names
LOST_WHY = "because a kernel or process failed, or a map or log was full"
LOST_RECORDS = f"exits of the counted launches, at most {{}}, {LOST_WHY}"
LOST_SUMS = f"counted launches, or exits of them, at most {{}}, {LOST_WHY}"
FAR = 1 << 60  # ns; no two times of a GPU are this far apart


class ExitLog:
    """Collects the exits of a session.

    recorded       exits come as records in the ring buffer, not as sums in maps
    block, thread  the ranges of --block and --thread
    heats          pictures are wanted
    each           called with every batch of records: the kernel, the records, their times (ns on the host)
    owners         learns about every kernel before `each` is called
    sampling       which blocks or warps record their exits; None: all
    """

    def __init__(
        self,
        recorded: bool,
        block: Ranges,
        thread: Ranges,
        heats: bool = False,
        each: Callable[[KernelShape, Any, Any], object] | None = None,
        owners: OwnerColumns | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        self._sampling = sampling
        self._owners = OwnerColumns() if owners is None else owners
        self._recorded, self._ranges, self._each = recorded, (block, thread), each
        self._wants_heats = heats
        self._exits: dict[KernelShape, Exits] = {}
        self.shapes = KernelShapes(recorded)
        self._reported: dict[KernelShape, int] = {}
        self._sampled_before: dict[KernelShape, Sample] = {}
        # Sums and launches by (process, context), because a pid is not unique. Reports are by pid.
        self._latest: dict[tuple[int, int], list[tuple[KernelShape, LaneLateness, int]]] = {}
        self._before: dict[KernelShape, LaneLateness] = {}
        self._pending: dict[tuple[int, int], list[Any]] = {}  # records of launches that are not complete yet
        # Clock readings by (pid, GPU); rows: process << 32 | multiprocessor, cycles, ns.
        self._readings: dict[tuple[int, int], Any] = {}
        self._rates: dict[tuple[int, int], CycleLength] = {}  # the cycle lengths computed from the readings
        self.heats: dict[KernelShape, BlockHeat] = {}
        self.unknown = 0  # records whose launch or time is unknown

    def take(self, session: Session) -> None:
        """Take what is new since the last call."""
        # Read the rings before the log, so that the log has the launches of almost all records.
        for ring in session.rings(RING) if self._recorded else ():
            self._take_records(ring)
        for log in session.logs():
            self._take_log(log)
        self._owners.see(self.shapes.launches)
        if not self._recorded:
            for reading in session.readings(*self._maps):
                self._take_reading(reading)
            return
        if self._each is not None and not self._wants_heats:
            self._tell(session.stopped)
        else:
            self._fold(session.stopped)

    # --- the log: the kernel of each launch, and the clocks ---

    def _take_log(self, log: ProcessLog) -> None:
        records = self.shapes.take(log)
        for record in records[(records["kind"] == operation_log.CLOCK) & (records["clock"]["sm"] != NO_SM)]:
            clock, gpu = record["clock"], log.gpus.get(int(record["context"]), 0)
            columns = [[clock[name].astype(np.int64)] for name in ("sm", "clock64", "gpu")]
            self._ticked(log.process, log.pid, gpu, columns)

    def _host_times(self, process: int, kernel: KernelShape, records: Any) -> tuple[Any, Any]:
        """Return the host times of a process's records in ns, and a mask of those that are known."""
        time = records["time"].astype(np.int64)
        if kernel.pid in self.shapes.virtual:
            return time, np.ones(len(time), bool)
        clock = self.shapes.clock(process, kernel.gpu)
        if (clock.tick or estimated_tick(time)) >= COARSE:
            columns = records["sm"].astype(np.int64), records["clock"].astype(np.int64), time
            time = SmClock(*columns, tick=clock.tick).gpu(*columns).at
        times = clock.host(time)
        return times.at, times.known

    # --- maps ---

    def _take_reading(self, reading: Reading) -> None:
        maps = (reading.instances[name] for name in self._maps)
        sums = self._latest[reading.process, reading.context] = []
        for instances in zip(*maps, strict=False):
            kernel = _kernel_of(instances[0])
            if not kernel.shape.threads or {_kernel_of(one) for one in instances} != {kernel}:
                continue
            arrays = {name: one.array for name, one in zip(self._maps, instances, strict=True)}
            warps, blocks = cells.unpacked(arrays["firsts"], arrays["rests"], arrays["blocks"], kernel.shape)
            together = cells.together(arrays.get("wholes"), blocks, kernel.shape)
            late = LaneLateness.of_maps(arrays["lateness"], blocks, arrays.get("groups"), together)
            sums.append((kernel, late, instances[0].launches))
            rounds = blocks["rounds"].reshape(-1)
            rounds = rounds[rounds["time_sm"] != 0]
            columns = (
                (rounds["time_sm"] & np.uint64(0xFFFF)).astype(np.int64),
                rounds["clock"].astype(np.int64),
                (rounds["time_sm"] >> np.uint64(16)).astype(np.int64),
            )
            self._ticked(reading.process, kernel.pid, kernel.gpu, columns)
            chosen = _mask(kernel.grid, self._ranges[0])
            tick = float(self.shapes.ticks.get((reading.process, kernel.gpu), 0))
            sampled = functools.partial(self._sampled_blocks, kernel) if self._sampling else None
            rate = self._rate(kernel)
            self._of(kernel).take_maps(warps, blocks, rate, chosen, tick, sampled, reading.process)

    def _lateness(self) -> tuple[dict[KernelShape, LaneLateness], dict[KernelShape, int]]:
        """Return the sums in the maps, and the number of launches, for each kernel."""
        found: dict[KernelShape, LaneLateness] = {}
        launches: dict[KernelShape, int] = {}
        for kernel, sums, count in (one for latest in self._latest.values() for one in latest):
            found[kernel] = found[kernel].plus(sums) if kernel in found else sums
            launches[kernel] = launches.get(kernel, 0) + count
        for kernel, sums in found.items():
            # Launches that began while the maps were being read have exits, too.
            begun = -(-int(sums.exits.sum()) // kernel.shape.threads)
            launches[kernel] = max(launches[kernel], begun)
        return found, launches

    def _ticked(self, process: int, pid: int, gpu: int, columns: Any) -> None:
        """Add readings of clocks: multiprocessor numbers, their cycles, and the GPU's timer in ns.

        Another program with the same pid may use another GPU with the same number. So the readings distinguish the processes."""
        new = np.array(columns).astype(np.int64)
        new[0] |= process << 32
        kept = self._readings.get((pid, gpu))
        both = new if kept is None else np.concatenate([kept, new], axis=1)
        # Readings that are far apart give the most exact rate.
        half = READINGS // 2
        self._readings[pid, gpu] = (
            both if both.shape[1] <= READINGS else np.concatenate([both[:, :half], both[:, -half:]], axis=1)
        )
        self._rates.pop((pid, gpu), None)

    def _rate(self, kernel: KernelShape) -> CycleLength:
        """Return the length of a cycle. Without readings, it is 1 ns with an error of 100 %."""
        key = kernel.pid, kernel.gpu
        if kernel.pid in self.shapes.virtual:
            return CycleLength()
        if key not in self._rates:
            found = CycleLength.measured(*self._readings[key]) if key in self._readings else None
            self._rates[key] = found or CycleLength(1.0, 1.0)
        return self._rates[key]

    def _of(self, kernel: KernelShape) -> Exits:
        return self._exits.setdefault(kernel, Exits(kernel.shape))

    @property
    def _maps(self) -> tuple[str, ...]:
        chosen = any(extent != EVERYTHING for extents in self._ranges for extent in extents)
        some = ("groups",) if self._sampling else () if chosen else ("wholes",)
        return ("lateness", "blocks", "firsts", "rests", *some)

    def _sampled_blocks(self, kernel: KernelShape, number: int) -> np.ndarray:
        """Return a mask: the blocks whose warps are all in the sample of the launch with this number."""
        shape = kernel.shape
        return np.logical_and.reduce(self._chosen(kernel, number).reshape(shape.blocks, -1), axis=1)

    def _chosen(self, kernel: KernelShape, number: int) -> np.ndarray:
        """Return a mask of the blocks or warps that the launch with this number chose."""
        assert self._sampling is not None
        units = kernel.shape.blocks * (kernel.shape.warps if self._sampling.unit == "warp" else 1)
        return hashes(np.arange(units), number, self._sampling.seed) <= self._sampling.limit

    # --- records ---

    def _take_records(self, ring: RingRecords) -> None:
        records = ring.records
        order = np.argsort(records["launch"], kind="stable")
        borders = np.flatnonzero(np.diff(records["launch"][order])) + 1
        for part in np.split(order, borders) if len(order) else ():
            some = records[part]
            self._pending.setdefault((ring.process, int(some["launch"][0]) & NUMBER_MASK), []).append(some)

    def _tell(self, final: bool) -> None:
        """Pass the records of launches that are in the log to `each`."""
        assert self._each is not None
        told: dict[tuple[int, KernelShape], list[Any]] = {}
        late = len(self._pending) - MOST_PENDING
        for at, key in enumerate(list(self._pending)):
            kernel = self.shapes.of_launch.get(key)
            if kernel is not None:
                told.setdefault((key[0], kernel), []).extend(self._pending.pop(key))
            elif final or at < late:
                self.unknown += sum(map(len, self._pending.pop(key)))
        for (process, kernel), parts in told.items():
            self._each(kernel, *self._timed(process, kernel, np.concatenate(parts)))

    def _timed(self, process: int, kernel: KernelShape, records: Any) -> tuple[Any, Any]:
        """Return the records of a process with a valid thread number and a known time, and these times."""
        records = records[records["thread"] < kernel.shape.threads]
        times, known = self._host_times(process, kernel, records)
        self.unknown += int((~known).sum())
        return records[known], np.maximum(times[known], 0)

    def _fold(self, final: bool) -> None:
        """Add the launches that are complete or have been pending for too long; at the end, add all."""
        every, late = final, len(self._pending) - MOST_PENDING
        for at, key in enumerate(list(self._pending)):
            final = every or at < late
            kernel = self.shapes.of_launch.get(key)
            if kernel is None:
                if final:
                    self.unknown += sum(map(len, self._pending.pop(key)))
                continue
            shape = kernel.shape
            threads = _mask(kernel.block_dim, self._ranges[1])
            blocks, wanted = self._wanted(kernel, key[1], threads)
            if not final and sum(map(len, self._pending[key])) < wanted:
                continue
            records = np.concatenate(self._pending.pop(key))
            records = records[records["thread"] < shape.threads]
            if not len(records):
                continue
            if self._each is not None:
                self._each(kernel, *self._timed(key[0], kernel, records))
            few = records[:: max(1, len(records) // READINGS)]
            self._ticked(key[0], kernel.pid, kernel.gpu, [few[name] for name in ("sm", "clock", "time")])
            tick = self.shapes.ticks.get((key[0], kernel.gpu), 0)
            if not tick and kernel.pid not in self.shapes.virtual:
                tick = estimated_tick(records["time"].astype(np.int64))
            group = self._groups(kernel, key[1], records)
            partial = self._sampling is not None and self._sampling.one_in > 1
            self._of(kernel).take_records(
                records, self._rate(kernel), blocks, threads, float(tick), group, partial
            )
            if self._wants_heats:
                time = records["time"]
                if kernel in self.heats or len(self.heats) < MOST_HEATS:
                    heat = self.heats.setdefault(kernel, BlockHeat("", shape.blocks))
                    since = np.minimum(time - time.min(), np.uint64(FAR)).astype(np.int64)
                    heat.add(records["thread"].astype(np.int64) // shape.block_size, since)

    def _wanted(self, kernel: KernelShape, number: int, threads: np.ndarray | None) -> tuple[int, int]:
        """Return how many blocks of a launch should have records, and how many records there should be.

        threads: a mask of the chosen threads of a block.
        """
        shape, of_blocks = kernel.shape, _count(kernel.grid, self._ranges[0])
        there = np.ones(shape.block_size, bool) if threads is None else threads
        if self._sampling is None:
            return of_blocks, of_blocks * int(there.sum())
        if shape.blocks * shape.warps > MOST_UNITS:  # the process may claim any grid
            return 0, FAR
        chosen = self._chosen(kernel, number).reshape(shape.blocks, -1)
        mask = _mask(kernel.grid, self._ranges[0])
        if mask is not None:
            chosen &= mask[:, None]
        if self._sampling.unit == "block":
            return int(chosen.sum()), int(chosen.sum() * there.sum())
        of_warps = np.add.reduceat(there.astype(np.int64), np.arange(0, shape.block_size, shape.warp))
        return int(chosen.any(axis=1).sum()), int((chosen * of_warps).sum())

    def _groups(self, kernel: KernelShape, number: int, records: Any) -> np.ndarray | None:
        """Return the group of each record of a launch; None without sampling."""
        if self._sampling is None:
            return None
        block, own = np.divmod(records["thread"].astype(np.int64), kernel.shape.block_size)
        in_warps = self._sampling.unit == "warp"
        units = block * kernel.shape.warps + own // kernel.shape.warp if in_warps else block
        return (hashes(units, number, self._sampling.seed) % SAMPLE_GROUPS).astype(np.int64)

    # --- results ---

    def reports(
        self, since_last: bool, session: Session | None = None
    ) -> Iterator[tuple[KernelShape, ExitReport]]:
        """Yield a report of each kernel and launch shape with exits, those with the most waiting first.

        `since_last`: count only what is new since the last call. `session`: needed with sampling, for the sizes of the samples.
        """
        samples = samples_of(session, self._sampling, _kernel_of) if session is not None else {}
        lateness, launches = self._lateness() if not self._recorded else ({}, dict(self.shapes.launches))
        found = []
        for kernel in {**self._exits, **lateness}:
            exits, late = self._of(kernel), lateness.get(kernel)
            if late is not None and kernel in self._before:
                late = late.since(self._before[kernel])
            count = launches.get(kernel, 0) - self._reported.get(kernel, 0)
            sample = samples.get(kernel)
            if sample is not None:
                sample = sample.since(self._sampled_before.get(kernel))
            selected = _count(kernel.grid, self._ranges[0]), _count(kernel.block_dim, self._ranges[1])
            report = ExitReport.of(exits, count, self._rate(kernel), late, sample, selected)
            if report.exits:
                found.append((kernel, report))
                if since_last and sample is not None:
                    self._sampled_before[kernel] = samples[kernel]
            else:  # the exits were not read yet: count these launches in the report that has the exits
                launches[kernel] = self._reported.get(kernel, 0)
        if since_last:
            self._before, self._reported = lateness, launches
            for kernel, old in list(self._exits.items()):
                self._exits[kernel] = Exits(kernel.shape, seen=old.seen)
        found.sort(key=lambda one: -one[1].exits * max(lane.late.mean for lane in one[1].lanes))
        yield from found

    def pictures(self) -> list[BlockHeat]:
        """Return the pictures for --heatmap. With several processes or GPUs, the titles name them."""
        owners = OwnerColumns().see(self.heats)
        labels = names.labels((kernel.mangled for kernel in self.heats), full=True)
        for kernel, heat in self.heats.items():
            owner = f"{owners.name(kernel)}: " if owners.several else ""
            heat.title = owner + _heading(kernel, labels[kernel.mangled])
        return list(self.heats.values())

    def title(self, kernel: KernelShape, full: bool) -> str:
        """Return the heading of a report: the short name, or the full one with `full` or if kernels share the short name."""
        seen = {kernel.mangled, *(other.mangled for other in self._exits)}
        return names.labels(sorted(seen), None if full else 56, full)[kernel.mangled]

    def summary(self, session: Session) -> tuple[dict[str, Any], list[str]]:
        """Return the fields of the summary record, and the last lines of the text."""
        summary, more = session.summary(), self.losses(session)
        said = sum(more.get("records_lost", {}).values()) + more.get("records_incomplete", 0)
        other = max(0, summary["lost"] - said)
        lines = summary_lines(summary | {"lost": other}, LOST_RECORDS if self._recorded else LOST_SUMS)
        return summary | more, [
            *lines,
            *(part for line in self.loss_lines(more) for part in table.wrap(line)),
        ]

    def losses(self, session: Session) -> dict[str, Any]:
        """Return the summary record's fields about missing records and failed contexts."""
        if not self._recorded:
            return {"faults": sorted(self.shapes.faults)}
        shards = [shard for ring in session.ring_counts(RING) for shard in ring.shards]
        return {
            "records": sum(shard.received for shard in shards),
            "records_lost": {str(shard.shard): shard.lost for shard in shards if shard.lost},
            "records_incomplete": sum(shard.incomplete for shard in shards),
            "records_unknown": self.unknown,
            "log_lost": self.shapes.lost,
            "faults": sorted(self.shapes.faults),
        }

    def loss_lines(self, losses: Mapping[str, Any]) -> Iterator[str]:
        """Yield a sentence for each kind of loss in `losses`."""
        for pid in losses["faults"]:
            if "records" in losses:
                yield f"pid {pid}: a kernel failed; the results include only exits before the failure"
            else:
                yield f"pid {pid}: a kernel failed; counts that had not been read are lost (-e keeps them)"
        if lost := losses.get("records_lost"):
            shards = ", ".join(f"SM {shard}: {count:,}" for shard, count in list(lost.items())[:MOST_SHARDS])
            more = ", ..." if len(lost) > MOST_SHARDS else ""
            yield f"records dropped because a ring was full: {sum(lost.values()):,} ({shards}{more}); increase --ring-size"
        if incomplete := losses.get("records_incomplete"):
            yield f"records started but not finished: at most {incomplete:,}"
        if unknown := losses.get("records_unknown"):
            yield f"records skipped because their launch or time is unknown: {unknown:,}"


def _kernel_of(instance: Any) -> KernelShape:
    return KernelShape(
        instance.pid,
        instance.comm,
        instance.gpu,
        instance.mangled,
        instance.grid,
        instance.block_dim,
        instance.wave,
    )


def _heading(kernel: KernelShape, label: str) -> str:
    grid, block = (" x ".join(map(str, extents)) for extents in (kernel.grid, kernel.block_dim))
    return f"{label}: grid {grid}, block {block}"


def _mask(extents: Index, ranges: Ranges) -> np.ndarray | None:
    """Return a mask of the blocks of a grid, or threads of a block, in the ranges; None: all of them."""
    if all(first <= 0 and last >= extent - 1 for extent, (first, last) in zip(extents, ranges, strict=True)):
        return None
    x, y, z = (
        (np.arange(extent) >= first) & (np.arange(extent) <= last)
        for extent, (first, last) in zip(extents, ranges, strict=True)
    )
    chosen = (z[:, None, None] & y[:, None] & x).ravel()
    return None if chosen.all() else chosen


def _count(extents: Index, ranges: Ranges) -> int:
    """Return how many blocks of a grid are in the ranges."""
    x, y, z = (
        max(0, min(last, extent - 1) - max(first, 0) + 1)
        for extent, (first, last) in zip(extents, ranges, strict=True)
    )
    return x * y * z


# --- records as text ---


class ExitPrinter:
    """Writes every exit as it arrives: the `each` of an `ExitLog`.

    `form`: "json", "csv" or "text". Times in text count from the first exit.
    """

    def __init__(self, out: Output, form: str, owners: OwnerColumns | None = None) -> None:
        self._out, self._form = out, form
        self._owners = OwnerColumns() if owners is None else owners
        self._origin: int | None = None
        self._header = ""
        self._labels = names.Labels(ascii=True)
        if form == "csv":
            out.write(",".join(EXIT.columns) + "\n")

    def __call__(self, kernel: KernelShape, records: Any, times: Any) -> None:
        if not len(records):
            return
        if self._origin is None:
            self._origin = int(times.min())
        self._owners.see([kernel])
        if self._form == "text" and (header := _text_header(self._owners)) != self._header:
            self._out.write(header)  # again if a second process adds columns
            self._header = header
        for begin in range(0, len(records), CHUNK):
            few = slice(begin, begin + CHUNK)
            if self._form == "text":
                since = times[few] - self._origin
                self._out.write(_text(kernel, records[few], since, self._owners, self._labels))
            else:
                self._out.write(_for_programs(self._form, kernel, records[few], times[few]))


def _text_header(owners: OwnerColumns) -> str:
    if owners.processes:
        columns = f"{'TIME (ns)':>13} {'LAUNCH':>6} {'BLOCK':>7} {'THREAD':>6} {'LANE':>4} {'SM':>3} KERNEL"
    else:
        columns = f"{'TIME (ns)':>16} {'LAUNCH':>8} {'BLOCK':>8} {'THREAD':>6} {'LANE':>4} {'SM':>4} {'SITE':>4} KERNEL"
    return f"{owners.header}{columns}\n"


def _text(kernel: KernelShape, records: Any, since: Any, owners: OwnerColumns, labels: names.Labels) -> bytes:
    """Return lines of text, 80 columns wide. `since`: ns since the first exit."""
    thread = records["thread"].astype(np.int64)
    block, own = np.divmod(thread, kernel.shape.block_size)
    launch, lane = records["launch"] & np.uint64(NUMBER_MASK), own % kernel.shape.warp
    columns = owners.columns(kernel, len(records))
    if since.min() < 0:  # the records of another process came first
        since = bulk_text.Words([b"%d" % ns for ns in since.tolist()], np.arange(len(since)))
    if owners.processes:
        columns += [(since, 13), (launch, 6), (block, 7), (own, 6), (lane, 4), (records["sm"], 3)]
    else:
        columns += [
            (since, 16),
            (launch, 8),
            (block, 8),
            (own, 6),
            (lane, 4),
            (records["sm"], 4),
            (records["site"], 4),
        ]
    room = table.WIDTH - sum(abs(width) + 1 for _, width in columns)

    def text() -> bytes:
        return bulk_text.aligned(columns, labels.label(kernel.mangled, room).encode() + b"\n")

    made = text()
    if (too_long := made.index(b"\n") - table.WIDTH) > 0:  # numbers are wider than their columns
        room = max(room - too_long, table.LEAST)
        made = text()
    return made


def _for_programs(form: str, kernel: KernelShape, records: Any, times: Any) -> bytes:
    """Return lines of JSON or CSV."""
    thread = records["thread"].astype(np.int64)
    own = thread % kernel.shape.block_size
    numbers = (
        times,
        records["launch"],
        *kernel.shape.coordinates(thread),
        own // kernel.shape.warp,
        own % kernel.shape.warp,
    )
    columns = (*numbers, records["sm"], records["site"])
    known = values_of((*OWNER, KERNEL), kernel)
    return bulk_text.joined(EXIT.csv_texts(known) if form == "csv" else EXIT.json_texts(known), columns)

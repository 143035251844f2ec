"""What kernelretsnoop's device programs leave behind, as it comes: readings of maps, or records in rings → `Exits` of each kernel and
launch shape, records as text, pictures.

    log = ExitLog(…)
    for _ in session.intervals(…, tick=lambda: log.take(session)):
        for place, report in log.reports(session):
            …
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubpf import names
from gpubpf.exits.lateness import Clock, Exits, Lateness, Report
from gpubpf.session import operation_log
from gpubpf.session.clock import SmClock, estimated_tick
from gpubpf.session.kernel_shapes import COUNT, READINGS, Place, Places, source_of
from gpubpf.session.launch_shape import WARP, Index, Ranges
from gpubpf.show import bulk_text, cli, table
from gpubpf.show.heatmap import Heat
from gpubpf.show.owner_columns import Whose

if TYPE_CHECKING:
    from gpubpf.session.results import ProcessLog, Reading, RingRecords
    from gpubpf.session.session import Session
    from gpubpf.show.cli import Output

RING = "departures"  # where on_record writes
COARSE = 256  # ns; a timer that ticks so slowly is refined by the multiprocessors' clocks
CHUNK = 1 << 16  # records in one go
MOST_PENDING = 4096  # launches that are not whole
MOST_HEATS = 64
FAR = 1 << 60  # ns: farther apart is nothing that a GPU said

__all__ = ["ExitLog", "Place", "Printer", "source_of"]


class ExitLog:
    """Collects what a session gives. `recorded`: exits come as records of the ring, not added up in maps. `block`, `thread`: the
    ranges of --block and --thread. `heats`: whether pictures are wanted. `each`: called with what came, where every exit is wanted:
    the place, records, their times (ns of the host) and which of these are known. `whose`: is told of all places before `each` is."""

    def __init__(
        self,
        recorded: bool,
        block: Ranges,
        thread: Ranges,
        heats: bool = False,
        each: Callable[[Place, Any, Any], object] | None = None,
        whose: Whose | None = None,
    ) -> None:
        self._whose = Whose() if whose is None else whose
        self._recorded, self._ranges, self._each = recorded, (block, thread), each
        self._wants_heats = heats
        self._exits: dict[Place, Exits] = {}
        self.places = Places(recorded)
        self._reported: dict[Place, int] = {}
        self._latest: dict[tuple[int, int], Reading] = {}
        self._before: dict[Place, Lateness] = {}
        self._pending: dict[tuple[int, int], list[Any]] = {}  # records of launches that are not whole yet
        self._readings: dict[tuple[int, int], Any] = {}  # of clocks: [multiprocessor, cycles, ns]
        self._rates: dict[tuple[int, int], Clock] = {}  # what they say
        self.heats: dict[Place, Heat] = {}
        self.homeless = 0  # records of launches that nothing is known of

    def take(self, session: Session) -> None:
        """What came since the last time."""
        for log in session.logs():
            self._take_log(log)
        self._whose.see(self.places.launches)
        if not self._recorded:
            for reading in session.readings("lateness", "blocks", "warps"):
                self._take_reading(reading)
            return
        for ring in session.rings(RING):
            self._take_records(ring)
        if self._each is not None and not self._wants_heats:
            self._tell(session.stopped)
        else:
            self._fold(session.stopped)

    # --- the log: which kernel a launch is of, and the clocks ---

    def _take_log(self, log: ProcessLog) -> None:
        records = self.places.take(log)
        for record in records[records["kind"] == operation_log.CLOCK]:
            clock, gpu = record["clock"], log.gpus.get(int(record["context"]), 0)
            self._ticked(log.pid, gpu, [[clock[name].astype(np.int64)] for name in ("sm", "clock64", "gpu")])

    def _host_times(self, place: Place, records: Any) -> tuple[Any, Any]:
        """Host times of records, ns, and which of them are known."""
        time = records["time"].astype(np.int64)
        if place.pid in self.places.virtual:
            return time, np.ones(len(time), bool)
        clock = self.places.clock(place.pid, place.gpu)
        if (clock.tick or estimated_tick(time)) >= COARSE:
            columns = records["sm"].astype(np.int64), records["clock"].astype(np.int64), time
            time = SmClock(*columns, tick=clock.tick).gpu(*columns).at
        times = clock.host(time)
        return times.at, times.known

    # --- maps ---

    def _take_reading(self, reading: Reading) -> None:
        self._latest[reading.pid, reading.context] = reading
        for warps, blocks in zip(reading.instances["warps"], reading.instances["blocks"], strict=False):
            place = _place(blocks)
            if place != _place(warps) or not place.shape.threads:
                continue
            rounds = blocks.array.reshape(-1)["rounds"].reshape(-1)
            rounds = rounds[rounds["time_sm"] != 0]
            columns = (
                (rounds["time_sm"] & np.uint64(0xFFFF)).astype(np.int64),
                rounds["clock"].astype(np.int64),
                (rounds["time_sm"] >> np.uint64(16)).astype(np.int64),
            )
            self._ticked(place.pid, place.gpu, columns)
            chosen = _mask(place.grid, self._ranges[0])
            tick = float(self.places.ticks.get((place.pid, place.gpu), 0))
            self._of(place).take_maps(warps.array, blocks.array, self._rate(place), chosen, tick)

    def _lateness(self) -> tuple[dict[Place, Lateness], dict[Place, int]]:
        """All that the maps have added up, and the launches of each place."""
        found: dict[Place, Lateness] = {}
        launches: dict[Place, int] = {}
        for reading in self._latest.values():
            for late, blocks in zip(reading.instances["lateness"], reading.instances["blocks"], strict=False):
                place = _place(late)
                if place != _place(blocks):
                    continue
                here = Lateness.of_maps(late.array, blocks.array)
                found[place] = found[place].plus(here) if place in found else here
                launches[place] = launches.get(place, 0) + late.launches
        return found, launches

    def _ticked(self, pid: int, gpu: int, columns: Any) -> None:
        """Readings of multiprocessors' clocks and the timer: their numbers, cycles, ns."""
        new = np.array(columns).astype(np.int64)
        kept = self._readings.get((pid, gpu))
        both = new if kept is None else np.concatenate([kept, new], axis=1)
        # The oldest and the newest tell most.
        half = READINGS // 2
        self._readings[pid, gpu] = (
            both if both.shape[1] <= READINGS else np.concatenate([both[:, :half], both[:, -half:]], axis=1)
        )
        self._rates.pop((pid, gpu), None)

    def _rate(self, place: Place) -> Clock:
        """How long a cycle is; where nothing tells, 1 ns with an error of as much."""
        key = place.pid, place.gpu
        if place.pid in self.places.virtual:
            return Clock()
        if key not in self._rates:
            found = Clock.measured(*self._readings[key]) if key in self._readings else None
            self._rates[key] = found or Clock(1.0, 1.0)
        return self._rates[key]

    def _of(self, place: Place) -> Exits:
        return self._exits.setdefault(place, Exits(place.shape))

    # --- records ---

    def _take_records(self, ring: RingRecords) -> None:
        records = ring.records
        order = np.argsort(records["launch"], kind="stable")
        borders = np.flatnonzero(np.diff(records["launch"][order])) + 1
        for part in np.split(order, borders) if len(order) else ():
            some = records[part]
            self._pending.setdefault((ring.process, int(some["launch"][0]) & COUNT), []).append(some)

    def _tell(self, final: bool) -> None:
        """Gives `each` the records of launches that the log has."""
        assert self._each is not None
        told: dict[Place, list[Any]] = {}
        late = len(self._pending) - MOST_PENDING
        for at, key in enumerate(list(self._pending)):
            place = self.places.of_launch.get(key)
            if place is not None:
                told.setdefault(place, []).extend(self._pending.pop(key))
            elif final or at < late:
                self.homeless += sum(map(len, self._pending.pop(key)))
        for place, parts in told.items():
            self._each(place, *self._timed(place, np.concatenate(parts)))

    def _timed(self, place: Place, records: Any) -> tuple[Any, Any]:
        """Records whose number of the thread makes sense and whose time is known; their times."""
        records = records[records["thread"] < place.shape.threads]
        times, known = self._host_times(place, records)
        self.homeless += int((~known).sum())
        return records[known], np.maximum(times[known], 0)

    def _fold(self, final: bool) -> None:
        """Adds up the launches that are whole; at the end all, and before that those for which others wait too long."""
        every, late = final, len(self._pending) - MOST_PENDING
        for at, key in enumerate(list(self._pending)):
            final = every or at < late
            place = self.places.of_launch.get(key)
            if place is None:
                if final:
                    self.homeless += sum(map(len, self._pending.pop(key)))
                continue
            shape = place.shape
            blocks, threads = _mask(place.grid, self._ranges[0]), _mask(place.block_dim, self._ranges[1])
            wanted = (shape.blocks if blocks is None else int(blocks.sum())) * (
                shape.block_size if threads is None else int(threads.sum())
            )
            if not final and sum(map(len, self._pending[key])) < wanted:
                continue
            records = np.concatenate(self._pending.pop(key))
            records = records[records["thread"] < shape.threads]
            if not len(records):
                continue
            if self._each is not None:
                self._each(place, *self._timed(place, records))
            few = records[:: max(1, len(records) // READINGS)]
            self._ticked(place.pid, place.gpu, [few[name] for name in ("sm", "clock", "time")])
            tick = self.places.ticks.get((place.pid, place.gpu), 0)
            if not tick and place.pid not in self.places.virtual:
                tick = estimated_tick(records["time"].astype(np.int64))
            self._of(place).take_records(records, self._rate(place), blocks, threads, float(tick))
            if self._wants_heats:
                time = records["time"]
                if place in self.heats or len(self.heats) < MOST_HEATS:
                    heat = self.heats.setdefault(place, Heat(_heading(place), shape.blocks))
                    since = np.minimum(time - time.min(), np.uint64(FAR)).astype(np.int64)
                    heat.add(records["thread"].astype(np.int64) // shape.block_size, since)

    # --- results ---

    def reports(self, anew: bool) -> Iterator[tuple[Place, Report]]:
        """Of each kernel and launch shape of which threads left since the last time (`anew`), or ever; latest warps first."""
        lateness, launches = self._lateness() if not self._recorded else ({}, dict(self.places.launches))
        found = []
        for place in {**self._exits, **lateness}:
            exits, late = self._of(place), lateness.get(place)
            if late is not None and place in self._before:
                late = late.since(self._before[place])
            count = launches.get(place, 0) - self._reported.get(place, 0)
            report = Report.of(exits, count, self._rate(place), late)
            if report.exits:
                found.append((place, report))
        if anew:
            self._before, self._reported = lateness, launches
            for place, old in list(self._exits.items()):
                self._exits[place] = Exits(place.shape, seen=old.seen)
        found.sort(key=lambda one: -one[1].exits * max(lane.late.mean for lane in one[1].lanes))
        yield from found

    def pictures(self) -> list[Heat]:
        """What `--heatmap` draws; titles say whose a picture is where there are several processes or GPUs."""
        whose = Whose().see(self.heats)
        for place, heat in self.heats.items():
            heat.title = (f"{whose.name(place)}: " if whose.several else "") + _heading(place)
        return list(self.heats.values())

    def title(self, place: Place, full: bool) -> str:
        """What a report is headed with: the short name, in full where `full` or where another kernel has it, too."""
        name = names.demangle(place.mangled)
        others = {other.mangled for other in self._exits} - {place.mangled}
        shared = any(other.short == name.short for other in names.demangle_all(list(others)))
        return name.full if full else table.fit(name.full if shared else name.short, 56)

    def losses(self, session: Session) -> dict[str, Any]:
        """For the summary record: what of the records is missing, and whose context broke."""
        if not self._recorded:
            return {"faults": sorted(self.places.faults)}
        shards = [shard for ring in session.ring_counts(RING) for shard in ring.shards]
        return {
            "records": sum(shard.received for shard in shards),
            "records_lost": {str(shard.shard): shard.lost for shard in shards if shard.lost},
            "records_incomplete": sum(shard.incomplete for shard in shards),
            "records_unknown": self.homeless,
            "log_lost": self.places.lost,
            "faults": sorted(self.places.faults),
        }

    def loss_lines(self, losses: Mapping[str, Any]) -> Iterator[str]:
        """The same for people."""
        for pid in losses["faults"]:
            if "records" in losses:
                yield f"pid {pid}: a kernel failed; exits before that are in the numbers, none after it are"
            else:
                yield f"pid {pid}: a kernel failed, and what was not read before is lost; with -e it is kept"
        if lost := losses.get("records_lost"):
            shards = ", ".join(f"SM {shard}: {count:,}" for shard, count in list(lost.items())[:6])
            more = ", ..." if len(lost) > 6 else ""
            yield f"records lost for want of room: {sum(lost.values()):,} ({shards}{more}); give more with --ring-size"
        if incomplete := losses.get("records_incomplete"):
            yield f"records begun and never finished: at most {incomplete:,}"
        if unknown := losses.get("records_unknown"):
            yield f"records left out, because launch or time is not known: {unknown:,}"


def _place(instance: Any) -> Place:
    return Place(
        instance.pid, instance.comm, instance.gpu, instance.mangled, instance.grid, instance.block_dim
    )


def _heading(place: Place) -> str:
    grid, block = (" x ".join(map(str, extents)) for extents in (place.grid, place.block_dim))
    return f"{names.demangle(place.mangled).full}: grid {grid}, block {block}"


def _mask(extents: Index, ranges: Ranges) -> np.ndarray | None:
    """Which blocks of a grid, or threads of a block, the ranges choose; None: all."""
    if all(first <= 0 and last >= extent - 1 for extent, (first, last) in zip(extents, ranges, strict=True)):
        return None
    x, y, z = (
        (np.arange(extent) >= first) & (np.arange(extent) <= last)
        for extent, (first, last) in zip(extents, ranges, strict=True)
    )
    chosen = (z[:, None, None] & y[:, None] & x).ravel()
    return None if chosen.all() else chosen


# --- records as text ---


class Printer:
    """Writes every exit as it comes: what `each` of an `ExitLog` calls. JSON Lines, CSV or columns for people, whose times count from
    the first."""

    def __init__(self, out: Output, as_json: bool, as_csv: bool, whose: Whose | None = None) -> None:
        self._out, self._form = out, "json" if as_json else "csv" if as_csv else "text"
        self._whose = Whose() if whose is None else whose
        self._origin: int | None = None
        self._header: str | None = None

    def __call__(self, place: Place, records: Any, times: Any) -> None:
        if not len(records):
            return
        if self._origin is None:
            self._origin = int(times.min())
        self._whose.see([place])
        header = {"json": "", "csv": CSV_HEADER}.get(self._form) or _text_header(self._whose)
        if header != self._header and self._form != "json":  # again, where there are more columns now
            self._out.write(header)
        self._header = header
        for begin in range(0, len(records), CHUNK):
            few = slice(begin, begin + CHUNK)
            if self._form == "text":
                self._out.write(_text(place, records[few], times[few] - self._origin, self._whose))
            else:
                self._out.write(_for_programs(self._form, place, records[few], times[few]))


CSV_HEADER = (
    "ts_ns,pid,comm,gpu,kernel,launch,block_x,block_y,block_z,thread_x,thread_y,thread_z,warp,lane,sm,site\n"
)


def _text_header(whose: Whose) -> str:
    if whose.processes:
        columns = f"{'TIME (ns)':>13} {'LAUNCH':>6} {'BLOCK':>7} {'THREAD':>6} {'LANE':>4} {'SM':>3} KERNEL"
    else:
        columns = f"{'TIME (ns)':>16} {'LAUNCH':>8} {'BLOCK':>8} {'THREAD':>6} {'LANE':>4} {'SM':>4} {'SITE':>4} KERNEL"
    return f"{whose.header}{columns}\n"


def _text(place: Place, records: Any, since: Any, whose: Whose) -> bytes:
    """Lines for people. `since`: times from the first one of all, ns. In 80 columns, where there are several processes."""
    thread = records["thread"].astype(np.int64)
    block, own = np.divmod(thread, place.shape.block_size)
    launch, lane = records["launch"] & np.uint64(COUNT), own % WARP
    columns = whose.columns(place, len(records))
    if since.min() < 0:  # another process was read first
        since = bulk_text.Words([b"%d" % ns for ns in since.tolist()], np.arange(len(since)))
    kernel = cli.printable(names.demangle(place.mangled).short)
    if whose.processes:
        columns += [(since, 13), (launch, 6), (block, 7), (own, 6), (lane, 4), (records["sm"], 3)]
        kernel = table.fit(kernel, 10 if whose.gpus else 14)
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
        kernel = table.fit(kernel, 18) if whose.gpus else kernel[:40]
    return bulk_text.aligned(columns, kernel.encode("ascii", "replace") + b"\n")


def _for_programs(form: str, place: Place, records: Any, times: Any) -> bytes:
    """JSON Lines or CSV."""
    kernel = names.demangle(place.mangled).short
    thread = records["thread"].astype(np.int64)
    own = thread % place.shape.block_size
    numbers = (times, records["launch"], *place.shape.coordinates(thread), own // WARP, own % WARP)
    columns = (*numbers, records["sm"], records["site"])
    if form == "csv":
        middle = f",{cli.csv_cells((place.pid, place.comm, place.gpu, kernel))},".encode()
        return bulk_text.joined((b"", middle, *[b","] * 10, b"\n"), columns)
    common = {"pid": place.pid, "comm": place.comm, "gpu": place.gpu, "kernel": kernel}
    head = json.dumps({"type": "exit", **common}, separators=(",", ":"))[:-1].encode()
    texts = [head + b',"ts_ns":', b',"launch":', b',"block":[', b",", b",", b'],"thread":[', b",", b","]
    texts += [b'],"warp":', b',"lane":', b',"sm":', b',"site":', b"}\n"]
    return bulk_text.joined(texts, columns)

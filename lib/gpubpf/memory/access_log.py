"""Every memory access, as memtrace's device programs record it: the ring → columns, which sinks make text, files and pictures of.

    log = AccessLog(timed=False, held=False, sinks=[accesslog_text.Printer(out, "text")])
    for _ in session.intervals(…, tick=lambda: log.take(session, session.logs())):
        …

A record is 24 bytes, 32 with the time (accesstrace.py has the device's side): address; number of the launch in its process, and above
its 40 bits the width; number of the thread in its grid; site; space, kind and multiprocessor. What a launch is of comes from the
operation log, what a site is from the session. A process is untrusted: what makes no sense is counted, and left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gpubpf.ebpf.bytecode import WRITES
from gpubpf.session.kernel_shapes import COUNT, KernelShape, KernelShapes, site_names
from gpubpf.show import table
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf.show.results import Results
from gpubpf.show.summary_text import summary_lines

if TYPE_CHECKING:
    import argparse

    from gpubpf.session.launch_shape import Index
    from gpubpf.session.results import ProcessLog
    from gpubpf.session.session import Session
    from gpubpf.show.output import Output

    Array = np.ndarray[Any, Any]

RING, TIMED_RING = "accesses", "moments"  # where on_record and on_timed_record write
WIDTH_AT = 40  # bit of the launch's word
NO_SITE = 0xFFFF  # a number that a record has no room for
CHUNK = 1 << 16  # records in one go: their columns stay in the processor's cache
MOST_WAITING = 1 << 22  # records whose launch is not known yet
MOST_HELD = 1 << 22  # records that are kept to be sorted


@dataclass(frozen=True)
class Accesses:
    """Accesses of one kernel and launch shape, in the order in which they were recorded: arrays of one length.

    launch u64, in full; site u16 (NO_SITE: too large a number); kind and space u8 (places in bytecode.KINDS and SPACES); address u64;
    width u32, bytes; thread i64, its number in the grid; sm u16; time i64 | None: ns of the GPU's clock.
    """

    place: KernelShape
    launch: Array
    site: Array
    kind: Array
    space: Array
    address: Array
    width: Array
    thread: Array
    sm: Array
    time: Array | None

    def __len__(self) -> int:
        return len(self.address)

    @classmethod
    def of(cls, place: KernelShape, process: int, records: Array) -> Accesses:
        """From records of the ring (any structured array with its fields) of a process's number in the session."""
        word, how = records["launch"], records["how"]
        timed = "time" in (records.dtype.names or ())
        return cls(
            place,
            (word & np.uint64(COUNT)) | np.uint64(process << 40),
            np.ascontiguousarray(records["site"]),
            (how >> 2).astype(np.uint8) & np.uint8(3),
            how.astype(np.uint8) & np.uint8(3),
            np.ascontiguousarray(records["address"]),
            (word >> np.uint64(WIDTH_AT)).astype(np.uint32),
            records["thread"].astype(np.int64),
            how >> 4,
            records["time"].astype(np.int64) if timed else None,
        )

    def coordinates(self) -> tuple[Array, ...]:
        """Block x, y, z and thread x, y, z: i64."""
        place = self.place
        block, thread = divided(self.thread, place.shape.block_size)
        return (*_unravelled(block, place.grid), *_unravelled(thread, place.block_dim))


def divided(numbers: Array, by: int) -> tuple[Array, Array]:
    """Quotient and remainder; NumPy is quick at dividing by a constant."""
    if by == 1:
        return numbers, np.zeros_like(numbers)
    quotient = numbers // by
    return quotient, numbers - quotient * by


def _unravelled(numbers: Array, extents: Index) -> tuple[Array, Array, Array]:
    if extents[1] == extents[2] == 1:
        nothing = np.zeros_like(numbers)
        return numbers, nothing, nothing
    rest, x = divided(numbers, extents[0])
    z, y = divided(rest, extents[1])
    return x, y, z


@dataclass(frozen=True)
class Where:
    """What is known of the sites of a kernel. `texts` has for each number what it is called (``scale.cu:17``, ``PTX line 40``), and
    last "?"; `sources` and `lines` likewise the source and the line of PTX, `writes` whether an access there writes."""

    texts: tuple[str, ...]
    sources: tuple[str | None, ...]
    lines: tuple[int | None, ...]
    writes: tuple[bool, ...]

    @classmethod
    def of(cls, sites: Mapping[int, Any]) -> Where:
        count = min(max(sites, default=-1) + 1, NO_SITE)
        source = site_names(sites)
        texts = [source(number) or "?" for number in range(count)]
        known = [sites.get(number) for number in range(count)]
        return cls(
            (*texts, "?"),
            (
                *(text if site and site.source else None for text, site in zip(texts, known, strict=True)),
                None,
            ),
            (*(site.line if site else None for site in known), None),
            (*(bool(site and site.effect & WRITES) for site in known), False),
        )

    def codes(self, site: Array) -> Array:
        """KernelShapes in `texts` of numbers of sites."""
        return np.minimum(site, len(self.texts) - 1)


class Sink(Protocol):
    """Takes accesses as they come. `times`: ns of the host's clock, where they are known, or None."""

    def __call__(self, accesses: Accesses, where: Where, times: Array | None) -> object: ...


class AccessLog:
    """Collects records and gives them to sinks, as soon as the log has their launches.

    timed: they come with times, in the ring of that name. held: they are kept until the end, and given in the order of launch, time
    and thread, since on the virtual clock what is printed repeats (of more than MOST_HELD some earlier). host_times: sinks want them.
    whose: is told of all places before sinks are.
    """

    def __init__(
        self,
        timed: bool,
        held: bool,
        sinks: Sequence[Sink],
        host_times: bool = False,
        whose: OwnerColumns | None = None,
    ) -> None:
        self._whose = OwnerColumns() if whose is None else whose
        self.ring = TIMED_RING if timed else RING
        self.places = KernelShapes(numbered=True)
        self._held, self._sinks, self._host_times = held, sinks, host_times
        self._waiting: list[tuple[int, Array]] = []  # with the process's number
        self._where: dict[tuple[int, str], Where] = {}
        self.unknown = 0  # records of launches that nothing is known of, or of threads that are not there
        self.given = 0

    def take(self, session: Session, logs: Sequence[ProcessLog]) -> None:
        """What came since the last time. `logs`: what `session.logs()` gave."""
        for log in logs:
            self.places.take(log)
        self._whose.see(self.places.launches)
        parts = [*self._waiting, *((ring.process, ring.records) for ring in session.rings(self.ring))]
        self._waiting = []
        last = session.stopped
        if self._held and not last and sum(len(records) for _, records in parts) <= MOST_HELD:
            self._waiting = parts
            return
        if self._held:
            parts = _sorted(parts)
        for process, records in parts:
            for at in range(0, len(records), CHUNK):
                self._give(session, process, records[at : at + CHUNK])
        if last:
            self.unknown += sum(len(records) for _, records in self._waiting)
            self._waiting = []
        while sum(len(records) for _, records in self._waiting) > MOST_WAITING:
            self.unknown += len(self._waiting.pop(0)[1])

    def _give(self, session: Session, process: int, records: Array) -> None:
        rest, placed = self._placed(process, records)
        if len(rest):
            self._waiting.append((process, rest))
        for place, some in placed:
            threads = place.shape.threads  # a record has 32 bits for their numbers
            there = some["thread"] < (threads if threads <= 1 << 32 else 0)
            if not there.all():
                self.unknown += int((~there).sum())
                some = some[there]
            if not len(some):
                continue
            self.given += len(some)
            accesses = Accesses.of(place, process, some)
            where = self._where_of(session, place)
            for part, times in self._clocked(accesses):
                for sink in self._sinks:
                    sink(part, where, times)

    def _placed(self, process: int, records: Array) -> tuple[Array, list[tuple[KernelShape, Array]]]:
        """Records whose launch is not known; the others by place, each in their order."""
        count = records["launch"] & np.uint64(COUNT)
        known = self.places.of_launch
        if len(count) and count[0] == count[-1] and (count == count[0]).all():
            place = known.get((process, int(count[0])))
            return (records, []) if place is None else (records[:0], [(place, records)])
        numbers, codes = _distinct(count)
        found: dict[KernelShape, int] = {}
        code_of = np.empty(len(numbers), np.uint16)
        for at, number in enumerate(numbers.tolist()):
            place = known.get((process, number))
            code_of[at] = 0 if place is None else found.setdefault(place, len(found) + 1)
        if len(found) == 1 and code_of.all():
            return records[:0], [(next(iter(found)), records)]
        codes = code_of[codes]
        order = np.argsort(codes, kind="stable")
        borders = np.searchsorted(codes[order], np.arange(len(found) + 2))
        # As rows of words, which NumPy moves faster than records.
        shape, strides = (len(records), records.itemsize // 8), (records.strides[0], 8)
        rows = np.lib.stride_tricks.as_strided(records["address"], shape, strides)
        ordered = np.take(rows, order, axis=0).reshape(-1).view(records.dtype)
        parts = [ordered[first:end] for first, end in itertools.pairwise(borders)]
        return parts[0], list(zip(found, parts[1:], strict=True))

    def _where_of(self, session: Session, place: KernelShape) -> Where:
        key = place.pid, place.mangled
        if key not in self._where:
            where = Where.of(session.sites(place.mangled, place.pid))
            if len(where.texts) == 1:
                return where  # they may come yet
            self._where[key] = where
        return self._where[key]

    def _clocked(self, accesses: Accesses) -> Iterator[tuple[Accesses, Array | None]]:
        """With host times where these are wanted and known."""
        time, place = accesses.time, accesses.place
        if time is None or not self._host_times:
            yield accesses, None
        elif place.pid in self.places.virtual:
            yield accesses, time
        else:
            times = self.places.clock(place.pid, place.gpu).host(time)
            known = times.known
            if known.all():
                yield accesses, np.maximum(times.at, 0)
                return
            yield _chosen(accesses, known), np.maximum(times.at[known], 0)
            yield _chosen(accesses, ~known), None

    # --- what is missing ---

    def show_end(self, session: Session, args: argparse.Namespace, out: Output) -> None:
        """The last lines, or the summary record."""
        summary, more = session.summary(), self.losses(session)
        other = summary["lost"] - sum(more["records_lost"].values()) - more["records_incomplete"]
        lines = [
            f"{table.count(self.given, 'access')} of {table.count(more['launches'], 'launch')} recorded",
            *summary_lines(summary | {"lost": max(0, other)}),
            *(part for line in self.loss_lines(more) for part in table.wrap(line)),
        ]
        Results(args, out).end(summary | more, lines)

    def losses(self, session: Session) -> dict[str, Any]:
        """For the summary record."""
        shards = [shard for ring in session.ring_counts(self.ring) for shard in ring.shards]
        lost: dict[str, int] = {}
        for shard in shards:
            if shard.lost:
                lost[str(shard.shard)] = lost.get(str(shard.shard), 0) + shard.lost
        return {
            "accesses": self.given,
            "launches": sum(self.places.launches.values()),
            "records": sum(shard.received for shard in shards),
            "records_lost": lost,
            "records_incomplete": sum(shard.incomplete for shard in shards),
            "records_unknown": self.unknown,
            "log_lost": self.places.lost,
            "faults": sorted(self.places.faults),
        }

    def loss_lines(self, losses: Mapping[str, Any]) -> Iterator[str]:
        """The same for people."""
        for pid in losses["faults"]:
            yield f"pid {pid}: a kernel failed; what it accessed before that is there, nothing after it is"
        if lost := losses["records_lost"]:
            total, whole = sum(lost.values()), losses["records"] + sum(lost.values())
            yield (
                f"accesses lost for want of room: {total:,} of {whole:,}; narrow it with --kernel, --launch, --block, --site or "
                "--warps, or give more room with --ring-size"
            )
        if incomplete := losses["records_incomplete"]:
            yield f"accesses begun to be written and never finished: at most {incomplete:,}"
        if unknown := losses["records_unknown"]:
            yield f"accesses left out, because their launch is not known: {unknown:,}"


def _distinct(count: Array) -> tuple[Array, Array]:
    """Distinct numbers, ascending, and the place of each element's in them. Launches have neighbouring numbers: no need to sort."""
    low = count.min()
    away = count - low
    span = int(away.max()) + 1
    if span > 4 * len(count):
        return np.unique(count, return_inverse=True)
    there = np.zeros(span, bool)
    there[away] = True
    numbers = np.flatnonzero(there)
    code_of = np.cumsum(there) - 1
    return numbers.astype(np.uint64) + low, code_of[away]


def _chosen(accesses: Accesses, mask: Array) -> Accesses:
    columns: dict[str, Any] = {
        name: None if (column := getattr(accesses, name)) is None else column[mask]
        for name in accesses.__dataclass_fields__
        if name != "place"
    }
    return Accesses(accesses.place, **columns)


def _sorted(parts: list[tuple[int, Array]]) -> list[tuple[int, Array]]:
    """By process; in each by launch, time and thread."""
    by_process: dict[int, list[Array]] = {}
    for process, records in parts:
        by_process.setdefault(process, []).append(records)
    made = []
    for process in sorted(by_process):
        records = np.concatenate(by_process[process])
        time = records["time"] if "time" in (records.dtype.names or ()) else np.zeros(len(records))
        order = np.lexsort((records["site"], records["thread"], time, records["launch"] & np.uint64(COUNT)))
        made.append((process, records[order]))
    return made

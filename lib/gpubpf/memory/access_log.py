"""Decode the records of memory accesses into columns, and pass them to sinks: text, Parquet files, heatmaps.

    log = AccessLog(timed=False, keep_until_end=False, sinks=[access_text.AccessPrinter(out, "text")])
    for _ in session.intervals(…, tick=lambda: log.take(session, session.logs())):
        …

access_trace.py has the device programs that write the records. A record has 24 bytes, or 32 with a time: the address; the number of
the launch in its process (NUMBER_BITS), with the width above it; the number of the thread in its grid; the site; the space, kind and
multiprocessor. The operation log has the kernel and shape of each launch, and the session has the sites. The traced process is not
trusted: impossible records are counted and left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gpubpf.agent.definitions import NUMBER_BITS, NUMBER_MASK
from gpubpf.ebpf.bytecode import WRITES
from gpubpf.record import Record
from gpubpf.records.kernel_shapes import KernelShape, KernelShapes, site_names
from gpubpf.show import table
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf.show.summary_text import summary_lines

if TYPE_CHECKING:
    from gpubpf.records.launch_shape import Index
    from gpubpf.records.results import ProcessLog
    from gpubpf.session.session import Session
    from gpubpf.show.result_writer import ResultWriter

    Array = np.ndarray[Any, Any]

RING, TIMED_RING = "accesses", "moments"  # the rings that on_record and on_timed_record write to
SITE_TOO_LARGE = 0xFFFF  # stands for every site number that does not fit into a record
CHUNK = 1 << 16  # records to decode together: their columns stay in the CPU cache
MOST_WAITING = 1 << 22  # maximum records whose launch is not known yet
MOST_HELD = 1 << 22  # maximum records to keep until the end for sorting


class Accesses(Record):
    """Accesses of one kernel and launch shape, in the order of their records. All arrays have the same length.

    launch   u64: number of the launch in its process, with the process's number above it
    site     u16; SITE_TOO_LARGE if the number does not fit
    kind     u8: index into bytecode.KINDS
    space    u8: index into bytecode.SPACES
    address  u64
    width    u32: bytes of the access
    thread   i64: number of the thread in its grid
    sm       u16: multiprocessor
    time     i64: ns of the GPU's clock; None if records have no times
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
        """Return the accesses in `records`, a structured array with the fields of the ring.

        `process`: the number of the process in the session.
        """
        word, how = records["launch"], records["how"]
        timed = "time" in (records.dtype.names or ())
        return cls(
            place,
            (word & np.uint64(NUMBER_MASK)) | np.uint64(process << NUMBER_BITS),
            np.ascontiguousarray(records["site"]),
            (how >> 2).astype(np.uint8) & np.uint8(3),
            how.astype(np.uint8) & np.uint8(3),
            np.ascontiguousarray(records["address"]),
            (word >> np.uint64(NUMBER_BITS)).astype(np.uint32),
            records["thread"].astype(np.int64),
            how >> 4,
            records["time"].astype(np.int64) if timed else None,
        )

    def coordinates(self) -> tuple[Array, ...]:
        """Return six i64 arrays: block x, y, z and thread x, y, z."""
        place = self.place
        block, thread = quotient_and_remainder(self.thread, place.shape.block_size)
        return (*_unravel(block, place.grid), *_unravel(thread, place.block_dim))


def quotient_and_remainder(numbers: Array, by: int) -> tuple[Array, Array]:
    """Return the quotients and remainders of `numbers` divided by `by`. NumPy divides by a constant faster than divmod does."""
    if by == 1:
        return numbers, np.zeros_like(numbers)
    quotient = numbers // by
    return quotient, numbers - quotient * by


def _unravel(numbers: Array, extents: Index) -> tuple[Array, Array, Array]:
    """Return the x, y and z indices of linear indices into a box of these extents."""
    if extents[1] == extents[2] == 1:
        nothing = np.zeros_like(numbers)
        return numbers, nothing, nothing
    rest, x = quotient_and_remainder(numbers, extents[0])
    z, y = quotient_and_remainder(rest, extents[1])
    return x, y, z


class SiteLabels(Record):
    """What is known about the sites of a kernel. Each tuple is indexed by site number; its last element is for unknown sites.

    texts    source line or PTX line (``scale.cu:17``, ``PTX line 40``); "?" if unknown
    sources  source line, or None
    lines    line in the PTX, or None
    writes   whether the access writes
    """

    texts: tuple[str, ...]
    sources: tuple[str | None, ...]
    lines: tuple[int | None, ...]
    writes: tuple[bool, ...]

    @classmethod
    def of(cls, sites: Mapping[int, Any]) -> SiteLabels:
        """Return the labels of a kernel's sites. `sites`: the sites by number."""
        count = min(max(sites, default=-1) + 1, SITE_TOO_LARGE)
        source = site_names(sites)
        texts = [source(number) or "?" for number in range(count)]
        known = [sites.get(number) for number in range(count)]
        return cls(
            (*texts, "?"),
            (
                *(text if site and site.source else None for text, site in zip(texts, known, strict=True)),
                None,
            ),
            (*(site.line or None if site else None for site in known), None),
            (*(bool(site and site.effect & WRITES) for site in known), False),
        )

    def codes(self, site: Array) -> Array:
        """Return the indices into `texts` for site numbers."""
        return np.minimum(site, len(self.texts) - 1)


class AccessSink(Protocol):
    """Takes accesses as they arrive. `times`: in ns of the host's clock; None if they are unknown."""

    def __call__(self, accesses: Accesses, where: SiteLabels, times: Array | None) -> object: ...


class AccessLog:
    """Collects records, and delivers them to sinks once the operation log has their launches.

    timed           records have times and come from TIMED_RING
    keep_until_end  deliver at the end, in the order of launch, time and thread. On the virtual clock, this makes output repeatable.
                    With more than MOST_HELD records, some are delivered earlier.
    host_times      sinks need times of the host's clock
    owners          learns about processes and GPUs before the sinks do
    """

    def __init__(
        self,
        timed: bool,
        keep_until_end: bool,
        sinks: Sequence[AccessSink],
        host_times: bool = False,
        owners: OwnerColumns | None = None,
    ) -> None:
        self._owners = OwnerColumns() if owners is None else owners
        self.ring = TIMED_RING if timed else RING
        self.places = KernelShapes(numbered=True, builds=True)
        self._keep_until_end, self._sinks, self._host_times = keep_until_end, sinks, host_times
        self._waiting: list[tuple[int, Array]] = []  # (process number, records)
        self._labels: dict[tuple[int, str, int | None], SiteLabels] = {}
        self.unknown = 0  # records left out because their launch is unknown or their thread does not exist
        self.delivered = 0  # records that were passed to the sinks

    def take(self, session: Session, logs: Sequence[ProcessLog]) -> None:
        """Read the rings, and deliver what can be delivered. `logs`: the result of `session.logs()`."""
        for log in logs:
            self.places.take(log)
        self._owners.see(self.places.launches)
        parts = [*self._waiting, *((ring.process, ring.records) for ring in session.rings(self.ring))]
        self._waiting = []
        last = session.stopped
        if self._keep_until_end and not last and sum(len(records) for _, records in parts) <= MOST_HELD:
            self._waiting = parts
            return
        if self._keep_until_end:
            parts = _sort_records(parts)
        for process, records in parts:
            for at in range(0, len(records), CHUNK):
                self._deliver(session, process, records[at : at + CHUNK])
        if last:
            self.unknown += sum(len(records) for _, records in self._waiting)
            self._waiting = []
        while sum(len(records) for _, records in self._waiting) > MOST_WAITING:
            self.unknown += len(self._waiting.pop(0)[1])

    def _deliver(self, session: Session, process: int, records: Array) -> None:
        """Pass records of one process to the sinks. Records whose launch is unknown wait."""
        rest, placed = self._group_by_shape(process, records)
        if len(rest):
            self._waiting.append((process, rest))
        for place, some in placed:
            threads = place.shape.threads  # a record has 32 bits for a thread's number
            there = some["thread"] < (threads if threads <= 1 << 32 else 0)
            if not there.all():
                self.unknown += int((~there).sum())
                some = some[there]
            if not len(some):
                continue
            self.delivered += len(some)
            accesses = Accesses.of(place, process, some)
            where = self._labels_of(session, process, place)
            for part, times in self._with_host_times(process, accesses):
                for sink in self._sinks:
                    sink(part, where, times)

    def _group_by_shape(self, process: int, records: Array) -> tuple[Array, list[tuple[KernelShape, Array]]]:
        """Return the records whose launch is unknown, and the others by kernel and launch shape. Order is preserved."""
        count = records["launch"] & np.uint64(NUMBER_MASK)
        known = self.places.of_launch
        if len(count) and count[0] == count[-1] and (count == count[0]).all():
            place = known.get((process, int(count[0])))
            return (records, []) if place is None else (records[:0], [(place, records)])
        numbers, codes = _distinct_launches(count)
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
        # Move records as rows of words, which NumPy does faster.
        shape, strides = (len(records), records.itemsize // 8), (records.strides[0], 8)
        rows = np.lib.stride_tricks.as_strided(records["address"], shape, strides)
        ordered = np.take(rows, order, axis=0).reshape(-1).view(records.dtype)
        parts = [ordered[first:end] for first, end in itertools.pairwise(borders)]
        return parts[0], list(zip(found, parts[1:], strict=True))

    def _labels_of(self, session: Session, process: int, place: KernelShape) -> SiteLabels:
        """Return the labels of a kernel's sites, from the cache if possible."""
        key = process, place.mangled, place.build
        if key not in self._labels:
            where = SiteLabels.of(session.sites(place.mangled, place.pid, place.build))
            if len(where.texts) == 1:
                return where  # do not cache: the kernel's sites may become known later
            self._labels[key] = where
        return self._labels[key]

    def _with_host_times(self, process: int, accesses: Accesses) -> Iterator[tuple[Accesses, Array | None]]:
        """Yield the accesses of a process with their host times. Accesses without a known time are a separate part, with None."""
        time, place = accesses.time, accesses.place
        if time is None or not self._host_times:
            yield accesses, None
        elif place.pid in self.places.virtual:
            yield accesses, time
        else:
            times = self.places.clock(process, place.gpu).host(time)
            known = times.known
            if known.all():
                yield accesses, np.maximum(times.at, 0)
                return
            yield _select(accesses, known), np.maximum(times.at[known], 0)
            yield _select(accesses, ~known), None

    # --- losses ---

    def show_end(self, session: Session, results: ResultWriter) -> None:
        """Print the last lines, or write the summary record."""
        summary, more = session.summary(), self.losses(session)
        other = summary["lost"] - sum(more["records_lost"].values()) - more["records_incomplete"]
        lines = [
            f"{table.count(self.delivered, 'access')} of {table.count(more['launches'], 'launch')} recorded",
            *summary_lines(summary | {"lost": max(0, other)}),
            *(part for line in self.loss_lines(more) for part in table.wrap(line)),
        ]
        results.end(summary | more, lines)

    def losses(self, session: Session) -> dict[str, Any]:
        """Return the summary record's fields about accesses and losses."""
        shards = [shard for ring in session.ring_counts(self.ring) for shard in ring.shards]
        lost: dict[str, int] = {}
        for shard in shards:
            if shard.lost:
                lost[str(shard.shard)] = lost.get(str(shard.shard), 0) + shard.lost
        return {
            "accesses": self.delivered,
            "launches": sum(self.places.launches.values()),
            "records": sum(shard.received for shard in shards),
            "records_lost": lost,
            "records_incomplete": sum(shard.incomplete for shard in shards),
            "records_unknown": self.unknown,
            "log_lost": self.places.lost,
            "faults": sorted(self.places.faults),
        }

    def loss_lines(self, losses: Mapping[str, Any]) -> Iterator[str]:
        """Yield a sentence for each kind of loss in `losses`."""
        for pid in losses["faults"]:
            yield f"pid {pid}: a kernel failed; accesses before the failure are recorded, later ones are not"
        if lost := losses["records_lost"]:
            total, whole = sum(lost.values()), losses["records"] + sum(lost.values())
            yield (
                f"accesses lost because the ring was full: {total:,} of {whole:,}; record fewer with --kernel, --launch, --block, "
                "--site or --warps, or enlarge the ring with --ring-size"
            )
        if incomplete := losses["records_incomplete"]:
            yield f"accesses whose records were never completed: at most {incomplete:,}"
        if unknown := losses["records_unknown"]:
            yield f"accesses left out because their launch is unknown: {unknown:,}"


def _distinct_launches(count: Array) -> tuple[Array, Array]:
    """Return the distinct launch numbers in ascending order, and the index of each element among them.

    Launch numbers of one reading are close together, so a table of flags replaces sorting.
    """
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


def _select(accesses: Accesses, mask: Array) -> Accesses:
    """Return the accesses for which `mask` is true."""
    columns: dict[str, Any] = {
        name: None if (column := getattr(accesses, name)) is None else column[mask]
        for name in accesses.__match_args__
        if name != "place"
    }
    return Accesses(accesses.place, **columns)


def _sort_records(parts: list[tuple[int, Array]]) -> list[tuple[int, Array]]:
    """Return one array per process, in ascending order, with its records sorted by launch, time, thread and site."""
    by_process: dict[int, list[Array]] = {}
    for process, records in parts:
        by_process.setdefault(process, []).append(records)
    made = []
    for process in sorted(by_process):
        records = np.concatenate(by_process[process])
        time = records["time"] if "time" in (records.dtype.names or ()) else np.zeros(len(records))
        order = np.lexsort(
            (records["site"], records["thread"], time, records["launch"] & np.uint64(NUMBER_MASK))
        )
        made.append((process, records[order]))
    return made

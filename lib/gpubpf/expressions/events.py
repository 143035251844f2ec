"""What gputrace prints: the records of its device programs, and the launches of the operation log, as events.

events = Events(wanted, kernels)
for _ in session.intervals(…, tick=lambda: printer(events.take(session))):
    …
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf import names
from gpubpf.agent.definitions import NUMBER_MASK
from gpubpf.expressions.counts import passes
from gpubpf.expressions.evaluate import evaluate
from gpubpf.expressions.launches import Launch, Launches
from gpubpf.expressions.specs import Trace
from gpubpf.record import Record
from gpubpf.records.fields import KERNEL, OWNER, STAMP
from gpubpf.records.kernel_shapes import KernelShapes, site_names
from gpubpf.session.records import BUDGET, LOG_LOST, NOT_PROBED, RINGS, VERIFIED_BY, of_every_tool
from gpubpf.show import table
from gpubpf.show.fields import Field, Fields, many
from gpubpf.show.output import csv_cells
from gpubpf.show.summary_text import summary_lines

if TYPE_CHECKING:
    from gpubpf.records.kernel_shapes import KernelShape
    from gpubpf.records.launch_shape import Index
    from gpubpf.records.results import RingRecords
    from gpubpf.session.session import Session
    from gpubpf.show.output import Output
    from gpubpf.show.owner_columns import OwnerColumns
    from gpubpf.show.result_writer import ResultWriter

RING = "events"
MOST_PENDING = 4096  # launches whose records wait for their launch in the log


class Event(Record):
    """An event: a lane (at a barrier, a warp) at a place in a kernel, or a launch. A launch has no block, thread and source.

    time: ns on the clock of the results; None: unknown.
    values: values of the arguments, in their order.
    wave: the lanes of a wave, on an AMD GPU.
    """

    pid: int
    comm: str
    gpu: int
    wave: int | None
    wanted: Trace
    mangled: str
    launch: int
    time: int | None
    block: Index | None
    thread: Index | None
    source: str | None
    values: tuple[int | float | str, ...]

    @property
    def kernel(self) -> str:
        """The name of the kernel without template arguments and parameters."""
        return names.demangle(self.mangled).short

    @property
    def text(self) -> str:
        """The values as FORMAT shows them."""
        return self.wanted.format.show(self.values)


EVENT = Fields(
    "event",
    "One for each event.",
    (
        *OWNER,
        Field("spec", "string", "with its filter", get="wanted.spec.text"),
        KERNEL,
        Field(
            "launch",
            "integer",
            "its number in the process; in other tools, a number that is unique in the measurement",
        ),
        Field("block", "index?", "index, [x,y,z]; null for a launch"),
        Field("thread", "index?", "index, [x,y,z]; null for a launch"),
        Field("source", "string?", "file and line, or line of the PTX; null for a launch"),
        Field(
            "args",
            many({"type": ["number", "string"]}),
            "the values of the EXPRs: numbers, as strings those of %s and %p, and NaN and infinities: nan, inf, -inf",
            get=lambda one: one.wanted.format.json(one.values),
        ),
        Field("text", "string", "the values as FORMAT shows them"),
        Field("ts_ns", "ns?", f"{STAMP.meaning}; null if it is not known", when="with -T"),
    ),
    csv="pid comm gpu spec kernel launch block thread source text",
)
RECORDS = (EVENT, *of_every_tool(BUDGET, NOT_PROBED, LOG_LOST, *RINGS, VERIFIED_BY))


class Events:
    """Collects events.

    kernels: for each specification its globs; no globs: every kernel.
    unknown: number of records that were skipped because their launch is unknown."""

    def __init__(self, wanted: Sequence[Trace], kernels: Sequence[tuple[str, ...]]) -> None:
        self._wanted, self._kernels = wanted, kernels
        self._of_launches = [n for n, one in enumerate(wanted) if one.spec.point.of_launch]
        self._shapes, self._launches = KernelShapes(numbered=True, builds=True), Launches()
        self._pending: dict[tuple[int, int], list[Any]] = {}
        self._sources: dict[tuple[int, str, int | None], Callable[[int], str | None]] = {}
        self.unknown = 0

    def take(self, session: Session) -> list[Event]:
        """Return the events since the last call, by launch and time."""
        found: list[tuple[Any, Event]] = []
        # Read the rings before the log, so that the log has the launches of almost all records.
        for ring in session.rings(RING) if session.has_map(RING) else ():
            self._keep(ring)
        for log in session.logs():
            self._shapes.take(log)
            for launch in self._launches.take(log) if self._of_launches else ():
                order = (log.process, launch.values["launch"], 0, 0)
                found += ((order, event) for event in self._launched(launch))
        found += self._known(session)
        found.sort(key=lambda one: one[0])
        return [event for _, event in found]

    def _launched(self, launch: Launch) -> Iterator[Event]:
        for number in self._of_launches:
            one = self._wanted[number]
            if not names.chosen(self._kernels[number], launch.mangled) or not passes(one.spec, launch.values):
                continue
            kernel = names.demangle(launch.mangled).short
            values = tuple(
                kernel if isinstance(node, str) else evaluate(node, launch.values) for node in one.arguments
            )
            owner = (launch.pid, launch.comm, launch.gpu, launch.wave, one, launch.mangled)
            yield Event(*owner, launch.values["launch"], launch.values["call_ns"], None, None, None, values)

    # --- records ---

    def _keep(self, ring: RingRecords) -> None:
        """Keep new records by launch."""
        import numpy as np

        records = ring.records
        launches = records["place"]["launch"] & np.uint64(NUMBER_MASK)
        order = np.argsort(launches, kind="stable")
        for part in np.split(order, np.flatnonzero(np.diff(launches[order])) + 1) if len(order) else ():
            self._pending.setdefault((ring.process, int(launches[part[0]])), []).append(records[part])

    def _known(self, session: Session) -> Iterator[tuple[Any, Event]]:
        """Yield the events of launches that are in the log, each with its sort key."""
        late = len(self._pending) - MOST_PENDING
        for at, key in enumerate(list(self._pending)):
            kernel = self._shapes.of_launch.get(key)
            if kernel is not None:
                for part in self._pending.pop(key):
                    yield from self._made(session, kernel, key, part)
            elif session.stopped or at < late:
                self.unknown += sum(map(len, self._pending.pop(key)))

    def _made(
        self, session: Session, kernel: KernelShape, key: tuple[int, int], records: Any
    ) -> Iterator[tuple[Any, Event]]:
        places, times = records["place"], self._times(key[0], kernel, records["place"]["time"])
        of = key[0], kernel.mangled, kernel.build
        if of not in self._sources:
            self._sources[of] = site_names(session.sites(kernel.mangled, kernel.pid, kernel.build))
        source_of, short = self._sources[of], names.demangle(kernel.mangled).short
        columns = (places[name].tolist() for name in ("time", "thread", "site", "spec"))
        for raw, thread, site, spec, time, numbers in zip(
            *columns, times, records["values"].tolist(), strict=True
        ):
            if thread >= kernel.shape.threads or spec >= len(self._wanted):
                self.unknown += 1  # the traced program can write to the ring
                continue
            one, source = self._wanted[spec], source_of(site) or f"site {site}"
            left, texts = iter(numbers), {"kernel": short, "source": source}
            values: tuple[int | float | str, ...]
            values = tuple(texts[node] if isinstance(node, str) else next(left) for node in one.arguments)
            if one.type_fields:
                kinds = dict(zip(one.type_fields, left, strict=False))
                of_each = [kinds.get(field) for field in one.format.types(one.arguments)]
                values = one.format.with_floats(values, of_each)
            block, own = divmod(thread, kernel.shape.block_size)
            where = (_index(block, kernel.grid), _index(own, kernel.block_dim), source, values)
            owner = (kernel.pid, kernel.comm, kernel.gpu, kernel.wave, one, kernel.mangled)
            yield (*key, 1, raw, thread, spec), Event(*owner, key[1], time, *where)

    def _times(self, process: int, kernel: KernelShape, raw: Any) -> list[int | None]:
        """Convert times of a GPU's timer to the clock of the results. None: unknown."""
        import numpy as np

        if kernel.pid in self._shapes.virtual:
            return list(raw.tolist())
        found = self._shapes.clock(process, kernel.gpu).host(raw.astype(np.int64))
        return [
            t if known else None for t, known in zip(found.at.tolist(), found.known.tolist(), strict=True)
        ]

    # --- the summary ---

    def losses(self, session: Session) -> dict[str, Any]:
        """Return the fields of the summary record about records."""
        rings = session.ring_counts(RING) if session.has_map(RING) else []
        shards = [shard for ring in rings for shard in ring.shards]
        lost: dict[str, int] = {}
        for shard in shards:
            if shard.lost:
                lost[str(shard.shard)] = lost.get(str(shard.shard), 0) + shard.lost
        return {
            "records": sum(shard.received for shard in shards),
            "records_lost": lost,
            "records_incomplete": sum(shard.incomplete for shard in shards),
            "records_unknown": self.unknown,
            "log_lost": max(self._shapes.lost, self._launches.lost),
        }

    def end(self, session: Session, results: ResultWriter, verified_by: Sequence[str]) -> None:
        """Write the summary. verified_by: as `BPF.verified_by`."""
        summary, losses = session.summary(), self.losses(session)
        lost = sum(losses["records_lost"].values())
        lines = summary_lines(summary | {"lost": max(0, summary["lost"] - lost)})
        if lost:
            whole = lost + losses["records"]
            lines += table.wrap(
                f"events lost because the ring was full: {lost:,} of {whole:,}; trace fewer with a filter, or enlarge the ring with"
                " --ring-size"
            )
        if losses["records_incomplete"]:
            lines += table.wrap(f"events begun but not finished: at most {losses['records_incomplete']:,}")
        if self.unknown:
            lines += table.wrap(f"events skipped because their launch is unknown: {self.unknown:,}")
        if losses["log_lost"]:
            lines += table.wrap(f"launches that found no room in the log: {losses['log_lost']:,}")
        results.end(summary | losses | {"verified_by": verified_by}, lines)


def _index(number: int, extents: Index) -> Index:
    """Return the index with this linear number; x varies fastest."""
    rest, x = divmod(number, extents[0])
    z, y = divmod(rest, extents[1])
    return x, y, z


# --- lines ---


class Printer:
    """Writes events as they arrive. timed: with their times, which in text count from the first event."""

    def __init__(self, out: Output, results: ResultWriter, owners: OwnerColumns, timed: bool) -> None:
        self._out, self._results, self._owners, self._timed = out, results, owners, timed
        self._header = ""
        self._origin: int | None = None
        self._labels = names.Labels()
        if results.csv:
            results.header(EVENT.columns)

    def __call__(self, events: Sequence[Event]) -> None:
        if not events:
            return
        if self._results.form == "text":
            self._out.lines(self._lines(events))
            return
        records = (EVENT.record(event, **({"ts_ns": event.time} if self._timed else {})) for event in events)
        if self._results.json:
            self._out.records(records)
        else:
            self._out.write("".join(map(self._row, records)))

    def _row(self, record: dict[str, Any]) -> str:
        time = (record["ts_ns"],) if self._timed else ()
        return csv_cells("" if cell is None else cell for cell in (*time, *EVENT.row(record))) + "\n"

    def _lines(self, events: Sequence[Event]) -> Iterator[str]:
        self._owners.see(events)
        start = self._owners.header + (f"{'TIME (us)':>13} " if self._timed else "") + f"{'LAUNCH':>6} "
        end = f" {'BLOCK':>9} {'THREAD':>9}  EVENT"
        width = min(16, table.WIDTH - len(start) - len(end))  # columns of the kernels' names
        header = f"{start}{'KERNEL':<{width}}{end}"
        if header != self._header:  # again when a second process adds columns
            self._header = header
            yield header
        for event in events:
            if self._origin is None:
                self._origin = event.time
            since = (
                "-"
                if event.time is None or self._origin is None
                else f"{(event.time - self._origin) / 1000:.3f}"
            )
            cells = self._owners.cells(event)
            start = f"{cells['PID']:>7} {table.fit(cells['COMM'], 8):<8} " if "PID" in cells else ""
            start += f"{cells['GPU']:>{self._owners.gpu_width}} " if "GPU" in cells else ""
            start += f"{since:>13} " if self._timed else ""
            start += f"{event.launch:>6} {self._labels.label(event.mangled, width):<{width}} "
            start += f"{_shown(event.block):>9} {_shown(event.thread):>9}  "
            yield (
                start + (event.text.expandtabs() if event.wanted.format.parts else event.wanted.spec.text)
            ).rstrip()


def _shown(index: Index | None) -> str:
    """Return an index for people: its x alone if it has no more."""
    if index is None:
        return "-"
    return str(index[0]) if index[1:] == (0, 0) else f"({','.join(map(str, index))})"

"""gpumem's records, and its report for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf.held.memory import KINDS, Allocation, Memory, Row
from gpubpf.launches.profile import FRAME
from gpubpf.launches.profile_text import LEAST, all_frames, own_line, own_lines
from gpubpf.record import replace
from gpubpf.records.fields import OWNER_OF_HOST, STAMP
from gpubpf.session.records import of_every_tool
from gpubpf.show import table
from gpubpf.show.fields import Field, Fields, having, many, values_of
from gpubpf.show.owner_columns import OwnerColumns
from gpubpf.show.process_records import LISTED

if TYPE_CHECKING:
    from gpubpf.launches.frames import Stack
    from gpubpf.session.session import Session
    from gpubpf.show.result_writer import ResultWriter

PYTORCH = "libc10_cuda.so", "libc10_hip.so"  # the libraries with PyTorch's caching allocator


def is_pytorch(row: Row | Allocation) -> bool:
    """Return whether PyTorch's caching allocator made these allocations, which are its segments."""
    return any((frame.object or frame.file).rsplit("/", 1)[-1] in PYTORCH for frame in row.stack.frames)


_FRAMES = Field(
    "frames",
    many(FRAME),
    "the host stack, outermost frame first; [] if it is not known",
    get=lambda row: [frame._asdict() for frame in row.stack.frames],
)
_SHARE = (
    *OWNER_OF_HOST,
    Field("bytes", "bytes"),
    Field("count", "integer", "allocations"),
    Field("kind", "|".join(KINDS), "pinned: host memory that the GPU can access"),
    _FRAMES,
    Field("complete", "boolean", "false if outer frames are missing", get="stack.complete"),
    Field("pytorch", "boolean", "segments of PyTorch's caching allocator", get=is_pytorch),
)


HELD = Fields(
    "held",
    "One for each host stack, kind of memory and GPU with live allocations, those with the most bytes first.",
    (
        *_SHARE,
        Field("oldest_ns", "ns", "how long the oldest of these allocations has been held"),
        Field("grown", "bytes", "since the last interval, or since the start; negative if less is held"),
        STAMP,
    ),
    csv="pid comm gpu kind bytes count grown oldest_ns pytorch stack",
    csv_fields=(Field("stack", "string", "the frames, outermost first, separated by semicolons"),),
)
ALLOCATION = Fields(
    "allocation",
    "With --snapshot, one for each live allocation, those that have been held longest first.",
    (
        *OWNER_OF_HOST,
        Field("base", "hex", "address", get=lambda one: f"0x{one.base:x}"),
        *(field for field in _SHARE if field.name in ("bytes", "kind", "frames", "complete", "pytorch")),
        Field("held_ns", "ns", "how long it has been held"),
        STAMP,
    ),
)
PEAK = Fields(
    "peak",
    "At the end: when the measured processes together held the most GPU memory, without pinned host memory.",
    (
        Field("ts_ns", "ns", "CLOCK_MONOTONIC, or the virtual time"),
        Field("bytes", "bytes"),
        Field(
            "held",
            many(having(*_SHARE)),
            "what was held then, as in held records, without oldest_ns and grown",
        ),
    ),
)
_COUNTS = (
    Field("live_bytes", "bytes", "held at the end, pinned host memory included"),
    Field("allocated", "integer", "calls"),
    Field("freed", "integer", "calls"),
    Field("failed", "integer", "allocations that the driver refused"),
    Field("frees_failed", "integer", "frees that the driver refused, as of memory that was freed before"),
    Field("frees_unknown", "integer", "frees of memory whose allocation was not seen"),
    Field("graph_nodes", "integer", "allocations that were captured into graphs; no sum has them"),
    Field("allocations_dropped", "integer", "allocations in no sum, because too many were live"),
)
_OTHERS = of_every_tool(*_COUNTS)
RECORDS = (HELD, ALLOCATION, PEAK, *(one for one in _OTHERS if one is not LISTED))


class Report:
    """Shows what is held.

    top: maximum rows; None: all.
    full: also show all frames, and all that was held at the peak.
    each: also show each live allocation.
    """

    def __init__(
        self, memory: Memory, owners: OwnerColumns, top: int | None, full: bool, each: bool = False
    ) -> None:
        self._each = each
        self._memory, self._owners, self._top, self._full = memory, owners, top, full
        self._before: dict[tuple[Any, ...], int] = {}

    def _held(self) -> list[Row]:
        """Return what is held now, with the growth since the last call."""
        found = {(row.pid, row.gpu, row.kind, row.stack): row for row in self._memory.rows()}
        rows = [replace(row, grown=row.bytes - self._before.get(key, 0)) for key, row in found.items()]
        self._before = {key: row.bytes for key, row in found.items()}
        return rows

    def show(self, results: ResultWriter, by_interval: bool) -> None:
        """Print what is held now."""
        held = self._held()
        if results.form == "text":
            results.out.lines(self._lines(held, by_interval))
            if self._each:
                results.out.lines(self._allocations())
        elif results.csv:
            cells = (
                (HELD.record(one), ";".join(f.name for f in one.stack.frames)) for one in held[: self._top]
            )
            results.table(HELD.columns, (HELD.row(record, stack=stack) for record, stack in cells))
        else:
            results.records(HELD, held[: self._top])
            if self._each:
                results.records(ALLOCATION, self._memory.allocations()[: self._top])

    def _allocations(self) -> Iterator[str]:
        """Yield a line for each live allocation."""
        found = self._memory.allocations()
        if not found:
            return
        shown = found[: self._top]
        cells = [
            self._owners.cells(one)
            | {"ADDRESS": f"0x{one.base:x}", "BYTES": table.size(one.bytes)}
            | {"HELD": table.duration(one.held_ns), "KIND": one.kind}
            for one in shown
        ]
        yield from self._with_stacks(cells, [one.stack for one in shown], ("COMM", "ADDRESS", "KIND"))
        yield ""
        if left := found[len(shown) :]:
            yield f"and {table.count(len(left), 'allocation')} with {table.size(sum(one.bytes for one in left))}"
            yield ""

    @staticmethod
    def _with_stacks(
        cells: Sequence[Mapping[str, str]], stacks: Sequence[Stack], left: Sequence[str]
    ) -> Iterator[str]:
        """Yield a table with the column STACK, which has its own lines if there is little room beside the others."""
        lines = table.within(cells, left=left, cut=("COMM",))
        start = max(map(len, lines)) + 2
        beside = table.WIDTH - start >= LEAST
        width = table.WIDTH - (start if beside else 4)
        for line, stack in zip(lines, ("STACK", *own_lines(stacks, width)), strict=True):
            yield f"{line:<{start}}{stack}" if beside else line
            if not beside:
                yield f"    {stack}"

    def _lines(self, held: Sequence[Row], by_interval: bool) -> Iterator[str]:
        if not held:
            yield from ("no memory is held whose allocation was seen", "")
            return
        self._owners.see(held)
        whole = sum(one.bytes for one in held)
        live = table.count(sum(one.count for one in held), "allocation")
        yield from table.wrap(
            f"{table.size(whole)} held in {live} from {table.count(len(held), 'host stack')}"
        )
        yield ""
        shown = held[: self._top]
        cells = [
            self._owners.cells(one)
            | {"BYTES": table.size(one.bytes), "COUNT": f"{one.count:,}"}
            | ({"GROWN": _signed(one.grown)} if by_interval else {})
            | {"OLDEST": table.duration(one.oldest_ns), "KIND": one.kind}
            for one in shown
        ]
        yield from self._with_stacks(cells, [one.stack for one in shown], ("COMM", "KIND"))
        yield ""
        if left := held[len(shown) :]:
            yield f"and {table.count(len(left), 'row')} with {table.size(sum(one.bytes for one in left))}"
            yield ""
        if self._full:
            for one in shown:
                yield f"{table.size(one.bytes)} in {table.count(one.count, 'allocation')} from"
                yield from all_frames(one.stack)
                yield ""
        if segments := sum(one.bytes for one in held if is_pytorch(one)):
            yield from table.wrap(
                f"{table.size(segments)} in segments of PyTorch's caching allocator; which tensors use them is not seen"
            )

    def end(self, session: Session, results: ResultWriter) -> None:
        """Print the peak and the summary."""
        memory = self._memory
        summary = session.summary() | {
            "live_bytes": memory.live_bytes,
            "allocated": memory.allocated,
            "freed": memory.freed,
            "failed": memory.failed,
            "frees_failed": memory.frees_failed,
            "frees_unknown": memory.frees_unknown,
            "graph_nodes": memory.captured,
            "allocations_dropped": memory.dropped,
            "lost": memory.lost,
        }
        if results.json and memory.peak_bytes:
            held = [values_of(_SHARE, row) for row in memory.at_peak()]
            peak = {"type": "peak", "ts_ns": memory.peak_ns, "bytes": memory.peak_bytes, "held": held}
            results.out.records([peak])
        results.end(summary, self._last_lines(summary))

    def _last_lines(self, summary: Mapping[str, Any]) -> Iterator[str]:
        memory = self._memory
        if memory.peak_bytes:
            first, *others = memory.at_peak()
            more = f", and {table.count(len(others), 'other')}" if others else ""
            said = (
                f"peak: {table.size(memory.peak_bytes)} of GPU memory; {table.size(first.bytes)} of it from"
            )
            yield from table.wrap(f"{said} {own_line(first.stack, 60)}{more}")
            if self._full and others:
                cells = [
                    self._owners.cells(one)
                    | {"BYTES": table.size(one.bytes), "COUNT": f"{one.count:,}", "KIND": one.kind}
                    for one in (first, *others)
                ]
                yield from self._with_stacks(cells, [one.stack for one in (first, *others)], ("COMM", "KIND"))
        calls = (("allocation", memory.allocated), ("free", memory.freed))
        yield " and ".join(table.count(number, noun) for noun, number in calls)
        for number, noun, what in (
            (memory.failed, "allocation", "failed"),
            (memory.frees_failed, "free", "failed: memory that was freed before, or never allocated"),
            (memory.frees_unknown, "free", "of memory whose allocation was not seen"),
            (memory.captured, "allocation", "captured into graphs, which no sum has"),
            (memory.dropped, "allocation", "in no sum, because too many were live"),
            (memory.lost, "call", "lost, because the log was full: sums may be wrong"),
        ):
            if number:
                yield from table.wrap(f"{table.count(number, noun)} {what}")


def _signed(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{table.size(abs(size))}" if size else "0 B"

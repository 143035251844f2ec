"""Which allocation an address means (docs/memory.md, "Allocations and epochs").

    allocations = Allocations()
    for log in session.logs():
        allocations.add(log)
    found = allocations.all()           # in the order in which they came

The log is the target's, and nothing in it is believed: allocations that cannot be are left out, and where one lies over another the
earlier is over.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from gpubpf.session import operation_log

if TYPE_CHECKING:
    from gpubpf.agent.protocol import StackFrame
    from gpubpf.session.results import ProcessLog

# Calls that allocate, and what kind of memory that is. As in the log: without version and suffix.
ALLOCATING = {
    "cuMemAlloc": "device",
    "cuMemAllocPitch": "device",
    "cuMemAllocAsync": "device",
    "cuMemAllocFromPoolAsync": "device",
    "cuMemMap": "device",
    "cuIpcOpenMemHandle": "device",
    "cuMemAllocManaged": "managed",
    "cuMemAllocHost": "host",
    "cuMemHostAlloc": "host",
    "cuMemHostRegister": "host",
    "variable": "variable",
    "before": "device",  # found as a launch's parameter: the process had it before the tool came
}
FROM_BEFORE = "before"
FREEING = (
    "cuMemFree",
    "cuMemFreeAsync",
    "cuMemFreeHost",
    "cuMemHostUnregister",
    "cuMemUnmap",
    "cuIpcCloseMemHandle",
    "cuModuleUnload",
    "cuLibraryUnload",
)
_CONTEXT_GONE = "cuCtxDestroy"
_CALLS = np.array([name.encode() for name in (*ALLOCATING, *FREEING, _CONTEXT_GONE)])
_LAST_EPOCH = (1 << 32) - 1
_ADDRESSES = 1 << 62  # no address is beyond
LIMIT = 1 << 20  # allocations that are kept
_OVER = 64  # of those that lie where another one comes to lie, which are looked at; and of one address, that wait for their end


@dataclass(frozen=True)
class Allocation:
    """Memory [base, base + bytes), which it means in launches of the epochs from first_epoch to last_epoch (None: to the end).

    process: its number in the session. gpu: ordinal, of the context in which it was made. call: the driver's function; of a variable
    "variable NAME"; FROM_BEFORE where nobody saw it. kind: "device", "managed", "host" (memory) or "variable". stack: of the call on
    the host, innermost frame first;
    empty where it is not known. allocated_ns, freed_ns: when the calls returned, on the log's clock; None: it was not freed, or nobody
    saw it.
    """

    process: int
    pid: int
    comm: str
    gpu: int
    base: int
    bytes: int
    call: str
    kind: str
    stack: tuple[StackFrame, ...] = field(repr=False)
    first_epoch: int
    last_epoch: int | None
    allocated_ns: int
    freed_ns: int | None

    @property
    def freed(self) -> bool:
        return self.freed_ns is not None

    @cached_property
    def name(self) -> str:
        """Of a variable, demangled; else empty."""
        return self.call.removeprefix("variable ") if self.kind == "variable" else ""


class Allocations:
    """What processes allocated, by their logs. `dropped`: allocations that found no room here; `incomplete`: processes (by number)
    whose logs lost records, so that any may be missing."""

    def __init__(self) -> None:
        self._processes: dict[int, _Process] = {}
        self._rows: list[_Row] = []
        self._made: dict[int, Allocation] = {}  # by row, of those that are over
        self.dropped = 0
        self.incomplete: set[int] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, log: ProcessLog) -> None:
        """Takes the records of a process that came since the last time."""
        process = self._processes.setdefault(log.process, _Process(log))
        process.log = log
        if log.lost:
            self.incomplete.add(log.process)
        records = log.records
        records = records[(records["kind"] == operation_log.API) & (records["result"] == 0)]
        records = records[np.isin(records["api"]["name"], _CALLS)]
        if not len(records):
            return
        calls = [name.decode() for name in records["api"]["name"].tolist()]
        columns = (records["api"][name].tolist() for name in ("address", "bytes", "epoch"))
        about = (records[name].tolist() for name in ("return_ns", "context", "stack", "flags"))
        for call, address, size, epoch, at, context, stack, flags in zip(
            calls, *columns, *about, strict=True
        ):
            if call == _CONTEXT_GONE:
                process.end_context(context, epoch, at)
            elif call in FREEING:
                if not flags & operation_log.CAPTURED:  # which is a node of a graph, and frees nothing
                    process.end(address, size if call == "cuMemUnmap" else 0, epoch, at)
            elif 0 < address < _ADDRESSES and 0 < size <= _ADDRESSES - address:
                if len(self._rows) >= LIMIT:
                    self.dropped += 1
                    continue
                row = _Row(process, address, address + size, call, context, stack, epoch, at)
                process.begin(row)
                self._rows.append(row)

    def all(self) -> list[Allocation]:
        """All so far, in the order in which they came."""
        found = []
        for number, row in enumerate(self._rows):
            made = self._made.get(number)
            if made is None:
                made = row.make()
                if made.freed:
                    self._made[number] = made
            found.append(made)
        return found


@dataclass(eq=False, slots=True)
class _Row:
    """An allocation that may not be over yet."""

    process: _Process
    base: int
    end: int
    call: str
    context: int
    stack: int
    first: int
    allocated_ns: int
    last: int = _LAST_EPOCH
    freed_ns: int | None = None

    def make(self) -> Allocation:
        log = self.process.log
        stack: tuple[StackFrame, ...] = log.stacks.get(self.stack, ())
        call, kind = self.call, ALLOCATING[self.call]
        if kind == "variable":
            from gpubpf import names

            call = f"variable {names.demangle(stack[0].symbol).full if stack else '(unknown)'}"
            stack = ()
        return Allocation(
            log.process, log.pid, log.comm, log.gpus.get(self.context, 0), self.base, self.end - self.base, call, kind, stack,
            self.first, None if self.last == _LAST_EPOCH else self.last, self.allocated_ns, self.freed_ns,
        )  # fmt: skip


class _Process:
    """What of a process is not freed yet."""

    def __init__(self, log: ProcessLog) -> None:
        self.log = log
        self._by_base: dict[
            int, list[_Row]
        ] = {}  # of one address several: the free of one may come after the next
        self._bases: list[int] = []  # sorted
        self._by_context: dict[int, dict[int, _Row]] = {}

    def begin(self, row: _Row) -> None:
        """Whatever lies where it lies is over, whether its end was seen, is late, or will never come."""
        place = bisect.bisect_left(self._bases, row.end)
        for base in self._bases[max(place - _OVER, 0) : place][::-1]:
            rows = self._by_base[base]
            for old in rows:
                if old.end > row.base and old.first < row.first:
                    old.last = min(old.last, row.first - 1)
            if all(old.end <= row.base for old in rows):
                break
        if row.base not in self._by_base:
            bisect.insort(self._bases, row.base)
        same = self._by_base.setdefault(row.base, [])
        same.append(row)
        self._by_context.setdefault(row.context, {})[id(row)] = row
        if len(same) > _OVER:
            self._forget(same[0])

    def end(self, base: int, size: int, epoch: int, at: int) -> None:
        """Of what begins at `base`, or with `size` all that begins in that range, and was there in `epoch`."""
        bases = [base]
        if size:
            first, last = (bisect.bisect_left(self._bases, edge) for edge in (base, base + size))
            bases = self._bases[first:last]
        for one in bases:
            rows = [row for row in self._by_base.get(one, ()) if row.first <= epoch]
            for row in rows if size else rows[-1:]:
                self._over(row, epoch, at)

    def end_context(self, context: int, epoch: int, at: int) -> None:
        for row in list(self._by_context.get(context, {}).values()):
            if row.first <= epoch:
                self._over(row, epoch, at)

    def _over(self, row: _Row, epoch: int, at: int) -> None:
        row.last, row.freed_ns = min(row.last, epoch), at
        self._forget(row)

    def _forget(self, row: _Row) -> None:
        del self._by_context[row.context][id(row)]
        rows = self._by_base[row.base]
        rows.remove(row)
        if not rows:
            del self._by_base[row.base]
            del self._bases[bisect.bisect_left(self._bases, row.base)]

"""Sum the GPU memory that is allocated now by the host stack that allocated it, for gpumem.

memory = Memory()
for log in session.logs():
    memory.add(log)
rows = memory.rows()                    # the stack with the most bytes first

The traced process writes the log, so nothing in it is trusted. Memory depends on the number of live allocations and of stacks.

The calls of different threads may be logged in another order than that in which the driver did them. Epochs (docs/memory.md) tell the
order for each address: a free ends the latest allocation there that existed in its epoch.
"""

from __future__ import annotations

import bisect
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpubpf.agent.definitions import MOST_STACKS, Vendor
from gpubpf.launches.frames import Stack
from gpubpf.memory.allocations import ALLOCATING, BEFORE_ATTACH
from gpubpf.process import limits
from gpubpf.record import MutableRecord, Record, field
from gpubpf.records import operation_log
from gpubpf.records.launch_shape import wave_of

if TYPE_CHECKING:
    from gpubpf.records.results import ProcessLog

DEVICE, MANAGED, PINNED, POOL, VIRTUAL = KINDS = ("device", "managed", "pinned", "pool", "virtual")
_IN_POOLS = ("cuMemAllocAsync", "cuMemAllocFromPoolAsync", "hipMallocAsync", "hipMallocFromPoolAsync")
_NOT_HELD = (
    *("variable", "cuIpcOpenMemHandle", "cuMemPoolImportPointer"),  # of a module, or of another process
    BEFORE_ATTACH,  # the agent finds some of these, but only at launches that a tool measures
)
_OF_GROUP = {"device": DEVICE, "managed": MANAGED, "host": PINNED}
KIND_OF = {call: _OF_GROUP[group] for call, group in ALLOCATING.items() if call not in _NOT_HELD}
KIND_OF |= dict.fromkeys(_IN_POOLS, POOL) | {"cuMemMap": VIRTUAL}
_FREEING = {
    *("cuMemFree", "cuMemFreeAsync", "cuMemFreeHost", "cuMemHostUnregister", "cuMemUnmap", "hipFreeAsync"),
    *("hsa_amd_memory_pool_free", "hsa_amd_memory_unlock"),
}
_CONTEXT_DESTROY = "cuCtxDestroy"
_CALLS = np.array([name.encode() for name in (*KIND_OF, *_FREEING, _CONTEXT_DESTROY)])
_ADDRESS_LIMIT = 1 << 62
# A process can log any calls. What exceeds a limit is in no sum, and is counted.
LIMIT, LIMIT_OF_USER = 1 << 22, 1 << 20  # live allocations to know at a time
MOST_AT_ADDRESS = 64  # of them at one address: real ones are few, if frees are logged late
MOST_MAPPED = 1 << 17  # of them in a process by cuMemMap, with 2 MiB or more each
MOST_KEYS = 1 << 16  # sums of a process; further stacks have one sum for each GPU and kind
MOST_FUTILE = 1 << 20  # live allocations of a process to look at in vain, when contexts end


class Key(NamedTuple):
    """What sums are kept by. stack: its number in the process; 0: unknown."""

    process: int
    gpu: int
    kind: str
    stack: int


class Sums(MutableRecord):
    """Live allocations of a key. oldest_ns: when the oldest was allocated, as far as `Memory.rows` found."""

    bytes: int = 0
    count: int = 0
    oldest_ns: int = 0


class Row(Record):
    """Live allocations of one host stack, kind and GPU in a process.

    vendor: of the GPU.
    wave: lanes of a wave on an AMD GPU; None: not known, or of another vendor.
    oldest_ns: how long the oldest of them had been held at the last operation in the log.
    grown: bytes more than in the previous report; negative if less is held.
    """

    pid: int
    comm: str
    gpu: int
    vendor: Vendor
    wave: int | None
    kind: str
    stack: Stack
    bytes: int
    count: int
    oldest_ns: int
    grown: int = 0


class Allocation(Record):
    """A live allocation.

    base: its address.
    held_ns: how long it had been held at the last operation in the log.
    Other attributes: as in `Row`.
    """

    pid: int
    comm: str
    gpu: int
    vendor: Vendor
    wave: int | None
    base: int
    bytes: int
    kind: str
    stack: Stack
    held_ns: int


class _Live(NamedTuple):
    key: Key
    end: int
    context: int
    first: int
    at: int


class _Process(MutableRecord):
    """A process.

    live: by address.
    mapped: the addresses of kind VIRTUAL in `live`, sorted.
    contexts: by context, the addresses where memory of the context may be live.
    keys: number of its sums.
    futile: see MOST_FUTILE.
    """

    log: ProcessLog
    live: dict[int, list[_Live]] = field(default_factory=dict)
    mapped: list[int] = field(default_factory=list)
    contexts: dict[int, set[int]] = field(default_factory=dict)
    latest_ns: int = 0
    keys: int = 0
    futile: int = 0


class Memory:
    """The memory of all processes.

    allocated, freed, failed: numbers of calls. failed: allocations that the driver refused.
    frees_failed: frees that the driver refused: of memory that was freed before, or was never allocated.
    frees_unknown: frees of memory whose allocation was not seen.
    captured: allocations that a stream capture turned into nodes of a graph; they are in no sum.
    dropped: allocations that are in no sum because too many were live.
    """

    def __init__(self) -> None:
        self._processes: dict[int, _Process] = {}
        self._sums: dict[Key, Sums] = {}
        self._live: Counter[int] = Counter()  # number of live allocations by user
        self._total = 0  # the sum of them
        self._lost: dict[int, int] = {}
        self.allocated = self.freed = self.failed = self.frees_failed = self.frees_unknown = 0
        self.captured = self.dropped = 0
        self.gpu_bytes = self.peak_bytes = self.peak_ns = 0
        self._since_peak: dict[Key, list[int]] = {}  # changes of bytes and count

    @property
    def lost(self) -> int:
        """The number of calls that found no room in a log."""
        return sum(self._lost.values())

    @property
    def live_bytes(self) -> int:
        """All memory that is held, pinned host memory included."""
        return sum(sums.bytes for sums in self._sums.values())

    def add(self, log: ProcessLog) -> None:
        """Take the new records of a process's log."""
        process = self._processes.setdefault(log.process, _Process(log))
        process.log = log
        self._lost[log.process] = log.lost
        process.latest_ns = max(process.latest_ns, int(log.records["return_ns"].max(initial=0)))
        records = log.records[log.records["kind"] == operation_log.API]
        records = records[np.isin(records["api"]["name"], _CALLS)]
        if not len(records):
            return
        columns = [records[name].tolist() for name in ("return_ns", "context", "stack", "flags", "result")]
        columns += [records["api"][name].tolist() for name in ("name", "address", "bytes", "epoch")]
        for at, context, stack, flags, result, name, address, size, epoch in zip(*columns, strict=True):
            call = name.decode()
            if kind := KIND_OF.get(call):
                if result:
                    self.failed += 1
                elif flags & operation_log.CAPTURED:
                    self.captured += 1
                elif 0 < address < _ADDRESS_LIMIT and 0 < size <= _ADDRESS_LIMIT - address:
                    kind = PINNED if flags & operation_log.HOST_MEMORY else kind
                    known = stack if stack <= MOST_STACKS else 0
                    key = Key(log.process, log.gpus.get(context, 0), kind, known)
                    self.allocated += 1
                    self._begin(process, address, _Live(key, address + size, context, epoch, at))
            elif call == _CONTEXT_DESTROY:
                self._end_context(process, context, epoch, at)
            elif flags & operation_log.CAPTURED:
                continue  # a node of a graph, which frees nothing now
            elif result:
                self.frees_failed += 1
            elif address:  # a free of the null pointer does nothing
                self.freed += 1
                self._free(process, call, address, size, epoch, at)

    def _begin(self, process: _Process, base: int, new: _Live) -> None:
        user, rows = process.log.user, process.live.get(base, ())
        if (
            (self._total >= LIMIT_OF_USER and limits.exceeded(self._live, user, LIMIT, LIMIT_OF_USER, 1))
            or len(rows) >= MOST_AT_ADDRESS
            or (new.key.kind == VIRTUAL and len(process.mapped) >= MOST_MAPPED)
        ):
            self.dropped += 1
            return
        if new.key not in self._sums:
            if process.keys >= MOST_KEYS:
                new = new._replace(key=new.key._replace(stack=0))
            process.keys += new.key not in self._sums
        if new.key.kind == VIRTUAL and not rows:
            bisect.insort(process.mapped, base)
        process.live.setdefault(base, []).append(new)
        process.contexts.setdefault(new.context, set()).add(base)
        self._live[user] += 1
        self._total += 1
        self._change(new.key, new.end - base, 1, new.at)

    def _free(self, process: _Process, call: str, base: int, size: int, epoch: int, at: int) -> None:
        bases = [base]
        if call == "cuMemUnmap" and size:
            if process.futile > MOST_FUTILE:
                self.frees_unknown += 1
                return
            first, last = (bisect.bisect_left(process.mapped, at) for at in (base, base + size))
            bases = process.mapped[first:last]
        found = False
        for one in bases:
            rows = process.live.get(one, ())
            ended = next((row for row in reversed(rows) if row.first <= epoch), None)
            if ended is not None:
                self._end(process, one, ended, at)
                found = True
            else:
                process.futile += 1
        self.frees_unknown += not found

    def _end_context(self, process: _Process, context: int, epoch: int, at: int) -> None:
        if process.futile > MOST_FUTILE:
            self.frees_unknown += 1
            return
        for base in [*process.contexts.get(context, ())]:
            of_context = [row for row in process.live.get(base, ()) if row.context == context]
            ended = [row for row in of_context if row.first <= epoch]
            process.futile += len(of_context) - len(ended)
            for row in ended:
                self._end(process, base, row, at)

    def _end(self, process: _Process, base: int, row: _Live, at: int) -> None:
        rows = process.live[base]
        was_mapped = rows[0].key.kind == VIRTUAL
        rows.remove(row)
        if not any(other.context == row.context for other in rows):
            of_context = process.contexts[row.context]
            of_context.discard(base)
            if not of_context:
                del process.contexts[row.context]
        if not rows:
            del process.live[base]
        if was_mapped and (not rows or rows[0].key.kind != VIRTUAL):
            del process.mapped[bisect.bisect_left(process.mapped, base)]
        elif not was_mapped and rows and rows[0].key.kind == VIRTUAL:
            bisect.insort(process.mapped, base)
        self._live[process.log.user] -= 1
        self._total -= 1
        self._change(row.key, base - row.end, -1, at)

    def _change(self, key: Key, size: int, count: int, at: int) -> None:
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = Sums()
        sums.bytes += size
        sums.count += count
        if key.kind == PINNED:
            return
        self.gpu_bytes += size
        if self.gpu_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_ns = self.gpu_bytes, at
            self._since_peak.clear()
        else:
            change = self._since_peak.setdefault(key, [0, 0])
            change[0] += size
            change[1] += count

    def on_gpus(self) -> dict[tuple[int, int], int]:
        """Return the bytes of GPU memory that are held now, by number of the process and GPU. Pinned host memory is not GPU memory."""
        found: dict[tuple[int, int], int] = {}
        for key, sums in self._sums.items():
            if key.kind != PINNED:
                found[key.process, key.gpu] = found.get((key.process, key.gpu), 0) + sums.bytes
        return found

    def forget(self, number: int) -> None:
        """Drop what a process held, given by its number: it has ended, and the driver has freed its memory."""
        process = self._processes.get(number)
        if process is None:
            return
        for base, rows in [*process.live.items()]:
            for row in [*rows]:
                self._end(process, base, row, process.latest_ns)
        for key in [key for key in self._sums if key.process == number]:
            del self._sums[key]
            self._since_peak.pop(key, None)

    def rows(self) -> list[Row]:
        """Return what is held now, the most bytes first. Stacks with the same functions are one row."""
        for sums in self._sums.values():
            sums.oldest_ns = 0
        for process in self._processes.values():
            for rows in process.live.values():
                for row in rows:
                    sums = self._sums[row.key]
                    sums.oldest_ns = max(sums.oldest_ns, process.latest_ns - row.at)
        return self._merged(
            {key: (sums.bytes, sums.count, sums.oldest_ns) for key, sums in self._sums.items()}
        )

    def allocations(self) -> list[Allocation]:
        """Return each live allocation, those that have been held longest first."""
        found = []
        for process in self._processes.values():
            log = process.log
            stacks: dict[int, Stack] = {}
            for base, rows in process.live.items():
                for row in rows:
                    key = row.key
                    if key.stack not in stacks:
                        stacks[key.stack] = Stack.of(log.stacks.get(key.stack, ()))
                    owner = (log.pid, log.comm, key.gpu, log.vendor, wave_of(log.waves, key.gpu))
                    what = (base, row.end - base, key.kind, stacks[key.stack], process.latest_ns - row.at)
                    found.append(Allocation(*owner, *what))
        return sorted(found, key=lambda one: (-one.held_ns, one.pid, one.base))

    def at_peak(self) -> list[Row]:
        """Return what was held of GPU memory at its peak, as `rows` does, without ages."""
        found = {}
        for key, sums in self._sums.items():
            if key.kind != PINNED:
                size, count = self._since_peak.get(key, (0, 0))
                found[key] = sums.bytes - size, sums.count - count, 0
        return self._merged(found)

    def _merged(self, found: dict[Key, tuple[int, int, int]]) -> list[Row]:
        merged: dict[tuple[int, int, str, Stack], tuple[int, int, int]] = {}
        for key, (size, count, oldest) in found.items():
            if count > 0:
                stack = Stack.of(self._processes[key.process].log.stacks.get(key.stack, ()))
                same = key.process, key.gpu, key.kind, stack
                other = merged.get(same, (0, 0, 0))
                merged[same] = other[0] + size, other[1] + count, max(other[2], oldest)
        rows = []
        for (process, gpu, kind, stack), sums in merged.items():
            log = self._processes[process].log
            owner = (log.pid, log.comm, gpu, log.vendor, wave_of(log.waves, gpu))
            rows.append(Row(*owner, kind, stack, *sums))
        return sorted(rows, key=lambda row: (-row.bytes, -row.count, row.pid, row.gpu, row.kind))

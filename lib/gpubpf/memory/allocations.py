"""Collect the allocations of traced processes from their logs (docs/memory.md, "Allocations and epochs").

    allocations = Allocations()
    for log in session.logs():
        allocations.add(log)
    found = allocations.all()           # in the order in which they were logged

The traced process writes the log, so nothing in it is trusted. Impossible allocations are left out. If two overlap, the earlier one is
assumed to have ended.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from gpubpf.agent.definitions import Vendor
from gpubpf.record import Record, field
from gpubpf.records import operation_log
from gpubpf.records.launch_shape import wave_of

if TYPE_CHECKING:
    from gpubpf.process.host_frames import HostFrame
    from gpubpf.records.results import ProcessLog

# Calls that allocate → the kind of memory. The names are those of the log, without version and suffix.
ALLOCATING = {
    "cuMemAlloc": "device",
    "cuMemAllocPitch": "device",
    "cuMemAllocAsync": "device",
    "cuMemAllocFromPoolAsync": "device",
    "cuMemMap": "device",
    "cuIpcOpenMemHandle": "device",
    "cuMemPoolImportPointer": "device",
    "cuMemAllocManaged": "managed",
    "cuMemAllocHost": "host",
    "cuMemHostAlloc": "host",
    "cuMemHostRegister": "host",
    "hipMalloc": "device",
    "hipExtMallocWithFlags": "device",
    "hipMallocPitch": "device",
    "hipMemAllocPitch": "device",
    "hipMalloc3D": "device",
    "hipMallocAsync": "device",
    "hipMallocFromPoolAsync": "device",
    "hipMallocManaged": "managed",
    "hipHostMalloc": "host",
    "hipHostAlloc": "host",
    "hipMallocHost": "host",
    "hipMemAllocHost": "host",
    "hipHostRegister": "host",
    "hsa_amd_memory_pool_allocate": "device",  # or "host", according to a flag
    "hsa_memory_allocate": "device",
    "hsa_amd_memory_lock": "host",
    "hsa_amd_memory_lock_to_pool": "host",
    "variable": "variable",
    "before": "device",  # allocated before attaching, found as a parameter of a launch
}
BEFORE_ATTACH = "before"
FREEING = (
    "cuMemFree",
    "cuMemFreeAsync",
    "cuMemFreeHost",
    "cuMemHostUnregister",
    "cuMemUnmap",
    "cuIpcCloseMemHandle",
    "cuModuleUnload",
    "cuLibraryUnload",
    "hipFreeAsync",
    "hsa_amd_memory_pool_free",
    "hsa_amd_memory_unlock",
    "hsa_executable_destroy",
)
_IMPORTING = ("cuIpcOpenMemHandle", "cuMemPoolImportPointer")  # memory of another process
# Calls that share memory with other processes or devices. The log has the memory's address, or 0 if the call gets a handle of
# cuMemCreate.
_SHARING = (
    "cuIpcGetMemHandle",
    "cuMemPoolExportPointer",
    "cuMemGetHandleForAddressRange",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "hipIpcGetMemHandle",
)
_CONTEXT_DESTROY = "cuCtxDestroy"
_CALLS = np.array([name.encode() for name in (*ALLOCATING, *FREEING, *_SHARING, _CONTEXT_DESTROY)])
_LAST_EPOCH = (1 << 32) - 1  # the last epoch of an allocation that has not ended
_ADDRESS_LIMIT = 1 << 62  # all addresses are below this
LIMIT = 1 << 20  # maximum allocations to keep
_MOST_OVERLAPS = 64  # maximum live allocations to check against a new one, and to keep for one address
_MOST_FUTILE = 1 << 20  # a process can log, again and again, that memory ends which was allocated later


class Allocation(Record):
    """Memory at [base, base + bytes). These addresses belong to it in launches of the epochs first_epoch to last_epoch.

    process       number of the process in the session
    gpu           ordinal of the GPU of the context that allocated it
    call          the CUDA driver, HIP or ROCr function; "variable NAME" for a variable; BEFORE_ATTACH if the call was not seen
    kind          "device", "managed", "host" or "variable"
    stack         host stack of the call, innermost frame first; empty if unknown
    last_epoch    None: it lasts to the end
    allocated_ns  when the call returned, on the log's clock
    freed_ns      when the freeing call returned, on the log's clock; None if it was not freed, or the call was not seen
    copied        whether the program copied some of it to the host or elsewhere; None if unknown: a graph, a batch of copies or
                  another process may have done so, the log lost records, or the GPU is AMD's
    shared        whether another process or device may access it, because it was exported or imported
    vendor        the vendor of the GPU
    wave          the lanes of its waves, if it is an AMD GPU
    """

    process: int
    pid: int
    comm: str
    gpu: int
    base: int
    bytes: int
    call: str
    kind: str
    stack: tuple[HostFrame, ...] = field(repr=False)
    first_epoch: int
    last_epoch: int | None
    allocated_ns: int
    freed_ns: int | None
    copied: bool | None = False
    shared: bool = False
    vendor: Vendor = Vendor.NVIDIA
    wave: int | None = None

    @property
    def freed(self) -> bool:
        return self.freed_ns is not None

    @cached_property
    def name(self) -> str:
        """The demangled name of a variable; empty for other kinds."""
        return self.call.removeprefix("variable ") if self.kind == "variable" else ""


class Allocations:
    """The allocations of all processes.

    dropped     number of allocations that were dropped because there were more than LIMIT
    incomplete  numbers of the processes whose logs lost records: any of their allocations may be missing
    """

    def __init__(self) -> None:
        self._processes: dict[int, _LiveAllocations] = {}
        self._logged: list[_LoggedAllocation] = []
        self._freed: dict[int, Allocation] = {}  # by index in _logged
        self.dropped = 0
        self.incomplete: set[int] = set()

    def __len__(self) -> int:
        return len(self._logged)

    def add(self, log: ProcessLog) -> None:
        """Take the new records of a process's log."""
        process = self._processes.setdefault(log.process, _LiveAllocations(log))
        process.log = log
        if log.lost:
            self.incomplete.add(log.process)
            process.copies_unknown = True
        records = log.records[log.records["result"] == 0]
        graphs = records[records["kind"] == operation_log.GRAPH]
        batches = np.isin(records["kind"], operation_log.COPIES) & (
            records["flags"] & operation_log.BATCH > 0
        )
        process.copies_unknown |= bool((graphs["graph"]["others"] > 0).any() or batches.any())
        copies = np.isin(records["kind"], (operation_log.D2H, operation_log.D2D))
        calls = (records["kind"] == operation_log.API) & np.isin(records["api"]["name"], _CALLS)
        records = records[copies | calls]
        columns = [records[name].tolist() for name in ("kind", "return_ns", "context", "stack", "flags")]
        columns += [records["api"][name].tolist() for name in ("name", "address", "bytes", "epoch")]
        sources: set[int] = set()  # sources of copies since the last call that allocated or freed
        for kind, at, context, stack, flags, name, address, size, epoch, source in zip(
            *columns, records["copy"]["source"].tolist(), strict=True
        ):
            if kind != operation_log.API:
                if source not in sources:
                    sources.add(source)
                    for row in process.at(source):
                        row.copied = True
                continue
            sources.clear()
            call = name.decode()
            if call == _CONTEXT_DESTROY:
                process.end_context(context, epoch, at)
            elif call in _SHARING:
                process.shares_handles |= not address
                for row in process.at(address):
                    row.shared = True
            elif call in FREEING:
                if not flags & operation_log.CAPTURED:  # else it is a graph node, which frees nothing
                    process.end(address, size if call == "cuMemUnmap" else 0, epoch, at)
            elif 0 < address < _ADDRESS_LIMIT and 0 < size <= _ADDRESS_LIMIT - address:
                if len(self._logged) >= LIMIT:
                    self.dropped += 1
                    continue
                of_host = bool(flags & operation_log.HOST_MEMORY)
                row = _LoggedAllocation(
                    process, address, address + size, call, context, stack, epoch, at, of_host=of_host
                )
                process.begin(row)
                self._logged.append(row)

    def all(self) -> list[Allocation]:
        """Return all allocations so far, in log order."""
        found = []
        for number, row in enumerate(self._logged):
            made = self._freed.get(number)
            if made is None:
                made = row.as_allocation()
                if made.freed:
                    self._freed[number] = made
            found.append(made)
        return found


@dataclass(eq=False, slots=True)
class _LoggedAllocation:
    """An allocation as logged. Its end may still be unknown. `first`, `last`: its first and last epoch."""

    process: _LiveAllocations
    base: int
    end: int
    call: str
    context: int
    stack: int
    first: int
    allocated_ns: int
    last: int = _LAST_EPOCH
    freed_ns: int | None = None
    copied: bool = False
    shared: bool = False
    of_host: bool = False

    def as_allocation(self) -> Allocation:
        """Return the `Allocation` as known so far, with its stack, or with the name of a variable."""
        log = self.process.log
        stack: tuple[HostFrame, ...] = log.stacks.get(self.stack, ())
        call, kind = self.call, "host" if self.of_host else ALLOCATING[self.call]
        shared = self.shared or self.call in _IMPORTING
        shared |= self.call == "cuMemMap" and self.process.shares_handles
        copies_unknown = self.process.copies_unknown or shared or log.vendor is Vendor.AMD
        if kind == "variable":
            from gpubpf import names

            symbol = stack[0].symbol if stack else "(unknown)"
            file = names.file_of_static(symbol)  # static variables of several files may have one name
            call = f"variable {names.demangle(symbol).full}{file and f' ({file})'}"
            stack = ()
        gpu = log.gpus.get(self.context, 0)
        return Allocation(
            log.process, log.pid, log.comm, gpu, self.base, self.end - self.base, call, kind, stack,
            self.first, None if self.last == _LAST_EPOCH else self.last, self.allocated_ns, self.freed_ns,
            self.copied or (None if copies_unknown else False), shared, log.vendor, wave_of(log.waves, gpu),
        )  # fmt: skip


class _LiveAllocations:
    """The allocations of one process that have not been freed, by address and by context."""

    def __init__(self, log: ProcessLog) -> None:
        self.log = log
        # Several can share an address, because a free may be logged after the next allocation.
        self._by_base: dict[int, list[_LoggedAllocation]] = {}
        self._bases: list[int] = []  # sorted
        self._by_context: dict[int, dict[int, _LoggedAllocation]] = {}
        # True if copies may be missing from the log: it lost records, a graph had nodes that are not kernels, or a call made several
        # copies.
        self.copies_unknown = False
        self._futile = (
            0  # allocations that were looked at in vain, because they came later than the end in the log
        )
        self.shares_handles = False  # memory of cuMemCreate may be shared with another process

    def begin(self, row: _LoggedAllocation) -> None:
        """Add an allocation. Earlier ones that overlap it have ended, even if their free was not logged."""
        place = bisect.bisect_left(self._bases, row.end)
        for base in self._bases[max(place - _MOST_OVERLAPS, 0) : place][::-1]:
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
        if len(same) > _MOST_OVERLAPS:
            self._remove(same[0])

    def at(self, address: int) -> list[_LoggedAllocation]:
        """Return the allocations at an address."""
        place = bisect.bisect_right(self._bases, address)
        bases = self._bases[max(place - 1, 0) : place]
        return [row for base in bases for row in self._by_base[base] if address < row.end]

    def end(self, base: int, size: int, epoch: int, at: int) -> None:
        """End the latest allocation at `base` that existed in `epoch`; with `size`, all that begin in [base, base + size)."""
        bases = [base]
        if size:
            if self._futile > _MOST_FUTILE:
                return
            first, last = (bisect.bisect_left(self._bases, edge) for edge in (base, base + size))
            bases = self._bases[first:last]
        for begin in bases:
            rows = [row for row in self._by_base.get(begin, ()) if row.first <= epoch]
            self._futile += not rows
            for row in rows if size else rows[-1:]:
                self._free(row, epoch, at)

    def end_context(self, context: int, epoch: int, at: int) -> None:
        """End all allocations of a destroyed context that existed in `epoch`."""
        if self._futile > _MOST_FUTILE:
            return
        for row in list(self._by_context.get(context, {}).values()):
            if row.first <= epoch:
                self._free(row, epoch, at)
            else:
                self._futile += 1

    def _free(self, row: _LoggedAllocation, epoch: int, at: int) -> None:
        row.last, row.freed_ns = min(row.last, epoch), at
        self._remove(row)

    def _remove(self, row: _LoggedAllocation) -> None:
        del self._by_context[row.context][id(row)]
        rows = self._by_base[row.base]
        rows.remove(row)
        if not rows:
            del self._by_base[row.base]
            del self._bases[bisect.bisect_left(self._bases, row.base)]

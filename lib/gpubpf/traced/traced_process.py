"""One traced process: the state that its agent reports, the files that it sends, and the data read from them.

`Server` fills it with the agent's data, which is untrusted. readout.py and summary.py read it for tools.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gpubpf.agent import protocol
from gpubpf.agent.definitions import LEAST_CAPACITY, MapSpec, Place, SnapshotFlag, Vendor
from gpubpf.errors import Error, SessionError
from gpubpf.process import address_space, limits, traceable
from gpubpf.process.host_frames import HostFrame, MappedFiles
from gpubpf.process.target_socket import TargetSocket
from gpubpf.record import MutableRecord, field, replace
from gpubpf.records.log_file import LogFile
from gpubpf.traced.register_counts import RegisterCounts

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.images.mapped import MappedImages
    from gpubpf.images.sidecar import Sidecar
    from gpubpf.inject.values import Site
    from gpubpf.linux.host_programs import HostProcess
    from gpubpf.records.operation_log import OpLog
    from gpubpf.records.rings import RingReader
    from gpubpf.traced.large_modules import LargeModule

HIDDEN_CALLER = "unknown"  # the symbol of a stack frame whose return address a return probe has replaced
_NAME, _SITE = 200, 400  # bytes of memory for a kernel's name, without its text, and for a site
GRACE = 0.3  # seconds until all writes of an ended process have reached its files


class Ring(MutableRecord):
    """A ring of one context. copy: the latest unread snapshot (file, offset) of a ring in GPU memory."""

    reader: RingReader
    closed: bool = False  # its context was destroyed
    copy: tuple[int, int] | None = None
    done: bool = False  # whether it was read to the end


class StoredSnapshot:
    """One reading of a context's maps. `snapshot` describes the layout; the bytes are in the process's file, or compressed in memory.

    The owner closes it. Code that reads a process's `snapshots` holds `Measurement.lock`, because a newer one replaces it."""

    def __init__(self, snapshot: protocol.Snapshot, file: int, before: StoredSnapshot | None = None) -> None:
        """`before`: the context's previous reading."""
        self.snapshot = snapshot
        # The number of launches whose counts are certainly complete: all of this reading's, unless kernels were running.
        self.complete: int = self.launches if self.idle else before.complete if before else 0
        self._file: int | None = file
        # Offset, size, compressed bytes; sorted by offset.
        self._compressed: list[tuple[int, int, bytes]] = []

    @property
    def idle(self) -> bool:
        """Whether no kernel was running."""
        return not self.snapshot.flags & SnapshotFlag.RUNNING

    @property
    def in_file(self) -> bool:
        """Whether the file with its bytes is open."""
        return self._file is not None

    @property
    def launches(self) -> int:
        """The number of instrumented launches that began before this reading."""
        return sum(i.launches for i in self.snapshot.instances if i.by_shape)

    def is_last(self, request: int) -> bool:
        """Whether this reading was made at the end of its process, or of the measurement.

        request: the number of the measurement's last request."""
        asked = self.snapshot.sequence
        return asked == request if asked else not self.snapshot.flags & SnapshotFlag.UNASKED

    def read(self, size: int, offset: int) -> bytes:
        """Return `size` bytes from `offset`; fewer at the end of the file. Once compressed, return b"" for ranges outside the maps."""
        if self._file is not None:
            return protocol.read_file(self._file, size, offset)
        at = bisect_right(self._compressed, offset, key=lambda part: part[0]) - 1
        start, length, data = self._compressed[at] if at >= 0 else (0, 0, b"")
        if offset + size > start + length:
            return b""
        return zlib.decompress(data)[offset - start : offset - start + size]

    def compressed(self, specs: Sequence[MapSpec]) -> list[tuple[int, int, bytes]]:
        """Return the compressed contents of the maps, for `replace_file`. `specs`: the map specifications by number."""
        places = [(array.offset, array.size) for i in self.snapshot.instances for array in i.arrays]
        for number, (offset, size) in self.snapshot.shared.items():
            if number < len(specs) and size <= specs[number].fixed:
                places.append((offset, size))
        return [(offset, size, zlib.compress(self.read(size, offset), 1)) for offset, size in sorted(places)]

    def replace_file(self, compressed: list[tuple[int, int, bytes]]) -> None:
        """Keep only these contents, and close the file."""
        self.close()
        self._compressed = compressed

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.close()  # for a session that was dropped without being closed


class TracedProcess(MutableRecord):
    """A process that loaded the agent. It is kept after the process has ended.

    The server's thread and `BackgroundWork` fill it while they hold `Measurement.lock`. The thread that runs `Session.intervals` takes
    readings, logs and rings out of it. Three locks guard the rest:
    send_lock: writing to `socket`.
    _resource_lock: `control` and the `_final_…` values, `host` and `shared`.
    _log_lock: `log`, `_log_reader` and the buffered records.
    """

    socket: TargetSocket
    pid: int
    number: int  # from 1, unique in the session; the kernel may reuse a pid
    user: int = 0  # user ID
    comm: str = ""
    driver_version: int = (
        0  # 12080 for CUDA 12.8; 0: unknown; on AMD GPUs: how often it initialized ROCr before
    )
    vendor: Vendor = (
        Vendor.NVIDIA
    )  # the vendor of its agent's GPUs; a process that uses both has two agents and two entries
    frames: protocol.Frames = field(default_factory=protocol.Frames)
    unfinished: int = 0  # bytes of incomplete messages, as counted for limits.UNFINISHED
    send_lock: threading.Lock = field(default_factory=threading.Lock)
    control: int | None = None  # file of the control block
    sent_stubs: bool = False  # STUBS has arrived
    welcomed: bool = False  # WELCOME has been sent
    reported_hooks: bool = False  # HOOKED has arrived
    announced: bool = False  # the tool has reported that it is attached
    hooked: bool = False  # the hooks are live
    started: float = 0.0  # see `traceable.started`
    executed: bool = False  # its process executed another program, which has its own entry if it is traced
    again: str = ""  # if its process was traced before: what has happened since then
    disconnected: bool = False
    # The tool closed the connection, because of a bad message or a lack of open files. The program may continue.
    dropped: bool = False
    out_of_files: bool = False  # it was dropped, or attaching failed, for lack of open files
    disconnected_at: float = 0.0  # time.monotonic
    last_drain: int = 0  # sequence number of the last DRAIN that the agent has completed
    drained_ns: int = 0  # when it was (time.monotonic_ns)
    names: dict[int, str] = field(default_factory=dict)  # slot → mangled kernel name
    refused: dict[int, str] = field(default_factory=dict)  # slot → the agent's reason not to instrument
    refusals: dict[str, str] = field(default_factory=dict)  # kernel → the sidecar's reason
    no_room: dict[int, protocol.NoRoom] = field(default_factory=dict)  # by slot
    faults: list[protocol.KernelFault] = field(default_factory=list)
    matched: set[str] = field(default_factory=set)  # kernels that the user selected
    later: set[str] = field(default_factory=set)  # kernels of large modules, with copies when launched
    entries: set[str] = field(default_factory=set)  # all kernels of its modules, launched or not
    waves: dict[str | int, int] = field(default_factory=dict)  # see `ProcessLog`
    may_wait: set[str] = field(default_factory=set)  # kernels whose blocks may wait for each other
    # Kernel → the sites of each of its builds: modules may have different kernels of one name, or different functions that it calls.
    sites: dict[str, list[tuple[Site, ...]]] = field(default_factory=dict)
    # Kernel → opcode → accesses that cannot be probed.
    unprobed: dict[str, dict[str, int]] = field(default_factory=dict)
    registers: RegisterCounts = field(default_factory=RegisterCounts)
    snapshots: dict[int, StoredSnapshot] = field(default_factory=dict)  # context → latest
    readings: deque[StoredSnapshot] = field(default_factory=deque)  # not yet taken by the tool
    skipped_readings: int = 0  # dropped because the tool did not take them in time
    contexts: dict[int, int] = field(default_factory=dict)  # number → GPU
    stacks: dict[int, tuple[HostFrame, ...]] = field(default_factory=dict)
    ranges: dict[int, tuple[protocol.RangeName, ...]] = field(default_factory=dict)
    log: LogFile | None = None  # None before LOG has arrived, and after the last reading
    log_lost: int = 0  # operations that found no room in the log
    buffered: int = 0  # records moved out of the log, not yet read by the tool
    virtual: bool = False  # its clock is virtual
    rings: dict[tuple[int, int], Ring] = field(default_factory=dict)  # (map, context) → ring
    host: HostProcess | None = None
    shared: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)  # shared arrays, copied at its end
    pending_images: int = 0  # images and modules without an answer
    image_answered: bool = False  # at least one has been answered
    large_modules: dict[int, LargeModule] = field(default_factory=dict)  # by the request that reported it
    failed: bool = False  # a context's memory could not be read, as after a kernel fault
    without_files: bool = False  # at a reading, the agent could not create a file for its results
    loadable: bool = False  # its files contain matching kernels
    # Request → matched kernels that were loaded before the agent and whose copies are not ready yet. A nameless kernel means that the
    # tool does not know yet which kernels these are.
    preparing: dict[int, frozenset[str]] = field(default_factory=dict)
    attached: bool = False  # it was running before the tool attached to it
    from_before: bool = False  # the same, and it had used the GPU: `attached` is also true of a process that is held in cuInit
    pidfd: int | None = None  # only if `attached`
    hook_failure: str = ""  # if attaching failed: the reason, and what to do
    stood_ns: int = 0  # time that its threads were stopped
    drained_bytes: int = 0  # bytes read from its maps, logs and rings
    images: int = 0  # images that it loaded and the agent sent
    image_bytes: int = 0
    sent_patches: bool = False  # PATCHES has arrived
    module_bytes: int = 0  # about how many bytes the names and sites of its modules take, for limits.MODULES
    text: int = 0  # bytes of names, reasons and stacks, for limits.TEXT
    _resource_lock: threading.Lock = field(default_factory=threading.Lock)
    _log_lock: threading.Lock = field(default_factory=threading.Lock)
    _log_reader: OpLog | None = None  # created at the first reading
    _buffered: list[np.ndarray[Any, Any]] = field(default_factory=list)
    # The last values from the control block, kept after it is closed.
    _final_counters: tuple[list[protocol.Counters], int] = field(default_factory=lambda: ([], 0))
    _final_graphs: int = 0
    _final_times: tuple[int, int] = (0, 0)
    _final_graphs_before: int = 0
    _final_grids: int = 0
    _final_lost_calls: protocol.LostCalls = field(default_factory=protocol.LostCalls)
    _final_hook_calls: protocol.HookCalls = field(default_factory=protocol.HookCalls)

    @property
    def driver_cuda(self) -> int:
        """The CUDA version of the driver, such as 12; 0 if unknown."""
        return self.driver_version // 1000

    @property
    def label(self) -> str:
        """The process in messages: "pid 123 (name)"."""
        return f"pid {self.pid} ({self.comm or traceable.comm(self.pid)})"

    @property
    def identity(self) -> tuple[int, float]:
        """Equal for all entries of a process."""
        return self.pid, self.started

    @property
    def agent(self) -> tuple[int, float, Vendor]:
        """A key that successive entries of one process share: it executed another program, or initialized ROCr again."""
        return self.pid, self.started, self.vendor

    @property
    def waiting(self) -> int:
        """The number of kernels that were loaded before the agent and whose copies are not ready yet; 1 if the number is unknown."""
        names = frozenset().union(*self.preparing.values())
        return len(names - {""}) or len(names)

    @property
    def gpus(self) -> frozenset[int]:
        """The ordinals of the GPUs on which it has contexts."""
        return frozenset(self.contexts.values())

    @cached_property
    def mapped(self) -> MappedImages:
        """The device code in the files that it maps."""
        from gpubpf.images.mapped import MappedImages

        return MappedImages(self.pid)

    @cached_property
    def _mapped_files(self) -> MappedFiles:
        return MappedFiles(self.pid, self.user)

    @property
    def files(self) -> int:
        """About how many files from this process are open: images without an answer, and memory of contexts."""
        return self.pending_images + sum(stored.in_file for stored in self.snapshots.values())

    def bytes_to_keep(self, sidecar: Sidecar) -> int:
        """Return about how many bytes of memory the names and sites in a sidecar need, without those that are already kept."""
        named = {*sidecar.entries, *sidecar.refusals, *(kernel.name for kernel in sidecar.kernels)}
        names = [name for name in named if name not in self.entries and name not in self.refusals]
        sites = sum(
            len(kernel.sites)
            for kernel in sidecar.kernels
            if kernel.sites not in self.sites.get(kernel.name, ())
        )
        return sum(map(len, names)) + _NAME * len(names) + _SITE * sites

    def add_sites(self, sidecar: Sidecar) -> dict[str, int]:
        """Record what tools show about a sidecar's kernels, such as their sites. The caller holds `Measurement.lock`.

        Return the build of each kernel: its index in `sites`."""
        builds: dict[str, int] = {}
        for kernel in sidecar.kernels:
            places = self.unprobed.setdefault(kernel.name, {})
            for opcode, n in kernel.unprobed.items():
                places[opcode] = max(places.get(opcode, 0), n)
            if kernel.amd is not None:
                self.waves[kernel.name] = kernel.amd.wave
            if kernel.waits:
                self.may_wait.add(kernel.name)
            known = self.sites.setdefault(kernel.name, [])
            if kernel.sites not in known:
                known.append(kernel.sites)
            builds[kernel.name] = known.index(kernel.sites)
        return builds

    # --- counters ---

    # These may be called from any thread.

    def counters(self) -> tuple[list[protocol.Counters], int]:
        """See `protocol.read_control`."""
        with self._resource_lock:
            return protocol.read_control(self.control) if self.control is not None else self._final_counters

    def launched_copies(self) -> set[str]:
        """Return the names of the kernels whose instrumented copy has been launched."""
        counters = self.counters()[0]
        return {
            name
            for slot, name in list(self.names.items())
            if slot < len(counters) and counters[slot].instrumented
        }

    def has_launched(self) -> bool:
        """Return whether it has launched a kernel."""
        return bool(self.names) and (self.graph_launches() > 0 or any(one.seen for one in self.counters()[0]))

    def set_one_in(self, slot: int, one_in: int) -> None:
        """See `protocol.set_one_in`."""
        with self._resource_lock:
            if self.control is not None:
                protocol.set_one_in(self.control, slot, one_in)

    def graph_launches(self) -> int:
        """See `protocol.graph_launches`."""
        with self._resource_lock:
            return protocol.graph_launches(self.control) if self.control is not None else self._final_graphs

    def graph_launches_before(self) -> int:
        """See `protocol.graph_launches_before`."""
        with self._resource_lock:
            return (
                protocol.graph_launches_before(self.control)
                if self.control is not None
                else self._final_graphs_before
            )

    def grids(self) -> int:
        """See `protocol.grids`."""
        with self._resource_lock:
            return protocol.grids(self.control) if self.control is not None else self._final_grids

    def lost_calls(self) -> protocol.LostCalls:
        """See `protocol.lost_calls`."""
        with self._resource_lock:
            return protocol.lost_calls(self.control) if self.control is not None else self._final_lost_calls

    def hook_calls(self) -> protocol.HookCalls:
        """See `protocol.hook_calls`."""
        with self._resource_lock:
            return protocol.hook_calls(self.control) if self.control is not None else self._final_hook_calls

    def virtual_times(self) -> tuple[int, int]:
        """See `protocol.virtual_times`."""
        with self._resource_lock:
            return protocol.virtual_times(self.control) if self.control is not None else self._final_times

    # --- messages ---

    @property
    def waits_for_welcome(self) -> bool:
        return self.sent_stubs and not self.welcomed

    def send_working(self) -> None:
        """Tell the waiting agent that the tool is working on its request, unless another thread is sending. Never waits."""
        self.offer(protocol.working())

    def offer(self, message: bytes) -> bool:
        """Send a small message, from any thread. Never waits: return False if another thread is sending, or if there is no room.

        A small message is sent as a whole or not at all."""
        if not self.send_lock.acquire(blocking=False):
            return False
        try:
            return self.socket.send(message)
        except OSError:
            return True  # the agent has disconnected; the server notices that
        finally:
            self.send_lock.release()

    def send(self, data: bytes, file: int | None = None) -> None:
        """Send a message, from any thread. Disconnect an agent that does not take it within limits.SEND_WAIT.

        If another thread still sends then, nothing is sent."""
        until = time.monotonic() + limits.SEND_WAIT
        if not self.send_lock.acquire(timeout=limits.SEND_WAIT):
            return
        try:
            sent = self.socket.send(data, () if file is None else [file], until)
        except OSError:
            sent = False
        finally:
            self.send_lock.release()
        if not sent:
            self.socket.shutdown()

    def count_text(self, size: int) -> None:
        """Count bytes of text that the tool keeps for the agent. Raises Malformed beyond limits.TEXT."""
        self.text += size
        if self.text > limits.TEXT:
            raise protocol.Malformed("too many names")

    def add_stack(self, number: int, frames: Sequence[protocol.StackFrame]) -> None:
        """Keep a host stack. A frame whose return address another tracer's return probe has replaced becomes HIDDEN_CALLER."""
        nameless = {frame.address for frame in frames if not (frame.file or frame.symbol)}
        # All return probes of a process share one return address, which the kernel places as high as it can. Checking an
        # address takes time, so check only the highest candidate.
        at = max((at for at in nameless if (at + 1) % mmap.PAGESIZE == 0), default=None)
        hidden = {at} if at is not None and address_space.is_return_probe(self.pid, at + 1) else set()
        self.stacks[number] = tuple(
            replace(frame, symbol=HIDDEN_CALLER) if frame.address in hidden & nameless else frame
            for frame in self._mapped_files.frames(frames)
        )

    def add_snapshot(self, snapshot: protocol.Snapshot, file: int, keep: bool) -> None:
        """Replace the last snapshot of a context. `keep`: also add it to `readings`.

        Takes ownership of `file`, unless it raises Malformed."""
        self.failed |= bool(snapshot.flags & SnapshotFlag.FAILED)
        for part in snapshot.rings:
            ring = self.rings.get((part.map, snapshot.context))
            if ring is None or ring.done:
                continue
            size = ring.reader.place.control_size
            control = protocol.read_file(file, size, part.control)
            if len(control) == size and not snapshot.flags & SnapshotFlag.FAILED:
                ring.reader.control(control)
            ring.closed |= bool(snapshot.flags & SnapshotFlag.CLOSED)
            if part.size == ring.reader.place.size and ring.reader.place.place == Place.GPU_RING:
                if ring.copy is not None:
                    os.close(ring.copy[0])
                ring.copy = (os.dup(file), part.offset)
        if snapshot.flags & SnapshotFlag.OF_RINGS:
            os.close(file)
            return
        before = self.snapshots.get(snapshot.context)
        if before is None and len(self.snapshots) >= limits.CONTEXTS:
            raise protocol.Malformed("memory of too many contexts")
        if snapshot.flags & SnapshotFlag.FAILED and (before or snapshot.size):
            os.close(file)  # keep the older one
            return
        # Rings and context maps leave holes in the file, and their sizes are known. Arrays of instances leave none.
        held = os.fstat(file).st_blocks * 512
        if sum(array.size for instance in snapshot.instances for array in instance.arrays) > held:
            raise protocol.Malformed("a snapshot larger than its file")
        self.drained_bytes += min(held, snapshot.size)
        if keep:
            self.readings.append(StoredSnapshot(snapshot, os.dup(file)))
            while len(self.readings) > limits.READINGS or (
                len(self.readings) > 1 and sum(t.snapshot.size for t in self.readings) > limits.READING_BYTES
            ):
                self.readings.popleft().close()
                self.skipped_readings += 1
        if before:
            before.close()
        self.snapshots[snapshot.context] = StoredSnapshot(snapshot, file, before)

    def add_log(self, file: int, records: int) -> None:
        """Open the operation log. Takes ownership of `file`, unless it raises Malformed or OSError."""
        if self.log is not None or self.log_lost:
            raise protocol.Malformed("a second log")
        try:
            log = LogFile(os.dup(file))
        except SessionError:
            raise protocol.Malformed("an invalid log") from None
        if log.capacity != records:
            raise protocol.Malformed("a log of the wrong size")
        self.log, self.virtual = log, log.virtual
        os.close(file)

    def add_ring(self, place: protocol.RingPlace, dtype: np.dtype[Any], most: int, file: int | None) -> None:
        """Open a ring. Takes ownership of `file`, unless it raises Malformed. `most`: the allowed size of its records in bytes."""
        from gpubpf.records.rings import RingReader

        size = place.shards * place.capacity * place.stride
        if size > most and place.capacity > LEAST_CAPACITY:
            raise protocol.Malformed("a ring larger than requested")
        if (place.map, place.context) in self.rings or len(self.rings) >= limits.RINGS:
            raise protocol.Malformed("too many rings")
        if (file is None) != (place.place == Place.GPU_RING):
            raise protocol.Malformed("a ring without its memory")
        if file is not None and not protocol.sealed(file, place.size):
            raise protocol.Malformed("a ring whose file is not sealed")
        try:
            reader = RingReader(place, dtype, file)
        except Error:
            raise protocol.Malformed("a ring with records of the wrong size") from None
        self.rings[place.map, place.context] = Ring(reader)
        if file is not None:
            os.close(file)

    # --- data that the thread of `Session.intervals` reads ---

    @property
    def no_more_data(self) -> bool:
        """Whether the process can no longer write into its log and rings."""
        return self.disconnected and time.monotonic() - self.disconnected_at >= GRACE

    @property
    def fully_read(self) -> bool:
        """Whether the process can no longer write, and the tool has read everything."""
        taken_all = self.log is None and not self.readings and all(ring.done for ring in self.rings.values())
        return taken_all and self.no_more_data

    def read_log(self, last: bool) -> np.ndarray[Any, Any] | None:
        """Return the new records; None if there is no log, or it was read to its end. `last`: this is the last reading."""
        import numpy as np

        from gpubpf.records import operation_log

        if self.log is None:
            return None
        with self._log_lock:
            kept, self._buffered, self.buffered = self._buffered, [], 0
            self._log_reader = self._log_reader or operation_log.OpLog(self.log)
            records = self._log_reader.read(last)
            self.drained_bytes += records.nbytes
            self.log_lost = self._log_reader.lost
            if last:
                self.log = self._log_reader = None
        if not kept:
            return records
        # Concatenate as plain bytes, because NumPy cannot concatenate overlapping fields.
        raw = [part.view(f"V{operation_log.RECORD}") for part in (*kept, records)]
        return np.concatenate(raw).view(operation_log.DTYPE)

    def buffer_log(self) -> None:
        """Move records from the log into memory, so that a burst finds space while the tool still processes the last one.

        Called from the server's log thread. Before the tool's first reading, it moves records only if the log is a quarter full:
        reading imports NumPy, which would delay attaching."""
        with self._log_lock:
            if self.log is not None and (self._log_reader or self.log.begun > self.log.capacity // 4):
                from gpubpf.records.operation_log import OpLog

                self._log_reader = self._log_reader or OpLog(self.log)
                self._buffered.append(self._log_reader.read())
                self.drained_bytes += self._buffered[-1].nbytes
                self.buffered += len(self._buffered[-1])

    # --- after the process has ended ---

    def close(self) -> None:
        """Close the files of a disconnected process, because there may be thousands of them. Keep the last counters."""
        self.frames.close()
        self.socket.shutdown()  # a thread that is sending gives up
        with self.send_lock:
            self.socket.close()
        last, graphs, times = self.counters(), self.graph_launches(), self.virtual_times()
        before, hooks, grids = self.graph_launches_before(), self.hook_calls(), self.grids()
        lost = self.lost_calls()
        with self._resource_lock:
            self._final_counters, self._final_graphs, self._final_times = last, graphs, times
            self._final_graphs_before, self._final_hook_calls, self._final_grids = before, hooks, grids
            self._final_lost_calls = lost
            if self.control is not None:
                os.close(self.control)
                self.control = None
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self.__dict__.pop("mapped", None)
        self.disconnected, self.disconnected_at = True, time.monotonic()

    def compress_snapshots(self, specs: Sequence[MapSpec], lock: AbstractContextManager[Any]) -> None:
        """Compress the last snapshots of a disconnected process, and close their files. `lock`: guards `snapshots`."""
        for stored in list(self.snapshots.values()):
            compressed = stored.compressed(specs)
            with lock:
                stored.replace_file(compressed)

    def close_host(self) -> None:
        """Detach the host programs, and keep a copy of the shared arrays. This is slow, so it runs in separate threads."""
        with self._resource_lock:
            host, self.host = self.host, None
            if host is None:
                return
            for name in host.files:
                self.shared[name] = host.array(name)
        host.close()

    def shared_array(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return a copy of a shared array, from any thread; None if the process has none."""
        with self._resource_lock:
            return self.host.array(name) if self.host is not None else self.shared.get(name)

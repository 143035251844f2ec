"""One traced process, as its agent tells it: what it said, the files that it handed over, what is read from them.

Its agent is untrusted. `Server` serves it, and holds `Measurement.lock` for what changes here, but where a method says otherwise.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gpubpf.agent import protocol
from gpubpf.agent.definitions import Place, SnapshotFlag
from gpubpf.ebpf.maps import RING_SHARD
from gpubpf.errors import Error, SessionError
from gpubpf.session.log_file import LogFile

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.images.instrument import Sidecar
    from gpubpf.images.mapped import MappedImages
    from gpubpf.linux.host_programs import HostProcess
    from gpubpf.ptx.inject import Site
    from gpubpf.session.operation_log import OpLog
    from gpubpf.session.rings import RingReader

# Of one process; no program has so many, and the tool's memory and files are not theirs to use up.
TEXT_LIMIT, PENDING_LIMIT, CONTEXT_LIMIT, RING_LIMIT = 64 << 20, 4096, 4096, 64
READINGS, READING_BYTES = 32, 256 << 20  # that wait to be looked at
KEPT_RECORDS = 1 << 22  # of all logs, ditto
GRACE = 0.3  # seconds after which nothing of a process that ended is still on its way into its files


@dataclass
class Ring:
    """A ring of one context. `copy`: of one in GPU memory, the latest snapshot (file, offset) that was not looked at."""

    reader: RingReader
    closed: bool = False  # its context is gone
    copy: tuple[int, int] | None = None
    done: bool = False


class Taken:
    """Maps of one context as they were read: in a file that the process handed over, or packed. Closed by whoever has it."""

    def __init__(self, snapshot: protocol.Snapshot, file: int) -> None:
        self.snapshot = snapshot
        self._file: int | None = file
        self._packed: list[tuple[int, int, bytes]] = []  # offset, size, compressed; by offset

    def read(self, size: int, offset: int) -> bytes:
        """Fewer bytes where there are not so many; none of what no map holds."""
        if self._file is not None:
            return protocol.read_file(self._file, size, offset)
        at = bisect_right(self._packed, offset, key=lambda part: part[0]) - 1
        start, length, data = self._packed[at] if at >= 0 else (0, 0, b"")
        if offset + size > start + length:
            return b""
        return zlib.decompress(data)[offset - start : offset - start + size]

    def packed(self, specs: Sequence[protocol.MapSpec]) -> list[tuple[int, int, bytes]]:
        """What its maps hold, for `keep`."""
        places = [(array.offset, array.size) for i in self.snapshot.instances for array in i.arrays]
        for number, (offset, size) in self.snapshot.shared.items():
            if number < len(specs) and specs[number].fixed == size:
                places.append((offset, size))
        return [(offset, size, zlib.compress(self.read(size, offset), 1)) for offset, size in sorted(places)]

    def keep(self, packed: list[tuple[int, int, bytes]]) -> None:
        """Only that, and no file."""
        self.close()
        self._packed = packed

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.close()  # of a session that nobody knows any more


@dataclass(eq=False)
class Process:
    """A process with an agent."""

    socket: socket.socket
    pid: int
    number: int  # from 1; a process id may come again
    comm: str = ""
    frames: protocol.Frames = field(default_factory=protocol.Frames)
    outgoing: threading.Lock = field(default_factory=threading.Lock)
    control: int | None = None
    marked: bool = False  # it sent its marker
    told: bool = False  # it said whether it is hooked
    hooked: bool = False
    gone: bool = False
    gone_at: float = 0.0
    answered: int = 0  # sequence number of the last drain that is done
    names: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)  # by slot, from the agent
    refusals: dict[str, str] = field(default_factory=dict)  # by name, from the sidecars
    matched: set[str] = field(default_factory=set)
    entries: set[str] = field(default_factory=set)  # kernels of its modules, whether it uses them or not
    sites: dict[str, list[tuple[Site, ...]]] = field(
        default_factory=dict
    )  # of each module that has the kernel
    unprobed: dict[str, dict[str, int]] = field(
        default_factory=dict
    )  # by kernel: places by opcode that no program for accesses can see
    registers: list[Future[Mapping[str, tuple[int, int]]]] = field(default_factory=list)
    snapshots: dict[int, Taken] = field(default_factory=dict)  # by context
    readings: deque[Taken] = field(default_factory=deque)
    skipped: int = 0  # readings that nobody looked at in time
    contexts: dict[int, int] = field(default_factory=dict)  # number → GPU
    stacks: dict[int, tuple[protocol.StackFrame, ...]] = field(default_factory=dict)
    log: LogFile | None = None  # None again when nothing more can come
    log_lost: int = 0
    kept: int = 0  # records out of the log, not looked at yet
    virtual: bool = False  # its clock
    rings: dict[tuple[int, int], Ring] = field(default_factory=dict)  # by map and context
    host: HostProcess | None = None
    shared: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)  # at its end
    pending: int = 0  # images without an answer
    served: bool = False  # one was answered
    attached: bool = False  # it ran before the tool did
    pidfd: int | None = None  # of one that was attached to
    trouble: str = ""  # why hooks are not in one that was attached to; what to do
    stood_ns: int = 0  # for how long its threads were stopped
    drained_bytes: int = 0  # read from its maps, logs and rings
    asked: bool = False  # it sent its hooks as a list, which it does once
    text: int = 0  # bytes of names, reasons and stacks
    _reading: threading.Lock = field(default_factory=threading.Lock)
    _logging: threading.Lock = field(default_factory=threading.Lock)
    _reader: OpLog | None = None  # of the log, once somebody looks at it
    _kept: list[np.ndarray[Any, Any]] = field(default_factory=list)
    # of a process that is gone
    _last: tuple[list[protocol.Counters], int] = field(default_factory=lambda: ([], 0))
    _last_graphs: int = 0
    _last_times: tuple[int, int] = (0, 0)
    _last_before: int = 0
    _last_hooks: protocol.HookCalls = field(default_factory=protocol.HookCalls)

    @property
    def who(self) -> str:
        """For messages."""
        return f"pid {self.pid} ({self.comm})"

    @property
    def gpus(self) -> frozenset[int]:
        """Ordinals of those that it has contexts on."""
        return frozenset(self.contexts.values())

    @cached_property
    def mapped(self) -> MappedImages:
        """The device code in its files."""
        from gpubpf.images.mapped import MappedImages

        return MappedImages(self.pid)

    def add_sites(self, sidecar: Sidecar) -> None:
        for kernel in sidecar.kernels:
            places = self.unprobed.setdefault(kernel.name, {})
            for opcode, n in kernel.unprobed.items():
                places[opcode] = max(places.get(opcode, 0), n)
            known = self.sites.setdefault(kernel.name, [])
            if kernel.sites not in known:
                known.append(kernel.sites)

    # --- counters ---

    def counters(self) -> tuple[list[protocol.Counters], int]:
        with self._reading:
            return protocol.read_control(self.control) if self.control is not None else self._last

    def graph_launches(self) -> int:
        with self._reading:
            return protocol.graph_launches(self.control) if self.control is not None else self._last_graphs

    def graph_launches_before(self) -> int:
        """See `protocol.graph_launches_before`."""
        with self._reading:
            return (
                protocol.graph_launches_before(self.control)
                if self.control is not None
                else self._last_before
            )

    def hook_calls(self) -> protocol.HookCalls:
        """See `protocol.hook_calls`."""
        with self._reading:
            return protocol.hook_calls(self.control) if self.control is not None else self._last_hooks

    def virtual_times(self) -> tuple[int, int]:
        """See `protocol.virtual_times`."""
        with self._reading:
            return protocol.virtual_times(self.control) if self.control is not None else self._last_times

    # --- messages ---

    def beat(self) -> None:
        """Says that its images are worked on. Never waits."""
        if self.outgoing.acquire(blocking=False):
            with contextlib.suppress(OSError):
                os.write(self.socket.fileno(), protocol.working())
            self.outgoing.release()

    def send(self, data: bytes, file: int | None = None) -> None:
        """From any thread. A process that does not read is given up."""
        with self.outgoing:
            try:
                if file is None:
                    self.socket.sendall(data)
                else:
                    sent = socket.send_fds(self.socket, [data], [file])
                    self.socket.sendall(data[sent:])
            except OSError:
                with contextlib.suppress(OSError):
                    self.socket.shutdown(socket.SHUT_RDWR)

    def said(self, size: int) -> None:
        self.text += size
        if self.text > TEXT_LIMIT:
            raise protocol.Malformed("more names than a program has")

    def took(self, snapshot: protocol.Snapshot, file: int, keep: bool) -> None:
        """A snapshot came, which replaces the last one of its context. `keep`: it is also one of the `readings`."""
        for part in snapshot.rings:
            ring = self.rings.get((part.map, snapshot.context))
            if ring is None or ring.done:
                continue
            size = RING_SHARD * (1 + ring.reader.place.shards)
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
        if before is None and len(self.snapshots) >= CONTEXT_LIMIT:
            raise protocol.Malformed("memory of more contexts than can be kept")
        if snapshot.flags & SnapshotFlag.FAILED and (before or snapshot.size):
            os.close(file)  # an older one is better than none
            return
        # Rings, and the context's maps (of which it is known how large they are) leave holes in it, other maps do not.
        held = os.fstat(file).st_blocks * 512
        if sum(array.size for instance in snapshot.instances for array in instance.arrays) > held:
            raise protocol.Malformed("memory that is not there")
        self.drained_bytes += min(held, snapshot.size)
        if keep:
            self.readings.append(Taken(snapshot, os.dup(file)))
            while len(self.readings) > READINGS or (
                len(self.readings) > 1 and sum(t.snapshot.size for t in self.readings) > READING_BYTES
            ):
                self.readings.popleft().close()
                self.skipped += 1
        if before:
            before.close()
        self.snapshots[snapshot.context] = Taken(snapshot, file)

    def made_log(self, file: int, records: int) -> None:
        """Takes `file` over."""
        if self.log is not None or self.log_lost:
            raise protocol.Malformed("a second log")
        try:
            log = LogFile(os.dup(file))
        except SessionError:
            raise protocol.Malformed("a log that is none") from None
        if log.capacity != records:
            raise protocol.Malformed("a log of another size")
        self.log, self.virtual = log, log.virtual
        os.close(file)

    def made_ring(self, place: protocol.RingPlace, dtype: np.dtype[Any], most: int, file: int | None) -> None:
        """`most`: bytes of records that it was granted."""
        from gpubpf.session.rings import RingReader

        size = place.shards * place.capacity * place.stride
        if size > most and place.capacity > protocol.LEAST_CAPACITY:
            raise protocol.Malformed("a ring that is larger than it should be")
        if (place.map, place.context) in self.rings or len(self.rings) >= RING_LIMIT:
            raise protocol.Malformed("more rings than a program has")
        if (file is None) != (place.place == Place.GPU_RING):
            raise protocol.Malformed("a ring without its memory")
        if file is not None and not protocol.sealed(file, place.size):
            raise protocol.Malformed("a ring that cannot be read")
        try:
            reader = RingReader(place, dtype, file)
        except Error:
            raise protocol.Malformed("a ring of another kind") from None
        self.rings[place.map, place.context] = Ring(reader)
        if file is not None:
            os.close(file)

    # --- files, read by the tool's main thread ---

    @property
    def over(self) -> bool:
        """Nothing can come into its files any more."""
        return self.gone and time.monotonic() - self.gone_at >= GRACE

    @property
    def settled(self) -> bool:
        """Nothing comes from it any more, and all that came was taken."""
        taken = self.log is None and not self.readings and all(ring.done for ring in self.rings.values())
        return taken and self.over

    def read_log(self, last: bool) -> np.ndarray[Any, Any] | None:
        """The new records; None: there is no log, or nothing more to come from it."""
        import numpy as np

        from gpubpf.session import operation_log

        if self.log is None:
            return None
        with self._logging:
            kept, self._kept, self.kept = self._kept, [], 0
            self._reader = self._reader or operation_log.OpLog(self.log)
            records = self._reader.read(last)
            self.drained_bytes += records.nbytes
            self.log_lost = self._reader.lost
            if last:
                self.log = self._reader = None
        if not kept:
            return records
        raw = [
            part.view(f"V{operation_log.RECORD}") for part in (*kept, records)
        ]  # its fields lie over each other
        return np.concatenate(raw).view(operation_log.DTYPE)

    def keep_log(self) -> None:
        """Takes what is in the log out of it, for `read_log`: a burst finds room while the tool is at work on the one before.
        Until the tool has looked for the first time, only when it fills: that loads NumPy, and there are probes to bring in."""
        with self._logging:
            if self.log is not None and (self._reader or self.log.begun > self.log.capacity // 4):
                from gpubpf.session.operation_log import OpLog

                self._reader = self._reader or OpLog(self.log)
                self._kept.append(self._reader.read())
                self.drained_bytes += self._kept[-1].nbytes
                self.kept += len(self._kept[-1])

    # --- the end ---

    def close(self) -> None:
        """It is gone. There may be very many processes, so what can be closed is. Without the session's lock held."""
        self.frames.close()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes who sends
        with self.outgoing:
            self.socket.close()
        last, graphs, times = self.counters(), self.graph_launches(), self.virtual_times()
        before, hooks = self.graph_launches_before(), self.hook_calls()
        with self._reading:
            self._last, self._last_graphs, self._last_times = last, graphs, times
            self._last_before, self._last_hooks = before, hooks
            if self.control is not None:
                os.close(self.control)
                self.control = None
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self.__dict__.pop("mapped", None)
        self.gone, self.gone_at = True, time.monotonic()

    def pack(self, specs: Sequence[protocol.MapSpec], lock: AbstractContextManager[Any]) -> None:
        """What it left needs no files, and little memory. It is gone; whoever reads its snapshots holds `lock`."""
        for taken in list(self.snapshots.values()):
            packed = taken.packed(specs)
            with lock:
                taken.keep(packed)

    def end_host(self) -> None:
        """Its host programs are taken down; what its shared arrays held stays known. Takes a while: a thread of its own does it."""
        with self._reading:
            host, self.host = self.host, None
            if host is None:
                return
            for name in host.files:
                self.shared[name] = host.array(name)
        host.close()

    def shared_array(self, name: str) -> np.ndarray[Any, Any] | None:
        """A copy of a shared array of its; None: it has none."""
        with self._reading:
            return self.host.array(name) if self.host is not None else self.shared.get(name)

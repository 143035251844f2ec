"""One traced process, as its agent tells it: what it said, the files that it handed over, what is read from them.

Its agent is untrusted. `Server` serves it, and holds `Measurement.lock` for what changes here, but where a method says otherwise.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpubpf.agent import protocol
from gpubpf.errors import Error, SessionError
from gpubpf.maps import RING_SHARD

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.host import HostProcess
    from gpubpf.instrument import Sidecar
    from gpubpf.oplog import OpLog
    from gpubpf.patching import Patch
    from gpubpf.ptx.inject import Site
    from gpubpf.rings import RingReader

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


@dataclass
class Taken:
    """A snapshot that waits to be looked at, and its file."""

    snapshot: protocol.Snapshot
    file: int


@dataclass
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
    sites: dict[str, dict[int, Site | None]] = field(default_factory=dict)  # None: its modules do not agree
    unprobed: dict[str, dict[str, int]] = field(
        default_factory=dict
    )  # by kernel: places by opcode that no program for accesses can see
    registers: list[Future[Mapping[str, tuple[int, int]]]] = field(default_factory=list)
    snapshots: dict[int, tuple[protocol.Snapshot, int]] = field(
        default_factory=dict
    )  # by context: with the file
    readings: deque[Taken] = field(default_factory=deque)
    skipped: int = 0  # readings that nobody looked at in time
    contexts: dict[int, int] = field(default_factory=dict)  # number → GPU
    stacks: dict[int, tuple[protocol.StackFrame, ...]] = field(default_factory=dict)
    log: OpLog | None = None  # None again when nothing more can come
    log_lost: int = 0
    kept: int = 0  # records out of the log, not looked at yet
    virtual: bool = False  # its clock
    rings: dict[tuple[int, int], Ring] = field(default_factory=dict)  # by map and context
    host: HostProcess | None = None
    shared: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)  # at its end
    pending: int = 0  # images without an answer
    attached: bool = False  # it ran before the tool did
    asked: bool = False  # it sent its hooks as a list, which it does once
    patches: tuple[Patch, ...] = ()  # those that were put in
    text: int = 0  # bytes of names, reasons and stacks
    _reading: threading.Lock = field(default_factory=threading.Lock)
    _logging: threading.Lock = field(default_factory=threading.Lock)
    _kept: list[np.ndarray[Any, Any]] = field(default_factory=list)
    # of a process that is gone
    _last: tuple[list[protocol.Counters], int] = field(default_factory=lambda: ([], 0))
    _last_graphs: int = 0
    _last_times: tuple[int, int] = (0, 0)

    @property
    def who(self) -> str:
        """For messages."""
        return f"pid {self.pid} ({self.comm})"

    def add_sites(self, sidecar: Sidecar) -> None:
        for kernel in sidecar.kernels:
            places = self.unprobed.setdefault(kernel.name, {})
            for opcode, n in kernel.unprobed.items():
                places[opcode] = max(places.get(opcode, 0), n)
            known = self.sites.setdefault(kernel.name, {})
            for site in kernel.sites:
                same = known.setdefault(site.number, site) == site
                known[site.number] = site if same else None

    # --- counters ---

    def counters(self) -> tuple[list[protocol.Counters], int]:
        with self._reading:
            return protocol.read_control(self.control) if self.control is not None else self._last

    def graph_launches(self) -> int:
        with self._reading:
            return protocol.graph_launches(self.control) if self.control is not None else self._last_graphs

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
            if len(control) == size and not snapshot.flags & protocol.FAILED:
                ring.reader.control(control)
            ring.closed |= bool(snapshot.flags & protocol.CLOSED)
            if part.size == ring.reader.place.size and ring.reader.place.place == protocol.Place.GPU_RING:
                if ring.copy is not None:
                    os.close(ring.copy[0])
                ring.copy = (os.dup(file), part.offset)
        if snapshot.flags & protocol.OF_RINGS:
            os.close(file)
            return
        before = self.snapshots.get(snapshot.context)
        if before is None and len(self.snapshots) >= CONTEXT_LIMIT:
            raise protocol.Malformed("memory of more contexts than can be kept")
        if snapshot.flags & protocol.FAILED and (before or snapshot.size):
            os.close(file)  # an older one is better than none
            return
        # Rings, and the context's maps (of which it is known how large they are) leave holes in it, other maps do not.
        held = os.fstat(file).st_blocks * 512
        if sum(array.size for instance in snapshot.instances for array in instance.arrays) > held:
            raise protocol.Malformed("memory that is not there")
        if keep:
            self.readings.append(Taken(snapshot, os.dup(file)))
            while len(self.readings) > READINGS or (
                len(self.readings) > 1 and sum(t.snapshot.size for t in self.readings) > READING_BYTES
            ):
                os.close(self.readings.popleft().file)
                self.skipped += 1
        if before:
            os.close(before[1])
        self.snapshots[snapshot.context] = (snapshot, file)

    def made_log(self, file: int, records: int) -> None:
        """Takes `file` over."""
        from gpubpf.oplog import OpLog

        if self.log is not None or self.log_lost:
            raise protocol.Malformed("a second log")
        try:
            log = OpLog(os.dup(file))
        except SessionError:
            raise protocol.Malformed("a log that is none") from None
        if log.capacity != records:
            raise protocol.Malformed("a log of another size")
        self.log, self.virtual = log, log.virtual
        os.close(file)

    def made_ring(self, place: protocol.RingPlace, dtype: np.dtype[Any], most: int, file: int | None) -> None:
        """`most`: bytes of records that it was granted."""
        from gpubpf.rings import RingReader

        size = place.shards * place.capacity * place.stride
        if size > most and place.capacity > protocol.LEAST_CAPACITY:
            raise protocol.Malformed("a ring that is larger than it should be")
        if (place.map, place.context) in self.rings or len(self.rings) >= RING_LIMIT:
            raise protocol.Malformed("more rings than a program has")
        if (file is None) != (place.place == protocol.Place.GPU_RING):
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

    def read_log(self, last: bool) -> np.ndarray[Any, Any] | None:
        """The new records; None: there is no log, or nothing more to come from it."""
        import numpy as np

        from gpubpf import oplog

        if self.log is None:
            return None
        with self._logging:
            kept, self._kept, self.kept = self._kept, [], 0
            records = self.log.read(last)
            self.log_lost = self.log.lost
            if last:
                self.log = None
        if not kept:
            return records
        raw = [part.view(f"V{oplog.RECORD}") for part in (*kept, records)]  # its fields lie over each other
        return np.concatenate(raw).view(oplog.DTYPE)

    def keep_log(self) -> None:
        """Takes what is in the log out of it, for `read_log`: a burst finds room while the tool is at work on the one before."""
        with self._logging:
            if self.log is not None:
                self._kept.append(self.log.read())
                self.kept += len(self._kept[-1])

    # --- the end ---

    def close(self) -> None:
        """It is gone. A command may have very many processes, so what can be closed is. Without the session's lock held."""
        self.frames.close()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes who sends
        with self.outgoing:
            self.socket.close()
        last, graphs, times = self.counters(), self.graph_launches(), self.virtual_times()
        with self._reading:
            self._last, self._last_graphs, self._last_times = last, graphs, times
            if self.control is not None:
                os.close(self.control)
                self.control = None
        self.gone, self.gone_at = True, time.monotonic()

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

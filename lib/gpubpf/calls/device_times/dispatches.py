"""Read the kernel dispatches that the agents in a command's processes report: when each was enqueued, started
and ended.

    dispatches = Dispatches(command, environment, uid)
    …                           # start the command with dispatches.environment
    new = dispatches.take()     # periodically, and with last=True at the end
    dispatches.reason           # why there are no dispatches
    dispatches.close()

`take` returns a structured array, in which the dispatches of each process are in order of their end: `start_ns`,
`end_ns`, `enqueued_ns` (when the launching thread enqueued it; 0: unknown) on CLOCK_BOOTTIME, `queue`,
`kernel` (see `names` of the process), `correlation`, `dispatch` (IDs of rocprofiler-sdk), `tid` (0: unknown),
`gpu` (index among the runtime's GPUs; -1: unknown), `grid` (in work-items), `block`, `shared`, `scratch`
(bytes), `process` (index in `processes`).

An agent's memory is a file that it cannot shrink. It is read and never mapped, and its content is untrusted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import re
import select
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gpubpf.calls.device_times import HSA, ROCPROFILER, Agent, agent_for
from gpubpf.errors import TOO_MANY_FILES, out_of_files
from gpubpf.process import proc, ptrace, target_socket
from gpubpf.record import MutableRecord, field
from gpubpf.traced.command import rocr_tool

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

SOCKET = "GPUBPF_DISPATCHES"
SLOTS, HEADER, NAMES, GPUS = 32768, 4096, 16 << 20, 64  # the same as in ring.h
MAGIC = 0x3144504247505547
STARTED, NO_SDK, OTHER_TOOL, VERSION, REFUSED, NO_MEMORY = range(1, 7)
MOST_PROCESSES = 4096  # maximum per measurement; each needs two open files while it runs
MOST_THREADS = 1 << 16  # maximum thread numbers to keep for a process
MOST_WAITING = 256  # maximum connections whose agent has not greeted
MOST_NAMES = 256 << 20  # bytes of the names of all processes
MOST_TAKEN = 1 << 22  # dispatches to take at once; the others wait, or are overwritten and count as lost
ENDED, UNKNOWN = -1, -2  # instead of a process's pidfd
PATIENCE = 20  # how often to wait for a slot that is being written
_F_GET_SEALS, _F_SEAL_SHRINK = 1034, 2  # fcntl.h
_HELLO = struct.Struct("<Q4I16s")
_RING = struct.Struct("<5Q2I")  # magic, enqueued, written, names, names_lost, stopped, gpus
_STOPPED = 40  # offset of `stopped`
_NAME = struct.Struct("<Q2I")
_SLOT = np.dtype(
    [
        *((name, "<u8") for name in ("number", "start_ns", "end_ns", "enqueued_ns", "queue", "kernel", "correlation", "dispatch")),
        ("tid", "<u4"), ("gpu", "<i4"), ("grid", "<u4", 3), ("block", "<u4", 3), ("shared", "<u4"), ("scratch", "<u4"),
    ]
)  # fmt: skip
DISPATCH = np.dtype(
    [(name, _SLOT[name]) for name in _SLOT.names or () if name != "number"] + [("process", "<i4")]
)
_SIZE = HEADER + SLOTS * _SLOT.itemsize + NAMES


class AgentProcess(MutableRecord):
    """A process that has an agent. `inside`: its PID in its own PID namespace."""

    pid: int
    inside: int
    comm: str
    file: int
    life: int  # a pidfd, ENDED or UNKNOWN
    taken: int = 0  # number of dispatches that were read
    enqueued: int = 0
    waited: int = 0
    names: dict[int, str] = field(default_factory=dict)  # mangled names of kernels
    names_taken: int = 0  # bytes
    names_lost: int = 0
    threads: dict[int, int] = field(default_factory=dict)  # TID in its PID namespace → in the tool's

    @property
    def unended(self) -> int:
        """The number of enqueued dispatches whose end was not reported."""
        return max(0, self.enqueued - self.taken)


class Dispatches:
    """Listens for the agents of a command. `uid`: the command's user; agents of other users, except root, are
    ignored.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], uid: int, simulated: bool = False
    ) -> None:
        self.processes: list[AgentProcess] = []
        self.environment: dict[str, str] = {}
        self.lost = 0  # dispatches that were overwritten, or only partly written
        self._next = 0  # the process to read first: processes take turns
        self._names_left = MOST_NAMES
        self._states: set[tuple[int, int, int]] = set()
        self._refused: str | None = None  # why an agent's memory could not be taken
        self._uids = {uid, 0}
        self._listener: socket.socket | None = None
        self._waiting: list[socket.socket] = []
        self._agent = ROCPROFILER
        self._why: str | None = None
        found = agent_for(command, environment, simulated)
        if not isinstance(found, Agent):
            self._why = found
            return
        self._agent = found
        name = f"gpubpf-{random.SystemRandom().randrange(10**24):024}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind("\0" + name)
        self._listener.listen(MOST_PROCESSES)
        library = found.library.resolve()
        self.environment = {SOCKET: name}
        if found is HSA:
            self.environment |= rocr_tool(library, {**environment, HSA.variable: ""})
        else:
            self.environment[found.variable] = str(library)
        if found is ROCPROFILER and "ROCPROFILER_LOG_LEVEL" not in environment:
            # Its warnings would appear on the command's stderr.
            self.environment["ROCPROFILER_LOG_LEVEL"] = "error"

    @property
    def source(self) -> str:
        """The source of the times: rocprofiler-sdk or ROCr."""
        return self._agent.source

    def close(self) -> None:
        """Close all connections. Later output of agents is not read."""
        for process in self.processes:
            self._leave(process)
        for connection in self._waiting:
            connection.close()
        if self._listener:
            self._listener.close()
            self._listener = None

    @property
    def reason(self) -> str | None:
        """Why there are no dispatches, or None if a process reports them."""
        if self.processes or self._why:
            return self._why
        return self.unread or (
            f"no process reported any: none used a GPU or loaded {self._agent.loads}, or only in another network namespace"
        )

    @property
    def unread(self) -> str | None:
        """Why the dispatches of some programs are not read, or None if those of all programs with an agent are."""
        said = {
            NO_SDK: "librocprofiler-sdk could not be loaded into the program",
            OTHER_TOOL: "another profiler in the program uses rocprofiler-sdk",
            VERSION: "rocprofiler-sdk {2} in the program is not supported; only 1.x is"
            if self._agent is ROCPROFILER
            else "the program's ROCr has another interface for tools",
            REFUSED: "rocprofiler-sdk returned error status {1}",
            NO_MEMORY: "the program's limits leave no memory for its records",
        }
        for state in sorted(self._states):
            version = state[2]
            text = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
            return said[state[0]].format(state[0], state[1], text)
        return self._refused

    @property
    def unended(self) -> int:
        """The number of dispatches whose end was not reported."""
        return sum(process.unended for process in self.processes)

    @property
    def names_lost(self) -> int:
        """The number of kernels whose names did not fit into an agent's memory."""
        return sum(process.names_lost for process in self.processes)

    # --- processes ---

    def _accept(self, last: bool) -> None:
        """Accept the processes that have started since the last call."""
        while self._listener and len(self._waiting) < MOST_WAITING:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if last and out_of_files(error):
                    self._refused = TOO_MANY_FILES
                break
            connection.setblocking(False)
            self._waiting.append(connection)
        still = []
        for connection in self._waiting:
            files: list[int] = []
            try:
                if self._greet(connection, files):
                    continue
                still.append(connection)
                continue
            except OSError:  # closed, or not an agent's greeting
                connection.close()
            finally:
                for file in files:
                    target_socket.discard(file)
        self._waiting = still

    def _greet(self, connection: socket.socket, files: list[int]) -> bool:
        """Return whether an agent's greeting has arrived. Add received files that are not kept to `files`. Raise
        OSError.
        """
        peer = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if peer[1] not in self._uids:
            raise OSError("another user's")
        try:
            text, ancillary, _, _ = connection.recvmsg(_HELLO.size, socket.CMSG_SPACE(4 * 8))
        except BlockingIOError:
            return False
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
        if len(text) != _HELLO.size:
            raise OSError("no greeting")
        magic, state, status, version, inside, comm = _HELLO.unpack(text)
        if magic != MAGIC or not STARTED <= state <= NO_MEMORY:
            raise OSError("no greeting")
        if state != STARTED:
            self._states.add((state, status, version))
        elif len(self.processes) >= MOST_PROCESSES:
            self._refused = f"more than {MOST_PROCESSES} processes"
        elif len(files) != 1:  # the kernel could not allocate a file descriptor
            self._refused = TOO_MANY_FILES
        else:
            # Reading a memfd never blocks. Only memfds have seals.
            if (
                not fcntl.fcntl(files[0], _F_GET_SEALS) & _F_SEAL_SHRINK
                or fcntl.fcntl(files[0], fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR
                or os.fstat(files[0]).st_size != _SIZE
            ):
                raise OSError("not its memory")
            name = re.split(b"[\n\0]", comm)[0].decode("utf-8", "backslashreplace")
            self._follow(peer[0], inside, name, files.pop())
        connection.close()
        return True

    def _follow(self, pid: int, inside: int, comm: str, file: int) -> None:
        try:
            life = os.pidfd_open(pid)
        except ProcessLookupError:
            life = ENDED
        except OSError:  # such as too many open files; read it until the measurement ends
            life = UNKNOWN
        self.processes.append(AgentProcess(pid, inside, comm or "?", file, life))

    def _leave(self, process: AgentProcess) -> None:
        if process.file >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(process.file, b"\1\0\0\0", _STOPPED)  # tells an agent that still runs
            os.close(process.file)
        if process.life >= 0:
            os.close(process.life)
        process.file, process.life = -1, ENDED

    # --- dispatches ---

    def take(self, last: bool = False) -> Array:
        """Return the dispatches that have ended since the last call, of dtype DISPATCH. `last`: do not wait for
        partly written ones.
        """
        self._accept(last)
        parts: list[Array] = []
        left = MOST_TAKEN
        for _ in range(len(self.processes)):
            number = self._next % len(self.processes)
            process = self.processes[number]
            if process.file >= 0:
                if left < SLOTS:  # what a process may have
                    break
                parts.append(self._take(number, process, last))
                left -= len(parts[-1])
            self._next = number + 1
        if last and left < SLOTS:
            self._pass_over()
        return np.concatenate(parts) if parts else np.empty(0, DISPATCH)

    def _pass_over(self) -> None:
        """Count dispatches that are not read at the end as lost."""
        for process in self.processes:
            if process.file >= 0:
                written = self._header(process)[2]
                if process.taken <= written < process.taken + (1 << 40):
                    self.lost += written - process.taken
                    process.taken = written

    def _take(self, number: int, process: AgentProcess, last: bool) -> Array:
        ended = process.life == ENDED or (process.life >= 0 and _is_readable(process.life))
        slots = list(self._read(process, last or ended))
        self._read_names(process)
        if ended:
            self._leave(process)
        taken = np.concatenate(slots) if slots else np.empty(0, _SLOT)
        found = np.empty(len(taken), DISPATCH)
        for name in DISPATCH.names or ():
            if name != "process":
                found[name] = taken[name]
        found["process"] = number
        found["gpu"][(found["gpu"] < 0) | (found["gpu"] >= GPUS)] = -1
        found["tid"] = self._threads(process, found["tid"])
        return found[(found["end_ns"] >= found["start_ns"]) & (found["end_ns"] < 1 << 63)]

    def _header(self, process: AgentProcess) -> tuple[int, ...]:
        return _RING.unpack(os.pread(process.file, _RING.size, 0))

    def _read(self, process: AgentProcess, last: bool) -> Iterator[Array]:
        """Yield the new slots. Stop at one that is being written, unless that takes too long, or `last`."""
        _, process.enqueued, written, _, process.names_lost, *_ = self._header(process)
        if not process.taken <= written < process.taken + (1 << 40):
            return  # not a value that an agent writes
        if written - process.taken > SLOTS:
            self.lost += written - SLOTS - process.taken
            process.taken = written - SLOTS
        while process.taken < written:
            slot = process.taken % SLOTS
            count = min(written - process.taken, SLOTS - slot)
            data = os.pread(process.file, count * _SLOT.itemsize, HEADER + slot * _SLOT.itemsize)
            slots = np.frombuffer(data, _SLOT)
            expected = process.taken + 1 + np.arange(count, dtype="<u8")
            unwritten = np.flatnonzero(slots["number"] < expected)
            if len(unwritten) and not last and process.waited < PATIENCE:
                process.waited += 1
                count = int(unwritten[0])
            else:
                process.waited = 0
            # A slot that was overwritten meanwhile may be torn.
            good = (slots["number"] == expected) & (expected + SLOTS > self._header(process)[2])
            self.lost += count - int(np.count_nonzero(good[:count]))
            yield slots[:count][good[:count]]
            process.taken += count
            if count < len(slots):
                return

    def _read_names(self, process: AgentProcess) -> None:
        begin = HEADER + SLOTS * _SLOT.itemsize
        used = min(self._header(process)[3], NAMES)
        if used <= process.names_taken:
            return
        self._names_left -= used - process.names_taken
        if self._names_left < 0:  # names are read in order, so later names are lost, too
            process.names_lost += 1
            self._names_left += used - process.names_taken
            return
        data = os.pread(process.file, used - process.names_taken, begin + process.names_taken)
        at = 0
        while at + _NAME.size <= len(data):
            kernel, length, done = _NAME.unpack_from(data, at)
            end = at + _NAME.size + length
            if not done or end > len(data):
                break
            process.names[kernel] = (
                data[at + _NAME.size : end].decode("utf-8", "backslashreplace").removesuffix(".kd")
            )
            at = (end + 7) // 8 * 8
        process.names_taken += min(at, len(data))

    def _threads(self, process: AgentProcess, tids: Array) -> Array:
        """Return the TIDs in the tool's PID namespace."""
        if process.inside == process.pid:
            return tids
        if len(process.threads) > MOST_THREADS:
            process.threads.clear()
        unknown = set(np.unique(tids).tolist()) - process.threads.keys()
        if unknown:
            with contextlib.suppress(OSError, ptrace.ThreadEnded):
                for tid in ptrace.threads_of(process.pid):
                    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
                        inside = proc.status(process.pid, tid)["NSpid"].split()[-1]
                        process.threads[int(inside)] = tid
            for tid in unknown:
                process.threads.setdefault(tid, 0)
        return np.array([process.threads[int(tid)] for tid in tids], tids.dtype)


def _is_readable(file: int) -> bool:
    """Return whether a file is readable now. Its number may be too large for select(2)."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(0))

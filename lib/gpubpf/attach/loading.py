"""Load a library into a running process. (patching.py changes the code of a running process.)

**Loading** (`inject`). `dlopen` may wait for the dynamic linker's lock, run constructors, and take seconds. On a thread of the
program, it could wait for ever for a lock that this thread itself holds. A thread created by a bare clone() has no thread-local memory
for the C library (errno, malloc's caches). So the tool borrows a thread of the program for one short call, `pthread_create`.
Everything else runs on the new thread, the worker. The C library knows the worker, all its signals are blocked, and no other thread
waits for it.

The borrowed thread must not be inside malloc or the dynamic linker, because `pthread_create` takes their locks. So one of these
conditions must hold for the thread:

- It sleeps in a system call that waits for an external event (`borrow.waits_for_event`). None of these locks is held across such a
  call. A futex counts only as condition variables and semaphores use it (FUTEX_WAIT_BITSET), because a thread that waits for a lock
  may hold another one.
- It runs code outside the C library, or code directly after a system call. No return address on its stack leads into malloc or the
  dynamic linker (`borrow.ProcessCode`).

In both cases, the thread must not be in a signal handler, which could have interrupted anything: no return address on its stack may
lead to `rt_sigreturn`. The thread must run on the stack that the kernel or the C library created for it, with room for a signal frame:
a coroutine's stack may be too small. If a condition fails, possibly because of stale words on the stack, the tool tries another
thread, or the same thread later. It does so for `borrow.PATIENCE` seconds, or up to five times as long if that is too short for
`borrow.ENOUGH` rounds. All other threads run meanwhile, so they can release the locks that they hold.

The borrowed thread runs on a separate stack, with all signals blocked and a fresh floating-point environment. Everything that it runs
for the tool ends with `rt_sigreturn` of its saved state, so it returns to its code even if the tool is killed. Normally, the tool
stops the thread at that call, and restores its registers, vector state and signal mask at the point where it was first stopped. At
that point, the kernel has not yet decided whether to restart the interrupted system call, so the thread continues as if nothing had
happened. If `pthread_create` waits for a lock for more than `borrow.CREATE_TIMEOUT` seconds, the tool gives up in the same way.

The worker makes the calls that the tool writes into its memory (`_Worker`), then frees that memory and ends.

**A starting process** (holding.py). A thread at the entry of its first cuInit holds no lock, and is borrowed there. It then waits
until the agent has installed its hooks. The agent installs them itself, because no thread can be inside the driver (`starting`). If
that takes too long, the thread is released (`Held.expire`). An agent that starts after that learns that threads are running.

**Containers.** Functions are found in the memory of the process. If the process does not see the same library file, or its user cannot
read it, the library is passed as a sealed memfd, which the worker copies into a memfd of the process. On request, the agent's
connection is also passed. To pass a file, a socket pair is created in the process, and one end of it is fetched with pidfd_getfd(2),
which works across network namespaces. The process may keep that end too, so nothing but the file goes through it (target_socket.py).

x86-64 with glibc only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import socket
import struct
import threading
import time
from pathlib import Path
from typing import ClassVar

from gpubpf import digest, elf, own_files
from gpubpf.agent.definitions import FILE_PREFIX, STARTING_SUFFIX
from gpubpf.attach import borrow
from gpubpf.attach.borrow import COMMAND, DATA, DONE, FUNCTION, LAST, RESULT, SIZE, TEXTS, ProcessCode
from gpubpf.errors import SessionError, out_of_files
from gpubpf.kernel import libc
from gpubpf.kernel.syscalls import NUMBERS
from gpubpf.process import address_space, ptrace, target_files, target_socket, traceable, users
from gpubpf.process.address_space import Memory
from gpubpf.process.target_socket import TargetSocket
from gpubpf.record import MutableRecord

ANSWER = 10.0  # seconds for one call on the worker
# struct msghdr, an iovec, the byte to receive, and a control message with one file.
_MESSAGE = struct.Struct("<QI4xQQQQi4x QQ 8x QiiI4x")
_VECTOR, _BYTE, _CONTROL = 56, 72, 80  # offsets of its parts
_CONTROL_SIZE = socket.CMSG_SPACE(4)
_STACK = 1 << 16  # bytes of the worker's stack to search
_MEMFD = re.compile("/memfd:")


class Injection:
    """A library in the process, whose entry function is running or has returned.

    `socket`: the tool's end of the connection, if one was requested. `stood_ns`: the time in ns for which threads of the process were
    stopped; final once `wait` has returned.
    """

    def __init__(
        self, worker: _Worker, entry: str, connection: TargetSocket | None, held: Held | None, stood_ns: int
    ) -> None:
        self._worker, self._entry, self._held = worker, entry, held
        self.socket = connection
        self.stood_ns = stood_ns

    @property
    def released_early(self) -> bool:
        """Whether a held thread was released before the agent had finished."""
        return self._held is not None and self._held.late

    def wait(self, timeout: float = ANSWER) -> int:
        """Return the entry function's result, a C int. Raises SessionError if it is still running after `timeout` seconds."""
        try:
            result, _ = self._worker.result(self._entry, timeout)
        except BaseException:
            self._worker.abandon()
            raise
        finally:
            if self._held is not None:
                self.stood_ns = self._held.stood_ns
        self._worker.close()
        return ctypes.c_int(result & 0xFFFFFFFF).value


class Held:
    """A thread that is held in its first cuInit (holding.py): it has created the worker, and waits until it is released.

    `inject` can take a held thread once, by thread ID.

    base: address of the worker's memory.
    since: when the thread was stopped (time.monotonic).
    entry: address of the function; 0 if unknown.
    """

    _all: ClassVar[dict[int, Held]] = {}

    def __init__(
        self, pid: int, tid: int, base: int, functions: dict[str, int], since: float, entry: int = 0
    ) -> None:
        self.pid, self.tid, self.since, self.entry = pid, tid, since, entry
        with traceable.refusals(pid):
            self.worker = _Worker(pid, Memory(pid), base, functions)
        self.worker.parked, self.worker.made = True, False
        self._stood = 0.0  # seconds for which the thread was held; 0: it is still held
        self._entered = self._expired = False
        self._connection: TargetSocket | None = None
        self._lock = threading.Lock()
        self._all[self.tid] = self

    @classmethod
    def take(cls, pid: int, tid: int) -> Held:
        """Return a held thread, which cannot be taken again. Raises SessionError."""
        held = cls._all.pop(tid, None)
        if held is None or held.pid != pid:
            raise SessionError(f"thread {tid} of pid {pid} is no longer held; attach to the running process")
        return held

    @classmethod
    def entry_of(cls, tid: int) -> int:
        """Return the address of the function in which a thread is held; 0 if it is unknown or the thread is not held."""
        held = cls._all.get(tid)
        return held.entry if held is not None else 0

    @property
    def stood_ns(self) -> int:
        """How long the thread has been held so far, in ns."""
        return int((self._stood or time.monotonic() - self.since) * 1e9)

    @property
    def late(self) -> bool:
        """Whether the thread was released before the agent had finished."""
        return self._expired

    def wait_for_worker(self) -> None:
        """Wait until the thread has created the worker. Raises SessionError."""
        until = time.monotonic() + borrow.CREATE_TIMEOUT
        while (code := self._create_result()) == borrow.PENDING and time.monotonic() < until:
            time.sleep(100e-6)
        if code is None:
            raise traceable.refusal(self.pid, errno.ESRCH)
        if code:
            raise borrow.create_error(self.pid, code)
        self.worker.made = True

    def _create_result(self) -> int | None:
        """Return pthread_create's result, or borrow.PENDING; None if the process has ended."""
        result = self.worker.memory.some(self.worker.base + DATA + borrow.CREATED, 4)
        return int.from_bytes(result, "little") if len(result) == 4 else None

    @property
    def is_held(self) -> bool:
        """Whether the thread has not been released yet."""
        return not self._stood

    def begin_agent(self, connection: TargetSocket | None) -> bool:
        """Call this before the agent's entry function. Return whether the thread stays held until the agent has answered."""
        with self._lock:
            self._entered, self._connection = not self._expired, connection
            return self._entered

    def expire(self) -> bool:
        """Record that the hold has timed out. Return whether the thread can be released now.

        If it cannot, the agent is installing its hooks, and this call makes the agent abort that.
        """
        with self._lock:
            self._expired = True
            if self._entered and self._connection is not None:
                self._connection.shutdown()
            return not self._entered

    def is_deadlocked(self) -> bool:
        """Return whether the worker waits for a lock that this thread holds."""
        if self._entered or self._expired or not self.worker.was_called:
            return False
        with contextlib.suppress(OSError, ptrace.ThreadEnded):
            number = int(traceable.status(self.tid).get("NSpid", str(self.tid)).split()[-1])
            stub = range(self.worker.base, self.worker.base + len(borrow.STUB))
            for tid in ptrace.threads_of(self.pid):
                call = ptrace.blocked_call(self.pid, tid)
                if tid == self.tid or call is None or call.number != NUMBERS["futex"]:
                    continue
                words = memoryview(self.worker.memory.some(call.rsp & ~7, _STACK)).cast("Q")
                if any(word in stub for word in words):  # it is the worker
                    # struct pthread_mutex_t: lock, count, owner.
                    owner = self.worker.memory.read(call.arguments[0] + 8, 4)
                    return int.from_bytes(owner, "little") == number
        return False

    def mark_released(self) -> None:
        """Record that the thread has been released."""
        self._stood = self._stood or time.monotonic() - self.since

    def close(self) -> None:
        """Discard the held thread if nobody has taken it.

        If the process has executed another program, a new thread with the same ID may be held by now. The new thread is kept."""
        if self._all.get(self.tid) is self and self._all.pop(self.tid, None) is self:
            self.worker.made = self._create_result() == 0
            self.worker.close()


def inject(
    pid: int,
    library: Path,
    entry: str,
    argument: str = "",
    connect: bool = False,
    starting: int | None = None,
) -> Injection:
    """Load `library` into the process, and call its function `entry`, of type int (const char *), on a new thread.

    argument: the string to pass, less than 1024 bytes.
    connect: instead pass FILE_PREFIX and the number of a connected stream socket in the process; the result has the other end.
    starting: ID of a thread of the process that is `Held`; if it is still held, STARTING_SUFFIX is appended to the argument.

    Raises SessionError, and then leaves the process unchanged.
    """
    if not os.access(library, os.R_OK):
        raise SessionError(f"cannot read {library}; run script/setup")
    held = Held.take(pid, starting) if starting is not None else None
    stood_ns = 0
    if held is not None:
        worker = held.worker
    else:
        traceable.check_traceable(pid)
        worker, stood_ns = _make_worker(pid)
    connection = None
    try:
        if held is not None:
            held.wait_for_worker()
        function, opened = _load(worker, library, entry)
        if connect:
            connection, number = worker.connection()
            argument = f"{FILE_PREFIX}{number}"
        if opened >= 0:
            worker.call("close", opened)
        if held is not None and held.begin_agent(connection):
            argument += STARTING_SUFFIX
        worker.start(function, worker.text(argument, 0))
    except BaseException as error:
        if connection is not None:
            connection.close()
        worker.close()
        if isinstance(error, OSError):
            gone = not out_of_files(error) and ptrace.is_dead(pid, pid)
            raise traceable.refusal(pid, errno.ESRCH if gone else error.errno or 0) from None
        raise
    return Injection(worker, entry, connection, held, stood_ns)


def _make_worker(pid: int) -> tuple[_Worker, int]:
    """Return a new worker, and the time for which threads were stopped, in ns."""
    with traceable.refusals(pid), contextlib.ExitStack() as stack:
        memory = stack.enter_context(Memory(pid))
        code = ProcessCode(pid, memory, address_space.mappings(pid))
        functions = code.functions(pid)
        base, stood_ns = borrow.make_worker(pid, memory, code, functions)
        stack.pop_all()
        return _Worker(pid, memory, base, functions), stood_ns


class _Worker(MutableRecord):
    """The new thread in the process. The thread makes one call at a time for the tool."""

    pid: int
    memory: Memory
    base: int
    functions: dict[str, int]
    made: bool = True  # the thread exists, as far as known
    parked: bool = False  # the borrowed thread may still run code in `base`
    _commands: int = 0

    @property
    def was_called(self) -> bool:
        """Whether the thread has been given a call."""
        return self._commands > 0

    def start(self, function: int, *arguments: int, last: bool = False) -> None:
        """Have the thread call a function, with at most four arguments. `last`: the thread ends afterwards. Raises SessionError."""
        data = self.base + DATA
        self._commands += 1
        try:
            values = [a & (1 << 64) - 1 for a in arguments]
            self.memory.write(
                data + FUNCTION, struct.pack("<5Q", function, *values, *[0] * (4 - len(values)))
            )
            if last:
                self.memory.write(data + LAST, b"\1")
            self.memory.write(data + COMMAND, struct.pack("<I", self._commands))
        except OSError:
            raise traceable.refusal(self.pid, errno.ESRCH) from None

    def result(self, name: str, timeout: float = ANSWER) -> tuple[int, int]:
        """Return the result of the last call, and errno. Raises SessionError."""
        until = time.monotonic() + timeout
        pause = 50e-6
        while True:
            try:
                if struct.unpack("<I", self.memory.read(self.base + DATA + DONE, 4))[0] == self._commands:
                    data = self.memory.read(self.base + DATA + RESULT, 12)
                    return struct.unpack("<qi", data)
            except OSError:
                raise traceable.refusal(self.pid, errno.ESRCH) from None
            if time.monotonic() > until:
                raise SessionError(
                    f"pid {self.pid} did not finish {name} within {timeout:.0f} s; use gdb to see what it waits for"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.002)

    def call(self, name: str, *arguments: int) -> int:
        """Call one of `functions`, and return its result. Raises SessionError."""
        self.start(self.functions[name], *arguments)
        result, code = self.result(name)
        if result == -1 and name in ("memfd_create", "socketpair"):
            raise traceable.NotHookable(
                f"pid {self.pid} ({traceable.comm(self.pid)}) cannot be hooked: {name} failed in it ({os.strerror(code)});"
                " raise its limits"
            )
        return result

    def text(self, text: str, slot: int) -> int:
        """Write a C string into the worker's memory. Return its address. `slot`: from 0 to 7; a slot has 1024 bytes."""
        data = os.fsencode(text)
        if len(data) >= 1024 and slot != 4:
            raise SessionError(f"{text[:20]}… is too long; use a shorter name")
        at = self.base + TEXTS + 1024 * slot
        self.memory.write(at, data[:4095] + b"\0")
        return at

    def connection(self) -> tuple[TargetSocket, int]:
        """Connect the traced process to this one. Return this process's end, and the other end's descriptor in the traced process."""
        ours, theirs = target_socket.pair()
        try:
            with theirs:
                return ours, self.give(theirs.fileno())
        except BaseException:
            ours.close()
            raise

    def give(self, file: int) -> int:
        """Pass a file to the process. Return the number of its descriptor there. Raises SessionError."""
        pair = self.text("        ", 1)
        self.call("socketpair", socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, 0, pair)
        receiving, sending = struct.unpack("<ii", self.memory.read(pair, 8))
        try:
            _send(self.pid, sending, file)
            at = self.base + TEXTS + 1024
            message = _MESSAGE.pack(
                *(0, 0, at + _VECTOR, 1, at + _CONTROL, _CONTROL_SIZE, 0),
                *(at + _BYTE, 1),
                *(0, 0, 0, 0),
            )
            self.memory.write(at, message)
            flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            received = self.call("recvmsg", receiving, at, flags)
            *_, level, kind, number = _MESSAGE.unpack(self.memory.read(at, _MESSAGE.size))
        finally:
            self.call("close", sending)
            self.call("close", receiving)
        if (received, level, kind) != (1, socket.SOL_SOCKET, socket.SCM_RIGHTS):
            raise traceable.NotHookable(
                f"pid {self.pid} ({traceable.comm(self.pid)}) cannot be hooked: it did not receive a file; raise its limits"
            )
        return int(number)

    def close(self) -> None:
        """Have the thread free its memory and end. Code and data stay mapped if the borrowed thread may still use them."""
        if self.made:
            kept = borrow.TEXTS if self.parked else 0
            with contextlib.suppress(SessionError):
                self.start(self.functions["munmap"], self.base + kept, SIZE - kept, last=True)
        self.abandon()

    def abandon(self) -> None:
        """Leave the thread alone. It ends after about 20 s without a command. Its memory stays mapped."""
        self.memory.close()


def _send(pid: int, number: int, file: int) -> None:
    """Send a file through the socket of a process whose descriptor there is `number`. Raises SessionError."""
    try:
        process = libc.system_call("pidfd_open", pid, 0)
        try:
            fetched = libc.system_call("pidfd_getfd", process, number, 0)
        finally:
            os.close(process)
    except OSError as error:
        if out_of_files(error):
            raise traceable.OutOfFiles(pid) from None
        raise SessionError(
            f"cannot fetch a file descriptor of pid {pid} ({error.strerror}); use Linux 5.6 or later"
        ) from None
    os.set_inheritable(fetched, False)
    try:
        end = socket.socket(fileno=fetched)
    except OSError:
        target_socket.discard(fetched)
        raise SessionError(f"pid {pid} returned a non-socket; not attaching") from None
    if end.family != socket.AF_UNIX:  # closing it may wait (SO_LINGER)
        target_socket.discard(end.detach())
        raise SessionError(f"pid {pid} returned a socket of another family; not attaching")
    with TargetSocket(end) as through, contextlib.suppress(OSError):  # a lost file is noticed by the worker
        through.send(b"\0", [file])


def _load(worker: _Worker, library: Path, entry: str) -> tuple[int, int]:
    """Load a library. Return the address of `entry` in the process, and a descriptor to close in the process, or -1.

    Raises SessionError.
    """
    path, opened = str(library), -1
    if not is_visible(worker.pid, library):
        data = own_files.read(library)
        short = digest.sha256(data).hexdigest()[:16]
        name = f"{library.name}-{short}"
        for present in address_space.libraries(address_space.mappings(worker.pid, _MEMFD)):
            # An earlier attach may have loaded it.
            if present.path == f"/memfd:{name}" and (
                symbol := elf.exports(worker.memory, present.base).get(entry)
            ):
                return symbol.address, -1
        opened = _copy(worker, name, data)
        # dlopen returns a library already loaded from the same path. So the path encodes the bits of the library's digest.
        bits = f"{int(short, 16):b}".replace("1", "./").replace("0", "/")
        path = f"/proc/self/fd/{bits}{opened}"
    handle = worker.call("dlopen", worker.text(path, 4), os.RTLD_NOW)
    function = worker.call("dlsym", handle, worker.text(entry, 2)) if handle else 0
    if not function:
        said = worker.memory.some(worker.call("dlerror"), 1024).partition(b"\0")[0].decode(errors="replace")
        if opened >= 0:
            worker.call("close", opened)
        text = "".join(c if c.isprintable() else "?" for c in said)[:300]
        # The dynamic linker reserves some static TLS for libraries loaded late. This process has used it up.
        advice = "restart the program" if "static TLS" in text else "fix the cause, then try again"
        raise traceable.NotHookable(
            f"pid {worker.pid} ({traceable.comm(worker.pid)}) cannot load {library.name}: {text}; {advice}"
        )
    return function, opened


def _copy(worker: _Worker, name: str, data: bytes) -> int:
    """Create a memfd with `data` in the process. Return the number of its descriptor there. Raises SessionError.

    The process itself writes the data, because a write by the tool might have to wait for the process."""
    opened = worker.call("memfd_create", worker.text(name, 3), os.MFD_CLOEXEC)
    source = _sealed(name, data)
    try:
        given = worker.give(source)
    finally:
        os.close(source)
    written = worker.call("sendfile", opened, given, 0, len(data))
    worker.call("close", given)
    if written != len(data):
        raise traceable.NotHookable(
            f"pid {worker.pid} ({traceable.comm(worker.pid)}) cannot be hooked: sendfile failed in it; raise its limits"
        )
    return opened


def _sealed(name: str, data: bytes) -> int:
    """Return a memfd with `data` that can no longer be changed."""
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(file, "wb", closefd=False) as out:
            out.write(data)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
        os.lseek(file, 0, os.SEEK_SET)
    except BaseException:
        os.close(file)
        raise
    return file


def is_visible(pid: int, library: Path) -> bool:
    """Return whether the process sees the same file at the same path, and may load it."""
    if own_files.is_replaced(library):  # the new file may speak another protocol
        return False
    try:
        there = target_files.open_path(pid, str(library), os.O_PATH)
        try:
            ours, theirs = library.stat(), os.fstat(there)
            return (
                (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)
                and not os.fstatvfs(there).f_flag & os.ST_NOEXEC
                and users.can_read(traceable.user(pid), library)
            )
        finally:
            os.close(there)
    except OSError:
        return False

"""The way into a process that runs already: a library loaded into it. (patching.py changes its code.)

**Loading** (`inject`). `dlopen` may wait for the dynamic linker's lock, run constructors, take seconds. On a thread of the program it
could wait for a lock that this very thread holds, for ever; a thread made by a bare clone() has no memory of its own for the C
library (errno, malloc's caches). So a thread of the program is borrowed for one short call, `pthread_create`, and everything
else happens on the thread that this makes, which the C library knows, which blocks all signals and which nobody waits for.

The borrowed thread must not be inside malloc or the dynamic linker, whose locks `pthread_create` takes. It is one that

- sleeps in a call that waits for something outside (`borrow.waits`): no lock of these is held across such a call. A futex counts only
  as conditions and semaphores use it (FUTEX_WAIT_BITSET): one that waits for a lock may hold another.
- or else is in code that belongs to none of them, outside the C library or right behind a system call, with nothing of theirs on its
  stack (`borrow.Code`);

and in either case is in no signal handler, which could have interrupted anything: no return address on its stack leads to a
`rt_sigreturn`. Words on a stack may be left over from calls long past; then another thread is tried, or the same one later, for
`borrow.PATIENCE` seconds at most. All other threads run on meanwhile, so a lock that one of them holds is given back.

The borrowed thread runs on a stack of ours, with all signals blocked and with a fresh floating-point environment. At its end the
stub calls `rt_sigreturn` with everything the thread had: should the tool be killed, the thread finds its own way back. Otherwise it
is caught at that call, and gets its registers, vector state and mask back where it was stopped first: in front of the kernel's own
decision about the interrupted call, as if it had never left. A `pthread_create` that waits for a lock for more than
`borrow.BORROWED` seconds is given up in the same way.

The new thread does the calls that the tool leaves for it in memory (`_Worker`), then frees that memory and ends.

**A process that starts** (holding.py). A thread that stands at the entry of its first cuInit holds no lock, and is borrowed there;
then it stands until the agent has put in its hooks, which it does itself, as no thread can be in the driver (`starting`). Should
that take too long, it is let go (`Held.expire`), and the agent, if it has not begun, is told that threads run.

**Containers.** Functions are found in the process's memory. A library that is not the same file there, or that its user cannot read,
goes in as a memfd; where asked for, so does the agent's connection, a socket pair made inside and fetched by pidfd_getfd(2), which no
network namespace can part.

x86-64 with glibc only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import re
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from gpubpf import elf
from gpubpf.attach import borrow
from gpubpf.attach.borrow import COMMAND, DATA, DONE, FUNCTION, LAST, RESULT, SIZE, TEXTS, Code
from gpubpf.errors import SessionError
from gpubpf.process import ptrace, target, users
from gpubpf.process.target import Memory

ANSWER = 10.0  # seconds for one call on the new thread
_PIDFD_OPEN, _PIDFD_GETFD = 434, 438
_FUTEX = 202
_STACK = 1 << 16  # bytes of the new thread's stack that are looked through
_MEMFD = re.compile("/memfd:")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class Injection:
    """A library in the process; its entry runs, or has run. `socket`: our end of the connection, where one was asked for.
    `stood_ns`: for how long the tool has had threads of the process stand for it, once `wait` has returned."""

    def __init__(
        self, worker: _Worker, entry: str, connection: socket.socket | None, held: Held | None, stood_ns: int
    ) -> None:
        self._worker, self._entry, self._held = worker, entry, held
        self.socket = connection
        self.stood_ns = stood_ns

    def wait(self, timeout: float = ANSWER) -> int:
        """What the entry returned, a C int. Raises SessionError where it does not in `timeout` seconds: it is left to itself."""
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
    """A thread that came to its first cuInit, and has made another one, which works at `base`; it waits there itself until it may go
    on (holding.py). `inject` finds it by its number, once. `since`: when it was stopped, time.monotonic."""

    _all: ClassVar[dict[int, Held]] = {}

    def __init__(self, pid: int, tid: int, base: int, functions: dict[str, int], since: float) -> None:
        self.pid, self.tid, self.since = pid, tid, since
        with target.refusals(pid):
            self.worker = _Worker(pid, Memory(pid), base, functions)
        self.worker.parked, self.worker.made = True, False
        self._stood = 0.0  # until it was let go
        self._entered = self._expired = False
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._all[self.tid] = self

    @classmethod
    def take(cls, pid: int, tid: int) -> Held:
        held = cls._all.pop(tid, None)
        if held is None or held.pid != pid:
            raise SessionError(f"thread {tid} of pid {pid} is not held any more; attach to it as it runs")
        return held

    @property
    def stood_ns(self) -> int:
        """For how long it has stood until now."""
        return int((self._stood or time.monotonic() - self.since) * 1e9)

    @property
    def late(self) -> bool:
        """It was let go before the agent had come to an end."""
        return self._expired

    def made(self) -> None:
        """Returns when it has made the thread. Raises SessionError."""
        until = time.monotonic() + borrow.BORROWED
        while (code := self._said()) == borrow.PENDING and time.monotonic() < until:
            time.sleep(100e-6)
        if code is None:
            raise target.refusal(self.pid, errno.ESRCH)
        if code:
            raise borrow.refused(self.pid, code)
        self.worker.made = True

    def _said(self) -> int | None:
        """What pthread_create returned, or borrow.PENDING; None: the process is gone."""
        said = self.worker.memory.some(self.worker.base + DATA + borrow.CREATED, 4)
        return int.from_bytes(said, "little") if len(said) == 4 else None

    @property
    def stands(self) -> bool:
        return not self._stood

    def enter(self, connection: socket.socket | None) -> bool:
        """Whether the agent, which is about to be called, may count on that the thread stands until it has answered."""
        with self._lock:
            self._entered, self._connection = not self._expired, connection
            return self._entered

    def expire(self) -> bool:
        """It has stood long enough. Whether it may be let go: else the agent, which is putting in its hooks, is told to leave that."""
        with self._lock:
            self._expired = True
            if self._entered and self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
            return not self._entered

    def stuck(self) -> bool:
        """The new thread waits for a lock that this one holds."""
        if self._entered or self._expired:
            return False
        with contextlib.suppress(OSError, ptrace.Gone):
            number = int(target.status(self.tid).get("NSpid", str(self.tid)).split()[-1])
            stub = range(self.worker.base, self.worker.base + len(borrow.STUB))
            for tid in ptrace.threads_of(self.pid):
                sleep = ptrace.asleep(self.pid, tid)
                if tid == self.tid or sleep is None or sleep.number != _FUTEX:
                    continue
                words = memoryview(self.worker.memory.some(sleep.rsp & ~7, _STACK)).cast("Q")
                if any(
                    word in stub for word in words
                ):  # struct pthread_mutex_t: the lock, a count, who owns it
                    owner = self.worker.memory.read(sleep.arguments[0] + 8, 4)
                    return int.from_bytes(owner, "little") == number
        return False

    def let_go(self) -> None:
        """It has been."""
        self._stood = self._stood or time.monotonic() - self.since

    def close(self) -> None:
        """Nobody else is going to use it. A thread of the same number may be held by now, of what the process has become."""
        if self._all.get(self.tid) is self and self._all.pop(self.tid, None) is self:
            self.worker.made = self._said() == 0
            self.worker.close()


def inject(
    pid: int,
    library: Path,
    entry: str,
    argument: str = "",
    connect: bool = False,
    starting: int | None = None,
) -> Injection:
    """Loads `library` into the process and calls its function `entry`, of type int (const char *), on a thread of its own.

    `connect`: the argument is `fd:N`, a connected stream socket of the process; the other end is the result's. `argument` has
    less than 1024 bytes. `starting`: a thread of it that is `Held`; the argument ends in ` starting` if it still is then.
    Raises SessionError, the process being as it was.
    """
    if not os.access(library, os.R_OK):
        raise SessionError(f"{library} cannot be read; run script/setup")
    held = Held.take(pid, starting) if starting is not None else None
    stood_ns = 0
    if held is not None:
        worker = held.worker
    else:
        target.check(pid)
        worker, stood_ns = _made(pid)
    connection = None
    try:
        if held is not None:
            held.made()
        function, opened = _loaded(worker, library, entry)
        if connect:
            connection, number = worker.connection()
            argument = f"fd:{number}"
        if opened >= 0:
            worker.call("close", opened)
        if held is not None and held.enter(connection):
            argument += " starting"
        worker.start(function, worker.text(argument, 0))
    except BaseException as error:
        if connection is not None:
            connection.close()
        worker.close()
        if isinstance(error, OSError):
            # No address: its memory is another program's.
            gone = error.errno == errno.EFAULT or ptrace.is_dead(pid, pid)
            raise target.refusal(pid, errno.ESRCH if gone else error.errno or 0) from None
        raise
    return Injection(worker, entry, connection, held, stood_ns)


def _made(pid: int) -> tuple[_Worker, int]:
    with target.refusals(pid), contextlib.ExitStack() as stack:
        memory = stack.enter_context(Memory(pid))
        code = Code(pid, memory, target.mappings(pid))
        functions = code.functions(pid)
        base, stood_ns = borrow.make_worker(pid, memory, code, functions)
        stack.pop_all()
        return _Worker(pid, memory, base, functions), stood_ns


@dataclass
class _Worker:
    """The new thread: it does one call after the other."""

    pid: int
    memory: Memory
    base: int
    functions: dict[str, int]
    made: bool = True  # as far as is known
    parked: bool = False  # its maker may be in the code yet, for as long as it likes
    _commands: int = field(default=0, init=False)

    def start(self, function: int, *arguments: int, last: bool = False) -> None:
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
            raise target.refusal(self.pid, errno.ESRCH) from None

    def result(self, name: str, timeout: float = ANSWER) -> tuple[int, int]:
        """Of the last call, with errno. Raises SessionError."""
        until = time.monotonic() + timeout
        pause = 50e-6
        while True:
            try:
                if struct.unpack("<I", self.memory.read(self.base + DATA + DONE, 4))[0] == self._commands:
                    data = self.memory.read(self.base + DATA + RESULT, 12)
                    return struct.unpack("<qi", data)
            except OSError:
                raise target.refusal(self.pid, errno.ESRCH) from None
            if time.monotonic() > until:
                raise SessionError(
                    f"pid {self.pid} does not finish {name} within {timeout:.0f} s; look with gdb what it waits for"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.002)

    def call(self, name: str, *arguments: int) -> int:
        self.start(self.functions[name], *arguments)
        result, code = self.result(name)
        if result == -1 and name in ("memfd_create", "socketpair"):
            raise SessionError(
                f"pid {self.pid} gets no {name} from the kernel ({os.strerror(code)}); raise its limits, then try again"
            )
        return result

    def text(self, text: str, slot: int) -> int:
        """Address of a C string; there are eight places for such."""
        data = os.fsencode(text)
        if len(data) >= 1024 and slot != 4:
            raise SessionError(f"{text[:20]}… is too long; give a shorter name")
        at = self.base + TEXTS + 1024 * slot
        self.memory.write(at, data[:4095] + b"\0")
        return at

    def connection(self) -> tuple[socket.socket, int]:
        """A socket pair of the process: one end, fetched, and the other's number there."""
        pair = self.text("        ", 1)
        self.call("socketpair", socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, 0, pair)
        theirs, ours = struct.unpack("<ii", self.memory.read(pair, 8))
        try:
            fetched = _fetch(self.pid, ours)
        except OSError as error:
            self.call("close", theirs)
            raise SessionError(
                f"a file of pid {self.pid} cannot be fetched ({error.strerror}); it takes Linux 5.6"
            ) from None
        finally:
            self.call("close", ours)
        try:
            return socket.socket(fileno=fetched), theirs
        except OSError:
            os.close(fetched)
            raise SessionError(
                f"pid {self.pid} gives something else for a socket; it is not traced"
            ) from None

    def close(self) -> None:
        """The thread frees its memory, but for where its maker may be, and ends."""
        if self.made:
            kept = borrow.TEXTS if self.parked else 0
            with contextlib.suppress(SessionError):
                self.start(self.functions["munmap"], self.base + kept, SIZE - kept, last=True)
        self.abandon()

    def abandon(self) -> None:
        """It ends when it has waited long enough; what it works in stays."""
        self.memory.close()


def _fetch(pid: int, file: int) -> int:
    process = _libc.syscall(_PIDFD_OPEN, pid, 0)
    if process < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        fetched = _libc.syscall(_PIDFD_GETFD, process, file, 0)
        if fetched < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(process)
    os.set_inheritable(fetched, False)
    return int(fetched)


def _loaded(worker: _Worker, library: Path, entry: str) -> tuple[int, int]:
    """Address of `entry` in the process, and the number of a file that can be closed there now, or -1. Raises SessionError."""
    path, opened = str(library), -1
    if not _is_visible(worker.pid, library):
        data = library.read_bytes()
        name = f"{library.name}-{hashlib.sha256(data).hexdigest()[:16]}"
        for present in target.libraries(target.mappings(worker.pid, _MEMFD)):  # from the time before
            if present.path == f"/memfd:{name}" and (
                symbol := elf.exports(worker.memory, present.base).get(entry)
            ):
                return symbol.address, -1
        opened = worker.call("memfd_create", worker.text(name, 3), os.MFD_CLOEXEC)
        _fill(worker.pid, opened, data)
        path = f"/proc/self/fd/{opened}"
    handle = worker.call("dlopen", worker.text(path, 4), os.RTLD_NOW)
    function = worker.call("dlsym", handle, worker.text(entry, 2)) if handle else 0
    if not function:
        said = worker.memory.some(worker.call("dlerror"), 1024).partition(b"\0")[0].decode(errors="replace")
        if opened >= 0:
            worker.call("close", opened)
        text = "".join(c if c.isprintable() else "?" for c in said)[:300]
        # Of what the dynamic linker keeps for all libraries that come late, those of the process leave none.
        advice = "restart the program" if "static TLS" in text else "see whether that can be helped"
        raise SessionError(f"pid {worker.pid} cannot load {library.name}: {text}; {advice}")
    return function, opened


def _fill(pid: int, number: int, data: bytes) -> None:
    """Writes into the memory file that the process says it made. It could name any of its files: this one is written with the rights
    that the process has itself, not opened anew with the tool's."""
    try:
        file = _fetch(pid, number)
    except OSError as error:
        raise target.refusal(pid, error.errno or 0) from None
    try:
        fcntl.fcntl(file, fcntl.F_GET_SEALS)  # fails for what is no memory
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
    except OSError:
        raise SessionError(f"pid {pid} gives something else for a file in memory; it is not traced") from None
    finally:
        os.close(file)


def _is_visible(pid: int, library: Path) -> bool:
    """Whether the process finds the same file under the same name, and may load it."""
    there = Path(f"/proc/{pid}/root{library}")
    try:
        ours, theirs = library.stat(), there.stat()
        return (
            (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)
            and not os.statvfs(there).f_flag & os.ST_NOEXEC
            and users.can_read(target.user(pid), library)
        )
    except OSError:
        return False

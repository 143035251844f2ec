"""Threads of another process, stopped and read by ptrace(2), let go as if nothing had been.

A stop wakes a thread out of the system call that it sleeps in. The kernel begins most of them anew by itself. Those of `_ANEW`
would tell the program EINTR, though no signal came: they are made to begin anew in the same way, by the result that the kernel takes
for that (`settle`), so that a signal which comes at that very moment still gives EINTR. (A wait with a bound in `epoll_wait` and
its like then has the whole bound before it again; what the kernel restarts keeps its end.)

All calls for one thread must come from the thread that made the `Thread`, and hold Python's lock: a process stands still meanwhile,
which is no time to wait for another thread of this one. What is left when the caller's thread ends, the kernel lets go.
Of a process's own children nobody else there may wait meanwhile (`Popen.poll`): it would take a stop for an end.
x86-64 only. Numbers and structures are those of include/uapi/linux/ptrace.h and asm/ptrace.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gpubpf.process import libc

_libc = libc.library_with_gil
_ptrace = _libc.ptrace
_ptrace.restype = ctypes.c_long
_ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]

_SEIZE, _INTERRUPT, _GETREGSET, _SETREGSET = 0x4206, 0x4207, 0x4204, 0x4205
_CONT, _GETREGS, _SETREGS, _SYSCALL, _DETACH = 7, 12, 13, 24, 17
_GETSIGMASK, _SETSIGMASK, _SECCOMP_GET_FILTER, _RSEQ = 0x420A, 0x420B, 0x420C, 0x420F
_FILTER_BYTES, _MOST_FILTERS = (
    8 * 4096,
    512,
)  # BPF_MAXINSNS instructions; the kernel bounds all of a thread to 32768
_OPTION_SYSGOOD, _OPTION_SUSPEND_SECCOMP = 1, 1 << 21
_EVENT_STOP, _NT_XSTATE = 128, 0x202
_WNOHANG, _WEXITED, _WSTOPPED, _WNOWAIT = 1, 4, 2, 0x01000000
_WALL, _WNOTHREAD = 0x40000000, 0x20000000
_P_PID = 1
_EACH = 50e-6  # seconds: each thread has to get a processor before it stands
_STOPS = (4, 5)  # CLD_TRAPPED, CLD_STOPPED
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_XSTATE_BYTES = 16384  # room; the kernel says how much there is

EINTR_RESULT = -errno.EINTR & (1 << 64) - 1
RESTART_BLOCK = (
    -516 & (1 << 64) - 1
)  # the kernel keeps what is left of it: nanosleep, poll, futex with a bound
_RESTART_NO_HANDLER = -514 & (1 << 64) - 1  # anew, but EINTR if a signal's handler runs first
RESTARTS = frozenset(-n & (1 << 64) - 1 for n in (512, 513, 514)) | {RESTART_BLOCK}  # ERESTARTSYS …: anew
NO_SYSCALL = (1 << 64) - 1

# signal(7), "Interruption of system calls and library functions by stop signals". Not close and connect, which have acted already.
_ANEW = frozenset(
    {
        0, 1, 19, 20,  # read, write, readv, writev
        43, 44, 45, 46, 47, 288, 299, 307,  # sockets with a bound on waiting: accept, sendto, recvfrom, …
        232, 281, 441,  # epoll_wait, epoll_pwait, epoll_pwait2
        65, 220,  # semop, semtimedop
        69, 70,  # msgsnd, msgrcv
        128,  # rt_sigtimedwait
        208, 333, 426,  # io_getevents, io_pgetevents, io_uring_enter
    }
)  # fmt: skip


class Registers(ctypes.Structure):
    """struct user_regs_struct."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss"
            " fs_base gs_base ds es fs gs"
        ).split()
    ]

    rip: int
    rsp: int
    rax: int
    rbx: int
    rdi: int
    rsi: int
    rdx: int
    r10: int
    r8: int
    r9: int
    orig_rax: int
    cs: int
    eflags: int

    def copy(self) -> Registers:
        return Registers.from_buffer_copy(self)

    @property
    def in_syscall(self) -> bool:
        """Woken out of a system call that it will go back to, or from which it returns with EINTR."""
        return self.orig_rax < 1 << 32 and (self.rax in RESTARTS or self.rax == EINTR_RESULT)


def settle(registers: Registers) -> Registers:
    """What a thread is to have that was stopped with `registers`, so that the stop does not show."""
    if registers.rax != EINTR_RESULT or registers.orig_rax not in _ANEW:
        return registers
    changed = registers.copy()
    changed.rax = _RESTART_NO_HANDLER
    return changed


class _Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class Gone(Exception):
    """The thread ended."""


class Refused(Exception):
    """The kernel does not let this process trace it (`errno`)."""

    def __init__(self, code: int) -> None:
        super().__init__(os.strerror(code))
        self.errno = code


def _call(request: int, tid: int, address: int = 0, data: object = None) -> None:
    if _ptrace(request, tid, address, data) == -1:
        code = ctypes.get_errno()
        if code == errno.ESRCH:
            raise Gone
        raise Refused(code)


class Thread:
    """One thread, traced; it runs on until `interrupt`. Raises Gone, and Refused."""

    def __init__(self, pid: int, tid: int) -> None:
        self.pid, self.tid = pid, tid
        self.status: int | None = None  # of the stop that it is in: signal | event << 8
        self.pause: Callable[[float], None] = time.sleep  # while it is waited for
        self._registers: Registers | None = None  # in this stop
        self._info = ctypes.create_string_buffer(128)
        _call(_SEIZE, tid, 0, _OPTION_SYSGOOD)

    # --- stops ---

    def interrupt(self) -> None:
        _call(_INTERRUPT, self.tid)

    def poll(self) -> bool:
        """Whether it stands."""
        if self.status is not None:
            return True
        ctypes.memset(self._info, 0, 32)
        kinds = _WEXITED | _WSTOPPED | _WNOWAIT | _WNOHANG | _WALL | _WNOTHREAD
        if _libc.waitid(_P_PID, self.tid, self._info, kinds) != 0:
            raise Gone
        pid, _, status = struct.unpack_from("=iIi", self._info, 16)  # of siginfo_t: si_pid, si_uid, si_status
        if not pid:
            return False
        if struct.unpack_from("=i", self._info, 8)[0] not in _STOPS:
            self._bury()
            raise Gone
        self.status = status
        return True

    def check(self) -> None:
        """Raises Gone where it has been killed while it stood."""
        ctypes.memset(self._info, 0, 32)
        kinds = _WEXITED | _WNOWAIT | _WNOHANG | _WALL | _WNOTHREAD  # a stop is told again
        failed = _libc.waitid(_P_PID, self.tid, self._info, kinds) != 0
        code, _, pid = struct.unpack_from("=iii", self._info, 8)
        if failed or (pid and code not in _STOPS):
            self._bury()
            raise Gone

    def _bury(self) -> None:
        """Nobody else sees the end of a thread; the parent of a process does not before we have."""
        if self.tid != self.pid or parent(self.pid) != os.getpid():
            _libc.waitid(_P_PID, self.tid, self._info, _WEXITED | _WNOHANG | _WALL | _WNOTHREAD)

    def wait(self, until: float) -> bool:
        """Whether it stands, at the latest at `until` (time.monotonic)."""
        turns = 0
        while not self.poll():
            if time.monotonic() > until:
                return False
            turns += 1
            if turns < 20:
                _libc.sched_yield()
            else:
                self.pause(20e-6)
        return True

    @property
    def signal(self) -> int:
        """The signal that it is about to get: to be passed on; 0: none."""
        if self.status is None or self.status >> 8 or self.status == _SYSCALL_STOP:
            return 0
        return self.status

    @property
    def interrupted(self) -> bool:
        """By `interrupt`, and by nothing else."""
        return self.status == signal.SIGTRAP | _EVENT_STOP << 8

    @property
    def at_syscall(self) -> bool:
        """At the entry of a system call or its end, after `to_syscall`."""
        return self.status == _SYSCALL_STOP

    def to_syscall(self) -> None:
        """Goes on, to the next entry or end of a system call. A signal that it was about to get is not passed on."""
        self.status = self._registers = None
        _call(_SYSCALL, self.tid)

    def to_user(self) -> None:
        """Goes on, and stands where the kernel would go back to the program, signals and all."""
        self.interrupt()  # any stop takes it back
        self.status = self._registers = None
        _call(_CONT, self.tid)

    # --- what it is ---

    def registers(self) -> Registers:
        """Not to be changed but for a copy."""
        if self._registers is None:
            registers = Registers()
            _call(_GETREGS, self.tid, 0, ctypes.addressof(registers))
            self._registers = registers
        return self._registers

    def set_registers(self, registers: Registers) -> None:
        self._registers = None
        _call(_SETREGS, self.tid, 0, ctypes.addressof(registers))

    def xstate(self) -> bytes:
        """All registers beside the general ones, in the layout of XSAVE."""
        buffer = ctypes.create_string_buffer(_XSTATE_BYTES)
        vector = _Iovec(ctypes.addressof(buffer), _XSTATE_BYTES)
        _call(_GETREGSET, self.tid, _NT_XSTATE, ctypes.addressof(vector))
        return buffer.raw[: vector.length]

    def set_xstate(self, state: bytes) -> None:
        buffer = ctypes.create_string_buffer(state, len(state))
        vector = _Iovec(ctypes.addressof(buffer), len(state))
        _call(_SETREGSET, self.tid, _NT_XSTATE, ctypes.addressof(vector))

    def blocked_signals(self) -> int:
        """The mask that it goes back to, when it is in a call that waits under another one."""
        mask = ctypes.c_uint64()
        _call(_GETSIGMASK, self.tid, 8, ctypes.addressof(mask))
        return mask.value

    def block_signals(self, mask: int) -> None:
        value = ctypes.c_uint64(mask)
        _call(_SETSIGMASK, self.tid, 8, ctypes.addressof(value))

    def restartable_sequence(self) -> int:
        """Address of its struct rseq; 0: it has none, or the kernel does not say."""
        configuration = ctypes.create_string_buffer(24)
        try:
            _call(_RSEQ, self.tid, 24, ctypes.addressof(configuration))
        except Refused:
            return 0
        return int.from_bytes(configuration.raw[:8], "little")

    def without_seccomp(self) -> bool:
        """What is called in it is no business of the program's filter. Needs CAP_SYS_ADMIN."""
        try:
            _call(0x4200, self.tid, 0, _OPTION_SYSGOOD | _OPTION_SUSPEND_SECCOMP)
        except Refused:
            return False
        return True

    def filters(self) -> list[bytes]:
        """Its seccomp filters, each an array of struct sock_filter; empty where the kernel does not give them, for which it
        takes CAP_SYS_ADMIN."""
        found: list[bytes] = []
        buffer = ctypes.create_string_buffer(_FILTER_BYTES)
        while len(found) < _MOST_FILTERS:
            count = _ptrace(_SECCOMP_GET_FILTER, self.tid, len(found), ctypes.addressof(buffer))
            if count < 0:
                break
            found.append(ctypes.string_at(buffer, 8 * count))
        return found

    # --- end ---

    def detach(self, signal_number: int = 0) -> None:
        with contextlib.suppress(Gone):
            _call(_DETACH, self.tid, 0, signal_number)

    def release(self) -> bool:
        """Lets it go on from where it stands, with the signal that it is about to get. False: it is ending."""
        try:
            self.settle()
            _call(_DETACH, self.tid, 0, self.signal)
        except Gone:
            return False
        return True

    def settle(self) -> None:
        """See the function of that name."""
        if self.interrupted:
            registers = self.registers()
            settled = settle(registers)
            if settled is not registers:
                self.set_registers(settled)


def threads_of(pid: int) -> list[int]:
    """Raises Gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        raise Gone from None


@dataclass(frozen=True)
class Sleep:
    """A thread inside a system call, as the kernel shows it without a stop."""

    number: int
    arguments: tuple[int, ...]
    rsp: int
    rip: int


def asleep(pid: int, tid: int) -> Sleep | None:
    """None: it runs, or it cannot be told."""
    try:
        fields = Path(f"/proc/{pid}/task/{tid}/syscall").read_text().split()
    except OSError:
        return None
    if len(fields) != 9:
        return None
    return Sleep(
        int(fields[0]), tuple(int(f, 16) for f in fields[1:7]), int(fields[7], 16), int(fields[8], 16)
    )


def parent(pid: int) -> int:
    """0: not known."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return 0


def is_dead(pid: int, tid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/task/{tid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@dataclass
class Standing:
    """A process of which no thread runs. `places`: of each thread that may go on, by its id, (rip, rsp)."""

    pid: int
    since: float  # time.perf_counter
    places: dict[int, tuple[int, int]] = field(default_factory=dict)


class NotStanding(Exception):
    """A thread could not be stopped in time; all run on."""


_MAKES_PROCESSES = frozenset(
    {56, 57, 58, 435}
)  # clone, fork, vfork, clone3: a child may run in the same memory meanwhile


@contextlib.contextmanager
def stopped(pid: int, patience: float = 0.005) -> Iterator[Standing]:
    """Has all threads of `pid` stand while the block runs, those that they make meanwhile too.

    A thread that sleeps in the kernel and cannot be woken counts as standing: it runs no instruction of the program before it
    stops. It is let go when it has woken, or when the calling thread ends, so have that be one of its own (`threads.on_own`).
    Raises NotStanding where after `patience` seconds, and as many more as many threads take, another one still runs, or one makes
    a process; Gone, Refused.
    """
    traced: dict[int, Thread] = {}
    at_once = contextlib.ExitStack()
    try:
        _seize(pid, traced)  # takes a while with many threads, which run on
        if not traced:
            raise Gone
        at_once.enter_context(_first())
        standing = Standing(pid, time.perf_counter())
        until = time.monotonic() + patience + _EACH * len(traced)
        interrupted: set[int] = set()
        while True:
            for tid, thread in list(traced.items()):
                if tid not in interrupted:
                    interrupted.add(tid)
                    with contextlib.suppress(Gone):
                        thread.interrupt()
            late = _await(pid, traced, until)
            if not _seize(pid, traced):
                break
        for tid, thread in list(traced.items()):
            if tid in late:
                standing.places[tid] = late[tid]
                continue
            try:
                registers = thread.registers()
            except Gone:
                del traced[tid]
                continue
            standing.places[tid] = registers.rip, registers.rsp
        yield standing
    finally:
        with at_once:
            _release(traced)


@contextlib.contextmanager
def _first() -> Iterator[None]:
    """This thread runs before ordinary ones, where it may: while others stand it should not have to wait for yet others."""
    before: tuple[int, os.sched_param] | None = None
    with contextlib.suppress(OSError):
        before = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        yield
    finally:
        if before is not None:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, *before)


def _seize(pid: int, traced: dict[int, Thread]) -> bool:
    """Whether there were new ones."""
    new = False
    for tid in threads_of(pid):
        if tid in traced:
            continue
        try:
            traced[tid] = Thread(pid, tid)
            new = True
        except Gone:
            pass
        except Refused:
            if not is_dead(pid, tid):
                raise
    return new


def _await(pid: int, traced: dict[int, Thread], until: float) -> dict[int, tuple[int, int]]:
    """Returns when all stand; those that sleep and cannot be woken are given with their places."""
    late: dict[int, tuple[int, int]] = {}
    for tid, thread in list(traced.items()):
        try:
            while not thread.wait(until):
                sleep = asleep(pid, tid)
                if sleep is None or sleep.number in _MAKES_PROCESSES:
                    raise NotStanding
                if not thread.poll():
                    late[tid] = sleep.rip, sleep.rsp
                    break
        except Gone:
            del traced[tid]
    return late


def _release(traced: dict[int, Thread]) -> None:
    late, ready = [], []
    for thread in traced.values():
        with contextlib.suppress(Gone):
            if thread.poll():
                thread.settle()
                ready.append(thread)
            else:
                late.append(thread)
    for thread in ready:
        thread.detach(thread.signal)
    for thread in late:  # also let go when this thread ends
        with contextlib.suppress(Gone):
            if thread.wait(time.monotonic() + 0.05):
                thread.release()

"""Stop and read threads of another process with ptrace(2), and detach without the process noticing.

A stop wakes a thread from the system call in which it sleeps. The kernel itself restarts most system calls. Those in `_NOT_RESTARTED`
would return EINTR to the program, although no signal arrived. `_hide_stop` makes the kernel restart them too, by setting the result
with which the kernel requests a restart. It does so as soon as `poll` sees the stop, because the tool may be killed at any later
moment. A signal that arrives at that very moment still causes EINTR.
(A call such as epoll_wait then restarts its timeout. Calls that the kernel restarts itself keep their deadline.)

Make all calls for one traced thread from the Python thread that created the `TracedThread`. They hold Python's global interpreter lock
while the process is stopped, so do not wait for another thread of this process meanwhile. When the tracing thread ends, the kernel
detaches all threads that it still traces. If the traced process is a child of this one, no other thread may wait for it meanwhile
(`Popen.poll`): it would mistake a stop for the end of the process.
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

from gpubpf.errors import out_of_files
from gpubpf.kernel import libc, syscalls
from gpubpf.process import proc
from gpubpf.record import MutableRecord, Record, field

_libc = libc.library_with_gil
_ptrace = _libc.ptrace
_ptrace.restype = ctypes.c_long
_ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]

_SEIZE, _INTERRUPT, _GETREGSET, _SETREGSET = 0x4206, 0x4207, 0x4204, 0x4205
_CONT, _GETREGS, _SETREGS, _SYSCALL, _DETACH = 7, 12, 13, 24, 17
_GETSIGMASK, _SETSIGMASK, _SECCOMP_GET_FILTER, _RSEQ = 0x420A, 0x420B, 0x420C, 0x420F
# A filter has at most BPF_MAXINSNS (4096) instructions of 8 bytes. All filters of a thread have at most 32768 in total.
_FILTER_BYTES, _MOST_FILTERS = 8 * 4096, 512
_OPTION_SYSGOOD, _OPTION_SUSPEND_SECCOMP = 1, 1 << 21
_EVENT_STOP, _NT_XSTATE = 128, 0x202
_WNOHANG, _WEXITED, _WSTOPPED, _WNOWAIT = 1, 4, 2, 0x01000000
_WALL, _WNOTHREAD = 0x40000000, 0x20000000
_P_PID = 1
_EACH = 50e-6  # seconds to wait per thread, since a thread must be scheduled before it stops
_STOPS = (4, 5)  # CLD_TRAPPED, CLD_STOPPED
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_XSTATE_BYTES = 16384  # buffer size; the kernel returns the actual size

EINTR_RESULT = -errno.EINTR & (1 << 64) - 1
# ERESTART_RESTARTBLOCK: the kernel keeps the deadline (nanosleep, poll, futex with a timeout).
RESTART_BLOCK = -516 & (1 << 64) - 1
# ERESTARTNOHAND: the kernel restarts the call, but returns EINTR if a signal handler runs first.
_RESTART_NO_HANDLER = -514 & (1 << 64) - 1
RESTARTS = frozenset(-n & (1 << 64) - 1 for n in (512, 513, 514)) | {RESTART_BLOCK}  # ERESTARTSYS …
NO_SYSCALL = (1 << 64) - 1

# signal(7), "Interruption of system calls and library functions by stop signals". Not close and connect, which already had an effect.
_NOT_RESTARTED = syscalls.numbers("""
    read write readv writev
    accept sendto recvfrom sendmsg recvmsg accept4 recvmmsg sendmmsg
    epoll_wait epoll_pwait epoll_pwait2
    semop semtimedop msgsnd msgrcv
    rt_sigtimedwait
    io_getevents io_pgetevents io_uring_enter
""")


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
    fs_base: int

    def copy(self) -> Registers:
        return Registers.from_buffer_copy(self)

    @property
    def in_syscall(self) -> bool:
        """Whether the stop interrupted a system call, which the thread will restart or leave with EINTR."""
        return self.orig_rax < 1 << 32 and (self.rax in RESTARTS or self.rax == EINTR_RESULT)


class _Iovec(ctypes.Structure):
    """struct iovec."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class ThreadEnded(Exception):
    """The thread has ended."""


class TraceRefused(Exception):
    """The kernel refuses to let this process trace the thread (`errno`)."""

    def __init__(self, code: int) -> None:
        super().__init__(os.strerror(code))
        self.errno = code


def _call(request: int, tid: int, address: int = 0, data: object = None) -> None:
    if _ptrace(request, tid, address, data) == -1:
        code = ctypes.get_errno()
        if code == errno.ESRCH:
            raise ThreadEnded
        raise TraceRefused(code)


class TracedThread:
    """A thread that this thread traces. It runs until `interrupt`. All methods raise ThreadEnded and TraceRefused."""

    def __init__(self, pid: int, tid: int) -> None:
        self.pid, self.tid = pid, tid
        self.status: int | None = None  # the stop's signal | event << 8; None: it runs
        self.detached = False
        self.pause: Callable[[float], None] = time.sleep  # called in `wait`
        self._registers: Registers | None = None  # cached while the thread is stopped
        self._info = ctypes.create_string_buffer(128)
        _call(_SEIZE, tid, 0, _OPTION_SYSGOOD)

    # --- stops ---

    def interrupt(self) -> None:
        _call(_INTERRUPT, self.tid)

    def poll(self) -> bool:
        """Return whether the thread is stopped."""
        if self.status is not None:
            return True
        ctypes.memset(self._info, 0, 32)
        kinds = _WEXITED | _WSTOPPED | _WNOWAIT | _WNOHANG | _WALL | _WNOTHREAD
        if _libc.waitid(_P_PID, self.tid, self._info, kinds) != 0:
            raise ThreadEnded
        pid, _, status = struct.unpack_from("=iIi", self._info, 16)  # siginfo_t: si_pid, si_uid, si_status
        if not pid:
            return False
        if struct.unpack_from("=i", self._info, 8)[0] not in _STOPS:
            self._reap()
            raise ThreadEnded
        self.status = status
        if self.interrupted:
            self._hide_stop()
        return True

    def _hide_stop(self) -> None:
        """Set the registers so that the program does not notice the stop when it continues."""
        registers = self.registers()
        if registers.rax == EINTR_RESULT and registers.orig_rax in _NOT_RESTARTED:
            changed = registers.copy()
            changed.rax = _RESTART_NO_HANDLER
            self.set_registers(changed)

    def check(self) -> None:
        """Raise ThreadEnded if the thread was killed while it was stopped."""
        ctypes.memset(self._info, 0, 32)
        kinds = _WEXITED | _WNOWAIT | _WNOHANG | _WALL | _WNOTHREAD  # this also reports a stop again
        failed = _libc.waitid(_P_PID, self.tid, self._info, kinds) != 0
        code, _, pid = struct.unpack_from("=iii", self._info, 8)
        if failed or (pid and code not in _STOPS):
            self._reap()
            raise ThreadEnded

    def _reap(self) -> None:
        """Wait for a thread that has ended. Until its tracer has done so, the parent of the process is not notified of its end."""
        if self.tid != self.pid or parent(self.pid) != os.getpid():
            _libc.waitid(_P_PID, self.tid, self._info, _WEXITED | _WNOHANG | _WALL | _WNOTHREAD)

    def wait(self, until: float) -> bool:
        """Wait until the thread is stopped, or until time `until` (time.monotonic). Return whether it is stopped."""
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
        """The signal that stopped the thread and must be delivered to it; 0 if there is none."""
        if self.status is None or self.status >> 8 or self.status == _SYSCALL_STOP:
            return 0
        return self.status

    @property
    def interrupted(self) -> bool:
        """Whether this stop was caused only by `interrupt`."""
        return self.status == signal.SIGTRAP | _EVENT_STOP << 8

    @property
    def at_syscall(self) -> bool:
        """Whether the thread is stopped at the entry or exit of a system call, after `to_syscall`."""
        return self.status == _SYSCALL_STOP

    def to_syscall(self, signal_number: int = 0) -> None:
        """Continue to the next entry or exit of a system call. A pending `signal` is delivered only if named here."""
        self.status = self._registers = None
        _call(_SYSCALL, self.tid, 0, signal_number)

    def to_user(self) -> None:
        """Continue to the point where the kernel returns to user space, after signal delivery, and stop there."""
        self.interrupt()  # any other stop cancels the interrupt
        self.status = self._registers = None
        _call(_CONT, self.tid)

    # --- state ---

    def registers(self) -> Registers:
        """Return the general registers. Do not change them; change a copy."""
        if self._registers is None:
            registers = Registers()
            _call(_GETREGS, self.tid, 0, ctypes.addressof(registers))
            self._registers = registers
        return self._registers

    def set_registers(self, registers: Registers) -> None:
        self._registers = None
        _call(_SETREGS, self.tid, 0, ctypes.addressof(registers))

    def xstate(self) -> bytes:
        """Return all other registers, in the layout of XSAVE."""
        buffer = ctypes.create_string_buffer(_XSTATE_BYTES)
        vector = _Iovec(ctypes.addressof(buffer), _XSTATE_BYTES)
        _call(_GETREGSET, self.tid, _NT_XSTATE, ctypes.addressof(vector))
        return buffer.raw[: vector.length]

    def set_xstate(self, state: bytes) -> None:
        buffer = ctypes.create_string_buffer(state, len(state))
        vector = _Iovec(ctypes.addressof(buffer), len(state))
        _call(_SETREGSET, self.tid, _NT_XSTATE, ctypes.addressof(vector))

    def blocked_signals(self) -> int:
        """Return the signal mask. Inside a call such as ppoll, it is the mask that is restored when the call returns."""
        mask = ctypes.c_uint64()
        _call(_GETSIGMASK, self.tid, 8, ctypes.addressof(mask))
        return mask.value

    def block_signals(self, mask: int) -> None:
        value = ctypes.c_uint64(mask)
        _call(_SETSIGMASK, self.tid, 8, ctypes.addressof(value))

    def restartable_sequence(self) -> int:
        """Return the address of the thread's struct rseq; 0 if it has none or the kernel does not report it."""
        configuration = ctypes.create_string_buffer(24)
        try:
            _call(_RSEQ, self.tid, 24, ctypes.addressof(configuration))
        except TraceRefused:
            return 0
        return int.from_bytes(configuration.raw[:8], "little")

    def suspend_seccomp(self) -> bool:
        """Suspend the thread's seccomp filters while it is traced, which requires CAP_SYS_ADMIN. Return whether it succeeded."""
        try:
            _call(0x4200, self.tid, 0, _OPTION_SYSGOOD | _OPTION_SUSPEND_SECCOMP)
        except TraceRefused:
            return False
        return True

    def filters(self) -> list[bytes]:
        """Return the thread's seccomp filters, each an array of struct sock_filter. Empty without CAP_SYS_ADMIN, which it requires."""
        found: list[bytes] = []
        buffer = ctypes.create_string_buffer(_FILTER_BYTES)
        while len(found) < _MOST_FILTERS:
            count = _ptrace(_SECCOMP_GET_FILTER, self.tid, len(found), ctypes.addressof(buffer))
            if count < 0:
                break
            found.append(ctypes.string_at(buffer, 8 * count))
        return found

    # --- detach ---

    def detach(self, signal_number: int = 0) -> None:
        """Stop tracing the thread. It continues with this signal; 0: none."""
        with contextlib.suppress(ThreadEnded):
            _call(_DETACH, self.tid, 0, signal_number)
            self.detached = True

    def release(self) -> bool:
        """Stop tracing the thread. It continues where it stopped, with its pending signal. Return False if it is ending."""
        self.detach(self.signal)
        return self.detached


def threads_of(pid: int) -> list[int]:
    """Return the IDs of a process's threads. Raises ThreadEnded, or OSError if no more files can be opened."""
    try:
        return proc.threads(pid)
    except OSError as error:
        if out_of_files(error):
            raise
        raise ThreadEnded from None


class BlockedCall(Record):
    """The system call in which a thread sleeps, as shown by /proc/PID/task/TID/syscall without a stop."""

    number: int
    arguments: tuple[int, ...]
    rsp: int
    rip: int


def blocked_call(pid: int, tid: int) -> BlockedCall | None:
    """Return the system call in which a thread sleeps; None if it is running or the call cannot be read."""
    try:
        fields = proc.text(pid, f"task/{tid}/syscall").split()
    except OSError:
        return None
    if len(fields) != 9:
        return None
    return BlockedCall(
        int(fields[0]), tuple(int(f, 16) for f in fields[1:7]), int(fields[7], 16), int(fields[8], 16)
    )


def parent(pid: int) -> int:
    """Return the ID of the parent process; 0 if unknown."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(proc.stat(pid)[1])
    return 0


def is_dead(pid: int, tid: int) -> bool:
    """Return whether a thread has ended, possibly as a zombie. Raises OSError if no more files can be opened."""
    try:
        return proc.stat(pid, tid)[0] in (b"Z", b"X")
    except OSError as error:
        if out_of_files(error):
            raise
        return True


class StoppedProcess(MutableRecord):
    """A process whose threads are all stopped. `positions`: (rip, rsp) by thread ID, for each thread that may run again."""

    pid: int
    since: float  # time.perf_counter
    positions: dict[int, tuple[int, int]] = field(default_factory=dict)


class NotStopped(Exception):
    """A thread could not be stopped in time. All threads continue."""


# During these calls, a child may be running in the same memory.
_CREATES_PROCESSES = syscalls.numbers("clone fork vfork clone3")


@contextlib.contextmanager
def stopped(pid: int, patience: float = 0.005) -> Iterator[StoppedProcess]:
    """Stop all threads of `pid` while the block runs, including threads that are created meanwhile.

    A thread that sleeps in the kernel and cannot be woken counts as stopped, because it executes no instruction of the program before
    it stops. It is detached when it has woken, or when the calling thread ends. So call this on a separate thread
    (`fresh_thread.run`).

    Raises NotStopped if, after `patience` seconds plus some time per thread, a thread still runs or is creating a process. Raises
    ThreadEnded and TraceRefused.
    """
    traced: dict[int, TracedThread] = {}
    priority = contextlib.ExitStack()
    try:
        _seize(pid, traced)  # takes a while with many threads, which keep running
        if not traced:
            raise ThreadEnded
        priority.enter_context(_realtime_priority())
        process = StoppedProcess(pid, time.perf_counter())
        until = time.monotonic() + patience + _EACH * len(traced)
        interrupted: set[int] = set()
        while True:
            for tid, thread in list(traced.items()):
                if tid not in interrupted:
                    interrupted.add(tid)
                    with contextlib.suppress(ThreadEnded):
                        thread.interrupt()
            late = _await(pid, traced, until)
            if not _seize(pid, traced):
                break
        for tid, thread in list(traced.items()):
            if tid in late:
                process.positions[tid] = late[tid]
                continue
            try:
                registers = thread.registers()
            except ThreadEnded:
                del traced[tid]
                continue
            process.positions[tid] = registers.rip, registers.rsp
        yield process
    finally:
        with priority:
            _release(traced)


@contextlib.contextmanager
def _realtime_priority() -> Iterator[None]:
    """Run this thread at real-time priority, if allowed. It should not wait for a CPU while it keeps other threads stopped."""
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


def _seize(pid: int, traced: dict[int, TracedThread]) -> bool:
    """Start tracing the threads that are not traced yet. Return whether there were any."""
    new = False
    for tid in threads_of(pid):
        if tid in traced:
            continue
        try:
            traced[tid] = TracedThread(pid, tid)
            new = True
        except ThreadEnded:
            pass
        except TraceRefused:
            if not is_dead(pid, tid):
                raise
    return new


def _await(pid: int, traced: dict[int, TracedThread], until: float) -> dict[int, tuple[int, int]]:
    """Wait until all threads are stopped. Return the positions (rip, rsp) of those that sleep and cannot be woken."""
    late: dict[int, tuple[int, int]] = {}
    for tid, thread in list(traced.items()):
        try:
            while not thread.wait(until):
                call = blocked_call(pid, tid)
                if call is None or call.number in _CREATES_PROCESSES:
                    raise NotStopped
                if not thread.poll():
                    late[tid] = call.rip, call.rsp
                    break
        except ThreadEnded:
            del traced[tid]
    return late


def _release(traced: dict[int, TracedThread]) -> None:
    late, ready = [], []
    for thread in traced.values():
        with contextlib.suppress(ThreadEnded):
            if thread.poll():
                ready.append(thread)
            else:
                late.append(thread)
    for thread in ready:
        thread.detach(thread.signal)
    for thread in late:  # the kernel also detaches them when this thread ends
        with contextlib.suppress(ThreadEnded):
            if thread.wait(time.monotonic() + 0.05):
                thread.release()

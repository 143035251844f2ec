"""The way into a process that runs already: a library loaded into it, its code patched while it stands still.

**Loading** (`inject`). `dlopen` may wait for the dynamic linker's lock, run constructors, take seconds. On a thread of the program it
could wait for a lock that this very thread holds, for ever; a thread made by a bare clone() has no memory of its own for the C
library (errno, malloc's caches). So a thread of the program is borrowed for one short call, `pthread_create`, and everything
else happens on the thread that this makes, which the C library knows, which blocks all signals and which nobody waits for.

The borrowed thread must not be inside malloc or the dynamic linker, whose locks `pthread_create` takes. It is one that

- sleeps in a call that waits for something outside (`_WAITS`): no lock of these is held across such a call. A futex counts only
  as conditions and semaphores use it (FUTEX_WAIT_BITSET): one that waits for a lock may hold another.
- or else is in code that belongs to none of them, outside the C library or right behind a system call, with nothing of theirs on its
  stack (`_Code`);

and in either case is in no signal handler, which could have interrupted anything: no return address on its stack leads to a
`rt_sigreturn`. Words on a stack may be left over from calls long past; then another thread is tried, or the same one later, for
`_PATIENCE` seconds at most. All other threads run on meanwhile, so a lock that one of them holds is given back.

The borrowed thread runs on a stack of ours, with all signals blocked and with a fresh floating-point environment. At its end the
stub calls `rt_sigreturn` with everything the thread had: should the tool be killed, the thread finds its own way back. Otherwise it
is caught at that call, and gets its registers, vector state and mask back where it was stopped first: in front of the kernel's own
decision about the interrupted call, as if it had never left. A `pthread_create` that waits for a lock for more than
`_BORROWED` seconds is given up in the same way.

The new thread does the calls that the tool leaves for it in memory (`_Worker`), then frees that memory and ends.

**Containers.** Functions are found in the process's memory. A library that is not the same file there, or that its user cannot read,
goes in as a memfd; where asked for, so does the agent's connection, a socket pair made inside and fetched by pidfd_getfd(2), which no
network namespace can part.

**Patching** (`apply`). All threads stand while the bytes change (`ptrace.stopped`); none may be inside bytes that change, by its
instruction pointer or by what is on its stack (a call, a signal's frame). Else all run on, and it is tried again a little later. Bytes
must be what they are said to be, lie in code mapped privately from a file, and be as the file has them: another tracer's breakpoint is
left alone.

x86-64 with glibc only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import random
import re
import socket
import struct
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from gpubpf import ptrace, target, users
from gpubpf.errors import SessionError
from gpubpf.ptrace import Gone, NotStanding, Refused, Registers, Thread
from gpubpf.target import Library, Mapping, Memory, Symbol

_PATIENCE = 3.0  # seconds for finding a thread that may be borrowed, or a moment at which code may be patched
_BORROWED = 1.0  # seconds for pthread_create, which takes less than a millisecond
_ANSWER = 10.0  # seconds for one call on the new thread
_STACK_LIMIT = 256 << 10  # bytes of a stack that are looked through

# read, poll, select, pause, nanosleep, accept, recvfrom, recvmsg, wait4, rt_sigtimedwait, rt_sigsuspend, restart_syscall,
# clock_nanosleep, epoll_wait, waitid, pselect6, ppoll, epoll_pwait, accept4, recvmmsg, epoll_pwait2
_WAITS = frozenset((0, 7, 23, 34, 35, 43, 45, 47, 61, 128, 130, 219, 230, 232, 247, 270, 271, 281, 288, 299, 441))  # fmt: skip
_FUTEX, _FUTEX_WAIT_BITSET, _FUTEX_COMMAND = 202, 9, 0x7F
# brk, mmap, mprotect, munmap, mremap, madvise, futex, clone, clone3, fork, exit: what malloc and the making of threads are made of
_NOT_BEHIND = frozenset((9, 10, 11, 12, 25, 28, 202, 56, 57, 60, 435))
_FORGETFUL = frozenset(
    (232, 281, 441, 219, 35, 230)
)  # borrowed last: they begin their time anew, or know their end only in the kernel

_MMAP, _MUNMAP, _GETPID, _SIGRETURN = 9, 11, 39, 15
_PIDFD_OPEN, _PIDFD_GETFD = 434, 438
_SYNCHRONOUS = sum(
    1 << n - 1 for n in (4, 5, 7, 8, 11, 31)
)  # ILL, TRAP, BUS, FPE, SEGV, SYS: blocked, they would kill
_ALL_OTHERS = (1 << 64) - 1 & ~_SYNCHRONOUS
_RETURNING = bytes.fromhex("48c7c00f0000000f05")  # mov $15, %rax; syscall: where signal handlers return to

STUB_SOURCE = """\
main:                                # on the borrowed thread; rbx: the data
  mov rdi, rbx
  mov esi, 0x19000                   # all but the code
  mov edx, 3
  mov eax, 10                        # mprotect, to be written
  syscall
  test eax, eax
  jnz back
  lea rsi, [rbx+0x1018]              # of the frame: sigaltstack as it is
  xor edi, edi
  mov eax, 131
  syscall
  call [rbx]                         # __errno_location
  mov r12, rax
  mov r13d, [rax]
  lea rdi, [rbx+0x10]
  xor esi, esi
  lea rdx, worker[rip]
  mov rcx, rbx
  call [rbx+0x08]                    # pthread_create
  mov [rbx+0x18], eax
  mov [r12], r13d
back:
  lea rsp, [rbx+0x1008]
  mov eax, 15                        # rt_sigreturn
  syscall
  ud2
worker:                              # the new thread
  push rbx
  push r12
  push r13
  mov rbx, rdi
  call [rbx+0x20]                    # pthread_self
  mov rdi, rax
  call [rbx+0x28]                    # pthread_detach
next:
  mov r12d, 0x20000                  # some 20 s without a command: the tool is gone
idle:
  mov eax, [rbx+0x38]
  cmp eax, [rbx+0x3c]
  jne do
  mov edi, 100
  call [rbx+0x30]                    # usleep
  dec r12d
  jnz idle
  xor eax, eax
  pop r13
  pop r12
  pop rbx
  ret
do:
  mov rdi, [rbx+0x48]
  mov rsi, [rbx+0x50]
  mov rdx, [rbx+0x58]
  mov rcx, [rbx+0x60]
  mov r13, [rbx+0x40]
  xor eax, eax
  cmp dword ptr [rbx+0x84], 0
  jne last
  call r13
  mov [rbx+0x78], rax
  call [rbx]
  mov eax, [rax]
  mov [rbx+0x80], eax
  inc dword ptr [rbx+0x3c]
  jmp next
last:                                # munmap of all this: nothing here runs after it
  mov rax, r13
  pop r13
  pop r12
  pop rbx
  jmp rax
"""
STUB = bytes.fromhex(
    "4889dfbe00900100ba03000000b80a0000000f0585c07532488db31810000031ffb8830000000f05ff134989c4448b28488d7b1031f6488d15"
    "1d0000004889d9ff530889431845892c24488da308100000b80f0000000f050f0b53415441554889fbff53204889c7ff532841bc000002008b"
    "43383b433c7515bf64000000ff533041ffcc75eb31c0415d415c5bc3488b7b48488b7350488b5358488b4b604c8b6b4031c083bb8400000000"
    "751641ffd548894378ff138b00898380000000ff433ceba84c89e8415d415c5bffe0"
)
_STUB_END = 0x58  # behind its rt_sigreturn

# The memory that is mapped for it: code, data, the signal frame with the vector state, texts, a stack.
_PAGE = 4096
_DATA, _FRAME, _XSTATE, _TEXTS, _STACK_TOP = _PAGE, 2 * _PAGE, 3 * _PAGE, 8 * _PAGE, 26 * _PAGE
_SIZE = _STACK_TOP
_CREATED, _COMMAND, _DONE, _FUNCTION, _RESULT, _ERRNO, _LAST = 0x18, 0x38, 0x3C, 0x40, 0x78, 0x80, 0x84
_PENDING = 0x7FFFFFFF  # in _CREATED: not said yet

_FUNCTIONS = (
    "__errno_location pthread_create pthread_self pthread_detach usleep dlopen dlsym dlerror munmap"
    " memfd_create socketpair close"
).split()
# Whose locks pthread_create takes, beside malloc's and the dynamic linker's.
_TAKE_LOCKS = (
    "pthread_create pthread_join pthread_detach pthread_exit pthread_tryjoin_np pthread_setattr_default_np"
    " pthread_getattr_default_np fork _Fork exit quick_exit dlopen dlclose dlsym dlvsym"
    " dlmopen dl_iterate_phdr dlinfo dladdr dladdr1 dlerror"
).split()
_MALLOC = (
    "malloc free calloc realloc memalign aligned_alloc posix_memalign valloc pvalloc malloc_trim mallinfo mallinfo2"
    " malloc_info malloc_stats mallopt malloc_usable_size"
).split()

RECORD = struct.Struct(
    "<Q8s8sQ"
)  # of a list of patches: address, old bytes, new bytes, how many of them count
PATCH_LIMIT = 4096
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SCANNED = 128 << 10  # bytes of each thread's stack that are looked through for what leads into patched code

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


# --- loading ---


class Injection:
    """A library in the process; its entry runs, or has run. `socket`: our end of the connection, where one was asked for."""

    def __init__(self, worker: _Worker, entry: str, connection: socket.socket | None) -> None:
        self._worker, self._entry = worker, entry
        self.socket = connection

    def wait(self, timeout: float = _ANSWER) -> int:
        """What the entry returned, a C int. Raises SessionError where it does not in `timeout` seconds: it is left to itself."""
        try:
            result, _ = self._worker.result(self._entry, timeout)
        except BaseException:
            self._worker.abandon()
            raise
        self._worker.close()
        return ctypes.c_int(result & 0xFFFFFFFF).value


def inject(pid: int, library: Path, entry: str, argument: str = "", connect: bool = False) -> Injection:
    """Loads `library` into the process and calls its function `entry`, of type int (const char *), on a thread of its own.

    `connect`: the argument is `fd:N`, a connected stream socket of the process; the other end is the result's. `argument` has
    less than 1024 bytes. Raises SessionError, the process being as it was.
    """
    target.check(pid)
    if not os.access(library, os.R_OK):
        raise SessionError(f"{library} cannot be read; run script/setup")
    try:
        with contextlib.ExitStack() as stack:
            memory = stack.enter_context(Memory(pid))
            code = _Code(memory, target.mappings(pid))
            functions = code.functions(pid)
            base = ptrace.on_own_thread(lambda: _Borrowing(pid, memory, code, functions).run())
            worker = _Worker(pid, memory, base, functions)
            stack.pop_all()
    except Gone:
        raise target.refusal(pid, errno.ESRCH) from None
    except Refused as error:
        raise target.refusal(pid, error.errno) from None
    except OSError as error:
        raise target.refusal(pid, error.errno or errno.ESRCH) from None
    connection = None
    try:
        function, opened = _loaded(worker, code, library, entry)
        if connect:
            connection, number = worker.connection()
            argument = f"fd:{number}"
        if opened >= 0:
            worker.call("close", opened)
        worker.start(function, worker.text(argument, 0))
    except BaseException as error:
        if connection is not None:
            connection.close()
        worker.close()
        if isinstance(error, OSError):
            raise target.refusal(pid, errno.ESRCH if ptrace.is_dead(pid, pid) else error.errno or 0) from None
        raise
    return Injection(worker, entry, connection)


class _Code:
    """Which code of the process is whose."""

    def __init__(self, memory: Memory, mapped: Sequence[Mapping]) -> None:
        self._memory = memory
        self.mapped = mapped
        self.libraries = target.libraries(mapped)
        self.symbols: dict[str, Symbol] = {}  # of the C library
        self.libc: tuple[tuple[int, int], ...] = ()
        self._careful: list[tuple[int, int]] = []  # what must not be interrupted
        self._code = sorted((m.start, m.end) for m in mapped if m.code)
        self._starts = [start for start, _ in self._code]
        self._returning: dict[int, bool] = {}
        for library in self.libraries:
            name = library.name
            if re.fullmatch(r"libc(\.so\.6|-2\.\d+\.so)", name):
                found = target.symbols(memory, library.base)
                self.symbols.update(found)
                self.libc += library.code
                self._careful += [_malloc_of(found), *_places(found, _TAKE_LOCKS)]
            elif re.fullmatch(r"lib(pthread|dl)(\.so\.\d|-2\.\d+\.so)", name):
                found = target.symbols(memory, library.base)
                self.symbols = {**found, **self.symbols}
                self.libc += library.code
                self._careful += _places(found, _TAKE_LOCKS)
            elif name.startswith("ld-") or _is_allocator(memory, library):
                self._careful += library.code

    def functions(self, pid: int) -> dict[str, int]:
        """Addresses of those that are called. Raises SessionError."""
        who = f"pid {pid} ({target.status(pid).get('Name', '')})"
        start = "start it with the tool instead: TOOL -- COMMAND"
        if any("ld-musl" in library.name or "libc.musl" in library.name for library in self.libraries):
            raise SessionError(f"{who} uses musl, not glibc, as CUDA does not; name another process")
        if not self.libc:
            raise SessionError(
                f"{who} has no shared C library, so it uses no CUDA driver; name another process"
            )
        missing = [name for name in _FUNCTIONS if name not in self.symbols]
        if missing:
            raise SessionError(f"{who} has a C library without {missing[0]}; {start}")
        return {name: self.symbols[name].address for name in _FUNCTIONS}

    def a_syscall(self) -> int:
        """Address of an instruction `syscall`."""
        for start, end in self.libc:
            data = self._memory.some(start, min(end - start, 4 << 20))
            if (at := data.find(b"\x0f\x05")) >= 0:
                return start + at
        raise OSError(errno.ENOEXEC, "no system call in the C library")

    def stack(self, rsp: int) -> bytes | None:
        """What lies on the stack, as far as it is mapped; None: too much to look through."""
        end = next((m.end for m in self.mapped if m.start <= rsp < m.end), rsp + _STACK_LIMIT)
        if end - rsp > _STACK_LIMIT:
            return None
        return self._memory.some(rsp & ~7, end - (rsp & ~7))

    def may_be_borrowed(self, registers: Registers) -> bool:
        words = self.stack(registers.rsp)
        if words is None:
            return False
        addresses = {a for a in set(memoryview(words[: len(words) & ~7]).cast("Q")) if self._is_code(a)}
        if any(self._returns_from_signal(a) for a in addresses):
            return False
        if registers.in_syscall and waits(registers.orig_rax, registers.rsi):
            return True
        behind = (
            registers.orig_rax < 1 << 32 and registers.orig_rax not in _NOT_BEHIND
        )  # a system call that is done
        inside = not registers.in_syscall and not behind and self._within(self.libc, registers.rip)
        return (
            not inside
            and not self._within(self._careful, registers.rip)
            and not any(self._within(self._careful, a) for a in addresses)
        )

    def _is_code(self, address: int) -> bool:
        at = bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._code[at][1]

    def _returns_from_signal(self, address: int) -> bool:
        if address not in self._returning:
            self._returning[address] = self._memory.some(address, len(_RETURNING)) == _RETURNING
        return self._returning[address]

    @staticmethod
    def _within(ranges: Iterable[tuple[int, int]], address: int) -> bool:
        return any(start <= address < end for start, end in ranges)


def waits(number: int, operation: int) -> bool:
    """Whether a system call waits for something outside; `operation` is its second argument."""
    return number in _WAITS or (number == _FUTEX and operation & _FUTEX_COMMAND == _FUTEX_WAIT_BITSET)


def _places(symbols: dict[str, Symbol], names: Iterable[str]) -> list[tuple[int, int]]:
    return [(s.address, s.address + s.size) for name in names if (s := symbols.get(name)) is not None]


def _malloc_of(symbols: dict[str, Symbol]) -> tuple[int, int]:
    """The C library's allocator: between the exported functions around it, since most of its own have no names."""
    own = [symbols[name].address for name in _MALLOC if name in symbols]
    if not own:
        return 0, 0
    others = sorted({s.address for name, s in symbols.items() if name not in _MALLOC})
    low = max((a for a in others if a < min(own)), default=min(own))
    high = min((a for a in others if a > max(own)), default=max(own) + 4096)
    return low, high


def _is_allocator(memory: Memory, library: Library) -> bool:
    """Whether it replaces malloc. Its name says so, or it is the program itself."""
    if re.search(r"malloc|\.so", library.name) is None or "malloc" in library.name:
        found = target.symbols(memory, library.base)
        return "malloc" in found and "free" in found
    return False


class _Borrowing:
    """One thread of the process makes another one. To be run on a thread of its own."""

    def __init__(self, pid: int, memory: Memory, code: _Code, functions: dict[str, int]) -> None:
        self.pid, self.memory, self.code, self.functions = pid, memory, code, functions
        self.seccomp = target.status(pid).get("Seccomp", "0") != "0"
        self.saved = Registers()
        self.xstate = b""
        self.mask = 0
        self.instruction = 0  # address of a `syscall`
        self.held = 0  # a signal that came meanwhile and cannot be blocked

    def run(self) -> int:
        """Address of the memory that the new thread works in. Raises SessionError, Gone, Refused, OSError."""
        until = time.monotonic() + _PATIENCE
        while True:
            for tid in self._candidates():
                try:
                    base = self._try(tid)
                except Gone:
                    continue
                except Refused:
                    if ptrace.is_dead(self.pid, tid):
                        continue
                    raise
                if base:
                    return base
                if time.monotonic() > until:
                    break
            if ptrace.is_dead(self.pid, self.pid):
                raise Gone
            if time.monotonic() > until:
                raise SessionError(
                    f"pid {self.pid} has no thread that can be interrupted safely; try again, or start it with the tool"
                )
            time.sleep(random.uniform(0.001, 0.01))

    def _candidates(self) -> list[int]:
        """Those that wait, and lose nothing by it, come first."""
        ranked = []
        for tid in ptrace.threads_of(self.pid):
            sleep = ptrace.asleep(self.pid, tid)
            if sleep is None:
                rank = 3
            elif waits(sleep.number, sleep.arguments[1]):
                rank = int(sleep.number in _FORGETFUL)
            else:
                rank = 2
            ranked.append((rank, tid))
        return [tid for _, tid in sorted(ranked)]

    def _try(self, tid: int) -> int:
        """0: it cannot be borrowed now."""
        thread = Thread(self.pid, tid)
        thread.interrupt()
        if not thread.wait(time.monotonic() + 0.05):
            return 0  # in the kernel for long; let go when this thread ends
        registers = thread.registers()
        if registers.cs != 0x33:
            thread.release()
            raise SessionError(
                f"pid {self.pid} runs 32-bit code; CUDA has no such programs, name another process"
            )
        sleeping = registers.in_syscall and self.memory.some(registers.rip - 2, 2) == b"\x0f\x05"
        if (
            not thread.interrupted
            or (registers.in_syscall and not sleeping)
            or self._in_sequence(thread, sleeping)
            or not self.code.may_be_borrowed(registers)
        ):
            thread.release()
            return 0
        self.instruction = registers.rip - 2 if sleeping else self.code.a_syscall()
        self.saved, self.xstate, self.mask = registers, thread.xstate(), thread.blocked_signals()
        if self.seccomp:
            thread.without_seccomp()
        thread.block_signals(_ALL_OTHERS)
        try:
            base, failure = self._borrow(thread)
        except BaseException:
            with contextlib.suppress(Gone, Refused):
                self._give_back(thread)
            raise
        if failure == _PENDING:
            raise SessionError(
                f"pid {self.pid} does not let a thread be made: another one holds a lock; try again"
            )
        if failure:
            raise SessionError(
                f"pid {self.pid} can make no thread ({os.strerror(failure)}); raise its limits, then try again"
            )
        return base

    def _in_sequence(self, thread: Thread, sleeping: bool) -> bool:
        """In a restartable sequence, which it must not leave unnoticed."""
        if sleeping or not (area := thread.restartable_sequence()):
            return False
        return self.memory.some(area + 8, 8) != bytes(8)

    def _borrow(self, thread: Thread) -> tuple[int, int]:
        """The memory, and why no thread was made. The thread is back where it was, whatever happens."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        base = self._call(thread, _MMAP, 0, _SIZE, mmap.PROT_READ | mmap.PROT_EXEC, flags, NO_FILE, 0)
        if base >= -4095 & (1 << 64) - 1:
            self._give_back(thread)
            return 0, (1 << 64) - base
        self._prepare(base)
        failure = self._run_stub(thread, base)
        if failure and failure != _PENDING:
            self._call(thread, _MUNMAP, base, _SIZE)
        self._give_back(thread)
        return base, failure

    def _prepare(self, base: int) -> None:
        f, data = self.functions, bytearray(_PAGE)
        struct.pack_into("<QQ", data, 0, f["__errno_location"], f["pthread_create"])
        struct.pack_into("<i", data, _CREATED, _PENDING)
        struct.pack_into("<QQQ", data, 0x20, f["pthread_self"], f["pthread_detach"], f["usleep"])
        self.memory.write(base, STUB)
        self.memory.write(base + _DATA, bytes(data))
        self.memory.write(base + _FRAME, self._frame(base))
        # struct _fpx_sw_bytes says to sigreturn that the whole state is there.
        size = len(self.xstate)
        software = struct.pack(
            "<IIQI", 0x46505853, size + 4, *struct.unpack_from("<Q", self.xstate, 464), size
        )
        state = bytearray(self.xstate + struct.pack("<I", 0x46505845))
        state[464 : 464 + len(software)] = software
        if size + 4 <= _TEXTS - _XSTATE:
            self.memory.write(base + _XSTATE, bytes(state))

    def _frame(self, base: int) -> bytes:
        """struct rt_sigframe, arch/x86/include/asm/sigframe.h: the thread's own way back."""
        s = self.saved
        rip, rax = s.rip, s.rax
        if s.in_syscall:
            rip, rax = s.rip - 2, s.orig_rax
        general = struct.pack(
            "<18Q4H4QQ64xQ",
            *(getattr(s, n) for n in "r8 r9 r10 r11 r12 r13 r14 r15 rdi rsi rbp rbx rdx".split()),
            *(rax, s.rcx, s.rsp, rip, s.eflags),
            *(s.cs, s.gs, s.fs, s.ss),
            *(0, 0, 0, 0),
            base + _XSTATE if len(self.xstate) + 4 <= _TEXTS - _XSTATE else 0,
            self.mask,
        )
        return (
            struct.pack("<QQQQI4xQ", 0, 7, 0, 0, 2, 0) + general
        )  # flags: XSTATE, SIGCONTEXT_SS, STRICT_RESTORE_SS

    def _run_stub(self, thread: Thread, base: int) -> int:
        """What pthread_create returned."""
        own = self.saved.copy()
        own.rip, own.rbx, own.rsp = base, base + _DATA, base + _STACK_TOP - 64
        own.rax = own.rbp = 0
        own.orig_rax, own.eflags = ptrace.NO_SYSCALL, 0x202
        fresh = bytearray(self.xstate)
        struct.pack_into("<H", fresh, 0, 0x37F)  # no floating-point exceptions, whatever the program has set
        struct.pack_into("<I", fresh, 24, 0x1F80)
        thread.set_xstate(bytes(fresh))
        thread.set_registers(own)
        until, last = time.monotonic() + _BORROWED, time.monotonic() + 5 * _BORROWED
        asked = False
        thread.to_syscall()
        while True:
            if not thread.wait(until):
                if time.monotonic() > last:
                    raise SessionError(
                        f"pid {self.pid} takes seconds to make a thread; it is left to it, try again later"
                    )  # the borrowed thread finds its own way back
                thread.interrupt()
                asked, until = True, last
                continue
            registers = thread.registers()
            if thread.at_syscall and registers.orig_rax == _SIGRETURN and registers.rip == base + _STUB_END:
                created: int = struct.unpack("<i", self.memory.read(base + _DATA + _CREATED, 4))[0]
                return created if created != _PENDING else errno.ENOMEM  # it could not even write there
            if asked and not thread.at_syscall and registers.in_syscall and registers.orig_rax == _FUTEX:
                return _PENDING
            self._go_on(thread)

    def _call(self, thread: Thread, number: int, *arguments: int) -> int:
        """A system call by the thread, from any stop."""
        registers = self.saved.copy()
        registers.rip, registers.rax, registers.orig_rax = self.instruction, number, ptrace.NO_SYSCALL
        for name, value in zip("rdi rsi rdx r10 r8 r9".split(), arguments, strict=False):
            setattr(registers, name, value & (1 << 64) - 1)
        self._to_entry(thread, registers)
        self._go_on(thread)
        while not (self._stands(thread) and thread.at_syscall):
            self._go_on(thread)
        return thread.registers().rax

    def _to_entry(self, thread: Thread, registers: Registers) -> None:
        """Goes to the entry of the system call that `registers` are in front of."""
        thread.set_registers(registers)
        self._go_on(thread)
        while True:
            self._stands(thread)
            if thread.at_syscall:
                now = thread.registers()
                if now.rip == registers.rip + 2 and now.orig_rax == registers.rax:
                    return
            self._go_on(thread)

    def _go_on(self, thread: Thread) -> None:
        self._hold(thread)
        thread.to_syscall()

    def _hold(self, thread: Thread) -> None:
        if number := thread.signal:
            if 1 << number - 1 & _SYNCHRONOUS:
                raise SessionError(
                    f"pid {self.pid} failed with signal {number} while probes were put into it; report it"
                )
            self.held = number

    def _stands(self, thread: Thread) -> bool:
        if not thread.wait(time.monotonic() + 5):
            raise Gone
        return True

    def _give_back(self, thread: Thread) -> None:
        """The thread goes on as if nothing had been."""
        if thread.at_syscall:  # if it is at an entry: to a call that does nothing
            registers = thread.registers().copy()
            registers.orig_rax = _GETPID
            thread.set_registers(registers)
        thread.to_user()
        while not (self._stands(thread) and thread.interrupted):
            self._hold(thread)
            thread.to_user()
        # Where a signal is looked for and calls begin anew: the kernel goes by these registers as if they were its own.
        thread.set_xstate(self.xstate)
        thread.set_registers(ptrace.settle(self.saved))
        thread.block_signals(self.mask)
        thread.detach(self.held)


NO_FILE = (1 << 64) - 1


@dataclass
class _Worker:
    """The new thread: it does one call after the other."""

    pid: int
    memory: Memory
    base: int
    functions: dict[str, int]
    _commands: int = field(default=0, init=False)

    def start(self, function: int, *arguments: int, last: bool = False) -> None:
        data = self.base + _DATA
        self._commands += 1
        try:
            values = [a & (1 << 64) - 1 for a in arguments]
            self.memory.write(
                data + _FUNCTION, struct.pack("<5Q", function, *values, *[0] * (4 - len(values)))
            )
            if last:
                self.memory.write(data + _LAST, b"\1")
            self.memory.write(data + _COMMAND, struct.pack("<I", self._commands))
        except OSError:
            raise target.refusal(self.pid, errno.ESRCH) from None

    def result(self, name: str, timeout: float = _ANSWER) -> tuple[int, int]:
        """Of the last call, with errno. Raises SessionError."""
        until = time.monotonic() + timeout
        pause = 50e-6
        while True:
            try:
                if struct.unpack("<I", self.memory.read(self.base + _DATA + _DONE, 4))[0] == self._commands:
                    data = self.memory.read(self.base + _DATA + _RESULT, 12)
                    return struct.unpack("<qi", data)
            except OSError:
                raise target.refusal(self.pid, errno.ESRCH) from None
            if time.monotonic() > until:
                raise SessionError(
                    f"pid {self.pid} does not finish {name} within {timeout:.0f} s; look with gdb what it waits for"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.005)

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
        at = self.base + _TEXTS + 1024 * slot
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
        return socket.socket(fileno=fetched), theirs

    def close(self) -> None:
        """The thread frees its memory and ends."""
        with contextlib.suppress(SessionError):
            self.start(self.functions["munmap"], self.base, _SIZE, last=True)
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


def _loaded(worker: _Worker, code: _Code, library: Path, entry: str) -> tuple[int, int]:
    """Address of `entry` in the process, and the number of a file that can be closed there now, or -1. Raises SessionError."""
    path, opened = str(library), -1
    if not _is_visible(worker.pid, library):
        data = library.read_bytes()
        name = f"{library.name}-{hashlib.sha256(data).hexdigest()[:16]}"
        for present in code.libraries:  # from the time before
            if present.path == f"/memfd:{name}" and (
                symbol := target.symbols(worker.memory, present.base).get(entry)
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
        raise SessionError(
            f"pid {worker.pid} cannot load {library.name}: {text}; see whether that can be helped"
        )
    return function, opened


def _fill(pid: int, number: int, data: bytes) -> None:
    try:
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        raise target.refusal(pid, error.errno or 0) from None
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
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


# --- patching ---


@dataclass(frozen=True)
class Patch:
    """Bytes of code to be changed, at most eight."""

    address: int
    old: bytes
    new: bytes

    @property
    def undone(self) -> Patch:
        return Patch(self.address, self.new, self.old)


@dataclass(frozen=True)
class Applied:
    """How it went. `stood`: seconds for which the process stood still when the bytes were written; `attempts`: as often did it
    stand, `longest`: for at most so many seconds."""

    patches: tuple[Patch, ...]
    stood: float
    attempts: int
    longest: float


def read_patches(file: int) -> tuple[Patch, ...]:
    """The list in a memory file that a process made, sealed so that it stays as it is read. Raises SessionError for anything else."""
    try:
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError
        size = os.fstat(file).st_size
        if size % RECORD.size or size > RECORD.size * PATCH_LIMIT:
            raise ValueError
        data = os.pread(file, size, 0)
        found = []
        for address, old, new, length in RECORD.iter_unpack(data):
            if not 0 < length <= 8 or address >> 47:
                raise ValueError
            found.append(Patch(address, old[:length], new[:length]))
    except (OSError, ValueError):
        raise SessionError("a traced process sent a list of patches that is none; it is not traced") from None
    found.sort(key=lambda p: p.address)
    if any(a.address + len(a.old) > b.address for a, b in pairwise(found)):
        raise SessionError("a traced process sent patches that overlap; it is not traced")
    return tuple(found)


def apply(pid: int, patches: Sequence[Patch], original: bool = True) -> Applied:
    """Writes them all, or none, while the process stands still. `original`: what is there must be as the library's file has it.

    Raises SessionError.
    """
    try:
        mapped = target.mappings(pid)
        for patch in patches:
            _check_patch(pid, mapped, patch, original)
        with Memory(pid) as memory:
            return ptrace.on_own_thread(lambda: _apply(pid, memory, mapped, patches))
    except Gone:
        raise target.refusal(pid, errno.ESRCH) from None
    except Refused as error:
        raise target.refusal(pid, error.errno) from None
    except OSError as error:
        raise target.refusal(pid, error.errno or errno.ESRCH) from None


def _check_patch(pid: int, mapped: Sequence[Mapping], patch: Patch, original: bool) -> None:
    at = next((m for m in mapped if m.start <= patch.address < m.end), None)
    end = patch.address + len(patch.old)
    if at is None or end > at.end or not at.code or not at.permissions.endswith("p") or not at.file[1]:
        raise SessionError(f"pid {pid} wants code patched where none of a file is; it is not traced")
    if original and (held := _in_file(pid, at, patch)) is not None and held != patch.old:
        raise SessionError(
            f"another tool has changed {os.path.basename(at.path)} in pid {pid} already (gdb, frida, perf?); end it first"
        )


def _in_file(pid: int, at: Mapping, patch: Patch) -> bytes | None:
    """The bytes in the file that is mapped; None: it cannot be read."""
    for path in (f"/proc/{pid}/map_files/{at.start:x}-{at.end:x}", f"/proc/{pid}/root{at.path}"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if os.fstat(file.fileno()).st_ino == at.file[1]:
                return os.pread(file.fileno(), len(patch.old), at.offset + patch.address - at.start)
    return None


def _apply(pid: int, memory: Memory, mapped: Sequence[Mapping], patches: Sequence[Patch]) -> Applied:
    until = time.monotonic() + _PATIENCE
    attempts, longest = 0, 0.0
    changing = _Changing(mapped, patches)
    while True:
        attempts += 1
        stood = False
        began = time.perf_counter()
        try:
            with ptrace.stopped(pid) as standing:  # on a thread of its own
                began = standing.since
                if not changing.used(memory, standing.places.values()):
                    _write(pid, memory, patches)
                    stood = True
        except NotStanding:
            pass
        took = time.perf_counter() - began
        longest = max(longest, took)
        if stood:
            return Applied(tuple(patches), took, attempts, longest)
        if time.monotonic() > until:
            raise SessionError(
                f"pid {pid} finds no moment at which its code can be changed; try again, or start it with the tool"
            )
        time.sleep(random.uniform(0.001, 0.02))


def _write(pid: int, memory: Memory, patches: Sequence[Patch]) -> None:
    if any(memory.read(p.address, len(p.old)) != p.old for p in patches):
        raise SessionError(f"the code of pid {pid} is not what it was said to be; it is not traced")
    done = []
    try:
        for patch in patches:
            memory.write(patch.address, patch.new)
            done.append(patch)
    except OSError:
        for patch in done:
            memory.write(patch.address, patch.old)
        raise


class _Changing:
    """Whether a thread is inside code that is to change: its instruction pointer, or what its stack says it returns to."""

    def __init__(self, mapped: Sequence[Mapping], patches: Sequence[Patch]) -> None:
        # A system call that ends inside may begin anew two bytes before.
        self._inside = {a for p in patches for a in range(p.address + 1, p.address + len(p.new) + 2)}
        self._starts = [m.start for m in mapped]  # a page beyond a thread's stack takes long to read
        self._ends = [m.end for m in mapped]
        self._beginnings = {(a >> 16).to_bytes(6, "little") for a in self._inside}

    def used(self, memory: Memory, places: Iterable[tuple[int, int]]) -> bool:
        for rip, rsp in places:
            if rip in self._inside:
                return True
            low = rsp - 128 & ~7
            at = bisect_right(self._starts, low) - 1
            left = self._ends[at] - low if at >= 0 else 0
            words = memory.some(low, min(left if left > 0 else _SCANNED, _SCANNED))
            for beginning in self._beginnings:
                at = words.find(beginning)
                while at >= 0:
                    if at & 7 == 2 and int.from_bytes(words[at - 2 : at + 6], "little") in self._inside:
                        return True
                    at = words.find(beginning, at + 1)
        return False

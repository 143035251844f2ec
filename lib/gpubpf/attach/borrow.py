"""Borrow a thread of a running process to create another thread there. loading.py explains why, and which threads can be borrowed.

One piece of machine code (`STUB`) does it. The new thread, the worker, runs the same code: it makes the calls that the tool writes
into its memory.

The tool may be killed between any two of its steps. The kernel then detaches the borrowed thread, which continues with its current
registers and signal mask. So the tool first writes a signal frame to the thread's stack, where the kernel would put one. All code that
the thread runs for the tool ends with rt_sigreturn of this frame, which restores the thread's complete state:

- A system call for the tool uses a `syscall` instruction in the C library that is followed by `ret`. The stack pointer is at the
  frame, so this `ret` leads to the C library's own call of rt_sigreturn.
- The stub ends with rt_sigreturn of the same frame.
- The thread leaves its own code, and returns to it, in a single step: PTRACE_SETREGS. The signal mask and the vector state need other
  requests, so they change only in between.

A thread that returns through the frame makes its interrupted system call again, from the beginning. So a relative timeout starts
again.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import mmap
import os
import re
import struct
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpubpf import cache, elf
from gpubpf.elf import AddressSpace, Symbol
from gpubpf.errors import SessionError
from gpubpf.kernel import fresh_thread, seccomp, syscalls
from gpubpf.kernel.syscalls import NUMBERS
from gpubpf.process import address_space, ptrace, traceable
from gpubpf.process.address_space import Library, Mapping, Memory
from gpubpf.process.ptrace import Registers, ThreadEnded, TracedThread, TraceRefused
from gpubpf.record import Record

PATIENCE = 3.0  # seconds to find a thread that can be borrowed
ENOUGH = (
    400  # rounds over all threads; until then, the search may take five times PATIENCE, for busy machines
)
CREATE_TIMEOUT = 1.0  # seconds for pthread_create, which takes less than a millisecond
# Seconds in which a borrowed thread works for the tool and is given back. Many signals can make this take long.
BORROW_LIMIT, SHORT_BORROW_LIMIT = 15.0, 2.0  # the short limit applies while other processes wait
STACK_LIMIT = 256 << 10  # bytes of a stack to search for return addresses

# System calls that wait for an event, and not for a lock.
_WAITS = syscalls.numbers(
    "read poll select pause nanosleep accept recvfrom recvmsg wait4 rt_sigtimedwait rt_sigsuspend restart_syscall"
    " clock_nanosleep epoll_wait waitid pselect6 ppoll epoll_pwait accept4 recvmmsg epoll_pwait2"
)
_FUTEX_WAIT_BITSET, _FUTEX_COMMAND = 9, 0x7F
# malloc and pthread_create make these calls, so a thread that has just returned from one may hold a lock.
_CALLS_OF_MALLOC = syscalls.numbers("mmap mprotect munmap brk mremap madvise futex clone fork exit clone3")
# Threads in these calls are borrowed last: the call restarts its timeout, or only the kernel knows its deadline.
_TIMED_WAITS = syscalls.numbers(
    "epoll_wait epoll_pwait epoll_pwait2 restart_syscall nanosleep clock_nanosleep"
)

# Calls that the kernel resumes as restart_syscall.
_CONTINUED = syscalls.numbers("poll nanosleep clock_nanosleep futex")

_NO_FILE = (1 << 64) - 1
# ILL, TRAP, BUS, FPE, SEGV, SYS: if blocked, they kill the process.
_SYNCHRONOUS = sum(1 << n - 1 for n in (4, 5, 7, 8, 11, 31))
_ALL_OTHERS = (1 << 64) - 1 & ~_SYNCHRONOUS
# glibc's SIGSETXID, with which setuid and similar functions make all threads change their user. The calling thread waits for all
# threads, and holds a lock that pthread_create takes. So the stub must not block this signal.
_SETXID = 33
# mov $15, %rax; syscall: the code to which signal handlers return.
_RETURNING = bytes.fromhex("48c7c00f0000000f05")
_CALLING = bytes.fromhex("0f05c3")  # syscall; ret

# struct rt_sigframe (arch/x86/include/asm/sigframe.h) without its siginfo, which rt_sigreturn does not read; then the vector state,
# which XRSTOR requires to be aligned. Like the kernel, leave the red zone below the stack pointer free.
_RED_ZONE, _VECTOR, _ALIGNMENT = 128, 320, 64
# XSAVE layout: offset of the software bytes in the legacy region, AMX's state bits, and the size without AMX, which Intel puts last.
_SOFTWARE, _AMX, _WITHOUT_AMX = 464, 3 << 17, 2696

STUB_SOURCE = """\
main:                                # on the borrowed thread; rbx: the data
  mov rdi, rbx
  mov esi, 0x13000                   # all but the code
  mov edx, 3
  mov eax, 10                        # mprotect: readable and writable
  syscall
  test eax, eax
  jnz back
  mov edi, 1                         # SIG_UNBLOCK, for SIGSETXID: there is a stack for its handler now
  lea rsi, [rbx+0xa0]
  xor edx, edx
  mov r10d, 8
  mov eax, 14                        # rt_sigprocmask
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
  test eax, eax
  jnz back
  mov r13d, [rbx+0x88]               # TURNS_LEFT: how often to look
waiting:
  test r13d, r13d
  jz back
  cmp dword ptr [rbx+0x8c], 0        # RELEASED
  jne back
  xor edi, edi
  xor esi, esi
  lea rdx, [rbx+0x90]
  xor r10d, r10d
  mov eax, 230                       # clock_nanosleep
  syscall
  add dword ptr [rbx+0x98], 50000    # each pause is longer than the one before
  dec r13d
  jmp waiting
back:
  mov rsp, [rbx+0x68]                # the frame
  mov eax, 15                        # rt_sigreturn
  syscall
  ud2
worker:                              # on the new thread
  push rbx
  push r12
  push r13
  mov rbx, rdi
  mov eax, 3
  shl rax, 31
  push rax                           # signals 32 and 33 are glibc's own
  mov edi, 1                         # SIG_UNBLOCK: the borrowed thread has blocked them
  mov rsi, rsp
  xor edx, edx
  mov r10d, 8
  mov eax, 14                        # rt_sigprocmask
  syscall
  pop rax
  call [rbx+0x20]                    # pthread_self
  mov rdi, rax
  call [rbx+0x28]                    # pthread_detach
next:
  mov r12d, 0x2780                   # about 20 s without a command: the tool has ended
idle:
  mov eax, [rbx+0x38]
  cmp eax, [rbx+0x3c]
  jne do
  mov edi, 100
  cmp r12d, 0x2710                   # short pauses at first
  ja soon
  mov edi, 2000
soon:
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
last:                                # munmap of this memory: no instruction of it may run afterwards
  mov rax, r13
  pop r13
  pop r12
  pop rbx
  jmp rax
"""
STUB = bytes.fromhex(
    "4889dfbe00300100ba03000000b80a0000000f0585c0757abf01000000488db3a000000031d241ba08000000b80e0000000f05ff134989c4"
    "448b28488d7b1031f6488d15570000004889d9ff530889431845892c2485c07539448bab880000004585ed742d83bb8c00000000752431ff"
    "31f6488d93900000004531d2b8e60000000f0581839800000050c3000041ffcdebce488b6368b80f0000000f050f0b53415441554889fbb8"
    "0300000048c1e01f50bf010000004889e631d241ba08000000b80e0000000f0558ff53204889c7ff532841bc802700008b43383b433c7523"
    "bf640000004181fc102700007705bfd0070000ff533041ffcc75dd31c0415d415c5bc3488b7b48488b7350488b5358488b4b604c8b6b4031"
    "c083bb8400000000751641ffd548894378ff138b00898380000000ff433ceb9a4c89e8415d415c5bffe0"
)
STUB_END = 0x9D  # offset after its rt_sigreturn

# The memory that is mapped for the stub: code, data, strings, a stack.
PAGE = 4096
DATA, TEXTS, STACK_TOP = PAGE, 2 * PAGE, 20 * PAGE
SIZE = STACK_TOP
# Offsets in the data. CREATED: pthread_create's result. FRAME: the stack pointer for rt_sigreturn. LAST: whether the worker ends after
# the call. TURNS_LEFT: how many more times the borrowed thread checks RELEASED.
CREATED, COMMAND, DONE, FUNCTION, FRAME, RESULT, LAST = 0x18, 0x38, 0x3C, 0x40, 0x68, 0x78, 0x84
TURNS_LEFT, RELEASED = 0x88, 0x8C
# A waiting thread's first pause, and its number of checks. The pauses get longer, about 5 s in all.
PAUSE_NS, TURNS = 200_000, 440
PENDING = 0x7FFFFFFF  # in CREATED: pthread_create has not returned yet

_FUNCTIONS = (
    "__errno_location pthread_create pthread_self pthread_detach usleep dlopen dlsym dlerror munmap"
    " memfd_create sendfile socketpair recvmsg close"
).split()
# Functions that hold locks that pthread_create takes, in addition to those of malloc and the dynamic linker.
_TAKE_LOCKS = (
    "pthread_create pthread_join pthread_detach pthread_exit pthread_tryjoin_np pthread_setattr_default_np"
    " pthread_getattr_default_np fork _Fork exit quick_exit dlopen dlclose dlsym dlvsym"
    " dlmopen dl_iterate_phdr dlinfo dladdr dladdr1 dlerror"
    " setuid setgid seteuid setegid setreuid setregid setresuid setresgid setgroups"
).split()
_MALLOC = (
    "malloc free calloc realloc memalign aligned_alloc posix_memalign valloc pvalloc malloc_trim mallinfo mallinfo2"
    " malloc_info malloc_stats mallopt malloc_usable_size"
).split()


_STAGE = "libraries"  # in the cache
_LIBC = re.compile(r"libc(\.so\.6|-2\.\d+\.so)")
_BESIDE_LIBC = re.compile(r"lib(pthread|dl)(\.so\.\d|-2\.\d+\.so)")
# Files that may replace malloc: the name contains "malloc", or it is the program itself.
# A process chooses how many files with these names it maps, and how large they are. glibc has three, and 4,000 symbols.
_MOST_C_LIBRARIES, _MOST_C_SYMBOLS, _MOST_C_CODE = 8, 1 << 14, 8 << 20
_PART = 1 << 16  # bytes of code to read at once
_MOST_ALLOCATORS = 16  # files that may replace malloc; all code of further files counts as unsafe
_MAY_ALLOCATE = re.compile(r"malloc|^(?!.*\.so)")


def make_worker(pid: int, memory: Memory, code: ProcessCode, functions: dict[str, int]) -> tuple[int, int]:
    """Borrow a thread to create the worker. Return the address of the worker's memory, and the time that threads were stopped, in ns.

    Raises SessionError, ThreadEnded, TraceRefused, OSError.
    """
    borrowing = _Borrowing(pid, memory, code, functions)
    return borrowing.run(), int(borrowing.stopped_s * 1e9)


def make_worker_and_wait(
    thread: TracedThread, memory: Memory, code: ProcessCode, functions: dict[str, int], holds_no_lock: bool
) -> int:
    """Have a stopped thread create the worker, and detach from it at once. Return the address of the worker's memory.

    The thread then waits, about 5 s at most, until `RELEASED` is set in that memory, and continues. `CREATED` in that memory shows
    whether the thread created the worker. Return 0 if the thread cannot be borrowed where it is; then the thread remains stopped.

    holds_no_lock: the thread is known to hold none of the locks.

    Raises SessionError, ThreadEnded, TraceRefused, OSError.
    """
    borrowing = _Borrowing(thread.pid, memory, code, functions, SHORT_BORROW_LIMIT)
    return borrowing.borrow_and_wait(thread, holds_no_lock)


def create_error(pid: int, code: int) -> SessionError:
    """Return the error for a failed pthread_create. `code`: its result, or PENDING."""
    if code == PENDING:
        return SessionError(f"pid {pid} cannot create a thread: another thread holds a lock; try again")
    return SessionError(
        f"pid {pid} cannot create a thread ({os.strerror(code)}); raise its limits, then try again"
    )


class _LibraryCode(Record):
    """Facts about a library, as offsets from its base.

    functions: functions to call.
    unsafe: ranges of code in which a thread may hold a lock.
    calling, returning: the _CALLING and _RETURNING code; -1: not found.
    replaces_malloc: the library exports malloc and free.
    """

    functions: dict[str, int]
    unsafe: tuple[tuple[int, int], ...]
    calling: int
    returning: int
    replaces_malloc: bool

    @classmethod
    def from_json(cls, value: Any) -> _LibraryCode:
        functions, unsafe, calling, returning, replaces_malloc = value
        return cls(
            {str(name): int(at) for name, at in functions.items()},
            tuple((int(start), int(end)) for start, end in unsafe),
            int(calling),
            int(returning),
            bool(replaces_malloc),
        )


_library_code: dict[str, _LibraryCode] = {}  # by the key in the cache


class ProcessCode:
    """The code of a process: functions to call, and whether a thread can be borrowed where it is.

    Facts about a library file are cached for other processes that map the same code of the same file under a name of the same kind.
    """

    def __init__(self, pid: int, memory: Memory, mapped: Sequence[Mapping]) -> None:
        self._pid, self._memory = pid, memory
        self.mapped = mapped
        self.libraries = address_space.libraries(mapped)
        self._c = [x for x in self.libraries if _LIBC.fullmatch(x.name) or _BESIDE_LIBC.fullmatch(x.name)]
        self.libc = tuple(c for library in self._c for c in library.code)
        self._returning: dict[int, bool] = {}

    def _library(self, library: Library) -> _LibraryCode:
        with address_space.library_file(self._pid, library) as (identity, source, base):
            own, libc = library in self._c, _LIBC.fullmatch(library.name) is not None
            key, store = "", cache.default()
            if identity is not None:
                code = [(start - library.base, end - library.base) for start, end in _joined(library.code)]
                key = cache.key(_version(), repr((identity, own, libc, code)))
                kept = _library_code.get(key) or cache.from_json(
                    store.get(_STAGE, key), _LibraryCode.from_json
                )
                if kept is not None:
                    return _library_code.setdefault(key, kept)
            found = elf.exports(source, base, _MOST_C_SYMBOLS) if own else elf.exports(source, base)
            unsafe = _ranges(found, _TAKE_LOCKS)
            if libc:
                unsafe.append(_malloc_of(found))
            known = _LibraryCode(
                {name: found[name].address - base for name in _FUNCTIONS if name in found},
                tuple((start - base, end - base) for start, end in unsafe),
                self._find(_CALLING, source, base, library),
                self._find(_RETURNING, source, base, library),
                "malloc" in found and "free" in found,
            )
            if identity is not None:
                _library_code[key] = known
                if identity.settled:
                    values = (getattr(known, name) for name in known.__match_args__)
                    store.put(_STAGE, key, json.dumps([*values]).encode())
            return known

    @staticmethod
    def _find(instructions: bytes, source: AddressSpace, base: int, library: Library) -> int:
        left = _MOST_C_CODE
        for start, end in library.code:
            at, tail = start, b""
            while at < end and left > 0:  # in parts: the C library has both early
                data = source.some(at - library.base + base, min(end - at, _PART, left))
                if not data:
                    break
                if (found := (tail + data).find(instructions)) >= 0:
                    return at - len(tail) + found - library.base
                at += len(data)
                left -= len(data)
                tail = data[1 - len(instructions) :]
        return -1

    @functools.cached_property
    def unsafe(self) -> list[tuple[int, int]]:
        """Ranges of code in which a thread may hold a lock that pthread_create takes."""
        found: list[tuple[int, int]] = []
        allocators: set[tuple[str, int]] = set()
        for library in self.libraries:
            if library in self._c:
                found += [(library.base + a, library.base + b) for a, b in self._library(library).unsafe]
            elif library.name.startswith("ld-"):
                found += library.code
            elif _MAY_ALLOCATE.search(library.name):
                allocators.add(library.mappings[0].file)
                if len(allocators) > _MOST_ALLOCATORS or self._library(library).replaces_malloc:
                    found += library.code
        return found

    @functools.cached_property
    def _code(self) -> list[tuple[int, int]]:
        return sorted((m.start, m.end) for m in self.mapped if m.code)

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [start for start, _ in self._code]

    def functions(self, pid: int) -> dict[str, int]:
        """Return the addresses of the C library functions that the stub and the worker call. Raises SessionError."""
        files = {library.mappings[0].file for library in self._c}
        if len(files) > _MOST_C_LIBRARIES:
            raise SessionError(f"pid {pid} cannot be traced: it has mapped {len(files)} C libraries; use one")
        found: dict[str, int] = {}
        for library in sorted(self._c, key=lambda x: not _LIBC.fullmatch(x.name)):
            found = {n: library.base + at for n, at in self._library(library).functions.items()} | found
        missing = [name for name in _FUNCTIONS if name not in found]
        if not missing:
            return found
        who = f"pid {pid} ({traceable.status(pid).get('Name', '')})"
        if any("ld-musl" in library.name or "libc.musl" in library.name for library in self.libraries):
            raise SessionError(f"{who} uses musl, but CUDA requires glibc; name another process")
        if not self.libc:
            raise SessionError(
                f"{who} has no shared C library, so it cannot use the CUDA driver; name another process"
            )
        raise SessionError(
            f"{who} has a C library without {missing[0]}; start it with the tool instead: TOOL -- COMMAND"
        )

    def gadgets(self) -> tuple[int, int]:
        """Return the addresses of code that makes a system call and returns (_CALLING), and of _RETURNING. Raises OSError."""
        for library in self._c:
            found = self._library(library)
            if found.calling >= 0 and found.returning >= 0:
                return library.base + found.calling, library.base + found.returning
        raise OSError(errno.ENOEXEC, "no system call in the C library")

    def stack(self, rsp: int) -> bytes | None:
        """Return the mapped part of the stack from `rsp` on; None if it is longer than STACK_LIMIT."""
        end = next((m.end for m in self.mapped if m.start <= rsp < m.end), rsp + STACK_LIMIT)
        if end - rsp > STACK_LIMIT:
            return None
        return self._memory.some(rsp & ~7, end - (rsp & ~7))

    def can_be_borrowed(self, registers: Registers) -> bool:
        """Return whether a stopped thread is known to hold none of the locks, and not to be in a signal handler."""
        words = self.stack(registers.rsp)
        if words is None:
            return False
        addresses = {a for a in set(memoryview(words[: len(words) & ~7]).cast("Q")) if self._is_code(a)}
        if any(self._returns_from_signal(a) for a in addresses):
            return False
        if registers.in_syscall and waits_for_event(registers.orig_rax, registers.rsi):
            return True
        after_syscall = registers.orig_rax < 1 << 32 and registers.orig_rax not in _CALLS_OF_MALLOC
        inside = not registers.in_syscall and not after_syscall and self._within(self.libc, registers.rip)
        return (
            not inside
            and not self._within(self.unsafe, registers.rip)
            and not any(self._within(self.unsafe, a) for a in addresses)
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


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges of addresses, with those that follow each other as one: patches split a library's mappings."""
    found: list[tuple[int, int]] = []
    for start, end in ranges:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return found


@functools.cache
def _version() -> str:
    """Return a key that changes with the code that finds the facts about a library."""
    return cache.key_of_files([Path(__file__), Path(elf.__file__)])


def waits_for_event(number: int, operation: int) -> bool:
    """Return whether a system call waits for an external event, and not for a lock. `operation`: its second argument."""
    return number in _WAITS or (
        number == NUMBERS["futex"] and operation & _FUTEX_COMMAND == _FUTEX_WAIT_BITSET
    )


def _ranges(symbols: dict[str, Symbol], names: Iterable[str]) -> list[tuple[int, int]]:
    return [(s.address, s.address + s.size) for name in names if (s := symbols.get(name)) is not None]


def _malloc_of(symbols: dict[str, Symbol]) -> tuple[int, int]:
    """Return the address range of the C library's allocator. Most of its functions are not exported. So the range extends from the
    last exported function before the allocator to the first exported function after it."""
    own = [symbols[name].address for name in _MALLOC if name in symbols]
    if not own:
        return 0, 0
    others = sorted({s.address for name, s in symbols.items() if name not in _MALLOC})
    before, after = bisect_left(others, min(own)), bisect_right(others, max(own))
    low = others[before - 1] if before else min(own)
    high = others[after] if after < len(others) else max(own) + 4096
    return low, high


class _Borrowing:
    """Borrows one thread of the process."""

    def __init__(
        self,
        pid: int,
        memory: Memory,
        code: ProcessCode,
        functions: dict[str, int],
        limit: float = BORROW_LIMIT,
    ) -> None:
        self.pid, self.memory, self.code, self.functions = pid, memory, code, functions
        self.limit = limit  # seconds for a borrowed thread
        self.deadline = 0.0  # time.monotonic
        self.seccomp = traceable.status(pid).get("Seccomp", "0") != "0"
        self._filters_checked = False
        self._can_stop = False  # a thread has stopped
        self.saved = Registers()
        self.xstate = b""
        self.mask = 0
        self.frame = 0  # address of the signal frame
        self.calling = self.returning = 0  # code addresses: see ProcessCode.gadgets
        self.deferred = (
            0  # SIGSTOP if it arrived meanwhile (it cannot be blocked): the tool sends it again at the end
        )
        self.stopped_s = 0.0  # seconds that threads were stopped

    def run(self) -> int:
        """Return the address of the worker's memory. Raises SessionError, ThreadEnded, TraceRefused, OSError."""
        start = time.monotonic()
        rounds = 0
        while True:
            rounds += 1
            for tid in self._candidates():
                began = time.monotonic()
                try:
                    base = fresh_thread.run(partial(self._try, tid), "gpubpf-attach")
                except ThreadEnded:
                    continue
                except TraceRefused:
                    if ptrace.is_dead(self.pid, tid):
                        continue
                    raise
                finally:
                    self.stopped_s += time.monotonic() - began
                if base:
                    return base
                if time.monotonic() > start + 5 * PATIENCE:
                    break
            import random  # imported here because the import is slow

            time.sleep(random.uniform(0.001, 0.01))
            # A cgroup counts as frozen a moment before its threads wait there, where `check_traceable` sees them.
            traceable.check_not_frozen(self.pid)
            if ptrace.is_dead(self.pid, self.pid):
                raise ThreadEnded
            over = time.monotonic() - start
            if over > PATIENCE and not self._can_stop:
                raise traceable.frozen(self.pid)
            if over > PATIENCE * (1 if rounds >= ENOUGH else 5):
                raise SessionError(
                    f"pid {self.pid} has no thread that can be interrupted safely;"
                    " try again, or start the program with the tool"
                )

    def _candidates(self) -> list[int]:
        """Return the thread IDs. Waiting threads whose call keeps its deadline come first."""
        ranked = []
        for tid in ptrace.threads_of(self.pid):
            call = ptrace.blocked_call(self.pid, tid)
            if call is None:
                rank = 3
            elif waits_for_event(call.number, call.arguments[1]):
                rank = int(call.number in _TIMED_WAITS)
            else:
                rank = 2
            ranked.append((rank, tid))
        return [tid for _, tid in sorted(ranked)]

    def _try(self, tid: int) -> int:
        """Return the address of the worker's memory; 0 if the thread cannot be borrowed now.

        Runs on a fresh thread. When that thread ends, the kernel detaches all threads that it still traces.
        """
        thread = TracedThread(self.pid, tid)
        thread.interrupt()
        if not thread.wait(time.monotonic() + 0.05):
            return 0  # it stays in the kernel too long; it is detached when this thread ends
        self._can_stop = True
        if self.seccomp and not self._filters_checked:
            # The check takes time, so do not keep the thread stopped.
            filters = thread.filters()
            thread.release()
            self._check_filters(filters)
            return 0
        if not self._usable(thread, False):
            thread.release()
            return 0
        with self._saved_state(thread):
            base, failure = self._borrow(thread)
        if failure:
            raise create_error(self.pid, failure)
        return base

    def borrow_and_wait(self, thread: TracedThread, holds_no_lock: bool) -> int:
        """See `make_worker_and_wait`."""
        if thread.registers().in_syscall or not self._usable(thread, holds_no_lock):
            return 0
        if self.seccomp:
            self._check_filters(thread.filters())
        with self._saved_state(thread):
            base, failure = self._map(thread)
            if failure:
                raise create_error(self.pid, failure)
            self._prepare(base, TURNS)
            self._to_stub(thread, base)
            self._detach(thread)
        return base

    def _check_filters(self, filters: list[bytes]) -> None:
        """Raise SessionError if a seccomp filter would kill the process for a system call of the agent."""
        if (call := seccomp.fatal_call(filters)) is not None:
            who = f"pid {self.pid} ({traceable.status(self.pid).get('Name', '')})"
            raise SessionError(
                f"{who} has a seccomp filter that would kill it for a system call of the agent ({call});"
                " start it without that filter"
            )
        self._filters_checked = True

    def _usable(self, thread: TracedThread, holds_no_lock: bool) -> bool:
        """Return whether a stopped thread can be borrowed where it is. Raises SessionError."""
        registers = thread.registers()
        if registers.cs != 0x33:
            thread.release()
            raise SessionError(
                f"pid {self.pid} runs 32-bit code, which CUDA does not support; name another process"
            )
        sleeping = registers.in_syscall and self.memory.some(registers.rip - 2, 2) == b"\x0f\x05"
        if (
            not thread.interrupted
            or (registers.in_syscall and not sleeping)
            or self._in_restartable_sequence(thread, sleeping)
            or not (holds_no_lock or self.code.can_be_borrowed(registers))
        ):
            return False
        self.saved, self.xstate = registers, thread.xstate()
        self.frame = self._free_stack(registers, _VECTOR + len(_vector_frame(self.xstate)))
        return self.frame != 0

    def _free_stack(self, registers: Registers, size: int) -> int:
        """Return the address of `size` free bytes on the thread's stack; 0 if there may be none, as on a coroutine's stack."""
        at = address_space.mapping_at(self.pid, registers.rsp)
        # The C library puts a thread's control block, which fs points to, above its stack.
        if at is None or not (at.path == "[stack]" or at.start <= registers.fs_base < at.end):
            return 0
        frame = registers.rsp - _RED_ZONE - size & -_ALIGNMENT
        return frame if frame >= at.start else 0

    @contextlib.contextmanager
    def _saved_state(self, thread: TracedThread) -> Iterator[None]:
        """Save the thread's state. If the block raises, restore the state and detach."""
        self.deadline = time.monotonic() + self.limit
        self.mask = thread.blocked_signals()
        self.calling, self.returning = self.code.gadgets()
        if self.seccomp:
            thread.suspend_seccomp()
        self.memory.write(self.frame, self._frame())
        try:
            yield
        except BaseException:
            with contextlib.suppress(ThreadEnded, TraceRefused):
                self._restore(thread)
            raise

    def _in_restartable_sequence(self, thread: TracedThread, sleeping: bool) -> bool:
        """Return whether the thread is inside a restartable sequence (rseq(2)). The program would notice if the thread left it."""
        if sleeping or not (area := thread.restartable_sequence()):
            return False
        return self.memory.some(area + 8, 8) != bytes(8)

    def _borrow(self, thread: TracedThread) -> tuple[int, int]:
        """Create the worker, and always restore the thread. Return the address of the worker's memory, and an error.

        The error is 0 if there is a worker, an errno value, or PENDING."""
        base, failure = self._map(thread)
        if not failure:
            self._prepare(base, 0)
            self._to_stub(thread, base)
            failure = self._run_stub(thread, base)
            if failure and failure != PENDING:
                self._call(thread, NUMBERS["munmap"], base, SIZE)
        self._restore(thread)
        return base, failure

    def _map(self, thread: TracedThread) -> tuple[int, int]:
        """Map the worker's memory. Return its address and 0; on failure, 0 and the errno value."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        base = self._call(
            thread, NUMBERS["mmap"], 0, SIZE, mmap.PROT_READ | mmap.PROT_EXEC, flags, _NO_FILE, 0
        )
        return (0, (1 << 64) - base) if base >= -4095 & (1 << 64) - 1 else (base, 0)

    def _prepare(self, base: int, turns: int) -> None:
        f, data = self.functions, bytearray(PAGE)
        struct.pack_into("<QQ", data, 0, f["__errno_location"], f["pthread_create"])
        struct.pack_into("<i", data, CREATED, PENDING)
        struct.pack_into("<QQQ", data, 0x20, f["pthread_self"], f["pthread_detach"], f["usleep"])
        struct.pack_into("<Q", data, FRAME, self.frame + 8)
        struct.pack_into("<IIQQQ", data, TURNS_LEFT, turns, 0, 0, PAUSE_NS, 1 << _SETXID - 1 & ~self.mask)
        self.memory.write(base, STUB)
        self.memory.write(base + DATA, bytes(data))

    def _frame(self) -> bytes:
        """Return a struct rt_sigframe, through which the thread can return to its code by itself, and the vector state."""
        s = self.saved
        rip, rax = s.rip, s.rax
        if s.in_syscall and s.rax in ptrace.RESTARTS:
            rip, rax = s.rip - 2, self._interrupted_call()
        general = struct.pack(
            "<18Q4H4QQ64xQ",
            *(getattr(s, n) for n in "r8 r9 r10 r11 r12 r13 r14 r15 rdi rsi rbp rbx rdx".split()),
            *(rax, s.rcx, s.rsp, rip, s.eflags),
            *(s.cs, s.gs, s.fs, s.ss),
            *(0, 0, 0, 0),
            self.frame + _VECTOR,
            self.mask,
        )
        flags = 7  # UC_FP_XSTATE, UC_SIGCONTEXT_SS, UC_STRICT_RESTORE_SS
        no_mode = 4  # an invalid stack_t.ss_flags, so that the kernel keeps the alternate signal stack
        head = struct.pack("<QQQQI4xQ", self.returning, flags, 0, 0, no_mode, 0) + general
        return head.ljust(_VECTOR, b"\0") + _vector_frame(self.xstate)

    def _interrupted_call(self) -> int:
        """Return the number of the system call to make again.

        rt_sigreturn discards the state that restart_syscall needs, so restart_syscall would return EINTR. The original call is made
        instead, if the instruction before it (mov $NUMBER, %eax) identifies it.
        """
        move = self.memory.some(self.saved.rip - 7, 5)
        if self.saved.orig_rax == NUMBERS["restart_syscall"] and move[:1] == b"\xb8":
            number = int.from_bytes(move[1:], "little")
            if number in _CONTINUED:
                return number
        return self.saved.orig_rax

    def _to_stub(self, thread: TracedThread, base: int) -> None:
        """Set the thread's registers so that it continues at the stub's first instruction."""
        own = self.saved.copy()
        own.rip, own.rbx, own.rsp = base, base + DATA, base + STACK_TOP - 64
        own.rax = own.rbp = 0
        own.orig_rax, own.eflags = ptrace.NO_SYSCALL, 0x202
        fresh = bytearray(self.xstate)
        struct.pack_into(
            "<H", fresh, 0, 0x37F
        )  # mask floating-point exceptions, whatever the program has set
        struct.pack_into("<I", fresh, 24, 0x1F80)
        thread.set_xstate(bytes(fresh))
        thread.set_registers(own)

    def _run_stub(self, thread: TracedThread, base: int) -> int:
        """Let the thread run the stub. Return pthread_create's result, or PENDING if it waits for a lock."""
        until, last = time.monotonic() + CREATE_TIMEOUT, time.monotonic() + 5 * CREATE_TIMEOUT
        asked = False
        thread.to_syscall()
        while True:
            if not thread.wait(until) or time.monotonic() > last:
                if time.monotonic() > last:  # the borrowed thread returns to its code by itself
                    raise SessionError(
                        f"pid {self.pid} did not create a thread within {5 * CREATE_TIMEOUT:.0f} s; try again later"
                    )
                thread.interrupt()
                asked, until = True, last
                continue
            registers = thread.registers()
            if (
                thread.at_syscall
                and registers.orig_rax == NUMBERS["rt_sigreturn"]
                and registers.rip == base + STUB_END
            ):
                created: int = struct.unpack("<i", self.memory.read(base + DATA + CREATED, 4))[0]
                # PENDING: the stub's mprotect failed, so it could not write its result.
                return created if created != PENDING else errno.ENOMEM
            if asked and registers.in_syscall and registers.orig_rax == NUMBERS["futex"]:
                return PENDING
            if thread.signal == _SETXID:
                thread.to_syscall(_SETXID)
            else:
                self._continue(thread)

    def _call(self, thread: TracedThread, number: int, *arguments: int) -> int:
        """Have the stopped thread make a system call. Return its result."""
        registers = self.saved.copy()
        registers.rip, registers.rsp, registers.rax = self.calling, self.frame, number
        registers.orig_rax = ptrace.NO_SYSCALL
        for name, value in zip("rdi rsi rdx r10 r8 r9".split(), arguments, strict=False):
            setattr(registers, name, value & (1 << 64) - 1)
        self._to_entry(thread, registers)
        self._continue(thread)
        while not (self._wait_for_stop(thread) and thread.at_syscall):
            self._continue(thread)
        return thread.registers().rax

    def _to_entry(self, thread: TracedThread, registers: Registers) -> None:
        """Continue with `registers` up to the entry of the system call at their instruction pointer."""
        thread.set_registers(registers)
        thread.block_signals(_ALL_OTHERS)  # not earlier: until then, the frame does not restore the mask
        self._continue(thread)
        while True:
            self._wait_for_stop(thread)
            if thread.at_syscall:
                now = thread.registers()
                if now.rip == registers.rip + 2 and now.orig_rax == registers.rax:
                    return
            self._continue(thread)

    def _continue(self, thread: TracedThread) -> None:
        self._defer_signal(thread)
        thread.to_syscall()

    def _defer_signal(self, thread: TracedThread) -> None:
        """Keep the signal that stopped the thread, to deliver it at the end. Raises SessionError if it is a fault."""
        if number := thread.signal:
            if 1 << number - 1 & _SYNCHRONOUS:
                raise SessionError(
                    f"pid {self.pid} received signal {number} during attach; please report this bug"
                )
            self.deferred = number

    def _wait_for_stop(self, thread: TracedThread) -> bool:
        """Wait until the thread is stopped. Raises ThreadEnded if that takes more than 5 s, and SessionError after the deadline."""
        if time.monotonic() > self.deadline:
            raise SessionError(
                f"pid {self.pid} does not run what the tool needs; signals interrupt it, try again"
            )
        if not thread.wait(time.monotonic() + 5):
            raise ThreadEnded
        return True

    def _restore(self, thread: TracedThread) -> None:
        """Restore the thread's state and detach. The thread continues where it was stopped, and does not notice."""
        self.deadline = max(self.deadline, time.monotonic() + self.limit / 2)
        thread.block_signals(_ALL_OTHERS)
        back = self.saved.copy()
        back.rip, back.rsp, back.orig_rax = self.returning, self.frame + 8, ptrace.NO_SYSCALL
        thread.set_registers(back)  # at the entry of a system call, this also skips the call
        thread.to_user()
        while not (self._wait_for_stop(thread) and thread.interrupted):
            self._defer_signal(thread)
            thread.to_user()
        # At this stop, the kernel checks for signals and restarts system calls, with the registers that are set here.
        thread.set_xstate(self.xstate)
        thread.block_signals(self.mask)
        thread.set_registers(
            self.saved
        )  # must be last: until here, the thread could return to its code by itself
        self._detach(thread)

    def _detach(self, thread: TracedThread) -> None:
        """Detach from the thread. No signal caused this stop, so ptrace cannot deliver the deferred signal: send it instead."""
        if self.deferred:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, self.deferred)
        thread.detach()


def _vector_frame(xstate: bytes) -> bytes:
    """Return the part of a signal frame that restores a thread's vector state."""
    (machine,), (used,) = struct.unpack_from("<Q", xstate, _SOFTWARE), struct.unpack_from("<Q", xstate, 512)
    if machine & _AMX and not used & _AMX:
        # rt_sigreturn ignores a state that is larger than the thread may have, and most threads may not use AMX.
        xstate = xstate[:_WITHOUT_AMX]
    # struct _fpx_sw_bytes tells rt_sigreturn that the vector state is complete.
    software = struct.pack("<IIQI", 0x46505853, len(xstate) + 4, machine, len(xstate))
    state = bytearray(xstate + struct.pack("<I", 0x46505845))
    state[_SOFTWARE : _SOFTWARE + len(software)] = software
    return bytes(state)

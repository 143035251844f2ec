"""A thread of a running process makes another one, without noticing: see attach.py for why, and how it is chosen.

What it is made with, one piece of machine code (`STUB`), serves the new thread too: it does the calls that it finds in memory.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
import random
import re
import struct
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from gpubpf import elf
from gpubpf.elf import AddressSpace, Symbol
from gpubpf.errors import SessionError
from gpubpf.process import fresh_thread, ptrace, seccomp, target
from gpubpf.process.ptrace import Gone, Refused, Registers, Thread
from gpubpf.process.target import Library, Mapping, Memory

PATIENCE = 3.0  # seconds for finding a thread that may be borrowed
BORROWED = 1.0  # seconds for pthread_create, which takes less than a millisecond
STACK_LIMIT = 256 << 10  # bytes of a stack that are looked through

# read, poll, select, pause, nanosleep, accept, recvfrom, recvmsg, wait4, rt_sigtimedwait, rt_sigsuspend, restart_syscall,
# clock_nanosleep, epoll_wait, waitid, pselect6, ppoll, epoll_pwait, accept4, recvmmsg, epoll_pwait2
_WAITS = frozenset((0, 7, 23, 34, 35, 43, 45, 47, 61, 128, 130, 219, 230, 232, 247, 270, 271, 281, 288, 299, 441))  # fmt: skip
_FUTEX, _FUTEX_WAIT_BITSET, _FUTEX_COMMAND = 202, 9, 0x7F
# mmap, mprotect, munmap, brk, mremap, madvise, futex, clone, fork, exit, clone3: what malloc and the making of threads are made of
_NOT_BEHIND = frozenset((9, 10, 11, 12, 25, 28, 202, 56, 57, 60, 435))
# Borrowed last: what begins its time anew, or knows its end only in the kernel.
_FORGETFUL = frozenset((232, 281, 441, 219, 35, 230))

_MMAP, _MUNMAP, _GETPID, _SIGRETURN = 9, 11, 39, 15
_NO_FILE = (1 << 64) - 1
# ILL, TRAP, BUS, FPE, SEGV, SYS: blocked, they would kill.
_SYNCHRONOUS = sum(1 << n - 1 for n in (4, 5, 7, 8, 11, 31))
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
  test eax, eax
  jnz back
  mov r13d, [rbx+0x88]               # parked for so many turns
parked:
  test r13d, r13d
  jz back
  cmp dword ptr [rbx+0x8c], 0        # or until it may go
  jne back
  xor edi, edi
  xor esi, esi
  lea rdx, [rbx+0x90]
  xor r10d, r10d
  mov eax, 230                       # clock_nanosleep
  syscall
  add dword ptr [rbx+0x98], 50000    # the longer, the seldomer
  dec r13d
  jmp parked
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
  mov r12d, 0x2780                   # some 20 s without a command: the tool is gone
idle:
  mov eax, [rbx+0x38]
  cmp eax, [rbx+0x3c]
  jne do
  mov edi, 100
  cmp r12d, 0x2710                   # it may come soon
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
last:                                # munmap of all this: nothing here runs after it
  mov rax, r13
  pop r13
  pop r12
  pop rbx
  jmp rax
"""
STUB = bytes.fromhex(
    "4889dfbe00900100ba03000000b80a0000000f0585c0756f488db31810000031ffb8830000000f05ff134989c4448b28488d7b1031f6488d"
    "155a0000004889d9ff530889431845892c2485c07539448bab880000004585ed742d83bb8c00000000752431ff31f6488d93900000004531"
    "d2b8e60000000f0581839800000050c3000041ffcdebce488da308100000b80f0000000f050f0b53415441554889fbff53204889c7ff5328"
    "41bc802700008b43383b433c7523bf640000004181fc102700007705bfd0070000ff533041ffcc75dd31c0415d415c5bc3488b7b48488b73"
    "50488b5358488b4b604c8b6b4031c083bb8400000000751641ffd548894378ff138b00898380000000ff433ceb9a4c89e8415d415c5bffe0"
)
STUB_END = 0x95  # behind its rt_sigreturn

# The memory that is mapped for it: code, data, the signal frame with the vector state, texts, a stack.
PAGE = 4096
DATA, FRAME, XSTATE, TEXTS, STACK_TOP = PAGE, 2 * PAGE, 3 * PAGE, 8 * PAGE, 26 * PAGE
SIZE = STACK_TOP
CREATED, COMMAND, DONE, FUNCTION, RESULT, ERRNO, LAST = 0x18, 0x38, 0x3C, 0x40, 0x78, 0x80, 0x84
PARKED, GO, PAUSE = 0x88, 0x8C, 0x90
PAUSE_NS, TURNS = 200_000, 440  # how soon a parked thread looks, at first, and how often: for some 5 s in all
PENDING = 0x7FFFFFFF  # in CREATED: not said yet

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


_LIBC = re.compile(r"libc(\.so\.6|-2\.\d+\.so)")
_BESIDE_LIBC = re.compile(r"lib(pthread|dl)(\.so\.\d|-2\.\d+\.so)")
_MAY_ALLOCATE = re.compile(r"malloc|^(?!.*\.so)")  # its name says so, or it is the program itself


def make_worker(pid: int, memory: Memory, code: Code, functions: dict[str, int]) -> tuple[int, int]:
    """Address of the memory that the new thread works in, and for how long threads stood for that, in ns. Raises SessionError, Gone,
    Refused, OSError."""
    borrowing = _Borrowing(pid, memory, code, functions)
    return borrowing.run(), int(borrowing.stood * 1e9)


def park(thread: Thread, memory: Memory, code: Code, functions: dict[str, int], anywhere: bool) -> int:
    """The same by a thread that stands, and is let go at once: it makes the other one, waits until `GO` is set in the memory, some
    5 s at most, and goes on. `CREATED` says there whether it made it. 0: it cannot be borrowed where it is, and still stands.
    `anywhere`: it is known to hold none of the locks. Raises SessionError, Gone, Refused, OSError."""
    return _Borrowing(thread.pid, memory, code, functions).park(thread, anywhere)


def refused(pid: int, code: int) -> SessionError:
    """`code`: what pthread_create returned, or PENDING."""
    if code == PENDING:
        return SessionError(f"pid {pid} does not let a thread be made: another one holds a lock; try again")
    return SessionError(
        f"pid {pid} can make no thread ({os.strerror(code)}); raise its limits, then try again"
    )


@dataclass(frozen=True)
class _Known:
    """Of a library, as distances from its beginning: functions that are called, code that must not be interrupted, all of an
    instruction `syscall` (-1: none was found), whether it replaces malloc."""

    functions: dict[str, int]
    careful: tuple[tuple[int, int], ...]
    a_syscall: int
    allocates: bool


_known: dict[target.Identity, _Known] = {}


class Code:
    """Which code of the process is whose. What is known of a library's file is kept for other processes."""

    def __init__(self, pid: int, memory: Memory, mapped: Sequence[Mapping]) -> None:
        self._pid, self._memory = pid, memory
        self.mapped = mapped
        self.libraries = target.libraries(mapped)
        self._c = [x for x in self.libraries if _LIBC.fullmatch(x.name) or _BESIDE_LIBC.fullmatch(x.name)]
        self.libc = tuple(c for library in self._c for c in library.code)
        self._returning: dict[int, bool] = {}

    def _know(self, library: Library) -> _Known:
        with target.library_file(self._pid, library) as (identity, source, base):
            if identity is not None and identity in _known:
                return _known[identity]
            found = elf.exports(source, base)
            careful = _places(found, _TAKE_LOCKS)
            if _LIBC.fullmatch(library.name):
                careful.append(_malloc_of(found))
            known = _Known(
                {name: found[name].address - base for name in _FUNCTIONS if name in found},
                tuple((start - base, end - base) for start, end in careful),
                self._a_syscall(source, base, library),
                "malloc" in found and "free" in found,
            )
            if identity is not None:
                _known[identity] = known
            return known

    @staticmethod
    def _a_syscall(source: AddressSpace, base: int, library: Library) -> int:
        for start, end in library.code:
            data = source.some(start - library.base + base, min(end - start, 4 << 20))
            if (at := data.find(b"\x0f\x05")) >= 0:
                return start - library.base + at
        return -1

    @functools.cached_property
    def _careful(self) -> list[tuple[int, int]]:
        """What must not be interrupted."""
        found: list[tuple[int, int]] = []
        for library in self.libraries:
            if library in self._c:
                found += [(library.base + a, library.base + b) for a, b in self._know(library).careful]
            elif library.name.startswith("ld-") or (
                _MAY_ALLOCATE.search(library.name) and self._know(library).allocates
            ):
                found += library.code
        return found

    @functools.cached_property
    def _code(self) -> list[tuple[int, int]]:
        return sorted((m.start, m.end) for m in self.mapped if m.code)

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [start for start, _ in self._code]

    def functions(self, pid: int) -> dict[str, int]:
        """Addresses of those that are called. Raises SessionError."""
        found: dict[str, int] = {}
        for library in sorted(self._c, key=lambda x: not _LIBC.fullmatch(x.name)):
            found = {n: library.base + at for n, at in self._know(library).functions.items()} | found
        missing = [name for name in _FUNCTIONS if name not in found]
        if not missing:
            return found
        who = f"pid {pid} ({target.status(pid).get('Name', '')})"
        if any("ld-musl" in library.name or "libc.musl" in library.name for library in self.libraries):
            raise SessionError(f"{who} uses musl, not glibc, as CUDA does not; name another process")
        if not self.libc:
            raise SessionError(
                f"{who} has no shared C library, so it uses no CUDA driver; name another process"
            )
        raise SessionError(
            f"{who} has a C library without {missing[0]}; start it with the tool instead: TOOL -- COMMAND"
        )

    def a_syscall(self) -> int:
        """Address of an instruction `syscall`."""
        for library in self._c:
            if (at := self._know(library).a_syscall) >= 0:
                return library.base + at
        raise OSError(errno.ENOEXEC, "no system call in the C library")

    def stack(self, rsp: int) -> bytes | None:
        """What lies on the stack, as far as it is mapped; None: too much to look through."""
        end = next((m.end for m in self.mapped if m.start <= rsp < m.end), rsp + STACK_LIMIT)
        if end - rsp > STACK_LIMIT:
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


class _Borrowing:
    """One thread of the process makes another one."""

    def __init__(self, pid: int, memory: Memory, code: Code, functions: dict[str, int]) -> None:
        self.pid, self.memory, self.code, self.functions = pid, memory, code, functions
        self.seccomp = target.status(pid).get("Seccomp", "0") != "0"
        self._judged = False  # its filters
        self.saved = Registers()
        self.xstate = b""
        self.mask = 0
        self.instruction = 0  # address of a `syscall`
        self.held = 0  # a signal that came meanwhile and cannot be blocked
        self.stood = 0.0  # seconds for which threads did not go on

    def run(self) -> int:
        """Address of the memory that the new thread works in. Raises SessionError, Gone, Refused, OSError."""
        until = time.monotonic() + PATIENCE
        while True:
            for tid in self._candidates():
                began = time.monotonic()
                try:
                    base = fresh_thread.on_own(partial(self._try, tid), "gpubpf-attach")
                except Gone:
                    continue
                except Refused:
                    if ptrace.is_dead(self.pid, tid):
                        continue
                    raise
                finally:
                    self.stood += time.monotonic() - began
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
        """0: it cannot be borrowed now. On a thread of its own, with which all ends that is still traced then."""
        thread = Thread(self.pid, tid)
        thread.interrupt()
        if not thread.wait(time.monotonic() + 0.05):
            return 0  # in the kernel for long; let go when this thread ends
        if self.seccomp and not self._judged:  # not while it stands
            filters = thread.filters()
            thread.release()
            self._judge(filters)
            return 0
        if not self._usable(thread, False):
            thread.release()
            return 0
        with self._taken(thread):
            base, failure = self._borrow(thread)
        if failure:
            raise refused(self.pid, failure)
        return base

    def park(self, thread: Thread, anywhere: bool) -> int:
        """See the function of that name."""
        if thread.registers().in_syscall or not self._usable(thread, anywhere):
            return 0
        if self.seccomp:
            self._judge(thread.filters())
        with self._taken(thread):
            base, failure = self._map(thread)
            if failure:
                raise refused(self.pid, failure)
            self._prepare(base, TURNS)
            self._to_stub(thread, base)
            thread.detach(self.held)
        return base

    def _judge(self, filters: list[bytes]) -> None:
        """Raises SessionError for a process that the agent would be the end of."""
        if (call := seccomp.fatal(filters)) is not None:
            who = f"pid {self.pid} ({target.status(self.pid).get('Name', '')})"
            raise SessionError(
                f"{who} has a seccomp filter that ends it for a system call of the agent ({call}); start it without that"
            )
        self._judged = True

    def _usable(self, thread: Thread, anywhere: bool) -> bool:
        """Whether a thread that stands can be borrowed where it is. Raises SessionError."""
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
            or not (anywhere or self.code.may_be_borrowed(registers))
        ):
            return False
        self.instruction = registers.rip - 2 if sleeping else self.code.a_syscall()
        return True

    @contextlib.contextmanager
    def _taken(self, thread: Thread) -> Iterator[None]:
        """It is where it was, should anything be raised."""
        self.saved, self.xstate = thread.registers(), thread.xstate()
        self.mask = thread.blocked_signals()
        if self.seccomp:
            thread.without_seccomp()
        thread.block_signals(_ALL_OTHERS)
        try:
            yield
        except BaseException:
            with contextlib.suppress(Gone, Refused):
                self._give_back(thread)
            raise

    def _in_sequence(self, thread: Thread, sleeping: bool) -> bool:
        """In a restartable sequence, which it must not leave unnoticed."""
        if sleeping or not (area := thread.restartable_sequence()):
            return False
        return self.memory.some(area + 8, 8) != bytes(8)

    def _borrow(self, thread: Thread) -> tuple[int, int]:
        """The memory, and why no thread was made. The thread is back where it was, whatever happens."""
        base, failure = self._map(thread)
        if not failure:
            self._prepare(base, 0)
            self._to_stub(thread, base)
            failure = self._run_stub(thread, base)
            if failure and failure != PENDING:
                self._call(thread, _MUNMAP, base, SIZE)
        self._give_back(thread)
        return base, failure

    def _map(self, thread: Thread) -> tuple[int, int]:
        """Address of the memory, and why there is none."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        base = self._call(thread, _MMAP, 0, SIZE, mmap.PROT_READ | mmap.PROT_EXEC, flags, _NO_FILE, 0)
        return (0, (1 << 64) - base) if base >= -4095 & (1 << 64) - 1 else (base, 0)

    def _prepare(self, base: int, turns: int) -> None:
        f, data = self.functions, bytearray(PAGE)
        struct.pack_into("<QQ", data, 0, f["__errno_location"], f["pthread_create"])
        struct.pack_into("<i", data, CREATED, PENDING)
        struct.pack_into("<QQQ", data, 0x20, f["pthread_self"], f["pthread_detach"], f["usleep"])
        struct.pack_into("<IIQQ", data, PARKED, turns, 0, 0, PAUSE_NS)
        self.memory.write(base, STUB)
        self.memory.write(base + DATA, bytes(data))
        self.memory.write(base + FRAME, self._frame(base))
        # struct _fpx_sw_bytes says to sigreturn that the whole state is there.
        size = len(self.xstate)
        software = struct.pack(
            "<IIQI", 0x46505853, size + 4, *struct.unpack_from("<Q", self.xstate, 464), size
        )
        state = bytearray(self.xstate + struct.pack("<I", 0x46505845))
        state[464 : 464 + len(software)] = software
        if size + 4 <= TEXTS - XSTATE:
            self.memory.write(base + XSTATE, bytes(state))

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
            base + XSTATE if len(self.xstate) + 4 <= TEXTS - XSTATE else 0,
            self.mask,
        )
        return (
            struct.pack("<QQQQI4xQ", 0, 7, 0, 0, 2, 0) + general
        )  # flags: XSTATE, SIGCONTEXT_SS, STRICT_RESTORE_SS

    def _to_stub(self, thread: Thread, base: int) -> None:
        """In front of its first instruction."""
        own = self.saved.copy()
        own.rip, own.rbx, own.rsp = base, base + DATA, base + STACK_TOP - 64
        own.rax = own.rbp = 0
        own.orig_rax, own.eflags = ptrace.NO_SYSCALL, 0x202
        fresh = bytearray(self.xstate)
        struct.pack_into("<H", fresh, 0, 0x37F)  # no floating-point exceptions, whatever the program has set
        struct.pack_into("<I", fresh, 24, 0x1F80)
        thread.set_xstate(bytes(fresh))
        thread.set_registers(own)

    def _run_stub(self, thread: Thread, base: int) -> int:
        """What pthread_create returned."""
        until, last = time.monotonic() + BORROWED, time.monotonic() + 5 * BORROWED
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
            if thread.at_syscall and registers.orig_rax == _SIGRETURN and registers.rip == base + STUB_END:
                created: int = struct.unpack("<i", self.memory.read(base + DATA + CREATED, 4))[0]
                return created if created != PENDING else errno.ENOMEM  # it could not even write there
            if asked and not thread.at_syscall and registers.in_syscall and registers.orig_rax == _FUTEX:
                return PENDING
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

"""Find out whether a process's seccomp filters would kill it for a system call of the agent.

Most filters fail the call with an error, which the agent handles or reports. Some kill the process, such as systemd's
SystemCallFilter= and many sandboxes. Such a process must not get an agent. A tracer that has CAP_SYS_ADMIN and no filter itself can
read the filters of a stopped thread (PTRACE_SECCOMP_GET_FILTER). This module runs them on the agent's system calls.
Classic BPF: include/uapi/linux/filter.h; struct seccomp_data: linux/seccomp.h.
"""

from __future__ import annotations

import mmap
import socket
import struct
from collections.abc import Iterable
from functools import lru_cache

from gpubpf import processor
from gpubpf.kernel import syscalls

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_X86_64, AUDIT_ARCH_AARCH64
_ARCHITECTURE = _ARCHITECTURES.get(processor.NAME, 0)  # 0: this machine has no agent
_ACTION = 0xFFFF0000
# SECCOMP_RET_KILL_PROCESS, _KILL_THREAD, and _TRAP: few programs handle SIGSYS.
_FATAL = frozenset({0x80000000, 0x00000000, 0x00030000})
_MASK = (1 << 32) - 1
_WRITABLE, _CODE = mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ | mmap.PROT_EXEC
_CLOEXEC_DUP, _ADD_SEALS, _SET_NAME = 1030, 1033, 15

# (name, first arguments) of the system calls made by pthread_create, by dlopen, and by agent/src itself.
_CALLS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("mmap", (0, 4096, _WRITABLE)),
    ("mmap", (0, 4096, _CODE)),
    ("mprotect", (0, 4096, _WRITABLE)),
    ("mprotect", (0, 4096, _CODE)),
    ("mprotect", (0, 4096, _WRITABLE | _CODE)),
    ("clone3", ()),
    ("fcntl", (200, _CLOEXEC_DUP, 200)),
    ("fcntl", (200, _ADD_SEALS, 7)),
    ("prctl", (_SET_NAME,)),
    ("openat", ((1 << 64) - 100, 0, 0o2000000)),
    ("socketpair", (socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, 0)),
    ("poll" if "poll" in syscalls.NUMBERS else "ppoll", ()),  # what poll(3) calls
    *(
        (name, ())
        for name in (
            "munmap madvise set_robust_list rseq rt_sigprocmask rt_sigaction rt_sigreturn sigaltstack futex exit read pread64 write"
            " pwrite64 close fstat newfstatat ftruncate memfd_create eventfd2 sendmsg recvmsg sendto sendfile shutdown membarrier"
            " getpid gettid tgkill getcpu sched_yield sched_setscheduler clock_nanosleep"
        ).split()
    ),
)


class MalformedFilter(Exception):
    """The kernel would not accept this filter, or this module does not support it."""


def fatal_call(filters: Iterable[bytes]) -> str | None:
    """Return the name of a system call of the agent for which a filter kills the process; None if no such call is known."""
    for code in filters:
        if (name := _fatal_call(code)) is not None:
            return name
    return None


@lru_cache(maxsize=64)
def _fatal_call(code: bytes) -> str | None:
    try:
        for name, arguments in _CALLS:
            if run_filter(code, syscalls.NUMBERS[name], arguments) & _ACTION in _FATAL:
                return name
    except MalformedFilter:
        pass
    return None


def run_filter(code: bytes, number: int, arguments: tuple[int, ...] = ()) -> int:
    """Return the result of a filter (an array of struct sock_filter) for a system call. Raises MalformedFilter."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.unpack("<16I", struct.pack("<IIQ6Q", number, _ARCHITECTURE, 0, *padded))
    instructions = list(struct.iter_unpack("<HBBI", code))
    memory = [0] * 16
    a = x = at = 0
    while at < len(instructions):
        operation, yes, no, k = instructions[at]
        at += 1
        kind, source = operation & 0x07, x if operation & 0x08 else k
        if operation == 0x20 and k % 4 == 0 and k < 64:  # LD W ABS
            a = data[k // 4]
        elif operation in (0x00, 0x80):  # LD IMM, LEN
            a = 64 if operation else k
        elif operation in (0x01, 0x81):  # LDX IMM, LEN
            x = 64 if operation == 0x81 else k
        elif operation in (0x60, 0x61, 0x02, 0x03) and k < 16:  # LD MEM, LDX MEM, ST, STX
            if operation == 0x60:
                a = memory[k]
            elif operation == 0x61:
                x = memory[k]
            else:
                memory[k] = a if operation == 0x02 else x
        elif kind == 0x04:
            a = _calculate(operation & 0xF0, a, source)
        elif kind == 0x05:
            at += k if operation == 0x05 else yes if _compare(operation & 0xF0, a, source) else no
        elif kind == 0x06:
            return a if operation & 0x18 == 0x10 else k
        elif operation in (0x07, 0x87):  # TAX, TXA
            a, x = (a, a) if operation == 0x07 else (x, x)
        else:
            raise MalformedFilter
    raise MalformedFilter


def _calculate(operation: int, a: int, b: int) -> int:
    if operation == 0x80:
        return -a & _MASK
    if operation == 0x30:
        return a // b if b else 0
    if operation in (0x60, 0x70):
        return (a << (b & 31)) & _MASK if operation == 0x60 else a >> (b & 31)
    results = {0x00: a + b, 0x10: a - b, 0x20: a * b, 0x40: a | b, 0x50: a & b, 0xA0: a ^ b}
    if operation not in results:
        raise MalformedFilter
    return results[operation] & _MASK


def _compare(operation: int, a: int, b: int) -> bool:
    results = {0x10: a == b, 0x20: a > b, 0x30: a >= b, 0x40: a & b != 0}
    if operation not in results:
        raise MalformedFilter
    return results[operation]

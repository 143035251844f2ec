"""Try system calls that the tools make, with arguments that the kernel refuses. This is a separate program, for a child process.

    python3 -I -S syscall_question.py NAME=NUMBER…

It prints each name before the call, and "refused" after the name if a seccomp filter refused the call. The kernel itself answers such
arguments with another error than a filter. A filter may also kill the process.

NAME: a call of `CALLS`.
NUMBER: its number on this machine.
"""

from __future__ import annotations

import ctypes
import errno
import sys

_NOBODY = 0x7FFFFFFF  # no process has this ID
CALLS: dict[str, tuple[int, ...]] = {
    "bpf": (-1, 0, 0),
    "perf_event_open": (0, -1, -1, -1, 0xFFFF),
    "ptrace": (0x4206, _NOBODY, 0, 0),
    "process_vm_readv": (_NOBODY, 0, 0, 0, 0, 1),
    "pidfd_open": (-1, 0),
    "pidfd_getfd": (-1, 0, 1),
    "memfd_create": (0, 0xFFFF),
    "openat2": (-1, 0, 0, 0),
    "membarrier": (-1, 0, 0),
}
_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)


def main(words: list[str]) -> None:
    """Try these calls, each NAME=NUMBER."""
    library = ctypes.CDLL(None, use_errno=True)
    for name, _, number in (word.partition("=") for word in words):
        print(name, end="", flush=True)
        ctypes.set_errno(0)
        library.syscall(*(ctypes.c_long(value) for value in (int(number), *CALLS[name])))
        # Without CAP_BPF, the kernel itself refuses bpf(2), which the check of eBPF reports.
        print(" refused" if ctypes.get_errno() in _REFUSED and name != "bpf" else " allowed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Try system calls that the tools make, with arguments that the kernel refuses. This is a separate program, for a child process.

    python3 -I -S syscall_question.py lib/gpubpf/kernel/syscalls.py [NAME…]

It prints each name before the call, and "refused" after the name if a seccomp filter refused the call. The kernel itself answers such
arguments with another error than a filter. A filter may also kill the process. NAME: a call to leave out.
"""

from __future__ import annotations

import ctypes
import errno
import runpy
import sys

_NOBODY = 0x7FFFFFFF  # no process has this ID
_CALLS: dict[str, tuple[int, ...]] = {
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


def main(table: str, left_out: list[str]) -> None:
    """Try each call that is not left out."""
    numbers = runpy.run_path(table)["NUMBERS"]
    library = ctypes.CDLL(None, use_errno=True)
    for name in (name for name in _CALLS if name not in left_out):
        print(name, end="", flush=True)
        ctypes.set_errno(0)
        library.syscall(*(ctypes.c_long(value) for value in (numbers[name], *_CALLS[name])))
        # Without CAP_BPF, the kernel itself refuses bpf(2), which the check of eBPF reports.
        print(" refused" if ctypes.get_errno() in _REFUSED and name != "bpf" else " allowed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

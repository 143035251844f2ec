"""The C library of this process, and system calls that have no Python function.

Only this module binds the C library with ctypes.
"""

from __future__ import annotations

import ctypes
import os

from gpubpf.kernel import syscalls

_ARENA_MAX = -8  # M_ARENA_MAX, malloc.h
BPF_ATTRIBUTES = 144  # size of the union bpf_attr that `bpf` passes; the kernel requires unused bytes to be 0

library = ctypes.CDLL(None, use_errno=True)
library.syscall.restype = ctypes.c_long
library_with_gil = ctypes.PyDLL(None, use_errno=True)  # calls hold Python's global interpreter lock


def last_error(path: str | None = None) -> OSError:
    """Return the error of the last call of `library` or `library_with_gil` on this thread."""
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code)) if path is None else OSError(code, os.strerror(code), path)


def system_call(name: str, *arguments: int) -> int:
    """Make a system call, named as in `syscalls`, and return its result. Pass addresses as integers. Raises OSError."""
    result = int(library.syscall(*(ctypes.c_long(a) for a in (syscalls.number(name), *arguments))))
    if result < 0:
        raise last_error()
    return result


def bpf(command: int, attributes: bytes | ctypes.Array[ctypes.c_char]) -> tuple[int, bytes]:
    """Call bpf(2). Return its result, and the attributes as modified by the kernel.

    `attributes`: the beginning of a union bpf_attr. Pass a buffer of BPF_ATTRIBUTES bytes to read the kernel's changes after an error.
    Raises OSError.
    """
    if isinstance(attributes, bytes):
        attributes = bpf_attributes(attributes)
    result = system_call("bpf", command, ctypes.addressof(attributes), len(attributes))
    return result, attributes.raw


def bpf_attributes(attributes: bytes) -> ctypes.Array[ctypes.c_char]:
    """Return a buffer for `bpf` that begins with `attributes`."""
    return ctypes.create_string_buffer(attributes.ljust(BPF_ATTRIBUTES, b"\0"), BPF_ATTRIBUTES)


def limit_malloc_arenas() -> None:
    """Let all threads of this process share two malloc arenas.

    By default, the C library gives each thread its own arena, and each keeps several MB. A tool runs only one of its threads at a
    time, except inside NumPy and the kernel, so two arenas are enough. Call this only in the tool's own process.
    """
    library.mallopt(_ARENA_MAX, 2)

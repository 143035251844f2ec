"""Read the files of /proc/PID, with limits.

    proc.comm(pid)
    proc.status(pid)["Uid"]
    for line in proc.lines(pid, "maps"): …

A process chooses the content of these files, and the size of some, without privileges: its name (prctl), its command line and its
environment (PR_SET_MM), the paths that it maps, its mounts. So every read is bounded in bytes, lists also in the length of a line and
in CPU time, and no text is assumed to be UTF-8. Other packages name no path below /proc/PID.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
import re
import select
import struct
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from gpubpf.kernel import libc
from gpubpf.process import limits

_PIECE = 1 << 16  # bytes
_USER = re.compile(rb"^Uid:\t(\d+)", re.MULTILINE)  # in a status file

# PROCMAP_QUERY, include/uapi/linux/fs.h
_QUERY = struct.Struct("=QQQQQQQQQIIIIQQ")
_PROCMAP_QUERY = 3 << 30 | _QUERY.size << 16 | ord("f") << 8 | 17
_FLAGS = ((1, "r"), (2, "w"), (4, "x"))
_SHARED = 8
_NOT_MAPPED = 0x7FFF_FFFF_F000  # the last page of user space, which the kernel keeps empty

_NS_GET_PARENT, _NS_GET_OWNER_UID = 0xB702, 0xB704  # ioctl_ns(2)
_AT_FDCWD, _DONT_SYNC, _STATX_INO = -100, 0x4000, 0x100  # statx(2)


class TooLarge(OSError):
    """A list of a process exceeds the limits."""

    def __init__(self, name: str) -> None:
        what = {"maps": "mappings", "mountinfo": "mounts"}.get(name, name)
        super().__init__(errno.E2BIG, f"its list of {what} is too large")


def read(pid: int, name: str, most: int = limits.SMALL_FILE) -> bytes:
    """Return up to `most` bytes of a file of a process. `name`: such as "stat" or "task/12/status". Raises OSError."""
    found = bytearray()
    with _opened(pid, name) as file:
        while len(found) < most and (data := os.read(file, min(_PIECE, most - len(found)))):
            found += data
    return bytes(found)


def text(pid: int, name: str) -> str:
    """Return a file of a process as text. Raises OSError."""
    return read(pid, name).decode("utf-8", "replace")


def exists(pid: int) -> bool:
    """Return whether a process exists. A zombie does."""
    return os.path.exists(f"/proc/{pid}")


def has_ended(pidfd: int, seconds: float = 0.0) -> bool:
    """Return whether a process has ended, or ends within some seconds.

    waitpid(2) does not say this if any thread of the calling process traces it: a stop of the traced process is reported, too."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def link(pid: int, name: str) -> str:
    """Return the target of a symbolic link of a process. `name`: such as "exe" or "ns/user". Raises OSError."""
    return os.readlink(f"/proc/{pid}/{name}")


def program(pid: int) -> tuple[int, int, int]:
    """Return the file of the program that a process runs: its device's major and minor number, and its inode. Raises OSError.

    Unlike os.stat, this does not ask the file system, which may never answer (FUSE).
    """
    path = ctypes.create_string_buffer(b"/proc/%d/exe" % pid)
    found = ctypes.create_string_buffer(256)
    libc.system_call(
        "statx", _AT_FDCWD, ctypes.addressof(path), _DONT_SYNC, _STATX_INO, ctypes.addressof(found)
    )
    major, minor = struct.unpack_from("=II", found, 136)
    return major, minor, int.from_bytes(found.raw[32:40], "little")


def owner_of_namespace(pid: int) -> int:
    """Return the ID of the user who has made the outermost user namespace that a process is in, but this process is not.

    Return 0 if there is no such namespace, if root has made it, or if this thread may not look at it. Raises OSError if the process
    has ended."""
    own = os.stat("/proc/self/ns/user").st_ino
    with contextlib.suppress(PermissionError):
        if os.stat(f"/proc/{pid}/ns/user").st_ino != own:
            with contextlib.ExitStack() as stack:
                at = stack.enter_context(_opened(pid, "ns/user"))
                while True:
                    above = fcntl.ioctl(at, _NS_GET_PARENT)
                    stack.callback(os.close, above)
                    if os.fstat(above).st_ino == own:
                        break
                    at = above
                uid = bytearray(4)
                fcntl.ioctl(at, _NS_GET_OWNER_UID, uid)
                return int.from_bytes(uid, sys.byteorder)
    return 0


def check(pid: int) -> None:
    """Raise FileNotFoundError if a process has ended, and PermissionError if this thread may not look at it."""
    os.stat(f"/proc/{pid}/ns/mnt")


def open_files(pid: int, most: int) -> Iterator[str]:
    """Yield the link targets of a process's open files, for `most` files. Raises OSError."""
    with os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in itertools.islice(entries, most):
            with contextlib.suppress(OSError):
                yield os.readlink(entry.path)


def threads(pid: int) -> list[int]:
    """Return the IDs of a process's threads. Raises OSError."""
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


def comm(pid: int) -> str:
    """Return the name of a process. Raises OSError."""
    return text(pid, "comm").removesuffix("\n")


def stat(pid: int, tid: int | None = None) -> list[bytes]:
    """Return the fields of a process's or a thread's stat file after its name: the first is its state. Raises OSError."""
    return read(pid, "stat" if tid is None else f"task/{tid}/stat").rpartition(b")")[2].split()


def status(pid: int, tid: int | None = None) -> dict[str, str]:
    """Return the fields of a process's or a thread's status file. The kernel escapes the name in it. Raises OSError."""
    found = text(pid, "status" if tid is None else f"task/{tid}/status")
    return {name: rest.strip() for name, _, rest in (line.partition(":") for line in found.split("\n"))}


def user(pid: int) -> int:
    """Return the real user ID of a process. Raises OSError, and LookupError if the process ends meanwhile."""
    if (found := _USER.search(read(pid, "status"))) is None:
        raise LookupError
    return int(found[1])


def is_64_bit(pid: int) -> bool:
    """Return whether a process runs a 64-bit program. Raises OSError, also for a kernel thread.

    The auxiliary vector shows this: its first 64-bit word is a small number, unless it consists of two 32-bit words. The file of the
    program is not read, because its file system may never answer.
    """
    return int.from_bytes(read(pid, "auxv", 8), "little") < 1 << 32


def lines(pid: int, name: str, most: int = limits.LARGEST_LIST) -> Iterator[bytes]:
    """Yield the lines of a list of a process, such as "maps". `most`: the limit in bytes.

    Raises OSError, and TooLarge if a limit is exceeded."""
    began = time.thread_time()
    rest = b""
    with _opened(pid, name) as file:
        while data := os.read(file, _PIECE):
            most -= len(data)
            *whole, rest = (rest + data).split(b"\n")
            longest = max(map(len, (*whole, rest)))
            if most < 0 or longest > limits.LONGEST_LINE or time.thread_time() > began + limits.LONGEST_LIST:
                raise TooLarge(name)
            yield from whole
    if rest:
        yield rest


class Mapped(NamedTuple):
    """A mapping, as PROCMAP_QUERY returns it. The values are those of a line of /proc/PID/maps."""

    start: int
    end: int
    permissions: str
    offset: int
    device: tuple[int, int]
    inode: int
    path: bytes


def mapped_at(pid: int, address: int) -> Mapped | None:
    """Return the mapping that contains an address. Raises OSError: with ENOTTY, Linux is older than 6.11."""
    name = ctypes.create_string_buffer(4096)
    query = bytearray(
        _QUERY.pack(
            _QUERY.size, 0, address & (1 << 64) - 1, *[0] * 6, 0, 0, len(name), 0, ctypes.addressof(name), 0
        )
    )
    with _opened(pid, "maps") as file:
        try:
            fcntl.ioctl(file, _PROCMAP_QUERY, query)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
    _, _, _, start, end, flags, _, offset, inode, major, minor, size, _, _, _ = _QUERY.unpack(query)
    permissions = "".join(letter if flags & bit else "-" for bit, letter in _FLAGS)
    permissions += "s" if flags & _SHARED else "p"
    return Mapped(start, end, permissions, offset, (major, minor), inode, name.raw[: max(size - 1, 0)])


def take_lock(pid: int) -> None:
    """Take the lock of a process's address space, and give it back at once. Raises OSError."""
    with _opened(pid, "mem") as file, contextlib.suppress(OSError):
        os.pread(file, 1, _NOT_MAPPED)


@contextlib.contextmanager
def _opened(pid: int, name: str) -> Iterator[int]:
    file = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)

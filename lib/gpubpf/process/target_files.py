"""Files as another process sees them: below its root, through its own links, and nothing but regular files.

    descriptor = open_path(pid, "/home/me/app")        # in its mount namespace and its chroot
    descriptor = open_mapped(pid, 0x7f0000000000, 0x7f0000021000)

What is opened was named by the process, which is untrusted: a link leads nowhere outside its root, a device or a pipe is
not touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterator

from gpubpf.process import libc
from gpubpf.process.users import User

_NO_MAGIC_LINKS, _IN_ROOT = 0x02, 0x10  # RESOLVE_*, include/uapi/linux/openat2.h


def open_path(pid: int, path: str, flags: int = os.O_RDONLY) -> int:
    """A file, or with O_DIRECTORY a directory, for reading. Raises OSError."""
    directory = bool(flags & os.O_DIRECTORY)
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        kind = flags | os.O_CLOEXEC if directory else os.O_PATH | os.O_CLOEXEC
        how = ctypes.create_string_buffer(struct.pack("<QQQ", kind, 0, _NO_MAGIC_LINKS | _IN_ROOT), 24)
        name = ctypes.create_string_buffer(os.fsencode(path))
        try:
            made = libc.system_call(
                libc.OPENAT2, root, ctypes.addressof(name), ctypes.addressof(how), len(how)
            )
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(root)
    return made if directory else _regular(made)


def open_mapped(pid: int, start: int, end: int) -> int:
    """The file that is mapped there, also one that is deleted. Raises OSError, for who may not (proc(5): CAP_CHECKPOINT_RESTORE)."""
    return open_regular(f"/proc/{pid}/map_files/{start:x}-{end:x}")


def open_regular(path: str) -> int:
    """A file by a name that holds here. Raises OSError, also for what is no regular file."""
    return _regular(os.open(path, os.O_PATH | os.O_CLOEXEC))


def _regular(place: int) -> int:
    """What was opened as a place only, opened for reading. Takes `place` over."""
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(place)


@contextlib.contextmanager
def acting_as(user: User) -> Iterator[None]:
    """What this thread opens in here it opens with the rights of `user`: root does not read for others what they may not.

    Raises OSError where that cannot be had.
    """
    if os.geteuid() == user.uid:
        yield
        return
    uid, gid = libc.library.setfsuid(-1), libc.library.setfsgid(-1)
    libc.library.setfsgid(user.gid)
    libc.library.setfsuid(user.uid)
    try:
        if libc.library.setfsuid(-1) != user.uid or libc.library.setfsgid(-1) != user.gid:
            raise OSError(errno.EPERM, f"cannot act as user {user.uid}")
        yield
    finally:
        libc.library.setfsuid(uid)
        libc.library.setfsgid(gid)

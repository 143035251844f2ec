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

from gpubpf.process.users import User

_OPENAT2 = 437
_NO_MAGIC_LINKS, _IN_ROOT = 0x02, 0x10  # RESOLVE_*, include/uapi/linux/openat2.h
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def open_path(pid: int, path: str, flags: int = os.O_RDONLY) -> int:
    """A file, or with O_DIRECTORY a directory, for reading. Raises OSError."""
    directory = bool(flags & os.O_DIRECTORY)
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        kind = flags | os.O_CLOEXEC if directory else os.O_PATH | os.O_CLOEXEC
        how = ctypes.create_string_buffer(struct.pack("<QQQ", kind, 0, _NO_MAGIC_LINKS | _IN_ROOT), 24)
        name = ctypes.create_string_buffer(os.fsencode(path))
        made = int(_libc.syscall(ctypes.c_long(_OPENAT2), root, name, how, ctypes.c_size_t(24)))
        if made < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
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
    uid, gid = _libc.setfsuid(-1), _libc.setfsgid(-1)
    _libc.setfsgid(user.gid)
    _libc.setfsuid(user.uid)
    try:
        if _libc.setfsuid(-1) != user.uid or _libc.setfsgid(-1) != user.gid:
            raise OSError(errno.EPERM, f"cannot act as user {user.uid}")
        yield
    finally:
        _libc.setfsuid(uid)
        _libc.setfsgid(gid)

"""Open files as another process sees them: in its root directory, through its symbolic links, and regular files only.

    descriptor = open_path(pid, "/home/me/app")        # in its mount namespace and its chroot
    descriptor = open_mapped(pid, 0x7f0000000000, 0x7f0000021000)

The process that names the file is untrusted: no symbolic link leads out of its root directory, and devices and pipes are not opened.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Callable, Iterable
from typing import TypeVar

from gpubpf.kernel import fresh_thread, libc
from gpubpf.process import mounts, scans, user_waits
from gpubpf.process.users import User

T = TypeVar("T")

_NO_MAGIC_LINKS, _IN_ROOT = 0x02, 0x10  # RESOLVE_*, include/uapi/linux/openat2.h


def open_path(pid: int, path: str, flags: int = os.O_RDONLY) -> int:
    """Open a file for reading, and return its descriptor. Raises OSError.

    With O_DIRECTORY in `flags`, open a directory. With O_PATH, open anything, but not for reading. This may wait for a program that
    serves a part of the path (FUSE): the process can mount such a file system where it likes, see `user_waits`."""
    with user_waits.waiting(scans.user_of(pid), pid, lambda: mounts.served(pid)):
        return _open_path(pid, path, flags)


def _open_path(pid: int, path: str, flags: int) -> int:
    directory = bool(flags & os.O_DIRECTORY)
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        kind = flags | os.O_CLOEXEC if directory else os.O_PATH | os.O_CLOEXEC
        how = ctypes.create_string_buffer(struct.pack("<QQQ", kind, 0, _NO_MAGIC_LINKS | _IN_ROOT), 24)
        name = ctypes.create_string_buffer(os.fsencode(path))
        try:
            made = libc.system_call("openat2", root, ctypes.addressof(name), ctypes.addressof(how), len(how))
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(root)
    return made if directory or flags & os.O_PATH else _regular(made)


def open_mapped(pid: int, start: int, end: int) -> int:
    """Open the file that is mapped from `start` to `end`, even if it has been deleted. Requires CAP_CHECKPOINT_RESTORE (proc(5)).

    Raises OSError."""
    return open_regular(mapped_path(pid, start, end))


def mapped_path(pid: int, start: int, end: int) -> str:
    """Return a path, valid in this process, of the file that is mapped from `start` to `end`."""
    return f"/proc/{pid}/map_files/{start:x}-{end:x}"


def open_regular(path: str, links: bool = True) -> int:
    """Open a file by its path in this process. Raises OSError, also if it is not a regular file.

    links: follow a symbolic link."""
    return _regular(os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)))


def _regular(path_descriptor: int) -> int:
    """Reopen an O_PATH descriptor for reading, and close `path_descriptor`."""
    try:
        if not stat.S_ISREG(os.fstat(path_descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return os.open(f"/proc/self/fd/{path_descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(path_descriptor)


def as_user(
    user: User, function: Callable[[], T], pid: int = 0, devices: Callable[[], Iterable[str]] = tuple
) -> T:
    """Call `function`, which opens files, with the permissions of `user` and no others. Return its result, or raise its exception.

    A tool that runs as root then cannot open files that the user may not read. The permissions include those of the user's groups.
    `function` runs on a separate thread, unless this process belongs to the user. Raises OSError if no thread can act as this user.

    pid, devices: the process that names the files, and file systems for which it can make the thread wait, see `user_waits.waiting`.
    """
    if os.geteuid() == user.uid:
        return function()

    def call() -> T:
        groups = struct.pack(f"={len(user.groups)}I", *user.groups)
        buffer = ctypes.create_string_buffer(groups, len(groups) or 1)
        # The C library's function would change the groups of all threads.
        libc.system_call("setgroups", len(user.groups), ctypes.addressof(buffer))
        libc.library.setfsgid(user.gid)
        libc.library.setfsuid(user.uid)
        if libc.library.setfsuid(-1) != user.uid or libc.library.setfsgid(-1) != user.gid:
            raise OSError(errno.EPERM, f"cannot act as user {user.uid}")
        with user_waits.waiting(scans.responsible(user.uid), pid, devices):
            return function()

    return fresh_thread.run(call, "gpubpf-user")

"""Create the files that a user names for results."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from typing import IO, Any

_MOST_LINKS = 40  # as in Linux, path_resolution(7)
ABANDONED = 600  # seconds: a file that is being written is younger


def open_new(path: str, empty: bool = True) -> int:
    """Create a file for writing. Return its descriptor. `empty`: remove what the file contained. Raises OSError.

    In a directory where other users can create files, such as /tmp and, for root, the directories of users, this refuses symbolic
    links, and files, pipes and devices of users other than this one and the directory's owner. Otherwise they could choose what root
    overwrites. Linux does the same with fs.protected_symlinks and the like, but only in directories like /tmp. `_walk` says what
    applies to the directories above.
    """
    above, name = os.path.split(path)
    if not name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    directory = _walk(above)
    try:
        return _open_new(directory, name, empty)
    finally:
        os.close(directory)


def _open_new(directory: int, name: str, empty: bool) -> int:
    owners = _owners(os.fstat(directory))
    if not owners:
        how = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if empty else 0)
        return os.open(name, how, 0o666, dir_fd=directory)
    with contextlib.suppress(FileNotFoundError):
        _check(os.lstat(name, dir_fd=directory), owners)
    how = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(name, how, 0o666, dir_fd=directory)
    try:
        state = os.fstat(file)
        _check(state, owners)
        if empty and stat.S_ISREG(state.st_mode):
            os.ftruncate(file, 0)
    except BaseException:
        os.close(file)
        raise
    return file


class Directory:
    """A directory for files, open as long as files are written there.

    Another user who can write there cannot make this process create or replace files elsewhere: below the directory that the user
    named, no symbolic link is followed.
    """

    def __init__(self, file: int):
        self._file = file

    @classmethod
    def make(cls, path: str, *parts: str) -> Directory:
        """Create PATH/PART/… where it does not exist, and open it. Raises OSError, as `open_new` does for a symbolic link."""
        above, name = os.path.split(os.path.abspath(path))
        directory = _walk(above, create=True)
        try:
            if name:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=directory)
            owners = _owners(os.fstat(directory))
            if owners:
                _check(os.lstat(name or ".", dir_fd=directory), owners)
            links = os.O_NOFOLLOW if owners else 0
            file = os.open(name or ".", os.O_DIRECTORY | os.O_CLOEXEC | links, dir_fd=directory)
        finally:
            os.close(directory)
        for part in parts:
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=file)
                below = os.open(part, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=file)
            finally:
                os.close(file)
            file = below
        return cls(file)

    @contextlib.contextmanager
    def replacing(self, name: str) -> Iterator[IO[Any]]:
        """Write a file under another name, which becomes `name` when it is complete and on the disk. Raises OSError."""
        temporary = f".{name}.part"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=self._file)
        how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(temporary, how, 0o666, dir_fd=self._file), "wb") as stream:
                with contextlib.suppress(OSError):  # some file systems have no locks
                    fcntl.flock(
                        stream, fcntl.LOCK_EX | fcntl.LOCK_NB
                    )  # until this process ends: see remove_abandoned
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.rename(temporary, name, src_dir_fd=self._file, dst_dir_fd=self._file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._file)
            raise

    def remove_abandoned(self) -> None:
        """Remove files that `replacing` did not complete because the process was killed: old ones that no process has locked."""
        for name in os.listdir(self._file):
            if not (name.startswith(".") and name.endswith(".part")):
                continue
            with contextlib.suppress(OSError):
                file = os.open(
                    name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._file
                )
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if time.time() - os.fstat(file).st_mtime > ABANDONED:
                        os.unlink(name, dir_fd=self._file)
                finally:
                    os.close(file)

    def close(self) -> None:
        """Close the directory."""
        os.close(self._file)


def _walk(path: str, create: bool = False, start: int | None = None, links: int = 0) -> int:
    """Open a directory with O_PATH, part by part. Raises OSError.

    In a directory where other users can create files, a symbolic link may only lead to a directory of the link's owner: it then is as
    if the owner had made that directory there.

    create: make directories that do not exist, but never behind a symbolic link.
    start: the directory from which a relative path begins; None: the working directory.
    links: number of symbolic links that led to this path.
    """
    if links > _MOST_LINKS:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    begin = "/" if path.startswith("/") else "."
    at = os.open(begin, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=start)
    try:
        for part in path.split("/"):
            if part not in ("", "."):
                below = _step(at, part, create, links)
                os.close(at)
                at = below
    except BaseException:
        os.close(at)
        raise
    return at


def _step(at: int, part: str, create: bool, links: int) -> int:
    """Open a part of a path, in the open directory `at`."""
    if create:
        with contextlib.suppress(FileExistsError):
            os.mkdir(part, dir_fd=at)
    with contextlib.suppress(NotADirectoryError):
        return os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    state = os.lstat(part, dir_fd=at)
    if not stat.S_ISLNK(state.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    below = _walk(os.readlink(part, dir_fd=at), False, at, links + 1)
    here = os.fstat(at)
    own = state.st_uid == os.geteuid() and here.st_mode & stat.S_ISVTX  # nobody else can move it
    if _owners(here) and not own and os.fstat(below).st_uid != state.st_uid:
        os.close(below)
        raise OSError(
            errno.ELOOP, "a symbolic link, in a directory that others can write to, leads to another user's"
        )
    return below


def _owners(directory: os.stat_result) -> tuple[int, ...]:
    """Return the users whose files in a directory may be written; (): all, because no other user can create files there."""
    writable = directory.st_mode & (0o022 if directory.st_mode & stat.S_ISVTX else 0o002)
    if not writable and (os.geteuid() != 0 or directory.st_uid == 0):
        return ()
    return os.geteuid(), directory.st_uid


def _check(state: os.stat_result, owners: tuple[int, ...]) -> None:
    """Raise OSError for a symbolic link, and for a file of another user than `owners`."""
    if stat.S_ISLNK(state.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link in a directory that others can write to")
    if state.st_uid not in owners:
        raise OSError(errno.EACCES, "it belongs to another user, in a directory that others can write to")

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

ABANDONED = 600  # seconds: a file that is being written is younger


def open_new(path: str, empty: bool = True) -> int:
    """Create a file for writing. Return its descriptor. `empty`: remove what the file contained. Raises OSError.

    In a directory where other users can create files, such as /tmp and, for root, the directories of users, this refuses symbolic
    links, and files, pipes and devices of users other than this one and the directory's owner. Otherwise they could choose what root
    overwrites. Linux does the same with fs.protected_symlinks and the like, but only in directories like /tmp.
    """
    owners = _owners(os.stat(os.path.dirname(path) or "."))
    if not owners:
        how = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if empty else 0)
        return os.open(path, how, 0o666)
    with contextlib.suppress(FileNotFoundError):
        _check(os.lstat(path), owners)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
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
        os.makedirs(path, exist_ok=True)
        path = os.path.abspath(path)
        owners = _owners(os.stat(os.path.dirname(path)))
        if owners:
            _check(os.lstat(path), owners)
        file = os.open(path, os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if owners else 0))
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

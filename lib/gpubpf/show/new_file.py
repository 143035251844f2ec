"""Create the files that a user names for results."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import IO, Any


def open_new(path: str, empty: bool = True) -> int:
    """Create a file for writing. Return its descriptor. `empty`: remove what the file contained. Raises OSError.

    In a directory where other users can create files, such as /tmp and, for root, the directories of users, this refuses symbolic
    links, and files, pipes and devices of users other than this one and the directory's owner. Otherwise they could choose what root
    overwrites. Linux does the same with fs.protected_symlinks and the like, but only in directories like /tmp.
    """
    directory = os.path.dirname(path) or "."
    shared = os.stat(directory)
    writable = shared.st_mode & (0o022 if shared.st_mode & stat.S_ISVTX else 0o002)
    if not writable and (os.geteuid() != 0 or shared.st_uid == 0):
        how = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if empty else 0)
        return os.open(path, how, 0o666)
    owners = os.geteuid(), shared.st_uid
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
        above = os.stat(os.path.dirname(os.path.abspath(path)))
        if above.st_mode & 0o022 and os.geteuid() not in (above.st_uid, os.lstat(path).st_uid):
            _check(os.lstat(path), (os.geteuid(), above.st_uid))
        file = os.open(path, os.O_DIRECTORY | os.O_CLOEXEC)
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
        """Write a file under another name, which becomes `name` when it is complete. Raises OSError."""
        temporary = f".{name}.part"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=self._file)
        how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(temporary, how, 0o666, dir_fd=self._file), "wb") as stream:
                yield stream
            os.rename(temporary, name, src_dir_fd=self._file, dst_dir_fd=self._file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._file)
            raise

    def close(self) -> None:
        """Close the directory."""
        os.close(self._file)


def _check(state: os.stat_result, owners: tuple[int, int]) -> None:
    """Raise OSError for a symbolic link, and for a file of another user than `owners`."""
    if stat.S_ISLNK(state.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link in a directory that others can write to")
    if state.st_uid not in owners:
        raise OSError(errno.EACCES, "it belongs to another user, in a directory that others can write to")

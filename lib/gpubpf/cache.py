"""A small content-addressed cache for all stages: bytes by stage and SHA-256 of the stage's inputs.

It is in a directory that only its user can enter: the first usable one of ``$XDG_CACHE_HOME/gpubpf``,
``~/.cache/gpubpf`` and ``/tmp/gpubpf-UID``. The cache is optional: without a usable directory,
every `get` is a miss and every `put` does nothing.

A file is its content, the SHA-256 of (stage, "/", key, NUL, content), and `_MARK`. The embedded devices keep their files in
the subdirectories `cudasim` and `hipsim`, in almost the same format (embedded/cache.cpp). `Cache.sweep` removes these files,
too: a device that reads a file sets its modification time, as `Cache.get` does.
A file whose digest is wrong counts as missing, and the next `put` replaces it.

    key = cache.key("sm_90", options, ptx)
    cubin = cache.default().get("assemble", key)
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from gpubpf import digest
from gpubpf.kernel.directories import keeps_entries
from gpubpf.record import MutableRecord, field

LIMIT = 1 << 30  # bytes, over all stages
_STAGE = re.compile(r"[a-z][a-z0-9_-]{0,31}\Z")
_KEY = re.compile(r"[0-9a-f]{64}\Z")
_TEMPORARY = ".part-"  # prefix of files that are still being written
_MARK = b"gpubpf cache 1.\n"
_BEGAN = time.time()
_SOURCES = "sources"  # the stage of keys of files
_SETTLED = 2.0  # seconds since the last change of a file
_SHARED = "/tmp"  # not TMPDIR, which differs between processes of a user; embedded/cache.cpp does the same
_Value = TypeVar("_Value")


def key(*parts: str | bytes) -> str:
    """Return the key for these inputs, in hexadecimal. The keys of ("ab", "c") and ("a", "bc") differ."""
    encoded = [part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part for part in parts]
    return digest.sha256(
        *(b for data in encoded for b in (len(data).to_bytes(8, "little"), data))
    ).hexdigest()


def from_json(kept: bytes | None, read: Callable[[Any], _Value]) -> _Value | None:
    """Decode JSON from the cache, and return what `read` makes of it. None if nothing was cached, or if it is malformed."""
    if kept is None:
        return None
    try:
        return read(json.loads(kept))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def key_of_files(files: Iterable[Path]) -> str:
    """Return a key of the contents of these files, the source code that makes a result. It is a part of the result's key.

    If a file has changed since this process began, or has been removed, this process may run the earlier code. Then the key is unique
    to this process, so no other process gets its results. Reading and hashing the code of a stage takes up to 10 ms, so the key itself
    is cached under what identifies the files. Raises OSError.
    """
    paths = [*files]
    states = [_state(path) for path in paths]
    changed = any(state is None or state[-1] > _BEGAN * 1e9 for state in states)
    identity = key(*(f"{path} {state}" for path, state in zip(paths, states, strict=True)))
    if not changed and (kept := default().get(_SOURCES, identity)) is not None:
        return kept.decode("ascii", "replace")
    contents = []
    for file in paths:
        with contextlib.suppress(FileNotFoundError):  # removed by an upgrade
            contents.append(file.read_bytes())
    changed = changed or states != [_state(path) for path in paths]
    made = key(*contents, *([os.urandom(16)] if changed else []))
    # A file that was written just now can be written again without another time.
    if not changed and all(state[-1] < (time.time() - _SETTLED) * 1e9 for state in states if state):
        default().put(_SOURCES, identity, made.encode())
    return made


def _state(file: Path) -> tuple[int, ...] | None:
    """Return what identifies a file and its contents, the time of its last change in ns last; None if there is no file."""
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class Cache(MutableRecord):
    """A cache in `directory`, which is private to this user (see `open_directory`). With None it keeps nothing."""

    directory: Path | None
    limit: int = LIMIT
    # Bytes put since the last sweep; None: never swept.
    _unswept: int | None = field(default=None, repr=False)

    def get(self, stage: str, key: str) -> bytes | None:
        """Return the bytes that were put under (stage, key); None if the file is missing or damaged, or belongs to another user."""
        if (path := self.path(stage, key)) is None:
            return None
        try:
            if not _private(os.lstat(path.parent), stat.S_IFDIR):
                return None
            # O_NONBLOCK: opening a FIFO must not wait.
            descriptor = os.open(
                path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            )
            with open(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                size = status.st_size - digest.SIZE - len(_MARK)  # size of the content
                if not _private(status, stat.S_IFREG) or not 0 <= size <= self.limit:
                    return None
                if (
                    os.pread(descriptor, len(_MARK), size + digest.SIZE) != _MARK
                ):  # check before reading all of a large file
                    return None
                content = file.read(size)
                if file.read(digest.SIZE) != _digest(stage, key, content):
                    return None
                with contextlib.suppress(OSError):
                    os.utime(descriptor)  # mark as used: the sweep removes the longest unused first
                return content
        except OSError:
            return None

    def put(self, stage: str, key: str, data: bytes) -> Path | None:
        """Keep `data`. Readers see all of it or nothing. Return its path, or None if it could not be kept."""
        if (path := self.path(stage, key)) is None or len(data) > self.limit:
            return None
        import tempfile  # imported here because the import is slow

        temporary = ""
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
            with open(descriptor, "wb") as file:
                for part in (data, _digest(stage, key, data), _MARK):
                    file.write(part)
            if not path.is_symlink() and path.is_dir():  # a file cannot replace a directory
                import shutil  # imported here because the import is slow

                shutil.rmtree(path, ignore_errors=True)
            os.replace(temporary, path)
            temporary = ""
        except OSError:
            return None
        finally:
            if temporary:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
        self._sweep_when_due(len(data))
        return path

    def path(self, stage: str, key: str) -> Path | None:
        """Return the path of (stage, key), which may not exist yet; None without a directory. Only `get` checks the file.

        Raises ValueError for a malformed stage or key, which is a bug of the caller.
        """
        if not _STAGE.match(stage) or not _KEY.match(key):
            raise ValueError(f"not a cache stage and key: {stage!r}, {key!r}")
        return None if self.directory is None else self.directory / stage / key

    def _sweep_when_due(self, added: int) -> None:
        if self._unswept is not None and (unswept := self._unswept + added) < self.limit // 16:
            self._unswept = unswept
            return
        self._unswept = 0
        self.sweep()

    def sweep(self) -> None:
        """Remove the files that were unused for longest until the rest fits the limit."""
        entries = sorted(self._entries())
        excess = sum(size for _, size, _ in entries) - self.limit
        for _, size, name in entries:
            if excess <= 0:
                return
            with contextlib.suppress(OSError):
                os.unlink(name)
                excess -= size

    def size(self) -> int:
        """Return the size of all files, in bytes."""
        return sum(size for _, size, _ in self._entries())

    def _entries(self) -> Iterator[tuple[float, int, str]]:
        """Yield the time of last use, the size in bytes and the path of every file."""
        if self.directory is None:
            return
        with contextlib.suppress(OSError), os.scandir(self.directory) as stages:
            for stage in stages:
                if not stage.is_dir(follow_symlinks=False):
                    continue
                with contextlib.suppress(OSError), os.scandir(stage.path) as files:
                    for file in files:
                        with contextlib.suppress(OSError):
                            status = file.stat(follow_symlinks=False)
                            yield status.st_mtime, status.st_size, file.path


def _digest(stage: str, key: str, content: bytes) -> bytes:
    return digest.sha256(f"{stage}/{key}\0".encode(), content).digest()


def _private(status: os.stat_result, kind: int, user: int | None = None) -> bool:
    """Return whether this is a file or directory that only `user` (by default this one) or root can change."""
    user = os.geteuid() if user is None else user
    return stat.S_IFMT(status.st_mode) == kind and status.st_uid in (0, user) and not status.st_mode & 0o022


def default() -> Cache:
    """Return the cache of this user, in the directory that the environment determines."""
    home = os.environ.get("HOME", "")
    return _default(os.environ.get("XDG_CACHE_HOME", ""), home, _SHARED, os.geteuid())


@functools.lru_cache(maxsize=8)
def _default(xdg_cache_home: str, home: str, shared: str, user: int) -> Cache:
    # The XDG Base Directory Specification says to ignore a relative XDG_CACHE_HOME.
    candidates = [Path(xdg_cache_home) / "gpubpf"] if os.path.isabs(xdg_cache_home) else []
    if os.path.isabs(home):
        candidates.append(Path(home) / ".cache" / "gpubpf")
    candidates.append(Path(shared) / f"gpubpf-{user}")
    for candidate in candidates:
        if open_directory(candidate, user):
            return Cache(candidate)
    return Cache(None)


def open_directory(directory: Path, user: int) -> bool:
    """Create `directory` if it is missing, and return whether only `user` can change its content.

    Under sudo, HOME may belong to another user. So nothing is created in another user's directory, nor through
    one, and `directory` itself may not be a symbolic link.
    """
    try:
        parent = directory.parent
        if parent.name == ".cache" and not os.path.lexists(parent) and os.stat(parent.parent).st_uid == user:
            parent.mkdir(mode=0o700)
        status = os.stat(parent)
        sticky = status.st_uid == 0 and status.st_mode & stat.S_ISVTX  # such as /tmp
        if not sticky and (status.st_uid != user or not _private(status, stat.S_IFDIR, user)):
            return False
        if not keeps_entries(str(parent), user):
            return False
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        status = os.lstat(directory)
        private = (
            _private(status, stat.S_IFDIR, user) and status.st_uid == user and not status.st_mode & 0o077
        )
        return private and os.access(directory, os.R_OK | os.W_OK | os.X_OK)
    except OSError:
        return False

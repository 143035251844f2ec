"""Find the PTX of kernels that Triton compiled. Triton caches it next to the cubin that a program loads.

    cache = TritonCache(pid)
    cache.ptx_of(data)              # the PTX of a cubin, found by the cubin's content
    cache.modules(["add_kernel"])   # all compilations that may be a module with these kernels

Each compilation has its own directory, with `NAME.cubin` and `NAME.ptx` (triton/compiler/compiler.py, triton/runtime/cache.py).
The cache is in the directory that the process's environment names, in its user's home, or where a launcher that the process has
mapped was built. Its files belong to the user, and are untrusted.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from gpubpf.errors import ImageError
from gpubpf.images import fatbin
from gpubpf.images.fatbin import FatbinImage
from gpubpf.process import address_space, mounts, started_with, target_files, traceable
from gpubpf.record import Record

T = TypeVar("T")
MOST_DIRECTORIES = 1 << 17
MOST_FILES = 256  # in one directory
LARGEST = 64 << 20  # bytes of a cubin or PTX
_SLACK = 64  # zero bytes by which a cubin's size in memory and in its file may differ
_LAUNCHER = re.compile(r"(/.*)/[^/]+/(?:__triton_launcher|cuda_utils)[^/]*\.so(?: \(deleted\))?\Z", re.DOTALL)


class _Entry(Record):
    """A cubin in the cache that has PTX."""

    directory: str
    name: str  # without the suffix
    size: int  # size of the cubin in bytes


class TritonCache:
    """The Triton caches that one process uses. Use it from one thread at a time."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        # By directory: its modification time and its entries.
        self._known: dict[str, tuple[int, tuple[_Entry, ...]]] = {}

    def ptx_of(self, cubin: bytes) -> FatbinImage | None:
        """Return the PTX from which Triton made this cubin; None if the cache does not have it."""
        for entry in self._entries():
            if abs(entry.size - len(cubin)) <= _SLACK and entry.size >= _SLACK:
                same = min(entry.size, len(cubin))
                data = self._read(entry, ".cubin")
                with contextlib.suppress(ImageError):
                    if len(data) >= same and data[:same] == cubin[:same] and (ptx := self._ptx(entry, data)):
                        return ptx
        return None

    def modules(self, names: Sequence[str]) -> Iterator[tuple[FatbinImage, FatbinImage]]:
        """Yield the cubin and the PTX of each compilation that may have the kernels `names`."""
        for entry in self._entries():
            # Older versions append a kernel's specializations to the kernel's name, but not to the file's.
            if any(name.startswith(entry.name) for name in names):
                with contextlib.suppress(ImageError):
                    for cubin in fatbin.images_of_bytes(self._read(entry, ".cubin"))[:1]:
                        if cubin.kind == "elf" and (ptx := self._ptx(entry, cubin.payload)):
                            yield cubin, ptx

    def _entries(self) -> list[_Entry]:
        with contextlib.suppress(OSError, ValueError):
            return self._as_user(self._entries_of_user)
        return []

    def _as_user(self, function: Callable[[], T]) -> T:
        pid = self._pid
        return target_files.as_user(traceable.user(pid), function, pid, lambda: mounts.served(pid))

    def _entries_of_user(self) -> list[_Entry]:
        found: list[_Entry] = []
        with contextlib.suppress(OSError, ValueError):
            for place in self._places():
                with contextlib.suppress(OSError, ValueError):
                    cache = target_files.open_path(self._pid, place, os.O_RDONLY | os.O_DIRECTORY)
                    try:
                        for name in _names(cache, MOST_DIRECTORIES):
                            with contextlib.suppress(OSError):
                                found += self._entries_of(cache, place, name)
                    finally:
                        os.close(cache)
        return found

    def _entries_of(self, cache: int, place: str, name: str) -> tuple[_Entry, ...]:
        """Return the entries of one compilation. Raises OSError."""
        path = os.path.join(place, name)
        changed = os.stat(name, dir_fd=cache, follow_symlinks=False).st_mtime_ns
        if (known := self._known.get(path)) is None or known[0] != changed:
            directory = os.open(
                name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=cache
            )
            try:
                files = set(_names(directory, MOST_FILES))
                stems = sorted(f.removesuffix(".cubin") for f in files if f.endswith(".cubin"))
                known = (
                    changed,
                    tuple(
                        _Entry(
                            path,
                            stem,
                            os.stat(f"{stem}.cubin", dir_fd=directory, follow_symlinks=False).st_size,
                        )
                        for stem in stems
                        if f"{stem}.ptx" in files
                    ),
                )
            finally:
                os.close(directory)
            self._known[path] = known
        return known[1]

    def _ptx(self, entry: _Entry, cubin: bytes) -> FatbinImage | None:
        """Return the PTX of an entry, with ptxas's release and options from its cubin. Raises ImageError."""
        return fatbin.ptx_image(self._read(entry, ".ptx"), fatbin.ptxas_run(cubin))

    def _read(self, entry: _Entry, suffix: str) -> bytes:
        """Return the content of a file; b"" if it is too large or cannot be read."""
        try:
            path = os.path.join(entry.directory, entry.name + suffix)
            file = self._as_user(lambda: target_files.open_path(self._pid, path))
            with open(file, "rb") as opened:
                data = opened.read(LARGEST + 1)
        except (OSError, ValueError):
            return b""
        return data if len(data) <= LARGEST else b""

    def _places(self) -> Iterable[str]:
        """Return the directories that may contain caches of the process, in the process's own naming."""
        environment: dict[str, str] = {}
        with contextlib.suppress(OSError):
            environment = started_with.environment(self._pid, ("TRITON_CACHE_DIR", "TRITON_HOME", "HOME"))
        found: dict[str, None] = {}
        if place := environment.get("TRITON_CACHE_DIR"):
            found[place] = None
        for home in (environment.get("TRITON_HOME"), environment.get("HOME") or _home(self._pid)):
            if home:
                found[os.path.join(home, ".triton", "cache")] = None
        with contextlib.suppress(OSError):
            for mapping in address_space.mappings(self._pid, _LAUNCHER):
                if launcher := _LAUNCHER.match(mapping.path):
                    found[launcher[1]] = None
        return [place for place in found if place.startswith("/")]


def _names(directory: int, most: int) -> list[str]:
    """Return the first names in an open directory. os.listdir would read all. Raises OSError."""
    with os.scandir(directory) as entries:
        return [entry.name for entry in itertools.islice(entries, most)]


def _home(pid: int) -> str:
    """Return the home directory of the process's user, from the process's /etc/passwd; "" if that file has no entry for the user."""
    uid = str(traceable.user(pid).uid)
    with contextlib.suppress(OSError), open(target_files.open_path(pid, "/etc/passwd"), "rb") as file:
        for line in file.read(1 << 20).decode("utf-8", "surrogateescape").split("\n"):
            fields = line.split(":")
            if len(fields) == 7 and fields[2] == uid:
                return fields[5]
    return ""

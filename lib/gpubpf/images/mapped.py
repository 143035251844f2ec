"""Find device code in the files that a process maps, and the PTX of modules that were loaded before the tool attached.

    mapped = MappedImages(pid)
    for file, image in mapped.images(): …
    data, reasons = mapped.find(found, target)      # docs/attach.md, "What was loaded before"

A file is read as the process has mapped it: through /proc/PID/map_files, or by its name below the process's root if the name still
belongs to the same file, or from the process's memory. All of these are untrusted. Libraries may have gigabytes of SASS. So images are
read only when needed. What is cached by the identities of files: kernel names in large files, and which of a process's files have no
device code, as most have none.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gpubpf import cache
from gpubpf.agent.definitions import AMBIGUOUS, FoundKernel
from gpubpf.agent.protocol import Found
from gpubpf.elf import OpenFile
from gpubpf.errors import ImageError, PtxError
from gpubpf.future import Future
from gpubpf.images import device_link, fatbin
from gpubpf.images.assemble import Target
from gpubpf.images.fatbin import FatbinImage
from gpubpf.images.instrument import choose
from gpubpf.images.triton import TritonCache
from gpubpf.kernel import fresh_thread
from gpubpf.process import address_space, mounts, scans, target_files, user_waits
from gpubpf.record import MutableRecord, Record, field, replace

if TYPE_CHECKING:
    from gpubpf.ptx import module
    from gpubpf.ptx.call_graph import CallGraph

T = TypeVar("T")
NOT_FOUND = "PTX not found"
MOST_FILES = 4096  # per process
# In bytes. Images of larger files are searched only if the file mentions the kernel outside its images.
LARGE = 64 << 20
TIMEOUT = 120.0  # seconds to read a process's files
# Bytes to read from all files to find one module. A limit is needed because a sparse file may be larger than its disk.
READ_LIMIT = 16 << 30
SEARCH_LIMIT = 4 << 30  # bytes per process to search for images outside their sections
SLOW = 4 << 20  # bytes: if a file's images are larger, its kernel names are cached
MEMORY_LIMIT = 1 << 30  # bytes of a file to read from a process's memory
# Bytes of each block's shared memory that the system reserves on sm_80 and newer. Some counts include them.
_RESERVED_SHARED = 1024
_MOST_THREADS = 1024  # per block
_STAGE = "images"
_LAYOUTS = "layouts"
_WITHOUT_CODE = "nocode"
_SETTLED = 2.0  # seconds since a file's last change
_CHUNK = 1 << 22
_ENTRY = rb"\.entry\s+([\w$%.]+)"
_TEXT_PTX = rb"(?m)^\s*\.version\s+\d"
_DELETED = " (deleted)"
_MEMORY_FILE = "/memfd:"
# System V shared memory, and what belongs to the agent.
_NOT_SEARCHED = re.compile(rf"/SYSV|{_MEMORY_FILE}gpubpf-|{address_space.AGENT.pattern}")


class MappedImages:
    """The device code that a process has mapped."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._files: dict[tuple[tuple[str, int], str], _FileImages] = {}  # by device and inode, path
        self._triton = TritonCache(pid)
        self._lock = threading.Lock()
        self._searched = 0  # bytes
        self._without_code = _FilesWithoutCode()
        self._budget = _ReadBudget()
        self._timed_out = False  # reading its files timed out

    def images(self) -> Iterator[tuple[str, FatbinImage]]:
        """Yield each image with the process's name for its file. Module numbers are unique in a file.

        Files stay open as long as images refer to them, because the process may end meanwhile. Raises OSError if the process cannot be
        read.
        """
        yield from self._with_timeout(lambda: [*self._images()])

    def _images(self) -> Iterator[tuple[str, FatbinImage]]:
        modules: dict[str, int] = {}
        for file in self._refresh():
            for images in file.modules:
                number = modules[file.path] = modules.get(file.path, -1) + 1
                with contextlib.suppress(ImageError):  # the file has changed meanwhile
                    held = [replace(i, module=number, stored=file.source.held(i)) for i in images]
                    yield from ((file.path, image) for image in held)
        self._files.clear()

    def code_objects(self) -> Iterator[tuple[str, tuple[bytes, ...]]]:
        """Yield the files with code objects for AMD GPUs, with the process's names for them. Raises OSError."""
        yield from self._with_timeout(lambda: [*self._code_objects()])

    def _code_objects(self) -> Iterator[tuple[str, tuple[bytes, ...]]]:
        from gpubpf.images import offload_bundle  # imported here: only listings need it

        for (_, path), mappings in self._mapped().items():
            source = _MappedFile(self._pid, mappings, self._budget)
            with contextlib.closing(source), contextlib.suppress(ImageError):
                if found := offload_bundle.code_objects_of(source):
                    yield path, tuple(found)

    def with_ptx(self, data: bytes) -> bytes:
        """Return an image that the process loads. For a cubin whose PTX Triton has cached, return that PTX as a fatbin instead.

        The cached PTX has source lines, unlike PTX embedded in a cubin.
        """
        if not data.startswith(b"\x7fELF"):
            return data
        try:
            (image,) = fatbin.images_of_bytes(data)
            if image.kind != "elf":
                return data
            ptx = self._with_timeout(self._triton.ptx_of, image.payload)
            return data if ptx is None else fatbin.pack(ptx)
        except (ImageError, ValueError, TimeoutError):
            return data

    def find(self, found: Found, target: Target) -> tuple[bytes | None, dict[str, str]]:
        """Return the PTX with which to instrument `found`, as a fatbin, or None; and a reason for each kernel that the PTX lacks.

        Kernels are identified by their mangled names.
        """
        names = tuple(dict.fromkeys((*(kernel.name for kernel in found.kernels), *found.names)))
        try:
            return self._with_timeout(self._find, found, names, target)
        except (OSError, ImageError):  # the process has ended, or a file has changed or does not answer
            return None, dict.fromkeys(names, NOT_FOUND)

    def modules(
        self, matches: Callable[[str], bool], target: Target, most: int
    ) -> list[tuple[bytes, tuple[str, ...]]]:
        """Return the modules that the process may have loaded: the PTX that `find` would return, and the matching kernels in it.

        Large files are left out, because a process loads only a small part of them.

        matches: returns whether a kernel, by its mangled name, is wanted
        most: the number of kernels, in total, after which further modules are left out
        """
        try:
            return self._with_timeout(self._modules, matches, target, most)
        except (OSError, ImageError):
            return []

    def _modules(
        self, matches: Callable[[str], bool], target: Target, most: int
    ) -> list[tuple[bytes, tuple[str, ...]]]:
        found: dict[bytes, tuple[str, ...]] = {}
        for file in self._refresh():
            for number, images in enumerate(file.modules if not file.large else ()):
                running, chosen = _taken_by_driver(images, target), choose(images, target)
                if running is None or not isinstance(chosen, FatbinImage):
                    continue
                kernels = tuple(name for name in file.names(number, running) if matches(name))
                if kernels and sum(map(len, found.values())) + len(kernels) <= most:
                    with contextlib.suppress(ImageError):  # the file has changed meanwhile
                        found[fatbin.pack(chosen)] = kernels
        return list(found.items())

    def _with_timeout(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function` on another thread, and wait at most TIMEOUT seconds: the process itself may serve a file system (FUSE).

        Files in such a file system are not opened, but the process may mount another one over the path of a file meanwhile.
        Raises TimeoutError. After the first timeout, every call raises it at once.
        """
        future: Future[T] = Future()
        user = scans.user_of(self._pid)

        def run() -> None:
            with self._lock, user_waits.waiting(user, self._pid, lambda: mounts.served(self._pid)):
                self._budget.left = READ_LIMIT
                try:
                    result = function(*arguments)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                finally:
                    for file in self._files.values():
                        file.source.close()

        if self._timed_out:
            raise TimeoutError
        fresh_thread.start(run, "gpubpf-files")
        try:
            return future.result(TIMEOUT)
        except TimeoutError:
            self._timed_out = True
            raise

    def _find(
        self, found: Found, names: Sequence[str], target: Target
    ) -> tuple[bytes | None, dict[str, str]]:
        files = [file for file in self._refresh() if file.may_have(names[0])]
        candidates = list(self._candidates(files, found, names, target))
        candidates = candidates or list(self._candidates_anywhere(found, names, target))
        different = _without_duplicates([c.ptx for c in candidates if c.ptx is not None])
        usable = _alike(different, found)
        without = [candidate.reason for candidate in candidates if candidate.ptx is None]
        self._without_code.keep()
        if not usable:
            reason = (without or [fatbin.SASS_ONLY])[0]
            if reason == fatbin.SASS_ONLY:
                reason = _reason_without_ptx(files, names[0], target)
            return None, dict.fromkeys(names, reason)
        if len(usable) > 1 or without:
            return None, dict.fromkeys(names, AMBIGUOUS)
        there = set(_names(usable[0]))
        reasons = {name: f"not in the PTX for {usable[0].arch}" for name in names if name not in there}
        if len(different) > 1:
            # Only the launched kernels are known to be identical.
            others = {name for image in different for name in _names(image)}
            reasons |= dict.fromkeys(others - {kernel.name for kernel in found.kernels}, AMBIGUOUS)
        return fatbin.pack(usable[0]), reasons

    def _candidates(
        self, files: Iterable[_FileImages], found: Found, names: Sequence[str], target: Target
    ) -> Iterator[_Candidate]:
        for file in files:
            for number, images in enumerate(file.modules):
                running = _taken_by_driver(images, target)
                if running is not None and _has_kernels(file.names(number, running), found, names):
                    yield from _candidate(images, running, found, target)
            file.cache_names()
        for images in self._triton.modules(names):
            running = _taken_by_driver(images, target)
            if running is not None and _has_kernels(_names(running), found, names):
                yield from _candidate(images, running, found, target)

    def _candidates_anywhere(
        self, found: Found, names: Sequence[str], target: Target
    ) -> Iterator[_Candidate]:
        """Yield candidates from anywhere in a file, because a program may pass an image or PTX text from an array to the driver."""
        nowhere = self._without_code.anywhere
        for file in self._files.values():
            source = file.source
            with contextlib.suppress(ImageError):
                if self._searched >= SEARCH_LIMIT or source.size > LARGE or source.identity in nowhere:
                    continue
                self._searched += source.size
                mentioned, likely = file.search(names[0])
                images: tuple[FatbinImage, ...] = ()
                if likely and (mentioned or not file.modules):
                    images = tuple(fatbin.scan(source, 0, source.size))
                    likely = bool(images)
                if not likely:
                    self._without_code.add_anywhere(source.identity)
                for module in device_link.modules(images if mentioned else ()):
                    running = _taken_by_driver(module, target)
                    if running is not None and _has_kernels(_names(running), found, names):
                        yield from _candidate(module, running, found, target)

    def _mapped(self) -> dict[tuple[tuple[str, int], str], list[address_space.Mapping]]:
        """Return the mappings of files that may have code of the program, by (device and inode, path). Raises OSError."""
        mapped: dict[tuple[tuple[str, int], str], list[address_space.Mapping]] = {}
        for mapping in address_space.mappings(self._pid):
            path = mapping.path
            if mapping.file[1] and path.startswith("/") and not _NOT_SEARCHED.match(path):
                mapped.setdefault((mapping.file, path), []).append(mapping)
        return mapped

    def _refresh(self) -> list[_FileImages]:
        """Return the files with device code that are currently mapped. Raises OSError."""
        mapped = self._mapped()
        for key in [key for key in self._files if key not in mapped]:
            self._files.pop(key).source.close()
        new: dict[tuple[tuple[str, int], str], _MappedFile] = {}
        for key, mappings in mapped.items():
            known = self._files.get(key)
            if known is not None:
                known.source.mappings = mappings
            if known is not None and not (known.modules and known.source.changed()):
                continue
            if len(self._files.keys() | new.keys()) < MOST_FILES:
                new[key] = _MappedFile(self._pid, mappings, self._budget)
        if new:
            self._without_code.load(source.lasting_identity for source in new.values())
        for key, source in new.items():
            if source.identity in self._without_code.in_sections:
                self._files[key] = _FileImages(key[1], source)
                continue
            file = self._files[key] = _read(self._pid, source)
            if file.source is source and not file.modules:
                self._without_code.add_in_sections(source.identity)
        return [file for file in self._files.values() if file.modules]


# --- files ----------------------------------------------------------------------------------------------------


class _ReadBudget(MutableRecord):
    """The number of bytes that may still be read."""

    left: int = READ_LIMIT

    def take(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise ImageError("its files are too large to be read; look at them with ls -l")


class _FilesWithoutCode:
    """Which of a process's files have no device code. The cache has it for the next process that maps the same files.

    in_sections: identities of the files without images where compilers put them.
    anywhere: identities of the files in which nothing looks like an image, except the images that are known.
    """

    def __init__(self) -> None:
        self.in_sections: set[str] = set()
        self.anywhere: set[str] = set()
        self._mapped: set[str] = set()
        self._kept = 0  # identities that the cache has

    def load(self, identities: Iterable[str]) -> None:
        """Take what the cache has about these files and those before. ``""`` stands for a file that cannot be identified."""
        self._mapped.update(identities)
        self._mapped.discard("")
        kept = cache.from_json(cache.default().get(_WITHOUT_CODE, self._key()), _cached_identities)
        if kept is not None:
            self.in_sections |= kept[0] & self._mapped
            self.anywhere |= kept[1] & self._mapped
        self._kept = self._size()

    def add_in_sections(self, identity: str) -> None:
        self.in_sections |= {identity} & self._mapped

    def add_anywhere(self, identity: str) -> None:
        self.anywhere |= {identity} & self._mapped

    def keep(self) -> None:
        """Cache what is known."""
        if self._size() > self._kept:
            known = [sorted(self.in_sections), sorted(self.anywhere)]
            cache.default().put(_WITHOUT_CODE, self._key(), json.dumps(known).encode())
            self._kept = self._size()

    def _size(self) -> int:
        return len(self.in_sections) + len(self.anywhere)

    def _key(self) -> str:
        return cache.key(_version(), *sorted(self._mapped))


def _cached_identities(value: Any) -> tuple[set[str], set[str]]:
    in_sections, anywhere = value
    return set(map(str, in_sections)), set(map(str, anywhere))


class _MappedFile:
    """A mapped file as an `elf.ByteSource`. It is opened when read. After `close`, it is reopened if it is unchanged."""

    def __init__(self, pid: int, mappings: list[address_space.Mapping], budget: _ReadBudget) -> None:
        self._pid = pid
        self._budget = budget
        self.mappings = mappings  # its owner keeps them up to date
        self._file: int | None = None
        self._status: os.stat_result | None = None

    @property
    def identity(self) -> str:
        """A string that changes with the file's content; "" before the file is first opened."""
        s = self._status
        return "" if s is None else repr((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))

    @property
    def lasting_identity(self) -> str:
        """The identity if other processes may map the file, and its content cannot change without it; else "".

        The file is not open afterwards."""
        if self.mappings[0].path.startswith(_MEMORY_FILE):
            return ""
        with contextlib.suppress(ImageError):
            self._open()
        self.close()
        if self._status is None or self._status.st_ctime > time.time() - _SETTLED:
            return ""  # a file that was written just now can be written again without another time
        shared = any(mapping.permissions[1::2] == "ws" for mapping in self.mappings)
        return "" if shared else self.identity

    @property
    def size(self) -> int:
        self._open()
        assert self._status is not None
        return self._status.st_size

    def read(self, offset: int, size: int) -> bytes:
        file = self._open()
        assert self._status is not None
        self._budget.take(size)
        try:
            return OpenFile(file, self._status.st_size).read(offset, size)
        except OSError as error:
            raise ImageError(f"it cannot be read ({error.strerror}); check its disk") from None

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.close()

    def held(self, image: FatbinImage) -> bytes | fatbin.FileRange:
        """Return an image's bytes, or their location, in a form that remains valid after the process ends."""
        self._open()
        return image.stored

    def changed(self) -> bool:
        """Return whether the file has changed since it was first opened."""
        try:
            self._open()
        except ImageError:
            return True
        return False

    def _open(self) -> int:
        if self._file is None:
            file = self._opened()
            before, self._status = self.identity, os.fstat(file)
            if before and before != self.identity:
                os.close(file)
                raise ImageError("its file has changed; restart the program")
            self._file = file
        return self._file

    def _opened(self) -> int:
        first = self.mappings[0]
        if not address_space.is_local(first.file[0], self._pid):
            raise ImageError(
                "a program serves its file (FUSE), and may never answer; copy the file elsewhere"
            )
        with contextlib.suppress(OSError):
            return target_files.open_mapped(self._pid, first.start, first.end)
        if not first.path.endswith(_DELETED):
            with contextlib.suppress(OSError, ValueError):
                file = target_files.open_path(self._pid, first.path.replace("\\012", "\n"))
                status = os.fstat(file)
                major, minor = (int(part, 16) for part in first.file[0].split(":"))
                if (os.makedev(major, minor), first.file[1]) == (status.st_dev, status.st_ino):
                    return file
                os.close(file)
        raise ImageError("its file was deleted or replaced; restart the program")


class _MappedMemory:
    """The parts of a file that a process has mapped, as an `elf.ByteSource`. Offsets are addresses."""

    size = 1 << 47

    def __init__(self, pid: int, mappings: list[address_space.Mapping]) -> None:
        self._pid = pid
        self.mappings = mappings
        self.identity = ""
        self._memory: address_space.Memory | None = None

    def read(self, offset: int, size: int) -> bytes:
        if not 0 <= size <= MEMORY_LIMIT:
            raise ImageError("it is larger than any image; restart the program")
        try:
            if self._memory is None:
                self._memory = address_space.Memory(self._pid)
            return self._memory.read(offset, size)
        except OSError:
            raise ImageError("the process's memory cannot be read; check that it runs and is yours") from None

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def held(self, image: FatbinImage) -> bytes | fatbin.FileRange:
        return image.stored.read() if isinstance(image.stored, fatbin.FileRange) else image.stored

    def changed(self) -> bool:
        return False

    def images(self) -> Iterator[FatbinImage]:
        """Yield the images of everything that looks like a fatbin."""
        number, left = 0, MEMORY_LIMIT
        spans: list[list[int]] = []
        for mapping in sorted(self.mappings, key=lambda m: m.start):
            if spans and spans[-1][1] == mapping.start:
                spans[-1][1] = mapping.end
            elif "r" in mapping.permissions:
                spans.append([mapping.start, mapping.end])
        for start, end in spans:
            end, left = min(end, start + left), left - min(left, end - start)
            with contextlib.suppress(ImageError):  # a truncated file: its last pages cannot be read
                for image in fatbin.scan(self, start, end):
                    yield fatbin.renumbered(image, number)
            number += fatbin.MOST_IMAGES


class _FileImages(MutableRecord):
    """A mapped file with device code: its images by module, and their kernels' names."""

    path: str
    source: _MappedFile | _MappedMemory
    modules: tuple[tuple[FatbinImage, ...], ...] = ()
    # By module number and the image's index in the module.
    _names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _kept: int | None = None  # number of `_names` entries in the cache
    _searched: bool = False  # the names are known for all modules that the device can run

    @cached_property
    def stored(self) -> int:
        """The stored size of all images in bytes."""
        return sum(
            len(i.stored) if isinstance(i.stored, bytes) else i.stored.size for m in self.modules for i in m
        )

    @property
    def large(self) -> bool:
        return self.stored > LARGE

    def may_have(self, name: str) -> bool:
        """Return whether to search this file for a kernel. A large file is searched only if it mentions the kernel."""
        return not self.large or self._searched or self.mentions(name)

    def names(self, module: int, image: FatbinImage) -> tuple[str, ...]:
        """Return the kernels of an image; none if it is damaged."""
        self._load_names()
        images = self.modules[module]
        key = f"{module}.{images.index(image) if image in images else 'linked'}"
        if key not in self._names:
            self._names[key] = tuple(_names(image))
        return self._names[key]

    def has(self, module: int, name: str) -> bool:
        """Return whether any image of a module has this kernel."""
        return any(name in self.names(module, image) for image in self.modules[module])

    def mentions(self, name: str) -> bool:
        """Return whether a name occurs outside the images: programs that use the CUDA runtime register kernels by name."""
        if isinstance(self.source, _MappedMemory):
            return True
        text = name.encode("utf-8", "surrogateescape")
        with contextlib.suppress(ImageError):  # the file was truncated meanwhile
            return any(text in part for part in self._outside(len(text)))
        return False

    def search(self, name: str) -> tuple[bool, bool]:
        """Return whether a name occurs outside the images, and whether something there looks like an image. Raises ImageError."""
        text = name.encode("utf-8", "surrogateescape")
        mentioned = likely = False
        for part in self._outside(max(len(text), fatbin.LONGEST_BEGINNING)):
            mentioned = mentioned or text in part
            likely = likely or fatbin.may_begin_in(part)
        return mentioned, likely

    def _outside(self, overlap: int) -> Iterator[bytes]:
        """Yield the parts of the file outside the images, each with the last bytes of the part before. Raises ImageError."""
        taken = sorted(
            (i.stored.offset, i.stored.offset + i.stored.size)
            for m in self.modules
            for i in m
            if isinstance(i.stored, fatbin.FileRange)
        )
        at = 0
        for start, end in (*taken, (self.source.size, self.source.size)):
            while at < start:
                size = min(_CHUNK, start - at)
                yield self.source.read(at, size)
                at += size - overlap if at + size < start and size > overlap else size
            at = max(at, end)

    def _load_names(self) -> None:
        if self._kept is not None:
            return
        self._kept = 0
        if self.stored > SLOW and self.source.identity:
            kept = cache.default().get(_STAGE, self._key())
            self._names = cache.from_json(kept, _cached_names) or {}
            self._kept = len(self._names)

    def cache_names(self) -> None:
        """Cache the kernel names for the next process that maps the file. Call it once all modules have been searched."""
        self._searched = True
        if self.stored > SLOW and self.source.identity and len(self._names) > (self._kept or 0):
            cache.default().put(_STAGE, self._key(), json.dumps(self._names).encode())
            self._kept = len(self._names)

    def _key(self) -> str:
        return cache.key(_version(), self.source.identity)


@functools.cache
def _version() -> str:
    """Return a key that changes with the code that finds kernel names in a file."""
    package = Path(__file__).resolve().parents[1]
    return cache.key_of_files(
        package / name for name in ("elf.py", "images/fatbin.py", "images/device_link.py", "images/mapped.py")
    )


def _read(pid: int, source: _MappedFile) -> _FileImages:
    """Read a mapped file. A file without device code has no modules."""
    path = source.mappings[0].path
    with contextlib.closing(source), contextlib.suppress(ImageError):
        start = source.read(0, min(source.size, 4096))
        known = start.startswith(b"\x7fELF") or re.search(_TEXT_PTX, start) or _is_fatbin(start)
        return _FileImages(path, source, device_link.modules(fatbin.images_of(source)) if known else ())
    memory = _MappedMemory(pid, source.mappings)
    with contextlib.closing(memory):
        return _FileImages(path, memory, device_link.modules(tuple(memory.images())))


def _is_fatbin(start: bytes) -> bool:
    return int.from_bytes(start[:4], "little") in (fatbin.FATBIN_MAGIC, fatbin.WRAPPER_MAGIC)


# --- matching a module --------------------------------------------------------------------------------------------


class _Candidate(Record):
    """A module that may be the one that was found. `ptx`: the image to instrument; None if it has no PTX, for `reason`."""

    ptx: FatbinImage | None
    reason: str = ""


def _cached_names(value: Any) -> dict[str, tuple[str, ...]]:
    return {key: tuple(map(str, names)) for key, names in value.items()}


def _names(image: FatbinImage) -> Iterable[str]:
    """Return the mangled names of an image's kernels; none if it is damaged."""
    try:
        data = image.read()
        if image.kind == "elf":
            return tuple(fatbin.kernel_names(data))
        if image.kind != "ptx":
            return ()
        return tuple(dict.fromkeys(m.decode("ascii", "replace") for m in re.findall(_ENTRY, data)))
    except ImageError:
        return ()


def _reason_without_ptx(files: Iterable[_FileImages], name: str, target: Target) -> str:
    """Return why a kernel without a matching module has no PTX: the reason of a kernel with the same name in the files."""
    reasons = []
    for file in files:
        for number, images in enumerate(file.modules):
            if file.has(number, name):
                chosen = choose(images, target)
                reasons += [chosen] if isinstance(chosen, str) else []
        file.cache_names()
    return next((reason for reason in reasons if reason != fatbin.SASS_ONLY), (*reasons, NOT_FOUND)[0])


def _taken_by_driver(images: Sequence[FatbinImage], target: Target) -> FatbinImage | None:
    """Return the image of a module that the target's driver loads; None if no image suits. The embedded device loads only PTX."""
    if target.device == "gpu" and (cubin := fatbin.cubin_for(images, target.cc)) is not None:
        return cubin
    chosen = choose(images, target)
    return chosen if isinstance(chosen, FatbinImage) else None


def _has_kernels(there: Iterable[str], found: Found, names: Iterable[str]) -> bool:
    return set(there) == set(names) if found.whole else set(there) >= set(names)


def _candidate(
    images: Sequence[FatbinImage], running: FatbinImage, found: Found, target: Target
) -> Iterator[_Candidate]:
    """Yield a candidate if this module may be `found`. `running`: the module's image that the driver loads."""
    chosen = choose(images, target)
    try:
        if running.kind == "elf" and not _agrees(running.read(), found.kernels):
            return
        there = _layouts(chosen, found.kernels) if isinstance(chosen, FatbinImage) else {}
    except (ImageError, PtxError) as error:
        yield _Candidate(None, str(error))
        return
    if isinstance(chosen, str):
        yield _Candidate(None, chosen)
        return
    for reported in found.kernels:
        layout = there.get(reported.name)
        if running is chosen and (layout is None or not layout.agrees(reported, chosen)):
            return
        if layout is not None and _differs(reported.parameters, layout.parameters):
            yield _Candidate(None, f"other parameters in the PTX for {chosen.arch}")
            return
    yield _Candidate(chosen)


def _agrees(cubin: bytes, kernels: Iterable[FoundKernel]) -> bool:
    """Return whether the driver's kernels may come from this cubin. Raises ImageError."""
    there, shared = fatbin.kernels(cubin), fatbin.static_shared(cubin)
    for reported in kernels:
        kernel, size = there.get(reported.name), shared.get(reported.name, 0)
        if kernel is None or _differs(reported.parameters, kernel.parameters):
            return False
        if _differs(_known(reported.registers), kernel.registers):
            return False
        if _differs(_known(reported.max_threads), _as_reported(kernel.max_threads)):
            return False
        if reported.shared >= 0 and reported.shared not in (size, size - _RESERVED_SHARED):
            return False
    return True


def _known(number: int) -> int | None:
    return number if number >= 0 else None


def _as_reported(threads: int | None) -> int | None:
    """Return the limit as a driver reports it: no device supports larger blocks."""
    return None if threads is None else min(threads, _MOST_THREADS)


def _differs(reported: object, known: object) -> bool:
    return reported is not None and known is not None and reported != known


class _Layout(NamedTuple):
    """A kernel's layout in PTX.

    parameters  (offset, size) of each parameter, in bytes
    shared      bounds of its static shared memory, in bytes
    threads     the limit of threads per block; None without a limit
    """

    parameters: tuple[tuple[int, int], ...]
    shared: tuple[int, int]
    threads: int | None

    def agrees(self, reported: FoundKernel, image: FatbinImage) -> bool:
        """Return whether the driver's kernel may have been compiled from this PTX."""
        least, most = self.shared
        return not (
            _differs(reported.parameters, self.parameters)
            or _differs(_known(reported.ptx_version), image.sm)
            or (
                reported.shared >= 0
                and not any(least <= reported.shared - extra <= most for extra in (0, _RESERVED_SHARED))
            )
            or _differs(_known(reported.max_threads), _as_reported(self.threads))
        )


def _layouts(image: FatbinImage, kernels: Iterable[FoundKernel]) -> dict[str, _Layout]:
    """Return the layouts of those `kernels` that the PTX contains. Raises PtxError, ImageError."""
    names = sorted(kernel.name for kernel in kernels)
    text = image.text
    key, store = cache.key(_layouts_version(), text, *names), cache.default()
    found = cache.from_json(store.get(_LAYOUTS, key), _cached_layouts)
    if found is None or len(found) != len(names):
        found = _parsed_layouts(text, names)
        store.put(_LAYOUTS, key, json.dumps(found).encode())
    return {name: layout for name, layout in zip(names, found, strict=True) if layout is not None}


def _cached_layouts(value: Any) -> list[_Layout | None]:
    return [layout and _cached_layout(*layout) for layout in value]


def _cached_layout(parameters: Any, shared: Any, threads: Any) -> _Layout:
    least, most = map(int, shared)
    limit = None if threads is None else int(threads)
    return _Layout(tuple((int(offset), int(size)) for offset, size in parameters), (least, most), limit)


@functools.cache
def _layouts_version() -> str:
    package = Path(__file__).resolve().parents[1]
    files = [*sorted((package / "ptx").glob("*.py")), package / "inject" / "injected.py", Path(__file__)]
    return cache.key_of_files(files)


def _parsed_layouts(text: str, names: Iterable[str]) -> list[_Layout | None]:
    """Return the layouts of the named kernels in a PTX text, None for a kernel that is not there. Raises PtxError."""
    # Imported here, because nearly all layouts come from the cache.
    from gpubpf.inject.injected import parameter_layout
    from gpubpf.ptx import parser
    from gpubpf.ptx.call_graph import CallGraph

    parsed = parser.parse(text)
    graph = CallGraph(parsed)
    found: list[_Layout | None] = []
    for name in names:
        if (entry := parsed.entries.get(name)) is None:
            found.append(None)
            continue
        variables = _shared(parsed, graph, name)
        least = sum(variable.size for variable in variables)
        most = sum(variable.size + variable.alignment for variable in variables)
        found.append(_Layout(parameter_layout(entry)[0], (least, most), _threads(entry)))
    return found


def _shared(parsed: module.Module, graph: CallGraph, kernel: str) -> list[module.Variable]:
    """Return the variables in static shared memory that a kernel uses."""
    from gpubpf.ptx import module

    found: dict[tuple[str, str], module.Variable] = {}
    for name in graph.reach(kernel):
        for statement in parsed.functions[name].body or ():
            if isinstance(statement, module.Variable):
                found[name, statement.name] = statement
        for variable in graph.of(name).variables:
            found["", variable] = parsed.variables[variable]
    return [v for v in found.values() if v.space == "shared" and "extern" not in v.linkage]


def _threads(entry: module.Function) -> int | None:
    """Return the most threads per block; None if the kernel does not state it."""
    limit = entry.block_limit("reqntid") or entry.block_limit("maxntid")
    return math.prod(limit) if limit is not None else None


def _without_duplicates(candidates: Iterable[FatbinImage]) -> list[FatbinImage]:
    return list({(image.text, image.options): image for image in candidates}.values())


def _alike(candidates: list[FatbinImage], found: Found) -> list[FatbinImage]:
    """Return one candidate from each group of candidates with the same PTX for the launched kernels.

    Several files of a program may contain the same instance of a template.
    """
    if len(candidates) < 2:
        return candidates
    return list({(_trimmed(image, found), image.options): image for image in candidates}.values())


def _trimmed(image: FatbinImage, found: Found) -> str:
    # Imported here, because few kernels need it.
    from gpubpf.ptx import module, parser
    from gpubpf.ptx.trim import trim

    try:
        parsed = parser.parse(image.text)
        return module.render(trim(parsed, dict.fromkeys(kernel.name for kernel in found.kernels)))
    except (PtxError, ImageError):
        return image.text

"""Device code in the files that a process maps, and which of it a module is that was loaded before anybody looked.

    mapped = Mapped(pid)
    for file, image in mapped.images(): …
    data, reasons = mapped.find(found, target)      # docs/attach.md, "What was loaded before"

A file is read as the process has it: through /proc/PID/map_files, by its name below the process's root where that still is the
same file, else out of the process's memory. All of that is untrusted. Libraries may have gigabytes of SASS, so images are read when
they are asked for, and the kernels' names that were found in large ones are kept by the file's identity.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from gpubpf import cache
from gpubpf.agent.protocol import Found, FoundKernel
from gpubpf.elf import OpenFile
from gpubpf.errors import ImageError, PtxError
from gpubpf.images import fatbin
from gpubpf.images.assemble import Target
from gpubpf.images.fatbin import Image
from gpubpf.images.instrument import choose, trim
from gpubpf.images.triton import Cache
from gpubpf.process import target, target_files
from gpubpf.ptx import flow, module
from gpubpf.ptx.values import parameter_layout

T = TypeVar("T")
NOT_FOUND, AMBIGUOUS = "PTX not found", "ambiguous"
MOST_FILES = 4096  # of one process
LARGE = (
    64 << 20
)  # bytes of images, from which on a file is only looked into where it names the kernel elsewhere, too
PATIENCE = 120.0  # seconds for its files to be read
READ_LIMIT = 16 << 30  # bytes of all files, read to find one module: a file may be larger than its disk
SEARCH_LIMIT = 4 << 30  # bytes that are searched in one process for images outside of the sections for them
SLOW = 4 << 20  # bytes of images whose names are worth keeping
MEMORY_LIMIT = 1 << 30  # bytes of a file, read out of a process
_RESERVED_SHARED = (
    1024  # bytes that the system has of each block's shared memory, on sm_80 and newer; some counts have them
)
_MOST_THREADS = 1024  # of a block
_STAGE = "images"
_CHUNK = 1 << 22
_ENTRY = re.compile(rb"\.entry\s+([\w$%.]+)")
_TEXT_PTX = re.compile(rb"^\s*\.version\s+\d", re.MULTILINE)
_DELETED = " (deleted)"


class Mapped:
    """The device code that a process has mapped."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._files: dict[tuple[tuple[str, int], str], _File] = {}  # by device and inode, path
        self._triton = Cache(pid)
        self._lock = threading.Lock()
        self._searched = 0  # bytes
        self._allowance = _Allowance()
        self._stuck = False  # its files do not answer

    def images(self) -> Iterator[tuple[str, Image]]:
        """Each image with its file, as the process calls that; numbers of modules are unique in a file. Files stay open as long as
        there are images of them: the process may end meanwhile.

        Raises OSError where the process cannot be looked into.
        """
        with self._lock:
            self._allowance.left = READ_LIMIT
            modules: dict[str, int] = {}
            for file in self._refreshed():
                for images in file.modules:
                    number = modules[file.path] = modules.get(file.path, -1) + 1
                    with contextlib.suppress(ImageError):  # its file changed under our hands
                        held = [replace(i, module=number, stored=file.source.held(i)) for i in images]
                        yield from ((file.path, image) for image in held)
            self._files.clear()

    def with_ptx(self, data: bytes) -> bytes:
        """An image that the process loads; for a cubin its PTX, where its maker has kept it elsewhere: that text has the lines of the
        source, which what a cubin keeps itself has not."""
        if not data.startswith(b"\x7fELF"):
            return data
        try:
            (image,) = fatbin.images_of_bytes(data)
            if image.kind != "elf":
                return data
            ptx = self._patiently(self._triton.ptx_of, image.payload)
            return data if ptx is None else fatbin.pack(ptx)
        except (ImageError, ValueError, TimeoutError):
            return data

    def find(self, found: Found, target: Target) -> tuple[bytes | None, dict[str, str]]:
        """The PTX that `found` is to be instrumented by, as a fatbin, or None; and for each kernel (mangled) that it does not have
        the reason."""
        names = tuple(dict.fromkeys((*(kernel.name for kernel in found.kernels), *found.names)))
        try:
            return self._patiently(self._find, found, names, target)
        except (OSError, ImageError):  # it has ended, a file changed under our hands, or does not answer
            return None, dict.fromkeys(names, NOT_FOUND)

    def _patiently(self, function: Callable[..., T], *arguments: Any) -> T:
        """What `function` gives, on a thread that nobody waits for without end: a file system may be the process's own.

        Raises TimeoutError, from then on at once.
        """
        future: Future[T] = Future()

        def run() -> None:
            with self._lock:
                self._allowance.left = READ_LIMIT
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:
                    future.set_exception(error)
                finally:
                    for file in self._files.values():
                        file.source.close()

        if self._stuck:
            raise TimeoutError
        threading.Thread(target=run, name="gpubpf-files", daemon=True).start()
        try:
            return future.result(PATIENCE)
        except TimeoutError:
            self._stuck = True
            raise

    def _find(
        self, found: Found, names: Sequence[str], target: Target
    ) -> tuple[bytes | None, dict[str, str]]:
        files = [file for file in self._refreshed() if file.worth_a_look(names[0])]
        candidates = list(self._candidates(files, found, names, target))
        candidates = candidates or list(self._embedded(found, names, target))
        usable = _different([candidate.ptx for candidate in candidates if candidate.ptx is not None], found)
        without = [candidate.reason for candidate in candidates if candidate.ptx is None]
        if not usable:
            reason = (without or [fatbin.SASS_ONLY])[0]
            if reason == fatbin.SASS_ONLY:
                reason = _why(files, names[0], target)
            return None, dict.fromkeys(names, reason)
        if len(usable) > 1 or without:
            return None, dict.fromkeys(names, AMBIGUOUS)
        there = set(_names(usable[0]))
        reasons = {name: f"not in the PTX for {usable[0].arch}" for name in names if name not in there}
        return fatbin.pack(usable[0]), reasons

    def _candidates(
        self, files: Iterable[_File], found: Found, names: Sequence[str], target: Target
    ) -> Iterator[_Candidate]:
        for file in files:
            for number, images in enumerate(file.modules):
                running = _running(images, target)
                if running is not None and _fits(file.names(number, running), found, names):
                    yield from _candidate(images, running, found, target)
            file.searched()
        for images in self._triton.modules(names):
            running = _running(images, target)
            if running is not None and _fits(_names(running), found, names):
                yield from _candidate(images, running, found, target)

    def _embedded(self, found: Found, names: Sequence[str], target: Target) -> Iterator[_Candidate]:
        """Of what lies anywhere in a file: a program may hand the driver an image, or PTX text, out of an array."""
        for file in self._files.values():
            with contextlib.suppress(ImageError):
                if self._searched < SEARCH_LIMIT and file.source.size <= LARGE:
                    self._searched += file.source.size
                    if file.mentions(names[0]):
                        for images in fatbin.modules(tuple(fatbin.scan(file.source, 0, file.source.size))):
                            running = _running(images, target)
                            if running is not None and _fits(_names(running), found, names):
                                yield from _candidate(images, running, found, target)

    def _refreshed(self) -> list[_File]:
        """The files with device code that are mapped now. Raises OSError."""
        mapped: dict[tuple[tuple[str, int], str], list[target.Mapping]] = {}
        for mapping in target.mappings(self._pid):
            path = mapping.path
            if mapping.file[1] and path.startswith("/") and not path.startswith("/SYSV"):
                mapped.setdefault((mapping.file, path), []).append(mapping)
        for key in [key for key in self._files if key not in mapped]:
            self._files.pop(key).source.close()
        for key, mappings in mapped.items():
            known = self._files.get(key)
            if known is not None:
                known.source.mappings = mappings
            if known is not None and not (known.modules and known.source.changed()):
                continue
            if len(self._files) < MOST_FILES:
                self._files[key] = _read(self._pid, mappings, self._allowance)
        return [file for file in self._files.values() if file.modules]


# --- files ----------------------------------------------------------------------------------------------------


@dataclass
class _Allowance:
    """Bytes that may still be read."""

    left: int = READ_LIMIT

    def take(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise ImageError("its files have no end; look at them with ls -l")


class _Mapped:
    """A mapped file as a `Source`: opened when it is read, and again after `close`, if it is the same."""

    def __init__(self, pid: int, mappings: list[target.Mapping], allowance: _Allowance) -> None:
        self._pid = pid
        self._allowance = allowance
        self.mappings = mappings  # brought up to date by its owner
        self._file: int | None = None
        self._status: os.stat_result | None = None

    @property
    def identity(self) -> str:
        """Of its content; "" before it was opened."""
        s = self._status
        return "" if s is None else repr((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))

    @property
    def size(self) -> int:
        self._open()
        assert self._status is not None
        return self._status.st_size

    def read(self, offset: int, size: int) -> bytes:
        file = self._open()
        assert self._status is not None
        self._allowance.take(size)
        try:
            return OpenFile(file, self._status.st_size).read(offset, size)
        except OSError as error:
            raise ImageError(f"it cannot be read ({error.strerror}); is its disk there?") from None

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.close()

    def held(self, image: Image) -> bytes | fatbin.Part:
        """What is to be kept of an image's bytes for the time when the process has ended."""
        self._open()
        return image.stored

    def changed(self) -> bool:
        """Whether it is not what it was when it was read first."""
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
                raise ImageError("it has changed; start the program anew")
            self._file = file
        return self._file

    def _opened(self) -> int:
        first = self.mappings[0]
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
        raise ImageError("its file is gone or replaced; start the program anew")


class _Memory:
    """What a process has mapped of a file, as a `Source`; offsets are addresses."""

    size = 1 << 47

    def __init__(self, pid: int, mappings: list[target.Mapping]) -> None:
        self._pid = pid
        self.mappings = mappings
        self.identity = ""
        self._memory: target.Memory | None = None

    def read(self, offset: int, size: int) -> bytes:
        if not 0 <= size <= MEMORY_LIMIT:
            raise ImageError("it is larger than any image; start the program anew")
        try:
            if self._memory is None:
                self._memory = target.Memory(self._pid)
            return self._memory.read(offset, size)
        except OSError:
            raise ImageError("the process's memory cannot be read; is it yours, and running?") from None

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def held(self, image: Image) -> bytes | fatbin.Part:
        return image.stored.read() if isinstance(image.stored, fatbin.Part) else image.stored

    def changed(self) -> bool:
        return False

    def images(self) -> Iterator[Image]:
        """Of everything that looks like a fatbin."""
        number, left = 0, MEMORY_LIMIT
        spans: list[list[int]] = []
        for mapping in sorted(self.mappings, key=lambda m: m.start):
            if spans and spans[-1][1] == mapping.start:
                spans[-1][1] = mapping.end
            elif "r" in mapping.permissions:
                spans.append([mapping.start, mapping.end])
        for start, end in spans:
            end, left = min(end, start + left), left - min(left, end - start)
            with contextlib.suppress(ImageError):  # the rest of a file that was cut short
                for image in fatbin.scan(self, start, end):
                    yield fatbin.renumbered(image, number)
            number += fatbin.MOST_IMAGES


@dataclass
class _File:
    """A mapped file with device code: its images by module, and what is known of their kernels."""

    path: str
    source: _Mapped | _Memory
    modules: tuple[tuple[Image, ...], ...] = ()
    _names: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by module and place of the image in it
    _kept: int | None = None  # how many of `_names` are in the cache
    _searched: bool = False  # the names of all modules are known that the device can run

    @cached_property
    def stored(self) -> int:
        """Bytes of all images."""
        return sum(
            len(i.stored) if isinstance(i.stored, bytes) else i.stored.size for m in self.modules for i in m
        )

    @property
    def large(self) -> bool:
        return self.stored > LARGE

    def worth_a_look(self, name: str) -> bool:
        """Whether a kernel may be in it: not all of a large file is read for one that it does not know."""
        return not self.large or self._searched or self.mentions(name)

    def names(self, module: int, image: Image) -> tuple[str, ...]:
        """The kernels of an image; none of one that is damaged."""
        self._load_names()
        key = f"{module}.{self.modules[module].index(image)}"
        if key not in self._names:
            self._names[key] = tuple(_names(image))
        return self._names[key]

    def has(self, module: int, name: str) -> bool:
        """Whether any form of a module has this kernel."""
        return any(name in self.names(module, image) for image in self.modules[module])

    def mentions(self, name: str) -> bool:
        """Whether the name stands anywhere but in the images: whoever launches a kernel through the runtime registers it by name."""
        text = name.encode("utf-8", "surrogateescape")
        if isinstance(self.source, _Memory):
            return True
        taken = sorted(
            (i.stored.offset, i.stored.offset + i.stored.size)
            for m in self.modules
            for i in m
            if isinstance(i.stored, fatbin.Part)
        )
        at = 0
        with contextlib.suppress(ImageError):  # cut short under our hands
            for start, end in (*taken, (self.source.size, self.source.size)):
                while at < start:
                    size = min(_CHUNK, start - at)
                    if text in self.source.read(at, size):
                        return True
                    at += size - len(text) if at + size < start and size > len(text) else size
                at = max(at, end)
        return False

    def _load_names(self) -> None:
        if self._kept is not None:
            return
        self._kept = 0
        if self.stored > SLOW and self.source.identity:
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                data = cache.default().get(_STAGE, self._key())
                self._names = {k: tuple(map(str, v)) for k, v in json.loads(data or b"{}").items()}
            self._kept = len(self._names)

    def searched(self) -> None:
        """Its modules were gone through: their kernels are kept for the next process that maps it."""
        self._searched = True
        if self.stored > SLOW and self.source.identity and len(self._names) > (self._kept or 0):
            cache.default().put(_STAGE, self._key(), json.dumps(self._names).encode())
            self._kept = len(self._names)

    def _key(self) -> str:
        return cache.key(_version(), self.source.identity)


@functools.cache
def _version() -> str:
    """Return a key that changes with the code that finds the names of kernels in a file."""
    package = Path(__file__).resolve().parents[1]
    return cache.key_of_files(package / name for name in ("elf.py", "images/fatbin.py", "images/mapped.py"))


def _read(pid: int, mappings: list[target.Mapping], allowance: _Allowance) -> _File:
    """A mapped file; without modules where it has no device code."""
    path = mappings[0].path
    source = _Mapped(pid, mappings, allowance)
    with contextlib.closing(source), contextlib.suppress(ImageError):
        start = source.read(0, min(source.size, 4096))
        known = start.startswith(b"\x7fELF") or _TEXT_PTX.search(start) or _is_fatbin(start)
        return _File(path, source, fatbin.modules(fatbin.images_of(source)) if known else ())
    memory = _Memory(pid, mappings)
    with contextlib.closing(memory):
        return _File(path, memory, fatbin.modules(tuple(memory.images())))


def _is_fatbin(start: bytes) -> bool:
    return int.from_bytes(start[:4], "little") in (fatbin.FATBIN_MAGIC, fatbin.WRAPPER_MAGIC)


# --- which one it is --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Candidate:
    """A module that fits. `ptx`: what of it can be instrumented; None: nothing, for `reason`."""

    ptx: Image | None
    reason: str = ""


def _names(image: Image) -> Iterable[str]:
    """The kernels of an image (mangled); none of one that is damaged."""
    try:
        data = image.read()
        if image.kind == "elf":
            return tuple(fatbin.kernel_names(data))
        return tuple(dict.fromkeys(m.decode("ascii", "replace") for m in _ENTRY.findall(data)))
    except ImageError:
        return ()


def _why(files: Iterable[_File], name: str, target: Target) -> str:
    """Why there is no PTX of a kernel that no module fits: what the files say of one with its name."""
    reasons = []
    for file in files:
        for number, images in enumerate(file.modules):
            if file.has(number, name):
                chosen = choose(images, target)
                reasons += [chosen] if isinstance(chosen, str) else []
        file.searched()
    return next((reason for reason in reasons if reason != fatbin.SASS_ONLY), (*reasons, NOT_FOUND)[0])


def _running(images: Sequence[Image], target: Target) -> Image | None:
    """What the target's driver takes of a module; None: nothing suits it. The embedded device only knows PTX."""
    if target.device == "gpu" and (cubin := fatbin.cubin_for(images, target.cc)) is not None:
        return cubin
    chosen = choose(images, target)
    return chosen if isinstance(chosen, Image) else None


def _fits(there: Iterable[str], found: Found, names: Iterable[str]) -> bool:
    return set(there) == set(names) if found.whole else set(there) >= set(names)


def _candidate(images: Sequence[Image], running: Image, found: Found, target: Target) -> Iterator[_Candidate]:
    """What the module is good for, if it may be the one that `found` tells of, `running` being what the driver has of it."""
    chosen = choose(images, target)
    try:
        if running.kind == "elf" and not _agrees(running.read(), found.kernels):
            return
        there = _layouts(chosen, found.kernels) if isinstance(chosen, Image) else {}
    except (ImageError, PtxError) as error:
        yield _Candidate(None, str(error))
        return
    if isinstance(chosen, str):
        yield _Candidate(None, chosen)
        return
    for told in found.kernels:
        layout = there.get(told.name)
        if running is chosen and (layout is None or not layout.agrees(told, chosen)):
            return
        if layout is not None and _differs(told.parameters, layout.parameters):
            yield _Candidate(None, f"other parameters in the PTX for {chosen.arch}")
            return
    yield _Candidate(chosen)


def _agrees(cubin: bytes, kernels: Iterable[FoundKernel]) -> bool:
    """Whether the kernels may be those of this cubin. Raises ImageError."""
    there, shared = fatbin.kernels(cubin), fatbin.static_shared(cubin)
    for told in kernels:
        kernel, size = there.get(told.name), shared.get(told.name, 0)
        if kernel is None or _differs(told.parameters, kernel.parameters):
            return False
        if _differs(_told(told.registers), kernel.registers):
            return False
        if _differs(_told(told.max_threads), _bounded(kernel.max_threads)):
            return False
        if told.shared >= 0 and told.shared not in (size, size - _RESERVED_SHARED):
            return False
    return True


def _told(number: int) -> int | None:
    return number if number >= 0 else None


def _bounded(threads: int | None) -> int | None:
    """As a driver tells it: no device has larger blocks."""
    return None if threads is None else min(threads, _MOST_THREADS)


def _differs(told: object, known: object) -> bool:
    return told is not None and known is not None and told != known


@dataclass(frozen=True)
class _Layout:
    """What PTX says of a kernel. `shared`: bytes of static shared memory, least and most; `threads`: of a block, where it says."""

    parameters: tuple[tuple[int, int], ...]
    shared: tuple[int, int]
    threads: int | None

    def agrees(self, told: FoundKernel, image: Image) -> bool:
        """Whether what runs may have been compiled from it."""
        least, most = self.shared
        return not (
            _differs(told.parameters, self.parameters)
            or _differs(_told(told.ptx_version), image.sm)
            or (
                told.shared >= 0
                and not any(least <= told.shared - extra <= most for extra in (0, _RESERVED_SHARED))
            )
            or _differs(_told(told.max_threads), _bounded(self.threads))
        )


def _layouts(image: Image, kernels: Iterable[FoundKernel]) -> dict[str, _Layout]:
    """Of those of `kernels` that the PTX has. Raises PtxError, ImageError."""
    parsed = module.parse(image.text)
    graph = flow.CallGraph(parsed)
    found = {}
    for kernel in kernels:
        if (entry := parsed.entries.get(kernel.name)) is not None:
            variables = _shared(parsed, graph, kernel.name)
            least = sum(variable.size for variable in variables)
            most = sum(variable.size + variable.alignment for variable in variables)
            found[kernel.name] = _Layout(parameter_layout(entry)[0], (least, most), _threads(entry))
    return found


def _shared(parsed: module.Module, graph: flow.CallGraph, kernel: str) -> list[module.Variable]:
    """The variables in static shared memory that a kernel has."""
    found: dict[tuple[str, str], module.Variable] = {}
    for name in graph.reach(kernel):
        for statement in parsed.functions[name].body or ():
            if isinstance(statement, module.Variable):
                found[name, statement.name] = statement
        for variable in graph.of(name).variables:
            found["", variable] = parsed.variables[variable]
    return [v for v in found.values() if v.space == "shared" and "extern" not in v.linkage]


def _threads(entry: module.Function) -> int | None:
    """The most threads of a block, where the kernel says (PTX ISA 11.4)."""
    for name in ("reqntid", "maxntid"):
        for directive in entry.directives:
            if directive.name == name:
                total = 1
                for number in re.findall(r"\d+", directive.text.partition(name)[2])[:3]:
                    total *= int(number)
                return total
    return None


def _different(candidates: Sequence[Image], found: Found) -> list[Image]:
    """One of those that are the same PTX, as far as the launched kernels go: several files of a program may have the same instance
    of a template."""
    different = {(image.text, image.options): image for image in candidates}
    if len(different) > 1:
        different = {(_trimmed(image, found), image.options): image for image in different.values()}
    return list(different.values())


def _trimmed(image: Image, found: Found) -> str:
    try:
        parsed = module.parse(image.text)
        return module.render(trim(parsed, dict.fromkeys(kernel.name for kernel in found.kernels)))
    except (PtxError, ImageError):
        return image.text

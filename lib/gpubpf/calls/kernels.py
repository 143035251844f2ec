"""Which kernel a handle is that a launch was given: by what programs register, by symbols, by the code that registers (docs/amd.md).

    kernels = Kernels(api, calls.bpf)   # before calls.start()
    kernels.look(pid)                   # a process that is new: while it lives, files tell
    kernels.read(calls.host)            # now and then
    kernels.name(pid, handle)

A handle of a runtime's launch is an address in the program: HIP's of a variable, CUDA's of a function, both with the kernel's symbol.
One of a module's launch is the runtime's own, and known only to who saw it being given. Processes, their files and what they name are
untrusted.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import struct
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpubpf import names
from gpubpf.calls.api import Api
from gpubpf.errors import ImageError
from gpubpf.images import symbols
from gpubpf.images.fatbin import Elf, elf_of_file
from gpubpf.linux import libraries
from gpubpf.names import Name
from gpubpf.process import target

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.linux.host_programs import Host
    from gpubpf.program import BPF

REGISTERED, FOUND, SAME = 1, 2, 3  # KERNEL_* of include/gpubpf_kernels.h
_TELLING = {
    "hipsnoop": {
        "__hipRegisterFunction": REGISTERED,
        "hipModuleGetFunction": FOUND,
        "hipLibraryGetKernel": FOUND,
        "hipGetFuncBySymbol": SAME,
        "hipKernelGetFunction": SAME,
    },
    "cudasnoop": {
        "__cudaRegisterFunction": REGISTERED,
        "cuModuleGetFunction": FOUND,
        "cuLibraryGetKernel": FOUND,
        "cudaLibraryGetKernel": FOUND,
        "cuKernelGetFunction": SAME,
        "cudaGetFuncBySymbol": SAME,
        "cudaGetKernel": SAME,
        "__cudaGetKernel": SAME,
    },
}
_STRIDE, _PARTS = 223, 18  # bytes of a name in a record that is not its last: KERNEL_TEXT - 1; KERNEL_PARTS
_MOST_PROCESSES, _MOST_NAMES, _MOST_FILES = 4096, 1 << 18, 64
_MOST_REGISTRATIONS = 1 << 16  # places in a file's code
_LONGEST = 1 << 14  # bytes of a name
_LARGEST = 1 << 28  # bytes of code that are looked through
_MADE_UP = (OSError, ImageError, ValueError, OverflowError, struct.error)  # by files that are none
_NAME = re.compile(rb"[A-Za-z_$][\w.$]*\Z")
_DEVICE_CODE = (
    ".hip_fatbin",
    ".hipFatBinSegment",
    ".nv_fatbin",
    "__nv_relfatbin",
    ".nvFatBinSegment",
)  # sections
# What clang appends to, and nvcc puts before, names of static kernels that are linked on the device.
_LOCAL = re.compile(
    r"(?:\.(?:static|intern)\.|__(?:static|intern)__)[0-9a-f]{8,}\Z|\A__nv_static_\d+__\w*?_[0-9a-f]{8}_(?=_Z)"
)
_OBJECT, _FUNC = 1, 2  # of symbols
_EXEC = 2  # ET_EXEC
_STUB = re.compile(
    r"(\d+)__device_stub__(?=[A-Za-z_])"
)  # what compilers make of a kernel's name for the host
_HANDLE = re.compile(
    r"_ZZL?(\d+)(__device_stub_(_Z\w+))E8__handle\Z"
)  # where nvcc 13's host code keeps a handle
# The fifth argument, of how many threads a block may have: clang and nvcc pass -1. mov r8d, -1; or r8d, -1.
_NO_LIMIT = re.compile(rb"\x41\xb8\xff\xff\xff\xff|\x41\x83\xc8\xff", re.DOTALL)
_LEA = re.compile(rb"[\x48\x4c]\x8d[\x05\x0d\x15\x1d\x25\x2d\x35\x3d]", re.DOTALL)  # lea r64, [rip + x]
_IMMEDIATE = re.compile(rb"[\xb8-\xbf]", re.DOTALL)  # mov r32, x
_BEFORE, _AFTER = 96, 96  # bytes of code around it in which a call's arguments are made


class Kernels:
    """Names of kernels, by process and handle. Adds programs to those of `bpf`, whose text includes gpubpf_kernels.h; without one only
    files tell."""

    def __init__(self, api: Api, bpf: BPF | None = None) -> None:
        self._told: OrderedDict[int, dict[int, str | int]] = OrderedDict()
        self._parts: dict[tuple[int, int], bytes] = {}
        self._processes: OrderedDict[int, _Process] = OrderedDict()
        self._kept = 0
        if bpf is not None:
            telling = _TELLING[api.tool]
            for name, returns in (("kernel_told", False), ("kernel_given", True)):
                bpf.attach_uprobe(api.libraries, telling, fn_name=name, ret=returns, optional=True)

    def look(self, pid: int) -> None:
        """Takes note of what a process maps, as it may end before a name is asked for."""
        process = self._process(pid)
        before = process.program
        with contextlib.suppress(OSError):
            process.look()
        if None not in (before, process.program) and before != process.program:
            # It executes another program, or the number is another process's: what was told meant other kernels.
            self._kept -= len(self._told.pop(pid, {}))

    def read(self, host: Host) -> None:
        """Takes what programs told since the last time."""
        found = host.records("kernel_names")
        for pid in set(found["tgid"].tolist()):
            self.look(pid)
        for record in found:
            pid, handle = int(record["tgid"]), int(record["handle"])
            if record["kind"] == SAME:
                if handle != int(record["source"]):
                    self._keep(pid, handle, int(record["source"]))
                continue
            size, part = int(record["bytes"]), int(record["part"])
            text = record["text"].tobytes()[: max(size - 1, 0)]
            whole = self._parts.pop((pid, handle), b"") + text if part else text
            if size > _STRIDE and part < _PARTS - 1:
                self._parts[pid, handle] = whole
                continue
            if size > _STRIDE or not (
                size or part
            ):  # longer than that, or on a page that nobody had touched yet
                whole = self._process(pid).text(int(record["source"]))
            if whole:
                self._keep(pid, handle, whole.decode("utf-8", "replace"))
        if len(self._parts) > _MOST_PROCESSES:
            self._parts.clear()

    def lost(self, host: Host) -> int:
        """How many names found no room."""
        return int(host.items("kernel_lost")["value"].sum())

    def name(self, pid: int, handle: int) -> Name | None:
        """None for one that nobody told of."""
        found = self._mangled(pid, handle)
        return names.demangle(_LOCAL.sub("", found)) if found else None

    def _mangled(self, pid: int, handle: int, depth: int = 0) -> str | None:
        process = self._process(pid)
        told = self._told.get(pid, {}).get(handle)
        if told is None and (found := process.symbol(handle)) is not None:
            return found
        if told is None:
            told = self._by_family(pid, handle)
        if isinstance(told, int):
            return self._mangled(pid, told, depth + 1) if depth < 4 else None
        return told or process.search(handle)

    def _by_family(self, pid: int, handle: int) -> str | int | None:
        """What the process that it was forked from was told; of one that nobody knows any more, what all agree about."""
        parent = self._process(pid).parent
        for _ in range(16):
            if not parent:
                break
            if (found := self._told.get(parent, {}).get(handle)) is not None:
                return found
            parent = self._processes[parent].parent if parent in self._processes else 0
        if self._process(pid).alive:
            return None
        found_ = {known[handle] for known in self._told.values() if handle in known}
        return found_.pop() if len(found_) == 1 else None

    def _keep(self, pid: int, handle: int, told: str | int) -> None:
        self._told.setdefault(pid, {})
        if self._kept >= _MOST_NAMES and handle not in self._told[pid]:
            _, gone = self._told.popitem(last=False)
            self._kept -= len(gone)
            self._told.setdefault(pid, {})
        self._kept += handle not in self._told[pid]
        self._told[pid][handle] = told

    def _process(self, pid: int) -> _Process:
        if pid not in self._processes:
            self._processes[pid] = _Process(pid)
            if len(self._processes) > _MOST_PROCESSES:
                self._processes.popitem(last=False)
        self._processes.move_to_end(pid)
        return self._processes[pid]


@dataclass
class _Process:
    """What a process maps of files, as it was when one last looked."""

    pid: int
    parent: int = 0
    program: tuple[int, int] | None = None
    mapped: tuple[target.Mapping, ...] = ()
    files: dict[tuple[str, int], _File | None] = field(default_factory=dict)
    others: set[tuple[str, int]] = field(default_factory=set)  # files in which there is no device code
    found: dict[int, str | None] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        return os.path.exists(f"/proc/{self.pid}")

    def look(self) -> None:
        """Raises OSError where it has ended; what was seen before stays."""
        with open(f"/proc/{self.pid}/stat", "rb") as stat:
            self.parent = int(stat.read().rpartition(b")")[2].split()[1])
        mapped = tuple(m for m in target.mappings(self.pid) if m.file[1])
        if mapped and mapped != self.mapped:
            self.mapped = mapped
            self.found.clear()
        self.program = _identity(self.pid)
        for m in mapped:  # opened now, as the process may end
            if m.file not in self.files and m.file not in self.others:
                file = self._open(m)
                if file is not None and file.has_kernels:
                    self.files[m.file] = file
                else:
                    self.others.add(m.file)

    def text(self, address: int) -> bytes:
        """The string there."""
        with contextlib.suppress(OSError), target.Memory(self.pid) as memory:
            return memory.some(address, _LONGEST).partition(b"\0")[0]
        file, at = self._place(address)
        return file.text(at) if file else b""

    def symbol(self, address: int) -> str | None:
        """The kernel whose symbol is there."""
        if self.program is not None and _identity(self.pid) not in (None, self.program):  # exec
            with contextlib.suppress(OSError):
                self.look()
        if address not in self.found:
            self.found[address] = self._symbol(address)
        return self.found[address]

    def _symbol(self, address: int) -> str | None:
        file, at = self._place(address)
        if file is not None:
            return file.symbols.name(at)
        return self._by_variable(address)

    def search(self, address: int) -> str | None:
        """The kernel that the code registers under it."""
        file, at = self._place(address)
        return file.registrations.get(at) if file is not None else None

    def _place(self, address: int) -> tuple[_File | None, int]:
        """The file that is mapped there, and which of its addresses that is."""
        mapping = self._mapping(address)
        if mapping is None:
            with contextlib.suppress(OSError):
                self.look()
            mapping = self._mapping(address)
        if mapping is None or (file := self._file(mapping)) is None:
            return None, 0
        offset = address - mapping.start + mapping.offset
        return file, next((a + offset - o for o, a, n in file.loads if o <= offset < o + n), -1)

    def _mapping(self, address: int) -> target.Mapping | None:
        return next((m for m in self.mapped if m.start <= address < m.end), None)

    def _file(self, m: target.Mapping) -> _File | None:
        if m.file not in self.files:
            self.files[m.file] = self._open(m)
        return self.files[m.file]

    def _open(self, m: target.Mapping) -> _File | None:
        place = libraries.MappedCode(self.pid, m.start, m.end, m.offset, m.file[0], m.file[1], m.path)
        with contextlib.suppress(*_MADE_UP):
            opened = libraries.open_mapped(place)
            try:
                return _file(libraries.key(opened), opened)
            finally:
                os.close(opened)
        return None

    def _by_variable(self, handle: int) -> str | None:
        """nvcc's host code keeps the handle of each kernel that was launched in a variable of its own."""
        for file, base in self._variables():
            with contextlib.suppress(OSError), target.Memory(self.pid) as memory:
                for at, name in file.symbols.handles.items():
                    if memory.some(base + at, 8) == struct.pack("<Q", handle & (1 << 64) - 1):
                        return name
        return None

    def _variables(self) -> Iterable[tuple[_File, int]]:
        """Files with such variables, and how far from their addresses in the file they lie."""
        for library in target.libraries(self.mapped):
            file = self.files.get(library.mappings[0].file)
            if file is not None and file.has_kernels and file.symbols.handles and file.loads:
                offset, address, _ = min(file.loads)
                yield file, library.base - (address - offset)


def _identity(pid: int) -> tuple[int, int] | None:
    """Of the program that a process runs; None where it has ended."""
    with contextlib.suppress(OSError):
        state = os.stat(f"/proc/{pid}/exe")
        return state.st_dev, state.st_ino
    return None


_files: OrderedDict[libraries.Key, _File] = OrderedDict()


def _file(key: libraries.Key, opened: int) -> _File:
    """Raises OSError, ImageError."""
    if key not in _files:
        _files[key] = _File(os.dup(opened))
        if len(_files) > _MOST_FILES:
            _files.popitem(last=False)
    _files.move_to_end(key)
    return _files[key]


class _File:
    """A program or library. What is in it is read when it is first asked for. Raises OSError, ImageError."""

    def __init__(self, opened: int) -> None:
        self._opened = opened
        self._elf: Elf = elf_of_file(opened)
        self.loads = self._elf.loads

    def __del__(self) -> None:
        os.close(self._opened)

    @functools.cached_property
    def has_kernels(self) -> bool:
        """Whether there is device code in it."""
        with contextlib.suppress(*_MADE_UP):
            return any(section.name in _DEVICE_CODE for section in self._elf.sections)
        return False

    @functools.cached_property
    def symbols(self) -> _Symbols:
        with contextlib.suppress(*_MADE_UP):
            return _symbols(self._elf)
        return _no_symbols()

    @functools.cached_property
    def registrations(self) -> Mapping[int, str]:
        """Kernels by the address under which code registers them."""
        with contextlib.suppress(*_MADE_UP):
            return _registrations(self._elf, self._opened)
        return {}

    def text(self, address: int) -> bytes:
        for offset, start, size in self.loads:
            if start <= address < start + size:
                count = min(_LONGEST, start + size - address)
                with contextlib.suppress(*_MADE_UP):
                    return os.pread(self._opened, count, offset + address - start).partition(b"\0")[0]
        return b""


class _Symbols:
    """Functions and variables by address: `starts` is sorted."""

    def __init__(self, starts: np.ndarray[Any, Any], at: np.ndarray[Any, Any], text: bytes) -> None:
        self._starts, self._at, self._text = starts, at, text

    def name(self, address: int) -> str | None:
        """The kernel whose symbol is there: variables come before functions, mangled names before others."""
        index = int(self._starts.searchsorted(max(address, 0)))
        if address < 0 or index >= len(self._starts) or int(self._starts[index]) != address:
            return None
        return _kernel_of(self._string(int(self._at[index])))

    @functools.cached_property
    def handles(self) -> Mapping[int, str]:
        """Kernels by the address of the variable in which nvcc's host code keeps a handle."""
        found = {}
        if b"E8__handle\0" in self._text:
            for start, at in zip(self._starts.tolist(), self._at.tolist(), strict=True):
                match = _HANDLE.match(self._string(at))
                if match and len(match[1]) < 5:
                    found[start] = match[3][: int(match[1]) - len("__device_stub_")]
        return found

    def _string(self, at: int) -> str:
        end = self._text.find(b"\0", at, at + _LONGEST)
        return self._text[at : end if end >= 0 else at].decode("utf-8", "replace")


def _kernel_of(symbol: str) -> str:
    """The name of the kernel that a symbol of the host stands for."""
    return _STUB.sub(lambda m: str(int(m[1]) - len("__device_stub__")), symbol, count=1)


def _symbols(elf: Elf) -> _Symbols:
    import numpy as np

    for found, text in symbols.tables(elf, (_OBJECT, _FUNC)):
        found = found[np.lexsort((found["info"] & 15, found["value"]))]
        return _Symbols(np.ascontiguousarray(found["value"]), found["name"], text)
    return _no_symbols()


def _no_symbols() -> _Symbols:
    import numpy as np

    return _Symbols(np.empty(0, "<u8"), np.empty(0, "<u4"), b"")


def _registrations(elf: Elf, opened: int) -> Mapping[int, str]:
    """What code that compilers write passes to __hipRegisterFunction or __cudaRegisterFunction: between two calls around each place
    that makes the fifth argument -1 there are two addresses, of which one is that of a name."""
    found: dict[int, str] = {}
    ends = [address + size for _, address, size in elf.loads]
    places, left = _MOST_REGISTRATIONS, _LARGEST  # of all segments
    for offset, address, size in _code(elf):
        code = os.pread(opened, min(size, left), offset)
        left -= len(code)
        for match in itertools.islice(_NO_LIMIT.finditer(code), places):
            places -= 1
            start, end = max(0, match.start() - _BEFORE), min(len(code), match.end() + _AFTER)
            start = max((c for c in _calls(code, start, match.start(), size)), default=start)
            end = min((c - 5 for c in _calls(code, match.end(), end, size)), default=end)
            targets = _targets(code[start:end], address + start, elf.type == _EXEC)
            texts = {t: _name_at(elf, t) for t in targets}
            said = {text for text in texts.values() if text}
            if len(said) == 1:
                name = said.pop()
                for place, text in texts.items():
                    if not text and 0 < place < max(ends):
                        found.setdefault(place, name)
    return found


def _code(elf: Elf) -> list[tuple[int, int, int]]:
    """(offset, address, bytes) of segments with code."""
    table = elf.source.read(elf._program_headers, elf._segment_count * elf._SEGMENT.size)
    return [(h[2], h[3], h[5]) for h in elf._SEGMENT.iter_unpack(table) if h[0] == 1 and h[1] & 1]


def _calls(code: bytes, start: int, end: int, size: int) -> list[int]:
    """Where calls into the same segment end."""
    found = []
    for match in re.finditer(rb"\xe8", code[start:end]):
        at = start + match.end()
        if (
            at + 4 <= len(code)
            and 0 <= at + 4 + int.from_bytes(code[at : at + 4], "little", signed=True) < size
        ):
            found.append(at + 4)
    return found


def _targets(code: bytes, address: int, fixed: bool) -> list[int]:
    """Addresses that instructions put into registers."""
    found = []
    for match in _LEA.finditer(code):
        at = match.end()
        if at + 4 <= len(code):
            found.append(address + at + 4 + int.from_bytes(code[at : at + 4], "little", signed=True))
    for match in _IMMEDIATE.finditer(code) if fixed else ():
        at = match.end()
        if at + 4 <= len(code) and code[at : at + 4] != b"\xff\xff\xff\xff":
            found.append(int.from_bytes(code[at : at + 4], "little"))
    return found


def _name_at(elf: Elf, address: int) -> str | None:
    """The string there, where it can be a kernel's name."""
    for offset, start, size in elf.loads:
        if start <= address < start + size:
            data = elf.source.read(offset + address - start, min(_LONGEST, start + size - address))
            text = data.partition(b"\0")[0]
            return text.decode() if _NAME.match(text) and len(text) < len(data) else None
    return None


def registered(opened: int) -> tuple[str, ...]:
    """The kernels that the code of a program or library registers, mangled. Raises OSError, ImageError."""
    return tuple(dict.fromkeys(_file(libraries.key(opened), opened).registrations.values()))

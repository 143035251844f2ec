"""Find the name of the kernel that a handle stands for: from calls that register or look up kernels, from
symbols, and from code (docs/host-calls.md).

    kernels = KernelNames(api, calls.bpf)   # before calls.start()
    kernels.look(pid)                       # for each new process: record its files while it lives
    kernels.read(calls.host)                # periodically
    kernels.name(pid, handle)

The handle in a launch through the runtime is the address of a variable (HIP) or a function (CUDA) in the
program. Either has a symbol from which the kernel's name follows. The handle in a launch of a module's function
belongs to the runtime, so its name is known only from the call that returned the handle. Processes, their files
and the names in them are untrusted.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gpubpf import elf, names
from gpubpf.calls.api import Api
from gpubpf.elf import Elf
from gpubpf.errors import ImageError
from gpubpf.linux import libraries
from gpubpf.names import KernelName
from gpubpf.process import address_space, proc, scans
from gpubpf.process.patience import LOOK_WAIT, within
from gpubpf.record import MutableRecord, field

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.linux.host_programs import Host
    from gpubpf.program import BPF

# KERNEL_REGISTERED, KERNEL_FOUND, KERNEL_SAME of include/gpubpf_kernels.h.
REGISTERED, BY_NAME, BY_HANDLE = 1, 2, 3
_KINDS = {"registered": REGISTERED, "by_name": BY_NAME, "by_handle": BY_HANDLE}  # api.KERNEL_NAMING
_STRIDE, _PARTS = 223, 18  # bytes of a name in each record but the last: KERNEL_TEXT - 1; KERNEL_PARTS
_MOST_PROCESSES, _MOST_NAMES, _MOST_FILES = 4096, 1 << 18, 64
_MOST_REGISTRATIONS = 1 << 16  # maximum registrations in a file's code
_LONGEST = 1 << 14  # maximum bytes of a name
_LARGEST = 1 << 28  # maximum bytes of code to search
# Raised for files that are not valid ELF.
_INVALID = (OSError, ImageError, ValueError, OverflowError, struct.error)
_NAME = re.compile(rb"[A-Za-z_$][\w.$]*\Z")
# ELF sections of programs with device code.
_DEVICE_CODE = (".hip_fatbin", ".hipFatBinSegment", ".nv_fatbin", "__nv_relfatbin", ".nvFatBinSegment")
_STUB = re.compile(
    r"(?<![0-9])([0-9]{1,5})__device_stub__(?=[A-Za-z_])"
)  # in the name of a kernel's function on the host
# The variable in which the host code of nvcc 13 keeps a handle.
_HANDLE = re.compile(r"_ZZL?([0-9]{1,5})(__device_stub_(_Z\w+))E8__handle\Z")
# The fifth argument of a registration limits the threads of a block; clang and nvcc pass -1. mov r8d, -1; or r8d, -1.
_NO_LIMIT = re.compile(rb"\x41\xb8\xff\xff\xff\xff|\x41\x83\xc8\xff", re.DOTALL)
_LEA = re.compile(rb"[\x48\x4c]\x8d[\x05\x0d\x15\x1d\x25\x2d\x35\x3d]", re.DOTALL)  # lea r64, [rip + x]
_IMMEDIATE = re.compile(rb"[\xb8-\xbf]", re.DOTALL)  # mov r32, x
_BEFORE, _AFTER = 96, 96  # bytes of code around it to search for the other arguments of the call


class KernelNames:
    """The names of kernels by process and handle.

    Adds programs to those of `bpf`, whose text must include gpubpf_kernels.h. Without `bpf`, names come only from
    files.
    """

    def __init__(self, api: Api, bpf: BPF | None = None) -> None:
        # Process → handle → a mangled name, or another handle of the same kernel.
        self._known: dict[int, dict[int, str | int]] = {}
        self._costs: Counter[int] = Counter()  # by process, see `_cost`
        self._users: dict[int, int] = {}  # by process
        self._parts: dict[tuple[int, int], bytes] = {}
        self._processes: OrderedDict[int, _Process] = OrderedDict()
        self._cost = 0  # the sum of _costs
        if bpf is not None:
            kinds = {f.symbol: _KINDS[f.kernel_name] for f in api.functions if f.kernel_name}
            for name, returns in (("kernel_told", False), ("kernel_given", True)):
                bpf.attach_uprobe(api.libraries, kinds, fn_name=name, ret=returns, optional=True)

    def look(self, pid: int) -> None:
        """Record which files a process maps, since it may end before `name` is called."""
        process = self._process(pid)
        before = process.program
        with contextlib.suppress(OSError):
            process.look()
        if None not in (before, process.program) and before != process.program:
            # The process executed another program, or its PID was reused: the known handles are obsolete.
            self._forget(pid)

    def read(self, host: Host) -> None:
        """Read the names that the programs recorded since the last call."""
        found = host.records("kernel_names")
        for pid in set(found["tgid"].tolist()):
            self.look(pid)
        for record in found:
            pid, handle = int(record["tgid"]), int(record["handle"])
            if record["kind"] == BY_HANDLE:
                if handle != int(record["source"]):
                    self._keep(pid, handle, int(record["source"]))
                continue
            size, part = int(record["bytes"]), int(record["part"])
            text = record["text"].tobytes()[: max(size - 1, 0)]
            whole = self._parts.pop((pid, handle), b"") + text if part else text
            if size > _STRIDE and part < _PARTS - 1:
                self._parts[pid, handle] = whole
                continue
            # The name is longer than all parts together, or on a page that the process had not touched yet.
            if size > _STRIDE or not (size or part):
                whole = self._process(pid).text(int(record["source"]))
            if whole:
                self._keep(pid, handle, whole.decode("utf-8", "replace"))
        if len(self._parts) > _MOST_PROCESSES:
            self._parts.clear()

    def lost(self, host: Host) -> int:
        """Return how many names did not fit into the ring buffer."""
        return int(host.items("kernel_lost")["value"].sum())

    def name(self, pid: int, handle: int) -> KernelName | None:
        """Return the name of the kernel, or None if it is unknown."""
        found = self._mangled(pid, handle)
        return names.demangle(found) if found else None

    def _mangled(self, pid: int, handle: int, depth: int = 0) -> str | None:
        process = self._process(pid)
        name = self._known.get(pid, {}).get(handle)
        if name is None and (found := process.symbol(handle)) is not None:
            return found
        if name is None:
            name = self._from_parents(pid, handle)
        if isinstance(name, int):
            return self._mangled(pid, name, depth + 1) if depth < 4 else None
        return name or process.search(handle)

    def _from_parents(self, pid: int, handle: int) -> str | int | None:
        """Return the name of the handle in an ancestor process.

        If no ancestor knows the handle and the process has ended, return the name that all processes with this
        handle agree on.
        """
        parent = self._process(pid).parent
        for _ in range(16):
            if not parent:
                break
            if (found := self._known.get(parent, {}).get(handle)) is not None:
                return found
            parent = self._processes[parent].parent if parent in self._processes else 0
        if self._process(pid).alive:
            return None
        found_ = {known[handle] for known in self._known.values() if handle in known}
        return found_.pop() if len(found_) == 1 else None

    def _keep(self, pid: int, handle: int, name: str | int) -> None:
        """Keep a name. If there are too many, forget those of the user with the most names."""
        if self._cost >= _MOST_NAMES:
            self._make_room()
        before = self._known.get(pid, {}).get(handle)
        cost = _cost(name) - (0 if before is None else _cost(before))
        if pid not in self._users:
            self._users[pid] = scans.user_of(pid)
        self._cost += cost
        self._costs[pid] += cost
        self._known.setdefault(pid, {})[handle] = name

    def _make_room(self) -> None:
        """Forget the names of the user with the most names, in the processes with the most first, until there is room for some."""
        of_users: Counter[int] = Counter()
        for pid, cost in self._costs.items():
            of_users[self._users[pid]] += cost
        [(user, _)] = of_users.most_common(1)
        for pid in sorted(self._costs, key=self._costs.__getitem__, reverse=True):
            if self._users[pid] == user and self._cost > _MOST_NAMES - _MOST_NAMES // 16:
                self._forget(pid)

    def _forget(self, pid: int) -> None:
        """Forget the names of a process."""
        self._known.pop(pid, None)
        self._users.pop(pid, None)
        self._cost -= self._costs.pop(pid, 0)

    def _process(self, pid: int) -> _Process:
        if pid not in self._processes:
            self._processes[pid] = _Process(pid)
            if len(self._processes) > _MOST_PROCESSES:
                self._processes.popitem(last=False)
        self._processes.move_to_end(pid)
        return self._processes[pid]


def _cost(name: str | int) -> int:
    """Return what a name counts: 1, and more if it is long."""
    return 1 + (len(name) >> 8 if isinstance(name, str) else 0)


class _Process(MutableRecord):
    """A process and the files that it maps, as of the last `look`."""

    pid: int
    parent: int = 0
    program: tuple[int, int, int] | None = None
    mapped: tuple[address_space.Mapping, ...] = ()
    files: dict[tuple[str, int], _ElfFile | None] = field(default_factory=dict)
    others: set[tuple[str, int]] = field(default_factory=set)  # files without device code
    found: dict[int, str | None] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        return proc.exists(self.pid)

    def look(self) -> None:
        """Read the process's mappings and open new files. Raise OSError if it has ended; known files are kept."""
        self.parent = int(proc.stat(self.pid)[1])
        all_mapped = within(LOOK_WAIT, self.pid, lambda: address_space.mappings(self.pid))
        mapped = tuple(m for m in all_mapped if m.file[1])
        if mapped and mapped != self.mapped:
            self.mapped = mapped
            self.found.clear()
        self.program = _program(self.pid)
        for m in mapped:  # open the files now, since the process may end
            if m.file not in self.files and m.file not in self.others:
                file = self._open(m)
                if file is not None and file.has_kernels:
                    self.files[m.file] = file
                else:
                    self.others.add(m.file)

    def text(self, address: int) -> bytes:
        """Return the string at an address of the process."""
        with contextlib.suppress(OSError), address_space.Memory(self.pid) as memory:
            return memory.some(address, _LONGEST).partition(b"\0")[0]
        file, at = self._place(address)
        return file.text(at) if file else b""

    def symbol(self, address: int) -> str | None:
        """Return the kernel whose symbol has this address."""
        if self.program is not None and _program(self.pid) not in (None, self.program):  # exec
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
        """Return the kernel that the program's code registers under this address."""
        file, at = self._place(address)
        return file.registrations.get(at) if file is not None else None

    def _place(self, address: int) -> tuple[_ElfFile | None, int]:
        """Return the file that is mapped at an address, and the corresponding address in the file."""
        mapping = self._mapping(address)
        if mapping is None:
            with contextlib.suppress(OSError):
                self.look()
            mapping = self._mapping(address)
        if mapping is None or (file := self._file(mapping)) is None:
            return None, 0
        offset = address - mapping.start + mapping.offset
        return file, -1 if (at := elf.address_of(file.loads, offset)) is None else at

    def _mapping(self, address: int) -> address_space.Mapping | None:
        return next((m for m in self.mapped if m.start <= address < m.end), None)

    def _file(self, m: address_space.Mapping) -> _ElfFile | None:
        if m.file not in self.files:
            self.files[m.file] = self._open(m)
        return self.files[m.file]

    def _open(self, m: address_space.Mapping) -> _ElfFile | None:
        place = libraries.MappedCode(self.pid, m.start, m.end, m.offset, m.file[0], m.file[1], m.path)
        with contextlib.suppress(*_INVALID):
            opened = libraries.open_mapped(place)
            try:
                return _file(libraries.key(opened), opened)
            finally:
                os.close(opened)
        return None

    def _by_variable(self, handle: int) -> str | None:
        """Return the kernel whose variable holds the handle: nvcc's host code has such a variable for each
        kernel that it launches.
        """
        for file, base in self._variables():
            with contextlib.suppress(OSError), address_space.Memory(self.pid) as memory:
                for at, name in file.symbols.handles.items():
                    if memory.some(base + at, 8) == struct.pack("<Q", handle & (1 << 64) - 1):
                        return name
        return None

    def _variables(self) -> Iterable[tuple[_ElfFile, int]]:
        """Yield the files with such variables, each with its load bias."""
        for library in address_space.libraries(self.mapped):
            file = self.files.get(library.mappings[0].file)
            if file is not None and file.has_kernels and file.symbols.handles and file.loads:
                first = min(file.loads, key=lambda segment: segment.offset)
                yield file, library.base - (first.address - first.offset)


def _program(pid: int) -> tuple[int, int, int] | None:
    """Return the file of the program that a process runs, or None if it has ended."""
    with contextlib.suppress(OSError):
        return proc.program(pid)
    return None


_files: OrderedDict[libraries.Key, _ElfFile] = OrderedDict()


def _file(key: libraries.Key, opened: int) -> _ElfFile:
    """Return the cached _ElfFile of an open file. Raise OSError or ImageError."""
    if key not in _files:
        _files[key] = _ElfFile(os.dup(opened))
        if len(_files) > _MOST_FILES:
            _files.popitem(last=False)
    _files.move_to_end(key)
    return _files[key]


class _ElfFile:
    """A program or library, parsed lazily. Raise OSError or ImageError."""

    def __init__(self, opened: int) -> None:
        self._opened = opened
        self._elf = elf.of_file(opened)
        self.loads = self._elf.loads

    def __del__(self) -> None:
        os.close(self._opened)

    @functools.cached_property
    def has_kernels(self) -> bool:
        """Whether the file has device code."""
        with contextlib.suppress(*_INVALID):
            return any(section.name in _DEVICE_CODE for section in self._elf.sections)
        return False

    @functools.cached_property
    def symbols(self) -> _Symbols:
        with contextlib.suppress(*_INVALID):
            return _symbols(self._elf)
        return _no_symbols()

    @functools.cached_property
    def registrations(self) -> Mapping[int, str]:
        """Address under which code registers a kernel → the kernel."""
        with contextlib.suppress(*_INVALID):
            return _registrations(self._elf, self._opened)
        return {}

    def text(self, address: int) -> bytes:
        """Return the string at an address of the file."""
        with contextlib.suppress(*_INVALID):
            return _text(self._elf, address).partition(b"\0")[0]
        return b""


class _Symbols:
    """Functions and variables by address. `starts` is sorted."""

    def __init__(self, starts: np.ndarray[Any, Any], at: np.ndarray[Any, Any], text: bytes) -> None:
        self._starts, self._at, self._text = starts, at, text

    def name(self, address: int) -> str | None:
        """Return the kernel whose symbol has this address. Variables take precedence over functions."""
        index = int(self._starts.searchsorted(max(address, 0)))
        if address < 0 or index >= len(self._starts) or int(self._starts[index]) != address:
            return None
        return _kernel_of(self._string(int(self._at[index])))

    @functools.cached_property
    def handles(self) -> Mapping[int, str]:
        """Address of the variable in which nvcc's host code keeps a kernel's handle → the kernel."""
        found = {}
        if b"E8__handle\0" in self._text:
            for start, at in zip(self._starts.tolist(), self._at.tolist(), strict=True):
                match = _HANDLE.match(self._string(at))
                if match:
                    found[start] = match[3][: int(match[1]) - len("__device_stub_")]
        return found

    def _string(self, at: int) -> str:
        end = self._text.find(b"\0", at, at + _LONGEST)
        return self._text[at : end if end >= 0 else at].decode("utf-8", "replace")


def _kernel_of(symbol: str) -> str:
    """Return the name of the kernel that a symbol of the host stands for."""
    return _STUB.sub(lambda m: str(int(m[1]) - len("__device_stub__")), symbol, count=1)


def _symbols(file: Elf) -> _Symbols:
    import numpy as np

    for found, text in file.symbol_tables((elf.STT_OBJECT, elf.STT_FUNC)):
        found = found[np.lexsort((found["info"] & 15, found["value"]))]
        return _Symbols(np.ascontiguousarray(found["value"]), found["name"], text)
    return _no_symbols()


def _no_symbols() -> _Symbols:
    import numpy as np

    return _Symbols(np.empty(0, "<u8"), np.empty(0, "<u4"), b"")


def _registrations(file: Elf, opened: int) -> Mapping[int, str]:
    """Return the kernels that compiled code passes to __hipRegisterFunction or __cudaRegisterFunction, by
    handle.

    Around each instruction that sets the fifth argument to -1, the code between two calls loads two addresses:
    the handle and the name.
    """
    found: dict[int, str] = {}
    ends = [segment.address + segment.size for segment in file.loads]
    places, left = _MOST_REGISTRATIONS, _LARGEST  # of all segments together
    for _, _, offset, address, size in (segment for segment in file.loads if segment.executable):
        code = os.pread(opened, min(size, left), offset)
        left -= len(code)
        for match in itertools.islice(_NO_LIMIT.finditer(code), places):
            places -= 1
            start, end = max(0, match.start() - _BEFORE), min(len(code), match.end() + _AFTER)
            start = max((c for c in _calls(code, start, match.start(), size)), default=start)
            end = min((c - 5 for c in _calls(code, match.end(), end, size)), default=end)
            targets = _targets(code[start:end], address + start, file.type == elf.ET_EXEC)
            texts = {t: _name_at(file, t) for t in targets}
            said = {text for text in texts.values() if text}
            if len(said) == 1:
                name = said.pop()
                for place, text in texts.items():
                    if not text and 0 < place < max(ends):
                        found.setdefault(place, name)
    return found


def _calls(code: bytes, start: int, end: int, size: int) -> list[int]:
    """Return the end of each call instruction whose target is in the same segment."""
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
    """Return the addresses that instructions load into registers."""
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


def _name_at(file: Elf, address: int) -> str | None:
    """Return the string at an address if it can be a kernel's name; else None. Raises ImageError."""
    data = _text(file, address)
    text = data.partition(b"\0")[0]
    return text.decode() if _NAME.match(text) and len(text) < len(data) else None


def _text(file: Elf, address: int) -> bytes:
    """Return up to _LONGEST bytes of a file from an address on; b"" outside its segments. Raises ImageError."""
    for segment in file.loads:
        if 0 <= (inside := address - segment.address) < segment.size:
            return file.source.read(segment.offset + inside, min(_LONGEST, segment.size - inside))
    return b""


def registered(opened: int) -> tuple[str, ...]:
    """Return the mangled names of the kernels that a program or library registers. Raise OSError or
    ImageError.
    """
    return tuple(dict.fromkeys(_file(libraries.key(opened), opened).registrations.values()))

"""The address space of a running process: its mappings, its memory, and its libraries.

Libraries are read through the process, not by path. That also works for deleted files, in containers, and for other users. All data
from the process is untrusted.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpubpf import elf
from gpubpf.errors import out_of_files
from gpubpf.process import proc, target_files

_LINE = re.compile(r"([0-9a-f]{1,16})-([0-9a-f]{1,16}) (\S{4}) ([0-9a-f]{1,16}) (\S+) ([0-9]{1,20})\b\s*(.*)")
MOST_EXPORTS = 1 << 14  # of a driver library, which has a thousand
_CACHED_EXPORTS = 32  # files
MOST_MAPPINGS = 1 << 17  # kept: twice the default of vm.max_map_count
AGENT = re.compile(r".*libgpubpf-agent(-hsa)?\.so[^/]*$")  # the path of the mapped file


@dataclass(frozen=True)
class Mapping:
    """A line of /proc/PID/maps. `file`: (device, inode)."""

    start: int
    end: int
    permissions: str
    offset: int
    file: tuple[str, int]
    path: str

    @property
    def code(self) -> bool:
        return "x" in self.permissions


@dataclass(frozen=True)
class Library:
    """An ELF file that is mapped into the process."""

    base: int
    mappings: tuple[Mapping, ...]

    @property
    def path(self) -> str:
        return self.mappings[0].path.removesuffix(" (deleted)")

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def code(self) -> tuple[tuple[int, int], ...]:
        return tuple((m.start, m.end) for m in self.mappings if m.code)


def mappings(
    pid: int, of: re.Pattern[str] | None = None, most: int = proc.LARGEST_LIST
) -> tuple[Mapping, ...]:
    """Return all mappings of a process, or those of files whose paths match `of`.

    `most`: the limit of the whole list, in bytes. Raises OSError; proc.TooLarge beyond the limits.
    """
    return parse(proc.lines(pid, "maps", most), of)


def parse(lines: Iterable[bytes], of: re.Pattern[str] | None = None) -> tuple[Mapping, ...]:
    """Return the mappings in lines like those of /proc/PID/maps: all, or those of files whose paths match `of`.

    In a path, a line feed is `\\012`, and bytes that are not UTF-8 are U+FFFD. Raises proc.TooLarge.
    """
    found: list[Mapping] = []
    for raw in lines:
        line = raw.decode("utf-8", "replace")
        if of is not None and not of.match(line, max(line.find("/"), 0)):
            continue
        if m := _LINE.match(line):
            if len(found) == MOST_MAPPINGS:
                raise proc.TooLarge("maps")
            found.append(_mapping(m))
    return tuple(found)


def mapping_at(pid: int, address: int) -> Mapping | None:
    """Return the mapping that contains an address. Raises OSError."""
    try:
        at = proc.mapped_at(pid, address)
    except OSError as error:
        if error.errno not in (errno.ENOTTY, errno.ENAMETOOLONG):
            raise
        for line in proc.lines(pid, "maps"):
            m = _LINE.match(line.decode("utf-8", "replace"))
            if m and int(m[1], 16) <= address < int(m[2], 16):
                return _mapping(m)
        return None
    if at is None:
        return None
    device = f"{at.device[0]:02x}:{at.device[1]:02x}"
    path = at.path.decode("utf-8", "replace").replace("\n", "\\012")
    return Mapping(at.start, at.end, at.permissions, at.offset, (device, at.inode), path)


def is_return_probe(pid: int, address: int) -> bool:
    """Return whether functions with a return probe (uretprobe) return to this address of a process: the start of its [uprobes]."""
    if address % mmap.PAGESIZE:
        return False
    with contextlib.suppress(OSError):
        found = mapping_at(pid, address)
        return found is not None and found.start == address and found.path == "[uprobes]"
    return False


def _mapping(m: re.Match[str]) -> Mapping:
    return Mapping(int(m[1], 16), int(m[2], 16), m[3], int(m[4], 16), (m[5], int(m[6])), m[7])


def libraries(mapped: Iterable[Mapping]) -> tuple[Library, ...]:
    """Group the mappings of each file that is mapped from offset 0. A file that is mapped several times gives several libraries."""
    found: list[list[Mapping]] = []
    for m in mapped:
        if not m.file[1]:
            continue
        if m.offset == 0 and not (found and found[-1][0].file == m.file and found[-1][-1].offset == 0):
            found.append([m])
        elif found and found[-1][0].file == m.file:
            found[-1].append(m)
    return tuple(Library(ms[0].start, tuple(ms)) for ms in found)


def executed_another_program(pid: int) -> bool:
    """Return whether a process that had the agent has executed another program. Then the agent is no longer mapped."""
    others = False
    try:
        for line in proc.lines(pid, "maps"):
            if parse([line], AGENT):
                return False
            others = True
    except OSError:
        return False
    return others


class Memory:
    """/proc/PID/mem. Raises OSError for unmapped addresses, and if the process has ended."""

    def __init__(self, pid: int) -> None:
        self.file = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self.file)

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def some(self, address: int, size: int) -> bytes:
        """Return up to `size` bytes; fewer, or none, if they are not all mapped."""
        try:
            return os.pread(self.file, size, address)
        except (OSError, OverflowError):
            return b""

    def read(self, address: int, size: int) -> bytes:
        data = self.some(address, size)
        if len(data) != size:
            raise OSError(errno.EFAULT, "not mapped")
        return data

    def write(self, address: int, data: bytes) -> None:
        """Write to memory, even if it is read-only for the process itself."""
        if os.pwrite(self.file, data, address) != len(data):
            raise OSError(errno.EFAULT, "not mapped")


@dataclass(frozen=True)
class Identity:
    """Identifies a file and its contents: no one can change or replace the file and keep all of these values."""

    device: int
    inode: int
    size: int
    changed_ns: int


_local: dict[str, bool] = {}


def _is_local(device: str) -> bool:
    """Return whether a device from /proc/PID/maps is a file system that is also mounted here and is served by the kernel itself."""
    if not _local.get(device):
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/mountinfo").read_text("utf-8", "replace").split("\n"):
                before, _, after = line.partition(" - ")
                if ":" not in (number := "".join(before.split(" ")[2:3])):
                    continue
                major, _, minor = number.partition(":")
                name = f"{int(major):02x}:{int(minor):02x}"
                _local[name] = _local.get(name, True) and not after.startswith("fuse")
    return _local.get(device, False)


@contextlib.contextmanager
def library_file(pid: int, library: Library) -> Iterator[tuple[Identity | None, elf.AddressSpace, int]]:
    """Open a library for reading. Yield its identity, the source to read from, and its base address in the source.

    The source is the library's file if it can be opened, at base 0. Otherwise it is the memory of the process, and the identity is
    None: the process may have changed the library there, so the data is valid for this process only. A file in a FUSE file system is
    not opened, because the program that serves it may never answer. Raises OSError if no more files can be opened.
    """
    first = library.mappings[0]
    ways = (
        partial(target_files.open_mapped, pid, first.start, first.end),
        partial(target_files.open_path, pid, first.path),
    )
    for opened in ways if _is_local(first.file[0]) else ():
        try:
            file = opened()
        except OSError as error:
            if out_of_files(error):
                raise
            continue
        try:
            state = os.fstat(file)
            loaded = elf.LoadedFile(file)
            if state.st_ino == first.file[1] and loaded.segments:
                yield Identity(state.st_dev, state.st_ino, state.st_size, state.st_ctime_ns), loaded, 0
                return
        finally:
            os.close(file)
    with Memory(pid) as memory:
        yield None, memory, library.base


_exported: OrderedDict[Identity, frozenset[str]] = OrderedDict()


def exports(pid: int, library: Library) -> frozenset[str]:
    """Return the names of the functions that a driver library exports; none if it has more than MOST_EXPORTS. Raises OSError.

    The names are cached for other processes that map the same file."""
    with library_file(pid, library) as (identity, source, base):
        found = _exported.get(identity) if identity is not None else None
        if found is None:
            found = frozenset(elf.exports(source, base, MOST_EXPORTS))
        if identity is not None:
            _exported[identity] = found
            if len(_exported) > _CACHED_EXPORTS:
                _exported.pop(next(iter(_exported)), None)
        return found

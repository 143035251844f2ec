"""The address space of a running process: its mappings, its memory, and its libraries.

Libraries are read through the process, not by path. That also works for deleted files, in containers, and for other users. All data
from the process is untrusted.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import mmap
import os
import re
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import partial

from gpubpf import elf
from gpubpf.errors import SessionError, out_of_files
from gpubpf.process import fuse, limits, mounts, proc, scans, target_files, user_waits
from gpubpf.process.patience import SHORT_WAIT, within
from gpubpf.record import Record

_LINE = re.compile(r"([0-9a-f]{1,16})-([0-9a-f]{1,16}) (\S{4}) ([0-9a-f]{1,16}) (\S+) ([0-9]{1,20})\b\s*(.*)")
_CACHED_EXPORTS = 32  # files
_SHORT_LIST = 4 << 20  # bytes of a list of mappings that is read while other processes wait
AGENT = re.compile(r".*libgpubpf-agent(-hsa)?\.so[^/]*$")  # the path of the mapped file


class Mapping(Record):
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


class Library(Record):
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
    pid: int, of: re.Pattern[str] | None = None, most: int = limits.LARGEST_LIST
) -> tuple[Mapping, ...]:
    """Return all mappings of a process, or only those of files whose paths match `of`.

    most: the limit of the whole list, in bytes.

    Raises OSError, and proc.TooLarge if a limit is exceeded.
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
            if len(found) == limits.MAPPINGS:
                raise proc.TooLarge("maps")
            found.append(_mapping(m))
    return tuple(found)


def mapping_at(pid: int, address: int, most: int = limits.LARGEST_LIST) -> Mapping | None:
    """Return the mapping that contains an address. `most`: as for `mappings`, before Linux 6.11. Raises OSError."""
    try:
        at = proc.mapped_at(pid, address)
    except OSError as error:
        if error.errno not in (errno.ENOTTY, errno.ENAMETOOLONG):
            raise
        for line in proc.lines(pid, "maps", most):
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
    """Return whether functions with a return probe (uretprobe) return to this address of a process: the start of its [uprobes].

    False if the process keeps the tool waiting."""
    if address % mmap.PAGESIZE:
        return False
    with contextlib.suppress(OSError):
        found = within(SHORT_WAIT, pid, lambda: mapping_at(pid, address, _SHORT_LIST))
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
    """Return whether a process that had the agent has executed another program: then the agent is no longer mapped.

    Return False if the process's mappings cannot be read in time."""

    def look() -> bool:
        others = False
        for line in proc.lines(pid, "maps", _SHORT_LIST):
            if parse([line], AGENT):
                return False
            others = True
        return others

    try:
        return within(SHORT_WAIT, pid, look)
    except OSError:
        return False


class Unreadable(SessionError, OSError):
    """The memory of a process cannot be read or written without the risk of waiting for ever."""

    def __init__(self, pid: int) -> None:
        super().__init__(
            f"pid {pid} maps a file where the tool has to read its memory, and that file's system (FUSE?) may never answer;"
            " name another process"
        )
        self.errno = errno.EDEADLK


class Memory:
    """The memory of a process. Raises OSError for unmapped addresses, and if the process has ended.

    A process can map a file whose pages come from a program (FUSE). A read of such a page waits for that program, and meanwhile the
    reader cannot even be killed. So the methods access only anonymous memory, files in memory, and files of file systems that the
    kernel itself serves. For all other memory they raise Unreadable. (Pages that are missing under userfaultfd(2) do no harm: this way
    of reading reports an error for them, unlike process_vm_readv(2).)

    A process can still exchange a mapping between the check and the access. `user_waits` ends such a wait at the end of the tool.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._user = scans.user_of(pid)
        self.file = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
        self._mappings: list[Mapping] = []  # mappings that were looked up

    def close(self) -> None:
        os.close(self.file)

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def some(self, address: int, size: int) -> bytes:
        """Return up to `size` bytes; fewer, or none, if they are not all mapped."""
        size = self._accessible(address, size)
        try:
            with self._waiting(address):
                return os.pread(self.file, size, address) if size else b""
        except (OSError, OverflowError):
            return b""

    def read(self, address: int, size: int) -> bytes:
        data = self.some(address, size)
        if len(data) != size:
            raise OSError(errno.EFAULT, "not mapped")
        return data

    def write(self, address: int, data: bytes) -> None:
        """Write to memory, even if it is read-only for the process itself."""
        whole = self._accessible(address, len(data)) == len(data)
        with self._waiting(address):
            if not whole or os.pwrite(self.file, data, address) != len(data):
                raise OSError(errno.EFAULT, "not mapped")

    def _waiting(self, address: int) -> contextlib.AbstractContextManager[None]:
        """Record that the thread may wait for what the process maps at an address by then."""

        def devices() -> list[str]:
            found = mapping_at(self._pid, address)
            return [] if found is None else [found.file[0]]

        return user_waits.waiting(self._user, self._pid, devices)

    def _accessible(self, address: int, size: int) -> int:
        """Return how many of these bytes, from the first on, are mapped and can be accessed without waiting.

        Raises Unreadable if the first byte is mapped, but accessing it may make the tool wait."""
        end = address
        while end < address + size and (found := self._mapping(end)) is not None:
            if found.file[1] and not is_local(found.file[0], self._pid):
                if end == address:
                    raise Unreadable(self._pid)
                break
            end = found.end
        return min(end - address, size)

    def _mapping(self, address: int) -> Mapping | None:
        """Return the mapping that contains an address. Return None if nothing is mapped there, or if the process has ended.

        Raises OSError if no more files can be opened."""
        for known in self._mappings:
            if known.start <= address < known.end:
                return known
        try:
            found = mapping_at(self._pid, address)
        except OSError as error:
            if out_of_files(error):
                raise
            return None
        if found is not None:
            self._mappings.append(found)
        return found


class Identity(Record):
    """Identifies a file and its contents: no one can change or replace the file and keep all of these values."""

    device: int
    inode: int
    size: int
    changed_ns: int

    @property
    def settled(self) -> bool:
        """Whether the last change is long ago. A file that was written just now can be written again without another time."""
        return self.changed_ns < time.time_ns() - _SETTLED_NS


_SETTLED_NS = 2 * 10**9
_REREAD = 1.0  # seconds; a device's number can be used again for another file system
_own_mounts: tuple[float, dict[str, bool]] = (-math.inf, {})


def is_local(device: str, pid: int) -> bool:
    """Return whether a device from /proc/PID/maps is a file system that the kernel itself serves.

    Return False for a file system that neither the tool nor the process sees mounted, except that of memory files and of the root
    directory. (In a chroot, no list of mounts has the latter.) An overlay of the process alone may have layers from FUSE, which cannot
    be found out. So it is local only while nobody but root has a FUSE file system."""
    global _own_mounts
    if time.monotonic() > _own_mounts[0] + _REREAD:
        root = _name(os.stat("/").st_dev)
        own = {name: not kind.startswith(mounts.SERVED) for name, kind in mounts.types(os.getpid()).items()}
        _own_mounts = time.monotonic(), {root: True} | own | {_memory_files(): True}
    if (local := _own_mounts[1].get(device)) is not None:
        return local
    return _is_local_kind(mounts.types(pid).get(device, mounts.SERVED[0]))


def _is_local_kind(kind: str) -> bool:
    """Return whether the kernel itself serves a file system of this type that the process alone sees mounted."""
    if kind == "overlay":
        try:
            return not fuse.foreign()  # after the overlay was seen: a layer must be mounted before
        except OSError:
            return False
    return not kind.startswith(mounts.SERVED)


def on_local_mount(descriptor: int, pid: int) -> bool:
    """Return whether an open file, such as one opened with O_PATH, is in a file system that the kernel itself serves.

    pid: a process that may see the file system mounted if the tool does not. Return False if neither does. Raises OSError.
    """
    mount = re.search(rb"^mnt_id:\s*(\d+)$", proc.read(os.getpid(), f"fdinfo/{descriptor}"), re.MULTILINE)
    for process in (os.getpid(), pid):
        for line in proc.read(process, "mountinfo").splitlines():
            before, _, after = line.partition(b" - ")
            if mount and before.split(b" ", 1)[0] == mount[1]:
                kind = after.decode("utf-8", "replace").partition(" ")[0]
                return not kind.startswith(mounts.SERVED) if process == os.getpid() else _is_local_kind(kind)
    return False


@functools.cache
def _memory_files() -> str:
    """Return the device of files from memfd_create and of shared anonymous memory."""
    file = os.memfd_create("device", os.MFD_CLOEXEC)
    try:
        return _name(os.fstat(file).st_dev)
    finally:
        os.close(file)


def _name(device: int) -> str:
    """Return a device as in /proc/PID/maps."""
    return f"{os.major(device):02x}:{os.minor(device):02x}"


@contextlib.contextmanager
def library_file(pid: int, library: Library) -> Iterator[tuple[Identity | None, elf.AddressSpace, int]]:
    """Open a library for reading. Yield its identity, the source to read from, and its base address in the source.

    The source is the library's file if it can be opened, at base 0. Otherwise the source is the memory of the process, and the
    identity is None: the process may have changed its memory, so the data is valid for this process only. A file in a FUSE file system
    is not opened, because the program that serves the file system may never answer. Raises OSError if no more files can be opened.
    """
    first = library.mappings[0]
    ways = (
        partial(target_files.open_mapped, pid, first.start, first.end),
        partial(target_files.open_path, pid, first.path),
    )
    for opened in ways if is_local(first.file[0], pid) else ():
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
    """Return the names of the functions that a driver library exports; none if it has more than limits.EXPORTS. Raises OSError.

    The names are cached for other processes that map the same file."""
    with library_file(pid, library) as (identity, source, base):
        found = _exported.get(identity) if identity is not None else None
        if found is None:
            found = frozenset(elf.exports(source, base, limits.EXPORTS))
        if identity is not None:
            _exported[identity] = found
            if len(_exported) > _CACHED_EXPORTS:
                _exported.pop(next(iter(_exported)), None)
        return found

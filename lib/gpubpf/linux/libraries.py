"""Find the files of a library: in the loader's cache, in running processes, and in processes that load one later.

    names = LibraryNames("libamdhip64.so.[567]")
    for file, mapped in running(names).items(): …   # files that processes map, in any namespace
    mappings = Mappings()                           # files that any process maps from now on
    for m in mappings.read([names]): …

Names, paths and files come from other users' processes and are untrusted. A file is opened only if the kernel itself serves its file
system, because a program that serves it (FUSE) may never answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fnmatch
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path

from gpubpf import processor
from gpubpf.errors import UsageError, out_of_files
from gpubpf.kernel import bpf_syscall, libc
from gpubpf.process import address_space, proc, scans, target_files
from gpubpf.process.patience import LOOK_WAIT, Unanswered, within
from gpubpf.process.scans import ScanBudget
from gpubpf.record import Record

_CACHE = Path("/etc/ld.so.cache")
_DIRECTORIES = (
    *(processor.LIBRARIES, "/usr/lib64", "/usr/lib", "/usr/local/lib", "/usr/lib/wsl/lib"),
    *("/usr/local/cuda/lib64", "/usr/local/cuda/compat", "/usr/local/nvidia/lib64", "/run/opengl-driver/lib"),
    *("/opt/rocm/lib", "/opt/rocm/lib64"),
)
_OVERLAY = 0x794C7630  # OVERLAYFS_SUPER_MAGIC
_SOFTWARE, _DUMMY = 1, 9  # PERF_TYPE_SOFTWARE, PERF_COUNT_SW_DUMMY
_FLAGS = 1 << 8 | 1 << 14 | 1 << 23  # mmap, watermark, mmap2
_PAGES = 16  # size of each CPU's buffer, enough for some hundred records
_HEAD, _TAIL = 1024, 1032  # in struct perf_event_mmap_page
_LOST, _MMAP2 = 2, 10  # PERF_RECORD_*


class LibraryNames:
    """A pattern for the file names of a library.

    `libamdhip64.so` matches any version; `libamdhip64.so.[567]` has a glob for the version. Both also match file names in Python
    wheels, with a hash (`libamdhip64-1a2b3c4d.so.5.7`) or without a version, and files in memory (memfd_create). A path matches one
    file. Raises UsageError.
    """

    def __init__(self, *patterns: str) -> None:
        self.patterns = patterns
        self.paths = tuple(os.path.realpath(p) for p in patterns if "/" in p)
        parts = []
        for pattern in patterns:
            if "/" in pattern:
                continue
            stem, so, version = pattern.partition(".so")
            if not so or not stem or (version and not version.startswith(".")):
                raise UsageError(
                    f"{pattern!r} does not name a library; use a name such as libcuda.so, or a path"
                )
            exact = fnmatch.translate(version).removesuffix(r"\Z").removesuffix(r"\z") if version else ""
            wanted = rf"(?:{exact}(?:\.[\w.]+)?)?" if version else r"(?:\.[\w.]+)?"
            parts.append(rf"{re.escape(stem)}(?:-[0-9a-f]{{6,}})?\.so{wanted}")
        self._name = re.compile(rf"(?:{'|'.join(parts)})\Z") if parts else None
        self.hints = tuple({os.fsencode(os.path.basename(p).partition(".so")[0]) for p in patterns})

    def match(self, path: str) -> bool:
        path = path.removesuffix(" (deleted)")
        return path in self.paths or (
            self._name is not None
            and self._name.match(os.path.basename(path).removeprefix("memfd:")) is not None
        )

    def __str__(self) -> str:
        return " or ".join(self.patterns)


class MappedCode(Record):
    """A mapping of a library's code in a process. `device`: as in /proc/PID/maps. `offset`: in the file."""

    pid: int
    start: int
    end: int
    offset: int
    device: str
    inode: int
    path: str


class Key(Record):
    """Identifies a file as the kernel does for uprobes, which it attaches to an inode.

    A file of a container image appears in several overlay file systems, but is one file. For such a file, `device` is 0, and the
    underlying inode is identified only by its number, size and times.
    """

    device: int
    inode: int
    size: int = 0
    changed_ns: int = 0
    modified_ns: int = 0


def files(names: LibraryNames, also: Iterable[Path] = ()) -> list[str]:
    """Return the paths of the matching files that the dynamic linker finds, each once. `also`: more directories to search.

    Raises OSError if no more files can be opened."""
    found: list[str] = [path for path in names.paths if os.path.exists(path)]
    with _unreadable_skipped():
        data = _CACHE.read_bytes()
        found += (p for m in re.findall(rb"/[^\0]+\.so[^\0/]*", data) if names.match(p := os.fsdecode(m)))
    for directory in (*_DIRECTORIES, *map(str, (*sorted(Path("/opt").glob("rocm-*/lib*")), *also))):
        with _unreadable_skipped():
            found += (f"{directory}/{entry}" for entry in os.listdir(directory) if names.match(entry))
    return list(dict.fromkeys(map(os.path.realpath, found)))


@contextlib.contextmanager
def _unreadable_skipped() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if out_of_files(error):
            raise


def running(
    names: LibraryNames,
    unsearched: Callable[[str], None] = lambda who: None,
    budget: ScanBudget | None = None,
) -> dict[tuple[str, int], list[MappedCode]]:
    """Return the mappings of matching libraries' code in running processes, by the file's (device, inode).

    unsearched: called with the subject of a notice ("process 12 is") for each process whose list of mappings is too large or does not
        arrive, and for each user whose scan time is used up.
    budget: the users' scan time.
    """
    found: dict[tuple[str, int], list[MappedCode]] = {}
    budget = ScanBudget() if budget is None else budget
    exhausted = set[int]()
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        try:
            if budget.exhausted(user := scans.user_of(pid)):
                if user not in exhausted:
                    unsearched(f"some processes of user {user} are")
                exhausted.add(user)
                continue

            def look(pid: int = pid, user: int = user) -> list[MappedCode]:
                with budget.scan(user):
                    return list(_mapped(pid, names))

            for m in within(LOOK_WAIT, pid, look):
                found.setdefault((m.device, m.inode), []).append(m)
        except Unanswered:
            budget.spend(user, LOOK_WAIT)
            unsearched(f"process {pid} is")
        except proc.TooLarge:
            unsearched(f"process {pid} is")
        except OSError:
            continue
    return found


def mapped(pid: int, names: LibraryNames) -> list[MappedCode]:
    """Return the mappings of matching libraries' code in one process. Raises OSError."""
    return within(LOOK_WAIT, pid, lambda: list(_mapped(pid, names)))


def _mapped(pid: int, names: LibraryNames) -> Iterator[MappedCode]:
    hinted = (line for line in proc.lines(pid, "maps") if any(hint in line for hint in names.hints))
    for m in address_space.parse(hinted):
        if m.code and names.match(m.path):
            yield MappedCode(pid, m.start, m.end, m.offset, m.file[0], m.file[1], m.path)


def open_mapped(m: MappedCode) -> int:
    """Open the mapped file. Return its descriptor. Raises OSError; FileNotFoundError if the process has ended."""
    proc.check(m.pid)
    if not address_space.is_local(m.device, m.pid):
        raise OSError(errno.EACCES, "it may be in a FUSE file system")
    try:
        return target_files.open_mapped(m.pid, m.start, m.end)
    except FileNotFoundError:  # the end address of the mapping has changed
        file = target_files.open_path(m.pid, m.path)
    if os.fstat(file).st_ino != m.inode:
        os.close(file)
        raise OSError(errno.ESTALE, "it has been replaced")
    return file


def open_here(m: MappedCode) -> int:
    """Open the file of a process that has ended, by its path in this process, if it is the same file. Raises OSError."""
    if not address_space.is_local(m.device, os.getpid()):
        raise OSError(errno.EACCES, "it may be in a FUSE file system")
    file = target_files.open_path(os.getpid(), m.path)
    state = os.fstat(file)
    if (state.st_ino, f"{os.major(state.st_dev):02x}:{os.minor(state.st_dev):02x}") != (m.inode, m.device):
        os.close(file)
        raise OSError(errno.ESTALE, "it is another file")
    return file


def key(file: int) -> Key:
    """Return the key of an open file."""
    state = os.fstat(file)
    buffer = ctypes.create_string_buffer(256)
    if libc.library.fstatfs(file, buffer) == 0 and int.from_bytes(buffer.raw[:8], "little") == _OVERLAY:
        return Key(0, state.st_ino, state.st_size, state.st_ctime_ns, state.st_mtime_ns)
    return Key(state.st_dev, state.st_ino)


class Mappings:
    """Reports code that any process on the machine maps from now on, from the kernel's PERF_RECORD_MMAP2 records.

    Raises OSError without the capabilities. `lost`: records were dropped, so scan all processes.
    """

    def __init__(self) -> None:
        self._files: list[int] = []
        self._areas: list[mmap.mmap] = []
        self.lost = False
        try:
            for cpu in bpf_syscall.online_cpus():
                file = _open(cpu)
                self._files.append(file)
                self._areas.append(mmap.mmap(file, (1 + _PAGES) * mmap.PAGESIZE))
        except BaseException:
            self.close()
            raise

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors. One of them becomes readable when there is something to read."""
        return tuple(self._files)

    def close(self) -> None:
        for area in self._areas:
            area.close()
        for file in self._files:
            os.close(file)
        self._areas.clear()
        self._files.clear()

    def read(self, names: Iterable[LibraryNames]) -> list[MappedCode]:
        """Return the new mappings of matching libraries."""
        wanted = tuple(names)
        hints = {hint for n in wanted for hint in n.hints}
        found: list[MappedCode] = []
        for area in self._areas:
            records = self._records(self._take(area), hints)
            found += (m for m in records if any(n.match(m.path) for n in wanted))
        return found

    @staticmethod
    def _take(area: mmap.mmap) -> bytes:
        head, tail = struct.unpack_from("<QQ", area, _HEAD)
        size = _PAGES * mmap.PAGESIZE
        first, last = tail % size, head % size
        base = mmap.PAGESIZE
        if head == tail:
            return b""
        if first < last:
            data = area[base + first : base + last]
        else:
            data = area[base + first : base + size] + area[base : base + last]
        struct.pack_into("<Q", area, _TAIL, head)
        return data

    def _records(self, data: bytes, hints: Set[bytes]) -> Iterator[MappedCode]:
        at = 0
        while at + 8 <= len(data):
            kind, _, size = struct.unpack_from("<IHH", data, at)
            if kind == _LOST:
                self.lost = True
            elif kind == _MMAP2 and size >= 72 and any(hint in data[at + 72 : at + size] for hint in hints):
                pid, _, start, length, offset, major, minor, inode = struct.unpack_from(
                    "<IIQQQIIQ", data, at + 8
                )
                name = data[at + 72 : at + size].partition(b"\0")[0]
                device = f"{major:02x}:{minor:02x}"
                yield MappedCode(pid, start, start + length, offset, device, inode, os.fsdecode(name))
            at += max(size, 8)


def _open(cpu: int) -> int:
    attributes = struct.pack("<IIQQQQQII", _SOFTWARE, 112, _DUMMY, 1, 0, 0, _FLAGS, 1, 0).ljust(112, b"\0")
    buffer = ctypes.create_string_buffer(attributes, 112)
    return libc.system_call("perf_event_open", ctypes.addressof(buffer), -1, cpu, -1, 8)  # closed on exec

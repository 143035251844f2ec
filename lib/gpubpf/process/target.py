"""A running process: its memory and mappings, the functions of its libraries, and the reasons why it cannot be traced.

Libraries are read through the process, not by their paths. That also works for deleted files, in containers, and for other users.
All data from the process is untrusted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpubpf import elf
from gpubpf.errors import SessionError
from gpubpf.process import privileges, target_files
from gpubpf.process.ptrace import ThreadEnded, TraceRefused
from gpubpf.process.users import User

_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) (\S+) (\d+)\s*(.*)")
AGENT = re.compile(r".*libgpubpf-agent\.so[^/]*$")  # path of the mapped file
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD, include/linux/sched.h
_STRICT_SECCOMP = 1


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


def mappings(pid: int, of: re.Pattern[str] | None = None) -> tuple[Mapping, ...]:
    """Return all mappings of a process, or those of files whose paths match `of`. Raises OSError."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
        if of is not None and not of.match(line, max(line.find("/"), 0)):
            continue
        if m := _LINE.match(line):
            found.append(Mapping(int(m[1], 16), int(m[2], 16), m[3], int(m[4], 16), (m[5], int(m[6])), m[7]))
    return tuple(found)


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
    """Return whether a process that had the agent has executed another program, so that the agent is no longer mapped."""
    try:
        mapped = mappings(pid)
    except OSError:
        return False
    return bool(mapped) and not any(AGENT.match(m.path) for m in mapped)


class Memory:
    """/proc/PID/mem. Raises OSError for addresses that are not mapped, and when the process has ended."""

    def __init__(self, pid: int) -> None:
        self.file = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self.file)

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def some(self, address: int, size: int) -> bytes:
        """Return up to `size` bytes; fewer, or none, if not all of them are mapped."""
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
    """Identifies a file with its contents: nobody can change or replace the file and keep all of these values."""

    device: int
    inode: int
    size: int
    changed_ns: int


_local: dict[str, bool] = {}


def _is_local(device: str) -> bool:
    """Return whether a device, as in /proc/PID/maps, is a file system that is also mounted here and that the kernel itself serves."""
    if not _local.get(device):
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
                before, _, after = line.partition(" - ")
                major, _, minor = before.split()[2].partition(":")
                name = f"{int(major):02x}:{int(minor):02x}"
                _local[name] = _local.get(name, True) and not after.startswith("fuse")
    return _local.get(device, False)


@contextlib.contextmanager
def library_file(pid: int, library: Library) -> Iterator[tuple[Identity | None, elf.AddressSpace, int]]:
    """Open a library for reading: yield its identity, what to read it from, and its base address there.

    This is the library's file if it can be opened, at base 0. Otherwise it is the memory of the process, and the identity is None:
    the process may have changed the library there, so what is read holds for this process only. A file in a FUSE file system is
    not opened, because the program that serves it may never answer.
    """
    first = library.mappings[0]
    ways = (
        partial(target_files.open_mapped, pid, first.start, first.end),
        partial(target_files.open_path, pid, first.path),
    )
    for opened in ways if _is_local(first.file[0]) else ():
        try:
            file = opened()
        except OSError:
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


_exported: dict[Identity, frozenset[str]] = {}


def exports(pid: int, library: Library) -> frozenset[str]:
    """Return the names of the functions that a library exports, cached for all processes that map the same file. Raises OSError."""
    with library_file(pid, library) as (identity, source, base):
        if identity is None:
            return frozenset(elf.exports(source, base))
        if identity not in _exported:
            _exported[identity] = frozenset(elf.exports(source, base))
        return _exported[identity]


# --- the process's state, and reasons why it cannot be traced ---


class RefusedForNow(SessionError):
    """The kernel refused to trace a process, and may not refuse in a moment: another tool may trace one of its threads."""


class AlreadyTraced(RefusedForNow):
    """Another process traces it: a debugger, or for some milliseconds another tool of this project."""


class ProcessEnded(SessionError):
    """The process has ended, or has executed another program."""


def status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status; empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return {}
    return {name: rest.strip() for name, _, rest in (line.partition(":") for line in text.splitlines())}


def check_traceable(pid: int) -> None:
    """Raise SessionError if it is known, without touching the process, that it cannot be traced."""
    known = status(pid)
    if not known:
        raise SessionError(f"there is no process {pid}; run ps to list the processes")
    who = f"pid {pid} ({known.get('Name', '')})"
    leader = int(known.get("Tgid", pid))
    if leader != pid:
        raise SessionError(f"{pid} is a thread of process {leader}; use -p {leader}")
    if pid == os.getpid():
        raise SessionError(f"pid {pid} is this tool; name the program to measure")
    state = known.get("State", "?")[0]
    if state in "ZX" and int(known.get("Threads", 1)) > 1:
        raise SessionError(
            f"{who}: its main thread has exited, cannot attach; start the program with the tool instead"
        )
    if state in "ZX":
        raise SessionError(f"{who} has ended and is a zombie; name a running process")
    if _flags(pid) & _KERNEL_THREAD:
        raise SessionError(f"{who} is a kernel thread; name a program")
    if (tracer := int(known.get("TracerPid", 0))) != 0:
        name = status(tracer).get("Name", "?")
        raise AlreadyTraced(f"{who} is already traced by {name} (pid {tracer}); stop that first")
    if state == "T":
        raise SessionError(f"{who} is stopped; continue it first: kill -CONT {pid}")
    if known.get("Seccomp") == str(_STRICT_SECCOMP):
        raise SessionError(
            f"{who} is in strict seccomp mode, which allows almost no system call; start it without that mode"
        )
    if "shstk" in known.get("x86_Thread_features", ""):
        raise SessionError(
            f"{who} uses a shadow stack, cannot attach; start it with GLIBC_TUNABLES=glibc.cpu.x86_shstk=off"
        )
    with contextlib.suppress(OSError), open(f"/proc/{pid}/exe", "rb") as file:
        head = file.read(20)
        if head[:4] == b"\x7fELF" and (head[4] != 2 or head[18:20] != b"\x3e\0"):
            raise SessionError(
                f"{who} is not a 64-bit x86 program, which CUDA requires here; name another process"
            )


@contextlib.contextmanager
def refusals(pid: int) -> Iterator[None]:
    """Turn errors of tracing into SessionError with a message for the user."""
    try:
        yield
    except ThreadEnded:
        raise refusal(pid, errno.ESRCH) from None
    except TraceRefused as error:
        raise refusal(pid, error.errno) from None
    except OSError as error:
        raise refusal(pid, error.errno or errno.ESRCH) from None


def refusal(pid: int, code: int) -> SessionError:
    """Return the error to raise when the kernel has refused to trace `pid` with error number `code`."""
    known = status(pid)
    if not known or code == errno.ESRCH or known.get("State", "Z")[0] in "ZX":
        return ProcessEnded(f"pid {pid} ended during attach; name a running process")
    try:
        check_traceable(pid)  # another tracer may have come, or the process has ended
    except SessionError as error:
        return error
    who = f"pid {pid} ({known.get('Name', '')})"
    if code == errno.EIO:
        return SessionError(f"{who} is exiting; name another process")
    mine, theirs = os.geteuid(), {int(uid) for uid in known.get("Uid", "").split()}
    yama = _number("/proc/sys/kernel/yama/ptrace_scope")
    capable = privileges.SYS_PTRACE in privileges.effective()
    if yama == 3:
        return SessionError(
            f"{who} cannot be traced: the kernel forbids all tracing (kernel.yama.ptrace_scope is 3);"
            " start the program with the tool instead"
        )
    if not capable and theirs != {mine}:
        return SessionError(f"{who} belongs to another user; use sudo")
    if not capable and yama:
        return SessionError(
            f"{who} cannot be traced without root (kernel.yama.ptrace_scope is {yama}); use sudo"
        )
    if not capable:
        return SessionError(f"{who} has privileges that you lack, or is not dumpable; use sudo")
    if _other_namespace(pid):
        return SessionError(
            f"{who} is in a user namespace in which this tool has no privileges; run the tool on the host"
        )
    # Another tool traces a thread for some milliseconds as it attaches. It may have left since.
    kind = RefusedForNow if code == errno.EPERM else SessionError
    return kind(
        f"{who} cannot be traced ({os.strerror(code)});"
        " check the log of the security module, or start the program with the tool"
    )


def user(pid: int) -> User:
    """Return the effective user of a process, without name, home and shell."""
    known = status(pid)
    uid, gid = (int(known.get(name, "0 0").split()[1]) for name in ("Uid", "Gid"))
    groups = tuple(int(g) for g in known.get("Groups", "").split())
    return User(str(uid), uid, gid, groups, "/", "")


def _flags(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[6])
    except (OSError, IndexError, ValueError):
        return 0


def _number(path: str) -> int:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return 0


def _other_namespace(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/user") != os.readlink("/proc/self/ns/user")
    except OSError:
        return True

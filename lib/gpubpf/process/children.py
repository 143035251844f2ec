"""Start children that read untrusted data: assemblers, and Python processes of gpubpf.

    done = children.run([ptxas, source], directory, Limits(memory=1 << 30, file=1 << 28, seconds=60))
    done.status, done.text

    subprocess.Popen(children.python("from gpubpf import names; names.serve()"), env=children.environment())

A child gets only the environment variables that it needs, because the environment of root may contain secrets. Its limits bound its
memory, CPU time and files. It prints at most LONGEST_TEXT, writes no core file, and ends with the tool.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gpubpf.kernel import directories, privileges
from gpubpf.process import target_files
from gpubpf.process.users import User
from gpubpf.record import Record

LONGEST_TEXT = 16 << 20  # bytes that a child prints; the rest is dropped
FEW_ITEMS = 64  # for fewer items, starting copies of the process takes longer than it saves
MOST_COPIES = 16
_PASSED = ("PATH", "TMPDIR", "LANG")
_PREFIX = "gpubpf-child-"  # prefix of the children's temporary directories; nothing else has it
_ABANDONED = 60.0  # seconds until a directory that nobody has locked belongs to no tool
_MOST_ENTRIES = 1 << 16  # entries of the temporary directory to search for abandoned directories

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Limits(Record):
    """What a child may use.

    memory: bytes of address space.
    file: bytes of each file that it writes.
    seconds: CPU time.
    """

    memory: int
    file: int
    seconds: int

    def apply(self) -> None:
        """Limit this process, and the processes that it starts."""
        for what, most in (
            (resource.RLIMIT_AS, self.memory),
            (resource.RLIMIT_FSIZE, self.file),
            (resource.RLIMIT_CPU, self.seconds),
            (resource.RLIMIT_CORE, 0),
        ):
            _, hard = resource.getrlimit(what)
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(what, (most, most))


def half_of_memory() -> int:
    """Return half of the machine's memory, at least 2 GiB, in bytes."""
    return max(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2, 2 << 30)


def environment(*others: str) -> dict[str, str]:
    """Return the environment of a child: a few of the tool's variables, and those of `others` that are set."""
    return {name: os.environ[name] for name in (*_PASSED, *others) if name in os.environ}


def python(program: str, *arguments: str) -> list[str]:
    """Return a command that runs a Python program with the modules of this process, and no others.

    Neither variables such as PYTHONPATH nor files in the home directory or in the working directory add modules.
    """
    places = [place for place in sys.path if os.path.isabs(place)]
    start = f"import sys; sys.path[:] = {places!r}; {program}"
    return [sys.executable, "-I", "-c", start, *arguments]


def spread(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
    """Yield the result of `work` for each item, in order. Copies of this process share the work: one per CPU, none for few items.

    Copies are started only from the main thread: several other threads might do so at once.

    work: a function without side effects. Its result and its exceptions can be pickled. Exceptions are raised here.
    """
    processes = min(len(os.sched_getaffinity(0)), MOST_COPIES)
    if threading.current_thread() is not threading.main_thread() or processes < 2 or len(items) < FEW_ITEMS:
        yield from map(work, items)
        return
    import multiprocessing  # here, because it takes 20 ms

    with multiprocessing.get_context("fork").Pool(processes, _begin_copy, (os.getpid(), work, items)) as pool:
        yield from pool.imap(_work_of_copy, range(len(items)), chunksize=4)


_of_copy: tuple[Callable[[Any], Any], Sequence[Any]]  # in a copy of the tool: its work and its items


def _begin_copy(tool: int, work: Callable[[Any], Any], items: Sequence[Any]) -> None:
    global _of_copy
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tool ends its copies
    privileges.end_with_parent(tool)
    _of_copy = work, items


def _work_of_copy(number: int) -> Any:
    work, items = _of_copy
    return work(items[number])


class Done(Record):
    """How a child ended. status: exit status, as in subprocess. text: what the child printed, at most LONGEST_TEXT bytes."""

    status: int
    text: str


def run(command: Sequence[str], directory: Path, limits: Limits, timeout: float, niceness: int = 0) -> Done:
    """Run a program in `directory`, where it also makes its temporary files. The program inherits the privileges of this thread.

    timeout: seconds until the program is killed.
    niceness: added to the niceness of this process.

    Raises OSError, and subprocess.TimeoutExpired.
    """
    import tempfile  # imported here because the import is slow

    tool = os.getpid()

    def prepare() -> None:
        privileges.end_with_parent(tool)
        os.nice(niceness)
        limits.apply()

    with tempfile.TemporaryFile(dir=directory) as printed:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            env=environment() | {"TMPDIR": str(directory)},
            cwd=directory,
            timeout=timeout,
            preexec_fn=prepare,
        )
        text = os.pread(printed.fileno(), LONGEST_TEXT, 0).decode("utf-8", "replace")
    return Done(done.returncode, text)


def result(path: Path, most: int) -> bytes:
    """Return the file that a child has made. Raises OSError, also if it is not a regular file or has more than `most` bytes."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(file, "rb") as made:
        state = os.fstat(file)
        if not stat.S_ISREG(state.st_mode) or state.st_size > most:
            raise OSError(errno.EINVAL, "not a regular file of acceptable size", str(path))
        return made.read(most)


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
    """Make a directory for one child. If the tool is killed, a later one removes it (`remove_abandoned`)."""
    import tempfile  # imported here because the import is slow

    place = directories.temporary()
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=place, ignore_cleanup_errors=True) as name:
        lock = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(lock)


def remove_abandoned() -> None:
    """Remove the directories of tools that were killed: those of this user and, for root, of unused users."""
    for entry in itertools.islice(os.scandir(directories.temporary()), _MOST_ENTRIES):
        if not entry.name.startswith(_PREFIX):
            continue
        with contextlib.suppress(OSError, RecursionError):
            state = entry.stat(follow_symlinks=False)
            unused = os.geteuid() == 0 and state.st_uid in privileges.UNUSED_USERS
            if (
                stat.S_ISDIR(state.st_mode)
                and stat.S_IMODE(state.st_mode) == 0o700
                and (unused or state.st_uid == os.geteuid())
                and state.st_ctime < time.time() - _ABANDONED
            ):
                # Remove it with the rights of its owner, because other users can make directories with this prefix, too.
                owner = User("", state.st_uid, state.st_gid, (), "/", "")
                target_files.as_user(owner, lambda path=entry.path: _remove_unless_locked(path))  # type: ignore[misc]


def _remove_unless_locked(path: str) -> None:
    import shutil  # imported here because the import is slow

    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    finally:
        os.close(lock)

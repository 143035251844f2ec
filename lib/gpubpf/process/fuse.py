"""The connections of FUSE file systems (Documentation/filesystems/fuse.rst), and how root ends one whose server does not answer.

for number in unanswered(1000): abort(number)
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import time
from pathlib import Path

from gpubpf.kernel import libc
from gpubpf.process import patience, proc, scans

_SAMPLES, _PAUSE = 10, 0.02  # looks at a connection, and the seconds between them
_TAKES_LOCK = re.compile(rb"handle_mm_fault|mmap|munmap|mremap|mprotect|madvise")
_CLOEXEC, _CREATE = 1, 6  # FSOPEN_CLOEXEC and FSMOUNT_CLOEXEC; FSCONFIG_CMD_CREATE


def connections() -> Path:
    """Return the directory with all connections.

    It is mounted for this process alone, so that it also exists where /sys/fs/fuse/connections does not. Without the privileges for
    that, return /sys/fs/fuse/connections; a later call from a thread that has the privileges mounts it."""
    with contextlib.suppress(OSError):
        return _mounted()
    return Path("/sys/fs/fuse/connections")


@functools.cache  # of a directory only: an exception is not kept
def _mounted() -> Path:
    name = ctypes.create_string_buffer(b"fusectl")
    system = libc.system_call("fsopen", ctypes.addressof(name), _CLOEXEC)
    try:
        libc.system_call("fsconfig", system, _CREATE, 0, 0, 0)
        return Path(f"/proc/self/fd/{libc.system_call('fsmount', system, _CLOEXEC, 0)}")
    finally:
        os.close(system)


def owner(number: str) -> int:
    """Return the user who is responsible for a connection (see `scans.user_of`); -1 if no connection has this number."""
    with contextlib.suppress(OSError):
        return scans.responsible((connections() / number).stat().st_uid)
    return -1


def waits(number: str) -> bool:
    """Return whether a connection has a request without an answer."""
    with contextlib.suppress(OSError, ValueError):
        return int((connections() / number / "waiting").read_text()) > 0
    return False


def foreign() -> list[str]:
    """Return the numbers of all connections, except those of root that the tool sees mounted: those are not of a container.

    Raises OSError if they cannot be found out."""
    if not os.path.exists("/sys/fs/fuse"):  # this kernel has no FUSE, or has not loaded it
        return []
    numbers = os.listdir(connections())
    devices = (line.split(b" ")[2].split(b":") for line in proc.lines(os.getpid(), "mountinfo"))
    seen = {
        str(int(major) << 20 | int(minor)) for major, minor in devices
    }  # the kernel's own numbers, as connections have them
    return [number for number in numbers if owner(number) != 0 or number not in seen]


def keeps_lock(pid: int) -> bool:
    """Return whether a thread of a process waits for a FUSE server while it may hold the lock of its address space.

    Its kernel stack has functions of FUSE, and others that take this lock. A thread that only reads a file has the former alone, and
    one that forks a large process the latter alone.
    Return False if the stacks cannot be read."""

    def look() -> bool:
        return any(_waits_with_lock(proc.read(pid, f"task/{tid}/stack")) for tid in proc.threads(pid))

    with contextlib.suppress(OSError):
        # Without limits, because looks that wait would otherwise protect the process.
        return patience.within(patience.SHORT_WAIT, pid, look, limited=False)
    return False


def _waits_with_lock(stack: bytes) -> bool:
    return b"] fuse_" in stack and _TAKES_LOCK.search(stack) is not None


def unanswered(user: int) -> list[str]:
    """Return the numbers of the connections of a user that have a request without an answer all the time. Takes a fifth of a second.

    Those that `foreign` leaves out are left alone."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        found = [number for number in foreign() if owner(number) == user]
    for _ in range(_SAMPLES):
        found = [number for number in found if waits(number)]
        if not found:
            break
        time.sleep(_PAUSE)
    return found


def abort(number: str) -> bool:
    """Let all requests of a connection fail. Return whether that was possible."""
    with contextlib.suppress(OSError):
        (connections() / number / "abort").write_text("1")
        return True
    return False

"""The connections of FUSE file systems (Documentation/filesystems/fuse.rst), and how root ends one whose server does not answer.

for number in unanswered(1000): abort(number)
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
from pathlib import Path

from gpubpf.kernel import libc
from gpubpf.process import proc, scans

_SAMPLES, _PAUSE = 10, 0.02  # looks at a connection, and the seconds between them
_CLOEXEC, _CREATE = 1, 6  # FSOPEN_CLOEXEC and FSMOUNT_CLOEXEC; FSCONFIG_CMD_CREATE


@functools.cache
def connections() -> Path:
    """Return the directory with all connections.

    It is mounted for this process alone, so that it also exists where /sys/fs/fuse/connections does not. Without the privileges for
    that, return /sys/fs/fuse/connections."""
    name = ctypes.create_string_buffer(b"fusectl")
    with contextlib.suppress(OSError):
        system = libc.system_call("fsopen", ctypes.addressof(name), _CLOEXEC)
        try:
            libc.system_call("fsconfig", system, _CREATE, 0, 0, 0)
            return Path(f"/proc/self/fd/{libc.system_call('fsmount', system, _CLOEXEC, 0)}")
        finally:
            os.close(system)
    return Path("/sys/fs/fuse/connections")


def owner(number: str) -> int:
    """Return the user who answers for a connection, see `scans.user_of`; -1 if there is none with this number."""
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
    seen = {line.split(b" ")[2].partition(b":")[2].decode() for line in proc.lines(os.getpid(), "mountinfo")}
    return [number for number in numbers if owner(number) != 0 or number not in seen]


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

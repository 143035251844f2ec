"""What the tool may do, and gives up: capabilities that nothing needs any more, and all of them for what reads a target's own words.

Capabilities and user numbers belong to threads (capabilities(7), credentials(7)); the C library's calls would change those of all, so
the kernel is called directly.

    privileges = Privileges()
    privileges.keep(MEASURING, True)    # when everything is attached; other threads follow at their next `settle`
    unprivileged(run_ptxas, (path,))    # as a user of its own, where root is not needed

What a thread starts inherits from it. In `unprivileged` that is: no capability, none by running a set-user-ID program, and, for root,
a user number that nobody else has (of those that systemd gives to services, 61184 to 65519), so that no other process may touch the
files. Where a program cannot be reached as such a user, or a container has no such number, it stays root without capabilities.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import random
import struct
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from gpubpf.errors import SessionError
from gpubpf.process import fresh_thread, libc
from gpubpf.process.libc import system_call

T = TypeVar("T")

DAC_OVERRIDE, DAC_READ_SEARCH, KILL, SETGID, SETUID, SETPCAP = (
    1,
    2,
    5,
    6,
    7,
    8,
)  # include/uapi/linux/capability.h
SYS_PTRACE, SYS_ADMIN, SYS_NICE, SYS_RESOURCE, PERFMON, BPF, CHECKPOINT_RESTORE = 19, 21, 23, 24, 38, 39, 40

# While it measures what it is attached to: files and memory of the processes for their PTX, results that go to a user's directory,
# children that it gives another user.
MEASURING = frozenset(
    (DAC_OVERRIDE, DAC_READ_SEARCH, KILL, SETGID, SETUID, SETPCAP, SYS_PTRACE, CHECKPOINT_RESTORE)
)
# Where programs are attached in the kernel for processes that come,
PROGRAMS = frozenset((BPF, PERFMON, SYS_RESOURCE, SYS_ADMIN))
# and where processes that run are still to be joined.
JOINING = frozenset((SYS_NICE,))

_FIRST_USER, _LAST_USER = 61184, 65519
_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
_BOUNDING_DROP, _NO_NEW_PRIVS, _SECUREBITS, _AMBIENT = 24, 38, 28, 47  # prctl(2)
_NO_ROOT = 0b11  # SECBIT_NOROOT, and its lock
_AMBIENT_CLEAR = 4


def _prctl(*arguments: int) -> bool:
    values = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:5]]
    return int(libc.library.prctl(*values)) == 0


def effective() -> frozenset[int]:
    """The capabilities of this thread."""
    low, high = _get()[0], _get()[3]
    return frozenset(n for n in range(64) if (low | high << 32) >> n & 1)


def _get() -> tuple[int, ...]:
    header = ctypes.create_string_buffer(struct.pack("<Ii", _VERSION, 0), 8)
    data = ctypes.create_string_buffer(24)
    system_call(libc.CAPGET, ctypes.addressof(header), ctypes.addressof(data))
    return struct.unpack("<6I", data.raw)


def _limit(kept: Iterable[int]) -> None:
    """This thread has these capabilities, of those that it had, and gets no other one by whatever it runs."""
    bits = sum(1 << n for n in kept)
    _prctl(_AMBIENT, _AMBIENT_CLEAR)
    for n in range(64):
        if not bits >> n & 1:
            _prctl(_BOUNDING_DROP, n)  # refused where this thread may not, and has none to give
    values = _get()
    masks = (bits & 0xFFFFFFFF, bits >> 32)
    limited = [
        word & masks[i // 3] if i % 3 < 2 else 0 for i, word in enumerate(values)
    ]  # effective, permitted; nothing inheritable
    header = ctypes.create_string_buffer(struct.pack("<Ii", _VERSION, 0), 8)
    data = ctypes.create_string_buffer(struct.pack("<6I", *limited), 24)
    system_call(libc.CAPSET, ctypes.addressof(header), ctypes.addressof(data))


class Privileges:
    """What the threads of a measurement may do. Each gives up by itself, at `settle`, what `keep` left out."""

    def __init__(self) -> None:
        self._kept: frozenset[int] | None = None
        self._thread = threading.local()

    def keep(self, kept: Iterable[int], here: bool) -> None:
        """From now on these are enough, of those that the tool has. `here`: for this thread, too, at once and for good; nothing that
        it starts gets more."""
        self._kept = frozenset(kept)
        if here:
            self.settle()

    def settle(self) -> None:
        """Called by a thread before it takes up what came from a process."""
        kept = self._kept
        if kept is None or getattr(self._thread, "kept", None) == kept:
            return
        self._thread.kept = kept
        try:
            _limit(kept)
            _prctl(_NO_NEW_PRIVS, 1)
        except OSError as error:  # fewer were never refused
            raise SessionError(
                f"capabilities cannot be given up ({error.strerror}); look at the security module's log"
            ) from None


def give_up(reached: Sequence[str] = ()) -> bool:
    """This thread, and what it starts, has no privileges any more: no capability, for root another user. False where it remains
    root, because such a user cannot run `reached`, make files in the temporary directory, or does not exist here."""
    _prctl(_NO_NEW_PRIVS, 1)
    other = os.geteuid() == 0 and _reachable(reached) and _other_user()
    if not other:
        _prctl(_SECUREBITS, _NO_ROOT)  # root by number gets nothing from running a program
    _limit(())
    return other or os.geteuid() != 0


def _reachable(paths: Sequence[str]) -> bool:
    """Whether everybody may run these, and make files in the temporary directory."""
    try:
        for path in map(Path, (*paths, tempfile.gettempdir())):
            real = path.resolve()
            bits = 0o5 if not real.is_dir() else 0o3
            if real.stat().st_mode & bits != bits:
                return False
            if not all(parent.stat().st_mode & 0o1 for parent in real.parents):
                return False
    except OSError:
        return False
    return True


def _other_user() -> bool:
    """This thread belongs to a user that nobody is."""
    for _ in range(8):
        user = random.SystemRandom().randint(_FIRST_USER, _LAST_USER)
        try:
            pwd.getpwuid(user)
        except KeyError:
            break
    else:
        return False
    try:
        system_call(libc.SETGROUPS, 0, 0)
        system_call(libc.SETRESGID, user, user, user)
        system_call(libc.SETRESUID, user, user, user)
    except OSError:  # no such number in this namespace, or not allowed
        return False
    return True


def unprivileged(function: Callable[[], T], reached: Sequence[str] = ()) -> T:
    """What `function` returns, or raises, on a thread of its own without privileges (see `give_up`): files that it makes, and programs
    that it starts, are without them, too."""

    def run() -> T:
        give_up(reached)
        return function()

    return fresh_thread.on_own(run, "gpubpf-unprivileged")

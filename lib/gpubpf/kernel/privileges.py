"""Drop privileges: capabilities that are no longer needed, and all capabilities for code that parses a traced process's data.

Capabilities and user IDs belong to threads (capabilities(7), credentials(7)). The C library's functions would change them for all
threads, so this module makes the system calls itself.

    privileges = Privileges()
    privileges.keep(MEASURING, True)        # once everything is attached; other threads follow at their next `apply`
    run_unprivileged(run_ptxas, (path,))    # as an unused user, if root is not needed

Child processes inherit the privileges of the thread that starts them. In `run_unprivileged`, they have no capability, and gain none by
executing a set-user-ID program. If the tool runs as root, they also get an unused user ID, so that no other process can access their
files. The ID is one of those that systemd assigns to services, 61184 to 65519. If such a user cannot run a program, or a container has
no such ID, the thread stays root without capabilities.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import signal
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from gpubpf.errors import SessionError
from gpubpf.kernel import directories, fresh_thread, libc
from gpubpf.kernel.libc import system_call
from gpubpf.kernel.namespaces import in_first_user_namespace

T = TypeVar("T")

# include/uapi/linux/capability.h
DAC_OVERRIDE, DAC_READ_SEARCH, KILL, SETGID, SETUID, SETPCAP = 1, 2, 5, 6, 7, 8
SYS_PTRACE, SYS_ADMIN, SYS_NICE, SYS_RESOURCE, PERFMON, BPF, CHECKPOINT_RESTORE = 19, 21, 23, 24, 38, 39, 40

# For measuring attached processes: to read their files and memory (for PTX), to write results into a user's directory, and to start
# children as another user.
MEASURING = frozenset(
    (DAC_OVERRIDE, DAC_READ_SEARCH, KILL, SETGID, SETUID, SETPCAP, SYS_PTRACE, CHECKPOINT_RESTORE)
)
# For loading eBPF programs into the kernel, for processes that start later.
PROGRAMS = frozenset((BPF, PERFMON, SYS_RESOURCE, SYS_ADMIN))
# For attaching to more running processes.
JOINING = frozenset((SYS_NICE,))

UNUSED_USERS = range(61184, 65520)
_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
_BOUNDING_DROP, _NO_NEW_PRIVS, _SECUREBITS, _AMBIENT = 24, 38, 28, 47  # prctl(2)
_PARENT_DEATH_SIGNAL = 1
_NO_ROOT = 0b11  # SECBIT_NOROOT, and its lock
_AMBIENT_CLEAR = 4


def _prctl(*arguments: int) -> bool:
    values = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:5]]
    return int(libc.library.prctl(*values)) == 0


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this child when the thread that started it ends, and so whenever the tool ends.

    The kernel forgets this when the child changes its user, as `drop_all` does.

    parent: process ID of the tool, which may have ended already."""
    _prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def effective() -> frozenset[int]:
    """Return the effective capabilities of this thread."""
    low, high = _get()[0], _get()[3]
    return frozenset(n for n in range(64) if (low | high << 32) >> n & 1)


def capable() -> bool:
    """Return whether this thread may load eBPF programs: it has CAP_BPF or CAP_SYS_ADMIN."""
    return holds(BPF, SYS_ADMIN)


def holds(*capabilities: int) -> bool:
    """Return whether this thread has one of these capabilities for the whole machine, not only inside a user namespace."""
    return not effective().isdisjoint(capabilities) and in_first_user_namespace()


def _get() -> tuple[int, ...]:
    header = ctypes.create_string_buffer(struct.pack("<Ii", _VERSION, 0), 8)
    data = ctypes.create_string_buffer(24)
    system_call("capget", ctypes.addressof(header), ctypes.addressof(data))
    return struct.unpack("<6I", data.raw)


def _limit(kept: Iterable[int]) -> None:
    """Drop all capabilities of this thread except `kept`. It cannot gain others by executing a program."""
    bits = sum(1 << n for n in kept)
    _prctl(_AMBIENT, _AMBIENT_CLEAR)
    for n in range(64):
        if not bits >> n & 1:
            _prctl(_BOUNDING_DROP, n)  # without CAP_SETPCAP, this fails, but then there is nothing to drop
    values = _get()
    masks = (bits & 0xFFFFFFFF, bits >> 32)
    # The words are the effective, permitted and inheritable sets. Make nothing inheritable.
    limited = [word & masks[i // 3] if i % 3 < 2 else 0 for i, word in enumerate(values)]
    header = ctypes.create_string_buffer(struct.pack("<Ii", _VERSION, 0), 8)
    data = ctypes.create_string_buffer(struct.pack("<6I", *limited), 24)
    system_call("capset", ctypes.addressof(header), ctypes.addressof(data))


class Privileges:
    """The capabilities of a measurement's threads. After `keep`, each thread drops its own in `apply`."""

    def __init__(self) -> None:
        self._kept: frozenset[int] | None = None
        self._thread = threading.local()

    def keep(self, kept: Iterable[int], here: bool) -> None:
        """Set the capabilities that are needed from now on. Raises SessionError.

        Without CAP_SYS_PTRACE, as in most containers, all that this thread has are needed: Linux lets a thread read the list of
        mappings of a process only if the thread has each capability of the process (ptrace(2)), and the command has those of the tool.

        here: this thread drops all other capabilities now and for good, also for the processes that it starts."""
        has = effective()
        self._kept = frozenset(kept) if SYS_PTRACE in has else has.union(kept)
        if here:
            self.apply()

    def apply(self) -> None:
        """Drop capabilities that this thread no longer needs. Call it before handling a traced process's data. Raises SessionError."""
        kept = self._kept
        if kept is None or getattr(self._thread, "kept", None) == kept:
            return
        self._thread.kept = kept
        try:
            _limit(kept)
            _prctl(_NO_NEW_PRIVS, 1)
        except OSError as error:  # the kernel itself never refuses to drop capabilities
            raise SessionError(
                f"cannot drop capabilities ({error.strerror}); check the log of the security module"
            ) from None


def drop_all(programs: Sequence[str] = ()) -> bool:
    """Drop all privileges of this thread and of the processes that it will start: all capabilities and, for root, the user ID.

    Return False if the thread remains root: an unused user cannot run `programs`, cannot create files in the temporary directory, or
    does not exist here.
    """
    _prctl(_NO_NEW_PRIVS, 1)
    other = os.geteuid() == 0 and _usable_by_anyone(programs) and _become_unused_user()
    if not other:
        _prctl(_SECUREBITS, _NO_ROOT)  # user ID 0 gains no capability by executing a program
    _limit(())
    return other or os.geteuid() != 0


def _usable_by_anyone(paths: Sequence[str]) -> bool:
    """Return whether every user may execute `paths` and create files in the temporary directory."""
    try:
        for path in map(Path, (*paths, directories.temporary())):
            real = path.resolve()
            bits = 0o5 if not real.is_dir() else 0o3
            if real.stat().st_mode & bits != bits:
                return False
            if not all(parent.stat().st_mode & 0o1 for parent in real.parents):
                return False
    except OSError:
        return False
    return True


def _become_unused_user() -> bool:
    """Switch this thread to a user ID that no account has. Return False if that is not possible."""
    import random  # imported here because the import is slow

    for _ in range(8):
        user = random.SystemRandom().choice(UNUSED_USERS)
        try:
            pwd.getpwuid(user)
        except KeyError:
            break
    else:
        return False
    try:
        system_call("setgroups", 0, 0)
        system_call("setresgid", user, user, user)
        system_call("setresuid", user, user, user)
    except OSError:  # the user namespace has no such ID, or the switch is not allowed
        return False
    return True


def run_unprivileged(function: Callable[[], T], programs: Sequence[str] = ()) -> T:
    """Call `function` on a thread without privileges (see `drop_all`). Return its result, or raise its exception.

    Files that it creates belong to the unused user. Processes that it starts have no privileges either.
    """

    def call() -> T:
        drop_all(programs)
        return function()

    return fresh_thread.run(call, "gpubpf-unprivileged")

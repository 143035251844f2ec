"""Look at a process that may keep its observer waiting: the look has a deadline.

    drivers = within(LOOK_WAIT, pid, lambda: list(proc.lines(pid, "maps")))
    pid = lock_holder()  # before placing a uprobe

Whoever reads a process's list of mappings or its memory takes a lock of its address space. A process can hold this lock for as long as
it likes: one of its threads maps a file that a program of its own user serves (FUSE), which does not answer. So threads that serve all
processes look at one only through `within`. Threads that work for one process alone need not: others take their places.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from gpubpf.process import limits, proc, scans

T = TypeVar("T")

LOOK_WAIT = 2.0  # seconds without progress until a look is given up
SHORT_WAIT = 0.2  # the same, where other processes wait meanwhile
_FREE = (
    1.0  # seconds for which `lock_holder` need not look again: several probes are placed one after another
)

_lock = threading.Lock()
_waiting: Counter[int] = Counter()  # looks that were given up and have not ended, by user


class Unanswered(OSError):
    """A look at a process does not end, or too many looks at its user's processes do not."""

    def __init__(self) -> None:
        super().__init__(errno.ETIMEDOUT, "its list of mappings or its memory does not arrive")


def within(seconds: float, pid: int, look: Callable[[], T]) -> T:
    """Call `look` on a new thread, which has the privileges of this one. Return its result, or raise its exception.

    seconds: without progress, which is CPU time. Raises Unanswered; the thread then stays until the process lets it go. No more than
    limits.UNANSWERED such threads remain, and limits.UNANSWERED_OF_USER for the processes of one user; beyond, they are not looked at.
    """
    user = scans.user_of(pid) if _waiting else 0
    with _lock:
        if limits.exceeded(_waiting, user, limits.UNANSWERED, limits.UNANSWERED_OF_USER, 1):
            raise Unanswered
    return _within(seconds, lambda: pid, look)


def _within(seconds: float, pid: Callable[[], int], look: Callable[[], T]) -> T:
    """Do the same without these limits. `pid`: returns the process that is looked at now."""
    results: list[T] = []
    errors: list[BaseException] = []
    given_up_for: list[int] = []
    ended = threading.Event()

    def call() -> None:
        try:
            results.append(look())
        except BaseException as error:
            errors.append(error)
        with _lock:
            ended.set()
            for owner in given_up_for:
                _waiting[owner] -= 1
                if not _waiting[owner]:
                    del _waiting[owner]

    thread = threading.Thread(target=call, name="gpubpf-look", daemon=True)
    thread.start()
    used = -1.0  # seconds of CPU time at the last check
    while not ended.wait(seconds / 2):
        before, used = used, _cpu_time(thread)
        if used == before:
            user = scans.user_of(pid())
            with _lock:
                if not ended.is_set():
                    given_up_for.append(user)
                    _waiting[user] += 1
                    raise Unanswered
    if errors:
        raise errors[0]
    return results[0]


def lock_holder(seconds: float = LOOK_WAIT) -> int:
    """Return a process that holds the lock of its address space for so long; 0 if no process does.

    To place or remove a uprobe, the kernel takes this lock of each process that maps the file. It waits without end, and meanwhile no
    process of the machine can fork. So do neither then: which files the process maps cannot be found out.
    """
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    at = 0

    def look() -> None:
        nonlocal at
        for at in pids:
            with contextlib.suppress(OSError):  # it has ended, or the tool may not look at it
                proc.take_lock(at)

    try:
        if not _waiting:  # a thread for each process would take longer
            _within(seconds, lambda: at, look)
            return 0
        for at in pids:
            try:
                within(seconds, at, partial(proc.take_lock, at))
            except Unanswered:
                raise
            except OSError:
                continue
    except Unanswered:
        return at
    return 0


def wait_for_locks() -> None:
    """Wait until no process holds the lock of its address space."""
    while lock_holder():
        time.sleep(LOOK_WAIT)


def _cpu_time(thread: threading.Thread) -> float:
    """Return the CPU time of a thread in seconds; 0 if it has ended."""
    try:
        return time.clock_gettime(~(thread.native_id or 0) << 3 | 6)  # CPUCLOCK_SCHED of a thread
    except OSError:
        return 0.0

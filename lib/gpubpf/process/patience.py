"""Look at a process with a deadline, because the process may keep its observer waiting.

    drivers = within(LOOK_WAIT, pid, lambda: list(proc.lines(pid, "maps")))
    pid = lock_holder()  # before placing a uprobe

A read of a process's list of mappings, or of its memory, takes the lock of its address space. A process can hold this lock as long as
it likes: a thread of the process maps a file from a file system (FUSE) whose program, run by the same user, does not answer. So
threads that serve all processes look at a process only through `within`. Threads that work for one process need not: they can be
replaced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

from gpubpf.kernel import fresh_thread
from gpubpf.process import limits, proc, scans

T = TypeVar("T")

LOOK_WAIT = 2.0  # seconds without progress until a look is given up
SHORT_WAIT = 0.2  # the same, if other processes wait meanwhile

_lock = threading.Lock()
_waiting: Counter[int] = Counter()  # user → number of looks that were given up and have not ended
_stuck: Counter[int] = Counter()  # process → the same


class Unanswered(OSError):
    """A look at a process does not end."""

    def __init__(self, code: int = errno.ETIMEDOUT, why: str = "") -> None:
        super().__init__(code, why or "its list of mappings or its memory does not arrive")


class NotLooked(Unanswered):
    """There was no look, because too many looks at processes of the same user, or of all users, have not ended."""

    def __init__(self) -> None:
        super().__init__(errno.EUSERS, "too many processes keep the tool waiting (FUSE?)")


class Holder(NamedTuple):
    """A process that holds the lock of its address space.

    unseen: the process was yielded in place of one that was not looked at, because looks at this process and others have not ended.
    """

    pid: int
    unseen: bool = False


def within(seconds: float, pid: int, look: Callable[[], T], limited: bool = True) -> T:
    """Call `look` on a new thread, which has the privileges of this one. Return its result, or raise its exception.

    seconds: how long the look may take without using CPU time.

    Raises Unanswered if it takes longer. The thread then remains until the process lets it go. If limits.UNANSWERED such threads
    remain, or limits.UNANSWERED_OF_USER for the processes of one user, raises NotLooked. limited: whether these limits apply.
    Raises NoThread.
    """
    user = scans.user_of(pid) if _waiting else 0
    with _lock:
        if limited and limits.exceeded(_waiting, user, limits.UNANSWERED, limits.UNANSWERED_OF_USER, 1):
            raise NotLooked
    return _within(seconds, lambda: pid, look)


def _within(seconds: float, pid: Callable[[], int], look: Callable[[], T]) -> T:
    """Do the same as `within`, without limits on the number of threads. `pid`: returns the process that the look is at now."""
    results: list[T] = []
    errors: list[BaseException] = []
    given_up: list[tuple[int, int]] = []  # user, process
    ended = threading.Event()

    def call() -> None:
        try:
            results.append(look())
        except BaseException as error:
            errors.append(error)
        with _lock:
            ended.set()
            for keys in given_up:
                for counts, key in zip((_waiting, _stuck), keys, strict=True):
                    counts[key] -= 1
                    if not counts[key]:
                        del counts[key]

    thread = fresh_thread.start(call, "gpubpf-look")
    used = -1.0  # seconds of CPU time at the last check
    while not ended.wait(seconds / 2):
        before, used = used, _cpu_time(thread)
        if used == before:
            at = pid()
            user = scans.user_of(at)
            with _lock:
                if not ended.is_set():
                    given_up.append((user, at))
                    _waiting[user] += 1
                    _stuck[at] += 1
                    raise Unanswered
    if errors:
        raise errors[0]
    return results[0]


def lock_holder(seconds: float = LOOK_WAIT) -> int:
    """Return a process that holds the lock of its address space for this many seconds; 0 if no process does.

    Do not place or remove a uprobe while such a process exists. To do so, the kernel takes the lock of each process that maps the
    file, and waits without limit. Meanwhile, no process of the machine can fork. Whether the process maps the file cannot be found
    out.
    """
    return next((holder.pid for holder in lock_holders(seconds)), 0)


def lock_holders(seconds: float) -> Iterator[Holder]:
    """Yield the processes that hold the lock of their address space for this many seconds.

    If too many looks wait, or no thread can be started, a process is not looked at. Then this yields a process for which looks wait:
    see `Holder.unseen`."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    at = 0  # index

    def look() -> None:
        nonlocal at
        while at < len(pids):
            with contextlib.suppress(OSError):  # it has ended, or the tool may not look at it
                proc.take_lock(pids[at])
            at += 1

    first = 0
    if not _waiting:  # one thread for all processes, because a thread for each would take longer
        try:
            _within(seconds, lambda: pids[at], look)
            return
        except (Unanswered, fresh_thread.NoThread):
            held = at  # the look may go on any moment
            first = held + 1
        if held < len(pids) and holds_lock(pids[held], seconds):
            yield Holder(pids[held])
    for pid in pids[first:]:
        try:
            if _keeps_waiting(pid, seconds):
                yield Holder(pid)
        except NotLooked:
            yield Holder(_one_that_waits(pid), unseen=True)


def holds_lock(pid: int, seconds: float = LOOK_WAIT) -> bool:
    """Return whether a process holds the lock of its address space for this many seconds.

    If there are too many looks for another one, return whether an earlier look at this process has not ended."""
    try:
        return _keeps_waiting(pid, seconds)
    except NotLooked:
        return pid in _stuck


def _keeps_waiting(pid: int, seconds: float) -> bool:
    try:
        within(seconds, pid, partial(proc.take_lock, pid))
    except NotLooked:
        raise
    except fresh_thread.NoThread:
        raise NotLooked from None
    except Unanswered:
        return True
    except OSError:
        pass
    return False


def _one_that_waits(pid: int) -> int:
    """Return a process that makes looks wait, if possible one of the user of `pid`; `pid` if those looks have just ended."""
    user = scans.user_of(pid)
    with _lock:
        stuck = list(_stuck)
    return next((one for one in stuck if scans.user_of(one) == user), next(iter(stuck), pid))


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

"""Keep processes from stopping the machine while the kernel places or removes uprobes.

    if holder := obstacle(): …     # do not place a uprobe
    with guarded(note):
        link = bpf_syscall.link_uprobes(…)
    close(files, note)

To place or remove a uprobe, the kernel takes the lock of each process that maps the file, and waits without end; meanwhile no process
of the machine can fork. A process can hold its lock for ever, if it serves a FUSE file system that does not answer (`patience`).
It can also take the lock after the tool has looked. So the tool watches itself while it is in such a call. If the call takes too long,
the tool looks for processes that hold their locks. It disconnects the file systems of their users that do not answer.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence

from gpubpf.kernel import bpf_syscall
from gpubpf.process import fuse, scans
from gpubpf.process.patience import SHORT_WAIT, holds_lock, lock_holder, lock_holders, wait_for_locks

GRACE = 0.5  # seconds for the kernel; it needs some milliseconds for each probe
_AGAIN = 0.05  # seconds for the kernel to go on after file systems were disconnected
_stopped_by: set[int] = set()  # users
_LONGEST = 10.0  # seconds for which this process does not fork
_forks = threading.Condition(threading.Lock())
_guarded = 0  # number of blocks


def obstacle() -> int:
    """Return a process that holds the lock of its address space although no FUSE file system is to blame, so that `guarded` could not
    end that; 0 if there is no such process."""
    harmless: set[int] = set()  # users
    for pid, unseen in lock_holders(SHORT_WAIT):
        if unseen:  # any number of processes may hold their locks, for whatever reason
            return pid
        user = scans.user_of(pid)
        if user in harmless:
            continue
        if fuse.keeps_lock(pid) and fuse.unanswered(user):
            harmless.add(user)
        elif holds_lock(pid):
            return pid
    return 0


@contextlib.contextmanager
def guarded(note: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Watch the block, in which the kernel places or removes uprobes. `note`: called with notices for the user, on another thread."""
    global _guarded
    fuse.connections()
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(ended, note), name="gpubpf-locks", daemon=True)
    with contextlib.suppress(RuntimeError):  # no more threads can be started: go on without
        watcher.start()
    with _forks:
        _guarded += 1
    try:
        yield
    finally:
        ended.set()
        with _forks:
            _guarded -= 1
            _forks.notify_all()


def has_stopped_machine(user: int) -> bool:
    """Return whether processes of a user have kept the kernel waiting in this process. Then place no probe for them alone.

    Return False for root: its processes may be those of any container."""
    return user > 0 and user in _stopped_by


def _before_fork() -> None:
    """Let this process fork only when it is not in such a block: no other thread of Python could run while fork(2) waits."""
    _forks.acquire()
    _forks.wait_for(lambda: not _guarded, _LONGEST)


os.register_at_fork(before=_before_fork, after_in_parent=_forks.release, after_in_child=_forks.release)


def _watch(ended: threading.Event, note: Callable[[str], None]) -> None:
    while not ended.wait(GRACE):
        seen: set[int] = set()
        for pid, _ in lock_holders(SHORT_WAIT):
            user = scans.user_of(pid)
            if ended.is_set() or user in seen or not fuse.keeps_lock(pid):
                continue
            seen.add(user)
            # A file system of a user who harms nobody may be slow, too: look twice at the lock, the second time for two seconds.
            if (
                (numbers := fuse.unanswered(user))
                and holds_lock(pid)
                and fuse.keeps_lock(pid)
                and not ended.is_set()
            ):
                aborted = [number for number in numbers if fuse.abort(number)]
                if aborted:
                    _stopped_by.add(user)
                    note(
                        f"process {pid} held its lock, and stopped the machine while a probe was placed or removed; disconnected the"
                        f" file systems of user {user} that did not answer (FUSE {', '.join(aborted)})"
                    )
                    ended.wait(_AGAIN)


def close(files: Sequence[int], note: Callable[[str], None] = lambda text: None) -> None:
    """Close events and programs, some of them uprobes. If the kernel would have to wait for a process, leave that to a child."""
    if not files:
        return
    if holder := lock_holder(SHORT_WAIT):
        note(
            f"the probes stay until process {holder} releases its address space; removing them now could stop the whole machine"
        )
        import subprocess  # here, because the hold helper starts faster without it

        from gpubpf.process import children

        with contextlib.suppress(OSError):
            subprocess.Popen(
                children.python(
                    f"from gpubpf.process import kernel_waits; kernel_waits.close_later({[*files]})"
                ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=children.environment(),
                pass_fds=files,
                start_new_session=True,
            )
    with guarded(note):
        bpf_syscall.close_all(files)


def close_later(files: Sequence[int], note: Callable[[str], None] = lambda text: None) -> None:
    """Close events and programs when no process holds the lock of its address space."""
    wait_for_locks()
    with guarded(note):
        bpf_syscall.close_all(files)

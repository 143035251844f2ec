"""The state of a running process, and the reasons why it cannot be traced."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpubpf.errors import OUT_OF_FILES, TOO_MANY_FILES, SessionError, out_of_files
from gpubpf.kernel import privileges
from gpubpf.process import limits, proc
from gpubpf.process.ptrace import ThreadEnded, TraceRefused, parent, threads_of
from gpubpf.process.users import User

_EXITING = 4  # PF_EXITING
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD, include/linux/sched.h
# Where threads of frozen cgroups wait; the compiler may make do_freezer_trap a part of get_signal.
_FROZEN = ("do_freezer_trap", "get_signal", "__refrigerator")
_STRICT_SECCOMP = 1
_MOST_ANCESTORS = 1000


def comm(pid: int) -> str:
    """Return the name of a process; "" if it has ended."""
    with contextlib.suppress(OSError):
        return proc.comm(pid)
    return ""


def started(pid: int) -> float:
    """Return the start time of a process, in seconds of CLOCK_BOOTTIME, rounded down to a clock tick; 0 if unknown.

    A process keeps its start time when it executes another program."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(proc.stat(pid)[19]) / os.sysconf("SC_CLK_TCK")
    return 0.0


def descends(pid: int, ancestor: int) -> bool:
    """Return whether a process is a descendant of another. This is not known if a process between the two has ended."""
    for _ in range(_MOST_ANCESTORS):
        pid = parent(pid)
        if pid in (ancestor, 0):
            return pid == ancestor
    return False


def children(pid: int) -> set[int]:
    """Return the pids of a process's children; none if it has ended."""
    found: set[int] = set()
    with contextlib.suppress(OSError, ThreadEnded):
        for tid in threads_of(pid):
            with contextlib.suppress(OSError):
                *whole, _ = proc.read(pid, f"task/{tid}/children").split(b" ")
                found |= set(map(int, whole))
    return found


def descendants(pids: Iterable[int]) -> Iterator[int]:
    """Yield the descendants of these processes, limits.DESCENDANTS at most. A child of a process that has ended is not found."""
    known = set(pids)
    queue = deque(known)
    while queue and len(known) < limits.DESCENDANTS:
        for child in children(queue.popleft()) - known:
            known.add(child)
            queue.append(child)
            yield child


class RefusedForNow(SessionError):
    """A process cannot be traced now, but perhaps soon: it is stopped or ending, or another tool may be tracing one of its threads."""


class AlreadyTraced(RefusedForNow):
    """Another process traces the process: a debugger or, for some milliseconds, another tool of this project."""


class Stopped(RefusedForNow):
    """The process is stopped, such as by SIGSTOP."""


def frozen(pid: int) -> Stopped:
    """Return the error for a process whose threads do not stop."""
    return Stopped(
        f"pid {pid} ({comm(pid)}) is frozen (docker pause, systemctl freeze) or waits in the kernel; let it continue, then try again"
    )


class Exiting(RefusedForNow):
    """The process is about to end, or only its main thread is."""


class ProcessEnded(SessionError):
    """The process has ended, or has executed another program."""


class NotHookable(SessionError):
    """The agent cannot be loaded into the process: for example, the process itself can open no more files."""


class OutOfFiles(SessionError):
    """This tool can open no more files, so it cannot look at the process."""

    def __init__(self, pid: int) -> None:
        super().__init__(f"pid {pid} cannot be traced: {TOO_MANY_FILES}")


def status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status; empty if there is no such process. Raises OSError if no more files can be opened."""
    try:
        return proc.status(pid)
    except OSError as error:
        if out_of_files(error):
            raise
        return {}


def _waits_in(pid: int) -> str:
    """Return the function of the kernel in which the main thread waits; "" if unknown."""
    with contextlib.suppress(OSError):
        return proc.text(pid, "wchan")
    return ""


def check_not_frozen(pid: int) -> None:
    """Raise Stopped if the main thread waits in a frozen cgroup."""
    if _waits_in(pid) in _FROZEN:
        raise frozen(pid)


def check_traceable(pid: int) -> None:
    """Raise SessionError if a process is known to be untraceable. This does not touch the process.

    Raises OSError if no more files can be opened."""
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
    exiting = is_exiting(pid)
    if (exiting or state in "ZX") and int(known.get("Threads", 1)) > 1:
        raise Exiting(
            f"{who}: its main thread has exited, cannot attach; start the program with the tool instead"
        )
    if state in "ZX":
        raise SessionError(f"{who} has ended and is a zombie; name a running process")
    if exiting:
        raise Exiting(f"{who} is exiting; name another process")
    if (_flags(pid) or 0) & _KERNEL_THREAD:
        raise SessionError(f"{who} is a kernel thread; name a program")
    if (tracer := int(known.get("TracerPid", 0))) != 0:
        name = status(tracer).get("Name", "?")
        raise AlreadyTraced(f"{who} is already traced by {name} (pid {tracer}); stop that first")
    if state == "T":
        raise Stopped(f"{who} is stopped; continue it first: kill -CONT {pid}")
    check_not_frozen(pid)
    if known.get("Seccomp") == str(_STRICT_SECCOMP):
        raise SessionError(
            f"{who} is in strict seccomp mode, which allows almost no system call; start it without that mode"
        )
    if "shstk" in known.get("x86_Thread_features", ""):
        raise SessionError(
            f"{who} uses a shadow stack, cannot attach; start it with GLIBC_TUNABLES=glibc.cpu.x86_shstk=off"
        )
    check_64_bit(pid)


def check_64_bit(pid: int) -> None:
    """Raise SessionError if a process runs a 32-bit program."""
    with contextlib.suppress(OSError):
        if not proc.is_64_bit(pid):
            raise SessionError(
                f"pid {pid} ({comm(pid)}) is a 32-bit program, which cannot use CUDA or HIP; name another process"
            )


@contextlib.contextmanager
def refusals(pid: int) -> Iterator[None]:
    """Turn tracing errors into SessionError with a message for the user."""
    try:
        yield
    except ThreadEnded:
        raise refusal(pid, errno.ESRCH) from None
    except TraceRefused as error:
        raise refusal(pid, error.errno) from None
    except SessionError:  # subclasses such as Unreadable are OSErrors, too
        raise
    except OSError as error:
        raise refusal(pid, error.errno or errno.ESRCH) from None


def refusal(pid: int, code: int) -> SessionError:
    """Return the error to raise when the kernel has refused to trace `pid` with error number `code`."""
    try:
        known = status(pid)
    except OSError as error:
        code = error.errno or code
    if code in OUT_OF_FILES:
        return OutOfFiles(pid)
    if code == errno.E2BIG:  # only proc.TooLarge has this number
        return SessionError(
            f"pid {pid} ({comm(pid)}) cannot be traced: its list of mappings is too large;"
            " start the program with the tool instead"
        )
    if code == errno.ETIMEDOUT:  # only patience.Unanswered has this number
        return SessionError(
            f"pid {pid} ({comm(pid)}) cannot be traced: its list of mappings or its memory does not arrive (FUSE?);"
            " name another process"
        )
    if code == errno.EUSERS:  # only patience.NotLooked has this number
        return SessionError(
            f"pid {pid} ({comm(pid)}) was not looked at: too many processes, perhaps of the same user, keep the tool waiting (FUSE?);"
            " end those first"
        )
    # EFAULT: the mappings of the process have just changed.
    if not known or code in (errno.ESRCH, errno.EFAULT) or known.get("State", "Z")[0] in "ZX":
        return ProcessEnded(f"pid {pid} ended, or executed another program, while the tool was attaching")
    try:
        check_traceable(pid)  # another tracer may have attached, or the process may have ended
    except SessionError as error:
        return error
    who = f"pid {pid} ({known.get('Name', '')})"
    if code == errno.EIO:
        return Exiting(f"{who} is exiting; name another process")
    mine, theirs = os.geteuid(), {int(uid) for uid in known.get("Uid", "").split()}
    yama = ptrace_scope()
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
    if other_namespace(pid, "user"):
        return SessionError(
            f"{who} is in a user namespace in which this tool has no privileges; run the tool on the host"
        )
    # Another tool traces a thread for some milliseconds when it attaches. That tool may have detached since.
    kind = RefusedForNow if code == errno.EPERM else SessionError
    return kind(
        f"{who} cannot be traced ({os.strerror(code)});"
        " check the log of the security module, or start the program with the tool"
    )


def user(pid: int) -> User:
    """Return the effective user of a process; name, home and shell are left out. Raises OSError, also if the process has ended."""
    known = status(pid)
    if not known:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    uid, gid = (int(known[name].split()[1]) for name in ("Uid", "Gid"))
    groups = tuple(int(g) for g in known.get("Groups", "").split())
    return User(str(uid), uid, gid, groups, "/", "")


def is_exiting(pid: int) -> bool:
    """Return whether a process has started to exit, or has ended."""
    flags = _flags(pid)
    return flags is None or bool(flags & _EXITING)


def _flags(pid: int) -> int | None:
    """Return the kernel's flags (PF_*) of a process's main thread; None if it has ended."""
    try:
        return int(proc.stat(pid)[6])
    except (OSError, IndexError, ValueError):
        return None


def ptrace_scope(proc_root: Path = Path("/proc")) -> int:
    """Return Yama's kernel.yama.ptrace_scope; 0 without Yama."""
    try:
        return int((proc_root / "sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return 0


def other_namespace(pid: int, kind: str) -> bool:
    """Return whether a process is in another namespace than this one, or whether that is unknown. kind: such as "net"."""
    try:
        return proc.link(pid, f"ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return True


def has_other_files(pid: int) -> bool:
    """Return whether a process may find other files at the same paths: it has another root directory, or its own mounts."""
    return other_namespace(pid, "mnt") or proc.link(pid, "root") != os.readlink("/proc/self/root")

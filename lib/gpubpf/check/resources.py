"""Files, memory and limits: /dev/shm, directories that allow executing, the cache, free space, limits of this process."""

from __future__ import annotations

import os
import resource
import tempfile
from pathlib import Path

from gpubpf import cache
from gpubpf.check.finding import LIMITED, MISSING, Finding, ok
from gpubpf.check.machine import Machine
from gpubpf.kernel import privileges
from gpubpf.show import table

_SPACE = 256 << 20  # bytes that the caches and the compilers' files of a run may need
_FEW_FILES = 1024  # the usual limit, which is low because each traced process needs several open files
_ACCOUNTED_BEFORE = (5, 11)  # since then, eBPF maps do not count as locked memory
_LOCKED = 64 << 20  # bytes: more than the maps of any tool need before Linux 5.11
_MEMFD_NEVER = "2"  # of vm.memfd_noexec: no file in memory is executable


def shared_memory(machine: Machine) -> Finding:
    """Whether /dev/shm exists. Traced programs need it; tools do not."""
    place = machine.dev / "shm"
    why = "programs that share memory may fail (NCCL, PyTorch's workers)"
    try:
        state = os.statvfs(place)
    except FileNotFoundError:
        action = "run as root: mkdir -m 1777 /dev/shm; mount -t tmpfs tmpfs /dev/shm"
        return Finding(MISSING, "there is no /dev/shm", why, action, needed=False)
    free = state.f_bavail * state.f_frsize
    value = f"/dev/shm, {table.size(free)} free{', noexec' if state.f_flag & os.ST_NOEXEC else ''}"
    if not os.access(place, os.W_OK | os.X_OK):
        action = "run as root: chmod 1777 /dev/shm"
        return Finding(LIMITED, f"{value}; not writable", why, action, needed=False)
    if free < _SPACE:
        action = "remove files there, or docker run --shm-size 1g"
        return Finding(LIMITED, value, why, action, needed=False)
    return ok(value)


def executable(machine: Machine) -> Finding:
    """Whether the embedded CUDA device can load the code that it compiles: from memory, or from one of these directories."""
    if machine.text(machine.proc / "sys/vm/memfd_noexec", "0") != _MEMFD_NEVER:
        return ok("files in memory can be executed")
    kept = cache.default().directory
    for place in (kept, Path(tempfile.gettempdir()), machine.dev / "shm"):
        if place and os.access(place, os.W_OK) and not os.statvfs(place).f_flag & os.ST_NOEXEC:
            return ok("the cache can be executed" if place == kept else f"{place} can be executed")
    why = "cudasim cannot load the code that it compiles"
    action = "set TMPDIR to a directory that is not mounted with noexec"
    return Finding(MISSING, "neither memory files nor a directory can be executed", why, action)


def temporary(machine: Machine) -> Finding:
    """Whether temporary files can be made."""
    why = "kernels cannot be assembled (ptxas), and cudasim cannot compile"
    action = "set TMPDIR to a writable directory with free space"
    try:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(1 << 16))
            file.flush()
            state = os.statvfs(file.fileno())
    except FileNotFoundError:  # its text names every directory
        return Finding(MISSING, "no directory is usable", why, action)
    free = state.f_bavail * state.f_frsize
    value = f"{tempfile.gettempdir()}, {table.size(free)} free"
    return Finding(LIMITED, value, why, action) if free < _SPACE else ok(value)


def caches(machine: Machine) -> Finding:
    """Whether the cache keeps results for the next run."""
    store = cache.default()
    why = "each run compiles and translates anew, which takes seconds"
    if store.directory is None:
        action = "set XDG_CACHE_HOME to a directory of yours that others cannot write to"
        return Finding(LIMITED, "no directory can be used", why, action, needed=False)
    state = os.statvfs(store.directory)
    free = state.f_bavail * state.f_frsize
    value = f"{store.directory}, {table.size(store.size())} used of {table.size(store.limit)}"
    if free < _SPACE:
        action = "free space there, or set XDG_CACHE_HOME"
        return Finding(LIMITED, f"{value}; {table.size(free)} free", why, action, needed=False)
    return ok(f"{value}; {table.size(free)} free")


def open_files(machine: Machine) -> Finding:
    """The limit on open files, which tools raise to the hard limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = "no limit" if most == resource.RLIM_INFINITY else f"{most:,} at most"
    if most != resource.RLIM_INFINITY and most < _FEW_FILES:
        why = "few processes are measured at once; the rest is missed (too many open files)"
        return Finding(LIMITED, value, why, f"raise it as root: ulimit -Hn {_FEW_FILES}")
    return ok(value)


def locked_memory(machine: Machine) -> Finding:
    """The limit on locked memory, to which eBPF maps count before Linux 5.11."""
    most, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    value = "no limit" if most == resource.RLIM_INFINITY else table.size(most)
    release = machine.text(machine.proc / "sys/kernel/osrelease").split(".")
    counted = tuple(int(part) for part in release[:2] if part.isdigit()) < _ACCOUNTED_BEFORE
    enough = most in (resource.RLIM_INFINITY,) or most >= _LOCKED
    if not counted or enough or privileges.SYS_RESOURCE in privileges.effective():
        return ok(value if counted else f"{value}; this kernel does not count eBPF maps")
    why = "cudasnoop and hipsnoop cannot make their maps"
    return Finding(LIMITED, value, why, "raise it: ulimit -l unlimited")

"""Patch the code of a running process while all its threads are stopped: all patches or none.

No thread may be inside the bytes to change (`ptrace.stopped`): neither its instruction pointer, nor a return address or signal frame
on its stack, may point into them. Otherwise all threads continue, and the tool retries a little later. The bytes must match the
agent's report and the mapped file, so that another tracer's breakpoint is left alone. The code must be mapped privately.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby, pairwise

from gpubpf.agent.definitions import PATCH
from gpubpf.errors import SessionError
from gpubpf.kernel import fresh_thread
from gpubpf.process import address_space, ptrace, target_files, traceable
from gpubpf.process.address_space import Mapping, Memory
from gpubpf.process.ptrace import NotStopped, TraceRefused
from gpubpf.record import Record

PATIENCE = 3.0  # seconds to find a moment when the code can be changed
PASSING = 1.0  # seconds to wait for another tool that briefly traces the threads
RECORD = (
    PATCH.packing()
)  # an element of a list of patches: address, old bytes, new bytes, number of bytes used
PATCH_LIMIT = 4096
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SCANNED = 128 << 10  # bytes of each thread's stack to search for addresses in the code to change


class Patch(Record):
    """A change of at most eight bytes of code."""

    address: int
    old: bytes
    new: bytes


def read_patches(file: int) -> tuple[Patch, ...]:
    """Read the list of patches from a memfd that a process created and sealed against changes. Raises SessionError otherwise."""
    try:
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ValueError
        size = os.fstat(file).st_size
        if size % RECORD.size or size > RECORD.size * PATCH_LIMIT:
            raise ValueError
        data = os.pread(file, size, 0)
        found = []
        for address, old, new, length in RECORD.iter_unpack(data):
            if not 0 < length <= 8 or address >> 47:
                raise ValueError
            found.append(Patch(address, old[:length], new[:length]))
    except (OSError, ValueError):
        raise SessionError("a traced process sent an invalid list of patches; not attaching") from None
    found.sort(key=lambda p: p.address)
    if any(a.address + len(a.old) > b.address for a, b in pairwise(found)):
        raise SessionError("a traced process sent overlapping patches; not attaching")
    return tuple(found)


def apply(pid: int, patches: Sequence[Patch]) -> float:
    """Write all patches, or none, while all threads are stopped. Return the seconds that they were stopped, over all attempts.

    Raises SessionError.
    """
    with traceable.refusals(pid):
        mapped = address_space.mappings(pid)
        for at, own in groupby(patches, lambda patch: _mapping_of(pid, mapped, patch)):
            _check_patches(pid, at, list(own))
        with Memory(pid) as memory:
            return _apply(pid, memory, mapped, patches)


def _mapping_of(pid: int, mapped: Sequence[Mapping], patch: Patch) -> Mapping:
    """Return the mapping that a patch changes. Raises SessionError if it is not code of a file, private to the process."""
    at = next((m for m in mapped if m.start <= patch.address < m.end), None)
    end = patch.address + len(patch.old)
    if at is None or end > at.end or not at.code or not at.permissions.endswith("p") or not at.file[1]:
        raise SessionError(f"pid {pid} sent a patch outside the code of a mapped file; not attaching")
    return at


def _check_patches(pid: int, at: Mapping, patches: Sequence[Patch]) -> None:
    if (held := _in_file(pid, at, patches)) is not None and held != [patch.old for patch in patches]:
        raise SessionError(
            f"another tool has already patched {os.path.basename(at.path)} in pid {pid} (gdb, frida, perf?); end it first"
        )


def _in_file(pid: int, at: Mapping, patches: Sequence[Patch]) -> list[bytes] | None:
    """Return the original bytes of each patch from the mapped file; None if it cannot be read."""
    if not address_space.is_local(at.file[0], pid):
        return None
    for opened in (
        partial(target_files.open_mapped, pid, at.start, at.end),
        partial(target_files.open_path, pid, at.path),
    ):
        with contextlib.suppress(OSError), open(opened(), "rb") as file:
            if os.fstat(file.fileno()).st_ino == at.file[1]:
                return [
                    os.pread(file.fileno(), len(p.old), at.offset + p.address - at.start) for p in patches
                ]
    return None


def _apply(pid: int, memory: Memory, mapped: Sequence[Mapping], patches: Sequence[Patch]) -> float:
    first = time.monotonic()
    total = 0.0
    changed = _ChangedCode(mapped, patches)

    def attempt() -> tuple[bool, float]:
        done = False
        began = time.perf_counter()
        try:
            with ptrace.stopped(pid) as process:
                began = process.since
                if not changed.used(memory, process.positions.values()):
                    _write(pid, memory, patches)
                    done = True
        except NotStopped:
            pass
        except TraceRefused:
            if time.monotonic() > first + PASSING:
                raise
        return done, time.perf_counter() - began

    while True:
        done, took = fresh_thread.run(attempt, "gpubpf-attach")  # ptrace.stopped needs a new thread each time
        total += took
        if done:
            return total
        if time.monotonic() > first + PATIENCE:
            raise SessionError(
                f"cannot patch pid {pid}: its threads keep using the code to change; try again, or start it with the tool"
            )
        import random  # imported here because the import is slow

        time.sleep(random.uniform(0.001, 0.02))


def _write(pid: int, memory: Memory, patches: Sequence[Patch]) -> None:
    if any(memory.read(p.address, len(p.old)) != p.old for p in patches):
        raise SessionError(f"the code of pid {pid} is not what its agent reported; not attaching")
    done = []
    try:
        for patch in patches:
            memory.write(patch.address, patch.new)
            done.append(patch)
    except OSError:
        for patch in done:
            memory.write(patch.address, patch.old)
        raise


class _ChangedCode:
    """The code that the patches change."""

    def __init__(self, mapped: Sequence[Mapping], patches: Sequence[Patch]) -> None:
        # A thread after a system call may restart it, two bytes before its instruction pointer.
        self._inside = {a for p in patches for a in range(p.address + 1, p.address + len(p.new) + 2)}
        self._starts = [m.start for m in mapped]  # reading beyond a thread's stack is slow
        self._ends = [m.end for m in mapped]
        self._beginnings = {(a >> 16).to_bytes(6, "little") for a in self._inside}

    def used(self, memory: Memory, positions: Iterable[tuple[int, int]]) -> bool:
        """Return whether a thread at one of these positions (rip, rsp) is inside this code, or will return to it."""
        for rip, rsp in positions:
            if rip in self._inside:
                return True
            low = rsp - 128 & ~7
            at = bisect_right(self._starts, low) - 1
            left = self._ends[at] - low if at >= 0 else 0
            words = memory.some(low, min(left if left > 0 else _SCANNED, _SCANNED))
            for beginning in self._beginnings:
                at = words.find(beginning)
                while at >= 0:
                    if at & 7 == 2 and int.from_bytes(words[at - 2 : at + 6], "little") in self._inside:
                        return True
                    at = words.find(beginning, at + 1)
        return False

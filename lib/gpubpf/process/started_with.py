"""What a process was started with: its command line and its environment.

Both are in the memory of the process, at addresses that the process can change (prctl, PR_SET_MM). A read of /proc/PID/cmdline or
/proc/PID/environ may wait for ever, as any read of a process's memory may (see `address_space.Memory`). So these files are not read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator

from gpubpf.process import limits, proc
from gpubpf.process.address_space import Memory

_ARGUMENTS, _ENVIRONMENT = 45, 47  # index in `proc.stat` of the start address; the end address follows it
_PIECE = 1 << 16  # bytes


def arguments(pid: int, most: int) -> list[bytes]:
    """Return the arguments in the first `most` bytes of a process's command line. Raises OSError."""
    return b"".join(_pieces(pid, _ARGUMENTS, most)).split(b"\0")


def environment(pid: int, names: Collection[str]) -> dict[str, str]:
    """Return the variables among `names` that are set in a process's environment, with their values. Raises OSError.

    As for getenv(3), the first value of a variable counts. Bytes that are not UTF-8 become surrogates (os.fsdecode). Variables beyond
    limits.LARGEST_ENVIRONMENT bytes of environment, and variables longer than limits.LONGEST_VARIABLE, are not found.
    """
    found: dict[str, str] = {}
    wanted = set(map(os.fsencode, names))
    for variable in _variables(pid):
        name, equals, value = variable.partition(b"=")
        if equals and name in wanted:
            found.setdefault(os.fsdecode(name), os.fsdecode(value))
    return found


def _variables(pid: int) -> Iterator[bytes]:
    """Yield the variables of a process's environment. Variables longer than limits.LONGEST_VARIABLE lose their name."""
    rest = b""
    size = 0
    for data in _pieces(pid, _ENVIRONMENT, limits.LARGEST_ENVIRONMENT):
        size += len(data)
        *whole, rest = (rest + data).split(b"\0")
        yield from whole
        if len(rest) > limits.LONGEST_VARIABLE:
            rest = b"="  # a variable without a name
    if size < limits.LARGEST_ENVIRONMENT:
        yield rest


def _pieces(pid: int, field: int, most: int) -> Iterator[bytes]:
    """Yield the first `most` bytes between two addresses: those in two fields of `proc.stat`."""
    with Memory(pid) as memory:
        at, end = map(int, proc.stat(pid)[field : field + 2])
        end = min(end, at + most)
        while at < end and (data := memory.some(at, min(_PIECE, end - at))):
            yield data
            at += len(data)

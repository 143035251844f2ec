"""The GPUs that hipsim emulates, and those for which a program has code. src/config.cpp chooses one for each process."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import stat
from collections.abc import Iterator, Set
from typing import BinaryIO

GPUS = ("gfx906", "gfx90a", "gfx1030")  # in the order of src/thunk/gpus.h
_SRAM_ECC = ("gfx906", "gfx90a")
_CODE = rb"-amdgcn-amd-amdhsa-+(gfx\w{1,16}(?::(?:sramecc|xnack)[+-]){0,2})"  # in the list of a fat binary's code objects
_LONGEST = 64  # bytes of such a name


def architectures(program: BinaryIO) -> set[str]:
    """Return the GPUs for which a program has code, such as {"gfx90a:xnack+", "gfx1100"}; none for a script. Raises OSError."""
    found, end = set(), b""
    while part := program.read(1 << 20):
        text = end + part
        # A name that reaches to the end may go on in the next part.
        found |= {match[1] for match in re.finditer(_CODE, text) if match.start() < len(text) - _LONGEST}
        end = text[-_LONGEST:]
    found |= {match[1] for match in re.finditer(_CODE, end)}
    return {name.decode() for name in found}


@functools.cache
def of_command(program: str) -> set[str]:
    """Return what `architectures` finds in the program that a command's first word names; none if it cannot be read."""
    with contextlib.suppress(OSError, ValueError), opened(program) as file:
        return architectures(file)
    return set()


@contextlib.contextmanager
def opened(program: str) -> Iterator[BinaryIO]:
    """Open the program that a command's first word names. Raises OSError or ValueError if there is no such file."""
    import shutil  # imported here because the import is slow

    # O_NONBLOCK: opening a FIFO must not wait.
    descriptor = os.open(shutil.which(program) or program, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EACCES, "not a file", program)
        yield file


def other_code(program: str, has_code_for: Set[str], gpu: str | None = None) -> str | None:
    """Return a message if a program has code for GPUs, but for none that hipsim emulates, or not for `gpu`; else None."""
    wanted = [gpu] if gpu else GPUS
    if not has_code_for or any(runs_on(code, one) for code in has_code_for for one in wanted):
        return None
    processors = {code.partition(":")[0] for code in has_code_for}
    *most, last = (target(one) if one in processors else one for one in wanted)
    its, ours = ", ".join(sorted(has_code_for)[:8]), f"{', '.join(most)} or {last}" if most else last
    return f"{program} has code for {its}, not for {ours}"


def target(gpu: str) -> str:
    """Return one of GPUS with its features, as HIP calls it. hipsim has no XNACK."""
    return f"{gpu}:sramecc+:xnack-" if gpu in _SRAM_ECC else gpu


def runs_on(code: str, gpu: str) -> bool:
    """Return whether code for a GPU and features, such as "gfx90a:xnack+", runs on one of GPUS."""
    processor, *features = code.split(":")
    return processor == gpu and set(features) <= set(target(gpu).split(":"))

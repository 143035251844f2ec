"""The frames of host stacks, as gpuprofile shows them: functions, and where they are.

    stack = Stack.of(process.stacks[number])            # as the agent sent it
    [frame.name for frame in stack.frames]              # outermost first: ["_start", "main", "train", "cudaLaunchKernel"]
    [frame.name for frame in stack.own()]               # the program's own: ["main", "train"]

A frame has a kind: native, Python, or a range that the program marked around its calls (NVTX).
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from gpubpf import names
from gpubpf.images import symbols
from gpubpf.show.kernel_names import shorten

if TYPE_CHECKING:
    from gpubpf.agent.definitions import RangeName
    from gpubpf.process.host_frames import HostFrame

NATIVE, PYTHON, RANGE = "native", "python", "nvtx"  # kinds of frames
INCOMPLETE = "[incomplete]"  # stands for the missing outer frames of a stack
# What starts a program or a thread, and what is between a program and the driver.
_STARTS = re.compile(r"_start$|__libc_start|lib(c|pthread|stdc\+\+)\.so|lib(c|pthread)-|ld-linux")
_RUNTIMES = re.compile(r"lib(cuda|cudart|cudasim|amdhip64|hsa-runtime64)\b")
_CALLS = re.compile(r"cu[A-Z]|cuda[A-Z]|hip[A-Z]|(__|lib)?cudart|__(cuda|hip)|__device_stub__")
_NAMELESS = re.compile(r".+\+0x[0-9a-f]+$")  # an address in a file


class Frame(NamedTuple):
    """A frame of a host stack.

    name: the function, without template arguments and parameters; `libx.so+0x1234` if no symbol covers the address. A function
    in Python has its qualified name.
    file: the source file; without line information, the program or library; "" outside files.
    line: the line in the source file; None without line information.
    object: the program or library; "" outside files, and for frames that are not native.
    kind: NATIVE, PYTHON or RANGE. A range has the name that the program gave it, and `file` is its domain.
    """

    name: str
    file: str
    line: int | None = None
    kind: str = NATIVE
    object: str = ""


class Stack(NamedTuple):
    """A host stack, outermost frame first. complete: no outer frames are missing."""

    frames: tuple[Frame, ...] = ()
    complete: bool = False

    @staticmethod
    def of(frames: Sequence[HostFrame]) -> Stack:
        """Return the stack that the agent of a process sent, innermost frame first. No frames: an unknown stack."""
        missing = bool(frames) and not frames[-1].address and frames[-1].symbol in symbols.MISSING
        found = frames[:-1] if missing else frames
        return Stack(tuple(_frame(frame) for frame in reversed(found)), bool(found) and not missing)

    def within(self, ranges: Sequence[RangeName]) -> Stack:
        """Return the stack inside these ranges, the outermost range first."""
        return self._replace(
            frames=(*(Frame(one.name, one.domain, kind=RANGE) for one in ranges), *self.frames)
        )

    @property
    def ranges(self) -> tuple[Frame, ...]:
        """The ranges in which the stack is."""
        return tuple(frame for frame in self.frames if frame.kind == RANGE)

    @property
    def host(self) -> tuple[Frame, ...]:
        """The frames of functions."""
        return self.frames[len(self.ranges) :]

    @property
    def shown(self) -> tuple[Frame, ...]:
        """The frames, with one that stands for the missing outer frames of the host."""
        ranges = self.ranges
        missing = () if self.complete else (Frame(INCOMPLETE, ""),)
        return (*ranges, *missing, *self.host)

    def own(self) -> tuple[Frame, ...]:
        """Return the ranges, and the host's frames without those that start the program or thread, and those of the GPU's runtime.

        In a stack with Python frames, the interpreter's native frames are left out, too, and so are functions without a name that
        Python calls, such as those of a module that calls the driver. If there are no others, return all.
        """
        ranges = self.ranges
        host = frames = self.host
        interpreted = any(frame.kind == PYTHON for frame in frames)
        if interpreted:
            frames = tuple(frame for frame in frames if not _matches(symbols.INTERPRETER, frame))
        first, last = 0, len(frames)
        if self.complete:
            while first < last and _matches(_STARTS, frames[first]):
                first += 1
        ends = (_RUNTIMES, _CALLS, *((_NAMELESS,) if interpreted else ()))
        while last > first and any(_matches(pattern, frames[last - 1]) for pattern in ends):
            last -= 1
        return (*ranges, *(frames[first:last] or host))


def _matches(pattern: re.Pattern[str], frame: Frame) -> bool:
    texts = frame.name, os.path.basename(frame.object or frame.file)
    return frame.kind == NATIVE and any(pattern.match(text) for text in texts)


def _frame(frame: HostFrame) -> Frame:
    if frame.python:
        return Frame(frame.symbol, frame.file, frame.line or None, PYTHON)
    found = symbols.lookup(frame.file, frame.offset, frame.mapped) if frame.file else None
    if found is not None:
        name = found.name
    elif frame.symbol:  # what the process itself found: an exported function
        name = shorten(names.demangle(frame.symbol).full)
    elif frame.file:
        name = f"{os.path.basename(frame.file)}+{frame.offset:#x}"
    else:
        name = f"{frame.address:#x}"
    place = symbols.line_at(frame.file, frame.offset, frame.mapped) if found is not None else None
    file, line = place or (frame.file, None)
    return Frame(name, file, line, object=frame.file)

"""Find the names of functions at addresses of programs and libraries, from their symbol tables (System V ABI, chapter 4).

An address is one in the file's own address space, as in its symbol table: not an offset in the file.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf import elf, names
from gpubpf.agent.definitions import STACK_NOT_UNWOUND, STACK_TOO_DEEP
from gpubpf.elf import Elf
from gpubpf.errors import ImageError
from gpubpf.process import address_space, limits, patience, proc, scans, target_files
from gpubpf.record import Record

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.agent.protocol import StackFrame

_MOST_FILES = 64  # files whose symbols are kept
_read_files: dict[
    tuple[int, ...], _Functions | None
] = {}  # by device, inode, size and time of the last change
MISSING = (STACK_TOO_DEEP, STACK_NOT_UNWOUND)  # symbols of frames that stand for missing ones
_spent: defaultdict[int, float] = defaultdict(float)  # seconds by user; -1: of processes that have ended
_FUNCTIONS = (elf.STT_FUNC, elf.STT_GNU_IFUNC)
# Libraries between a program's own code and the driver.
_LIBRARIES = re.compile(r"lib(cuda|cudart|cudasim|gpubpf|stdc\+\+|c|pthread|dl|gcc_s)\b")
_RUNTIME = re.compile(r"(cu[A-Z]|cuda[A-Z]|cudart|__cuda|libcudart|_?_?cudart)")


class FunctionOffset(Record):
    """A function and an address in it: the demangled name without arguments, and the offset from its start in bytes."""

    name: str
    offset: int


class _Functions(Record):
    """The functions of a file, sorted by address."""

    starts: np.ndarray[Any, Any]
    ends: np.ndarray[Any, Any]
    name_offsets: np.ndarray[Any, Any]  # in `text`
    text: bytes


def lookup(path: str, address: int, pid: int = 0) -> FunctionOffset | None:
    """Return the function that contains an address of the file `path`; None if no symbol covers it.

    For a return address, look up one byte less, because it is the address of the next instruction.

    pid: the process that names the file. The file is looked for in this process's root directory, or, when the process has ended, in
    that of the tool. 0: in that of the tool.
    """
    functions = _functions(path, pid)
    if functions is None:
        return None
    index = int(functions.starts.searchsorted(functions.starts.dtype.type(address), "right")) - 1
    if index < 0 or address >= int(functions.ends[index]):
        return None
    mangled = elf.string_at(functions.text, int(functions.name_offsets[index]))
    return FunctionOffset(names.demangle(mangled).short, address - int(functions.starts[index]))


def describe(path: str, address: int) -> str:
    """Return a place in a file as stacks show it: `function+0x1f (libx.so)`, or `libx.so+0x12345` without a symbol."""
    file = os.path.basename(path) or "?"
    found = lookup(path, address)
    return f"{found.name}+{found.offset:#x} ({file})" if found else f"{file}+{address:#x}"


def frame_of(frame: StackFrame) -> str:
    """Return a frame of a host stack in the form of `describe`. Outside files, use the process's name for it or the address."""
    if frame.file:
        return describe(frame.file, frame.offset)
    return frame.symbol or f"{frame.address:#x}"


def callers(stacks: Iterable[Sequence[StackFrame]]) -> dict[Sequence[StackFrame], str]:
    """Return the `caller` of each host stack, with the address of the call where callers would otherwise look the same."""
    found = {stack: caller(stack) for stack in stacks}
    often = Counter(found.values())
    return {stack: caller(stack, exact=True) if often[name] > 1 else name for stack, name in found.items()}


def caller(stack: Sequence[StackFrame], exact: bool = False) -> str:
    """Return the function that called the driver or its runtime, from a host stack; "" if there is none.

    exact: with the address of the call, as `frame_of` shows it.
    """
    for frame in stack:
        if frame.symbol in MISSING and not frame.address:
            continue
        file = os.path.basename(frame.file)
        if _LIBRARIES.match(file):
            continue
        found = lookup(frame.file, frame.offset) if frame.file else None
        name = found.name if found else names.demangle(frame.symbol).short
        if name and _RUNTIME.match(name):
            continue
        if exact or not name:
            return frame_of(frame)
        return f"{name} ({file})" if file else name
    return ""


@functools.lru_cache(maxsize=256)
def _functions(path: str, pid: int) -> _Functions | None:
    user = scans.user_of(pid) if pid else -1

    def look() -> _Functions | None:
        began = time.thread_time()
        try:
            return _functions_of(path, pid)
        finally:
            _spent[user] += time.thread_time() - began

    if _spent[user] > limits.SYMBOLS:
        return None
    try:
        return patience.within(patience.LOOK_WAIT, pid, look)
    except (OSError, ImageError, ValueError):
        return None


def _functions_of(path: str, pid: int) -> _Functions | None:
    """Read a file that a process names. Raises OSError, ImageError, ValueError."""
    try:
        directory = proc.link(pid or os.getpid(), "cwd")
    except FileNotFoundError:  # the process has ended, perhaps just now
        pid, directory = os.getpid(), os.getcwd()
    pid = pid or os.getpid()
    place = target_files.open_path(pid, os.path.join(directory, path), os.O_PATH)
    try:
        if not address_space.on_local_mount(place, pid):
            return None  # its server may never answer
        file = target_files.open_regular(f"/proc/self/fd/{place}")
    finally:
        os.close(place)
    try:
        state = os.fstat(file)
        identity = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
        if identity not in _read_files:
            if len(_read_files) >= _MOST_FILES:
                del _read_files[next(iter(_read_files))]
            _read_files[identity] = _read(elf.of_file(file))
        return _read_files[identity]
    finally:
        os.close(file)


def _read(file: Elf) -> _Functions | None:
    import numpy as np

    for symbols, text in file.symbol_tables(_FUNCTIONS):
        symbols = symbols[np.lexsort((symbols["size"], symbols["value"]))]
        # Assembly functions may have no size. They extend to the next function.
        following = np.append(symbols["value"][1:], np.uint64(2**64 - 1))
        ends = np.where(symbols["size"] > 0, symbols["value"] + symbols["size"], following)
        return _Functions(symbols["value"], ends, symbols["name"], text)
    return None

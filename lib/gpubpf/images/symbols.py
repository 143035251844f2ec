"""Find the names of functions at addresses of programs and libraries, from their symbol tables (System V ABI, chapter 4), and their
lines.

An address is one in the file's own address space, as in its symbol table: not an offset in the file.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gpubpf import elf, names
from gpubpf.agent.definitions import STACK_NOT_UNWOUND, STACK_TOO_DEEP
from gpubpf.elf import Elf
from gpubpf.errors import ImageError, out_of_files
from gpubpf.images.source_lines import Place, SourceLines
from gpubpf.process import address_space, host_frames, limits, patience, target_files
from gpubpf.process.host_frames import HostFrame, Identity, MappedFile
from gpubpf.record import Record

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
_LEAST_CHARGE = 1 << 16  # bytes that each file counts at least, so that the number of files is limited, too
_MOST_UNREADABLE = 1024
_read_files: dict[Identity, _Functions] = {}
_charges: dict[Identity, tuple[int, int]] = {}  # user and bytes of each of them, oldest first
_MOST_LINES, _MOST_LINE_TABLES = 1 << 16, 4
_lines: dict[tuple[Identity, int], Place | None] = {}  # the lines of addresses
_line_tables: dict[Identity, SourceLines | None] = {}  # None: without lines
_unreadable: dict[tuple[str, MappedFile], None] = {}  # files that were not read, and need not be tried again
MISSING = (STACK_TOO_DEEP, STACK_NOT_UNWOUND)  # symbols of frames that stand for missing ones
_spent: defaultdict[int, float] = defaultdict(float)  # seconds by user
_FUNCTIONS = (elf.STT_FUNC, elf.STT_GNU_IFUNC)
# Libraries between a program's own code and the driver.
_LIBRARIES = re.compile(r"lib(cuda|cudart|cudasim|gpubpf|stdc\+\+|c|pthread|dl|gcc_s)\b")
# What runs a program in Python, and calls C functions for it.
INTERPRETER = re.compile(r"(lib)?python3[.\d]*[a-z]*(\.so[.\d]*)?$|libffi\.so|_ctypes\.")
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
    memory: int  # bytes


def lookup(path: str, address: int, mapped: MappedFile | None) -> FunctionOffset | None:
    """Return the function that contains an address of the file `path`; None if no symbol covers it.

    For a return address, look up one byte less, because it is the address of the next instruction.

    mapped: the file that the process had mapped there. If `path` is another file now, such as a new build, no name is known. The file
    is looked for in the root directory of its process, or, when the process has ended, in that of the tool. None: no name is known.
    """
    functions = _functions(path, mapped) if mapped is not None else None
    if functions is None:
        return None
    index = int(functions.starts.searchsorted(functions.starts.dtype.type(address), "right")) - 1
    if index < 0 or address >= int(functions.ends[index]):
        return None
    mangled = elf.string_at(functions.text, int(functions.name_offsets[index]))
    return FunctionOffset(names.demangle(mangled).short, address - int(functions.starts[index]))


def line_at(path: str, address: int, mapped: MappedFile | None) -> Place | None:
    """Return the source file and line of an address of the file `path`; None: not known. See `lookup`."""
    if mapped is None:
        return None
    key = mapped.identity, address
    if key not in _lines:
        if len(_lines) >= _MOST_LINES:
            del _lines[next(iter(_lines))]
        _lines[key] = _line_at(path, address, mapped)
    return _lines[key]


def _line_at(path: str, address: int, mapped: MappedFile) -> Place | None:
    if _spent[mapped.user] > limits.SYMBOLS:
        return None

    def look() -> Place | None:
        began = time.thread_time()
        try:
            if mapped.identity not in _line_tables:
                while len(_line_tables) >= _MOST_LINE_TABLES:
                    del _line_tables[next(iter(_line_tables))]
                _line_tables[mapped.identity] = _of_file(path, mapped, _read_lines)
            table = _line_tables[mapped.identity]
            return table.at(address) if table is not None else None
        finally:
            _spent[mapped.user] += time.thread_time() - began

    try:
        return patience.within(patience.LOOK_WAIT, mapped.pid, look)
    except Exception:  # on damaged input, pyelftools may raise any exception
        return None


def _read_lines(file: int) -> SourceLines | None:
    try:
        return SourceLines(file)
    except Exception:  # as above
        return None


def describe(path: str, address: int, mapped: MappedFile | None) -> str:
    """Return a place in a file as stacks show it: `function+0x1f (libx.so)`, or `libx.so+0x12345` without a symbol."""
    file = os.path.basename(path) or "?"
    found = lookup(path, address, mapped)
    return f"{found.name}+{found.offset:#x} ({file})" if found else f"{file}+{address:#x}"


def frame_of(frame: HostFrame) -> str:
    """Return a frame of a host stack in the form of `describe`. Outside files, use the process's name for it or the address.

    A frame of Python has the form `function (file.py:12)`.
    """
    if frame.python:
        return f"{frame.symbol} ({os.path.basename(frame.file)}:{frame.line or '?'})"
    if frame.file:
        return describe(frame.file, frame.offset, frame.mapped)
    return frame.symbol or f"{frame.address:#x}"


def callers(stacks: Iterable[Sequence[HostFrame]]) -> dict[Sequence[HostFrame], str]:
    """Return the `caller` of each host stack, with the address of the call where callers would otherwise look the same."""
    found = {stack: caller(stack) for stack in stacks}
    often = Counter(found.values())
    return {stack: caller(stack, exact=True) if often[name] > 1 else name for stack, name in found.items()}


def caller(stack: Sequence[HostFrame], exact: bool = False) -> str:
    """Return the function that called the driver or its runtime, from a host stack; "" if there is none.

    exact: with the address of the call, as `frame_of` shows it.
    """
    interpreted = any(frame.python for frame in stack)
    for frame in stack:
        if frame.symbol in MISSING and not frame.address:
            continue
        if frame.python:
            return frame_of(frame)
        file = os.path.basename(frame.file)
        if _LIBRARIES.match(file) or (interpreted and INTERPRETER.match(file)):
            continue
        found = lookup(frame.file, frame.offset, frame.mapped) if frame.file else None
        name = found.name if found else names.demangle(frame.symbol).short
        # A function without a name that Python calls is one of a module that calls the driver.
        if _RUNTIME.match(name) if name else interpreted:
            continue
        if exact or not name:
            return frame_of(frame)
        return f"{name} ({file})" if file else name
    return ""


def _functions(path: str, mapped: MappedFile) -> _Functions | None:
    """Return the functions of a mapped file, which its process calls `path`; None if they cannot be read."""
    if (known := _read_files.get(mapped.identity)) is not None:
        return known
    key = path, mapped
    if key in _unreadable or _spent[mapped.user] > limits.SYMBOLS:
        return None

    def look() -> _Functions | None:
        began = time.thread_time()
        try:
            return _of_file(path, mapped, lambda file: _read(elf.of_file(file)))
        finally:
            _spent[mapped.user] += time.thread_time() - began

    try:
        found = patience.within(patience.LOOK_WAIT, mapped.pid, look)
    except (OSError, ImageError, ValueError) as error:
        if out_of_files(error):
            return None  # there may be more files the next time
        found = None
    if found is None or not _keep(mapped.identity, mapped.user, found):
        if len(_unreadable) >= _MOST_UNREADABLE:
            del _unreadable[next(iter(_unreadable))]
        _unreadable[key] = None
        return None
    return found


def _keep(identity: Identity, user: int, functions: _Functions) -> bool:
    """Keep the functions of a file, in place of the oldest ones of the same user. Return False if the file is too large."""
    size = max(functions.memory, _LEAST_CHARGE)

    def exceeded() -> str:
        taken: Counter[int] = Counter()
        for other, (whose, charge) in _charges.items():
            taken[whose] += charge if other in _read_files else 0
        return limits.exceeded(taken, user, limits.SYMBOL_BYTES, limits.SYMBOL_BYTES_OF_USER, size)

    while exceeded():
        oldest = next((other for other, (whose, _) in _charges.items() if whose == user), None)
        if oldest is None:
            return False
        del _charges[oldest], _read_files[oldest]
    _read_files[identity], _charges[identity] = functions, (user, size)
    return True


def _of_file(path: str, mapped: MappedFile, read: Callable[[int], T | None]) -> T | None:
    """Read a file that a process mapped. Return None if another file is there now. Raises OSError, and what `read` raises."""
    pid = mapped.pid
    try:
        place = host_frames.opened(pid, path)
    except (
        FileNotFoundError,
        ProcessLookupError,
    ):  # perhaps the process has ended; its file may be in the tool's root directory, too
        pid = os.getpid()
        place = host_frames.opened(pid, path)
    try:
        if not address_space.on_local_mount(place, pid):
            return None  # its server may never answer
        if Identity.of(os.fstat(place)) != mapped.identity:
            return None
        file = target_files.open_regular(f"/proc/self/fd/{place}")
    finally:
        os.close(place)
    try:
        found = read(file)
        return found if Identity.of(os.fstat(file)) == mapped.identity else None
    finally:
        os.close(file)


def _read(file: Elf) -> _Functions | None:
    import numpy as np

    for symbols, text in file.symbol_tables(_FUNCTIONS, limits.SYMBOL_BYTES_OF_USER):
        symbols = symbols[np.lexsort((symbols["size"], symbols["value"]))]
        # Assembly functions may have no size. They extend to the next function.
        following = np.append(symbols["value"][1:], np.uint64(2**64 - 1))
        ends = np.where(symbols["size"] > 0, symbols["value"] + symbols["size"], following)
        return _Functions(
            symbols["value"], ends, symbols["name"], text, symbols.nbytes + ends.nbytes + len(text)
        )
    return None

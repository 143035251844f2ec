"""Find functions in one process, for programs that run there alone.

Unlike `uprobes`, this also finds functions that a program does not export, in its full symbol table.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from gpubpf import elf
from gpubpf.errors import ImageError
from gpubpf.linux import libraries
from gpubpf.linux.libraries import LibraryNames


@dataclass(frozen=True)
class FunctionProbe:
    """A program, and the function of a program or library that it is attached to. `path`: as `LibraryNames` takes it. `offset`: of an
    instruction in the function, in bytes.

    Raises UsageError for a path that names no library."""

    function: str
    path: str
    symbol: str
    returns: bool = False
    offset: int = 0

    def __post_init__(self) -> None:
        LibraryNames(self.path)

    @property
    def what(self) -> str:
        return f"{self.symbol} of {self.path}"


@dataclass(frozen=True)
class FunctionPlace:
    """Where a function is: a path that this process can open while the place is used, and the offset in the file."""

    path: str
    offset: int


@contextlib.contextmanager
def found(pid: int, probe: FunctionProbe) -> Iterator[FunctionPlace | str]:
    """Yield where the function of a probe is in a process, or why it is not there, as the end of a sentence about the process."""
    try:
        mapped = next(iter(libraries.mapped(pid, LibraryNames(probe.path))), None)
        if mapped is None:
            yield f"has not loaded {probe.path}"
            return
        file = libraries.open_mapped(mapped)
    except OSError as error:
        yield f"cannot be read ({error.strerror})"
        return
    try:
        offset = _offset(file, os.path.basename(mapped.path), probe.symbol, probe.offset)
        yield offset if isinstance(offset, str) else FunctionPlace(f"/proc/self/fd/{file}", offset)
    finally:
        os.close(file)


def lacking(path: str, symbol: str, offset: int) -> str:
    """Return what a path of this process lacks of an instruction in a function, as a sentence; "" if it lacks nothing.

    The name of a library lacks nothing: only the traced process knows its file."""
    if "/" not in path:
        return ""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    try:
        found = _offset(file, path, symbol, offset)
        return f"it {found}" if isinstance(found, str) else ""
    finally:
        os.close(file)


def _offset(file: int, library: str, symbol: str, offset: int) -> int | str:
    """Return where an instruction of a function is in a file, or why it is not there, as the end of a sentence."""
    function = _function(file, symbol)
    if function is None:
        return f"has no function {symbol} in {library}"
    if offset and offset >= function[1]:
        return f"has {function[1]:,} bytes of code in function {symbol} in {library}, so none at +{offset:#x}"
    return function[0] + offset


def _function(file: int, symbol: str) -> tuple[int, int] | None:
    """Return where a function is in a file, and its size in bytes; None if the file does not have it."""
    library = elf.LoadedFile(file)
    with contextlib.suppress(OSError, ImageError):
        exported = elf.exports(library).get(symbol)
        if exported is not None:
            return library.offset(exported.address), exported.size
        wanted = symbol.encode()
        for symbols, names in elf.of_file(file).symbol_tables((elf.STT_FUNC,)):
            at = _string(names, wanted)
            for one in symbols[symbols["name"] == at] if at is not None else ():
                return library.offset(int(one["value"])), int(one["size"])
    return None


def _string(names: bytes, wanted: bytes) -> int | None:
    """Return the offset of a whole string in a table of names."""
    at = names.find(b"\0" + wanted + b"\0")
    return at + 1 if at >= 0 else None

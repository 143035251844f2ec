"""Addresses in files → names of functions, by the files' symbol tables (System V ABI, chapter 4)."""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpubpf import names
from gpubpf.errors import ImageError
from gpubpf.images.fatbin import Elf, elf_of_file

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.agent.protocol import StackFrame

_SYMTAB, _DYNSYM = 2, 11  # section types
_FUNCTIONS = (2, 10)  # STT_FUNC, STT_GNU_IFUNC
_LARGEST = 1 << 28  # bytes of a symbol table or its names
# Between a program's own code and the driver.
_LIBRARIES = re.compile(r"lib(cuda|cudart|cudasim|gpubpf|stdc\+\+|c|pthread|dl|gcc_s)\b")
_RUNTIME = re.compile(r"(cu[A-Z]|cuda[A-Z]|cudart|__cuda|libcudart|_?_?cudart)")


@dataclass(frozen=True)
class Symbol:
    """A function, demangled and without its arguments, and how far into it the address is."""

    name: str
    offset: int


@dataclass(frozen=True)
class _Table:
    """Functions sorted by address, and where the file's parts are in memory."""

    starts: np.ndarray[Any, Any]
    ends: np.ndarray[Any, Any]
    at: np.ndarray[Any, Any]  # of the names, in `text`
    text: bytes
    loads: tuple[tuple[int, int, int], ...]  # (offset in the file, address, bytes)


def lookup(path: str, offset: int) -> Symbol | None:
    """The function that has the byte at `offset` of the file `path`; None where no symbol tells.

    A return address is that of the next instruction: look up one byte less.
    """
    table = _table(path)
    if table is None:
        return None
    address = next((a + offset - o for o, a, n in table.loads if o <= offset < o + n), None)
    if address is None:
        return None
    index = int(table.starts.searchsorted(address, "right")) - 1
    if index < 0 or address >= int(table.ends[index]):
        return None
    at = int(table.at[index])
    end = table.text.find(b"\0", at)
    mangled = table.text[at : end if end >= 0 else None].decode("utf-8", "replace")
    return Symbol(names.demangle(mangled).short, address - int(table.starts[index]))


def describe(path: str, offset: int) -> str:
    """As a stack shows it: `function+0x1f (libx.so)`, or `libx.so+0x12345` where no symbol tells."""
    file = os.path.basename(path) or "?"
    found = lookup(path, offset)
    return f"{found.name}+{found.offset:#x} ({file})" if found else f"{file}+{offset:#x}"


def frame_of(frame: StackFrame) -> str:
    """A frame of a host stack, likewise; what the process itself knows, or the address, where it is in no file."""
    if frame.file:
        return describe(
            frame.file, max(frame.offset - 1, 0)
        )  # a return address is that of the next instruction
    return frame.symbol or f"{frame.address:#x}"


def caller(stack: Sequence[StackFrame]) -> str:
    """Who called the driver: the innermost function of a host stack that is neither the driver's nor the runtime's, or nothing."""
    for frame in stack:
        file = os.path.basename(frame.file)
        if _LIBRARIES.match(file):
            continue
        found = lookup(frame.file, max(frame.offset - 1, 0)) if frame.file else None
        name = found.name if found else names.demangle(frame.symbol).short
        if name and _RUNTIME.match(name):
            continue
        return f"{name} ({file})" if name and file else name or frame_of(frame)
    return ""


@functools.lru_cache(maxsize=256)
def _table(path: str) -> _Table | None:
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            return _read(elf_of_file(file.fileno()))
    except (OSError, ImageError, ValueError):
        return None


def tables(elf: Elf, types: Sequence[int]) -> Iterator[tuple[np.ndarray[Any, Any], bytes]]:
    """The symbols of these types that a file defines, as Elf64_Sym (`name`, `info`, `value`, `size`, …), with the text that their
    names are in: of the full table, then of that of what is exported. None that is empty, or too large. Raises OSError, ImageError."""
    import numpy as np

    kind = np.dtype(
        [
            ("name", "<u4"),
            ("info", "u1"),
            ("other", "u1"),
            ("section", "<u2"),
            ("value", "<u8"),
            ("size", "<u8"),
        ]
    )
    for section in sorted((s for s in elf.sections if s.type in (_SYMTAB, _DYNSYM)), key=lambda s: s.type):
        strings = elf.sections[section.link] if section.link < len(elf.sections) else None
        if strings is None or max(section.size, strings.size) > _LARGEST:
            continue
        data = elf.contents(section)
        found = np.frombuffer(data, kind, len(data) // kind.itemsize)
        found = found[np.isin(found["info"] & 15, types) & (found["section"] != 0)]
        if len(found):
            yield found, elf.contents(strings)


def _read(elf: Elf) -> _Table | None:
    import numpy as np

    for symbols, text in tables(elf, _FUNCTIONS):
        symbols = symbols[np.lexsort((symbols["size"], symbols["value"]))]
        # Assembly may give no size: such a function goes on to the next one.
        following = np.append(symbols["value"][1:], np.uint64(2**64 - 1))
        ends = np.where(symbols["size"] > 0, symbols["value"] + symbols["size"], following)
        return _Table(symbols["value"], ends, symbols["name"], text, elf.loads)
    return None

"""Find the names of functions at addresses in files, from the files' symbol tables (System V ABI, chapter 4)."""

from __future__ import annotations

import functools
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gpubpf import elf, names
from gpubpf.elf import Elf
from gpubpf.errors import ImageError
from gpubpf.record import Record

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.agent.protocol import StackFrame

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
    loads: tuple[elf.Segment, ...]


def lookup(path: str, offset: int) -> FunctionOffset | None:
    """Return the function that contains the byte at `offset` of the file `path`; None if no symbol covers it.

    For a return address, look up one byte less, because it is the address of the next instruction.
    """
    functions = _functions(path)
    address = elf.address_of(functions.loads, offset) if functions is not None else None
    if functions is None or address is None:
        return None
    index = int(functions.starts.searchsorted(address, "right")) - 1
    if index < 0 or address >= int(functions.ends[index]):
        return None
    mangled = elf.string_at(functions.text, int(functions.name_offsets[index]))
    return FunctionOffset(names.demangle(mangled).short, address - int(functions.starts[index]))


def describe(path: str, offset: int) -> str:
    """Return a place in a file as stacks show it: `function+0x1f (libx.so)`, or `libx.so+0x12345` without a symbol."""
    file = os.path.basename(path) or "?"
    found = lookup(path, offset)
    return f"{found.name}+{found.offset:#x} ({file})" if found else f"{file}+{offset:#x}"


def frame_of(frame: StackFrame) -> str:
    """Return a frame of a host stack in the form of `describe`. Outside files, use the process's name for it or the address."""
    if frame.file:
        return describe(frame.file, max(frame.offset - 1, 0))
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
        file = os.path.basename(frame.file)
        if _LIBRARIES.match(file):
            continue
        found = lookup(frame.file, max(frame.offset - 1, 0)) if frame.file else None
        name = found.name if found else names.demangle(frame.symbol).short
        if name and _RUNTIME.match(name):
            continue
        if exact or not name:
            return frame_of(frame)
        return f"{name} ({file})" if file else name
    return ""


@functools.lru_cache(maxsize=256)
def _functions(path: str) -> _Functions | None:
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            return _read(elf.of_file(file.fileno()))
    except (OSError, ImageError, ValueError):
        return None


def _read(file: Elf) -> _Functions | None:
    import numpy as np

    for symbols, text in file.symbol_tables(_FUNCTIONS):
        symbols = symbols[np.lexsort((symbols["size"], symbols["value"]))]
        # Assembly functions may have no size. They extend to the next function.
        following = np.append(symbols["value"][1:], np.uint64(2**64 - 1))
        ends = np.where(symbols["size"] > 0, symbols["value"] + symbols["size"], following)
        return _Functions(symbols["value"], ends, symbols["name"], text, file.loads)
    return None

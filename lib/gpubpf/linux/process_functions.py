"""Find functions in one process, for programs that run there alone.

Unlike `uprobes`, this also finds functions that a program does not export, in its full symbol table.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from gpubpf import elf, names
from gpubpf.linux import function_names, libraries
from gpubpf.linux.function_names import NamedFunction
from gpubpf.linux.indirect_functions import implementations
from gpubpf.linux.libraries import LibraryNames, MappedCode
from gpubpf.linux.returns import Code, Returns
from gpubpf.process import target_files
from gpubpf.record import Record


class FunctionProbe(Record):
    """An eBPF program, and the function of a program or library that it is attached to.

    path: see `LibraryNames`.
    symbol: see `function_names.named`.
    offset: offset of an instruction in the function, in bytes.

    Raises UsageError if `path` does not name a library."""

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


class FunctionPlace(Record):
    """Where a function is: a path that this process can open while the place is used, and offsets in the file.

    returns: offsets of the return instructions, for a probe at returns."""

    path: str
    offset: int
    returns: tuple[int, ...] = ()


@contextlib.contextmanager
def found(pid: int, probe: FunctionProbe) -> Iterator[tuple[FunctionPlace, ...] | str]:
    """Yield the places of a probe's functions in a process. If a function is missing, yield why, as the end of a sentence."""
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
        yield _places(pid, mapped, file, probe)
    except OSError as error:
        yield f"cannot be read ({error.strerror})"
    finally:
        os.close(file)


def lacking(path: str, symbol: str, offset: int) -> str:
    """Return a sentence if the file at `path` has no such function or instruction; "" if it has.

    If `path` is only the name of a library, return "": only the traced process determines its file."""
    if "/" not in path:
        return ""
    try:
        file = target_files.open_regular(
            path
        )  # an object may name a device, and to open one may have effects
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    try:
        found = _functions(file, path, symbol, offset)
        return f"it {found}" if isinstance(found, str) else ""
    finally:
        os.close(file)


def _functions(file: int, library: str, symbol: str, offset: int) -> tuple[NamedFunction, ...] | str:
    """Return the functions with a name. If there is none, or `offset` is not in it, return why: ``has no function f in libf.so``."""
    functions = function_names.named(file, symbol)
    if isinstance(functions, str):
        return f"{functions} in {library}"
    if not offset:
        return functions
    if len(functions) > 1:
        full = ", ".join(names.demangle(f.name).full for f in functions)
        return f"has {len(functions)} functions {symbol} in {library}, so +{offset:#x} is not clear; name one of {full}"
    if functions[0].chosen_at_run_time:
        return f"chooses function {symbol} in {library} at run time, so its instruction +{offset:#x} is not known"
    if offset >= functions[0].size:
        return f"has {functions[0].size:,} bytes of code in function {symbol} in {library}, so none at +{offset:#x}"
    return functions


def _places(pid: int, mapped: MappedCode, file: int, probe: FunctionProbe) -> tuple[FunctionPlace, ...] | str:
    base = os.path.basename(mapped.path)
    functions = _functions(file, base, probe.symbol, probe.offset)
    if isinstance(functions, str):
        return functions
    library, code = elf.LoadedFile(file), Code(file)
    addresses: list[int] = []
    for f in functions:
        if not f.chosen_at_run_time:
            addresses.append(f.address)
            continue
        made = implementations(pid, mapped, code, f.name, f.address)
        if isinstance(made, str) or not made:
            where = f"it chose one in {made}" if made else "it is not known which"
            return f"chooses function {probe.symbol} of {base} at run time, and {where}"
        addresses += made
    places = []
    for address in addresses:
        if code.is_misread(address + probe.offset):
            what = f"instruction +{probe.offset:#x}" if probe.offset else "first instruction"
            return f"cannot have a probe at {probe.symbol} of {base}: its {what} is a vector instruction that Linux takes for a jump"
        ends = code.returns(address) if probe.returns else Returns(())
        if ends.unseen:
            return f"does not show where function {probe.symbol} in {base} returns ({ends.unseen})"
        at_returns = tuple(library.offset(at) for at in ends.addresses)
        places.append(
            FunctionPlace(f"/proc/self/fd/{file}", library.offset(address) + probe.offset, at_returns)
        )
    return tuple(places)

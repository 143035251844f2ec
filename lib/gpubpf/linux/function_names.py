"""Find the functions of a program or library that have the name that a user typed.

    named(file, "malloc")                   # the symbol's default version, which newly linked programs use
    named(file, "memcpy@GLIBC_2.2.5")       # another version
    named(file, "ns::scale")                # C++: every overload, in every instance of a template
    named(file, "ns::scale(float*, int)")   # one overload

Exported functions come first, then those of the full symbol table.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gpubpf import elf, names
from gpubpf.errors import ImageError
from gpubpf.record import Record

if TYPE_CHECKING:
    import numpy as np

_IDENTIFIER = re.compile(r"\w+")
_MOST_LISTED = 8
_MOST_SYMBOLS = 1 << 20  # symbols of one table to compare; the file is untrusted


class NamedFunction(Record):
    """A function.

    address: its address in the file.
    size: bytes; 0 if unknown.
    chosen_at_run_time: at the address is the resolver, which chooses an implementation when the process starts (STT_GNU_IFUNC).
    """

    name: str
    address: int
    size: int
    chosen_at_run_time: bool


def named(file: int, wanted: str) -> tuple[NamedFunction, ...] | str:
    """Return the functions of an open file with a name, each address once. If there is none, return why: ``has no function f``."""
    name, at, version = wanted.partition("@")
    exported: list[elf.Exported] = []
    with contextlib.suppress(OSError, ImageError):
        exported = list(elf.of_file(file).exported())
    same = [e for e in exported if e.name == name]
    version = version.removeprefix("@")
    if at:
        chosen = [e for e in same if e.version == version]
        if same and not chosen:
            return f"has function {name} only in versions {_versions(same)}"
    else:
        chosen = [e for e in same if e.default] or same
        if len({e.symbol.value for e in chosen}) > 1:
            return f"has function {name} in versions {_versions(same)}; name one, as in {name}@{chosen[0].version}"
    if chosen:
        return _once((e.name, e.symbol) for e in chosen)
    found = _once((n, s) for n, s in _symbols(file, name.encode()) if n == name) if not at else ()
    if not found:
        text = [(e.name, e.symbol) for e in exported if e.name.startswith("_Z")]
        candidates = [*text, *_symbols(file, b"_Z")] if _is_cxx(wanted) else []
        found = _once((n, s) for n, s in candidates if _may_be(wanted, n) and _is(wanted, n))
    return found or f"has no function {wanted}"


def _versions(found: Iterable[elf.Exported]) -> str:
    return ", ".join(sorted(f"{e.version or 'none'}{' (the default)' if e.default else ''}" for e in found))


def _once(found: Iterable[tuple[str, elf.SymbolEntry]]) -> tuple[NamedFunction, ...]:
    made = {
        symbol.value: NamedFunction(name, symbol.value, symbol.size, symbol.type == elf.STT_GNU_IFUNC)
        for name, symbol in found
    }
    return tuple(made.values())


def _symbols(file: int, beginning: bytes) -> Iterator[tuple[str, elf.SymbolEntry]]:
    """Yield the functions of the symbol tables whose names begin with some bytes."""
    with contextlib.suppress(OSError, ImageError):
        for symbols, text in elf.of_file(file).symbol_tables((elf.STT_FUNC, elf.STT_GNU_IFUNC)):
            for symbol in symbols[_begins(text, symbols["name"], beginning)][:_MOST_SYMBOLS].tolist():
                entry = elf.SymbolEntry._make(symbol)
                yield elf.string_at(text, entry.name), entry


def _begins(text: bytes, names: np.ndarray[Any, Any], beginning: bytes) -> np.ndarray[Any, Any]:
    """Return which of these offsets in a table of names are those of names that begin with some bytes."""
    import numpy as np

    data, at = np.frombuffer(text, np.uint8), names.astype(np.int64)
    found = (at > 0) & (at + len(beginning) <= len(data))
    for number, byte in enumerate(b"\0" + beginning, -1):
        found[found] = data[at[found] + number] == byte
    return found


def _is_cxx(wanted: str) -> bool:
    return "::" in wanted or "(" in wanted or _IDENTIFIER.fullmatch(wanted) is not None


def _may_be(wanted: str, mangled: str) -> bool:
    """Return whether a mangled name has all identifiers of the last part of a name, so that few names are demangled."""
    last = wanted.partition("(")[0].rpartition("::")[2].partition("<")[0]
    return last.startswith("operator") or all(part in mangled for part in _IDENTIFIER.findall(last))


def _is(wanted: str, mangled: str) -> bool:
    found = names.demangle(mangled)
    if found.full == mangled or "[clone " in found.full:  # a part of a function, such as .cold
        return False
    if "(" not in wanted.replace("(anonymous namespace)", ""):
        return wanted == found.short
    # The full name of a template's instance begins with the type of its result.
    ends = [found.full, *(found.full[m.end() :] for m in re.finditer(" ", found.full))]
    return any(end.replace(" ", "") == wanted.replace(" ", "") for end in ends)

"""Compile a C text with clang alone, which any user can do: bcc loads maps into the kernel, which requires CAP_BPF.

    functions, maps = compile_text(source.text, "/usr/bin/clang-15", source.origin)

bcc rewrites methods of maps, such as `cells.lookup(&key)`, into calls of helpers; here they become macros of clang.h. The types of
maps, which bcc would describe, come from the object file's BTF (the kernel's Documentation/bpf/btf.rst), in the form of bcc's
descriptions.
"""

from __future__ import annotations

import glob
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from gpubpf import elf, ziglang
from gpubpf.ebpf import btf, headers
from gpubpf.ebpf.bytecode import LD_IMM64, PSEUDO_MAP, without_comments
from gpubpf.errors import CompileError
from gpubpf.record import Record

PRELUDE = Path(__file__).parent / "clang.h"
OLDEST = 15  # the oldest tested version of clang
SECONDS = 120.0  # longer than clang takes for any text
_METHODS = "lookup|update|insert|delete|lookup_or_try_init|ringbuf_output|ringbuf_reserve|ringbuf_submit|ringbuf_discard"
_METHOD = re.compile(rf"\b(\w+)\.({_METHODS})\(")
_FLAGS = (
    *"-target bpf -mcpu=v3 -O2 -g -c -x c - -o - -nostdinc -w -fno-jump-tables -fno-color-diagnostics".split(),
    *("-Xclang", "-fconvergent-functions", f"-I{headers.INCLUDE}"),
)
_RELOCATION = struct.Struct("<QQ")
_GLOBAL = 1  # STB_GLOBAL


def find() -> str | None:
    """Return the path of a clang: `clang` if it exists, else the newest `clang-N`, else zig, which contains clang; else None."""
    if (plain := shutil.which("clang")) is not None:
        return plain
    versions = {
        int(match[1]): path
        for path in glob.glob("/usr/bin/clang-[0-9]*")
        if (match := re.search(r"-(\d+)$", path))
    }
    return versions[max(versions)] if versions else ziglang.find()


class CompiledFunction(Record):
    """A program: its code, its maps, and the line of each instruction slot. A reference to a map has a key of `maps` as its value."""

    name: str
    code: bytes
    maps: Mapping[int, str]
    lines: tuple[int, ...]


class CompiledMap(Record):
    """A map, with its types as bcc describes them. kind: array, hash or ringbuf."""

    name: str
    kind: str
    key: Any
    leaf: Any
    key_size: int
    leaf_size: int
    entries: int
    flags: int


def compile_text(
    text: str, clang: str, origin: Callable[[int], tuple[str, int]]
) -> tuple[list[CompiledFunction], list[CompiledMap]]:
    """Return the programs and maps of a text with its headers in place. Raises CompileError with clang's first error.

    clang: a path from `find`
    origin: returns the header and line that a line of the text is from (`ExpandedText.origin`)
    """
    command = [clang, *(["clang"] if clang == ziglang.find() else []), *_FLAGS, "-include", str(PRELUDE)]
    try:
        done = subprocess.run(
            command, input=_with_macros(text).encode(), capture_output=True, timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{clang} cannot be run: {error}; install clang") from None
    if done.returncode:
        output = done.stderr.decode("utf-8", "replace")
        found = re.search(r"<stdin>:(\d+):\d+: (?:fatal )?error: (.*)", output) or re.search(
            r"()error: (.*)", output
        )
        line, what = found.groups() if found else ("", output.strip().split("\n")[-1] or "no reason given")
        header, number = origin(int(line)) if line else ("", 0)
        where = f"{header or 'C'} line {number}" if line else "clang"
        raise CompileError(f"{where}: {what}; correct the C text")
    made = _Object(done.stdout)
    return list(made.functions()), list(made.maps())


def _with_macros(text: str) -> str:
    """Return the text with macros in place of methods of maps. Lines stay."""
    plain = without_comments(text)
    out, at = [], 0
    for match in _METHOD.finditer(plain):
        out += [text[at : match.start()], f"GPUBPF_{match[2]}({match[1]}, "]
        at = match.end()
    return "".join([*out, text[at:]])


class _Object:
    """clang's object file: ELF, with the types of BTF. It is as trusted as clang is."""

    def __init__(self, data: bytes) -> None:
        """Read an object file. Raises ImageError if the data is not an ELF file."""
        self._elf = elf.of_bytes(data)
        self._symbols: list[tuple[str, elf.SymbolEntry]] = []
        for section in self._elf.sections:
            if section.type == elf.SHT_SYMTAB:
                names = self._elf.name_table(section)
                self._symbols = [(names.at(one.name), one) for one in self._elf.symbols(section)]

    def _section(self, name: str) -> bytes:
        return next((self._elf.contents(one) for one in self._elf.sections if one.name == name), b"")

    def functions(self) -> Iterator[CompiledFunction]:
        """Yield the global functions. Raises CompileError if one refers to anything but maps."""
        code = bytearray(self._section(".text"))
        used: dict[int, str] = {}
        for offset, info in _RELOCATION.iter_unpack(self._section(".rel.text")):
            name, symbol = self._symbols[info >> 32]
            if code[offset] != LD_IMM64 or not self._section_of(symbol).startswith("maps/"):
                raise CompileError(
                    "the C text refers to a function that is not inlined, or to a variable; use static inline functions and maps"
                )
            number = self._symbols_of_maps.index(name) + 1
            used[number] = name
            code[offset + 1] = code[offset + 1] & 0x0F | PSEUDO_MAP << 4
            struct.pack_into("<i", code, offset + 4, number)
        lines = self._lines()
        for name, symbol in self._symbols:
            if symbol.info == _GLOBAL << 4 | elf.STT_FUNC and self._section_of(symbol) == ".text":
                begin, end = symbol.value, symbol.value + symbol.size
                own = tuple(lines.get(n, 0) for n in range(begin // 8, end // 8))
                yield CompiledFunction(name, bytes(code[begin:end]), used, own)

    def _section_of(self, symbol: elf.SymbolEntry) -> str:
        """Return the name of a symbol's section; "" for a special section."""
        sections = self._elf.sections
        return sections[symbol.section].name if symbol.section < len(sections) else ""

    @cached_property
    def _symbols_of_maps(self) -> list[str]:
        return [
            name for name, symbol in self._symbols if self._section_of(symbol).startswith("maps/") and name
        ]

    # --- types ---

    @cached_property
    def _types(self) -> btf.Types:
        return btf.Types(self._section(".BTF"))

    def _described(self, number: int) -> Any:
        """Return a type as bcc describes it: the name of a scalar, or [name, members, "struct" or "union"]."""
        types = self._types
        number = types.plain(number)
        kind = types.kind(number)
        if kind in btf.COMPOSITE:
            members = []
            for member in types.members(number):
                of, dimensions = types.plain(member.type), []
                while types.kind(of) == btf.ARRAY:
                    of, count = types.array(of)
                    of = types.plain(of)
                    dimensions.append(count)
                members.append([member.name, self._described(of), *([dimensions] if dimensions else [])])
            return [types.name(number), members, "struct" if kind == btf.STRUCT else "union"]
        if kind == btf.POINTER:
            return "unsigned long long"
        return "unsigned int" if kind == btf.ENUM else types.name(number)

    def maps(self) -> Iterator[CompiledMap]:
        """Yield the maps: variables in sections maps/KIND, whose type has the members `key` and `leaf`."""
        types = self._types
        for name, symbol in self._symbols:
            if not name or not (section := self._section_of(symbol)).startswith("maps/"):
                continue
            variable = types.plain(types.variables[name])
            members = {member.name: (member.type, member.offset // 8) for member in types.members(variable)}
            data, value = self._section(section), symbol.value

            def number(member: str, value: int = value, data: bytes = data, members: Any = members) -> int:
                return (
                    int(struct.unpack_from("<i", data, value + members[member][1])[0])
                    if member in members
                    else 0
                )

            key, leaf = members["key"][0], members["leaf"][0]
            sizes = types.size(key), types.size(leaf)
            described = self._described(key), self._described(leaf)
            yield CompiledMap(name, section[5:], *described, *sizes, number("max_entries"), number("flags"))

    def _lines(self) -> dict[int, int]:
        """Return the line of each instruction in the text, by its number. Instructions of included files get the line before."""
        types = self._types
        found = {
            where // 8: line >> 10
            for section, (where, file, _, line) in btf.extension(self._section(".BTF.ext"), btf.LINES)
            if types.string(section) == ".text" and types.string(file).endswith("<stdin>")
        }
        last, lines = 0, {}
        for slot in range(len(self._section(".text")) // 8):
            last = found.get(slot, last)
            lines[slot] = last
        return lines

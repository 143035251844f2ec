"""Read an eBPF object file: functions, maps, variables, licence, types (the conventions of libbpf).

    object_file = ObjectFile(data)
    object_file.programs, object_file.maps, object_file.variables

The file is untrusted. Any error in it raises ImageError: one line that says what to do.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from functools import cached_property

from gpubpf import elf
from gpubpf.ebpf import btf
from gpubpf.elf import Section, SymbolEntry
from gpubpf.errors import ImageError
from gpubpf.record import Record, replace

LARGEST = 64 << 20  # maximum bytes of a file
MOST_PROGRAMS = 1024
MOST_INSTRUCTIONS = 1 << 16  # maximum instructions of a program with its subprograms
LARGEST_VARIABLES = 1 << 20  # maximum bytes of a section of variables
# Sections may overlap, so a file can claim to have any number of sections as large as itself.
_MOST_VARIABLES = 16 << 20  # maximum bytes of all sections of variables
_MOST_RECORDS = 1 << 20  # maximum relocations, and maximum records of lines
_MOST_TEXT = 32 << 20  # maximum characters of all lines
_EM_BPF, _ET_REL = 247, 1
_BIG_ENDIAN = b"\x7fELF\x02\x02"
_PROGBITS, _NOBITS, _REL = 1, 8, 9  # types of sections
_STT_SECTION = 3
_LOCAL = 0  # STB_LOCAL
_RELOCATION = struct.Struct("<QQ")
_AGAIN = "compile it again with clang -target bpf -g -O2"
MAPS, OLD_MAPS = ".maps", "maps"
_VARIABLES = re.compile(r"\.(rodata|data|bss)(\..+)?")
_FIELDS = ("type", "max_entries", "map_flags", "key_size", "value_size", "key", "value")
_IGNORED = ("map_extra", "numa_node", "pinning")


class Function(Record):
    """A function: where its code is. `start` and `size` are bytes in the section."""

    name: str
    section: int
    start: int
    size: int


class Reference(Record):
    """What an instruction refers to.

    kind: map (with `name`), or value or function (with `section` and `offset`).
    offset: bytes from the start of the section, without the number that the instruction adds.
    """

    kind: str
    name: str = ""
    section: int = 0
    offset: int = 0


class ObjectMap(Record):
    """A map in the section .maps. `type`: a number of enum bpf_map_type, or bpftime's. `key`, `value`: numbers of BTF types, or 0."""

    name: str
    type: int
    max_entries: int
    flags: int
    key_size: int
    value_size: int
    key: int
    value: int


class Variables(Record):
    """A section of global variables: its contents, and the variables as (name, offset, type)."""

    name: str
    section: int
    contents: bytes
    fields: tuple[tuple[str, int, int], ...]

    @property
    def constant(self) -> bool:
        return self.name.startswith(".rodata")


class ObjectFile:
    """An eBPF object file. The constructor and the attributes raise ImageError for anything else."""

    def __init__(self, data: bytes) -> None:
        if len(data) > LARGEST:
            raise ImageError(f"it has more than {LARGEST >> 20} MB; name an eBPF object")
        if data.startswith(_BIG_ENDIAN):
            raise ImageError(
                "it is big-endian; compile it with clang -target bpf, which takes the order of this machine"
            )
        self._elf = elf.of_bytes(data)
        if self._elf.machine != _EM_BPF:
            raise ImageError(
                f"it has code for a CPU or GPU (ELF machine {self._elf.machine}), not eBPF;"
                " compile it with clang -target bpf -g -O2"
            )
        if self._elf.type != _ET_REL:
            raise ImageError(f"it is not an object file (ELF type {self._elf.type}); {_AGAIN}")
        self.sections = self._elf.sections
        if any(section.name == OLD_MAPS and section.size for section in self.sections):
            raise ImageError(
                "it has maps of the old kind, in a section 'maps'; declare them in SEC(\".maps\") with __uint and __type"
            )

    # --- sections and symbols ---

    def _contents(self, index: int) -> bytes:
        """Return the bytes of a section; zeros for a section that takes no room in the file."""
        section = self._section(index)
        return bytes(section.size) if section.type == _NOBITS else self._elf.contents(section)

    def code(self, function: Function) -> bytes:
        """Return the code of a function."""
        if function.size > 8 * MOST_INSTRUCTIONS:
            raise ImageError(
                f"function {function.name} has more than {MOST_INSTRUCTIONS:,} instructions; split it"
            )
        section = self._section(function.section)
        part = replace(section, offset=section.offset + function.start, size=function.size)
        return self._elf.contents(part)

    def _section(self, index: int) -> Section:
        if not 0 < index < len(self.sections):
            raise ImageError(f"it refers to section {index}, which it does not have; {_AGAIN}")
        return self.sections[index]

    def _named(self, name: str) -> bytes:
        return next((self._elf.contents(one) for one in self.sections if one.name == name), b"")

    @cached_property
    def _symbols(self) -> list[tuple[str, SymbolEntry]]:
        for section in self.sections:
            if section.type == elf.SHT_SYMTAB:
                names = self._elf.name_table(section)
                return [(names.at(one.name), one) for one in self._elf.symbols(section)]
        raise ImageError(f"it has no symbols; {_AGAIN}, and do not strip it")

    @cached_property
    def types(self) -> btf.Types:
        """The types. Raises ImageError if the file has none."""
        data = self._named(".BTF")
        if not data:
            raise ImageError("it has no type information (BTF); compile it with -g, and do not strip it")
        return btf.Types(data)

    @cached_property
    def license(self) -> str:
        return elf.string_at(self._named("license"), 0)

    # --- code ---

    @cached_property
    def functions(self) -> Mapping[tuple[int, int], Function]:
        """All functions, by section and start."""
        found = {}
        for name, symbol in self._symbols:
            if symbol.type != elf.STT_FUNC or not symbol.section:
                continue
            section = self._section(symbol.section)
            if symbol.value % 8 or symbol.size % 8 or symbol.value + symbol.size > section.size:
                raise ImageError(f"function {name} is not inside of its section; {_AGAIN}")
            found[symbol.section, symbol.value] = Function(name, symbol.section, symbol.value, symbol.size)
        return found

    @cached_property
    def programs(self) -> tuple[Function, ...]:
        """The functions that are programs: the global ones in sections other than .text, in the order of the file."""
        found = []
        for _, symbol in self._symbols:
            inside = symbol.type == elf.STT_FUNC and symbol.section and symbol.info >> 4 != _LOCAL
            if inside and self._section(symbol.section).name != ".text":
                found.append(self.functions[symbol.section, symbol.value])
        if len(found) > MOST_PROGRAMS:
            raise ImageError(f"it has {len(found)} programs (at most {MOST_PROGRAMS}); split it")
        if len({one.name for one in found}) < len(found):
            raise ImageError(f"it has two programs of the same name; {_AGAIN}")
        if not found:
            raise ImageError('it has no programs; put functions into sections, such as SEC("kprobe/KERNEL")')
        return tuple(sorted(found, key=lambda one: (one.section, one.start)))

    @cached_property
    def references(self) -> Mapping[tuple[int, int], Reference]:
        """What instructions refer to, by section and offset in bytes."""
        symbols = self._symbols
        found = {}
        left = _MOST_RECORDS
        for section in self.sections:
            if section.type != _REL or section.info not in self._with_code:
                continue
            left -= section.size // _RELOCATION.size
            if left < 0:
                raise ImageError(f"it has more than {_MOST_RECORDS:,} relocations; split it")
            data = self._elf.contents(section)
            for offset, info in _RELOCATION.iter_unpack(data[: len(data) // 16 * 16]):
                if info >> 32 >= len(symbols):
                    raise ImageError(f"a relocation has no symbol; {_AGAIN}")
                found[section.info, offset] = self._reference(*symbols[info >> 32])
        return found

    def _reference(self, name: str, symbol: SymbolEntry) -> Reference:
        if not symbol.section:
            raise ImageError(
                f"it refers to {name or 'a symbol'}, which it does not define: kernel symbols, kconfig values and other objects'"
                " functions cannot be used"
            )
        section = self._section(symbol.section)
        if section.name == MAPS:
            one = self._maps_at.get(symbol.value, "") if symbol.type == _STT_SECTION else name
            if one in self._map_symbols and self._map_symbols[one].value == symbol.value:
                return Reference("map", one)
            raise ImageError(f"it refers to a map that it does not define; {_AGAIN}")
        if _VARIABLES.fullmatch(section.name):
            return Reference("value", name, symbol.section, symbol.value)
        if symbol.section in self._with_code:
            return Reference("function", name, symbol.section, symbol.value)
        raise ImageError(
            f"it refers to {name or 'data'} in section {section.name}, which is neither a map nor a variable"
        )

    @cached_property
    def _with_code(self) -> frozenset[int]:
        """The sections that contain functions."""
        return frozenset(function.section for function in self.functions.values())

    # --- data ---

    @cached_property
    def _maps_at(self) -> dict[int, str]:
        """The names of the maps, by their place in the section."""
        return {symbol.value: name for name, symbol in reversed(self._map_symbols.items())}

    @cached_property
    def _map_symbols(self) -> dict[str, SymbolEntry]:
        return {
            name: symbol
            for name, symbol in self._symbols
            if name
            and symbol.type == elf.STT_OBJECT
            and symbol.section
            and self._section(symbol.section).name == MAPS
        }

    @cached_property
    def maps(self) -> Mapping[str, ObjectMap]:
        """The maps, by name."""
        return {name: self._map(name) for name in self._map_symbols}

    def _map(self, name: str) -> ObjectMap:
        types = self.types
        number = types.variables.get(name)
        if number is None:
            raise ImageError(f"map {name} has no type; {_AGAIN}")
        values = dict.fromkeys(_FIELDS, 0)
        for member in types.members(types.plain(number)):
            of = types.plain(member.type)
            if member.name in _IGNORED:
                continue
            if member.name not in _FIELDS or types.kind(of) != btf.POINTER:
                raise ImageError(
                    f"map {name}: it is declared with {member.name}, which is not supported; leave that out"
                )
            target = types.target(of)
            if member.name in ("key", "value"):
                values[member.name] = target
            else:
                values[member.name] = types.array(types.plain(target))[1]
        key, value = values["key"], values["value"]
        key_size = types.size(key) if key else values["key_size"]
        value_size = types.size(value) if value else values["value_size"]
        for what, size, own in (("key", key_size, key), ("value", value_size, value)):
            given = values[f"{what}_size"]
            if own and given and given != size:
                raise ImageError(
                    f"map {name}: {what}_size is {given}, but its type has {size} bytes; correct one of them"
                )
        if not values["type"]:
            raise ImageError(f"map {name} has no type; declare it with __uint(type, BPF_MAP_TYPE_ARRAY)")
        return ObjectMap(
            name, values["type"], values["max_entries"], values["map_flags"], key_size, value_size, key, value
        )

    @cached_property
    def variables(self) -> Mapping[int, Variables]:
        """The sections of global variables that are not empty, by number."""
        found = {}
        left = _MOST_VARIABLES
        fields: dict[int, list[tuple[int, str]]] = {}  # by section
        for name, symbol in self._symbols:
            if symbol.type == elf.STT_OBJECT:
                fields.setdefault(symbol.section, []).append((symbol.value, name))
        for number, section in enumerate(self.sections):
            if number and _VARIABLES.fullmatch(section.name) and section.size:
                if section.size > LARGEST_VARIABLES:
                    raise ImageError(
                        f"section {section.name} has {section.size:,} bytes (at most {LARGEST_VARIABLES:,});"
                        " use a map for large data"
                    )
                left -= section.size
                if left < 0:
                    raise ImageError(
                        f"its variables have more than {_MOST_VARIABLES >> 20} MiB; use maps for large data"
                    )
                typed = tuple(
                    (name, at, of)
                    for at, name in sorted(fields.get(number, ()))
                    if (of := self.types.variables.get(name)) is not None
                )
                found[number] = Variables(section.name, number, self._contents(number), typed)
        return found

    # --- source lines ---

    @cached_property
    def lines(self) -> Mapping[tuple[str, int], tuple[str, int, str]]:
        """The source of instructions, by section and offset: file, line, text."""
        types = self.types
        found = {}
        left = _MOST_TEXT
        for section, (where, file, text, line) in self._records(btf.LINES):
            one = types.string(section), types.string(file), types.string(text)
            left -= sum(map(len, one))
            if left < 0:
                raise ImageError(f"its source lines have more than {_MOST_TEXT:,} characters; split it")
            found[one[0], where] = one[1], line >> 10, one[2]
        return found

    def _records(self, part: int) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
        """Yield the records of a part of .BTF.ext, see `btf.extension`."""
        for number, record in enumerate(btf.extension(self._named(".BTF.ext"), part)):
            if number == _MOST_RECORDS:
                raise ImageError(
                    f"its type information (BTF) has more than {_MOST_RECORDS:,} records; split it"
                )
            yield record

    @cached_property
    def core_relocations(self) -> Mapping[tuple[str, int], tuple[int, str, int]]:
        """CO-RE relocations by section and offset: type, access string, kind (enum bpf_core_relo_kind)."""
        types = self.types
        return {
            (types.string(section), where): (root, types.string(access), kind)
            for section, (where, root, access, kind) in self._records(btf.RELOCATIONS)
        }

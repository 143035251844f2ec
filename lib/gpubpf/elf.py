"""Read ELF: files, bytes, and libraries in the memory of a process (System V ABI, chapters 4 and 5).

    file = elf.of_file(descriptor)                    # or elf.of_bytes(data)
    [section.name for section in file.sections]
    symbols, names = next(file.symbol_tables([elf.STT_FUNC]))

    elf.exports(elf.LoadedFile(descriptor))["cuInit"].address
    elf.exports(memory_of_a_process, base)["cuInit"].address

Only 64-bit little-endian files are read: CUDA and HIP have no others. Everything read is untrusted: offsets and sizes are checked
before they are used, and the bytes that one file can make the reader hold are limited.

pyelftools is not used: it makes an object of every symbol (4.5 s for a library with 140,000 functions, 0.3 s with NumPy here) and
takes 0.1 s to import. It also reads only files, but the file of a library in another process's memory may no longer exist.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gpubpf.errors import ImageError
from gpubpf.record import Record

if TYPE_CHECKING:
    import numpy as np

ET_REL, ET_EXEC = 1, 2
EM_CUDA = 190
PT_LOAD, PT_DYNAMIC, PT_GNU_EH_FRAME = 1, 2, 0x6474E550
SHT_NULL, SHT_PROGBITS, SHT_SYMTAB, SHT_NOBITS, SHT_DYNSYM = 0, 1, 2, 8, 11
SHF_ALLOC, SHF_EXECINSTR = 2, 4
STT_OBJECT, STT_FUNC, STT_GNU_IFUNC = 1, 2, 10
DT_NULL, DT_NEEDED, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ = 0, 1, 4, 5, 6, 10
DT_PLTRELSZ, DT_RELA, DT_RELASZ, DT_JMPREL = 2, 7, 8, 23
DT_RPATH, DT_RUNPATH, DT_GNU_HASH, DT_VERSYM = 15, 29, 0x6FFFFEF5, 0x6FFFFFF0
DT_VERDEF, DT_VERDEFNUM = 0x6FFFFFFC, 0x6FFFFFFD
R_X86_64_64, R_X86_64_GLOB_DAT, R_X86_64_JUMP_SLOT, R_X86_64_IRELATIVE = 1, 6, 7, 37

_HEADER = struct.Struct("<16s HHI QQQ I HHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
SYMBOL_SIZE = _SYMBOL.size
_DYNAMIC = struct.Struct("<QQ")
_RELOCATION = struct.Struct("<QIIq")
_VERSION, _VERSION_NAME = struct.Struct("<HHHHIII"), struct.Struct("<II")
_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian

_PIECE = 1 << 26  # bytes read at once
_LARGEST_TABLE = 1 << 28  # bytes of one table of symbols or names
_LONGEST_NAME = 1 << 16  # bytes
_SORTED_FRAMES = (
    b"\x01\x1b\x03\x3b"  # .eh_frame_hdr: version 1, a table of 32-bit offsets from its own address
)
_MOST_SECTIONS = 1 << 20
_MOST_TABLES = 16  # tables of symbols; a file has one or two
_MOST_NAMES = 1 << 28  # characters of all names to read from one table
_TABLES = (DT_SYMTAB, DT_STRTAB, DT_HASH, DT_GNU_HASH, DT_VERSYM, DT_VERDEF)
# Entries of a library's dynamic section, when it is read from memory:
_MOST_SEGMENTS = 256
_MOST_EXPORTS = 1 << 18
_MOST_IMPORTS = 1 << 18
_LARGEST_DYNAMIC = 1 << 16  # bytes
_LARGEST_TEXT = 16 << 20  # bytes of names


# --- where bytes come from ----------------------------------------------------------------------------------


class ByteSource(Protocol):
    """Bytes by their offset in a file."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, size: int) -> bytes:
        """Return exactly these bytes. Raises ImageError if they are not all there."""


class AddressSpace(Protocol):
    """Bytes by their address: the memory of a process, or a `LoadedFile`."""

    def some(self, address: int, size: int) -> bytes:
        """Return the bytes from `address` on, fewer if there are fewer."""

    def read(self, address: int, size: int) -> bytes:
        """Return exactly these bytes. Raises OSError if they are not all there."""


class HeldBytes(Record):
    """A `ByteSource` of bytes that are in memory."""

    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, size: int) -> bytes:
        check_range(offset, size, len(self.data))
        return self.data[offset : offset + size]


class OpenFile(Record):
    """A `ByteSource` of an open file, which is read in pieces and stays the caller's.

    PyTorch's libraries have gigabytes. The file is not mapped: if it were truncated meanwhile, the reader would be killed.
    """

    descriptor: int
    size: int

    def read(self, offset: int, size: int) -> bytes:
        """See `ByteSource`. Raises OSError, too."""
        check_range(offset, size, self.size)
        pieces = []
        while size:
            piece = os.pread(self.descriptor, min(size, _PIECE), offset)
            if not piece:
                raise ImageError("the file ended early; was it being written?")
            pieces.append(piece)
            offset, size = offset + len(piece), size - len(piece)
        return b"".join(pieces)


def check_range(offset: int, size: int, total: int) -> None:
    """Raise ImageError unless `size` bytes at `offset` lie within `total` bytes."""
    if offset < 0 or size < 0 or offset + size > total:
        raise ImageError(
            f"it is cut short: it has {total:,} bytes, and needs {size:,} at {offset:,}; build it again"
        )


# --- files ----------------------------------------------------------------------------------------------------


class Segment(NamedTuple):
    """A program header. Sizes and offsets are bytes."""

    type: int
    flags: int
    offset: int  # in the file
    address: int
    size: int  # in the file

    @property
    def executable(self) -> bool:
        return bool(self.flags & 1)


class Section(Record):
    """A section header. Sizes and offsets are bytes."""

    name: str
    type: int
    flags: int
    offset: int
    size: int
    link: int
    info: int

    @property
    def in_file(self) -> bool:
        return self.type not in (SHT_NULL, SHT_NOBITS)


class SymbolEntry(NamedTuple):
    """An entry of a symbol table, Elf64_Sym."""

    name: int  # offset in the table of names
    info: int
    other: int
    section: int
    value: int
    size: int  # bytes

    @property
    def type(self) -> int:
        return self.info & 15


class Import(NamedTuple):
    """What the dynamic linker writes into a word: the address of the function `name`, or the result of the function at `resolver`."""

    name: str
    resolver: int = 0


class Exported(NamedTuple):
    """A function that a library exports. `default`: whether newly linked programs get this version."""

    name: str
    version: str
    default: bool
    symbol: SymbolEntry


def string_at(text: bytes, offset: int) -> str:
    """Return the zero-terminated string at `offset` of a table of names, cut at 65,536 bytes; "" outside of the table."""
    if offset >= len(text):
        return ""
    limit = offset + _LONGEST_NAME
    end = text.find(b"\0", offset, limit)
    return text[offset : end if end >= 0 else limit].decode("utf-8", "replace")


class NameTable:
    """A table of names that limits the characters of all names that are read from it.

    Without this limit, a damaged file could cost much memory: entries may overlap, so a million symbols can name one long string.
    """

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._left = _MOST_NAMES

    def at(self, offset: int) -> str:
        """Return the name at `offset`. Raises ImageError when all names read so far exceed 256 Mi characters."""
        end = self._text.find(b"\0", offset, offset + _LONGEST_NAME)
        found = self._text[offset : end if end >= 0 else offset + _LONGEST_NAME].decode("utf-8", "replace")
        self._left -= len(found)
        if self._left < 0:
            raise ImageError("its names are longer than any program's; build it again")
        return found


class _Header(NamedTuple):
    """The fields of Elf64_Ehdr, in order."""

    ident: bytes
    type: int
    machine: int
    version: int
    entry: int
    program_headers: int
    section_headers: int
    flags: int
    size: int
    segment_size: int
    segment_count: int
    section_size: int
    section_count: int
    names_index: int


def _header(data: bytes) -> _Header:
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        raise ImageError("it is not a 64-bit little-endian ELF file; name another")
    return _Header._make(_HEADER.unpack_from(data))


def _segments(table: bytes) -> Iterator[Segment]:
    return (Segment(h[0], h[1], h[2], h[3], h[5]) for h in _SEGMENT.iter_unpack(table))


def address_of(loads: Iterable[Segment], offset: int) -> int | None:
    """Return the address at which a byte of the file is loaded; None if it is in none of these segments."""
    return next((s.address + offset - s.offset for s in loads if 0 <= offset - s.offset < s.size), None)


def offset_of(loads: Iterable[Segment], address: int) -> int | None:
    """Return where in the file the byte at an address comes from; None if it is in none of these segments."""
    return next((s.offset + address - s.address for s in loads if 0 <= address - s.address < s.size), None)


class Elf:
    """An ELF file: `type`, `machine` and `flags` of its header, segments, sections, symbols."""

    def __init__(self, source: ByteSource) -> None:
        """Read the header. Raises ImageError for anything but a 64-bit little-endian ELF file."""
        self.source = source
        self._header = _header(source.read(0, min(_HEADER.size, source.size)))
        self.type, self.machine, self.flags = self._header.type, self._header.machine, self._header.flags
        self.abi_version = self._header.ident[8]

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All segments; none if there are no program headers. Raises ImageError."""
        header = self._header
        if not header.program_headers or header.segment_size != _SEGMENT.size:
            return ()
        table = self.source.read(header.program_headers, header.segment_count * _SEGMENT.size)
        return tuple(_segments(table))

    @cached_property
    def loads(self) -> tuple[Segment, ...]:
        """The segments that are loaded and begin in the file. Raises ImageError."""
        return tuple(s for s in self.segments if s.type == PT_LOAD and s.offset < self.source.size)

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """All sections; none if there are no section headers (sstrip). Raises ImageError."""
        header = self._header
        if not header.section_headers or header.section_size != _SECTION.size:
            return ()
        count, names_index = header.section_count, header.names_index
        if count == 0 or names_index == 0xFFFF:  # larger numbers are in the first header
            first = _SECTION.unpack(self.source.read(header.section_headers, _SECTION.size))
            count, names_index = count or first[5], first[6] if names_index == 0xFFFF else names_index
        if count > min(self.source.size // _SECTION.size, _MOST_SECTIONS):
            raise ImageError(
                f"it is cut short: it has {self.source.size:,} bytes, too few for {count:,} sections; build it again"
            )
        table = self.source.read(header.section_headers, count * _SECTION.size)
        headers = list(_SECTION.iter_unpack(table))
        if names_index >= len(headers) or headers[names_index][5] > _LARGEST_TABLE:
            raise ImageError("the names of its sections are missing; build it again")
        names = NameTable(self.source.read(headers[names_index][4], headers[names_index][5]))
        return tuple(Section(names.at(h[0]), h[1], h[2], h[4], h[5], h[6], h[7]) for h in headers)

    def contents(self, section: Section) -> bytes:
        """Return the bytes of a section; b"" for a section that takes no room in the file. Raises ImageError."""
        return self.source.read(section.offset, section.size) if section.in_file else b""

    def name_table(self, symbols: Section) -> NameTable:
        """Return the names of a symbol table's symbols. Raises ImageError."""
        if symbols.link >= len(self.sections):
            raise ImageError("the names of its symbols are missing; build it again")
        return NameTable(self.contents(self.sections[symbols.link]))

    def symbols(self, table: Section) -> Iterator[SymbolEntry]:
        """Yield all entries of a symbol table. Use `symbol_tables` for files that may be large. Raises ImageError."""
        data = self.contents(table)
        return map(SymbolEntry._make, _SYMBOL.iter_unpack(data[: len(data) // _SYMBOL.size * _SYMBOL.size]))

    def symbol_tables(
        self, types: Iterable[int], most: int = 2 * _LARGEST_TABLE
    ) -> Iterator[tuple[np.ndarray[Any, Any], bytes]]:
        """Yield the symbols of these types that the file defines, with the table of their names: first of the full
        table, then of the exported symbols.

        The arrays have the fields of Elf64_Sym: `name`, `info`, `other`, `section`, `value`, `size`. Empty tables and tables of more
        than 256 MiB are left out. Raises OSError, ImageError.

        most: leave out a table that has more bytes than this together with its names.
        """
        import numpy as np  # only here: importing it takes longer than most of what this module does

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
        wanted = list(types)
        tables = [s for s in self.sections if s.type in (SHT_SYMTAB, SHT_DYNSYM)][:_MOST_TABLES]
        for section in sorted(tables, key=lambda s: s.type):
            text = self.sections[section.link] if section.link < len(self.sections) else None
            if (
                text is None
                or max(section.size, text.size) > _LARGEST_TABLE
                or section.size + text.size > most
            ):
                continue
            data = self.contents(section)
            found = np.frombuffer(data, kind, len(data) // kind.itemsize)
            found = found[np.isin(found["info"] & 15, wanted) & (found["section"] != 0)]
            if len(found):
                yield found, self.contents(text)

    def search_path(self) -> str:
        """Return the directories, separated by colons, in which the dynamic linker looks for libraries (DT_RPATH, DT_RUNPATH).

        Raises OSError, ImageError.
        """
        return ":".join(self._dynamic_names(DT_RPATH, DT_RUNPATH))

    def needed(self) -> list[str]:
        """Return the libraries with which it is linked (DT_NEEDED). Raises OSError, ImageError."""
        return self._dynamic_names(DT_NEEDED)

    def imports(self) -> dict[int, Import]:
        """Return the words that the dynamic linker fills with the address of a function, by their address.

        Raises OSError, ImageError.
        """
        tags = self._dynamic_tags
        found: dict[int, Import] = {}
        symbols, text = (offset_of(self.loads, tags.get(tag, 0)) for tag in (DT_SYMTAB, DT_STRTAB))
        if symbols is None or text is None:
            return found
        names = NameTable(self.source.read(text, min(tags.get(DT_STRSZ, 0), _LARGEST_TEXT)))
        for table, size in ((DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)):
            at, count = offset_of(self.loads, tags.get(table, 0)), tags.get(size, 0) // _RELOCATION.size
            if at is None or count * _RELOCATION.size > _LARGEST_TABLE:
                continue
            data = self.source.read(at, count * _RELOCATION.size)
            for place, kind, symbol, addend in _RELOCATION.iter_unpack(data):
                if kind == R_X86_64_IRELATIVE:
                    found[place] = Import("", addend)
                elif kind in (R_X86_64_64, R_X86_64_GLOB_DAT, R_X86_64_JUMP_SLOT):
                    entry = self.source.read(symbols + symbol * _SYMBOL.size, _SYMBOL.size)
                    found[place] = Import(names.at(_SYMBOL.unpack(entry)[0]))
                if len(found) > _MOST_IMPORTS:
                    raise ImageError(f"it imports more than {_MOST_IMPORTS:,} functions; build it again")
        return found

    def exported(self) -> Iterator[Exported]:
        """Yield the functions that it exports, each version by itself. Raises OSError, ImageError."""
        tags, memory = self._dynamic_tags, self.source
        at = {tag: offset_of(self.loads, tags[tag]) for tag in tags if tag in _TABLES}
        symbols, text = at.get(DT_SYMTAB), at.get(DT_STRTAB)
        if symbols is None or text is None:
            return
        names = NameTable(memory.read(text, min(tags.get(DT_STRSZ, 0), _LARGEST_TEXT)))
        total = _symbol_count(_Offsets(memory), at.get(DT_HASH) or 0, at.get(DT_GNU_HASH) or 0)
        data = memory.read(symbols, total * _SYMBOL.size)
        versions, numbers = self._versions(at.get(DT_VERDEF), tags.get(DT_VERDEFNUM, 0), names), b""
        if (version_table := at.get(DT_VERSYM)) is not None:
            numbers = memory.read(version_table, 2 * total)
        for i, entry in enumerate(map(SymbolEntry._make, _SYMBOL.iter_unpack(data))):
            if entry.type in (STT_FUNC, STT_GNU_IFUNC) and entry.section and entry.value:
                number = int.from_bytes(numbers[2 * i : 2 * i + 2], "little")
                version, hidden = versions.get(number & 0x7FFF, ""), bool(number & 0x8000)
                yield Exported(names.at(entry.name), version, not hidden, entry)

    def _versions(self, at: int | None, count: int, names: NameTable) -> dict[int, str]:
        """Return the names of the versions that it defines, by number."""
        found: dict[int, str] = {}
        for _ in range(min(count, _MOST_EXPORTS) if at is not None else 0):
            assert at is not None
            _, _, number, _, _, name, after = _VERSION.unpack(self.source.read(at, _VERSION.size))
            text, _ = _VERSION_NAME.unpack(self.source.read(at + name, _VERSION_NAME.size))
            found[number] = names.at(text)
            if not after:
                break
            at += after
        return found

    def frame_starts(self) -> np.ndarray[Any, Any]:
        """Return the sorted addresses at which functions, and parts of functions, begin for an unwinder (.eh_frame_hdr).

        Raises OSError, ImageError.
        """
        import numpy as np

        header = next((s for s in self.segments if s.type == PT_GNU_EH_FRAME), None)
        if header is None or header.size < 12 or header.size > _LARGEST_TABLE:
            return np.empty(0, np.int64)
        data = self.source.read(header.offset, header.size)
        count = int.from_bytes(data[8:12], "little")
        if data[:4] != _SORTED_FRAMES or count > (len(data) - 12) // 8:
            return np.empty(0, np.int64)
        return np.sort(np.frombuffer(data, "<i4", 2 * count, 12)[::2].astype(np.int64) + header.address)

    @cached_property
    def _dynamic_tags(self) -> dict[int, int]:
        return dict(reversed(self._dynamic()))

    def _dynamic(self) -> list[tuple[int, int]]:
        dynamic = next((s for s in self.segments if s.type == PT_DYNAMIC), None)
        if dynamic is None:
            return []
        size = min(dynamic.size, _LARGEST_DYNAMIC) // _DYNAMIC.size * _DYNAMIC.size
        return list(_DYNAMIC.iter_unpack(self.source.read(dynamic.offset, size)))

    def _dynamic_names(self, *tags: int) -> list[str]:
        entries = self._dynamic()
        text = offset_of(self.loads, dict(entries).get(DT_STRTAB, 0))
        found = []
        for tag, value in entries:
            if tag in tags and text is not None:
                room = max(self.source.size - text - value, 0)
                data = self.source.read(min(text + value, self.source.size), min(room, _LONGEST_NAME))
                found.append(os.fsdecode(data.partition(b"\0")[0]))
        return found


def of_bytes(data: bytes) -> Elf:
    """Return the ELF file in `data`. Raises ImageError if `data` is not an ELF file."""
    return Elf(HeldBytes(data))


def of_file(descriptor: int) -> Elf:
    """Return the ELF file that is open as `descriptor`, which the caller keeps. Raises OSError, and ImageError for another file."""
    return Elf(OpenFile(descriptor, os.fstat(descriptor).st_size))


# --- libraries as they are loaded -------------------------------------------------------------------------------


class LoadedFile:
    """An `AddressSpace` with an ELF file as the dynamic linker would load it at address 0. The file stays the caller's."""

    def __init__(self, descriptor: int) -> None:
        """Read the program headers. If the file is not an ELF file, its first 4 KiB are at address 0. Raises OSError."""
        self.descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self.segments: tuple[Segment, ...] = (Segment(PT_LOAD, 0, 0, 0, 4096),)
        with contextlib.suppress(OSError, ImageError):
            file = Elf(OpenFile(descriptor, self._size))
            if len(file.segments) <= _MOST_SEGMENTS:
                self.segments = file.loads

    def some(self, address: int, size: int) -> bytes:
        """See `AddressSpace`."""
        for segment in self.segments:
            if 0 <= (inside := address - segment.address) < segment.size:
                with contextlib.suppress(OSError, OverflowError):
                    return os.pread(
                        self.descriptor, min(size, segment.size - inside), segment.offset + inside
                    )
        return b""

    def read(self, address: int, size: int) -> bytes:
        """See `AddressSpace`."""
        data = self.some(address, size)
        if len(data) != size:
            raise OSError(errno.EFAULT, "not in the file")
        return data

    def offset(self, address: int) -> int:
        """Return the offset in the file of the byte at an address. Raises OSError if the byte does not come from the file."""
        offset = offset_of(self.segments, address)
        if offset is None or offset >= self._size:
            raise OSError(errno.EFAULT, "not in the file")
        return offset


class _Offsets(Record):
    """An `AddressSpace` whose addresses are offsets in a file."""

    source: ByteSource

    def some(self, address: int, size: int) -> bytes:
        """See `AddressSpace`."""
        return self.source.read(address, max(min(size, self.source.size - address), 0))

    def read(self, address: int, size: int) -> bytes:
        """See `AddressSpace`."""
        return self.source.read(address, size)


class Symbol(NamedTuple):
    """A function or variable. `size` is bytes, 0 if unknown."""

    address: int
    size: int


def exports(memory: AddressSpace, base: int = 0, most: int = _MOST_EXPORTS) -> dict[str, Symbol]:
    """Return the functions and variables that the library loaded at `base` exports, each in its default version.

    Like the dynamic linker, this reads the dynamic section. Return {} for memory that cannot be read or is not a library.

    most: return {} for a library with more symbols.
    """
    found: dict[str, Symbol] = {}
    with contextlib.suppress(OSError, ImageError, struct.error, ValueError):
        header = _header(memory.read(base, _HEADER.size))
        if header.segment_size != _SEGMENT.size or header.segment_count > _MOST_SEGMENTS:
            return {}
        table = memory.read(base + header.program_headers, _SEGMENT.size * header.segment_count)
        segments = list(_segments(table))
        low = min((s.address for s in segments if s.type == PT_LOAD), default=0)
        bias = base - (low & ~0xFFF)
        dynamic = next((s for s in segments if s.type == PT_DYNAMIC), None)
        if dynamic is None or dynamic.size > _LARGEST_DYNAMIC:
            return {}
        tags: dict[int, int] = {}
        for tag, value in _DYNAMIC.iter_unpack(memory.read(bias + dynamic.address, dynamic.size & ~15)):
            if tag == DT_NULL:
                break
            tags.setdefault(tag, value)

        def address(tag: int) -> int:
            # In a process, the dynamic linker has added `bias` to some of the values.
            value = tags.get(tag, 0)
            return value if not value or value >= base else value + bias

        total = _symbol_count(memory, address(DT_HASH), address(DT_GNU_HASH))
        if total > most:
            return {}
        names = NameTable(memory.read(address(DT_STRTAB), min(tags.get(DT_STRSZ, 0), _LARGEST_TEXT)))
        name_at = names.at
        symbols = memory.read(address(DT_SYMTAB), total * _SYMBOL.size)
        versions = memory.read(address(DT_VERSYM), total * 2) if DT_VERSYM in tags else b"\x01\0" * total
        for i, (name, info, _, section, value, size) in enumerate(_SYMBOL.iter_unpack(symbols)):
            if info & 15 not in (STT_OBJECT, STT_FUNC) or not section or not value:
                continue
            key = name_at(name)
            hidden = versions[2 * i + 1] & 0x80
            if not hidden or key not in found:
                found[key] = Symbol(bias + value, size)
    return found


def _symbol_count(memory: AddressSpace, sysv: int, gnu: int) -> int:
    """Return the number of dynamic symbols, by either hash table; 0 without one.

    System V ABI, chapter 5, describes the first. The GNU table is only described by its implementations.
    """
    if sysv:
        return min(struct.unpack("<II", memory.read(sysv, 8))[1], _MOST_EXPORTS)
    if not gnu:
        return 0
    buckets, first, words, _ = struct.unpack("<IIII", memory.read(gnu, 16))
    if buckets > _MOST_EXPORTS or words > _MOST_EXPORTS:
        return 0
    chains = gnu + 16 + 8 * words + 4 * buckets
    heads = struct.unpack(f"<{buckets}I", memory.read(chains - 4 * buckets, 4 * buckets))
    last = max(heads, default=0)
    if last < first:
        return int(first)
    while last < _MOST_EXPORTS:
        chunk = memory.some(chains + 4 * (last - first), 4096)
        for i, (word,) in enumerate(struct.iter_unpack("<I", chunk[: len(chunk) & ~3])):
            if word & 1:
                return int(last) + i + 1
        if len(chunk) < 4096:
            break
        last += 1024
    return 0

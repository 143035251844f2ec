"""Read the line tables of a cubin (DWARF 2, section 6.2): ptxas adds them with -lineinfo.

    source_lines(cubin)["_Z5scalePf"]     # [(0, "/src/scale.cu", 17), (64, "/src/scale.cu", 18)]: from byte 64 on, line 18

`.debug_line` maps the machine code to source lines, `.nv_debug_line_sass` to lines of the PTX. pyelftools reads only the table of a
compilation unit, and these sections belong to none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

from gpubpf.elf import Elf, Section, of_bytes
from gpubpf.errors import ImageError

OF_SOURCE, OF_PTX = ".debug_line", ".nv_debug_line_sass"
LARGEST = 1 << 22  # bytes of a table
MOST_ROWS = 1 << 20  # in it; a row takes one byte or more there, and 200 in memory
MOST_PATHS = (
    1 << 24
)  # bytes of the paths of a table's files: any number of files may be in one folder with a long name
_HEADER = struct.Struct("<IHIBBbBB")  # a line table, up to the number of its first special opcode
# Elf64_Rela, and Elf64_Rel for compute capabilities before 9.0: place, symbol.
_RELOCATIONS = {".rela": struct.Struct("<QQ8x"), ".rel": struct.Struct("<QQ")}
_TEXT = ".text."

Row = tuple[int, int, str]  # address in the section, line, file


def source_lines(cubin: bytes) -> Mapping[str, list[tuple[int, str, int]]]:
    """Return where each source line of a kernel begins, as (bytes from the kernel's beginning, file, line), in order.

    Empty without -lineinfo. Raises ImageError if the cubin or its table is damaged.
    """
    found: dict[str, dict[int, tuple[str, int]]] = {}
    for section, rows in sequences(of_bytes(cubin), OF_SOURCE):
        if not section.name.startswith(_TEXT):
            continue
        of_kernel = found.setdefault(section.name.removeprefix(_TEXT), {})
        of_kernel |= {address: (file, line) for address, line, file in rows[:-1]}
    return {name: [(at, *place) for at, place in sorted(places.items())] for name, places in found.items()}


def sequences(file: Elf, name: str) -> Iterator[tuple[Section, list[Row]]]:
    """Yield the sequences of rows of a line table, each with the section of its code. The last row is the end.

    Raises ImageError if the table is damaged or too large.
    """
    sections = {section.name: section for section in file.sections}
    kind = next((kind for kind in _RELOCATIONS if kind + name in sections), None)
    if name not in sections or kind is None:
        return
    relocations = sections[kind + name]
    if sections[name].size > LARGEST:
        raise ImageError(f"its table {name} is too large ({sections[name].size} bytes)")
    try:
        symbols = list(file.symbols(file.sections[relocations.link]))
        begins = sorted(_RELOCATIONS[kind].iter_unpack(file.contents(relocations)))
        # Each sequence begins with the address of its function, which is to be relocated.
        for (_, info), rows in zip(begins, _rows(file.contents(sections[name])), strict=True):
            symbol = symbols[info >> 32]
            yield (
                file.sections[symbol.section],
                [(symbol.value + address, line, of) for address, line, of in rows],
            )
    except (struct.error, IndexError, ValueError, ArithmeticError) as error:
        raise ImageError(f"its table {name} is damaged: {error}") from None


def _rows(data: bytes) -> Iterator[list[Row]]:
    """Yield the sequences of all tables in a section."""
    at = 0
    left = MOST_ROWS
    while at < len(data):
        size = 4 + int.from_bytes(data[at : at + 4], "little")
        for rows in _rows_of_table(data[at : at + size], left):
            left -= len(rows)
            yield rows
        at += size


def _files(data: bytes, at: int) -> dict[int, str]:
    """Return the files of a table by number, from 1. at: where the names of its folders begin."""
    folders = [""]
    files: dict[int, str] = {}
    size = 0

    def text() -> str:
        nonlocal at
        end = data.index(0, at)
        found, at = data[at:end].decode(errors="replace"), end + 1
        return found

    def number() -> int:
        nonlocal at
        value, at = _number(data, at)
        return value

    while folder := text():
        folders.append(folder)
    while name := text():
        folder, _, _ = folders[number()], number(), number()  # folder, time, size
        size += len(folder) + len(name)
        if size > MOST_PATHS:
            raise ValueError("the paths of its files are too long")
        files[len(files) + 1] = f"{folder}/{name}" if folder else name
    return files


def _number(data: bytes, at: int, signed: bool = False) -> tuple[int, int]:
    """Return a number in LEB128, and where the next byte is."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if shift > 70:
            raise ValueError("a number of more than 64 bits")
        if byte < 0x80:
            return (value - (1 << shift) if signed and byte & 0x40 else value), at


def _rows_of_table(data: bytes, most: int) -> Iterator[list[Row]]:
    """Yield the sequences of a table. most: the number of rows in all. Raises ValueError if there are more."""
    _, _, header, smallest, _, base, span, first = _HEADER.unpack_from(data)
    lengths = data[_HEADER.size : _HEADER.size + first - 1]  # operands of each standard opcode
    files = _files(data, _HEADER.size + first - 1)
    at = 10 + header  # the length of the header counts from behind itself
    rows: list[Row] = []
    address, line, file = 0, 1, 1

    def number(signed: bool = False) -> int:
        nonlocal at
        value, at = _number(data, at, signed)
        return value

    def row() -> Row:
        nonlocal most
        most -= 1
        if most < 0:
            raise ValueError("it has too many rows")
        return address, line, files.get(file, "")

    while at < len(data):
        opcode = data[at]
        at += 1
        if opcode >= first:
            address += (opcode - first) // span * smallest
            line += base + (opcode - first) % span
            rows.append(row())
        elif opcode == 0:  # an extended opcode
            size = number()
            if data[at] == 1:  # end_sequence
                yield [*rows, row()]
                rows, address, line, file = [], 0, 1, 1
            at += size
        elif opcode == 1:  # copy
            rows.append(row())
        elif opcode == 2:  # advance_pc
            address += number() * smallest
        elif opcode == 3:  # advance_line
            line += number(signed=True)
        elif opcode == 4:  # set_file
            file = number()
        elif opcode == 8:  # const_add_pc
            address += (255 - first) // span * smallest
        elif opcode == 9:  # fixed_advance_pc
            address += int.from_bytes(data[at : at + 2], "little")
            at += 2
        else:
            for _ in range(lengths[opcode - 1]):
                number()

"""Find the floating-point operations that ptxas made of each line of PTX.

    operations_by_line(cubin)[40]      # {"FADD"}: line 40 is a sum that is not contracted with a product

With -lineinfo, ptxas adds the section `.nv_debug_line_sass`: a line table (DWARF 2, section 6.2) that maps each instruction of the
machine code to a line of the PTX. pyelftools reads only the table of a compilation unit, and this section belongs to none.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from gpubpf.elf import of_bytes
from gpubpf.errors import ImageError

# The low 9 bits of an instruction of 16 bytes (compute capabilities 7.5 to 12.0). The next 3 bits encode where its operands are.
_OPERATIONS = dict(
    zip(
        (0x20, 0x21, 0x23, 0x28, 0x29, 0x2B, 0x30, 0x31, 0x32, 0x35, 0x49, 0x4A, 0x4B),
        "FMUL FADD FFMA DMUL DADD DFMA HADD2 HFMA2 HMUL2 HFMA2 FFMA2 FMUL2 FADD2".split(),
        strict=True,
    )
)
_INSTRUCTION = 16
_HEADER = struct.Struct("<IHIBBbBB")  # a line table, up to its number of opcodes
# Elf64_Rela, and Elf64_Rel for compute capabilities before 9.0. Only the place and the symbol matter.
_RELOCATIONS = {".rela": struct.Struct("<QQ8x"), ".rel": struct.Struct("<QQ")}
_TABLE = ".nv_debug_line_sass"


def operations_by_line(cubin: bytes) -> Mapping[int, frozenset[str]]:
    """Return line of the PTX, from 1 → the floating-point operations that it became, such as FFMA. Other lines are left out.

    The result is empty without -lineinfo. Raises ImageError if the cubin or its table is damaged.
    """
    file = of_bytes(cubin)
    sections = {section.name: section for section in file.sections}
    kind = next((kind for kind in _RELOCATIONS if kind + _TABLE in sections), None)
    if _TABLE not in sections or kind is None:
        return {}
    relocations = sections[kind + _TABLE]
    found: defaultdict[int, set[str]] = defaultdict(set)
    try:
        symbols = list(file.symbols(file.sections[relocations.link]))
        begins = sorted(_RELOCATIONS[kind].iter_unpack(file.contents(relocations)))
        codes = [file.contents(file.sections[symbols[info >> 32].section]) for _, info in begins]
        # Each sequence of rows begins with the address of its function, which a relocation gives.
        for code, rows in zip(codes, _sequences(file.contents(sections[_TABLE])), strict=True):
            kinds = np.frombuffer(code, "<u2", len(code) // 2)[:: _INSTRUCTION // 2] & 0x1FF
            places = np.flatnonzero(np.isin(kinds, list(_OPERATIONS)))
            addresses, lines = np.array(rows, np.int64).T
            for line, kind in zip(
                lines[np.searchsorted(addresses, places * _INSTRUCTION, "right") - 1],
                kinds[places],
                strict=True,
            ):
                found[int(line)].add(_OPERATIONS[int(kind)])
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise ImageError(f"its table of PTX lines is damaged: {error}") from None
    return {line: frozenset(operations) for line, operations in found.items()}


def _sequences(data: bytes) -> Iterator[list[tuple[int, int]]]:
    """Yield the rows of each sequence of a line table, as (address in the function, line). The last row is the function's end."""
    _, _, header, smallest, _, base, span, first = _HEADER.unpack_from(data)
    lengths = data[_HEADER.size : _HEADER.size + first - 1]  # operands of each standard opcode
    at = 10 + header  # the header's length counts from the end of the length field
    rows: list[tuple[int, int]] = []
    address, line = 0, 1

    def number(signed: bool = False) -> int:
        """Read a number in LEB128."""
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value - (1 << shift) if signed and byte & 0x40 else value

    while at < len(data):
        opcode = data[at]
        at += 1
        if opcode >= first:
            address += (opcode - first) // span * smallest
            line += base + (opcode - first) % span
            rows.append((address, line))
        elif opcode == 0:  # an extended opcode
            size = number()
            if data[at] == 1:  # end_sequence
                yield [*rows, (address, line)]
                rows, address, line = [], 0, 1
            at += size
        elif opcode == 1:  # copy
            rows.append((address, line))
        elif opcode == 2:  # advance_pc
            address += number() * smallest
        elif opcode == 3:  # advance_line
            line += number(signed=True)
        elif opcode == 8:  # const_add_pc
            address += (255 - first) // span * smallest
        elif opcode == 9:  # fixed_advance_pc
            address += int.from_bytes(data[at : at + 2], "little")
            at += 2
        else:  # opcodes that matter only for source files
            for _ in range(lengths[opcode - 1]):
                number()

"""Find the source lines of addresses in programs and libraries, from their DWARF (`-g`, or `-gline-tables-only` of clang).

pyelftools reads the line table of the one compilation unit that has the address. The files are untrusted, so the sections that it
reads are limited. `symbols` limits its time, together with that of symbols.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator
from typing import Any

from gpubpf import elf
from gpubpf.errors import ImageError

_MOST = 64 << 20  # bytes of all sections of DWARF of a file: they are read as a whole
_MOST_LINES = (
    512 << 10
)  # bytes of the line table of a unit: reading takes 2 s per MiB, and 400 bytes of memory for a row
_MOST_UNITS = 1 << 14  # units to look at for an address
_SHF_COMPRESSED = 1 << 11

Place = tuple[str, int]  # source file, line


class SourceLines:
    """The line tables of a file. Raises ImageError if it has none that can be read.

    descriptor: of the file. It stays the caller's.
    """

    def __init__(self, descriptor: int) -> None:
        # Checks the section headers, which pyelftools believes.
        parts = [
            section for section in elf.of_file(descriptor).sections if section.name.startswith(".debug_")
        ]
        if not any(section.name == ".debug_line" for section in parts):
            raise ImageError("it has no line table")
        if sum(section.size for section in parts) > _MOST or any(
            section.flags & _SHF_COMPRESSED for section in parts
        ):
            raise ImageError("its DWARF is too large, or compressed")
        from elftools.elf.elffile import ELFFile

        with os.fdopen(os.dup(descriptor), "rb") as file:
            made = ELFFile(file)
            self._dwarf: Any = made.get_dwarf_info(relocate_dwarf_sections=False, follow_links=False)
        self.size = sum(section.size for section in parts)
        self._aranges: Any = self._dwarf.get_aranges()
        self._rows: dict[int, tuple[list[int], list[Place]]] = {}  # by offset of the unit

    def at(self, address: int) -> Place | None:
        """Return the place of an instruction; None: not known. Raises any exception on damaged input."""
        unit = self._unit(address)
        if unit is None:
            return None
        if unit.cu_offset not in self._rows:
            rows = sorted(_rows_of(self._dwarf, unit), key=lambda row: (row[0], bool(row[2])))
            self._rows[unit.cu_offset] = [row[0] for row in rows], [(file, line) for _, file, line in rows]
        addresses, places = self._rows[unit.cu_offset]
        number = bisect.bisect_right(addresses, address) - 1
        return places[number] if number >= 0 and places[number][1] else None

    def _unit(self, address: int) -> Any:
        if self._aranges is not None:  # gcc writes them
            offset = self._aranges.cu_offset_at_addr(address)
            if offset is not None:
                return self._dwarf.get_CU_at(offset)
        for number, unit in enumerate(self._dwarf.iter_CUs()):
            if number == _MOST_UNITS:
                return None
            if any(begin <= address < end for begin, end in _ranges(self._dwarf, unit)):
                return unit
        return None


def _ranges(dwarf: Any, unit: Any) -> Iterator[tuple[int, int]]:
    """Yield the ranges of addresses of a unit."""
    top = unit.get_top_DIE().attributes
    low = top["DW_AT_low_pc"].value if "DW_AT_low_pc" in top else 0
    if "DW_AT_ranges" in top:
        lists = dwarf.range_lists()
        attribute = top["DW_AT_ranges"]
        offset = attribute.value
        if attribute.form == "DW_FORM_rnglistx":
            return  # an index, which needs a base that few compilers leave to a reader
        for part in lists.get_range_list_at_offset(offset, unit):
            if hasattr(part, "base_address"):
                low = part.base_address
            else:
                added = 0 if part.is_absolute else low
                yield part.begin_offset + added, part.end_offset + added
    elif "DW_AT_high_pc" in top:
        high = top["DW_AT_high_pc"]
        yield low, high.value if high.form == "DW_FORM_addr" else low + high.value


def _rows_of(dwarf: Any, unit: Any) -> Iterator[tuple[int, str, int]]:
    """Yield (address, file, line) for each row of a unit's line table; line 0: no line is known from there on."""
    program = dwarf.line_program_for_CU(unit)
    if program is None or program["unit_length"] > _MOST_LINES:
        return
    base = 0 if program["version"] >= 5 else 1
    folders = [folder.decode(errors="replace") for folder in program["include_directory"]]
    compiled = unit.get_top_DIE().attributes.get("DW_AT_comp_dir")
    in_folder = compiled.value.decode(errors="replace") if compiled is not None else ""
    names: dict[int, str] = {}

    def name_of(number: int) -> str:
        if number not in names:
            entry = program["file_entry"][number - base]
            folder = entry.dir_index - base
            names[number] = os.path.join(
                in_folder,
                folders[folder] if 0 <= folder < len(folders) else "",
                entry.name.decode(errors="replace"),
            )
        return names[number]

    for entry in program.get_entries():
        state = entry.state
        if state is None:
            continue
        known = (
            not state.end_sequence and state.line > 0 and 0 <= state.file - base < len(program["file_entry"])
        )
        yield state.address, *((name_of(state.file), state.line) if known else ("", 0))

"""Map instructions to source lines with a code object's DWARF, which hipcc writes with -gline-tables-only or -g.

An instruction of a function in HIP's own headers, such as atomicAdd, gets the line of the call if the function is inlined.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import os
from collections.abc import Iterator, Mapping
from typing import Any

_MOST = 2 << 20  # bytes of line tables: reading takes two seconds per MiB, and the program waits for it
_MOST_INFO = 128 << 10  # bytes of the DWARF section with the calls of inlined functions
# Parts of the paths of HIP's headers, and of the headers that clang adds to HIP programs.
_OF_HIP = ("include/hip/", "/__clang_")


class SourceLines:
    """The line tables of a code object. If they are missing or damaged, every place is unknown."""

    def __init__(self, data: bytes) -> None:
        rows: list[tuple[int, bool, str, int]] = []
        self._calls: list[tuple[int, int, str, int]] = []
        with contextlib.suppress(Exception):  # on damaged input, the library may raise any exception
            units = list(_units(data)) if b".debug_line" in data else []
            rows = sorted((row for unit in units for row in unit.rows()), key=lambda row: row[:2])
            self._calls = [call for unit in units for call in unit.calls()]
        self._addresses = [address for address, *_ in rows]
        self._places = [(file, line) for *_, file, line in rows]

    def near(self, address: int, begin: int, end: int) -> tuple[str, int]:
        """Return the file and line of an instruction, or else of the nearest one before it, or behind it, in a range of addresses.

        Return "" and 0 if no line in the range is known.
        """
        first, here, last = (bisect.bisect_left(self._addresses, at) for at in (begin, address + 1, end))
        others = (*reversed(self._addresses[first:here]), *self._addresses[here:last])
        return next((place for place in map(self.at, (address, *others)) if place[1]), ("", 0))

    def at(self, address: int) -> tuple[str, int]:
        """Return the file and line of an instruction; "" and 0 if unknown."""
        number = bisect.bisect_right(self._addresses, address) - 1
        place = self._places[number] if number >= 0 else ("", 0)
        if not _of_hip(place[0]):
            return place
        calls = ((file, line) for begin, end, file, line in reversed(self._calls) if begin <= address < end)
        return next((call for call in calls if not _of_hip(call[0])), place)


class _Unit:
    """A compilation unit."""

    def __init__(self, dwarf: Any, unit: Any, has_calls: bool) -> None:
        self._dwarf, self._unit, self._has_calls = dwarf, unit, has_calls
        self._program = dwarf.line_program_for_CU(unit)
        self._names: list[str] = []
        if self._program is None:
            return
        self._base = 0 if self._program["version"] >= 5 else 1
        folders = [folder.decode(errors="replace") for folder in self._program["include_directory"]]
        for entry in self._program["file_entry"]:
            number = entry.dir_index - self._base
            folder = folders[number] if 0 <= number < len(folders) else ""
            self._names.append(os.path.join(folder, entry.name.decode(errors="replace")))

    def rows(self) -> Iterator[tuple[int, bool, str, int]]:
        """Yield (first address, whether code follows it in the table, file, line) for each row of the line table.

        File and line are "" and 0 behind the code, and where the compiler merged code of several lines (line 0).
        """
        for entry in self._program.get_entries() if self._program is not None else ():
            state = entry.state
            if state is None:
                continue
            if state.end_sequence:
                yield state.address, False, "", 0
            elif state.line <= 0:
                yield state.address, True, "", 0
            elif (name := self._name(state.file)) is not None:
                yield state.address, True, name, state.line

    def calls(self) -> Iterator[tuple[int, int, str, int]]:
        """Yield (begin, end, file of the call, line of the call) for each inlined function. Outer functions come first."""
        for entry in self._unit.iter_DIEs() if self._has_calls else ():
            given = {name: attribute.value for name, attribute in entry.attributes.items()}
            if entry.tag != "DW_TAG_inlined_subroutine" or not given.get("DW_AT_call_line"):
                continue
            name = self._name(given["DW_AT_call_file"])
            if name is None:
                continue
            for begin, end in self._ranges(given):
                yield begin, end, name, given["DW_AT_call_line"]

    def _ranges(self, given: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
        """Yield the address ranges (begin, end) of an entry with these attributes."""
        if "DW_AT_ranges" not in given:
            yield given["DW_AT_low_pc"], given["DW_AT_low_pc"] + given["DW_AT_high_pc"]
            return
        first = self._unit.get_top_DIE().attributes.get("DW_AT_low_pc")
        base = first.value if first is not None else 0
        for part in self._dwarf.range_lists().get_range_list_at_offset(given["DW_AT_ranges"], self._unit):
            if hasattr(part, "base_address"):
                base = part.base_address
                continue
            added = 0 if part.is_absolute else base
            yield part.begin_offset + added, part.end_offset + added

    def _name(self, file: int) -> str | None:
        number = file - self._base
        return self._names[number] if 0 <= number < len(self._names) else None


def _of_hip(file: str) -> bool:
    return any(part in file for part in _OF_HIP)


def _units(data: bytes) -> Iterator[_Unit]:
    from elftools.elf.elffile import ELFFile

    file = ELFFile(io.BytesIO(data))
    lines, info = (file.get_section_by_name(name) for name in (".debug_line", ".debug_info"))
    if lines is None or info is None or lines["sh_size"] > _MOST:
        return
    dwarf = file.get_dwarf_info(relocate_dwarf_sections=False)
    for unit in dwarf.iter_CUs():
        yield _Unit(dwarf, unit, info["sh_size"] <= _MOST_INFO)

"""Map instructions to source lines with a code object's DWARF, which hipcc writes with -gline-tables-only or -g."""

from __future__ import annotations

import bisect
import io
from collections.abc import Iterator

_MOST = 2 << 20  # bytes of line tables: reading takes two seconds per MiB, and the program waits for it


class SourceLines:
    """The line tables of a code object. If they are missing or damaged, every place is unknown."""

    def __init__(self, data: bytes) -> None:
        try:
            rows = sorted(_rows(data))
        except Exception:  # on damaged input, the library may raise any exception
            rows = []
        self._addresses = [address for address, _, _ in rows]
        self._places = [(file, line) for _, file, line in rows]

    def at(self, address: int) -> tuple[str, int]:
        """Return the file and line of an instruction; "" and 0 if unknown."""
        number = bisect.bisect_right(self._addresses, address) - 1
        return self._places[number] if number >= 0 else ("", 0)


def _rows(data: bytes) -> Iterator[tuple[int, str, int]]:
    """Yield the first address of each line table row, with its file and line; "" and 0 where no source is known."""
    if b".debug_line" not in data:
        return
    from elftools.elf.elffile import ELFFile

    file = ELFFile(io.BytesIO(data))
    section = file.get_section_by_name(".debug_line")
    if section is None or section["sh_size"] > _MOST:
        return
    dwarf = file.get_dwarf_info(relocate_dwarf_sections=False)
    for unit in dwarf.iter_CUs():
        program = dwarf.line_program_for_CU(unit)
        if program is None:
            continue
        names = [entry.name.decode(errors="replace") for entry in program["file_entry"]]
        base = 0 if program["version"] >= 5 else 1
        for entry in program.get_entries():
            state = entry.state
            if state is None:
                continue
            if state.end_sequence:
                yield state.address, "", 0
            elif 0 <= state.file - base < len(names):
                yield state.address, names[state.file - base], state.line if state.line > 0 else 0

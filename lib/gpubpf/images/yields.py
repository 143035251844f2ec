"""Remove the YIELD instructions from our functions in a cubin: they let lanes continue without the lanes that run a probe.

    cubin = without_yields(cubin)

ptxas 12.9 and 13.0 begin a function with YIELD if it has an atomic operation whose result is used, or a strong load. Where only some
lanes call the function, YIELD releases the others, which wait at BSYNC until all lanes are together again. ptxas allows for this, but
not always: on an H100, several groups of lanes computed a uniform register from itself (ULEA UR10, UR10, 0x4, 0x2), one after the
other, and later groups read at wrong addresses. Without YIELD, lanes meet again, as in the original.

YIELD is for loops that wait for another lane. Functions with such a loop, which update a hash, have another name and keep their YIELD.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from gpubpf.elf import STT_FUNC, Elf, NameTable, of_bytes
from gpubpf.ptx.symbols import FUNCTION

_OURS = rf"(?s)(?:.*\$)?{FUNCTION}\d+(?:_\w+)?"  # the name of the kernel precedes that of the function
# The encodings are for compute capabilities 8.0 to 12.0; for 7.5, ptxas 13.0 writes no YIELD in our functions. An instruction has 16
# bytes. _YIELD and _NOP are the first 8, without a predicate.
_INSTRUCTION = struct.Struct("<QQ")
_YIELD, _NOP = 0x7946, 0x7918
# The bits of the last 8 bytes that hold stall cycles, dependencies and reuse. They stay as they are.
_CONTROL = 0x3FFFFE0000000000


def without_yields(cubin: bytes) -> bytes:
    """Return a cubin with NOP in place of each YIELD in functions named gpubpf_programN. Raises ImageError if it is not a cubin."""
    changed = bytearray(cubin)
    for place in _instructions(of_bytes(cubin)):
        first, last = _INSTRUCTION.unpack_from(cubin, place)
        if first == _YIELD:
            _INSTRUCTION.pack_into(changed, place, _NOP, last & _CONTROL)
    return bytes(changed)


def _instructions(file: Elf) -> Iterator[int]:
    """Yield where each instruction of our functions begins, in bytes from the start of the file."""
    for symbols, text in file.symbol_tables([STT_FUNC]):
        names = NameTable(text)
        for name, _, _, index, start, size in symbols.tolist():
            if re.fullmatch(_OURS, names.at(name)):
                section = file.sections[index]
                end = min(start + size, section.size if section.in_file else 0)
                yield from range(
                    section.offset + start,
                    section.offset + end - _INSTRUCTION.size + 1,
                    _INSTRUCTION.size,
                )

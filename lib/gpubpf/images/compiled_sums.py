"""Find the floating-point operations that ptxas made of each line of PTX.

    operations_by_line(cubin)[40]      # {"FADD"}: line 40 is a sum that is not contracted with a product

The line table of the machine code (`line_table.OF_PTX`) tells the lines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from gpubpf.elf import of_bytes
from gpubpf.errors import ImageError
from gpubpf.images import line_table

# The low 9 bits of an instruction of 16 bytes (compute capabilities 7.5 to 12.0). The next 3 bits encode where its operands are.
_OPERATIONS = dict(
    zip(
        (0x20, 0x21, 0x23, 0x28, 0x29, 0x2B, 0x30, 0x31, 0x32, 0x35, 0x49, 0x4A, 0x4B),
        "FMUL FADD FFMA DMUL DADD DFMA HADD2 HFMA2 HMUL2 HFMA2 FFMA2 FMUL2 FADD2".split(),
        strict=True,
    )
)
_INSTRUCTION = 16


def operations_by_line(cubin: bytes) -> Mapping[int, frozenset[str]]:
    """Return line of the PTX, from 1 → the floating-point operations that it became, such as FFMA. Other lines are left out.

    The result is empty without -lineinfo. Raises ImageError if the cubin or its table is damaged.
    """
    file = of_bytes(cubin)
    found: defaultdict[int, set[str]] = defaultdict(set)
    for section, rows in line_table.sequences(file, line_table.OF_PTX):
        code = file.contents(section)
        kinds = np.frombuffer(code, "<u2", len(code) // 2)[:: _INSTRUCTION // 2] & 0x1FF
        places = np.flatnonzero(np.isin(kinds, list(_OPERATIONS)))
        try:
            addresses, lines = np.array([row[:2] for row in rows], np.int64).T
        except OverflowError as error:
            raise ImageError(f"its table of PTX lines is damaged: {error}") from None
        for line, kind in zip(
            lines[np.searchsorted(addresses, places * _INSTRUCTION, "right") - 1], kinds[places], strict=True
        ):
            found[int(line)].add(_OPERATIONS[int(kind)])
    return {line: frozenset(operations) for line, operations in found.items()}

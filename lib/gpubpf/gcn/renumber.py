"""Renumber the registers of machine code, so that probes in the middle of a kernel use registers above the kernel's own."""

from __future__ import annotations

import re

from gpubpf.errors import Refusal
from gpubpf.gcn.comgr import Comgr

_REGISTERS = re.compile(r"\b([sv])(?:(\d+)\b|\[(\d+):(\d+)\])")


def renumbered(comgr: Comgr, code: bytes, sgpr: int, vgpr: int) -> bytes:
    """Return the code with `sgpr` added to its SGPR numbers, and `vgpr` to its VGPR numbers. Raises Refusal if that does not assemble.

    Register pairs require an even offset; loads of several scalars require a multiple of 4.
    """

    def moved(match: re.Match[str]) -> str:
        kind, one, first, last = match.groups()
        by = sgpr if kind == "s" else vgpr
        return f"{kind}{int(one) + by}" if one else f"{kind}[{int(first) + by}:{int(last) + by}]"

    instructions = comgr.probe(code)
    text = "\n".join(f"{one.name} {_REGISTERS.sub(moved, one.operands)}" for one in instructions)
    made = bytearray(comgr.assemble(text))
    if len(made) != len(code):
        raise Refusal("AMD's assembler does not know an instruction of its probe")
    for one in instructions:
        if one.name.startswith("v_cmpx_") and one.size == 8:
            made[one.address] = code[one.address]  # a result in EXEC has two encodings: keep the original's
    return bytes(made)

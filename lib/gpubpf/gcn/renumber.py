"""Give the registers of machine code other numbers: for probes in the middle of a kernel, above the kernel's own registers."""

from __future__ import annotations

import re

from gpubpf.errors import Refusal
from gpubpf.gcn.comgr import Comgr

_REGISTERS = re.compile(r"\b([sv])(?:(\d+)\b|\[(\d+):(\d+)\])")


def renumbered(comgr: Comgr, code: bytes, sgpr: int, vgpr: int) -> bytes:
    """Return the code with `sgpr` added to the numbers of its SGPRs, and `vgpr` to those of its VGPRs. Raises Refusal.

    Pairs need an even number added; loads of several scalars, a multiple of 4.
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
            made[one.address] = code[one.address]  # its result, EXEC, is written in two ways
    return bytes(made)

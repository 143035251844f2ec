"""Find the instructions that compute something in each lane, and those that a program selects.

is_computation(instruction)          # v_add_f32_e32 v0, v1, v2 → True
is_chosen(("v_add_f32",), "v_add_f32_e32")  # → True
"""

from __future__ import annotations

import re
from collections.abc import Collection
from fnmatch import fnmatchcase

from gpubpf.gcn.comgr import GcnInstruction

# AMD, "Vega ISA", 3.3 EXECute Mask: the wave executes these as a whole, whatever EXEC is. Matrix instructions ignore EXEC, too.
_OF_WAVE = re.compile(r"v_(?:nop|clrexcp|readlane|writelane|readfirstlane|s?mfmac?_|accvgpr_)")
_ENCODING = re.compile(r"_(?:e32|e64|dpp8?|sdwa|e64_dpp)$")


def is_computation(instruction: GcnInstruction) -> bool:
    """Return whether an instruction computes something in each lane of EXEC: a vector instruction that does not access memory."""
    return instruction.name.startswith("v_") and not _OF_WAVE.match(instruction.name)


def is_chosen(patterns: Collection[str], opcode: str) -> bool:
    """Return whether a glob matches an opcode, with or without the suffix of its encoding. Without patterns, every opcode matches."""
    names = (opcode, _ENCODING.sub("", opcode))
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns for name in names)

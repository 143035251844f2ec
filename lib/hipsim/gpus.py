"""The GPUs that hipsim can be, and the one that suits a program."""

from __future__ import annotations

import re
from collections.abc import Set
from typing import BinaryIO

GPUS = ("gfx906", "gfx90a", "gfx1030")  # the first one is the default, as in src/thunk/gpus.h
_CODE = re.compile(rb"-amdgcn-amd-amdhsa-+(gfx\w{1,16})")  # in the list of a fat binary's code objects
_LONGEST = 64  # bytes of such a name


def architectures(program: BinaryIO) -> set[str]:
    """Return the GPUs for which a program has code, such as {"gfx90a", "gfx1100"}; none for a script. Raises OSError."""
    found, end = set(), b""
    while part := program.read(1 << 20):
        text = end + part
        # A name that reaches to the end may go on in the next part.
        found |= {match[1] for match in _CODE.finditer(text) if match.end() < len(text)}
        end = text[-_LONGEST:]
    found |= {match[1] for match in _CODE.finditer(end)}
    return {name.decode() for name in found}


def suitable(architectures: Set[str]) -> str:
    """Return the first GPU of hipsim that is among these, or the default."""
    return next((gpu for gpu in GPUS if gpu in architectures), GPUS[0])

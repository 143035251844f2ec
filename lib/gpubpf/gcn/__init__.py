"""Instruments AMD GPU code objects: kernels (code_object.py), instructions (comgr.py, kernel_code.py), probes (inject.py, work.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gpubpf.ebpf.bytecode import CONTEXTS

if TYPE_CHECKING:
    from gpubpf.lower.fragment import Argument

# The `bytecode.DEVICE_POINTS` that AMD GPU kernels support.
POINTS = (
    "entry",
    "exit",
    "block_begin",
    "block_end",
    "barrier_arrive",
    "barrier_leave",
    "basic_block",
    "access",
    "branch",
    "instruction",
)
_OF_INSTRUCTIONS = frozenset(CONTEXTS["instruction"]) - {"launch", "site", "active"}


def lacking(point: str, arguments: Iterable[Argument]) -> str:
    """Return the point or argument that kernels of AMD GPUs do not support, as text; "" if they support the program.

    point: the point that the program is attached to
    arguments: the program's arguments
    """
    if point not in POINTS:
        return point
    read = [one.field for one in arguments if one.kind == "context" and one.field in _OF_INSTRUCTIONS]
    return f"{point} with {read[0]}" if point == "instruction" and read else ""

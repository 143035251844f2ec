"""Instruments AMD GPU code objects: kernels (code_object.py), instructions (comgr.py, kernel_code.py), probes (inject.py, work.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gpubpf.ebpf.bytecode import ARGUMENTS, CONTEXTS
from gpubpf.ebpf.probe import Probe

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
    "value",
    "function_entry",
    "branch",
    "instruction",
)
_OF_FUNCTIONS = frozenset({"args", *ARGUMENTS})
_OF_INSTRUCTIONS = frozenset(CONTEXTS["instruction"]) - {"launch", "site", "active"}


def lacking(probe: Probe[Any], arguments: Iterable[Argument]) -> str:
    """Return the point or argument that kernels of AMD GPUs do not support, as text; "" if they support the program.

    arguments: the program's arguments
    """
    point = probe.point
    if point not in POINTS or (point == "value" and not probe.loops) or probe.functions:
        return point
    without = {"instruction": _OF_INSTRUCTIONS, "value": {"type"}, "function_entry": _OF_FUNCTIONS}.get(
        point, ()
    )
    read = [one.field for one in arguments if one.kind == "context" and one.field in without]
    return f"{point} with {read[0]}" if read else ""

"""Kernels that launch kernels (dynamic parallelism): which kernels they launch, and the names of those in the copy.

A kernel launches another one by its address. In the copy of a module, that is the address of a *launched copy* in the same module: the
other kernel without probes, under the name `launched_name`. The copy counts the grids that it launches in the u64 GRIDS.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .flow import GRID_LAUNCH, KERNEL_LAUNCHES, callee, find_names
from .module import Name, Open, PtxInstruction, Statement
from .values import PREFIX

GRIDS = f"{PREFIX}_grids"  # in the table of addresses: that of the number of grids
_LAUNCHED = f"${PREFIX}_launched"


def launched_name(kernel: str) -> str:
    """Return the name of a kernel's copy that other kernels launch."""
    return kernel + _LAUNCHED


def launches_grid(call: PtxInstruction) -> bool:
    """Return whether a call launches a grid."""
    return GRID_LAUNCH.fullmatch(callee(call) or "") is not None


def escaping(body: Sequence[Statement], kernels: Collection[str]) -> bool:
    """Return whether a body does more with the addresses of `kernels` than pass them to the functions that launch kernels.

    This is conservative: addresses are followed through registers regardless of order.
    """
    held = set(kernels)
    before = 0
    while before != len(held):
        before = len(held)
        passed: set[str] = set()  # parameters of the call in this scope that hold an address
        for statement in body:
            if isinstance(statement, Open):
                passed = set()
            if not isinstance(statement, PtxInstruction):
                continue
            opcode, operands = statement.opcode, statement.operands
            first, read = set(find_names(operands[:1])), set(find_names(operands[1:]))
            if opcode == "call":
                target = callee(statement) or ""
                used = (first | read) - {target}
                if used & held or (used & passed and not KERNEL_LAUNCHES.match(target)):
                    return True
            elif opcode == "st" and first & held:
                return True
            elif read & held:
                if opcode == "st" and "param" in statement.modifiers:
                    passed |= first
                elif opcode in ("mov", "selp") and isinstance(operands[0], Name):
                    held |= first
                else:
                    return True
    return False

"""A module with many kernels, which get their copies when they are launched for the first time.

A program launches few of the kernels of a large library, and assembling the copies of all takes minutes. `images.instrument` decides
which modules are large, and the agent asks for a kernel's copy (src/copies/sidecar.cpp).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpubpf.images.instrument import Later

# If more than one in so many of its kernels is launched, all others get their copies at once: a copy that is assembled alone takes two
# to three times as long.
ALL_ABOVE = 4


class LargeModule:
    """A large module of a process. The caller of `ask` holds `Measurement.lock`."""

    def __init__(self, later: Later) -> None:
        self.source = later.source
        self._kernels = frozenset(later.kernels)
        self._asked: set[str] = set()

    def ask(self, names: Collection[str]) -> frozenset[str] | None:
        """Return which kernels to copy now that these are launched; None: all of the module."""
        known = self._kernels.intersection(names)
        self._asked |= known
        return None if known and len(self._asked) * ALL_ABOVE > len(self._kernels) else known

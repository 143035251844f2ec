"""How finely touched bytes are tracked: settings for the program and the session. coverage.py collects the bytes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from gpubpf.agent.definitions import Vendor
from gpubpf.errors import UsageError
from gpubpf.record import Record

if TYPE_CHECKING:
    from gpubpf.traced.measurement import Follow

WORD_SHIFT = 2  # log2 of GPUBPF_WORD in gpubpf_coverage.h
SECTOR = Vendor.NVIDIA.sector  # bytes; AMD's is larger
LOG_RECORDS = 1 << 16  # capacity of each process's log, which is read continuously


class Grain(Record):
    """How finely touched bytes are tracked.

    granule    bytes that one bit stands for, a power of two. If it is 1, a bit stands for 4 bytes in pages where all accesses allow it
    by_kernel  track each kernel separately, for footprints

    Raises UsageError if footprints are wanted and a granule is larger than a sector.
    """

    granule: int = 1
    by_kernel: bool = False

    def __post_init__(self) -> None:
        if self.by_kernel and self.granule > SECTOR:
            raise UsageError(f"--footprint counts {SECTOR}-byte sectors; use --granule {SECTOR} or less")

    @property
    def shift(self) -> int:
        """The base-2 logarithm of the granule."""
        return self.granule.bit_length() - 1

    @property
    def follow(self) -> Follow:
        """What the session must follow to track touched bytes."""
        from gpubpf.traced.measurement import Follow

        return Follow(log_records=LOG_RECORDS, allocation_stacks=True)

    @property
    def parameter(self) -> bytes:
        """The value of the program's parameter `grain`, a struct gpu_grain."""
        exact = self.granule == 1
        shift, every = WORD_SHIFT if exact else self.shift, (1 << 64) - 1
        return struct.pack("<4Q", shift, (64 << shift) - 1, every * self.by_kernel, every * exact)

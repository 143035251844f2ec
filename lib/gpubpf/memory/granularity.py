"""How finely touched bytes are kept: what a program and a session are told of it before there is anything to collect (coverage.py)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpubpf.errors import UsageError

if TYPE_CHECKING:
    from gpubpf.session.measurement import Follow

SECTOR = 32  # bytes
LOG_RECORDS = 1 << 16  # of each process's log, which is read as it fills


@dataclass(frozen=True)
class Grain:
    """granule: bytes that one bit stands for, a power of two. by_kernel: kernels are kept apart, for footprints. Raises UsageError."""

    granule: int = 1
    by_kernel: bool = False

    def __post_init__(self) -> None:
        if self.by_kernel and self.granule > SECTOR:
            raise UsageError(
                f"--footprint counts sectors of {SECTOR} bytes; give a --granule of at most that"
            )

    @property
    def shift(self) -> int:
        return self.granule.bit_length() - 1

    @property
    def follow(self) -> Follow:
        """What the session has to follow for that."""
        from gpubpf.session.measurement import Follow

        return Follow(log_records=LOG_RECORDS, allocation_stacks=True)

    @property
    def parameter(self) -> bytes:
        """The program's parameter `grain`, a struct gpu_grain."""
        return struct.pack("<3Q", self.shift, (64 << self.shift) - 1, (1 << 64) - 1 if self.by_kernel else 0)

"""Choose the blocks or warps of a launch that run the programs (--sample-blocks, --sample-warps).

Each launch chooses its blocks (or warps) by a hash of the launch's number, the block's number (the warp's number in the grid) and a
seed. A block or warp is chosen if its hash is at most `Sampling.limit`. `inject/sampling.py` makes the code that computes the hash on
the GPU; `hashes` computes it in Python.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from gpubpf.record import Record

if TYPE_CHECKING:
    import numpy as np

    from gpubpf.show.parsed import SamplingOptions

Unit = Literal["block", "warp"]

PARAMETER = "gpubpf_sampling"  # the parameter in the launch block: u32 limit, u32 seed
# Odd multipliers for a unit's number, for a launch's number, and for the two rounds of the hash (Wellons' "lowbias32").
OF_UNIT, OF_LAUNCH, ROUND_1, ROUND_2 = 0x85EBCA6B, 0x9E3779B1, 0x7FEB352D, 0x846CA68B


class Sampling(Record):
    """The sampling of a measurement: each launch chooses one of `one_in` blocks or warps.

    unit    "block" or "warp"
    one_in  a power of two
    seed    a number of 32 bits
    """

    unit: Unit
    one_in: int
    seed: int

    @property
    def limit(self) -> int:
        """The largest hash of a chosen unit."""
        return (1 << 32) // self.one_in - 1

    @property
    def parameter(self) -> bytes:
        """The bytes of PARAMETER."""
        return self.limit.to_bytes(4, "little") + self.seed.to_bytes(4, "little")


def of_parameter(unit: Unit, given: bytes) -> Sampling:
    """Return the sampling of a measurement, given its unit and the bytes of PARAMETER."""
    return Sampling(
        unit, 2**32 // (int.from_bytes(given[:4], "little") + 1), int.from_bytes(given[4:8], "little")
    )


def share(params: Mapping[str, bytes]) -> float:
    """Return the share of blocks or warps that are chosen, from the bytes of all parameters; 1 without sampling."""
    given = params.get(PARAMETER)
    return 1.0 if given is None else (int.from_bytes(given[:4], "little") + 1) / 2**32


def of_options(options: SamplingOptions) -> Sampling | None:
    """Return the sampling of the options --sample-blocks, --sample-warps and --seed; None without them. The default seed is random."""
    seed = int.from_bytes(os.urandom(4), "little") if options.seed is None else options.seed
    if options.blocks:
        return Sampling("block", options.blocks, seed)
    return Sampling("warp", options.warps, seed) if options.warps else None


def hashes(units: np.ndarray, launch: int, seed: int) -> np.ndarray:
    """Return the hashes of blocks or warps in a launch, as uint32.

    units: the numbers of the blocks or warps
    launch: the number of the launch
    """
    import numpy as np

    start = np.uint32((launch * OF_LAUNCH + seed) & 0xFFFFFFFF)
    found = units.astype(np.uint32) * np.uint32(OF_UNIT) ^ start
    found = (found ^ found >> np.uint32(16)) * np.uint32(ROUND_1)
    found = (found ^ found >> np.uint32(15)) * np.uint32(ROUND_2)
    return found ^ found >> np.uint32(16)

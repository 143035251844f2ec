"""Compute how many registers a kernel may use before fewer of its warps fit on the GPU.

The rules are those of cuda_occupancy.h for compute capability 5.0 and newer, except 6.0. A multiprocessor has four parts with 16,384
registers and 16 warps each. A warp gets registers in units of 256, which is 8 per thread. GPUs with 12 warps per part have one step
less, so a limit may be stricter than necessary there.
"""

from __future__ import annotations

from gpubpf.inject.plan import MAX_PROGRAM
from gpubpf.ptx.module import Function

_PARTS = 4
_UNIT = 8  # registers per thread
_REGISTERS = 16384 // 32  # per part and lane
_WARPS = 16  # per part
_LARGEST_BLOCK = 1024  # threads
MOST = 255  # registers per thread
_FREE = _REGISTERS // _WARPS  # registers per thread with which all of a GPU's warps fit
_CHEAP = 40  # registers per thread with which at least three quarters of a GPU's warps fit
_MORE = 12  # additional registers per thread that a copy with many probes may have, rounded to _UNIT


def most_registers(kernel: Function, before: int, waits: bool) -> int:
    """Return the most registers that a copy of `kernel` may use so that it can be launched wherever the original can.

    before: the original's registers per thread
    waits: whether blocks of the kernel may wait for each other. Then as many blocks must fit as of the original; otherwise, one block.
    """
    warps = _warps(before)
    if not waits:
        x, y, z = kernel.block_limit("reqntid") or kernel.block_limit("maxntid") or (_LARGEST_BLOCK, 1, 1)
        threads = min(x * y * z, _LARGEST_BLOCK)
        warps = max(1, min(warps, -(-threads // (32 * _PARTS))))
    return max(before, _within(warps))


def limit_of_copy(before: int, longest: int) -> int:
    """Return the limit of a copy's registers per thread.

    With few probes, as many warps fit as of the original: without the limit, ptxas would use more registers although it can do with
    fewer. With many probes, at least five eighths of the warps fit. With a lower limit, ptxas would spill more registers. Long
    programs spill most, so they get a higher limit.

    before: the original's registers per thread
    longest: the lines of PTX of the longest program at a point of `FREQUENT`, such as each access; 0 if the copy has no such program
    """
    if longest > MAX_PROGRAM:
        return min(MOST, max(_CHEAP, _rounded(before + _MORE)))
    if longest:
        return min(MOST, max(_FREE, (before + _MORE) // _UNIT * _UNIT))
    return _within(_warps(before))


def _warps(registers: int) -> int:
    """Return how many warps fit on a part of a multiprocessor if each thread has this many registers."""
    return min(_WARPS, _REGISTERS // _rounded(registers))


def _within(warps: int) -> int:
    """Return the most registers per thread with which this many warps fit on a part of a multiprocessor."""
    return min(MOST, _REGISTERS // warps // _UNIT * _UNIT)


def _rounded(registers: int) -> int:
    return -(-max(registers, 1) // _UNIT) * _UNIT

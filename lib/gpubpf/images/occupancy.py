"""Compute how many registers a kernel may use before fewer of its warps fit on the GPU.

The rules are those of cuda_occupancy.h for compute capability 5.0 and newer, except 6.0. A multiprocessor has four parts with 16,384
registers and 16 warps each. A warp gets registers in units of 256, which is 8 per thread. GPUs with 12 warps per part have one step
less, so a limit may be stricter than necessary there.
"""

from __future__ import annotations

from gpubpf.ptx.module import Function

_PARTS = 4
_UNIT = 8  # registers per thread
_REGISTERS = 16384 // 32  # per part and lane
_WARPS = 16  # per part
_LARGEST_BLOCK = 1024  # threads
MOST = 255  # registers per thread
_CHEAP = 40  # registers per thread with which at least three quarters of the warps that a GPU can hold fit


def most_registers(kernel: Function, before: int, waits: bool) -> int:
    """Return the most registers that a copy of `kernel` may use so that it can be launched wherever the original can.

    before: the original's registers. waits: its blocks may wait for each other, so all blocks that are resident in the original must
    fit. For other kernels, one block must fit.
    """
    warps = min(_WARPS, _REGISTERS // _rounded(before))
    if not waits:
        x, y, z = kernel.block_limit("reqntid") or kernel.block_limit("maxntid") or (_LARGEST_BLOCK, 1, 1)
        threads = min(x * y * z, _LARGEST_BLOCK)
        warps = max(1, min(warps, -(-threads // (32 * _PARTS))))
    return max(before, min(MOST, _REGISTERS // warps // _UNIT * _UNIT))


def limit_of_copy(before: int) -> int:
    """Return the registers to which a copy with many probes is limited: half more than the original's `before`, or _CHEAP.

    Then at least half of the original's warps fit. With a lower limit, ptxas would spill more registers.
    """
    return min(MOST, max(_CHEAP, _rounded(before + before // 2)))


def _rounded(registers: int) -> int:
    return -(-max(registers, 1) // _UNIT) * _UNIT

"""Kernels compiled by Numba (numba-cuda).

with_numba.py lineinfo|debug|driver|plain: with nvJitLink and line information, or all for a debugger; linked by the driver's cuLink*,
as where nvJitLink is not installed; with nvJitLink and neither, which makes cubins of SASS alone.
"""

from __future__ import annotations

import sys
import warnings

if sys.argv[1] == "driver":
    import without_nvjitlink  # noqa: F401
import numpy as np
from numba import cuda
from rounds import launched, rounds

warnings.simplefilter("ignore")
OPTIONS = {"lineinfo": {"lineinfo": True}, "debug": {"debug": True, "opt": False}}.get(sys.argv[1], {})
FACTORS = np.array([2, 3, 5], np.float32)


def main() -> None:
    n = 500

    @cuda.jit(**OPTIONS)
    def axpy(a, x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = a * x[i] + y[i]

    @cuda.jit(**OPTIONS)
    def table(y):
        factors = cuda.const.array_like(FACTORS)
        shared = cuda.shared.array(64, np.float32)
        i = cuda.grid(1)
        shared[cuda.threadIdx.x] = factors[i % 3]
        cuda.syncthreads()
        if i < y.size:
            y[i] = shared[(cuda.threadIdx.x + 1) % 64]

    x = cuda.to_device(np.arange(n, dtype=np.float32))
    i = np.arange(512).reshape(-1, 64)
    expected = FACTORS[np.roll(i, -1, axis=1) % 3].reshape(-1)[:n]
    for number in rounds():
        if number:  # another type: compiled anew
            x = cuda.to_device(np.arange(n, dtype=np.float64))
        y = cuda.to_device(np.ones(n, x.dtype))
        for _ in range(3):
            axpy[4, 128](2, x, y)
            launched["axpy"] += 1
        assert np.array_equal(y.copy_to_host(), 1 + 6 * np.arange(n))
        y = cuda.to_device(np.zeros(n, x.dtype))
        table[8, 64](y)
        launched["table"] += 1
        assert np.array_equal(y.copy_to_host(), expected)
        del y


main()

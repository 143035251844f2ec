"""Kernels compiled by Triton, without torch: what Triton needs of a tensor is its address and type."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import triton
import triton.language as tl
from cuda.bindings import driver as cu
from rounds import launched, rounds

warnings.simplefilter("ignore")


class Tensor:
    """Device memory with the content of an array."""

    def __init__(self, array):
        self.dtype, self._like = str(array.dtype), array
        status, self._address = cu.cuMemAlloc(array.nbytes)
        assert int(status) == 0, status
        (status,) = cu.cuMemcpyHtoD(self._address, array.ctypes.data, array.nbytes)
        assert int(status) == 0, status

    def data_ptr(self):
        return int(self._address)

    def get(self):
        out = np.empty_like(self._like)
        (status,) = cu.cuMemcpyDtoH(out.ctypes.data, self._address, out.nbytes)
        assert int(status) == 0, status
        return out


@triton.jit
def axpy(x, y, a, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(y + i, a * tl.load(x + i, mask=inside) + tl.load(y + i, mask=inside), mask=inside)


@triton.jit
def row_sum(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    tl.store(out + row, tl.sum(tl.load(x + row * n + i, mask=i < n, other=0.0), axis=0))


def main() -> None:
    triton.runtime.driver.active.set_current_device(0)
    n = 1000
    for number in rounds():
        kind = np.float32 if number == 0 else np.float64  # another type: compiled anew
        x, y = Tensor(np.arange(n, dtype=kind)), Tensor(np.ones(n, kind))
        for _ in range(3):
            axpy[(triton.cdiv(n, 256),)](x, y, 2.0, n, BLOCK=256)
            launched["axpy"] += 1
        assert np.array_equal(y.get(), 1 + 6 * np.arange(n)), y.get()
        rows = np.arange(4 * 100, dtype=kind).reshape(4, 100) % 7
        out = Tensor(np.zeros(4, kind))
        row_sum[(4,)](Tensor(rows), out, 100, BLOCK=128)
        launched["row_sum"] += 1
        assert np.array_equal(out.get(), rows.sum(axis=1)), out.get()


sys.exit(main())

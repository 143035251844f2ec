"""Kernels compiled, linked and launched by cuda.core.

with_cuda_core.py ptx|cubin|linked|driver: a program as PTX, as a cubin with line information, two PTX texts linked by nvJitLink
(with line information), or by the driver's cuLink*, as where nvJitLink is not installed.
"""

from __future__ import annotations

import sys

import numpy as np

if sys.argv[1] == "driver":
    import without_nvjitlink  # noqa: F401
from cuda.bindings import driver as cu
from cuda.core import Device, LaunchConfig, Linker, LinkerOptions, Program, ProgramOptions, launch
from rounds import launched, rounds

FILL = """
extern __device__ int twice(int);
extern "C" __global__ void fill(int *data, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] = twice(i) + ROUND;
}
"""
TWICE = "__device__ int twice(int i) { return 2 * i; }\n"


def make(mode, number, arch):
    defined = f"ROUND={number}"
    if mode in ("ptx", "cubin"):
        options = ProgramOptions(
            std="c++17", arch=f"sm_{arch}", define_macro=defined, lineinfo=mode == "cubin"
        )
        return Program(TWICE + FILL, "c++", options=options).compile(mode)
    options = ProgramOptions(
        std="c++17",
        arch=f"sm_{arch}",
        define_macro=defined,
        relocatable_device_code=True,
        lineinfo=mode == "linked",
    )
    codes = [Program(text, "c++", options=options).compile("ptx") for text in (FILL, TWICE)]
    linker = Linker(
        *codes, options=LinkerOptions(arch=f"sm_{arch}", lineinfo=True if mode == "linked" else None)
    )
    return linker.link("cubin")


def main() -> None:
    mode, n = sys.argv[1], 200
    device = Device()
    device.set_current()
    stream = device.create_stream()
    buffer = device.allocate(4 * n, stream=stream)
    out = np.zeros(n, np.int32)
    for number in rounds():
        kernel = make(mode, number, device.arch).get_kernel("fill")
        for _ in range(4):
            launch(stream, LaunchConfig(grid=2, block=128), kernel, buffer, np.int32(n))
            launched["fill"] += 1
        stream.sync()
        (status,) = cu.cuMemcpyDtoH(out.ctypes.data, int(buffer.handle), out.nbytes)
        assert int(status) == 0 and np.array_equal(out, 2 * np.arange(n) + number), out[:5]


main()

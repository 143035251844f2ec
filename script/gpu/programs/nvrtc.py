"""CUDA C++ compiled by NVRTC and launched through the driver by cuda-python; prints the digest of what it computes.

Exit status 77: no NVRTC.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from typing import Any

import numpy as np
from cuda.bindings import driver, nvrtc

SOURCE = """
extern "C" __global__ void fill(float *data, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] = i * 0.25f;
}
extern "C" __global__ void scale(float *data, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] = data[i] * 3.0f + 1.0f;
}
"""


def check(answer: tuple[Any, ...]) -> Any:
    """Return a call's result without the status; exit if the status is not 0."""
    status, *values = answer
    if int(status):
        raise SystemExit(f"nvrtc.py: {status!r}")
    return values[0] if len(values) == 1 else values


def main() -> int:
    try:
        nvrtc.nvrtcVersion()
    except Exception as error:  # cuda-bindings has several for a library that is not there
        print(f"there is no NVRTC: {error}", file=sys.stderr)
        return 77
    check(driver.cuInit(0))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(0))))
    names = driver.CUdevice_attribute
    major = check(driver.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0))
    minor = check(driver.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0))
    program = check(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"kernels.cu", 0, [], []))
    check(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=compute_{major}{minor}".encode()]))
    text = b" " * check(nvrtc.nvrtcGetPTXSize(program))
    check(nvrtc.nvrtcGetPTX(program, text))
    module = check(driver.cuModuleLoadData(text))
    n = 10000
    data = check(driver.cuMemAlloc(4 * n))
    for name in (b"fill", b"scale", b"scale"):
        kernel = check(driver.cuModuleGetFunction(module, name))
        arguments = ((data, n), (None, ctypes.c_int))
        check(driver.cuLaunchKernel(kernel, (n + 127) // 128, 1, 1, 128, 1, 1, 0, 0, arguments, 0))
    out = np.empty(n, np.float32)
    check(driver.cuMemcpyDtoH(out.ctypes.data, data, out.nbytes))
    first = np.arange(n, dtype=np.float32) * np.float32(0.25)
    if not np.allclose(out, (first * 3 + 1) * 3 + 1):
        print("nvrtc.py: wrong results", file=sys.stderr)
        return 1
    print(f"digest {hashlib.sha256(out.tobytes()).hexdigest()[:16]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""CUDA C++ compiled by NVRTC and loaded through the driver API by cuda-python, as CuPy's RawModule does.

with_nvrtc.py ptx|cubin|lineinfo|library|options: what NVRTC is asked for, and which of the driver's functions loads it.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np
from cuda.bindings import driver as cu
from cuda.bindings import nvrtc
from rounds import launched, rounds

SOURCE = """
__constant__ float factors[2];
__device__ int calls;
template <typename T> struct Scale { T by; };
namespace app {
template <typename T> __global__ void scale(T *data, Scale<T> with, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] = data[i] * with.by * (T)factors[ROUND % 2];
    if (i == 0) atomicAdd(&calls, 1);
}
}
extern "C" __global__ void fill(float *data, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] = i;
}
"""


def check(answer):
    """What a call gives, without the status; ends the program where that is not 0."""
    status, *values = answer
    if int(status):
        raise SystemExit(f"{status!r}")
    return values[0] if len(values) == 1 else values


def compiled(mode, number, cc):
    name = b"app::scale<float>"
    program = check(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"app.cu", 0, [], []))
    options = [f"-DROUND={number}".encode(), b"-std=c++17"]
    code = mode in ("cubin", "lineinfo")
    options.append(f"--gpu-architecture={'sm' if code else 'compute'}_{cc}".encode())
    options += [b"-lineinfo"] if mode == "lineinfo" else []
    check(nvrtc.nvrtcAddNameExpression(program, name))
    check(nvrtc.nvrtcCompileProgram(program, len(options), options))
    lowered = check(nvrtc.nvrtcGetLoweredName(program, name))
    if code:
        data = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
        check(nvrtc.nvrtcGetCUBIN(program, data))
    else:
        data = b" " * check(nvrtc.nvrtcGetPTXSize(program))
        check(nvrtc.nvrtcGetPTX(program, data))
    check(nvrtc.nvrtcDestroyProgram(program))
    return data, lowered


def load(mode, data):
    """(handle, function that finds a kernel, one that finds a variable, one that unloads)"""
    if mode == "library":
        library = check(cu.cuLibraryLoadData(data, [], [], 0, [], [], 0))
        return (
            lambda name: cu.CUfunction(int(check(cu.cuLibraryGetKernel(library, name)))),
            lambda name: check(cu.cuLibraryGetGlobal(library, name)),
            lambda: check(cu.cuLibraryUnload(library)),
        )
    if mode == "options":
        log = bytearray(256)
        options = [
            cu.CUjit_option.CU_JIT_INFO_LOG_BUFFER,
            cu.CUjit_option.CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
            cu.CUjit_option.CU_JIT_MAX_REGISTERS,
        ]
        module = check(cu.cuModuleLoadDataEx(data, len(options), options, [log, len(log), 64]))
    else:
        module = check(cu.cuModuleLoadData(data))
    return (
        lambda name: check(cu.cuModuleGetFunction(module, name)),
        lambda name: check(cu.cuModuleGetGlobal(module, name)),
        lambda: check(cu.cuModuleUnload(module)),
    )


def main() -> None:
    mode, n = sys.argv[1], 300
    check(cu.cuInit(0))
    context = check(cu.cuDevicePrimaryCtxRetain(0))
    check(cu.cuCtxSetCurrent(context))
    major, minor = (
        check(cu.cuDeviceGetAttribute(attribute, 0))
        for attribute in (
            cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    data = check(cu.cuMemAlloc(4 * n))
    out = np.zeros(n, np.float32)
    for number in rounds():
        for turn in range(2):
            image, scale = compiled(mode, turn, 10 * major + minor)
            kernel, variable, unload = load(mode, image)
            address, size = variable(b"factors")
            factors = np.array([3, 5], np.float32)
            assert size == factors.nbytes
            check(cu.cuMemcpyHtoD(address, factors.ctypes.data, factors.nbytes))
            for name, arguments in ((b"fill", (n,)), *((scale, (2.0, n)),) * 2):
                values = (data, *arguments)
                types = (None, *(ctypes.c_int if isinstance(a, int) else ctypes.c_float for a in arguments))
                check(cu.cuLaunchKernel(kernel(name), 3, 1, 1, 128, 1, 1, 0, 0, (values, types), 0))
                launched[name.decode()] += 1
            check(cu.cuMemcpyDtoH(out.ctypes.data, data, out.nbytes))
            expected = np.arange(n, dtype=np.float32) * (2 * factors[turn]) ** 2
            assert np.array_equal(out, expected), (number, turn, out[:5], expected[:5])
            calls = np.zeros(1, np.int32)
            check(cu.cuMemcpyDtoH(calls.ctypes.data, variable(b"calls")[0], 4))
            assert calls[0] == 2, calls
            unload()
    check(cu.cuMemFree(data))
    check(cu.cuDevicePrimaryCtxRelease(0))


main()

"""CUDA C++ compiled by NVRTC and loaded through the driver API by cuda-python, as CuPy's RawModule does.

with_nvrtc.py MODE: what NVRTC is asked for, and which of the driver's functions loads it. Modes of PTX: ptx, library, options.
Modes of cubins: cubin, lineinfo, cubin-library, cubin-file, and inside of something else cubin-fatbin, cubin-cuLink, cubin-nvJitLink.
nvJitLink, nvJitLink-lto: a cubin that nvJitLink makes of NVRTC's PTX or LTO-IR. later: ptx in the first round, then cubin.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import tempfile

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
    code = mode.startswith("cubin") or mode == "lineinfo"
    options.append(f"--gpu-architecture={'sm' if code else 'compute'}_{cc}".encode())
    options += [b"-lineinfo"] if mode == "lineinfo" else []
    options += [b"-dlto", b"-rdc=true"] if mode == "nvJitLink-lto" else []
    options += [b"-rdc=true"] if mode in ("cubin-cuLink", "cubin-nvJitLink") else []
    options += [b"--maxrregcount=32"] if mode == "cubin-file" else []
    check(nvrtc.nvrtcAddNameExpression(program, name))
    check(nvrtc.nvrtcCompileProgram(program, len(options), options))
    lowered = check(nvrtc.nvrtcGetLoweredName(program, name))
    if mode == "nvJitLink-lto":
        data = b" " * check(nvrtc.nvrtcGetLTOIRSize(program))
        check(nvrtc.nvrtcGetLTOIR(program, data))
    elif code:
        data = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
        check(nvrtc.nvrtcGetCUBIN(program, data))
    else:
        data = b" " * check(nvrtc.nvrtcGetPTXSize(program))
        check(nvrtc.nvrtcGetPTX(program, data))
    check(nvrtc.nvrtcDestroyProgram(program))
    return packed(mode, data, f"sm_{cc}"), lowered


def packed(mode, data, arch):
    """What the driver gets, made from what NVRTC gave."""
    if mode == "cubin-fatbin":  # a fatbin's header and an image's, without compression
        data += bytes(-len(data) % 8)
        sm = int(arch.removeprefix("sm_"))
        image = struct.pack("<HHIQIIHHIIIQQQ", 2, 0x101, 64, len(data), 0, 0, 7, 1, sm, 0, 0, 0x11, 0, 0)
        return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 64 + len(data)) + image + data
    if mode in ("nvJitLink", "nvJitLink-lto", "cubin-nvJitLink"):
        from cuda.bindings import nvjitlink

        kinds = {"nvJitLink": nvjitlink.InputType.PTX, "nvJitLink-lto": nvjitlink.InputType.LTOIR}
        kind = kinds.get(mode, nvjitlink.InputType.CUBIN)
        options = [f"-arch={arch}", *(["-lto"] if mode == "nvJitLink-lto" else [])]
        handle = nvjitlink.create(len(options), options)
        nvjitlink.add_data(handle, kind, data, len(data), "app")
        nvjitlink.complete(handle)
        data = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, data)
        nvjitlink.destroy(handle)
        return bytes(data)
    return data


def load(mode, data):
    """(handle, function that finds a kernel, one that finds a variable, one that unloads)"""
    if mode.endswith("library"):
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
    elif mode == "cubin-file":
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            module = check(cu.cuModuleLoad(file.name.encode()))
    elif mode == "cubin-cuLink":
        link = check(cu.cuLinkCreate(0, [], []))
        kind = cu.CUjitInputType.CU_JIT_INPUT_CUBIN
        check(cu.cuLinkAddData(link, kind, data, len(data), b"app", 0, [], []))
        module = check(cu.cuModuleLoadData(check(cu.cuLinkComplete(link))[0]))
        check(cu.cuLinkDestroy(link))
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
        if sys.argv[1] == "later":
            mode = "cubin" if number else "ptx"
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

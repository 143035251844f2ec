"""Kernels for probes on hipsim's engine, and the launch blocks that they need."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gpubpf.ebpf.bytecode import Program
from gpubpf.gcn.inject import GcnInjected
from gpubpf.lower import amdgcn
from gpubpf.verify.rules import check

KERNELS = r"""
#include <hip/hip_runtime.h>
extern "C" __global__ void scale(float *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = x[i];
    if (v > 10) { x[i] = v * 2; return; }
    for (int k = 0; k < (i & 7); k++) v = v * 1.5f + 1;
    x[i] = v;
}
extern "C" __global__ void cube(int *x) {
    int w = gridDim.x * blockDim.x, h = gridDim.y * blockDim.y;
    int X = blockIdx.x * blockDim.x + threadIdx.x, Y = blockIdx.y * blockDim.y + threadIdx.y;
    int Z = blockIdx.z * blockDim.z + threadIdx.z;
    x[(Z * h + Y) * w + X] += X + 2 * Y + 3 * Z;
}
extern "C" __global__ void none() {}
extern "C" __global__ void reversed(int *x) {
    __shared__ int tile[128];
    tile[threadIdx.x] = x[blockIdx.x * 128 + threadIdx.x];
    __syncthreads();
    x[blockIdx.x * 128 + threadIdx.x] = tile[127 - threadIdx.x];
}
extern "C" __global__ void stack(int *x, int n) {
    volatile int kept[64];
    int *own = x + blockIdx.x * blockDim.x + threadIdx.x;
    for (int k = 0; k < 64; k++) kept[k] = k * *own;
    *own = kept[(*own + n) & 63];
}
#define FUNCTION __device__ __attribute__((noinline))
FUNCTION int square(int v) { return v * v + 1; }
FUNCTION int outer(int v) { return v > 5 ? square(v) + square(v + 1) : v; }
FUNCTION int factorial(int v) { return v < 2 ? 1 : v * factorial(v - 1) + (v & 1); }
FUNCTION int other(int v) { return v - 7; }
__device__ int (*functions[2])(int) = {square, other};
__device__ int (*kept)(int);
#define AT (blockIdx.x * blockDim.x + threadIdx.x)
extern "C" __global__ void calls(int *x) { x[AT] = square(x[AT]); }
extern "C" __global__ void nested(int *x) { if (AT & 1) x[AT] = outer(x[AT]) + outer(x[AT] + 3); }
extern "C" __global__ void looped(int *x) {
    int v = x[AT];
    for (int k = 0; k < (AT & 7); k++) v = (square(v) + outer(v)) & 1023;
    x[AT] = v;
}
extern "C" __global__ void recursive(int *x) { x[AT] = factorial(x[AT] & 7); }
extern "C" __global__ void by_pointer(int *x) { x[AT] = functions[x[AT] & 1](x[AT]); }
extern "C" __global__ void keeps(int *x) { kept = square; x[AT] = kept(x[AT]) + square(x[AT]); }
extern "C" __global__ void indexed(int *x, int n) {
    int own[16];
    for (int k = 0; k < 16; k++) own[k] = k * x[AT];
    own[n & 15] = 3;
    for (int k = 0; k < 3; k++) { own[(n + k) & 15] += own[(n * k) & 15]; __syncthreads(); }
    int sum = 0;
    for (int k = 0; k < 16; k++) sum = sum * 5 + own[k];
    x[AT] = sum;
}
extern "C" __global__ void uniform(int *x, int n) {
    int v = x[AT];
    #pragma unroll 1
    for (int k = 0; k < n; k++) v = v * 3 + k;
    if (n * 0.3f > 1.25f) x[AT] = v;
}
extern "C" __attribute__((optnone)) __global__ void unoptimized(int *x, int n) {  // blocks as with -O0
    int i = __builtin_amdgcn_workitem_id_x();
    if (i < n) x[i] += 1;
    for (int k = 0; k < (i & 7); k++) x[i] += k;
}
"""
# Name, arguments and their bytes, shape.
RUNS = (
    ("scale", ("x", "u32 1000"), 12, ((1280, 1, 1), (256, 1, 1))),
    ("cube", ("x",), 8, ((12, 10, 6), (3, 5, 2))),
    ("none", (), 0, ((7, 1, 1), (7, 1, 1))),
    ("reversed", ("x",), 8, ((1024, 1, 1), (128, 1, 1))),
    ("stack", ("x", "u32 5"), 12, ((640, 1, 1), (64, 1, 1))),
    *((name, ("x",), 8, ((640, 1, 1), (128, 1, 1))) for name in ("calls", "nested", "looped", "recursive")),
    ("indexed", ("x", "u32 5"), 12, ((640, 1, 1), (64, 1, 1))),
    ("uniform", ("x", "u32 5"), 12, ((640, 1, 1), (128, 1, 1))),
    ("unoptimized", ("x", "u32 70"), 12, ((128, 1, 1), (128, 1, 1))),
)


def content(name: str) -> np.ndarray:
    return (np.arange(2048) % 37).astype(np.float32 if name == "scale" else np.int32)


def build(place: Path, gpu: str, *options: str, text: str = KERNELS) -> Path:
    """Give the code object with the kernels of a text. options: of hipcc."""
    source, code = place / "kernels.hip", place / "kernels.co"
    source.write_text(text)
    flags = ["-O2", *options, "--cuda-device-only", "--no-gpu-bundle-output", "-w", "-c", "-o", str(code)]
    environment = {**os.environ, "HIP_PLATFORM": "amd"}
    subprocess.run(["hipcc", f"--offload-arch={gpu}", *flags, str(source)], check=True, env=environment)
    return code


def lowered(program: Program, name: str, wave: int) -> amdgcn.WaveProgram:
    return amdgcn.lower(program, check(program, program.functions[name]), wave)


def block_arguments(
    made: GcnInjected,
    name: str,
    given: int,
    shape: tuple[tuple[int, int, int], tuple[int, int, int]],
    maps: Mapping[str, str],
    parameters: bytes = b"",
) -> list[str]:
    """Give the rest of a kernel's arguments, and its launch block. `given`: bytes of arguments before. `maps`: buffers."""
    found, (grid, group) = made.kernels[name], shape
    block = found.block
    words = ["u64 0"] * (block.size // 8)
    words[block.launch_id // 8] = "u64 77"
    for each, at in block.bases.items():
        words[at // 8] = maps[each]
    for at in block.capacities.values():
        words[at // 8] = f"u64 {grid[0] * grid[1] * grid[2]}"
    for at, size in block.params.values():
        values = struct.unpack_from(f"<{size // 8}Q", parameters)
        words[at // 8 : at // 8 + len(values)] = [f"u64 {value}" for value in values]
    if block.shape is not None:
        numbers = [*group, *(-(-whole // part) for whole, part in zip(grid, group, strict=True))]
        words[block.shape // 8 : block.shape // 8 + 3] = [
            f"u64 {low | high << 32}" for low, high in zip(numbers[::2], numbers[1::2], strict=True)
        ]
    return ["u64 0"] * ((found.block_offset - -(-given // 8) * 8) // 8) + words


def with_argument(text: str) -> str:
    """Give a kernel of `hipsim_engine.kernel` one argument of 8 bytes."""
    return text.replace(".amdhsa_next_free_vgpr", ".amdhsa_kernarg_size 8\n    .amdhsa_next_free_vgpr")

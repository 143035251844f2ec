"""A program of two files and a library whose device code nvlink joins (`nvcc -rdc=true`), with known answers."""

from __future__ import annotations

from pathlib import Path

import gpubpf_cuda

# 2 blocks of 64 threads; thread i of the grid makes i % 4 + 2 stores in `first` and 2 in `second`.
FIRST = r"""
#include <cstdio>
#include "both.h"

extern __device__ int counter;
extern __constant__ int factor;
extern __device__ int table[];
extern __device__ void fill(volatile int *out, int times);
__device__ int plus(int x);  // in the library
__managed__ int managed = 4;

static __device__ int own = 3;
static __device__ __noinline__ int helper(int x) { return x + own; }

__global__ void first(int *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    fill(out + 128 + i, i % 4 + 1);
    atomicAdd(&counter, 1);
    out[i] = plus(helper(i)) * factor + table[i % 3] + shared_by_both(i) + managed;
    if (i == 127) printf("first %d\n", own);
}

void run_second(int *out);

int main() {
    int *out, from[128], count = 0, own_now = 30;
    if (cudaMalloc(&out, 256 * sizeof *out)) return 99;
    for (int turn = 0; turn < 3; turn++) {
        if (turn == 2) cudaMemcpyToSymbol(own, &own_now, sizeof own_now);
        if (turn == 2) managed = 40;
        first<<<2, 64>>>(out);
        if (cudaDeviceSynchronize()) return 98;
        cudaMemcpy(from, out, sizeof from, cudaMemcpyDeviceToHost);
        for (int i = 0; i < 128; i++) {
            int own_then = turn == 2 ? 30 : 3, managed_then = turn == 2 ? 40 : 4;
            if (from[i] != (i + own_then + 1000) * 5 + (i % 3 + 1) * 100 + 7 * i + managed_then) return 1;
        }
    }
    run_second(out);
    if (cudaDeviceSynchronize()) return 97;
    cudaMemcpy(from, out, sizeof from, cudaMemcpyDeviceToHost);
    for (int i = 0; i < 128; i++)
        if (from[i] != 1000 * i + 384 + 7 * i) return 2;
    cudaMemcpyFromSymbol(&count, counter, sizeof count);
    printf("%d of both %d\n", count, twice<int>(21));
    return count == 384 ? 5 : 3;
}
"""
SECOND = r"""
#include <cstdio>
#include "both.h"

__device__ int counter;
__constant__ int factor = 5;
__device__ int table[3] = {100, 200, 300};

static __device__ int own = 1000;
static __device__ __noinline__ int helper(int x) { return x * own; }

__device__ __noinline__ void fill(volatile int *out, int times) {
    for (int i = 0; i < times; i++) *out = i;
}

__global__ void second(int *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    fill(out + 128 + i, 1);
    out[i] = helper(i) + counter + shared_by_both(i);
    if (i == 127) printf("second %d\n", own);
}

void run_second(int *out) {
    second<<<2, 64>>>(out);
    twice<int>(0);
}
"""
BOTH = r"""
// A function and a kernel that both files define: weak symbols.
template <class T> __device__ __noinline__ T seven_times(T x) { return 7 * x; }
inline __device__ int shared_by_both(int x) { return seven_times<int>(x); }
template <class T> __global__ void doubled(T *out, T x) { *out = x + x; }
template <class T> T twice(T x) {
    T *out, from = 0;
    cudaMalloc(&out, sizeof *out);
    doubled<T><<<1, 1>>>(out, x);
    cudaMemcpy(&from, out, sizeof from, cudaMemcpyDeviceToHost);
    return from;
}
"""
LIBRARY = "__device__ int offset = 1000;\n__device__ int plus(int x) { return x + offset; }\n"
OUTPUT = "first 3\nfirst 3\nfirst 30\nsecond 1000\n384 of both 42\n"
STATUS = 5


def stores_of_first(thread: int) -> int:
    """Return the stores of a thread (0..127) in one launch of `first`, outside of printf: fill's, and its own."""
    return thread % 4 + 2


def build(directory: Path, *flags: str) -> Path:
    """Build the program in `directory`; return it."""
    gpubpf_cuda.skip_without_cuda()
    directory.mkdir(exist_ok=True)
    for name, text in (("first.cu", FIRST), ("second.cu", SECOND), ("both.h", BOTH), ("plus.cu", LIBRARY)):
        (directory / name).write_text(text)
    library, program = directory / "libplus.a", directory / "app"
    nvcc = ["nvcc", "-rdc=true", *flags]
    gpubpf_cuda.run_nvcc([*nvcc, "-lib", "-o", library, directory / "plus.cu"])
    files = [directory / "first.cu", directory / "second.cu", library]
    gpubpf_cuda.run_nvcc([*nvcc, "-cudart", "shared", "-o", program, *files])
    return program

"""Run gpucount, gpudist and gputrace for tests: the programs that they look at, and what they wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
from gpubpf.ebpf import clang, compile

ROOT = Path(__file__).resolve().parents[2]
needs_all = [
    *gpubpf_cuda.needs_cuda,
    pytest.mark.skipif(
        not compile.usable() and clang.find() is None,
        reason="compiling a SPEC requires root and bcc, or clang",
    ),
]

# app LAUNCHES MILLISECONDS: so many launches of `ns::work`, each after a pause. One has 3 x 2 blocks of 48 x 2 threads, so 3 warps:
# with block_dim.x of 48 a warp has threads of one row or two. Each thread
#     loads 4 bytes once, if its linear index in the block is below 40: all of warp 0 and 8 lanes of warp 1
#     stores 8 bytes to shared memory, meets the block at a barrier, and loads them
#     calls ns::twice if threadIdx.y is 1
#     stores 4 bytes to global memory, thread i to element i of the grid, and in warp 2 once more
#     adds 1 to a counter in global memory if its lane is 5
# `ns::rest` is launched once, on 2 blocks of 32 threads, and stores 1 byte.
APP = r"""
#include <cstdio>
#include <cstdlib>
#include <unistd.h>
namespace ns {
__device__ __noinline__ int twice(volatile int *x) { return 2 * *x; }
template <typename T> __global__ void work(volatile T *in, volatile T *out, int *counter) {
    __shared__ volatile long long shared[96];
    int own = threadIdx.y * 48 + threadIdx.x, all = (blockIdx.y * 3 + blockIdx.x) * 96 + own, value = 0;
    if (own < 40) value = in[own];
    shared[own] = all;
    __syncthreads();
    value += shared[95 - own];
    if (threadIdx.y) value += twice((volatile int *)&in[0]);
    out[all] = value;
    if (own / 32 == 2) out[all] = own;
    if (own % 32 == 5) atomicAdd(counter, 1);
}
__global__ void rest(volatile char *out) { out[threadIdx.x] = 1; }
}
int main(int argc, char **argv) {
    int *in, *out, *counter, found;
    cudaMalloc(&in, 4096);
    cudaMalloc(&out, 4096);
    cudaMalloc(&counter, 4);
    cudaMemset(in, 0, 4096);
    cudaMemset(counter, 0, 4);
    int launches = atoi(argv[1]);
    for (int i = 0; i < launches; i++) {
        ns::work<int><<<dim3(3, 2), dim3(48, 2), 16>>>(in, out, counter);
        if (cudaDeviceSynchronize()) return 98;
        if (!i) puts("launched"), fflush(stdout);
        usleep(1000 * atoi(argv[2]));
    }
    ns::rest<<<2, 32>>>((char *)out);
    cudaMemcpy(&found, counter, 4, cudaMemcpyDeviceToHost);
    printf("%s\n", found == launches * 18 ? "right" : "wrong");
    return found == launches * 18 ? 7 : 97;
}
"""


# Filters that let nothing pass: for the compiler, and for gpubpf's verifier, but not for the kernel's.
NEVER = ("load:* (0)", "load:* (lane == 40)")


def build(folder: Path) -> str:
    """Return the path of `app`, built with source lines."""
    return str(gpubpf_cuda.build(APP, folder / "app", "-lineinfo"))


def line_of(text: str) -> str:
    """Return the source line of APP that has this text, as the tools show it."""
    (number,) = (number for number, line in enumerate(APP.split("\n"), 1) if text in line)
    return f"app.cu:{number}"


def run(tool: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a tool on the embedded device."""
    command = [sys.executable, ROOT / "tools" / f"{tool}.py", "--device", "sim", *arguments]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120)


def measured(tool: str, out: Path, app: str, *arguments: str, launches: int = 2) -> list[dict[str, Any]]:
    """Return the JSON records of a measurement of `app`. The program is undisturbed, and nothing is lost."""
    done = run(tool, *arguments, "--json", "-o", out, "--", app, str(launches), "0")
    assert (done.returncode, done.stdout) == (7, "launched\nright\n"), done.stderr
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert (found[-1]["lost"], found[-1].get("log_lost", 0)) == (0, 0)
    return found

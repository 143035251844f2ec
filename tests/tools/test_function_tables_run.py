"""The tools on a program with a table of functions that the host can change, and with virtual functions of the same parameters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_cuda

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = gpubpf_cuda.needs_cuda

PROGRAM = r"""
#include <cstdio>
#include <new>
struct Shape { __device__ virtual int area(int side) const = 0; };
struct Square : Shape { __device__ int area(int side) const override { return side * side; } };
struct Line : Shape { __device__ int area(int) const override { return 0; } };
__device__ int twice(int x) { return 2 * x; }
__device__ int thrice(int x) { return 3 * x; }
__device__ int (*table[2])(int) = {twice, thrice};

__global__ void construct(Square *squares, Line *lines, Shape **shapes) {
    const int i = threadIdx.x;
    if (i % 2) shapes[i] = new (squares + i) Square;
    else shapes[i] = new (lines + i) Line;
}
__global__ void areas(Shape *const *shapes, int *to) { to[threadIdx.x] = shapes[threadIdx.x]->area(threadIdx.x); }
__global__ void scale(int *to) { to[threadIdx.x] = table[threadIdx.x % 2](to[threadIdx.x]); }

int main() {
    Square *squares;
    Line *lines;
    Shape **shapes;
    int *areas_of, sum = 0, host[64];
    cudaMalloc(&squares, 64 * sizeof *squares);
    cudaMalloc(&lines, 64 * sizeof *lines);
    cudaMalloc(&shapes, 64 * sizeof *shapes);
    cudaMalloc(&areas_of, sizeof host);
    construct<<<1, 64>>>(squares, lines, shapes);
    areas<<<1, 64>>>(shapes, areas_of);
    scale<<<1, 64>>>(areas_of);
    cudaMemcpy(host, areas_of, sizeof host, cudaMemcpyDeviceToHost);
    for (int one : host) sum += one;
    printf("sum %d\n", sum);
    return 0;
}
"""
SUM = 3 * sum(i * i for i in range(1, 64, 2))


@pytest.mark.every(4)
@pytest.mark.parametrize("tool", ["threadhist", "memtrace"])
def test_each_kernel_is_measured(tool: str, tmp_path: Path) -> None:
    app, out = gpubpf_cuda.build(PROGRAM, tmp_path / "app"), tmp_path / "out"
    command = [
        sys.executable,
        REPOSITORY / f"tools/{tool}.py",
        "--device",
        "sim",
        "--json",
        "-o",
        out,
        "--",
        app,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"sum {SUM}\n"), done.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert records[-1]["launches_instrumented"] == 3 and not records[-1]["not_instrumented"], records
    assert {r["kernel"] for r in records if "kernel" in r} == {"construct", "areas", "scale"}

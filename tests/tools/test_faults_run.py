"""A kernel that ends with an error: every tool says which one and, with -lineinfo, where in the source."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_cuda

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = gpubpf_cuda.needs_cuda

PROGRAM = r"""
#include <cassert>
#include <cstdio>
#include <cstdlib>
#include <cstring>
__global__ void fine(int *p) { p[threadIdx.x] += 1; }
template <class T> __global__ void stray(T *p, int at) {
    if (threadIdx.x == 3)
        p[at] = 1;  // 9
}
__global__ void asserts(int *p) {
    assert(p[threadIdx.x] > 5);  // 12
}
__device__ __noinline__ void traps_if(bool is) {
    if (is) __trap();  // 15
}
__global__ void traps(int *p) { traps_if(p[0] < 9); }
int main(int argc, char **argv) {
    int *p;
    if (cudaMalloc(&p, 4096) || cudaMemset(p, 0, 4096)) return 2;
    fine<<<1, 32>>>(p);
    if (!strcmp(argv[1], "stray")) stray<<<2, 32>>>(p, 1 << 28);
    if (!strcmp(argv[1], "asserts")) asserts<<<2, 32>>>(p);
    if (!strcmp(argv[1], "traps")) traps<<<2, 32>>>(p);
    printf("%s\n", cudaGetErrorName(cudaDeviceSynchronize()));
    return 0;
}
"""
FULL = {"stray": "void stray<int>(int*, int)", "asserts": "asserts(int*)", "traps": "traps(int*)"}


@pytest.fixture(scope="module", params=["-lineinfo", ""])
def app(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bool]:
    path = tmp_path_factory.mktemp("faults") / "app"
    gpubpf_cuda.build(PROGRAM, path, *filter(None, [request.param]))
    return str(path), bool(request.param)


def run(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(REPOSITORY / "tools" / f"{tool}.py"), "--device", "sim", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("kernel", "error", "line"),
    [
        ("stray", "illegal address (CUDA error 700), address 0x", 9),
        ("asserts", "assertion failed (CUDA error 710), block", 12),
        ("traps", "launch failure (CUDA error 719), block", 15),
    ],
)
def test_the_notice_names_kernel_and_place(app: tuple[str, bool], kernel: str, error: str, line: int) -> None:
    path, has_lines = app
    done = run("threadhist", "--json", "--", path, kernel)
    where = f" at app.cu:{line}" if has_lines else ""
    assert f"(app): kernel {FULL[kernel]} failed{where}: {error}" in done.stderr
    thread = 3 if kernel == "stray" else 0
    assert re.search(rf", block \([01],0,0\), thread \({thread},0,0\)$", done.stderr, re.M)
    (fault,) = json.loads(done.stdout.splitlines()[-1])["device_faults"]
    assert (fault["kernel"], fault["source"]) == (kernel, f"app.cu:{line}" if has_lines else None)
    assert (fault["thread"], fault["gpu"]) == ([thread, 0, 0], 0)
    assert (fault["address"] is None) == (kernel != "stray")


@pytest.mark.every(4)
@pytest.mark.parametrize("tool", ["launchlate", "kernelretsnoop", "memtrace"])
def test_every_tool_says_it_once(app: tuple[str, bool], tool: str) -> None:
    path, has_lines = app
    done = run(tool, "--", path, "stray")
    assert done.stderr.count("kernel void stray<int>(int*, int) failed") == 1
    assert " ended" not in done.stderr  # only its context did
    assert ("failed at app.cu:9: illegal address" in done.stderr) == has_lines


def test_without_a_fault_nothing_is_said(app: tuple[str, bool]) -> None:
    done = run("threadhist", "--json", "--", app[0], "none")
    assert "failed" not in done.stderr and "device_faults" not in done.stdout

"""Launches that the driver rejects, on the embedded device: no tool counts one as measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
from gpubpf_host import needs_bpf

TOOLS = Path(__file__).resolve().parents[2] / "tools"
pytestmark = gpubpf_cuda.needs_cuda

# Four launches that run, and nine that do not. The last call does not launch a kernel.
PROGRAM = r"""
#include <cstdio>
__global__ void scale(int *x) { atomicAdd(x, 1); }
__global__ void __launch_bounds__(128) bounded(int *x) { atomicAdd(x, 1); }
__global__ void never(int *x) { atomicAdd(x, 1); }
int main() {
    int *x, found = 0;
    cudaMalloc(&x, 4);
    cudaMemset(x, 0, 4);
    void *arguments[] = {&x};
    for (int i = 0; i < 3; i++) scale<<<2, 32>>>(x);
    scale<<<1, 2048>>>(x);
    scale<<<1, dim3(1, 1, 65)>>>(x);
    scale<<<0, 32>>>(x);
    scale<<<dim3(1, 65536), 32>>>(x);
    scale<<<1, 32, 1 << 20>>>(x);
    bounded<<<1, 256>>>(x);
    bounded<<<1, 128>>>(x);
    never<<<1, 1025>>>(x);
    cudaLaunchCooperativeKernel((void *)scale, dim3(1), dim3(1056), arguments, 0, 0);
    cudaLaunchConfig_t config{};
    config.gridDim = 1;
    config.blockDim = 1088;
    printf("%s ", cudaGetErrorName(cudaLaunchKernelExC(&config, (void *)scale, arguments)));
    cudaLaunchKernel((void *)main, dim3(1), dim3(32), arguments, 0, 0);
    cudaMemcpy(&found, x, 4, cudaMemcpyDeviceToHost);
    printf("found %d\n", found);
}
"""
OUTPUT = "cudaErrorInvalidConfiguration found 320\n"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("rejected") / "app")


def records(out: Path, tool: str, *words: str | Path, output: str = OUTPUT) -> list[dict[str, Any]]:
    command = [sys.executable, TOOLS / f"{tool}.py", "--json", "-o", out, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert (done.returncode, done.stdout) == (0, output), done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_rejected_launches_have_a_reason(tmp_path: Path, app: Path) -> None:
    found = records(tmp_path / "out", "threadhist", "--device", "sim", "--", app)
    kernels = {r["kernel"]: (r["launches"], r["runs"]) for r in found if r["type"] == "kernel"}
    assert kernels == {"scale": (3, 192), "bounded": (1, 128)}
    summary = found[-1]
    assert (summary["launches_seen"], summary["launches_matched"]) == (13, 13)
    assert (summary["launches_instrumented"], summary["not_instrumented"]) == (4, {"launch failed": 9})


def test_a_kernel_whose_launches_are_all_rejected(tmp_path: Path, app: Path) -> None:
    found = records(tmp_path / "out", "launchlate", "-v", "--device", "sim", "--kernel", "never", "--", app)
    assert not any(record["type"] in ("launch", "kernel") for record in found)
    assert (found[-1]["launches_instrumented"], found[-1]["not_instrumented"]) == (0, {"launch failed": 1})


@needs_bpf
def test_cudasnoop_counts_them_as_errors(tmp_path: Path, app: Path) -> None:
    found = records(tmp_path / "out", "cudasnoop", "--", sys.executable, "-m", "cudasim", "--", app)
    kernels = {r["kernel"]: (r["count"], r["errors"]) for r in found if r["type"] == "kernel"}
    assert kernels == {"scale": (10, 7), "bounded": (2, 1), "never": (1, 1), "main": (1, 1)}

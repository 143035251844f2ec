"""Source lines of instructions: those of the kernel's own source, also where it calls functions of HIP's headers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import hipsim_engine
from gpubpf.gcn.code_object import CodeObject
from gpubpf.gcn.comgr import Comgr
from gpubpf.gcn.kernel_code import read
from gpubpf.gcn.lines import SourceLines

pytestmark = pytest.mark.skipif(
    shutil.which("hipcc") is None or hipsim_engine.missing() is not None,
    reason="needs hipcc and LLVM's tools for AMD GPUs, which script/setup installs where the distribution has them",
)
SOURCE = """#include <hip/hip_runtime.h>
__device__ inline void add(int *to, int value) {
    atomicAdd(to, value);
}
extern "C" __global__ void lines(int *x) {
    __shared__ int part[64];
    part[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    int sum = part[63 - threadIdx.x];
    sum += __shfl_down(sum, 1);
    add(&x[64], sum);
    if (sum > 3)
        x[threadIdx.x] = sum * 5;
    else
        x[threadIdx.x] = sum + 7;
}
"""
# The compiler merges the last two stores.
LINES = {
    "global_load_dword": 7,
    "ds_write_b32": 7,
    "s_barrier": 8,
    "ds_read_b32": 9,
    "ds_bpermute_b32": 10,
    "global_atomic_add": 3,
    "global_store_dword": 0,
}


@pytest.mark.every(2)
@pytest.mark.parametrize("debug", ["-gline-tables-only", "-g"])
def test_functions_of_hip_have_the_line_of_their_call(tmp_path: Path, debug: str) -> None:
    source, made = tmp_path / "lines.hip", tmp_path / "lines.co"
    source.write_text(SOURCE)
    flags = [debug, "-O2", "--cuda-device-only", "--no-gpu-bundle-output", "-w", "-c", "-o", str(made)]
    environment = {**os.environ, "HIP_PLATFORM": "amd"}
    subprocess.run(["hipcc", "--offload-arch=gfx906", *flags, str(source)], check=True, env=environment)
    code = CodeObject(made.read_bytes())
    (only,) = code.kernels
    lines = SourceLines(code.data)
    found = {one.name: lines.at(one.address) for one in read(code, Comgr(code.isa), only).instructions}
    expected = {name: (str(source) if line else "", line) for name, line in LINES.items()}
    assert {name: found[name] for name in LINES} == expected

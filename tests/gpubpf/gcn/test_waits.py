"""Which kernels may wait for another workgroup. Their copies must fit on the GPU as often as the originals."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import hipsim_engine
from gpubpf.gcn import kernel_code
from gpubpf.gcn.code_object import CodeObject
from gpubpf.gcn.comgr import Comgr

pytestmark = pytest.mark.skipif(
    shutil.which("hipcc") is None or hipsim_engine.missing() is not None,
    reason="needs hipcc and LLVM's tools for AMD GPUs, which script/setup installs where the distribution has them",
)
KERNELS = r"""
#include <hip/hip_runtime.h>
extern "C" __global__ void waits_at_barriers(int *x, int n) {
    __shared__ int tile[256];
    for (int k = 0; k < n; k++) {
        tile[threadIdx.x] = x[threadIdx.x + k];
        __syncthreads();
        x[threadIdx.x] += tile[threadIdx.x ^ k];
        __syncthreads();
    }
}
extern "C" __global__ void asks_atomically(int *x) { while (atomicAdd(x, 0) == 0) {} x[1] = 1; }
extern "C" __global__ void asks_past_caches(volatile int *x) { while (x[0] == 0) {} x[1] = 1; }
extern "C" __global__ void empties_caches(int *x) { while (x[0] == 0) __threadfence(); x[1] = 1; }
"""


@pytest.mark.every(2)
@pytest.mark.parametrize("gpu", hipsim_engine.GPUS)
def test_a_loop_with_barriers_does_not_wait_for_other_workgroups(gpu: str, tmp_path: Path) -> None:
    source, built = tmp_path / "kernels.hip", tmp_path / "kernels.co"
    source.write_text(KERNELS)
    command = [
        "hipcc",
        f"--offload-arch={gpu}",
        "-O2",
        "--cuda-device-only",
        "--no-gpu-bundle-output",
        "-w",
        "-c",
    ]
    subprocess.run([*command, "-o", built, source], check=True, env={**os.environ, "HIP_PLATFORM": "amd"})
    code = CodeObject(built.read_bytes())
    comgr = Comgr(code.isa)
    found = {kernel.name: kernel_code.read(code, comgr, kernel).waits for kernel in code.kernels}
    assert found == {
        "waits_at_barriers": False,
        "asks_atomically": True,
        "asks_past_caches": True,
        "empties_caches": True,
    }

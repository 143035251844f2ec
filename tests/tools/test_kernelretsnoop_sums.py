"""What kernelretsnoop adds up on the GPU, on the real clock: exits that are known whatever the times are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_cuda

TOOL = Path(__file__).resolve().parents[2] / "tools/kernelretsnoop.py"

pytestmark = gpubpf_cuda.needs_cuda

PROGRAM = r"""
__global__ void ragged(int *out) {  // two warps leave whole, one in two groups, and one has only four lanes
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 1 && lane < 9) return;
    *out = lane;
}
__global__ void many(int *out) { *out = 1; }  // one whole warp in each block, and one lane
int main() {
    int *out;
    if (cudaMalloc(&out, 64)) return 1;
    for (int k = 0; k < 20; k++) ragged<<<3, 100>>>(out);
    many<<<dim3(50, 20, 20), dim3(11, 3)>>>(out);
    return cudaDeviceSynchronize();
}
"""
BLOCKS = 50 * 20 * 20


@pytest.mark.every(4)
@pytest.mark.parametrize("choice", [(), ("--block", "*,*,1:4")], ids=["all", "chosen"])
def test_whole_warps_parts_of_warps_and_many_blocks(choice: tuple[str, ...], tmp_path: Path) -> None:
    app = gpubpf_cuda.build(PROGRAM, tmp_path / "app")
    command = [sys.executable, TOOL, "--device", "sim", "--json", "-o", tmp_path / "out", *choice, "--", app]
    variables = os.environ | {"CUDASIM_CLOCK": "real", "CUDASIM_HOSTILE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=variables)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    exits = {
        kernel: [one["exits"] for one in found if one["type"] == "lane" and one["kernel"] == kernel]
        for kernel in ("ragged", "many")
    }
    kernels = {one["kernel"]: one for one in found if one["type"] == "kernel"}
    if choice:  # the grid of `ragged` has no such block
        assert exits == {"ragged": [], "many": [2 * BLOCKS // 5, *[BLOCKS // 5] * 31]}
    else:
        assert exits["ragged"] == [20 * 3 * 4] * 4 + [20 * 3 * 3] * 28
        assert exits["many"] == [2 * BLOCKS, *[BLOCKS] * 31]
        ragged = kernels["ragged"]
        assert (ragged["launches"], ragged["exits"], ragged["lost"]) == (20, 6000, 0)
        assert 8 <= ragged["launches_whole"] <= 20
    many = kernels["many"]
    assert (many["launches"], many["launches_whole"], many["lost"]) == (1, 1, 0)
    assert many["warp_spread_ns"]["max"] == 0 and many["grid_spread_ns"]["max"] > 0

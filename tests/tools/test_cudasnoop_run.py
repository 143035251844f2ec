"""cudasnoop on the embedded device's driver and runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
from gpubpf.traced import device
from gpubpf_host import needs_bpf

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = [sys.executable, str(REPOSITORY / "tools/cudasnoop.py")]
DEVICE = [sys.executable, "-m", "cudasim.launcher", "--"]

pytestmark = [pytest.mark.whole_machine, needs_bpf, *gpubpf_cuda.needs_cuda]

PROGRAM = r"""
#include <cstdio>
namespace ns { template <class T> __global__ void scale(T *p, int n) { if (threadIdx.x < n) p[threadIdx.x] *= 2; } }
__global__ void nothing() {}
int main() {
    float *p;
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    cudaMalloc(&p, 4096);
    for (int i = 0; i < 7; i++) ns::scale<<<dim3(2, 3), 32, 128, stream>>>(p, 32);
    for (int i = 0; i < 3; i++) nothing<<<1, 1>>>();
    int failed = cudaMemcpy(p, p, 1 << 20, cudaMemcpyDefault) != cudaSuccess;
    cudaStreamSynchronize(stream);
    printf("%d %p\n", failed, (void *)stream);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("cudasnoop") / "app")


def measured(tmp_path: Path, program: Path, *options: str) -> tuple[str, list[dict[str, Any]]]:
    """Return what the program printed, and the records."""
    out = tmp_path / "out"
    words = [*TOOL, *options, "--json", "-o", str(out), "--", *DEVICE, str(program)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=dict(os.environ), check=True)
    return done.stdout, [json.loads(line) for line in out.read_text().splitlines()]


def test_functions_and_kernels(program: Path, tmp_path: Path) -> None:
    _, found = measured(tmp_path, program)
    apis = {record["api"]: record for record in found if record["type"] == "api"}
    launches = sum(r["count"] for name, r in apis.items() if "LaunchKernel" in name)
    assert launches == 10 and apis["cudaMalloc"]["count"] == apis["cudaStreamSynchronize"]["count"] == 1
    kernels = {record["kernel"]: record["count"] for record in found if record["type"] == "kernel"}
    assert kernels == {"ns::scale": 7, "nothing": 3}
    assert found[-1] == {**found[-1], "type": "summary", "tool": "cudasnoop", "lost": 0}


@pytest.mark.every(2)
def test_each_call(program: Path, tmp_path: Path) -> None:
    told, found = measured(tmp_path, program, "-e")
    failed, stream = told.split()
    calls = [record for record in found if record["type"] == "call"]
    scale = [record for record in calls if record.get("kernel") == "ns::scale"]
    assert len(scale) == 7
    expected = {"grid": [2, 3, 1], "block_dim": [32, 1, 1], "shared_bytes": 128, "stream": stream, "ret": 0}
    assert all({**record, **expected} == record for record in scale)
    by_name = {record["api"]: record for record in calls}
    assert by_name["cudaMalloc"]["bytes"] == 4096 and by_name["cudaStreamCreate"]["out"] == stream
    copy = by_name["cudaMemcpy"]
    assert copy["bytes"] == 1 << 20 and bool(copy["ret"]) == bool(int(failed)) == ("error" in copy)
    counts = Counter(record["api"] for record in calls)
    assert counts["cudaStreamSynchronize"] == 1


@pytest.mark.every(2)
def test_without_a_gpu_a_command_that_fails_gets_a_hint(tmp_path: Path) -> None:
    if not isinstance(reason := device.ask_driver(), str) or reason == device.EMBEDDED:
        pytest.skip("there is a device")
    for words, hinted in ((["false"], True), (["true"], False), (["sh", "-c", "cudasim -- false"], False)):
        done = subprocess.run([*TOOL, "--", *words], capture_output=True, text=True, timeout=60)
        hint = "cudasnoop: note: no GPU here; use cudasnoop -- cudasim -- false\n"
        assert (hint in done.stderr) == hinted, done.stderr

"""Kernels whose instrumented copy does not fit where the original does: a copy limited to fewer registers is launched."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
from gpubpf.images import copies
from gpubpf.tools import threadhist

pytestmark = gpubpf_cuda.needs_cuda

# Each thread keeps N values while it waits. A block is as large as the registers allow, so one more step does not fit.
PROGRAM = r"""
#include <cooperative_groups.h>
#include <cstdio>
template <int N, class Wait> __device__ void rotate(volatile int *values, int width, Wait wait) {
    int held[N], t = blockIdx.x * blockDim.x + threadIdx.x;
#pragma unroll
    for (int i = 0; i < N; i++) held[i] = values[t + i * width];
    wait();
#pragma unroll
    for (int i = 0; i < N; i++) values[(t + 1) % width + i * width] = held[i];
}
__global__ void together(int *values, int width) {
    rotate<48>(values, width, [] { cooperative_groups::this_grid().sync(); });
}
__global__ void alone(int *values, int width) { rotate<40>(values, width, [] { __syncthreads(); }); }

long turn(void (*kernel)(int *, int), int n, bool cooperative) {
    cudaFuncAttributes about;
    cudaFuncGetAttributes(&about, (const void *)kernel);
    int registers = (about.numRegs + 7) / 8 * 8, threads = 65536 / registers / 128 * 128, blocks, sms;
    if (threads > 1024) threads = 1024;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, 0);
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
    if (!cooperative) blocks = sms = 1;
    int width = blocks * sms * threads, *values;
    cudaMallocManaged(&values, sizeof(int) * width * n);
    for (int i = 0; i < width * n; i++) values[i] = i % width;
    void *arguments[] = {&values, &width};
    for (int i = 0; i < 100; i++)
        if (cooperative ? cudaLaunchCooperativeKernel(kernel, blocks * sms, threads, arguments, 0, 0)
                        : cudaLaunchKernel(kernel, blocks * sms, threads, arguments, 0, 0))
            return -1;
    if (cudaDeviceSynchronize()) return -1;
    long wrong = 0;
    for (int i = 0; i < width * n; i++) wrong += values[i] != ((i % width - 100) % width + width) % width;
    return wrong;
}
int main() {
    long first = turn(together, 48, true), second = turn(alone, 40, false);
    printf("%ld and %ld are wrong\n", first, second);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("occupancy") / "rotate", "-arch=sm_90", "-w")


def measure(
    program: Path, capfd: pytest.CaptureFixture[str], *options: str
) -> tuple[list[dict[str, Any]], str]:
    assert (
        threadhist.main(["--device", "sim", "--work", "stores", "--json", *options, "--", str(program)]) == 0
    )
    out, err = capfd.readouterr()
    assert "0 and 0 are wrong" in out
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")], err


@pytest.mark.every(4)
@pytest.mark.parametrize("second", [False, True], ids=["the copy", "a second copy"])
def test_limited_copies_are_launched_where_the_others_do_not_fit(
    program: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    second: bool,
) -> None:
    """Either the copy is limited from the start, or there are two, as where the original's registers are not known at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if second:
        monkeypatch.setattr(copies, "limit_of_copy", lambda *_: 255)
    records, err = measure(program, capfd)
    kernels = {record["kernel"]: record for record in records if record["type"] == "kernel"}
    for name, stores in (("together", 48), ("alone", 40)):
        assert kernels[name]["launches"] == 100
        threads = [r["work"] for r in records if r["type"] == "thread" and r["kernel"] == name]
        assert threads == [100 * stores] * kernels[name]["threads"]
        assert "occupancy" not in err
    assert kernels["together"]["registers"]["spilled_bytes"] > 0  # without a limit, it would not fit
    assert records[-1]["launches_instrumented"] == 200 and not records[-1]["not_instrumented"]


@pytest.mark.every(4)
def test_what_does_not_fit_even_so_is_explained(
    program: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(copies, "limit_of_copy", lambda *_: 255)
    monkeypatch.setattr(copies, "most_registers", lambda *_: 255)  # no limited copies
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    records, err = measure(program, capfd)
    assert records[-1]["not_instrumented"] == {"occupancy": 200}
    for text in (
        r"together: launches run the original \(occupancy\): its blocks may wait for each other, so 16 blocks of [\d,]+ threads"
        r" must fit at once; with the probe, 0 do \(\d+ registers per thread, \d+ without it\); to measure it,"
        r" launch fewer or smaller blocks",
        r"alone: launches run the original \(occupancy\): a block of [\d,]+ threads needs more registers with the probe than a"
        r" multiprocessor has \(\d+ registers per thread, \d+ without it\); to measure it, launch smaller blocks",
    ):
        assert re.search(text, err), err


CLUSTERS = r"""
#include <cstdio>
__global__ void one(int *out) { out[blockIdx.x] = threadIdx.x + 1; }
int main() {
    int *out, launched = 0;
    cudaMallocManaged(&out, 64);
    for (int blocks = 1; blocks <= 4; blocks++) {
        cudaLaunchAttribute attribute = {};
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {unsigned(blocks), 1, 1};
        cudaLaunchConfig_t config = {4, 32, 0, 0, &attribute, 1};
        launched += cudaLaunchKernelEx(&config, one, out) == cudaSuccess;
    }
    cudaDeviceSynchronize();
    printf("%d launched\n", launched);
}
"""


def test_a_launch_whose_clusters_do_not_divide_the_grid_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = gpubpf_cuda.build(CLUSTERS, tmp_path / "clusters", "-arch=sm_90")
    assert threadhist.main(["--device", "sim", "--json", "--", str(program)]) == 0
    out, err = capfd.readouterr()
    summary = json.loads(out.splitlines()[-1])
    assert "3 launched" in out and summary["launches_instrumented"] == 3
    assert summary["not_instrumented"] == {"launch failed": 1}
    assert "occupancy" not in err


SHARED = r"""
#include <cstdio>
__global__ void reverse(int *values) {
    extern __shared__ int kept[];
    kept[threadIdx.x] = values[threadIdx.x];
    __syncthreads();
    values[threadIdx.x] = kept[blockDim.x - 1 - threadIdx.x];
}
int main() {
    int *values, bytes = 64 << 10;
    cudaMallocManaged(&values, 256 * sizeof(int));
    for (int i = 0; i < 256; i++) values[i] = i;
    reverse<<<1, 256, bytes>>>(values);
    cudaError_t first = cudaGetLastError();
    cudaFuncSetAttribute(reverse, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    for (int turn = 0; turn < 3; turn++) reverse<<<1, 256, bytes>>>(values);
    cudaError_t last = cudaDeviceSynchronize();
    printf("%d %d %d\n", first, last, values[0]);
}
"""


def test_a_kernel_that_is_allowed_more_shared_memory_after_a_launch_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = gpubpf_cuda.build(SHARED, tmp_path / "shared", "-arch=sm_80")
    assert threadhist.main(["--device", "sim", "--json", "--", str(program)]) == 0
    out, _ = capfd.readouterr()
    assert "1 0 255\n" in out
    summary = json.loads(out.splitlines()[-1])
    assert (summary["launches_instrumented"], summary["not_instrumented"]) == (3, {"launch failed": 1})

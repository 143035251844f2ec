"""Kernels with clusters of several blocks: the tools count each thread and each access to the memory of another block."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = gpubpf_cuda.needs_cuda

# A block of rank r adds 1 to each element of the next block 2 + r times. Launched once, and 3 times in a graph.
PROGRAM = r"""
#include <cooperative_groups.h>
#include <cstdio>
namespace cg = cooperative_groups;
__global__ void exchange(unsigned *out) {
    __shared__ unsigned slots[64];
    cg::cluster_group cluster = cg::this_cluster();
    const unsigned t = threadIdx.x, rank = cluster.block_rank(), size = cluster.num_blocks();
    unsigned *next = cluster.map_shared_rank(slots, (rank + 1) % size);
    slots[t] = 0;
    cluster.sync();
#pragma unroll 1
    for (unsigned k = 0; k < 2 + rank; k++) atomicAdd(&next[t], 1u);
    cluster.sync();
    out[(blockIdx.x + gridDim.x * blockIdx.y) * 64 + t] += slots[t] + next[63 - t];
    cluster.sync();
}
int main() {
    unsigned *out, wrong = 0;
    cudaMallocManaged(&out, 8 * 64 * sizeof *out);
    for (unsigned i = 0; i < 8 * 64; i++) out[i] = 0;
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {2, 2, 1};
    cudaLaunchConfig_t config = {dim3(4, 2), 64, 0, stream, &attribute, 1};
    if (cudaLaunchKernelEx(&config, exchange, out)) return 1;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    config.gridDim = dim3(8, 1);
    attribute.val.clusterDim = {4, 1, 1};
    if (cudaLaunchKernelEx(&config, exchange, out)) return 1;
    cudaStreamEndCapture(stream, &graph);
    cudaGraphInstantiate(&exec, graph, 0);
    for (int k = 0; k < 3; k++) cudaGraphLaunch(exec, stream);
    if (cudaStreamSynchronize(stream)) return 1;
    for (unsigned block = 0; block < 8; block++)
        for (unsigned t = 0; t < 64; t++) {
            const unsigned first = block % 2 + 2 * (block / 4), others = block % 4;
            const auto sum = [](unsigned rank) { return 2 + (rank + 3) % 4 + 2 + rank; };
            wrong += out[block * 64 + t] != sum(first) + 3 * sum(others);
        }
    printf("%u wrong\n", wrong);
}
"""
GRIDS = {(4, 2, 1): 1, (8, 1, 1): 3}  # launches of each


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpubpf_cuda.build(
        PROGRAM, tmp_path_factory.mktemp("clusters") / "clusters", "-arch=sm_90", "-lineinfo"
    )


def measure(program: Path, tool: str, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(REPOSITORY / f"tools/{tool}.py"), "--device", "sim", "--json", *options]
    done = subprocess.run([*command, "--", str(program)], capture_output=True, text=True, check=True)
    assert "0 wrong\n" in done.stdout, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert records[-1]["launches_instrumented"] == 4 and not records[-1]["not_instrumented"]
    return records


def rank(grid: list[int], block: list[int]) -> int:
    return block[0] % 4 if grid == [8, 1, 1] else block[0] % 2 + 2 * block[1]


def test_counts_of_threads(program: Path) -> None:
    threads = [r for r in measure(program, "threadhist", "--work", "atomics") if r["type"] == "thread"]
    assert len(threads) == 2 * 8 * 64
    for r in threads:
        launches = GRIDS[tuple(r["grid"])]
        assert (r["runs"], r["work"]) == (launches, launches * (2 + rank(r["grid"], r["block"])))


def test_accesses_to_the_memory_of_other_blocks(program: Path) -> None:
    records = measure(program, "memtrace")
    warps, turns = (
        4 * 8 * 2,
        4 * (2 + 3 + 4 + 5) * 2 * 2,
    )  # of the launches together: warps, and their turns in the loop
    assert [(r["space"], r["op"], r["requests"], r["accesses"]) for r in records if r["type"] == "site"] == [
        ("shared", "store", warps, 32 * warps),
        ("shared", "atomic", turns, 32 * turns),
        ("shared", "load", warps, 32 * warps),
        ("shared", "load", warps, 32 * warps),
        ("global", "load", warps, 32 * warps),
        ("global", "store", warps, 32 * warps),
    ]


def test_exits_and_launches(program: Path) -> None:
    kernels = [r for r in measure(program, "kernelretsnoop") if r["type"] == "kernel"]
    found = {tuple(r["grid"]): (r["launches"], r["exits"], r["lost"]) for r in kernels}
    assert found == {grid: (launches, launches * 8 * 64, 0) for grid, launches in GRIDS.items()}
    (kernel,) = (r for r in measure(program, "launchlate") if r["type"] == "kernel")
    assert kernel["count"] == 4 and kernel["methods"] == {"device": 4}

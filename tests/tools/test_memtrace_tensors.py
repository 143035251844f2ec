"""memtrace on bulk tensor copies and wgmma: exact requests and lanes, and what it says of what it does not know."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_cuda

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = [sys.executable, str(REPOSITORY / "tools/memtrace.py"), "--device", "sim"]
pytestmark = gpubpf_cuda.needs_cuda

# Each kernel has two blocks of 128 threads: one warpgroup.
PROGRAM = r"""
#include <cstdint>
#include <cstdio>
#include <cuda.h>
#define OK(x) do { int e = (x); if (e) { printf("%s: %d\n", #x, e); return 1; } } while (0)
static __device__ uint32_t at(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* The first thread fetches a tile of 16 x 8 floats; all double it; the first thread stores and then adds it. */
__global__ void tile(const __grid_constant__ CUtensorMap map) {
    __shared__ __align__(128) float box[128];
    __shared__ __align__(8) uint64_t barrier;
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(at(&barrier)) : "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 512;" :: "r"(at(&barrier)) : "memory");
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {0, %3}], [%2];"
                     :: "r"(at(box)), "l"(&map), "r"(at(&barrier)), "r"(blockIdx.x * 16) : "memory");
    }
    asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra W; }" :: "r"(at(&barrier)) : "memory");
    box[threadIdx.x] *= 2;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {0, %2}], [%1];"
                     :: "l"(&map), "r"(at(box)), "r"(blockIdx.x * 16) : "memory");
        asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
        asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {0, %2}], [%1];"
                     :: "l"(&map), "r"(at(box)), "r"(blockIdx.x * 16) : "memory");
        asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
    }
}

/* D = A x B of ones, `turns` times: once with A in shared memory, once with A in registers. */
__global__ void multiply(float *out, int turns) {
    __shared__ __align__(128) uint32_t a[64 * 8], b[8 * 8];
    float d[4] = {};
    uint32_t one = 0x3c003c00;
    for (int i = threadIdx.x; i < 64 * 8; i += 128) a[i] = one, b[i % 64] = one;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    auto matrix = [](uint32_t *p) { return (uint64_t)(at(p) >> 4) | (uint64_t)(128 >> 4) << 16 | (uint64_t)(256 >> 4) << 32; };
    uint64_t first = matrix(a), second = matrix(b);
#pragma unroll 1
    for (int i = 0; i < turns; i++) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(first), "l"(second));
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, {%4, %4, %4, %4}, %5, 1, 1, 1, 0;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(one), "l"(second));
        asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    out[blockIdx.x * 128 + threadIdx.x] = d[0];
}

int main() {
    float host[256], back[256], *data, *out;
    for (int i = 0; i < 256; i++) host[i] = i;
    OK(cudaMalloc(&data, sizeof host));
    OK(cudaMalloc(&out, sizeof host));
    OK(cudaMemcpy(data, host, sizeof host, cudaMemcpyHostToDevice));
    decltype(&cuTensorMapEncodeTiled) encode;
    cudaDriverEntryPointQueryResult found;
    OK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&encode, 12000, cudaEnableDefault, &found));
    CUtensorMap map;
    cuuint64_t sizes[] = {8, 32}, strides[] = {32};
    cuuint32_t box[] = {8, 16}, steps[] = {1, 1};
    OK(encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
              CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    tile<<<2, 128>>>(map);
    OK(cudaMemcpy(back, data, sizeof back, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 256; i++) if (back[i] != 4 * host[i]) return printf("wrong: %d %g\n", i, back[i]), 1;
    multiply<<<2, 128>>>(out, 5);
    OK(cudaMemcpy(back, out, sizeof back, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 256; i++) if (back[i] != 5 * 2 * 16) return printf("wrong: %d %g\n", i, back[i]), 1;
    puts("ok");
    return 0;
}
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = ("-lineinfo", "-gencode", "arch=compute_90a,code=[sm_90a,compute_90a]")
    return gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("tensors") / "app", *options)


def memtrace(app: Path, out: Path, *arguments: str) -> str:
    command = [*TOOL, *arguments, "-o", str(out), "--", str(app)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr
    return out.read_text()


@pytest.mark.every(2)
def test_exact_counts(app: Path, tmp_path: Path) -> None:
    found = [json.loads(line) for line in memtrace(app, tmp_path / "out", "--json").splitlines()]
    sites = [site for site in found if site["type"] == "site" and site["space"] == "tensor"]
    seen = [
        tuple(site[name] for name in ("kernel", "op", "width", "requests", "accesses", "bytes"))
        for site in sites
    ]
    # Of wgmma, the four warps of a group share 64 x 16 elements of A and 16 x 8 of B: 2,304 bytes, or 256 without A.
    copy, groups = ("tile", "async", None, 2, 2, None), 2 * 5
    assert sorted(seen, key=str) == sorted(
        [copy] * 3
        + [
            ("multiply", "load", 18, 4 * groups, 128 * groups, 2304 * groups),
            ("multiply", "load", 2, 4 * groups, 128 * groups, 256 * groups),
        ],
        key=str,
    )
    assert all(site[name] is None for site in sites for name in ("sectors", "pattern", "bank_ways", "share"))
    kernels = {record["kernel"]: record for record in found if record["type"] == "kernel"}
    assert kernels["tile"]["tensor_requests"] == 6 and kernels["multiply"]["tensor_requests"] == 8 * groups
    assert found[-1]["not_probed"] == {} and found[-1]["lost"] == 0


@pytest.mark.every(2)
def test_the_text_says_what_is_unknown(app: Path, tmp_path: Path) -> None:
    text = memtrace(app, tmp_path / "out")
    rows = [line.split()[1:] for line in text.splitlines() if line.startswith("app.cu:")]
    assert [row[:4] for row in rows if row[0] == "cp.tensor.2d"] == [["cp.tensor.2d", "2", "-", "-"]] * 3
    assert sorted(row[:4] for row in rows if row[0] == "wgmma") == [
        ["wgmma", "40", "2.50", "KB"],
        ["wgmma", "40", "22.5", "KB"],
    ]
    said = " ".join(text.split())
    assert "bulk tensor copies: 6 requests; addresses and bytes are unknown" in said
    assert "wgmma: asked for 25.0 KB of shared memory; bank conflicts are unknown" in said
    assert "kernels may have touched more: accesses to textures and surfaces, and bulk tensor copies" in said
    assert "one lane alone" not in said and "never touched" not in said
    only = memtrace(app, tmp_path / "out", "--kernel", "multiply")
    assert "textures" not in only and "never touched" not in only  # wgmma hides no bytes of allocations


@pytest.mark.every(2)
def test_records_leave_these_out_and_name_them(app: Path, tmp_path: Path) -> None:
    found = [json.loads(line) for line in memtrace(app, tmp_path / "out", "-e", "--json").splitlines()]
    spaces = {site["space"] for site in found if site["type"] == "access"}
    assert spaces and "tensor" not in spaces
    assert found[-1]["not_probed"] == {
        "cp.async.bulk.tensor": 2,
        "cp.reduce.async.bulk.tensor": 1,
        "wgmma.mma_async": 2,
    }

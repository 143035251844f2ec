"""memtrace and threadhist on Blackwell's tensor memory (tcgen05): exact requests and bytes, and an unchanged result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_cuda

TOOLS = Path(__file__).resolve().parents[2] / "tools"
pytestmark = gpubpf_cuda.needs_cuda

# Two blocks of 128 threads multiply matrices of ones, 128 x 16 and 16 x 8, `turns` times.
PROGRAM = r"""
#include <cstdint>
#include <cstdio>
#define OK(x) do { int e = (x); if (e) { printf("%s: %d\n", #x, e); return 1; } } while (0)
static __device__ uint32_t at(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

__global__ void multiply(float *out, int turns) {
    __shared__ __align__(128) uint32_t a[128 * 8], b[8 * 8];
    __shared__ __align__(8) uint64_t barrier;
    __shared__ uint32_t place;
    for (int i = threadIdx.x; i < 128 * 8; i += 128) a[i] = 0x3c003c00, b[i % 64] = 0x3c003c00;
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(at(&barrier)) : "memory");
    if (threadIdx.x < 32)
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 32;" :: "r"(at(&place)) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const uint32_t address = place, mine = address + (threadIdx.x / 32 * 32 << 16);
    asm volatile("{ .reg .b32 r; mov.u32 r, 0; tcgen05.st.sync.aligned.32x32b.x8.b32 [%0], {r, r, r, r, r, r, r, r};"
                 " tcgen05.wait::st.sync.aligned; }" :: "r"(mine) : "memory");
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    __syncthreads();
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    if (threadIdx.x == 0) {
        /* A and B without a swizzle: 8 rows of 16 bytes together, chunks along K next to each other. */
        auto matrix = [](uint32_t *p) {
            return (uint64_t)(at(p) >> 4) | (uint64_t)(128 >> 4) << 16 | (uint64_t)(256 >> 4) << 32 | 1ull << 46;
        };
        const uint64_t first = matrix(a), second = matrix(b);
        const uint32_t shape = 1 << 4 | 8 >> 3 << 17 | 128 >> 4 << 24;
#pragma unroll 1
        for (int i = 0; i < turns; i++)
            asm volatile("{ .reg .pred p; setp.eq.u32 p, 0, 0; tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p; }"
                         :: "r"(address), "l"(first), "l"(second), "r"(shape) : "memory");
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" :: "r"(at(&barrier)) : "memory");
    }
    asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra W; }" :: "r"(at(&barrier)) : "memory");
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    float d[8];
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8]; tcgen05.wait::ld.sync.aligned;"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7])
                 : "r"(mine) : "memory");
    float sum = 0;
    for (int i = 0; i < 8; i++) sum += d[i];
    out[blockIdx.x * 128 + threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x < 32) asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 32;" :: "r"(address));
}

int main() {
    float back[256], *out;
    OK(cudaMalloc(&out, sizeof back));
    multiply<<<2, 128>>>(out, 5);
    OK(cudaMemcpy(back, out, sizeof back, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 256; i++) if (back[i] != 5 * 16 * 8) return printf("wrong: %d %g\n", i, back[i]), 1;
    puts("ok");
    return 0;
}
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = ("-lineinfo", "-gencode", "arch=compute_100a,code=[sm_100a,compute_100a]")
    return gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("tcgen05") / "app", *options)


def run(tool: str, app: Path, out: Path, *arguments: str) -> str:
    command = [sys.executable, TOOLS / f"{tool}.py", "--device", "sim", *arguments, "-o", out, "--", app]
    environment = os.environ | {"CUDASIM_CC": "10.0"}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr
    return out.read_text()


def test_sites(app: Path, tmp_path: Path) -> None:
    found = [json.loads(line) for line in run("memtrace", app, tmp_path / "out", "--json").splitlines()]
    sites = [site for site in found if site["type"] == "site" and site["space"] == "tmem"]
    seen = {
        site["opcode"].split(".")[1]: tuple(site[f] for f in ("op", "width", "requests", "accesses", "bytes"))
        for site in sites
    }
    assert seen == {
        "st": ("store", 32, 8, 256, 32 * 256),
        "ld": ("load", 32, 8, 256, 32 * 256),
        "mma": ("async", None, 10, 10, None),
    }
    (kernel,) = (record for record in found if record["type"] == "kernel")
    assert kernel["tmem_requests"] == 26 and found[-1]["not_probed"] == {} and found[-1]["lost"] == 0
    (place,) = (s for s in found if s["type"] == "site" and s["opcode"].startswith("tcgen05.alloc"))
    assert (place["op"], place["space"], place["requests"], place["accesses"], place["bytes"]) == (
        "store",
        "shared",
        2,
        2,
        8,
    )


def test_text(app: Path, tmp_path: Path) -> None:
    text = run("memtrace", app, tmp_path / "out")
    said = " ".join(text.split())
    assert "tensor memory: loads of 8.00 KB; stores of 8.00 KB; 10 multiplications of unknown size" in said
    rows = [line.split()[1:3] for line in text.splitlines() if line.startswith("app.cu:")]
    assert {("tcgen05.ld", "8"), ("tcgen05.st", "8"), ("tcgen05.mma", "10")} <= {tuple(row) for row in rows}


def test_work(app: Path, tmp_path: Path) -> None:
    """Each thread loads an address and its lane of tensor memory. The first warp stores one time more than others: the address."""
    found = {}
    for work in ("loads", "stores"):
        text = run("threadhist", app, tmp_path / work, "--work", work, "--json")
        threads = [record for record in map(json.loads, text.splitlines()) if record["type"] == "thread"]
        assert len(threads) == 256
        found[work] = [
            {t["work"] for t in threads if (t["thread"][0] < 32) == first} for first in (True, False)
        ]
    assert found["loads"] == [{2}, {2}]
    (first,), (others,) = found["stores"]
    assert first == others + 1

"""Programs that use tensor cores, in CUDA C++: their results on the embedded device, alone and under tools that instrument them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_cuda

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = gpubpf_cuda.needs_cuda

# Numbers are small integers, so all sums are exact.
PROGRAM = r"""
#include <cstdint>
#include <cstdio>
#include <cuda_fp16.h>
#include <mma.h>
using namespace nvcuda;

template <class Store, class T, class Sum, int M, int N, int K, class A, class B>
__global__ void multiply(const Store *a, const Store *b, Sum *d) {
    wmma::fragment<wmma::matrix_a, M, N, K, T, A> x;
    wmma::fragment<wmma::matrix_b, M, N, K, T, B> y;
    wmma::fragment<wmma::accumulator, M, N, K, Sum> z;
    wmma::fill_fragment(z, Sum(1));
    wmma::load_matrix_sync(x, a, std::is_same<A, wmma::row_major>::value ? K : M);
    wmma::load_matrix_sync(y, b, std::is_same<B, wmma::row_major>::value ? N : K);
    wmma::mma_sync(z, x, y, z);
    for (int i = 0; i < z.num_elements; i++) z.x[i] = z.x[i] * Sum(2);
    wmma::store_matrix_sync(d, z, N, wmma::mem_row_major);
}

/* By hand: ldmatrix, mma.sync, stmatrix. A is 16×16, B 16×8, both row by row. */
__global__ void byHand(const half *a, const half *b, float *d, half *back) {
    __shared__ __align__(128) half x[256], y[128], z[256];
#pragma unroll 1
    for (int i = threadIdx.x; i < 256; i += 32) x[i] = a[i], y[i & 127] = b[i & 127];
    __syncwarp();
    uint32_t r[4], s[2], lane = threadIdx.x;
    float c[4] = {1, 1, 1, 1};
    auto at = [](half *p) { return (uint32_t)__cvta_generic_to_shared(p); };
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at(x + lane % 16 * 16 + lane / 16 * 8)));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(s[0]), "=r"(s[1]) : "r"(at(y + lane % 16 * 8)));
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(s[0]), "r"(s[1]));
    for (int i = 0; i < 4; i++) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = 2 * c[i];
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(at(z + lane % 16 * 16 + lane / 16 * 8)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < 256; i += 32) back[i] = z[i];
}

/* A sparse 16×32 matrix whose elements 0 and 1 of each four are those of A, 16×16. Only these rows of the other matrix are B's. */
__global__ void pruned(const half *a, const half *b, float *d) {
    int g = threadIdx.x / 4, t = threadIdx.x % 4;
    __align__(4) half x[8], y[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int row = t * 2 + i % 2 + i / 2 * 8;
        x[i] = a[(g + i / 2 % 2 * 8) * 16 + t * 2 + i % 2 + i / 4 * 8];
        y[i] = row % 4 < 2 ? b[(row / 4 * 2 + row % 4) * 8 + g] : half(100);
    }
    const uint32_t *r = (const uint32_t *)x, *s = (const uint32_t *)y;
    float c[4] = {1, 1, 1, 1};
    asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, 1;"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(s[0]), "r"(s[1]), "r"(s[2]), "r"(s[3]),
                   "r"(t < 2 ? 0 : 0x44444444));
    for (int i = 0; i < 4; i++) d[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = 2 * c[i];
}

template <class T> T *managed(int count) {
    T *found;
    cudaMallocManaged(&found, count * sizeof(T));
    return found;
}

template <class Store, class Sum, class Launch>
int check(const char *name, int M, int N, int K, bool aRows, bool bRows, Launch launch) {
    Store *a = managed<Store>(M * K), *b = managed<Store>(K * N);
    Sum *d = managed<Sum>(M * N);
    auto value = [](int i) { return (i * 7 + i / 5) % 9; };
    for (int i = 0; i < M * K; i++) a[i] = Store(float(value(i)));
    for (int i = 0; i < K * N; i++) b[i] = Store(float(value(i + 3)));
    launch(a, b, d);
    int wrong = cudaDeviceSynchronize() != cudaSuccess;
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            double sum = 1;
            for (int k = 0; k < K; k++) sum += value(aRows ? m * K + k : k * M + m) * value((bRows ? k * N + n : n * K + k) + 3);
            wrong += double(float(d[m * N + n])) != 2 * sum;
        }
    printf("%s: %d wrong\n", name, wrong);
    return wrong;
}
#define WMMA(STORE, T, SUM, M, N, K, A, B)                                                                         \
    check<STORE, SUM>(#T " " #M "x" #N "x" #K " " #A " " #B, M, N, K, A, B, [](STORE *a, STORE *b, SUM *d) {       \
        multiply<STORE, T, SUM, M, N, K, std::conditional_t<A, wmma::row_major, wmma::col_major>,                 \
                 std::conditional_t<B, wmma::row_major, wmma::col_major>><<<1, 32>>>(a, b, d); })

int main() {
    int wrong = 0;
    wrong += WMMA(half, half, float, 16, 16, 16, 1, 0);
    wrong += WMMA(signed char, signed char, int, 32, 8, 16, 1, 1);
    wrong += check<half, float>("by hand", 16, 8, 16, true, true, [](half *a, half *b, float *d) {
        half *back = managed<half>(256);
        byHand<<<1, 32>>>(a, b, d, back);
        cudaDeviceSynchronize();
        for (int i = 0; i < 256; i++) d[0] += float(back[i]) != float(a[i]);
    });
    wrong += check<half, float>("pruned", 16, 8, 16, true, true,
                                [](half *a, half *b, float *d) { pruned<<<1, 32>>>(a, b, d); });
    return wrong != 0;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpubpf_cuda.build(PROGRAM, tmp_path_factory.mktemp("tensor") / "tensor", "-arch=sm_90")


def run(*arguments: str | Path) -> str:
    command = [sys.executable, *map(str, arguments)]
    environment = os.environ | {"CUDASIM_HOSTILE": "1", "PYTHONPATH": str(REPOSITORY / "lib")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def alone(program: Path) -> str:
    return run("-m", "cudasim", "--", program)


def test_results_are_right(alone: str) -> None:
    assert alone.count(" 0 wrong") == alone.count("wrong") == 4


@pytest.mark.every(2)
@pytest.mark.parametrize("tool", ["threadhist", "kernelretsnoop", "memtrace"])
def test_results_do_not_change(program: Path, alone: str, tool: str, tmp_path: Path) -> None:
    out = tmp_path / "records"
    told = run(REPOSITORY / f"tools/{tool}.py", "--device", "sim", "--json", "-o", out, "--", program)
    assert told == alone
    records = [json.loads(line) for line in out.read_text().splitlines()]
    summary = next(r for r in records if r["type"] == "summary")
    assert summary["launches_instrumented"] == 4 and not summary.get("not_probed")
    if tool == "memtrace":
        sites = [r for r in records if r["type"] == "site" and r["opcode"].startswith("wmma")]
        found = {
            (re.sub(r"\.sync\.aligned|\.global", "", s["opcode"]), s["requests"], s["bytes"]) for s in sites
        }
        assert found == {
            ("wmma.load.a.row.m16n16k16.f16", 1, 512),
            ("wmma.load.b.col.m16n16k16.f16", 1, 512),
            ("wmma.store.d.row.m16n16k16.f32", 1, 512),
            ("wmma.load.a.row.m32n8k16.s8", 1, 512),
            ("wmma.load.b.row.m32n8k16.s8", 1, 128),
            ("wmma.store.d.row.m32n8k16.s32", 1, 512),
        }

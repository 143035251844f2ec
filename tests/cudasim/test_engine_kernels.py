"""Kernels compiled by nvcc, run by the engine, against NumPy."""

# ruff: noqa: E501  (CUDA C++ in a string)

from __future__ import annotations

import numpy as np
import pytest

from engine_device import Array, Device, compile_cuda, nvcc, printed

pytestmark = pytest.mark.skipif(nvcc() is None, reason="nvcc is not installed")

SOURCE = r"""
#include <cstdio>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
#include <cuda/barrier>
#include <cuda_pipeline.h>
namespace cg = cooperative_groups;

extern "C" __global__ void matmul(const float *a, const float *b, float *c, int n) {
    __shared__ float ta[16][16], tb[16][17];
    int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
    float sum = 0;
    for (int t = 0; t < (n + 15) / 16; t++) {
        int k = t * 16;
        ta[threadIdx.y][threadIdx.x] = row < n && k + threadIdx.x < n ? a[row * n + k + threadIdx.x] : 0;
        tb[threadIdx.y][threadIdx.x] = column < n && k + threadIdx.y < n ? b[(k + threadIdx.y) * n + column] : 0;
        __syncthreads();
        for (int i = 0; i < 16; i++) sum += ta[threadIdx.y][i] * tb[i][threadIdx.x];
        __syncthreads();
    }
    if (row < n && column < n) c[row * n + column] = sum;
}

template <typename T> __device__ T warp_sum(T v) {
    for (int o = 16; o; o >>= 1) v += __shfl_down_sync(0xffffffff, v, o);
    return v;
}
template <typename T> __device__ void block_sum(const T *in, T *out, int n) {
    __shared__ T part[32];
    T v = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) v += in[i];
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x < 32) {
        v = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0;
        v = warp_sum(v);
        if (threadIdx.x == 0) atomicAdd(out, v);
    }
}
extern "C" __global__ void sum_int(const int *in, int *out, int n) { block_sum(in, out, n); }
extern "C" __global__ void sum_double(const double *in, double *out, int n) { block_sum(in, out, n); }

extern "C" __global__ void scan(const int *in, int *out, int n) {   // Hillis-Steele, dynamic shared memory
    extern __shared__ int s[];
    int t = threadIdx.x, from = 0;
    s[t] = t < n ? in[t] : 0;
    __syncthreads();
    for (int d = 1; d < blockDim.x; d *= 2) {
        int to = 1 - from;
        s[to * blockDim.x + t] = s[from * blockDim.x + t] + (t >= d ? s[from * blockDim.x + t - d] : 0);
        from = to;
        __syncthreads();
    }
    if (t < n) out[t] = s[from * blockDim.x + t];
}

extern "C" __global__ void histogram(const unsigned char *in, unsigned *out, int n) {
    __shared__ unsigned bins[256];
    for (int i = threadIdx.x; i < 256; i += blockDim.x) bins[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&bins[in[i]], 1u);
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x) atomicAdd(&out[i], bins[i]);
}

struct Body { float x, y, z, m; };
extern "C" __global__ void nbody(const float4 *p, float3 *f, int n, float eps) {
    extern __shared__ float4 tile[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float4 me = i < n ? p[i] : make_float4(0, 0, 0, 0);
    float3 a = make_float3(0, 0, 0);
    for (int base = 0; base < n; base += blockDim.x) {
        tile[threadIdx.x] = base + threadIdx.x < n ? p[base + threadIdx.x] : make_float4(0, 0, 0, 0);
        __syncthreads();
        for (int j = 0; j < blockDim.x; j++) {
            float dx = tile[j].x - me.x, dy = tile[j].y - me.y, dz = tile[j].z - me.z;
            float inv = rsqrtf(dx * dx + dy * dy + dz * dz + eps);
            float s = tile[j].w * inv * inv * inv;
            a.x += dx * s; a.y += dy * s; a.z += dz * s;
        }
        __syncthreads();
    }
    if (i < n) f[i] = a;
}

extern "C" __global__ void softmax(const float *in, float *out, int width) {
    __shared__ float red[256];
    const float *row = in + (size_t)blockIdx.x * width;
    float m = -INFINITY;
    for (int i = threadIdx.x; i < width; i += blockDim.x) m = fmaxf(m, row[i]);
    red[threadIdx.x] = m; __syncthreads();
    for (int k = blockDim.x / 2; k; k >>= 1) { if (threadIdx.x < k) red[threadIdx.x] = fmaxf(red[threadIdx.x], red[threadIdx.x + k]); __syncthreads(); }
    m = red[0]; __syncthreads();
    float s = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) s += expf(row[i] - m);
    red[threadIdx.x] = s; __syncthreads();
    for (int k = blockDim.x / 2; k; k >>= 1) { if (threadIdx.x < k) red[threadIdx.x] += red[threadIdx.x + k]; __syncthreads(); }
    for (int i = threadIdx.x; i < width; i += blockDim.x) out[(size_t)blockIdx.x * width + i] = expf(row[i] - m) / red[0];
}

extern "C" __global__ void transpose(const double *in, double *out, int w, int h) {
    __shared__ double tile[32][33];
    int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8) if (x < w && y + j < h) tile[threadIdx.y + j][threadIdx.x] = in[(y + j) * w + x];
    __syncthreads();
    x = blockIdx.y * 32 + threadIdx.x; y = blockIdx.x * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8) if (x < h && y + j < w) out[(y + j) * h + x] = tile[threadIdx.x][threadIdx.y + j];
}

extern "C" __global__ void half_axpy(const __half2 *x, __half2 *y, __half2 a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = __hfma2(a, x[i], y[i]);
}
extern "C" __global__ void bfloat_mul(const __nv_bfloat16 *x, __nv_bfloat16 *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = __hmul(x[i], y[i]);
}
extern "C" __global__ void math(const double *x, double *y, float *z, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { double v = x[i]; y[i] = sin(v) + exp(v) * log(fabs(v) + 1) + pow(fabs(v), 1.5) + fmod(v, 0.7);
                 float f = v; z[i] = sinf(f) * expf(f) + powf(fabsf(f), 0.3f) + __sinf(f) + tanhf(f) + cbrtf(f); }
}

__constant__ int weights[8] = {1, 2, 3, 4, 5, 6, 7, 8};
__device__ int counter = 5;
struct Shape { int kind; double size[3]; short tag; };
__device__ __noinline__ double area(Shape s, int scale) { return s.size[0] * s.size[1] * scale + s.kind + s.tag; }
__device__ __noinline__ Shape scaled(Shape s, double f) { for (int i = 0; i < 3; i++) s.size[i] *= f; return s; }
extern "C" __global__ void structs(Shape s, double *out) {
    int i = threadIdx.x;
    s.tag += i;
    out[i] = area(scaled(s, i), weights[i & 7]);
    if (i == 0) atomicAdd(&counter, 37);
}

__device__ __noinline__ unsigned ackermann(unsigned m, unsigned n) {
    if (m == 0) return n + 1;
    if (n == 0) return ackermann(m - 1, 1);
    return ackermann(m - 1, ackermann(m, n - 1));
}
__device__ int odd(int n);
__device__ __noinline__ int even(int n) { int keep[4] = {n, n + 1, n + 2, n + 3}; int r = n == 0 ? 1 : odd(n - 1); return r + 0 * keep[n & 3]; }
__device__ __noinline__ int odd(int n) { return n == 0 ? 0 : even(n - 1); }
extern "C" __global__ void recursion(unsigned *out, int *parity) {
    out[threadIdx.x] = ackermann(threadIdx.x % 3, threadIdx.x % 5);
    parity[threadIdx.x] = even(threadIdx.x);
}

struct Base { __device__ virtual int f(int x) const { return x; } int pad; };
struct Twice : Base { __device__ int f(int x) const override { return 2 * x; } };
struct Square : Base { __device__ int f(int x) const override { return x * x; } };
extern "C" __global__ void virtuals(int *out) {
    Base b; Twice t; Square s;
    const Base *all[3] = {&b, &t, &s};
    out[threadIdx.x] = all[threadIdx.x % 3]->f(threadIdx.x);
}

extern "C" __global__ void divergence(int *out) {
    int t = blockIdx.x * blockDim.x + threadIdx.x, v = 0;
    for (int i = 0; i < t % 37; i++) {
        if ((i ^ t) & 1) v += i; else if (i % 3 == 0) continue; else v ^= i;
        if (v > 500) break;
    }
    switch (t % 7) { case 0: v += 10; break; case 1: v *= 3; case 2: v -= 1; break; case 3: return; case 4: v = -v; break; case 5: v <<= 2; break; default: v = 7; }
    out[t] = v;
}

extern "C" __global__ void votes(unsigned *out) {
    unsigned t = threadIdx.x;
    out[t] = __ballot_sync(0xffffffff, t % 3 == 0);
    out[t + 32] = __any_sync(0xffffffff, t == 5) + 2 * __all_sync(0xffffffff, t < 32);
    out[t + 64] = __match_any_sync(0xffffffff, t / 5);
    out[t + 96] = __shfl_xor_sync(0xffffffff, t * t, 7);
    out[t + 128] = __shfl_up_sync(0xffffffff, t, 3, 8);
    out[t + 160] = __shfl_sync(0xffffffff, t + 100, t + 1, 16);
    out[t + 192] = __reduce_add_sync(0xffffffff, t);
    if (t & 1) out[t + 224] = __ballot_sync(0xaaaaaaaa, t > 16); else out[t + 224] = __shfl_sync(0x55555555, t, 30);
    out[t + 256] = __popc(__activemask());
}

extern "C" __global__ void groups(int *out) {
    cg::thread_block block = cg::this_thread_block();
    auto tile = cg::tiled_partition<8>(block);
    int v = block.thread_rank();
    for (int o = tile.size() / 2; o; o /= 2) v += tile.shfl_down(v, o);
    if (tile.thread_rank() == 0) out[block.thread_rank() / 8] = v;
    if (threadIdx.x % 3 == 0) { auto active = cg::coalesced_threads(); if (active.thread_rank() == 0) atomicAdd(&out[100], active.size()); }
    block.sync();
}

extern "C" __global__ void local_array(int *out, int n) {
    int a[64];
    for (int i = 0; i < n; i++) a[i] = (i * 7 + threadIdx.x) % n;
    int at = threadIdx.x % n, s = 0;
    for (int i = 0; i < n; i++) { s = s * 3 + a[at]; at = a[at]; }
    out[threadIdx.x] = s;
}

extern "C" __global__ void prints(int n) {
    if (threadIdx.x == 1)
        printf("%d %5.2f|%-6s|%c %x %lld %llu %%%s\n", n, 3.14159, "ab", 'z', 255, -5000000000ll, 1ull << 63, "end");
}

extern "C" __global__ void spin_lock(int *lock, int *count) {
    for (bool done = false; !done;) {
        if (atomicCAS(lock, 0, 1) == 0) { *(volatile int *)count += 1; __threadfence(); atomicExch(lock, 0); done = true; }
    }
}
extern "C" __global__ void spin_naive(int *lock, int *count) {   // lanes of a warp wait for each other
    while (atomicCAS(lock, 0, 1) != 0) ;
    *(volatile int *)count += 1; __threadfence();
    atomicExch(lock, 0);
}
extern "C" __global__ void lane_chain(volatile int *turn) { while (*turn != threadIdx.x) ; *turn = threadIdx.x + 1; }
extern "C" __global__ void block_chain(volatile int *turn) {     // the last block goes first
    while (*turn != gridDim.x - 1 - blockIdx.x) ;
    __syncthreads();
    if (threadIdx.x == 0) *turn = gridDim.x - blockIdx.x;
}
extern "C" __global__ void grid_barrier(int *arrived, int *out, int rounds) {
    for (int r = 1; r <= rounds; r++) {
        __syncthreads();
        if (threadIdx.x == 0) { __threadfence(); atomicAdd(arrived, 1); while (*(volatile int *)arrived < r * gridDim.x) ; }
        __syncthreads();
        if (threadIdx.x == 0 && *(volatile int *)arrived < r * gridDim.x) out[0] = 1;
    }
}
extern "C" __global__ void early_exit(int *out) {
    if (threadIdx.x >= 40) return;
    __syncthreads();
    atomicAdd(out, 1);
    __syncthreads();
    if (threadIdx.x == 3) return;
    __syncwarp();
    atomicAdd(out, 1);
}
extern "C" __global__ void named_barrier(int *out) {
    __shared__ volatile int value;
    if (threadIdx.x < 32) { if (threadIdx.x == 0) value = 42; __threadfence_block(); asm volatile("bar.arrive 1, 64;"); }
    else { asm volatile("bar.sync 1, 64;"); out[threadIdx.x - 32] = value; }
}
extern "C" __global__ void grid_groups(int *data, int *out, int n) {
    cg::grid_group grid = cg::this_grid();
    for (int step = 1; step <= n; step++) {
        data[grid.thread_rank()] += step;
        grid.sync();
        if (data[(grid.thread_rank() + 97) % grid.size()] != step * (step + 1) / 2) atomicAdd(out, 1);
        grid.sync();
    }
}
extern "C" __global__ void big_tiles(int *out) {
    auto block = cg::this_thread_block();
    auto tile = cg::tiled_partition<64>(block);
    out[threadIdx.x] = cg::reduce(tile, (int)threadIdx.x, cg::plus<int>());
    tile.sync();
    out[256 + threadIdx.x] = cg::inclusive_scan(cg::tiled_partition<16>(block), 1);
}
extern "C" __global__ void split_barrier(int *out, int n) {
    __shared__ cuda::barrier<cuda::thread_scope_block> bar;
    __shared__ int value[64];
    if (threadIdx.x == 0) init(&bar, blockDim.x);
    __syncthreads();
    int sum = 0;
    for (int i = 0; i < n; i++) {
        value[threadIdx.x] = i + threadIdx.x;
        auto token = bar.arrive();
        bar.wait(std::move(token));
        sum += value[(threadIdx.x + 33) % 64];
        bar.arrive_and_wait();
    }
    out[threadIdx.x] = sum;
}
extern "C" __global__ void async_copy(const int *in, int *out) {
    __shared__ int4 s[64];
    __pipeline_memcpy_async(&s[threadIdx.x], in + 4 * threadIdx.x, 16);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    out[threadIdx.x] = s[63 - threadIdx.x].y;
}
extern "C" __global__ void counting(int *out) {
    out[threadIdx.x] = __syncthreads_count(threadIdx.x % 3 == 0);
    out[threadIdx.x + 96] = __syncthreads_or(threadIdx.x == 77) + 2 * __syncthreads_and(threadIdx.x < 95);
}

extern "C" __global__ void atomics(int *i, unsigned *u, float *f, double *d, unsigned long long *l, __half2 *h) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    atomicMin(&i[0], -t); atomicMax(&i[1], t); atomicAnd(&i[2], ~(1 << (t & 7))); atomicOr(&i[3], 1 << (t & 15)); atomicXor(&i[4], t);
    atomicInc(&u[0], 9); atomicDec(&u[1], 5); atomicSub(&u[2], 3);
    atomicAdd(f, 0.5f); atomicAdd(d, 0.25); atomicAdd(l, 1ull << 33); atomicMax(l + 1, (unsigned long long)t << 40);
    atomicAdd(h, __floats2half2_rn(1.f, 2.f));
}
extern "C" __global__ void indices(unsigned *out) {
    unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[b * blockDim.x * blockDim.y * blockDim.z + t] = b * 10000 + t;
}
extern "C" __global__ void heap(int **out) { int *p = new int[4]; p[2] = threadIdx.x; out[threadIdx.x] = p; }
extern "C" __global__ void heap_free(int **in, int *out) { out[threadIdx.x] = in[threadIdx.x][2]; delete[] in[threadIdx.x]; }
extern "C" __global__ void generic_pointers(int *global, int *out) {
    __shared__ int s[4]; int local[4] = {5, 6, 7, 8};
    if (threadIdx.x < 4) s[threadIdx.x] = 100 + threadIdx.x;
    __syncthreads();
    int *p = threadIdx.x % 3 == 0 ? global : threadIdx.x % 3 == 1 ? s : local;
    p += threadIdx.x & 3;
    out[threadIdx.x] = *p + 1000 * __isShared(p) + 2000 * __isGlobal(p) + 4000 * __isLocal(p);
}
"""


@pytest.fixture(scope="module")
def device() -> Device:
    return Device(compile_cuda(SOURCE))


def ints(n: int) -> Array:
    return Array(np.zeros(n, np.int32))


RNG = np.random.default_rng(7)


def test_matmul(device: Device) -> None:
    n = 50
    a, b = RNG.random((n, n), np.float32), RNG.random((n, n), np.float32)
    c = Array(np.zeros((n, n), np.float32))
    device.launch("matmul", (4, 4), (16, 16), Array(a), Array(b), c, np.int32(n), seed=3)
    assert np.allclose(c.host, a @ b, rtol=1e-5)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_reductions(device: Device, seed: int | None) -> None:
    n = 100_003
    a = RNG.integers(-1000, 1000, n, np.int32)
    out = ints(1)
    device.launch("sum_int", 13, 256, Array(a), out, np.int32(n), seed=seed)
    assert out.host[0] == a.sum()
    d = RNG.random(n)
    result = Array(np.zeros(1))
    device.launch("sum_double", 7, 128, Array(d), result, np.int32(n), seed=seed)
    assert np.isclose(result.host[0], d.sum())


def test_scan(device: Device) -> None:
    a = RNG.integers(0, 100, 1000, np.int32)
    out = ints(1000)
    device.launch("scan", 1, 1024, Array(a), out, np.int32(1000), shared=8192, seed=5)
    assert (out.host == np.cumsum(a)).all()


def test_histogram(device: Device) -> None:
    a = RNG.integers(0, 256, 50_000).astype(np.uint8)
    out = Array(np.zeros(256, np.uint32))
    device.launch("histogram", 9, 192, Array(a), out, np.int32(a.size))
    assert (out.host == np.bincount(a, minlength=256)).all()


def test_nbody(device: Device) -> None:
    n = 200
    p = RNG.random((n, 4), np.float32)
    f = Array(np.zeros((n, 3), np.float32))
    device.launch("nbody", 4, 64, Array(p), f, np.int32(n), np.float32(1e-2), shared=64 * 16)
    d = p[None, :, :3].astype(np.float64) - p[:, None, :3]
    wanted = (d * (p[None, :, 3] / ((d**2).sum(2) + 1e-2) ** 1.5)[:, :, None]).sum(1)
    assert np.allclose(f.host, wanted, rtol=1e-3, atol=1e-3)


def test_softmax_and_transpose(device: Device) -> None:
    a = RNG.standard_normal((5, 700)).astype(np.float32)
    out = Array(np.zeros_like(a))
    device.launch("softmax", 5, 256, Array(a), out, np.int32(700))
    e = np.exp(a - a.max(1, keepdims=True))
    assert np.allclose(out.host, e / e.sum(1, keepdims=True), rtol=1e-5)
    d = RNG.random((70, 45))
    to = Array(np.zeros((45, 70)))
    device.launch("transpose", (2, 3), (32, 8), Array(d), to, np.int32(45), np.int32(70))
    assert (to.host == d.T).all()


def test_half(device: Device) -> None:
    x, y = RNG.standard_normal(256).astype(np.float16), RNG.standard_normal(256).astype(np.float16)
    given = Array(y)
    a = np.array([1.5, -2], np.float16)
    device.launch("half_axpy", 1, 128, Array(x), given, a.tobytes(), np.int32(128))
    wanted = (np.tile(a, 128).astype(np.float64) * x + y).astype(np.float16)
    assert (given.host == wanted).all()
    bx = (RNG.standard_normal(64).astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    by = (RNG.standard_normal(64).astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    out = Array((by.view(np.uint32) >> 16).astype(np.uint16))
    device.launch("bfloat_mul", 1, 64, Array((bx.view(np.uint32) >> 16).astype(np.uint16)), out, np.int32(64))
    assert np.allclose((out.host.astype(np.uint32) << 16).view(np.float32), bx * by, rtol=1 / 128)


def test_math_library(device: Device) -> None:
    x = np.linspace(-6, 6, 300)
    y, z = Array(np.zeros(300)), Array(np.zeros(300, np.float32))
    device.launch("math", 3, 100, Array(x), y, z, np.int32(300))
    wanted = np.sin(x) + np.exp(x) * np.log(np.abs(x) + 1) + np.abs(x) ** 1.5 + np.fmod(x, 0.7)
    assert np.allclose(y.host, wanted, rtol=1e-12, atol=1e-12)
    f = np.sin(x) * np.exp(x) + np.abs(x) ** 0.3 + np.sin(x) + np.tanh(x) + np.cbrt(x)
    assert np.allclose(z.host, f, rtol=1e-4, atol=1e-4)


def test_structs_and_variables(device: Device) -> None:
    shape = np.zeros(1, np.dtype([("kind", "i4"), ("size", "f8", 3), ("tag", "i2")], align=True))
    shape["kind"], shape["size"], shape["tag"] = 3, [2.0, 5.0, 1.0], 7
    out = Array(np.zeros(40))
    device.launch("structs", 1, 40, shape.tobytes(), out)
    i = np.arange(40)
    assert (out.host == 10.0 * i * i * (i % 8 + 1) + 3 + 7 + i).all()
    assert device.variable("counter", np.int32, (1,))[0] == 42


def ackermann(m: int, n: int) -> int:
    return n + 1 if m == 0 else n + 2 if m == 1 else 2 * n + 3


def test_recursion(device: Device) -> None:
    out, parity = Array(np.zeros(64, np.uint32)), ints(64)
    device.launch("recursion", 1, 64, out, parity, stack=65536)
    assert list(out.host) == [ackermann(t % 3, t % 5) for t in range(64)]
    assert list(parity.host) == [(t + 1) % 2 for t in range(64)]


def test_virtual_functions(device: Device) -> None:
    out = ints(70)
    device.launch("virtuals", 1, 70, out)
    assert list(out.host) == [(t, 2 * t, t * t)[t % 3] for t in range(70)]


def test_divergence(device: Device) -> None:
    out = Array(np.full(500, -12345, np.int32))
    device.launch("divergence", 5, 100, out)
    for t in range(500):
        v = 0
        for i in range(t % 37):
            if (i ^ t) & 1:
                v += i
            elif i % 3 == 0:
                continue
            else:
                v ^= i
            if v > 500:
                break
        k = t % 7
        wanted = [v + 10, v * 3 - 1, v - 1, -12345, -v, v << 2, 7][k]
        assert out.host[t] == wanted, t


def test_warp_operations(device: Device) -> None:
    out = Array(np.zeros(288, np.uint32))
    device.launch("votes", 1, 32, out)
    t = np.arange(32)
    assert set(out.host[:32]) == {sum(1 << k for k in range(0, 32, 3))}
    assert set(out.host[32:64]) == {3}
    assert list(out.host[64:96]) == [sum(1 << j for j in range(32) if j // 5 == k // 5) for k in t]
    assert list(out.host[96:128]) == [(k ^ 7) ** 2 for k in t]
    assert list(out.host[128:160]) == [k - 3 if k % 8 >= 3 else k for k in t]
    assert list(out.host[160:192]) == [(k & 16) + ((k + 1) & 15) + 100 for k in t]
    assert set(out.host[192:224]) == {496}
    assert list(out.host[224:256]) == [sum(1 << j for j in range(17, 32, 2)) if k & 1 else 30 for k in t]
    assert (out.host[256:288] >= 1).all()


def test_cooperative_groups(device: Device) -> None:
    out = ints(101)
    device.launch("groups", 1, 128, out)
    assert list(out.host[:16]) == [sum(range(8 * k, 8 * k + 8)) for k in range(16)]
    assert out.host[100] == 43


def test_grid_group(device: Device) -> None:
    data, wrong = ints(64 * 100), ints(1)
    device.launch("grid_groups", 50, 128, data, wrong, np.int32(4), seed=2)
    assert (data.host == 10).all() and wrong.host[0] == 0


def test_tiles_of_several_warps(device: Device) -> None:
    out = ints(512)
    device.launch("big_tiles", 1, 256, out)
    assert list(out.host[:256]) == [sum(range(k // 64 * 64, k // 64 * 64 + 64)) for k in range(256)]
    assert list(out.host[256:]) == [k % 16 + 1 for k in range(256)]


def test_split_barrier_and_asynchronous_copy(device: Device) -> None:
    out = ints(64)
    device.launch("split_barrier", 1, 64, out, np.int32(10), seed=6)
    assert list(out.host) == [45 + 10 * ((t + 33) % 64) for t in range(64)]
    device.launch("async_copy", 1, 64, Array(np.arange(256, dtype=np.int32)), out)
    assert list(out.host) == [4 * (63 - t) + 1 for t in range(64)]


def test_local_memory(device: Device) -> None:
    out = ints(50)
    device.launch("local_array", 1, 50, out, np.int32(37))
    for t in range(50):
        a = [(i * 7 + t) % 37 for i in range(37)]
        at, s = t % 37, 0
        for _ in range(37):
            s = s * 3 + a[at]
            at = a[at]
        assert out.host[t] == np.array([s & 0xFFFFFFFF], np.uint32).view(np.int32)[0]


def test_printf(device: Device) -> None:
    printed()
    device.launch("prints", 1, 3, np.int32(-7))
    assert printed() == "-7  3.14|ab    |z ff -5000000000 9223372036854775808 %end\n"


@pytest.mark.parametrize("name", ["spin_lock", "spin_naive"])
def test_locks(device: Device, name: str) -> None:
    lock, count = ints(1), ints(1)
    device.launch(name, 3, 64, lock, count)
    assert count.host[0] == 192


def test_waiting_for_others(device: Device) -> None:
    turn = ints(1)
    device.launch("lane_chain", 1, 96, turn)
    assert turn.host[0] == 96
    turn = ints(1)
    device.launch("block_chain", 200, 64, turn)
    assert turn.host[0] == 200
    arrived, wrong = ints(1), ints(1)
    device.launch("grid_barrier", 100, 256, arrived, wrong, np.int32(5), seed=9)
    assert arrived.host[0] == 500 and wrong.host[0] == 0


def test_barriers(device: Device) -> None:
    out = ints(1)
    device.launch("early_exit", 1, 100, out)
    assert out.host[0] == 79
    values = ints(32)
    device.launch("named_barrier", 1, 64, values, seed=4)
    assert (values.host == 42).all()
    counts = ints(192)
    device.launch("counting", 1, 96, counts)
    assert (counts.host[:96] == 32).all()
    assert (counts.host[96:] == 1).all()


def test_atomics(device: Device) -> None:
    i = Array(np.array([0, 0, -1, 0, 0], np.int32))
    u = Array(np.array([0, 0, 100000], np.uint32))
    f, d = Array(np.zeros(1, np.float32)), Array(np.zeros(1))
    long, h = Array(np.zeros(2, np.uint64)), Array(np.zeros(2, np.float16))
    device.launch("atomics", 4, 128, i, u, f, d, long, h)
    assert list(i.host) == [-511, 511, ~255, 65535, 0]
    dec = 0
    for _ in range(512):
        dec = 5 if dec == 0 or dec > 5 else dec - 1
    assert list(u.host) == [512 % 10, dec, 100000 - 1536]
    assert f.host[0] == 256 and d.host[0] == 128
    assert list(long.host) == [512 << 33, 511 << 40]
    assert list(h.host) == [512, 1024]


def test_indices_in_three_dimensions(device: Device) -> None:
    out = Array(np.zeros(2 * 3 * 4 * 30, np.uint32))
    device.launch("indices", (2, 3, 4), (5, 3, 2), out, seed=11)
    wanted = [b * 10000 + t for b in range(24) for t in range(30)]
    assert list(out.host) == wanted


def test_device_heap(device: Device) -> None:
    pointers, out = Array(np.zeros(40, np.uint64)), ints(40)
    device.launch("heap", 1, 40, pointers)
    device.launch("heap_free", 1, 40, pointers, out)
    assert list(out.host) == list(range(40))


def test_generic_addresses(device: Device) -> None:
    given, out = Array(np.array([1, 2, 3, 4], np.int32)), ints(64)
    device.launch("generic_pointers", 1, 64, given, out)
    for t in range(64):
        k = t & 3
        assert out.host[t] == [2001 + k, 1100 + k, 4005 + k][t % 3]

// Kernels whose wave instructions hipsim_speed.py counts: integers, doubles, tiles in LDS, streams of memory.

#include <hip/hip_runtime.h>

extern "C" __global__ void integers(unsigned *out, unsigned turns) {
    unsigned item = threadIdx.x + blockIdx.x * blockDim.x, x = item + 1, sum = item;
    for (unsigned i = 0; i < turns; ++i) {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        sum += x * (i + 3);
    }
    out[item] = sum;
}

extern "C" __global__ void doubles(double *out, unsigned turns) {
    unsigned item = threadIdx.x + blockIdx.x * blockDim.x;
    double x = threadIdx.x * 1e-3, y = 1;
    for (unsigned i = 0; i < turns; ++i) {
        y = fma(y, x, 1.0);
        x = x * 0.999 + y * 1e-9;
    }
    out[item] = y;
}

extern "C" __global__ void bodies(const float4 *from, float4 *to, unsigned count) {
    __shared__ float4 tile[256];
    unsigned item = blockIdx.x * 256 + threadIdx.x;
    float4 own = from[item];
    float x = 0, y = 0, z = 0;
    for (unsigned first = 0; first < count; first += 256) {
        tile[threadIdx.x] = from[first + threadIdx.x];
        __syncthreads();
#pragma unroll 4
        for (int j = 0; j < 256; ++j) {
            float dx = tile[j].x - own.x, dy = tile[j].y - own.y, dz = tile[j].z - own.z;
            float r = rsqrtf(dx * dx + dy * dy + dz * dz + 1e-3f), s = r * r * r * tile[j].w;
            x += dx * s;
            y += dy * s;
            z += dz * s;
        }
        __syncthreads();
    }
    to[item] = make_float4(x, y, z, 0);
}

extern "C" __global__ void product(const float *a, const float *b, float *c, unsigned n) {
    __shared__ float x[16][16], y[16][16];
    unsigned row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
    float sum = 0;
    for (unsigned first = 0; first < n; first += 16) {
        x[threadIdx.y][threadIdx.x] = a[row * n + first + threadIdx.x];
        y[threadIdx.y][threadIdx.x] = b[(first + threadIdx.y) * n + column];
        __syncthreads();
        for (int i = 0; i < 16; ++i) sum += x[threadIdx.y][i] * y[i][threadIdx.x];
        __syncthreads();
    }
    c[row * n + column] = sum;
}

extern "C" __global__ void stream(const float *a, const float *b, float *c, unsigned n) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        c[i] = 2.5f * a[i] + b[i];
}

// matmul [size]      default: 64; rounded up to a multiple of 16
//
// Multiplies two square matrices, in tiles in shared memory and directly.
//
// Known answers for size N (threadhist --work loads): `direct` loads 2 N values per thread; `tiled` 2 N / 16 from global and
// 2 N from shared memory. --work barriers on `tiled`: 2 N / 16. All threads of a kernel do the same: imbalance 1.00.
#include <vector>

#include "check.h"

constexpr int kTile = 16;

__global__ void direct(const float *a, const float *b, float *c, int n) {
    int row = blockIdx.y * kTile + threadIdx.y, column = blockIdx.x * kTile + threadIdx.x;
    float sum = 0;
    for (int k = 0; k < n; k++) sum += a[row * n + k] * b[k * n + column];
    c[row * n + column] = sum;
}

__global__ void tiled(const float *a, const float *b, float *c, int n) {
    __shared__ float as[kTile][kTile], bs[kTile][kTile];
    int row = blockIdx.y * kTile + threadIdx.y, column = blockIdx.x * kTile + threadIdx.x;
    float sum = 0;
    for (int start = 0; start < n; start += kTile) {
        as[threadIdx.y][threadIdx.x] = a[row * n + start + threadIdx.x];
        bs[threadIdx.y][threadIdx.x] = b[(start + threadIdx.y) * n + column];
        __syncthreads();
        for (int k = 0; k < kTile; k++) sum += as[threadIdx.y][k] * bs[k][threadIdx.x];
        __syncthreads();
    }
    c[row * n + column] = sum;
}

int main(int argc, char **argv) {
    const int n = (argument(argc, argv, 1, 64) + kTile - 1) / kTile * kTile;
    std::vector<float> a(n * n), b(n * n), c(n * n), expected(n * n);
    // Small integers: every sum is exact, in any order.
    for (int i = 0; i < n * n; i++) a[i] = i % 7 - 3, b[i] = i % 5 - 2;
    for (int row = 0; row < n; row++)
        for (int k = 0; k < n; k++)
            for (int column = 0; column < n; column++)
                expected[row * n + column] += a[row * n + k] * b[k * n + column];
    const size_t bytes = n * n * sizeof(float);
    float *da, *db, *dc;
    CHECK(cudaMalloc(&da, bytes));
    CHECK(cudaMalloc(&db, bytes));
    CHECK(cudaMalloc(&dc, bytes));
    CHECK(cudaMemcpy(da, a.data(), bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(db, b.data(), bytes, cudaMemcpyHostToDevice));
    long wrong = 0;
    for (auto kernel : {direct, tiled}) {
        CHECK(cudaMemset(dc, 0, bytes));
        kernel<<<dim3(n / kTile, n / kTile), dim3(kTile, kTile)>>>(da, db, dc, n);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpy(c.data(), dc, bytes, cudaMemcpyDeviceToHost));
        for (int i = 0; i < n * n; i++) wrong += c[i] != expected[i];
    }
    return verdict("matmul", wrong);
}

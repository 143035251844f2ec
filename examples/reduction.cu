// reduction [elements]      default: 100000; 16 blocks of 256 threads
//
// Sums integers three ways: a tree in shared memory, warp shuffles, one atomic per warp.
//
// Known answers: elements 0 to n - 1 add up to n (n - 1) / 2. --work barriers on `tree`: 9 for every thread of 256
// (one after loading, one for each of the 8 halvings). --work atomics on `warps`: 1 for lane 0, 0 for the others.
#include <vector>

#include "check.h"

using Sum = unsigned long long;

__device__ Sum strided(const int *values, int n) {
    Sum sum = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += values[i];
    return sum;
}

__device__ Sum across_warp(Sum sum) {
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
    return sum;
}

__global__ void tree(const int *values, Sum *total, int n) {
    extern __shared__ Sum sums[];
    sums[threadIdx.x] = strided(values, n);
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) atomicAdd(total, sums[0]);
}

__global__ void shuffles(const int *values, Sum *total, int n) {
    __shared__ Sum sums[32];
    Sum sum = across_warp(strided(values, n));
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    sum = across_warp(threadIdx.x < blockDim.x / 32 ? sums[threadIdx.x] : 0);
    if (threadIdx.x == 0) atomicAdd(total, sum);
}

__global__ void warps(const int *values, Sum *total, int n) {
    Sum sum = across_warp(strided(values, n));
    if (threadIdx.x % 32 == 0) atomicAdd(total, sum);
}

int main(int argc, char **argv) {
    const int n = argument(argc, argv, 1, 100000), threads = 256, blocks = 16;
    std::vector<int> values(n);
    for (int i = 0; i < n; i++) values[i] = i;
    int *dvalues;
    Sum *dtotal, total;
    CHECK(cudaMalloc(&dvalues, n * sizeof(int)));
    CHECK(cudaMalloc(&dtotal, sizeof(Sum)));
    CHECK(cudaMemcpy(dvalues, values.data(), n * sizeof(int), cudaMemcpyHostToDevice));
    long wrong = 0;
    for (auto kernel : {tree, shuffles, warps}) {
        CHECK(cudaMemset(dtotal, 0, sizeof(Sum)));
        kernel<<<blocks, threads, threads * sizeof(Sum)>>>(dvalues, dtotal, n);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpy(&total, dtotal, sizeof(Sum), cudaMemcpyDeviceToHost));
        wrong += total != (Sum)n * (n - 1) / 2;
    }
    return verdict("reduction", wrong);
}

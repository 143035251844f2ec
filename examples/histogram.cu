// histogram [elements]      default: 10000; 8 blocks of 128 threads, 64 bins
//
// Counts values into bins with atomics: first in shared memory, then once per bin and block in global memory.
//
// Known answers (threadhist --work atomics): one for each element a thread takes (grid-stride over 1024 threads: 10000
// elements are 10 for threads 0 to 783, 9 for the others), and one more for the threads 0 to 63 of each block.
// --work barriers: 2 for every thread.
#include <vector>

#include "check.h"

constexpr int kBins = 64;

__global__ void histogram(const unsigned char *values, unsigned *bins, int n) {
    __shared__ unsigned mine[kBins];
    if (threadIdx.x < kBins) mine[threadIdx.x] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&mine[values[i] % kBins], 1u);
    __syncthreads();
    if (threadIdx.x < kBins) atomicAdd(&bins[threadIdx.x], mine[threadIdx.x]);
}

int main(int argc, char **argv) {
    const int n = argument(argc, argv, 1, 10000);
    std::vector<unsigned char> values(n);
    std::vector<unsigned> expected(kBins), bins(kBins);
    unsigned state = 12345;
    for (auto &value : values) {
        state = state * 1664525u + 1013904223u;
        value = state >> 24;
        expected[value % kBins]++;
    }
    unsigned char *dvalues;
    unsigned *dbins;
    CHECK(cudaMalloc(&dvalues, n));
    CHECK(cudaMalloc(&dbins, kBins * sizeof(unsigned)));
    CHECK(cudaMemcpy(dvalues, values.data(), n, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(dbins, 0, kBins * sizeof(unsigned)));
    histogram<<<8, 128>>>(dvalues, dbins, n);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(bins.data(), dbins, kBins * sizeof(unsigned), cudaMemcpyDeviceToHost));
    long wrong = 0;
    for (int i = 0; i < kBins; i++) wrong += bins[i] != expected[i];
    return verdict("histogram", wrong);
}

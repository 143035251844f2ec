// imbalance [threads per block [blocks]]      default: 64 4
//
// The same sums twice. triangular (guilty): thread t of T adds up elements 0 to t. balanced (innocent): the rows t and
// T - 1 - t are done by one thread half each, so every thread adds up (T + 1) / 2 elements.
//
// Known answers, loads per thread (threadhist --work loads), T = 256 threads in all:
//     triangular    t + 1 for thread t: imbalance 2 T / (T + 1) = 1.99; thread 255 does the most
//     balanced      T + 1 for every thread (two half rows, twice the work): imbalance 1.00
#include <vector>

#include "check.h"

__global__ void triangular(const int *values, long long *sums, int rows) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    long long sum = 0;
    for (int i = 0; i <= row && i < rows; i++) sum += values[i];
    sums[row] = sum;
}

__global__ void balanced(const int *values, long long *sums, int rows) {
    int row = blockIdx.x * blockDim.x + threadIdx.x, mirrored = rows - 1 - row;
    long long sum = 0, other = 0;
    for (int i = 0; i <= row; i++) sum += values[i];
    for (int i = 0; i <= mirrored; i++) other += values[i];
    // Rows that are done twice get the same sum twice.
    sums[row] = sum;
    sums[mirrored] = other;
}

int main(int argc, char **argv) {
    const int threads = argument(argc, argv, 1, 64), blocks = argument(argc, argv, 2, 4);
    const int rows = threads * blocks;
    std::vector<int> values(rows);
    std::vector<long long> sums(rows);
    for (int i = 0; i < rows; i++) values[i] = i + 1;
    int *dvalues;
    long long *dsums;
    CHECK(cudaMalloc(&dvalues, rows * sizeof(int)));
    CHECK(cudaMalloc(&dsums, rows * sizeof(long long)));
    CHECK(cudaMemcpy(dvalues, values.data(), rows * sizeof(int), cudaMemcpyHostToDevice));

    long wrong = 0;
    for (auto kernel : {triangular, balanced}) {
        CHECK(cudaMemset(dsums, 0, rows * sizeof(long long)));
        kernel<<<blocks, threads>>>(dvalues, dsums, rows);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpy(sums.data(), dsums, rows * sizeof(long long), cudaMemcpyDeviceToHost));
        for (long long i = 0; i < rows; i++) wrong += sums[i] != (i + 1) * (i + 2) / 2;
    }
    return verdict("imbalance", wrong);
}

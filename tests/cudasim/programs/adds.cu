// A kernel with loads, stores and a barrier, launched once: each of 64 threads adds 1.
#include "check.h"

__global__ void adds(int *values) {
    values[threadIdx.x] += 1;
    __syncthreads();
}

int main() {
    int *values;
    CHECK(cudaMalloc(&values, 64 * sizeof(int)));
    CHECK(cudaMemset(values, 0, 64 * sizeof(int)));
    adds<<<1, 64>>>(values);
    CHECK(cudaDeviceSynchronize());
}

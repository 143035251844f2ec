// A library that a program opens long after it began: a kernel with a __device__ and a __constant__ variable. plugin(n): its sum.
#include <cuda_runtime.h>

__device__ int sum;
__constant__ int weight = 1;

__global__ void weigh(int n) {
    if (threadIdx.x < n) atomicAdd(&sum, weight * (int)threadIdx.x);
}

extern "C" int plugin(int n) {
    int zero = 0, three = 3, found = -1;
    if (cudaMemcpyToSymbol(sum, &zero, sizeof zero) || cudaMemcpyToSymbol(weight, &three, sizeof three)) return -1;
    weigh<<<1, 32>>>(n);
    return cudaMemcpyFromSymbol(&found, sum, sizeof found) ? -1 : found;
}

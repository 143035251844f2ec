#include <hip/hip_runtime.h>
extern "C" __global__ void seen(int *out) { out[blockIdx.x * blockDim.x + threadIdx.x]++; }

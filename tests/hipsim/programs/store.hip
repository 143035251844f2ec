#include <hip/hip_runtime.h>
extern "C" __global__ void store(int *data, int value) { data[threadIdx.x] = value + threadIdx.x; }

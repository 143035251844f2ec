// A shared object with a kernel and a managed variable, for devices.cu.
#include "check.h"

__managed__ int result = 0;

__global__ void multiply(int value) { result = 3 * value; }

extern "C" int triple(int value) {
    multiply<<<1, 1>>>(value);
    CHECK(cudaDeviceSynchronize());
    return result;
}

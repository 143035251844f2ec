// first      how long launches of a kernel take that has not run before, and of one that has
//
// Prints "NAME US" for the context, the first launch of two kernels of a module, and a later launch of each: the host's time until the kernel is over.
#include <chrono>

#include "../../../examples/check.h"

template <int FACTOR>
__global__ void scale(float *values, int n) {
    __shared__ float part[256];
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        part[threadIdx.x] = values[i] * FACTOR;
        __syncthreads();
        values[i] = part[threadIdx.x ^ 1] + sinf(values[i]) / FACTOR;
        __syncthreads();
    }
}

// For a tool that is asked for this kernel alone.
__global__ void never(float *values) { values[0] = 1; }

template <class Action>
void timed(const char *name, Action action) {
    auto before = std::chrono::steady_clock::now();
    action();
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - before;
    std::printf("%s %.1f\n", name, took.count());
}

int main(int argc, char **) {
    float *values;
    timed("context", [&] { CHECK(cudaFree(nullptr)); });
    CHECK(cudaMalloc(&values, 1024 * sizeof(float)));
    CHECK(cudaMemset(values, 0, 1024 * sizeof(float)));
    timed("first", [&] { scale<3><<<4, 256>>>(values, 1024); });
    timed("first-of-another", [&] { scale<5><<<4, 256>>>(values, 1024); });
    timed("later", [&] { scale<3><<<4, 256>>>(values, 1024); });
    timed("later-of-another", [&] { scale<5><<<4, 256>>>(values, 1024); });
    if (argc > 9) never<<<1, 1>>>(values);
    return 0;
}

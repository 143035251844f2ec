// printing      prints from the GPU, and allocates there, with limits that it sets after its first kernel has run
//
// A driver takes the size of the heap and of printf's buffer only until a kernel that uses them is there. A copy of such a kernel, loaded before
// the program sets the limits, must not change what these calls return. Everything is printed in an order that is always the same.
#include "../../../examples/check.h"

__global__ void first(int *out) { out[threadIdx.x] = threadIdx.x; }

__global__ void prints(const int *in) {
    for (int turn = 0; turn < 3; turn++) printf("turn %d: %d of %s\n", turn, in[turn], "three");
}

__global__ void allocates(long long *out) {
    auto *own = static_cast<long long *>(malloc(64 << 20));  // more than the heap has by itself, 8 MiB
    if (own) own[0] = 4711;
    *out = own ? own[0] : -1;
    free(own);
}

void say(const char *what, cudaLimit limit, size_t wanted) {
    cudaError_t code = cudaDeviceSetLimit(limit, wanted);
    size_t has = 0;
    CHECK(cudaDeviceGetLimit(&has, limit));
    std::printf("%s: %s, %s\n", what, cudaGetErrorName(code), has >= wanted ? "set" : "not set");
    cudaGetLastError();
}

int main() {
    int *numbers;
    long long *result, got;
    CHECK(cudaMalloc(&numbers, 32 * sizeof(int)));
    CHECK(cudaMalloc(&result, sizeof got));
    first<<<1, 32>>>(numbers);
    CHECK(cudaDeviceSynchronize());
    say("heap", cudaLimitMallocHeapSize, 128 << 20);
    say("printf buffer", cudaLimitPrintfFifoSize, 16 << 20);
    prints<<<1, 1>>>(numbers);
    CHECK(cudaDeviceSynchronize());
    allocates<<<1, 1>>>(result);
    CHECK(cudaMemcpy(&got, result, sizeof got, cudaMemcpyDeviceToHost));
    std::printf("allocated: %lld\n", got);
    say("heap, later", cudaLimitMallocHeapSize, 256 << 20);
    return 0;
}

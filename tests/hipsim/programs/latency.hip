// latency: kernels that wait for kernels, events and copies. Prints how many ns each run of `work` took by its own clock.
// `work` runs until the host has launched what waits for it, and longer than these launches take on the virtual clock. Then: how many
// ns of the host its first launch call took.
#include "check.h"

#include <chrono>

__global__ void work(uint64_t *took, volatile int *go, int turn) {
    uint64_t begin = clock64();
    for (int i = 0; i < 5000; i++) asm volatile("s_nop 0");
    while (*go < turn) {
    }
    *took = clock64() - begin;
}
__global__ void small(int *data) { data[threadIdx.x]++; }
__global__ void behind_event(int *data) { data[threadIdx.x]++; }
__global__ void behind_copy(int *data) { data[threadIdx.x]++; }

int main() {
    const size_t bytes = 1 << 20;
    char *host;
    OK(hipHostMalloc(reinterpret_cast<void **>(&host), bytes));
    memset(host, 1, bytes);
    volatile int *go;
    OK(hipHostMalloc((void **)&go, sizeof(int)));
    *go = 0;
    Buffer<int> data(bytes / sizeof(int));
    Buffer<uint64_t> took(4);
    hipStream_t one, two;
    hipEvent_t event;
    OK(hipStreamCreateWithFlags(&one, hipStreamNonBlocking));
    OK(hipStreamCreateWithFlags(&two, hipStreamNonBlocking));
    OK(hipEventCreateWithFlags(&event, hipEventDisableTiming));
    auto before = std::chrono::steady_clock::now();
    small<<<1, 64, 0, one>>>(data);
    auto call = std::chrono::steady_clock::now() - before;
    small<<<1, 64, 0, two>>>(data);
    OK(hipDeviceSynchronize());
    for (int i = 0; i < 4; i++) {
        work<<<1, 32, 0, one>>>(took + i, go, i + 1);
        small<<<1, 64, 0, one>>>(data);
        OK(hipEventRecord(event, one));
        OK(hipStreamWaitEvent(two, event, 0));
        behind_event<<<1, 64, 0, two>>>(data + 64);
        *go = i + 1;
        OK(hipStreamSynchronize(two));
        OK(hipMemcpyAsync(data, host, bytes, hipMemcpyHostToDevice, two));
        behind_copy<<<1, 64, 0, two>>>(data + 64);
        OK(hipDeviceSynchronize());
    }
    for (uint64_t ns : took.read()) printf("%llu\n", static_cast<unsigned long long>(ns));
    printf("%lld\n", static_cast<long long>(std::chrono::nanoseconds(call).count()));
}

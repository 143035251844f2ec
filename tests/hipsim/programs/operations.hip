// operations: memsets, copies in all directions, and what kernels wait for. The host waits after the first two kernels.
#include "check.h"

__global__ void work(int *data, int turns) {
    for (int i = 0; i < turns; i++) {
        asm volatile("s_nop 0");
        data[threadIdx.x] += i;
    }
}

int main() {
    const size_t bytes = 1 << 20;
    Buffer<int> one(bytes / sizeof(int)), two(bytes / sizeof(int));
    std::vector<int> host(bytes / sizeof(int));
    int *pinned;
    OK(hipHostMalloc(reinterpret_cast<void **>(&pinned), bytes));
    OK(hipMemset(one, 0, bytes));
    OK(hipMemcpy(one, host.data(), bytes, hipMemcpyHostToDevice));
    work<<<1, 64>>>(one, 10);
    OK(hipMemcpy(host.data(), one, bytes, hipMemcpyDeviceToHost));
    OK(hipMemcpy(host.data(), one, sizeof(int), hipMemcpyDeviceToHost));  // by HIP itself, on the CPU
    hipStream_t stream, other;
    hipEvent_t event;
    OK(hipStreamCreate(&stream));
    OK(hipStreamCreate(&other));
    OK(hipEventCreate(&event));
    work<<<1, 64, 0, stream>>>(two, 1000);  // so that the memset ends after the launch behind it
    OK(hipMemsetAsync(two, 1, 4096, stream));
    work<<<1, 64, 0, stream>>>(two, 10);
    OK(hipMemcpyAsync(pinned, one, bytes, hipMemcpyDeviceToHost, stream));
    work<<<1, 64, 0, stream>>>(two, 10);
    OK(hipMemcpyAsync(two, one, bytes, hipMemcpyDeviceToDevice, stream));
    work<<<1, 64, 0, stream>>>(two, 20);
    OK(hipEventRecord(event, stream));
    OK(hipStreamWaitEvent(other, event, 0));
    work<<<1, 64, 0, other>>>(two, 30);
    OK(hipDeviceSynchronize());
}

// Managed memory, host memory that the device uses, pointers' attributes, errors.
#include "check.h"

__global__ void increment(int *data, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] += 1;
}
__managed__ int counter = 41;
__global__ void count() { counter++; }

int main() {
    const int n = 1000;
    int *managed, *host, *device_view, *own = static_cast<int *>(aligned_alloc(4096, 8192));
    OK(hipMallocManaged(reinterpret_cast<void **>(&managed), n * sizeof(int)));
    OK(hipHostMalloc(reinterpret_cast<void **>(&host), n * sizeof(int), hipHostMallocMapped));
    for (int i = 0; i < n; i++) managed[i] = i, host[i] = 2 * i, own[i] = 3 * i;
    OK(hipHostGetDevicePointer(reinterpret_cast<void **>(&device_view), host, 0));
    increment<<<4, 256>>>(managed, n);
    increment<<<4, 256>>>(device_view, n);
    OK(hipHostRegister(own, 8192, hipHostRegisterMapped));
    int *own_view;
    OK(hipHostGetDevicePointer(reinterpret_cast<void **>(&own_view), own, 0));
    increment<<<4, 256>>>(own_view, n);
    count<<<1, 1>>>();
    OK(hipDeviceSynchronize());
    for (int i = 0; i < n; i++) CHECK(managed[i] == i + 1 && host[i] == 2 * i + 1 && own[i] == 3 * i + 1);
    CHECK(counter == 42);
    OK(hipHostUnregister(own));

    Buffer<int> memory(n);
    hipPointerAttribute_t attributes;
    OK(hipPointerGetAttributes(&attributes, memory.data + 5));
    CHECK(attributes.memoryType == hipMemoryTypeDevice && attributes.device == 0);
    OK(hipPointerGetAttributes(&attributes, host));
    CHECK(attributes.memoryType == hipMemoryTypeHost);

    size_t free_bytes, total;
    OK(hipMemGetInfo(&free_bytes, &total));
    CHECK(total == size_t{1} << 30);  // HIPSIM_MEMORY=1G
    void *huge = nullptr;
    CHECK(hipMalloc(&huge, size_t{2} << 30) == hipErrorOutOfMemory);
    CHECK(huge == nullptr);
    std::vector<void *> blocks;
    for (void *block; hipMalloc(&block, 64 << 20) == hipSuccess;) blocks.push_back(block);
    CHECK(blocks.size() >= 10 && blocks.size() <= 16);
    for (void *block : blocks) OK(hipFree(block));
    void *again;
    OK(hipMalloc(&again, 512 << 20));
    OK(hipFree(again));
    CHECK(hipFree(again) == hipErrorInvalidValue);  // twice
    CHECK(hipFree(&again) == hipErrorInvalidValue);
    CHECK(hipHostFree(own) != hipSuccess);
    OK(hipFree(managed));
    OK(hipHostFree(host));
    (void)hipGetLastError();

    // Launches that no device can do.
    increment<<<1, 1025>>>(memory, n);
    CHECK(hipGetLastError() != hipSuccess);
    increment<<<0, 64>>>(memory, n);
    CHECK(hipGetLastError() != hipSuccess);
    increment<<<1, 64, 65537>>>(memory, n);
    CHECK(hipGetLastError() != hipSuccess);
    CHECK(hipSetDevice(7) == hipErrorInvalidDevice);

    hipDeviceProp_t properties;
    OK(hipGetDeviceProperties(&properties, 0));
    std::string gpu = properties.gcnArchName;
    gpu = gpu.substr(0, gpu.find(':'));
    CHECK(properties.name == "hipsim: " + gpu + " in software, no GPU");
    // HIP counts GFX10's compute units in pairs that work on one workgroup.
    const bool pairs = gpu.substr(0, 5) == "gfx10";
    CHECK(properties.warpSize == (pairs ? 32 : 64) && properties.multiProcessorCount == (pairs ? 4 : 8) &&
          properties.maxThreadsPerBlock == 1024);
    printf("%s\n", properties.gcnArchName);
}

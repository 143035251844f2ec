// Memory of every kind, symbols, attributes, errors that do not break the context.
#include "check.h"

#include <cstdint>
#include <cstring>
#include <vector>

__constant__ float factors[4] = {1, 2, 3, 4};
__device__ int counter = 5;
__device__ int table[3] = {7, 8, 9};
__device__ int *pointer_to_table = table;
__managed__ int shared_value = 11;

struct Pair {
    int a;
    double b;
};

__global__ void scale(float *data, int n, int which) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] *= factors[which];
}

__global__ void count(Pair pair) {
    atomicAdd(&counter, pair.a + static_cast<int>(pair.b));
    shared_value += 1;
    table[0] = pointer_to_table[1];
}

__global__ void where(int *out) {  // a bit for each pointer and space
    __shared__ int own;
    int mine = threadIdx.x;
    const void *pointers[] = {factors, &counter, &own, &mine};
    for (const void *at : pointers)
        *out = *out << 4 | (__isConstant(at) != 0) << 3 | (__isGlobal(at) != 0) << 2 | (__isShared(at) != 0) << 1 | (__isLocal(at) != 0);
}

__global__ void dynamic_shared(int *out) {
    extern __shared__ int buffer[];
    buffer[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = buffer[blockDim.x - 1 - threadIdx.x];
}

__global__ void __launch_bounds__(128) bounded(int *out) { out[threadIdx.x] = 1; }

__global__ void sum_rows(const char *base, size_t pitch, int width, int height, int *out) {
    int y = threadIdx.x, total = 0;
    if (y >= height) return;
    const int *row = reinterpret_cast<const int *>(base + y * pitch);
    for (int x = 0; x < width; x++) total += row[x];
    out[y] = total;
}

template <class T>
__global__ void add_one(T *data) {
    data[threadIdx.x] += T(1);
}

// Advice for managed memory has no effect on results, but the program can ask for it. It holds for whole pages.
static void advice() {
    constexpr size_t page = 4096;
    char *memory;
    CHECK(cudaMallocManaged(&memory, 3 * page));
    char *first = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page);
    const cudaMemLocation device = {cudaMemLocationTypeDevice, {0}}, host = {cudaMemLocationTypeHost, {0}};
    auto get = [](const void *from, size_t bytes, cudaMemRangeAttribute which) {
        int value;
        CHECK(cudaMemRangeGetAttribute(&value, sizeof value, which, from, bytes));
        return value;
    };
    auto all = [&](cudaMemRangeAttribute which) { return get(memory, 3 * page, which); };
    REQUIRE(all(cudaMemRangeAttributeReadMostly) == 0);
    REQUIRE(all(cudaMemRangeAttributePreferredLocation) == cudaInvalidDeviceId);
    REQUIRE(all(cudaMemRangeAttributeLastPrefetchLocation) == cudaInvalidDeviceId);
    CHECK(cudaMemAdvise(first, 1, cudaMemAdviseSetPreferredLocation, device));
    REQUIRE(get(first, page, cudaMemRangeAttributePreferredLocation) == 0);
    REQUIRE(get(first + page - 1, 1, cudaMemRangeAttributePreferredLocation) == 0);
    REQUIRE(get(first, page + 1, cudaMemRangeAttributePreferredLocation) == cudaInvalidDeviceId);
    CHECK(cudaMemAdvise(memory, 3 * page, cudaMemAdviseSetReadMostly, {}));
    CHECK(cudaMemAdvise(memory, 3 * page, cudaMemAdviseSetAccessedBy, device));
    CHECK(cudaMemAdvise(memory, 3 * page, cudaMemAdviseSetPreferredLocation, host));
    CHECK(cudaMemAdvise(memory, 3 * page, cudaMemAdviseSetAccessedBy, host));
    CHECK(cudaMemAdvise(first, page, cudaMemAdviseUnsetAccessedBy, host));
    CHECK(cudaMemPrefetchAsync(memory, 3 * page, device, 0, nullptr));
    int read_mostly, preferred, prefetched, accessed[2];
    void *values[] = {&read_mostly, &preferred, &prefetched, accessed};
    size_t sizes[] = {4, 4, 4, sizeof accessed};
    cudaMemRangeAttribute which[] = {cudaMemRangeAttributeReadMostly, cudaMemRangeAttributePreferredLocation,
                                     cudaMemRangeAttributeLastPrefetchLocation, cudaMemRangeAttributeAccessedBy};
    CHECK(cudaMemRangeGetAttributes(values, sizes, which, 4, memory, 3 * page));
    REQUIRE(read_mostly == 1 && preferred == cudaCpuDeviceId && prefetched == 0);
    REQUIRE(accessed[0] == 0 && accessed[1] == cudaInvalidDeviceId);  // the host has no advice for one page
    CHECK(cudaMemAdvise(first, page, cudaMemAdviseUnsetReadMostly, {}));
    REQUIRE(all(cudaMemRangeAttributeReadMostly) == 0);
    FAILS(cudaMemRangeGetAttribute(accessed, 8, cudaMemRangeAttributeReadMostly, memory, 1), cudaErrorInvalidValue);
    FAILS(cudaMemAdvise(memory, 3 * page + 1, cudaMemAdviseSetReadMostly, {}), cudaErrorInvalidValue);
    FAILS(cudaMemAdvise(memory, 1, static_cast<cudaMemoryAdvise>(99), {}), cudaErrorInvalidValue);
    CHECK(cudaFree(memory));
}

int main() {
    int devices = 0, version = 0;
    CHECK(cudaGetDeviceCount(&devices));
    REQUIRE(devices == 1);
    CHECK(cudaRuntimeGetVersion(&version));
    REQUIRE(version == 13000);
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    REQUIRE(properties.warpSize == 32 && properties.maxThreadsPerBlock == 1024);
    REQUIRE(strstr(properties.name, "cudasim") != nullptr);
    FAILS(cudaSetDevice(7), cudaErrorInvalidDevice);

    // linear memory, all directions
    const int n = 1000;
    std::vector<float> host(n), back(n);
    for (int i = 0; i < n; i++) host[i] = i;
    float *device = nullptr, *other = nullptr;
    CHECK(cudaMalloc(&device, n * sizeof(float)));
    CHECK(cudaMalloc(&other, n * sizeof(float)));
    REQUIRE(reinterpret_cast<size_t>(device) % 256 == 0);
    CHECK(cudaMemcpy(device, host.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    scale<<<(n + 255) / 256, 256>>>(device, n, 2);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(other, device, n * sizeof(float), cudaMemcpyDeviceToDevice));
    CHECK(cudaMemcpy(back.data(), other, n * sizeof(float), cudaMemcpyDefault));
    for (int i = 0; i < n; i++) REQUIRE(back[i] == 3.0f * i);

    // symbols
    float changed[4] = {10, 20, 30, 40};
    CHECK(cudaMemcpyToSymbol(factors, changed, sizeof changed));
    CHECK(cudaMemcpy(device, host.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    scale<<<4, 256>>>(device, n, 3);
    CHECK(cudaMemcpy(back.data(), device, n * sizeof(float), cudaMemcpyDeviceToHost));
    REQUIRE(back[7] == 280.0f);
    count<<<1, 1>>>(Pair{2, 3.0});
    CHECK(cudaDeviceSynchronize());
    int value = 0;
    CHECK(cudaMemcpyFromSymbol(&value, counter, sizeof value));
    REQUIRE(value == 10);
    REQUIRE(shared_value == 12);
    CHECK(cudaMemcpyFromSymbol(&value, table, sizeof value));
    REQUIRE(value == 8);
    void *address = nullptr;
    size_t size = 0;
    CHECK(cudaGetSymbolAddress(&address, table));
    CHECK(cudaGetSymbolSize(&size, table));
    REQUIRE(address != nullptr && size == 12);
    CHECK(cudaMemset(device, 0, sizeof value));
    where<<<1, 1>>>(reinterpret_cast<int *>(device));
    CHECK(cudaMemcpy(&value, device, sizeof value, cudaMemcpyDeviceToHost));
    REQUIRE(value == 0x8421);
    FAILS(cudaMemcpyFromSymbol(&value, table, 4, 12), cudaErrorInvalidValue);

    // pitched memory
    size_t pitch = 0;
    char *rows = nullptr;
    int *sums = nullptr;
    CHECK(cudaMallocPitch(&rows, &pitch, 10 * sizeof(int), 5));
    CHECK(cudaMalloc(&sums, 5 * sizeof(int)));
    int picture[5][10];
    for (int y = 0; y < 5; y++)
        for (int x = 0; x < 10; x++) picture[y][x] = y * x;
    CHECK(cudaMemcpy2D(rows, pitch, picture, 10 * sizeof(int), 10 * sizeof(int), 5, cudaMemcpyHostToDevice));
    sum_rows<<<1, 32>>>(rows, pitch, 10, 5, sums);
    int totals[5];
    CHECK(cudaMemcpy(totals, sums, sizeof totals, cudaMemcpyDeviceToHost));
    for (int y = 0; y < 5; y++) REQUIRE(totals[y] == 45 * y);
    CHECK(cudaMemset2D(rows, pitch, 1, 10 * sizeof(int), 5));
    CHECK(cudaMemcpy2D(picture, 10 * sizeof(int), rows, pitch, 10 * sizeof(int), 5, cudaMemcpyDeviceToHost));
    REQUIRE(picture[4][9] == 0x01010101);

    // three dimensions
    cudaPitchedPtr cube;
    cudaExtent extent = make_cudaExtent(8, 3, 2);
    CHECK(cudaMalloc3D(&cube, extent));
    CHECK(cudaMemset3D(cube, 3, extent));
    char corner[2][3][8] = {};
    cudaMemcpy3DParms copy = {};
    copy.srcPtr = cube;
    copy.dstPtr = make_cudaPitchedPtr(corner, 8, 8, 3);
    copy.extent = extent;
    copy.kind = cudaMemcpyDeviceToHost;
    CHECK(cudaMemcpy3D(&copy));
    REQUIRE(corner[1][2][7] == 3);

    // pinned, registered, managed
    int *pinned = nullptr, *view = nullptr, *managed = nullptr;
    CHECK(cudaHostAlloc(&pinned, 64 * sizeof(int), cudaHostAllocMapped));
    for (int i = 0; i < 64; i++) pinned[i] = i;
    CHECK(cudaHostGetDevicePointer(&view, pinned, 0));
    add_one<<<1, 64>>>(view);
    CHECK(cudaDeviceSynchronize());
    REQUIRE(pinned[63] == 64);
    std::vector<double> plain(64, 1.5);
    CHECK(cudaHostRegister(plain.data(), plain.size() * sizeof(double), cudaHostRegisterMapped));
    double *registered = nullptr;
    CHECK(cudaHostGetDevicePointer(&registered, plain.data(), 0));
    add_one<<<1, 64>>>(registered);
    CHECK(cudaDeviceSynchronize());
    REQUIRE(plain[10] == 2.5);
    CHECK(cudaHostUnregister(plain.data()));
    FAILS(cudaHostUnregister(plain.data()), cudaErrorHostMemoryNotRegistered);
    CHECK(cudaMallocManaged(&managed, 64 * sizeof(int)));
    for (int i = 0; i < 64; i++) managed[i] = 2 * i;
    add_one<<<1, 64>>>(managed);
    CHECK(cudaDeviceSynchronize());
    REQUIRE(managed[9] == 19);
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, managed));
    REQUIRE(attributes.type == cudaMemoryTypeManaged);
    advice();
    CHECK(cudaPointerGetAttributes(&attributes, pinned));
    REQUIRE(attributes.type == cudaMemoryTypeHost);
    CHECK(cudaPointerGetAttributes(&attributes, device + 3));
    REQUIRE(attributes.type == cudaMemoryTypeDevice && attributes.devicePointer == device + 3);
    CHECK(cudaPointerGetAttributes(&attributes, plain.data()));
    REQUIRE(attributes.type == cudaMemoryTypeUnregistered);

    // what fails leaves the context usable
    FAILS(cudaMemcpy(host.data(), device + n + 5000, 4, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    FAILS(cudaMemcpy(device, nullptr, 4, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    FAILS(cudaMemcpy(device, host.data(), (n + 1) * sizeof(float), cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    FAILS(cudaFree(plain.data()), cudaErrorInvalidValue);
    FAILS(cudaMalloc(&address, size_t{1} << 50), cudaErrorMemoryAllocation);
    bounded<<<1, 2048>>>(sums);
    FAILS(cudaGetLastError(), cudaErrorInvalidConfiguration);
    bounded<<<0, 32>>>(sums);
    FAILS(cudaGetLastError(), cudaErrorInvalidConfiguration);
    bounded<<<1, 256>>>(sums);
    REQUIRE(cudaPeekAtLastError() != cudaSuccess);
    REQUIRE(cudaGetLastError() != cudaSuccess);
    REQUIRE(cudaGetLastError() == cudaSuccess);

    // dynamic shared memory, with and without opting in
    int *reversed = nullptr;
    CHECK(cudaMalloc(&reversed, 1024 * sizeof(int)));
    dynamic_shared<<<1, 1024, 1024 * sizeof(int)>>>(reversed);
    CHECK(cudaMemcpy(&value, reversed + 5, sizeof value, cudaMemcpyDeviceToHost));
    REQUIRE(value == 1018);
    dynamic_shared<<<1, 32, 64 << 10>>>(reversed);
    FAILS(cudaGetLastError(), cudaErrorInvalidValue);
    CHECK(cudaFuncSetAttribute(dynamic_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10));
    dynamic_shared<<<1, 32, 64 << 10>>>(reversed);
    CHECK(cudaGetLastError());
    FAILS(cudaFuncSetAttribute(dynamic_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 512 << 10),
          cudaErrorInvalidValue);

    // what is known of kernels
    cudaFuncAttributes function;
    CHECK(cudaFuncGetAttributes(&function, bounded));
    REQUIRE(function.maxThreadsPerBlock == 128 && function.numRegs > 0);
    const char *name = nullptr;
    CHECK(cudaFuncGetName(&name, reinterpret_cast<const void *>(&bounded)));
    REQUIRE(strcmp(name, "_Z7boundedPi") == 0);
    size_t offset = 0, parameter = 0;
    CHECK(cudaFuncGetParamInfo(reinterpret_cast<const void *>(&scale), 2, &offset, &parameter));
    REQUIRE(offset == 12 && parameter == 4);
    int blocks = 0, least = 0, best = 0;
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, bounded, 128, 0));
    REQUIRE(blocks == 16);
    CHECK(cudaOccupancyMaxPotentialBlockSize(&least, &best, scale, 0, 0));
    REQUIRE(best >= 32 && best % 32 == 0 && least > 0);

    // errors by name
    REQUIRE(strcmp(cudaGetErrorName(cudaErrorIllegalAddress), "cudaErrorIllegalAddress") == 0);
    REQUIRE(strcmp(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory") == 0);

    // peers, pools, limits
    size_t limit = 0, free_bytes = 0, total_bytes = 0;
    CHECK(cudaDeviceSetLimit(cudaLimitStackSize, 4096));
    CHECK(cudaDeviceGetLimit(&limit, cudaLimitStackSize));
    REQUIRE(limit == 4096);
    CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    REQUIRE(free_bytes < total_bytes);

    // persisting L2: a stream's window is kept, and changes no result
    const size_t persisting = static_cast<size_t>(properties.persistingL2CacheMaxSize);
    REQUIRE(persisting > 0 && persisting <= static_cast<size_t>(properties.l2CacheSize));
    FAILS(cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, persisting + 1), cudaErrorInvalidValue);
    CHECK(cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, persisting));
    CHECK(cudaDeviceGetLimit(&limit, cudaLimitPersistingL2CacheSize));
    REQUIRE(limit == persisting);
    cudaStreamAttrValue window = {}, kept = {};
    window.accessPolicyWindow.base_ptr = device;
    window.accessPolicyWindow.num_bytes = 1024;
    window.accessPolicyWindow.hitRatio = 1.0f;
    window.accessPolicyWindow.hitProp = cudaAccessPropertyPersisting;
    CHECK(cudaStreamSetAttribute(0, cudaStreamAttributeAccessPolicyWindow, &window));
    CHECK(cudaStreamGetAttribute(0, cudaStreamAttributeAccessPolicyWindow, &kept));
    REQUIRE(kept.accessPolicyWindow.base_ptr == device && kept.accessPolicyWindow.num_bytes == 1024);
    CHECK(cudaCtxResetPersistingL2Cache());

    CHECK(cudaFree(device));
    FAILS(cudaFree(device), cudaErrorInvalidValue);
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaDeviceReset());

    // after a reset variables have their first values again
    CHECK(cudaMemcpyFromSymbol(&value, counter, sizeof value));
    REQUIRE(value == 5);
    count<<<1, 1>>>(Pair{1, 1.0});
    CHECK(cudaMemcpyFromSymbol(&value, counter, sizeof value));
    REQUIRE(value == 7);
    puts("basics ok");
    return 0;
}

// Two devices, peers, pools, code in a shared object that comes and goes. Usage: devices PLUGIN
#include "check.h"

#include <dlfcn.h>

#include <thread>
#include <vector>

__device__ int own = 1;

__global__ void add(int *where, int value) { *where += value; }
__global__ void add_own(int *where) { *where += own; }

int main(int, char **arguments) {
    int count = 0;
    CHECK(cudaGetDeviceCount(&count));
    REQUIRE(count == 2);
    int *cells[2], values[2] = {}, which = -1;
    for (int device = 0; device < 2; device++) {
        CHECK(cudaSetDevice(device));
        CHECK(cudaMalloc(&cells[device], sizeof(int)));
        CHECK(cudaMemset(cells[device], 0, sizeof(int)));
        int start = 10 * (device + 1);
        CHECK(cudaMemcpyToSymbol(own, &start, sizeof start));  // a variable of its own on each device
    }
    std::vector<std::thread> threads;
    for (int device = 0; device < 2; device++)
        threads.emplace_back([&, device] {
            CHECK(cudaSetDevice(device));
            for (int i = 0; i < 20; i++) add_own<<<1, 1>>>(cells[device]);
            CHECK(cudaMemcpy(&values[device], cells[device], sizeof(int), cudaMemcpyDeviceToHost));
        });
    for (std::thread &thread : threads) thread.join();
    REQUIRE(values[0] == 200 && values[1] == 400);
    CHECK(cudaGetDevice(&which));
    REQUIRE(which == 1);
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, cells[0]));
    REQUIRE(attributes.device == 0);
    int can = 0;
    CHECK(cudaDeviceCanAccessPeer(&can, 1, 0));
    if (can) CHECK(cudaDeviceEnablePeerAccess(0, 0));
    CHECK(cudaMemcpyPeer(cells[1], 1, cells[0], 0, sizeof(int)));
    CHECK(cudaMemcpy(&values[1], cells[1], sizeof(int), cudaMemcpyDefault));
    REQUIRE(values[1] == 200);

    // a stream belongs to its device
    cudaStream_t stream;
    CHECK(cudaSetDevice(0));
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMemsetAsync(cells[0], 0, sizeof(int), stream));
    CHECK(cudaSetDevice(1));
    CHECK(cudaStreamSynchronize(stream));
    add<<<1, 1, 0, stream>>>(cells[0], 1);
    FAILS(cudaGetLastError(), cudaErrorInvalidResourceHandle);

    // an event that the other device's stream waits for
    CHECK(cudaSetDevice(0));
    cudaEvent_t event;
    cudaStream_t other;
    CHECK(cudaEventCreate(&event));
    add<<<1, 1, 0, stream>>>(cells[0], 5);
    CHECK(cudaEventRecord(event, stream));
    CHECK(cudaSetDevice(1));
    CHECK(cudaStreamCreate(&other));
    CHECK(cudaStreamWaitEvent(other, event, 0));
    CHECK(cudaMemcpyAsync(cells[1], cells[0], sizeof(int), cudaMemcpyDefault, other));
    CHECK(cudaStreamSynchronize(other));
    CHECK(cudaMemcpy(&values[1], cells[1], sizeof(int), cudaMemcpyDeviceToHost));
    REQUIRE(values[1] == 5);

    // pools
    cudaMemPool_t pool;
    CHECK(cudaDeviceGetDefaultMemPool(&pool, 1));
    unsigned long long keep = ~0ull, used = 0;
    CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
    void *block = nullptr;
    CHECK(cudaMallocFromPoolAsync(&block, 1000, pool, other));
    CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used));
    REQUIRE(used == 1000);
    CHECK(cudaFreeAsync(block, other));
    CHECK(cudaStreamSynchronize(other));
    CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used));
    REQUIRE(used == 0);

    // code that arrives after the context was made, leaves, and arrives again
    for (int round = 0; round < 3; round++) {
        void *plugin = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
        REQUIRE(plugin != nullptr);
        auto triple = reinterpret_cast<int (*)(int)>(dlsym(plugin, "triple"));
        REQUIRE(triple(round + 1) == 3 * (round + 1));
        REQUIRE(dlclose(plugin) == 0);
    }

    // one device is reset, the other goes on
    CHECK(cudaSetDevice(0));
    CHECK(cudaDeviceReset());
    CHECK(cudaSetDevice(1));
    add<<<1, 1>>>(cells[1], 1);
    CHECK(cudaMemcpy(&values[1], cells[1], sizeof(int), cudaMemcpyDeviceToHost));
    REQUIRE(values[1] == 6);
    puts("devices ok");
    return 0;
}

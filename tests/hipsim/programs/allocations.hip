// allocations [late]: memory of every kind, of which kernels touch known parts. Each line of output names a kind and its address. With
// "late", it waits for a line of standard input after the first three.
#include "check.h"

__device__ int table[250];

__global__ void fill(int *to, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = i;
}

__global__ void add(const int *from, int n, int *to) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] += from[i] + table[i];
}

static void say(const char *what, const void *at) {
    printf("%s %p\n", what, at);
    fflush(stdout);
}

static int *sum;  // of 100 ints

static void filled(int *to, int n) {
    fill<<<(n + 63) / 64, 64>>>(to, n);
    OK(hipDeviceSynchronize());
}

static void read(const int *from, int n) {
    add<<<(n + 63) / 64, 64>>>(from, n, sum);
    OK(hipDeviceSynchronize());
}

int main(int count, char **) {
    int *first, *pitched, *managed, *host, *mapped, *pooled, *again, *unused;
    OK(hipMalloc(reinterpret_cast<void **>(&first), 4000));  // the first call of HIP
    say("first", first);
    OK(hipMalloc(reinterpret_cast<void **>(&sum), 400));
    say("sum", sum);
    OK(hipHostMalloc(reinterpret_cast<void **>(&host), 400, hipHostMallocDefault));
    say("host", host);
    if (count > 1) {
        filled(host, 64);  // not measured
        say("waits", nullptr);
        getchar();
    }
    filled(first, 250);
    filled(host, 100);
    size_t pitch;
    OK(hipMallocPitch(reinterpret_cast<void **>(&pitched), &pitch, 100, 3));
    say("pitched", pitched);
    filled(pitched, 10);
    OK(hipMallocManaged(reinterpret_cast<void **>(&managed), 5000, hipMemAttachGlobal));
    say("managed", managed);
    std::fill(managed, managed + 20, 1);
    read(managed, 16);
    void *own = aligned_alloc(4096, 8192);
    OK(hipHostRegister(own, 8000, hipHostRegisterMapped));
    OK(hipHostGetDevicePointer(reinterpret_cast<void **>(&mapped), own, 0));
    say("mapped", mapped);
    filled(mapped, 3);
    hipStream_t stream;
    OK(hipStreamCreate(&stream));
    OK(hipMallocAsync(reinterpret_cast<void **>(&pooled), 2048, stream));
    say("pooled", pooled);
    fill<<<1, 64, 0, stream>>>(pooled, 8);
    OK(hipStreamSynchronize(stream));
    OK(hipFree(first));
    OK(hipMalloc(reinterpret_cast<void **>(&again), 4000));
    say("again", again);
    read(again, 7);
    OK(hipMalloc(reinterpret_cast<void **>(&unused), 77));
    say("unused", unused);
    int *exported;
    hipIpcMemHandle_t handle;
    OK(hipMalloc(reinterpret_cast<void **>(&exported), 99));
    say("exported", exported);
    OK(hipIpcGetMemHandle(&handle, exported));
    OK(hipFreeAsync(pooled, stream));
    OK(hipHostUnregister(own));
    OK(hipHostFree(host));
}

// What probes in kernels meet: variables and constants of the module, modules that come and go, several streams, threads that leave
// early, a grid that is no whole number of blocks, and results that the program checks. Given a number, it launches that often.
#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

#include <hip/hip_ext.h>
#include <hip/hip_runtime.h>

#include "check.h"

__device__ unsigned total = 3;
__constant__ int table[4] = {1, 2, 3, 4};

__global__ void uses_variables(int *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    out[i] += table[i & 3];
    atomicAdd(&total, 1u);
}
__global__ void leaves_early(int *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i & 1) return;
    for (int k = 0; k < (i & 7); k++) out[i] += k;
    if (i > n) return;
    out[i] += 1;
}
__global__ void rows(int *out) { atomicAdd(&out[threadIdx.x], 1); }  // asks for x only
__global__ void columns(int *out) { atomicAdd(&out[threadIdx.x + 8 * threadIdx.y], 1); }  // for x and y
__global__ void sums(int *out) {
    __shared__ int part[64];
    part[threadIdx.x] = threadIdx.x;
    __syncthreads();
    for (int step = 32; step; step /= 2) {
        if (threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];
        __syncthreads();
    }
    if (!threadIdx.x) out[blockIdx.x] += part[0];
}

int main(int count, char **arguments) {
    const int rounds = count > 1 ? atoi(arguments[1]) : 5, n = 1000;
    int *out;
    OK(hipMalloc(&out, 4096));
    OK(hipMemset(out, 0, 4096));
    int changed[4] = {10, 20, 30, 40};
    for (int round = 0; round < rounds; round++) {
        if (round == 2) OK(hipMemcpyToSymbol(HIP_SYMBOL(table), changed, sizeof changed));
        uses_variables<<<4, 256>>>(out, n);
    }
    OK(hipDeviceSynchronize());
    unsigned found = 0;
    OK(hipMemcpyFromSymbol(&found, HIP_SYMBOL(total), sizeof found));
    CHECK(found == 3u + unsigned(rounds) * 1000u);
    std::vector<int> back(1024);
    OK(hipMemcpy(back.data(), out, 4096, hipMemcpyDeviceToHost));
    const int plain = rounds < 2 ? rounds : 2;
    for (int i = 0; i < 1000; i++) CHECK(back[i] == ((i & 3) + 1) * (plain + 10 * (rounds - plain)));

    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (int t = 0; t < 4; t++)
        threads.emplace_back([&] {
            hipStream_t stream;
            int *own, sum = 0;
            OK(hipStreamCreate(&stream));
            OK(hipMalloc(&own, 64 * sizeof(int)));
            OK(hipMemset(own, 0, 64 * sizeof(int)));
            OK(hipDeviceSynchronize());
            for (int round = 0; round < rounds; round++) sums<<<16, 64, 0, stream>>>(own);
            OK(hipMemcpyAsync(&sum, own + 7, sizeof sum, hipMemcpyDeviceToHost, stream));
            OK(hipStreamSynchronize(stream));
            if (sum != 2016 * rounds) wrong++;
            OK(hipFree(own));
            OK(hipStreamDestroy(stream));
        });
    for (std::thread &thread : threads) thread.join();
    CHECK(!wrong);

    OK(hipMemset(out, 0, 4096));
    leaves_early<<<4, 256>>>(out, 500);
    OK(hipMemcpy(back.data(), out, 4096, hipMemcpyDeviceToHost));
    for (int i = 0; i < 1024; i++) {
        const int turns = i & 7, added = turns * (turns - 1) / 2 + (i <= 500);
        CHECK(back[i] == (i & 1 ? 0 : added));
    }
    OK(hipMemset(out, 0, 4096));
    rows<<<3, dim3(8, 4, 2)>>>(out);
    columns<<<3, dim3(8, 4, 2)>>>(out + 64);
    OK(hipMemcpy(back.data(), out, 4096, hipMemcpyDeviceToHost));
    for (int i = 0; i < 64; i++) CHECK(back[i] == (i < 8 ? 3 * 8 : 0) && back[64 + i] == (i < 32 ? 3 * 2 : 0));
    OK(hipFree(out));
    puts("right");
}

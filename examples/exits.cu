// exits [cycles [launches]]      default: 20000 3
//
// Threads that keep others waiting, each kernel in its own way. Waiting is done on the multiprocessor's clock.
//
// Known answers (kernelretsnoop), C cycles:
//     lateLane    of each warp, lane 31 leaves C after the rest, by the other of two ways out
//     together    no lane is late
//     fourths     every 4th lane leaves C / 2 after the rest
//     slowWarp    of each block, warp 2 finishes C after the others; no lane is late
//     slowBlock   block 5 finishes C after the others; no lane is late
#include <vector>

#include "check.h"

__device__ void wait(long long cycles) {
    long long begin = clock64();
    while (clock64() - begin < cycles) {
    }
}

__device__ int mine() { return blockIdx.x * blockDim.x + threadIdx.x; }

__global__ void lateLane(int *out, long long cycles) {
    out[mine()] += 1;
    if (threadIdx.x % 32 != 31) return;
    wait(cycles);
}

__global__ void together(int *out, long long) { out[mine()] += 1; }

__global__ void fourths(int *out, long long cycles) {
    out[mine()] += 1;
    if (threadIdx.x % 4 != 3) return;
    wait(cycles / 2);
}

__global__ void slowWarp(int *out, long long cycles) {
    out[mine()] += 1;
    if (threadIdx.x / 32 == 2) wait(cycles);
}

__global__ void slowBlock(int *out, long long cycles) {
    out[mine()] += 1;
    if (blockIdx.x == 5) wait(cycles);
}

int main(int argc, char **argv) {
    const long cycles = argument(argc, argv, 1, 20000), launches = argument(argc, argv, 2, 3);
    const int blocks = 8, threads = 128;
    int *out;
    CHECK(cudaMalloc(&out, blocks * threads * sizeof(int)));
    CHECK(cudaMemset(out, 0, blocks * threads * sizeof(int)));
    auto kernels = {lateLane, together, fourths, slowWarp, slowBlock};
    for (auto kernel : kernels)
        for (long i = 0; i < launches; i++) {
            kernel<<<blocks, threads>>>(out, cycles);
            CHECK(cudaGetLastError());
        }
    std::vector<int> counts(blocks * threads);
    CHECK(cudaMemcpy(counts.data(), out, blocks * threads * sizeof(int), cudaMemcpyDeviceToHost));
    long wrong = 0;
    for (int count : counts) wrong += count != launches * static_cast<long>(kernels.size());
    return verdict("exits", wrong);
}

// hangs [WHAT [N]]      default: slow 1000
//
// slow (innocent): a loop of N turns, which ends.
// The others (guilty) never end. The program waits N seconds for the kernel, says that it still runs, and exits.
//
// barrier: warp 1 of each block of 4 warps does not come to a barrier for 128 threads.
// lock: thread 0 takes a lock twice.
// blocks: thread 0 of each of 2 blocks waits until the other block has gone on.
// flag: thread 0 of block 0 raises a flag and takes it back; those of blocks 1 and 2 wait for it.
// loop: all 4 warps of 2 blocks are in a loop without an end.
// count: the same in a loop that counts up by 2 from an odd number, until it has counted to 0.
#include <cstring>
#include <unistd.h>
#include <vector>

#include "check.h"

__global__ void slow(unsigned *x, unsigned turns) {
    unsigned value = x[threadIdx.x];
    for (unsigned i = 0; i < turns; i++) {
        value = value * 3 + (value >> 7);
        asm volatile("" : "+r"(value));  // keeps the compiler from unrolling
    }
    x[threadIdx.x] = value;
}

__global__ void barrier(unsigned *x) {
    x[threadIdx.x] = 1;
    if (threadIdx.x / 32 != 1)
        asm volatile("bar.sync 1, 128;" ::: "memory");
    x[threadIdx.x] = 2;
}

__device__ void take(unsigned *lock) {
    while (atomicCAS(lock, 0, 1) != 0) {
    }
}

__global__ void lock(unsigned *x) {
    if (threadIdx.x) return;
    take(x);
    x[1]++;
    take(x);
    x[1]++;
    atomicExch(x, 0);
}

__global__ void blocks(volatile unsigned *x) {
    if (threadIdx.x == 0) {
        while (x[1 - blockIdx.x] == 0) {
        }
        x[blockIdx.x] = 1;
    }
    __syncthreads();
    x[2 + threadIdx.x] = 1;
}

__global__ void flag(volatile unsigned *x) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        x[0] = 1;
        x[0] = 0;
    } else if (threadIdx.x == 0) {
        while (x[0] == 0) {
        }
    }
    __syncthreads();
    x[1 + threadIdx.x] = 1;
}

__global__ void loop(unsigned *x) {
    unsigned value = x[threadIdx.x];
    if (value < 1000)
        for (;;) {
            value = value * 3 + 1;
            asm volatile("" : "+r"(value));
        }
    x[threadIdx.x] = value;
}

__global__ void count(unsigned *x) {
    unsigned value = 1;
    while (value != 0) {
        value += 2;
        asm volatile("" : "+r"(value));
    }
    x[threadIdx.x] = value;
}

int main(int argc, char **argv) {
    const char *const what = argc > 1 ? argv[1] : "slow";
    const unsigned number = argument(argc, argv, 2, strcmp(what, "slow") ? 60 : 1000);
    const auto is = [what](const char *name) { return strcmp(what, name) == 0; };
    unsigned *x;
    CHECK(cudaMalloc(&x, 4096));
    CHECK(cudaMemset(x, 0, 4096));
    if (is("slow")) slow<<<2, 64>>>(x, number);
    else if (is("barrier")) barrier<<<2, 128>>>(x);
    else if (is("lock")) lock<<<1, 64>>>(x);
    else if (is("blocks")) blocks<<<2, 64>>>(x);
    else if (is("flag")) flag<<<3, 64>>>(x);
    else if (is("loop")) loop<<<2, 64>>>(x);
    else if (is("count")) count<<<2, 64>>>(x);
    else {
        fprintf(stderr, "hangs: there is no %s\n", what);
        return 2;
    }
    CHECK(cudaGetLastError());
    if (!is("slow"))
        for (unsigned wait = 0; cudaStreamQuery(nullptr) == cudaErrorNotReady; wait++) {
            if (wait == 100 * number) {
                printf("hangs: still running after %u s\n", number);
                fflush(stdout);
                _Exit(0);
            }
            usleep(10000);
        }
    CHECK(cudaDeviceSynchronize());
    std::vector<unsigned> found(64);
    CHECK(cudaMemcpy(found.data(), x, 64 * sizeof(unsigned), cudaMemcpyDeviceToHost));
    long wrong = 0;
    for (unsigned value : found) wrong += value != 0;
    return verdict("hangs", wrong);
}

// gridbarrier [rounds]      default: 100
//
// As many blocks as fit at once meet at a barrier of their own making, in an ordinary launch. A copy of the kernel of which fewer blocks fit never
// gets past it; so each waits for two seconds at most, and the program says so. Exit status 0: all met in every round.
#include "../../../examples/check.h"

constexpr int BLOCK = 256;

__global__ void meet(unsigned *came, unsigned *late, int rounds) {
    for (int round = 1; round <= rounds; round++) {
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            atomicAdd(came, 1);
            unsigned long long begin, now;
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
            while (atomicAdd(came, 0) < gridDim.x * round) {
                asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
                if (now - begin > 2000000000ull || atomicAdd(late, 0)) {
                    atomicAdd(late, 1);
                    break;
                }
            }
        }
        __syncthreads();
    }
}

int main(int argc, char **argv) {
    int rounds = argument(argc, argv, 1, 100), device, multiprocessors, fit;
    CHECK(cudaGetDevice(&device));
    CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, meet, BLOCK, 0));
    unsigned *counts, host[2];
    CHECK(cudaMalloc(&counts, sizeof host));
    CHECK(cudaMemset(counts, 0, sizeof host));
    meet<<<fit * multiprocessors, BLOCK>>>(counts, counts + 1, rounds);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(host, counts, sizeof host, cudaMemcpyDeviceToHost));
    return verdict("gridbarrier", host[1] + (host[0] != (unsigned)(fit * multiprocessors * rounds)));
}

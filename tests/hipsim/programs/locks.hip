// Locks of every kind, taken by one lane of each wave: in global memory and in LDS, of 4 and 8 bytes, by exchange and compare-and-swap.
#include "check.h"

__global__ void locks(unsigned *l32, unsigned long long *l64, int *lex, volatile int *sums, int turns) {
    __shared__ unsigned mine;
    __shared__ int other;
    if (threadIdx.x == 0) mine = 0, other = 0;
    __syncthreads();
    if (threadIdx.x % 64 == 0)
        for (int i = 0; i < turns; i++) {
            while (atomicCAS(l32, 0u, 1u + blockIdx.x) != 0) {
            }
            sums[0] += 1; __threadfence(); atomicExch(l32, 0u);
            while (atomicCAS(l64, 5ull << 33, 7ull << 35) != 5ull << 33) {
            }
            sums[1] += 1; __threadfence(); atomicExch(l64, 5ull << 33);
            while (atomicExch(lex, 1) != 0) {
            }
            sums[2] += 1; __threadfence(); atomicExch(lex, 0);
            while (atomicCAS(&mine, 0u, 9u) != 0) {
            }
            sums[4 + blockIdx.x] += 1; __threadfence_block(); atomicExch(&mine, 0u);
            while (atomicExch(&other, 1) != 0) {
            }
            sums[12 + blockIdx.x] += 1; __threadfence_block(); atomicExch(&other, 0);
        }
}

int main() {
    unsigned *l;
    unsigned long long *q, free = 5ull << 33;
    int *e, *sums;
    std::vector<int> found(20);
    OK(hipMalloc(&l, 64));
    OK(hipMalloc(&q, 64));
    OK(hipMalloc(&e, 64));
    OK(hipMalloc(&sums, 80));
    OK(hipMemset(l, 0, 64));
    OK(hipMemset(e, 0, 64));
    OK(hipMemset(sums, 0, 80));
    OK(hipMemcpy(q, &free, 8, hipMemcpyHostToDevice));
    locks<<<4, 128>>>(l, q, e, sums, 25);
    OK(hipDeviceSynchronize());
    OK(hipMemcpy(found.data(), sums, 80, hipMemcpyDeviceToHost));
    for (int i = 0; i < 20; i++) {
        const int turns = i < 3 ? 4 * 2 * 25 : i % 8 >= 4 ? 2 * 25 : 0;
        CHECK(found[i] == turns);
    }
    puts("locks: PASSED");
}

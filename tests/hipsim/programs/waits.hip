// A kernel whose blocks all wait for each other, launched with as many blocks as the argument says.
#include <hip/hip_runtime.h>

#include <cstdio>
#include <cstdlib>

#ifndef THREADS
#define THREADS 1
#endif

__global__ void waits(unsigned *arrived, unsigned *seen) {
#ifdef LARGE  // 128 VGPRs
    asm volatile("v_mov_b32 v127, 0" ::: "v127");
#endif
    if (threadIdx.x) return;
    atomicAdd(arrived, 1);
    while (__hip_atomic_load(arrived, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT) < gridDim.x)
        __builtin_amdgcn_s_sleep(1);
    seen[blockIdx.x] = 1;
}

int main(int argc, char **argv) {
    hipDeviceProp_t about;
    unsigned *arrived, *seen, blocks = argc > 1 ? atoi(argv[1]) : 0, count = 0;
    if (hipGetDeviceProperties(&about, 0)) return 1;
    if (!blocks) blocks = about.multiProcessorCount * about.maxThreadsPerMultiProcessor / about.warpSize;
    if (hipMalloc(&arrived, 4) || hipMallocManaged(&seen, 4 * blocks)) return 2;
    if (hipMemset(arrived, 0, 4) || hipMemset(seen, 0, 4 * blocks)) return 3;
    waits<<<blocks, THREADS>>>(arrived, seen);
    if (hipDeviceSynchronize()) return 4;
    for (unsigned i = 0; i < blocks; i++) count += seen[i];
    printf("%s %u\n", count == blocks ? "right" : "wrong", blocks);
}

// Kernels whose threads see what others did. On the virtual clock that depends on their times alone.
#include <cooperative_groups.h>

__device__ int lock, ticket, arrived, finished, taken[4096];
__device__ unsigned long long total;
__device__ float sum;

__device__ void work(int n) { for (int i = 0; i < n; i++) asm volatile("nanosleep.u32 1;"); }

// Which thread gets which number, and does more the greater it is
extern "C" __global__ void queue(long long *out)
{
    int me = blockIdx.x * blockDim.x + threadIdx.x;
    work(me * 7 % 13);
    for (int n = atomicAdd(&ticket, 1); n < 900; n = atomicAdd(&ticket, 1)) {
        taken[n] = me;
        work(n % 40);
    }
}
extern "C" __global__ void locks(long long *out)
{
    int me = blockIdx.x * blockDim.x + threadIdx.x;
    work(me * 5 % 11);
    while (atomicCAS(&lock, 0, 1) != 0) ;
    out[me] = total++;
    work(3);
    __threadfence();
    atomicExch(&lock, 0);
}
extern "C" __global__ void grid_barrier(long long *out)
{
    work(blockIdx.x * 100);
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicAdd(&arrived, 1);
        while (*(volatile int *)&arrived < gridDim.x) ;
    }
    __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = clock64();
}
extern "C" __global__ void last_block(long long *out)
{
    __shared__ bool last;
    work((gridDim.x - blockIdx.x) * 50);
    __threadfence();
    if (threadIdx.x == 0) last = atomicAdd(&finished, 1) == gridDim.x - 1;
    __syncthreads();
    if (last) work(500);
}
extern "C" __global__ void floats(long long *out)
{
    int me = blockIdx.x * blockDim.x + threadIdx.x;
    work(me % 17);
    atomicAdd(&sum, 1.0f / (1 + me));
    if (me == 0) { work(30000); out[0] = __float_as_int(atomicAdd(&sum, 0.0f)); }
}

// Lanes that are active together share an atomic, after loops that take longer than a warp's turn.
extern "C" __global__ void coalesced(long long *out)
{
    int me = blockIdx.x * blockDim.x + threadIdx.x, kept = 0;
    for (int turn = 0; turn < 1 + me % 3; turn++) {
        for (int k = 0; k < 20000 + me % 2; k++) kept = kept * 5 + k;
        if ((kept ^ turn) & 1) continue;
        auto group = cooperative_groups::coalesced_threads();
        if (group.thread_rank() == 0) { atomicAdd(&ticket, group.size()); work(group.size()); }
        group.sync();
    }
    out[me] = kept;
}
// A race: who reads what depends on the order of blocks
extern "C" __global__ void races(long long *out)
{
    int me = blockIdx.x * blockDim.x + threadIdx.x, size = blockDim.x * gridDim.x;
    for (int k = 0; k < 40; k++) {
        work(int(out[(me * 7 + k) % size]) & 7);
        out[(me * 5 + 3 * k) % size] = me;
    }
}

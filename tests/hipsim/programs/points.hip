// What programs at the points of a kernel see: blocks whose threads leave at different times, overlapping launches, barriers in loops,
// waves that arrive at a barrier with some lanes or without any, and waves that arrive late.
#include <vector>

#include <hip/hip_runtime.h>

#include "check.h"

__global__ void early(int *out) {
    if (threadIdx.x < 10 || (blockIdx.x == 2 && threadIdx.x >= 64)) return;
    for (int i = 0; i < 20; i++) {
        if (i == int(threadIdx.x) - 40) return;
        atomicAdd(out, 1);
    }
}
__global__ void tile(int *out, int turns) {
    __shared__ int part[256];
    for (int turn = 0; turn < turns; turn++) {
        part[threadIdx.x] = out[blockIdx.x * 256 + threadIdx.x] + turn;
        __syncthreads();
        out[blockIdx.x * 256 + threadIdx.x] = part[255 - threadIdx.x];
        __syncthreads();
    }
}
__device__ void arrive_without_lanes() {
#ifdef __gfx1030__
    asm volatile("s_mov_b32 s20, exec_lo\n s_mov_b32 exec_lo, 0\n s_barrier\n s_mov_b32 exec_lo, s20" ::: "s20");
#else
    asm volatile("s_mov_b64 s[20:21], exec\n s_mov_b64 exec, 0\n s_barrier\n s_mov_b64 exec, s[20:21]" ::: "s20", "s21");
#endif
}
__global__ void some(int *out) {  // at the first barrier all but one wave are on, at the second all but 32 threads
    if (threadIdx.x / warpSize) __builtin_amdgcn_s_barrier();
    else arrive_without_lanes();
    if (threadIdx.x < 64 && threadIdx.x % 2) return;
    __builtin_amdgcn_s_barrier();
    out[threadIdx.x] = 1;
}
__global__ void waits(int *out) {  // 4 waves of 64 threads, or 8 of 32: the last one comes last
    for (int i = 0; i <= threadIdx.x / warpSize; i++) __builtin_amdgcn_s_sleep(100);
    __syncthreads();
    out[threadIdx.x] = 1;
}

int main() {
    const int launches = 20, blocks = 4, turns = 3;
    int *out, *tiles, sum = 0, wanted = 0;
    OK(hipMalloc(&out, 4096));
    OK(hipMemset(out, 0, 4096));
    OK(hipMalloc(&tiles, blocks * 256 * sizeof(int)));
    OK(hipMemset(tiles, 0, blocks * 256 * sizeof(int)));
    OK(hipDeviceSynchronize());
    std::vector<hipStream_t> streams(4);
    for (hipStream_t &stream : streams) OK(hipStreamCreateWithFlags(&stream, hipStreamNonBlocking));
    for (int n = 0; n < launches; n++) early<<<blocks, 128, 0, streams[n % 4]>>>(out);
    OK(hipDeviceSynchronize());
    OK(hipMemcpy(&sum, out, sizeof sum, hipMemcpyDeviceToHost));
    for (int block = 0; block < blocks; block++)
        for (int t = 10; t < (block == 2 ? 64 : 128); t++) wanted += t >= 40 && t < 60 ? t - 40 : 20;
    CHECK(sum == launches * wanted);
    tile<<<blocks, 256>>>(tiles, turns);
    std::vector<int> back(blocks * 256);
    OK(hipMemcpy(back.data(), tiles, back.size() * sizeof(int), hipMemcpyDeviceToHost));
    for (int value : back) CHECK(value == 0 + 1 + 2);
    some<<<1, 256>>>(out);
    waits<<<1, 256>>>(out);
    OK(hipDeviceSynchronize());
    puts("right");
    return 0;
}

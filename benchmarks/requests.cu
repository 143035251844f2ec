// One access in each turn of a loop, with one pattern: benchmarks/requests.py counts what it costs a tool. ./requests N runs the Nth.
#include <cstdio>
#include <cstdlib>

constexpr int turns = 64;

#define IN_GLOBAL(name, index)                                                                   \
    __global__ void global_##name(const volatile int *data, int *out) {                          \
        [[maybe_unused]] int x = threadIdx.x, y = threadIdx.y, lane = (y * blockDim.x + x) & 31; \
        int sum = 0;                                                                             \
        _Pragma("unroll 1") for (int i = 0; i < turns; i++) sum += data[index];                  \
        if (sum == 12345) *out = sum;                                                            \
    }
#define IN_SHARED(name, index)                                                                   \
    __global__ void shared_##name(const volatile int *, int *out) {                              \
        __shared__ volatile int data[4096];                                                      \
        [[maybe_unused]] int x = threadIdx.x, y = threadIdx.y, lane = (y * blockDim.x + x) & 31; \
        int sum = 0;                                                                             \
        _Pragma("unroll 1") for (int i = 0; i < turns; i++) sum += data[index];                  \
        if (sum == 12345) *out = sum;                                                            \
    }
#define IN_BOTH(name, index) IN_GLOBAL(name, index) IN_SHARED(name, index)

IN_BOTH(unit, i * 32 + lane)
IN_GLOBAL(unit_of_new_bytes, blockIdx.x * 8192 + y / 2 * 2048 + i * 32 + lane)
IN_GLOBAL(unaligned, i * 32 + lane + 1)
IN_GLOBAL(unaligned_of_new_bytes, blockIdx.x * 8192 + y / 2 * 2048 + i * 32 + lane + 1)
IN_BOTH(broadcast, i)
IN_BOTH(stride_2, i + lane * 2)
IN_BOTH(stride_64, i + lane * 64)
IN_BOTH(rows, i + y * 128 + x)  // of 16 threads each
IN_BOTH(rows_of_one_address, i + y * 64)
IN_BOTH(gather, (lane * 37 + i * 61) * (lane + i) & 2047)

#define SOME_LANES(name, lanes)                                                             \
    __global__ void global_##name(const volatile int *data, int *out) {                     \
        int sum = 0, lane = (threadIdx.y * blockDim.x + threadIdx.x) & 31;                  \
        if (lanes) {                                                                        \
            _Pragma("unroll 1") for (int i = 0; i < turns; i++) sum += data[i * 32 + lane]; \
        }                                                                                   \
        if (sum == 12345) *out = sum;                                                       \
    }
SOME_LANES(half_a_warp, lane < 16)
SOME_LANES(one_lane, lane == 3)

__global__ void atomic_one_address(const volatile int *, int *out) {
    _Pragma("unroll 1") for (int i = 0; i < turns; i++) atomicAdd(out + (i & 7), (int)threadIdx.x);
}
__global__ void atomic_unit(const volatile int *, int *out) {
    _Pragma("unroll 1") for (int i = 0; i < turns; i++) atomicAdd(out + threadIdx.y * 16 + threadIdx.x, i);
}

#define BOTH(name) global_##name, shared_##name
int main(int count, char **arguments) {
    void (*const kernels[])(const volatile int *, int *) = {
        global_unit_of_new_bytes, global_unaligned_of_new_bytes,
        BOTH(unit), global_unaligned, BOTH(broadcast), BOTH(stride_2), BOTH(stride_64), BOTH(rows), BOTH(rows_of_one_address),
        BOTH(gather), global_half_a_warp, global_one_lane, atomic_one_address, atomic_unit,
    };
    int number = count > 1 ? atoi(arguments[1]) : -1, *data, *out;
    if (number < 0 || number >= int(sizeof kernels / sizeof *kernels)) return 2;
    cudaMalloc(&data, (1 << 20) + 4);
    cudaMalloc(&out, 1 << 16);
    cudaMemset(data, 0, 1 << 20);
    for (int launch = 0; launch < 8; launch++) {
        bool of_new_bytes = number < 2;
        kernels[number]<<<4, dim3(16, 8)>>>(data + (of_new_bytes ? launch << 15 : 0), out);
    }
    return cudaDeviceSynchronize() != cudaSuccess;
}

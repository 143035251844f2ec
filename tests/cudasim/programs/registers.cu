// Kernels with many registers: each thread keeps N values from one side of a barrier to the other.
#ifndef N
#define N 80
#endif

template <int Count>
__device__ void hold(volatile int *values) {
    int held[Count];
#pragma unroll
    for (int i = 0; i < Count; i++) held[i] = values[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Count; i++) values[i] = held[i];
}

extern "C" __global__ void wide(int *values) { hold<N>(values); }
extern "C" __global__ void __launch_bounds__(1024) bounded(int *values) { hold<N>(values); }

// barriers [blocks [rounds]]      default: 2 8; 128 threads per block
//
// In each round, the block computes 128 values, then every thread adds all of them up. Two barriers per round keep the steps apart.
//
// uneven (guilty): warp 0 computes all values, so the other three wait at the first barrier.
// shared (innocent): each thread computes one of them, so all warps arrive together.
//
// Known answers: every block passes each barrier once a round (16 times by default, with 4 warps: 64 waits). In uneven, warp 0 arrives
// last at the first barrier each time.
#include <cmath>
#include <vector>

#include "check.h"

__host__ __device__ inline float step(float x, int turns) {
#pragma unroll 1
    for (int i = 0; i < turns; i++) x = x * 0.5f + 1.0f;
    return x;
}

__global__ void uneven(float *out, int rounds) {
    __shared__ float values[128];
    float sum = 0;
    for (int round = 0; round < rounds; round++) {
        if (threadIdx.x < 32)
            for (int part = 0; part < 4; part++)
                values[threadIdx.x + 32 * part] = step(threadIdx.x + 32 * part + round, 100);
        __syncthreads();
        for (int i = 0; i < 128; i++) sum += values[i];
        __syncthreads();
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

__global__ void shared(float *out, int rounds) {
    __shared__ float values[128];
    float sum = 0;
    for (int round = 0; round < rounds; round++) {
        values[threadIdx.x] = step(threadIdx.x + round, 100);
        __syncthreads();
        for (int i = 0; i < 128; i++) sum += values[i];
        __syncthreads();
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

int main(int argc, char **argv) {
    const int blocks = argument(argc, argv, 1, 2), rounds = argument(argc, argv, 2, 8), threads = 128;
    float expected = 0, *dout;
    for (int round = 0; round < rounds; round++)
        for (int i = 0; i < threads; i++) expected += step(i + round, 100);
    CHECK(cudaMalloc(&dout, blocks * threads * sizeof(float)));

    long wrong = 0;
    for (int is_shared = 0; is_shared < 2; is_shared++) {
        CHECK(cudaMemset(dout, 0, blocks * threads * sizeof(float)));
        (is_shared ? shared : uneven)<<<blocks, threads>>>(dout, rounds);
        CHECK(cudaGetLastError());
        std::vector<float> out(blocks * threads);
        CHECK(cudaMemcpy(out.data(), dout, out.size() * sizeof(float), cudaMemcpyDeviceToHost));
        for (float one : out) wrong += std::fabs(one - expected) > 1e-3f * expected;
    }
    return verdict("barriers", wrong);
}

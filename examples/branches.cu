// branches [blocks [turns]]      default: 4 20; 128 threads per block
//
// mixed (guilty): the particles' kinds alternate, so each warp takes both ways of one `if`, one after the other.
// sorted (innocent): the same particles, sorted by kind. Each warp takes one way.
//
// Known answers: every warp executes the `if` once. In mixed, all warps diverge there (16 of them by default), and 16 of 32 lanes wait
// on each way. In sorted, none does.
#include <cmath>
#include <vector>

#include "check.h"

__host__ __device__ inline float light(float x, int turns) {
#pragma unroll 1
    for (int i = 0; i < turns; i++) x = x * 0.5f + 1.0f;
    return x;
}

__host__ __device__ inline float heavy(float x, int turns) {
#pragma unroll 1
    for (int i = 0; i < 3 * turns; i++) x = x * 0.25f + 2.0f;
    return x;
}

__global__ void mixed(const int *kind, float *x, int turns) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (kind[i]) x[i] = heavy(x[i], turns);
    else x[i] = light(x[i], turns);
}

__global__ void sorted(const int *kind, float *x, int turns) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (kind[i]) x[i] = heavy(x[i], turns);
    else x[i] = light(x[i], turns);
}

int main(int argc, char **argv) {
    const int blocks = argument(argc, argv, 1, 4), turns = argument(argc, argv, 2, 20), threads = 128;
    const int count = blocks * threads;
    int *dkind;
    float *dx;
    CHECK(cudaMalloc(&dkind, count * sizeof(int)));
    CHECK(cudaMalloc(&dx, count * sizeof(float)));

    long wrong = 0;
    for (int in_order = 0; in_order < 2; in_order++) {
        std::vector<int> kind(count);
        std::vector<float> x(count), found(count);
        for (int i = 0; i < count; i++) {
            kind[i] = in_order ? i >= count / 2 : i % 2;
            x[i] = static_cast<float>(i % 7);
        }
        CHECK(cudaMemcpy(dkind, kind.data(), count * sizeof(int), cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(dx, x.data(), count * sizeof(float), cudaMemcpyHostToDevice));
        (in_order ? sorted : mixed)<<<blocks, threads>>>(dkind, dx, turns);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpy(found.data(), dx, count * sizeof(float), cudaMemcpyDeviceToHost));
        for (int i = 0; i < count; i++)
            wrong += std::fabs(found[i] - (kind[i] ? heavy(x[i], turns) : light(x[i], turns))) > 1e-5f;
    }
    return verdict("branches", wrong);
}

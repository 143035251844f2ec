// cooperative [rounds]      default: 3; 4 blocks of 64 threads
//
// Cooperative groups: a grid-wide barrier in a cooperative launch (hangs when the blocks are not all resident at once), and
// tiles of 8 threads.
//
// Known answers: `relay` is launched once; after each round every element holds the sum of all elements of the round before.
// `tiles` writes the sum of its tile's eight thread numbers.
#include <cooperative_groups.h>

#include <vector>

#include "check.h"

namespace cg = cooperative_groups;

constexpr int kBlocks = 4, kThreads = 64, kCount = kBlocks * kThreads;

__global__ void relay(unsigned *front, unsigned *back, int rounds) {
    cg::grid_group grid = cg::this_grid();
    unsigned thread = grid.thread_rank();
    for (int round = 0; round < rounds; round++) {
        unsigned sum = 0;
        for (unsigned i = 0; i < grid.size(); i++) sum += front[i];
        back[thread] = sum + thread;
        grid.sync();
        unsigned *other = front;
        front = back;
        back = other;
    }
}

__global__ void tiles(int *out) {
    auto tile = cg::tiled_partition<8>(cg::this_thread_block());
    int sum = threadIdx.x;
    for (int offset = tile.size() / 2; offset > 0; offset /= 2) sum += tile.shfl_xor(sum, offset);
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

int main(int argc, char **argv) {
    int rounds = argument(argc, argv, 1, 3);
    int device, cooperative;
    CHECK(cudaGetDevice(&device));
    CHECK(cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, device));
    long wrong = 0;
    unsigned *front, *back;
    CHECK(cudaMalloc(&front, kCount * sizeof(unsigned)));
    CHECK(cudaMalloc(&back, kCount * sizeof(unsigned)));
    if (cooperative) {
        std::vector<unsigned> expected(kCount, 1), got(kCount);
        CHECK(cudaMemcpy(front, expected.data(), kCount * sizeof(unsigned), cudaMemcpyHostToDevice));
        void *arguments[] = {&front, &back, &rounds};
        CHECK(cudaLaunchCooperativeKernel((void *)relay, kBlocks, kThreads, arguments, 0, 0));
        CHECK(cudaMemcpy(got.data(), rounds % 2 ? back : front, kCount * sizeof(unsigned), cudaMemcpyDeviceToHost));
        for (int round = 0; round < rounds; round++) {
            unsigned sum = 0;
            for (unsigned value : expected) sum += value;
            for (int i = 0; i < kCount; i++) expected[i] = sum + i;
        }
        for (int i = 0; i < kCount; i++) wrong += got[i] != expected[i];
    } else {
        std::printf("cooperative: this device has no cooperative launches\n");
    }
    std::vector<int> sums(kCount);
    tiles<<<kBlocks, kThreads>>>((int *)front);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(sums.data(), front, kCount * sizeof(int), cudaMemcpyDeviceToHost));
    for (int i = 0; i < kCount; i++) wrong += sums[i] != 8 * (i % kThreads / 8 * 8) + 28;
    return verdict("cooperative", wrong);
}

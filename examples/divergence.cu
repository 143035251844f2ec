// divergence [blocks [turns]]      default: 2 100; 64 threads per block
//
// laneHog (guilty): lane 31 of each warp turns 8 times as often as the others, which have left by then.
// even (innocent): every lane turns as often.
//
// Known answers, turns = 100, one volatile load per turn (threadhist --by lane --work loads):
//     laneHog    lane 31: 800 per thread, lanes 0 to 30: 100; imbalance 800 / ((31 * 100 + 800) / 32) = 6.56
//     even       100 for every lane; imbalance 1.00
#include <vector>

#include "check.h"

__global__ void laneHog(volatile const unsigned *seed, unsigned *out, int turns) {
    int thread = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned value = thread;
    int mine = threadIdx.x % 32 == 31 ? 8 * turns : turns;
    for (int i = 0; i < mine; i++) value = value * 1664525u + *seed;
    out[thread] = value;
}

__global__ void even(volatile const unsigned *seed, unsigned *out, int turns) {
    int thread = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned value = thread;
    for (int i = 0; i < turns; i++) value = value * 1664525u + *seed;
    out[thread] = value;
}

int main(int argc, char **argv) {
    const int blocks = argument(argc, argv, 1, 2), turns = argument(argc, argv, 2, 100), threads = 64;
    const unsigned seed = 1013904223u;
    unsigned *dseed, *dout;
    std::vector<unsigned> out(blocks * threads);
    CHECK(cudaMalloc(&dseed, sizeof seed));
    CHECK(cudaMalloc(&dout, out.size() * sizeof(unsigned)));
    CHECK(cudaMemcpy(dseed, &seed, sizeof seed, cudaMemcpyHostToDevice));

    long wrong = 0;
    for (int hog = 0; hog < 2; hog++) {
        (hog ? laneHog : even)<<<blocks, threads>>>(dseed, dout, turns);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpy(out.data(), dout, out.size() * sizeof(unsigned), cudaMemcpyDeviceToHost));
        for (unsigned t = 0; t < out.size(); t++) {
            unsigned value = t;
            for (int i = 0; i < (hog && t % 32 == 31 ? 8 * turns : turns); i++) value = value * 1664525u + seed;
            wrong += out[t] != value;
        }
    }
    return verdict("divergence", wrong);
}

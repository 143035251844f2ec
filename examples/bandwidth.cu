// bandwidth [elements [launches [1]]]      default: 4096 elements (of 4 bytes, rounded up to a multiple of 1024), 1 launch
//
// Kernels that are bound by memory, each in its own way: what a probe at each of their accesses costs. With a 1 at the end it prints
// for each kernel the microseconds of a launch, by the GPU's own events, the first one left out.
//
// Known answers (memtrace): of each thread one access at each site, so of n elements n / 32 requests a launch.
//     triad        2 loads and a store, unit, ratio 1
//     everyEighth  load: stride 8, ratio 8; store: unit
//     shuffled     index: unit; load: gather; store: unit
//     bins         load: unit; atomic: gather over 1024 bins of 4 bytes
//     turned       a padded tile in shared memory: unit, ratio 1, and 1-way throughout
#include <vector>

#include "check.h"

constexpr int BLOCK = 256, BINS = 1024, SIDE = 32;

__device__ int mine() { return blockIdx.x * blockDim.x + threadIdx.x; }

__global__ void triad(const float *b, const float *c, float *a) { a[mine()] = b[mine()] + 3.0f * c[mine()]; }
__global__ void everyEighth(const float *b, float *a, int n) { a[mine()] = b[8 * (mine() % (n / 8)) + mine() / (n / 8)]; }
__global__ void shuffled(const int *index, const float *b, float *a) { a[mine()] = b[index[mine()]]; }
__global__ void bins(const int *index, int *counts) { atomicAdd(counts + index[mine()] % BINS, 1); }

// A block of 32 x 8 threads turns a tile of 32 x 32 elements that lie one after the other.
__global__ void turned(const float *b, float *a) {
    __shared__ float tile[SIDE][SIDE + 1];
    int first = blockIdx.x * SIDE * SIDE;
#pragma unroll
    for (int y = 0; y < SIDE; y += 8) tile[y + threadIdx.y][threadIdx.x] = b[first + (y + threadIdx.y) * SIDE + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int y = 0; y < SIDE; y += 8) a[first + (y + threadIdx.y) * SIDE + threadIdx.x] = tile[threadIdx.x][y + threadIdx.y];
}

// Numbers without order, the same ones on every machine.
int scrambled(unsigned i, unsigned n) {
    i = (i ^ i >> 15) * 2246822519u;
    i = (i ^ i >> 13) * 3266489917u;
    return (i ^ i >> 16) % n;
}

int main(int argc, char **argv) {
    const int n = (argument(argc, argv, 1, 4096) + 1023) / 1024 * 1024, launches = argument(argc, argv, 2, 1);
    const bool timed = argc > 3;
    std::vector<float> b(n), c(n), a(n);
    std::vector<int> index(n), counts(BINS), right(BINS);
    for (int i = 0; i < n; i++) {
        b[i] = i % 1000, c[i] = i % 777, index[i] = scrambled(i, n);
        right[index[i] % BINS] += launches + (timed ? 1 : 0);
    }
    float *da, *db, *dc;
    int *dindex, *dcounts;
    for (float **p : {&da, &db, &dc}) CHECK(cudaMalloc(p, n * sizeof(float)));
    CHECK(cudaMalloc(&dindex, n * sizeof(int)));
    CHECK(cudaMalloc(&dcounts, BINS * sizeof(int)));
    CHECK(cudaMemset(dcounts, 0, BINS * sizeof(int)));
    CHECK(cudaMemcpy(db, b.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(dc, c.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(dindex, index.data(), n * sizeof(int), cudaMemcpyHostToDevice));
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));

    long wrong = 0;
    auto run = [&](const char *name, auto launch, auto value) {
        if (timed) launch();
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaEventRecord(begin));
        for (int i = 0; i < launches; i++) launch();
        CHECK(cudaGetLastError());
        CHECK(cudaEventRecord(end));
        CHECK(cudaEventSynchronize(end));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (timed) std::printf("%s %.3f us\n", name, 1000 * ms / launches);
        CHECK(cudaMemcpy(a.data(), da, n * sizeof(float), cudaMemcpyDeviceToHost));
        for (int i = 0; i < n; i++) wrong += a[i] != value(i);
    };
    const int blocks = n / BLOCK;
    run("triad", [&] { triad<<<blocks, BLOCK>>>(db, dc, da); }, [&](int i) { return b[i] + 3.0f * c[i]; });
    run("everyEighth", [&] { everyEighth<<<blocks, BLOCK>>>(db, da, n); }, [&](int i) { return b[8 * (i % (n / 8)) + i / (n / 8)]; });
    run("shuffled", [&] { shuffled<<<blocks, BLOCK>>>(dindex, db, da); }, [&](int i) { return b[index[i]]; });
    run("bins", [&] { bins<<<blocks, BLOCK>>>(dindex, dcounts); }, [&](int i) { return b[index[i]]; });
    run("turned", [&] { turned<<<n / (SIDE * SIDE), dim3(SIDE, 8)>>>(db, da); },
        [&](int i) { return b[i / 1024 * 1024 + i % 32 * 32 + i / 32 % 32]; });
    CHECK(cudaMemcpy(counts.data(), dcounts, BINS * sizeof(int), cudaMemcpyDeviceToHost));
    for (int i = 0; i < BINS; i++) wrong += counts[i] != right[i];
    return verdict("bandwidth", wrong);
}

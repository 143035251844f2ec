// vectoradd [elements [threads per block [blocks [launches]]]]      default: 19 5 1 1
//
// Adds two vectors in a grid-stride loop: thread t takes elements t, t + threads, t + 2 threads, …
//
// Known answers, stores per thread and launch (threadhist --work stores):
//     vectoradd                     19 elements, 5 threads: threads 0 to 3 store 4 times, thread 4 stores 3 times, 75 %
//     vectoradd 1000003 5           200001 for threads 0 to 2, 200000 for threads 3 and 4
//     vectoradd 19 5 1 23           RUNS is 23 for every thread
#include <vector>

#include "check.h"

__global__ void vectorAdd(const float *a, const float *b, float *c, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) c[i] = a[i] + b[i];
}

int main(int argc, char **argv) {
    const int n = argument(argc, argv, 1, 19);
    const int threads = argument(argc, argv, 2, 5), blocks = argument(argc, argv, 3, 1);
    const long launches = argument(argc, argv, 4, 1);

    std::vector<float> a(n), b(n), c(n);
    for (int i = 0; i < n; i++) a[i] = i, b[i] = 2 * i;
    float *da, *db, *dc;
    CHECK(cudaMalloc(&da, n * sizeof(float)));
    CHECK(cudaMalloc(&db, n * sizeof(float)));
    CHECK(cudaMalloc(&dc, n * sizeof(float)));
    CHECK(cudaMemcpy(da, a.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(db, b.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    for (long launch = 0; launch < launches; launch++) {
        vectorAdd<<<blocks, threads>>>(da, db, dc, n);
        CHECK(cudaGetLastError());
    }
    CHECK(cudaMemcpy(c.data(), dc, n * sizeof(float), cudaMemcpyDeviceToHost));
    CHECK(cudaFree(da));
    CHECK(cudaFree(db));
    CHECK(cudaFree(dc));

    long wrong = 0;
    for (int i = 0; i < n; i++) wrong += c[i] != a[i] + b[i];
    return verdict("vectoradd", wrong);
}

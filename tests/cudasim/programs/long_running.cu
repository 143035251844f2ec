// A kernel that becomes thousands of lines of C, and its results.
#include <cstdio>

#define STEPS 350
#define STEP(x, i) (((x) * (2u * (i) + 1) + ((x) >> ((i) % 31 + 1))) ^ (i))

__global__ void large(unsigned *out, unsigned seed) {
    unsigned x = threadIdx.x * seed + blockIdx.x;
#pragma unroll
    for (int i = 0; i < STEPS; i++) x = STEP(x, i);
    out[blockIdx.x * blockDim.x + threadIdx.x] = x;
}

int main() {
    const unsigned threads = 64, seed = 12345;
    unsigned *out;
    cudaMallocManaged(&out, threads * sizeof *out);
    large<<<2, threads / 2>>>(out, seed);
    if (cudaDeviceSynchronize() != cudaSuccess) return 1;
    for (unsigned t = 0; t < threads; t++) {
        unsigned x = t % (threads / 2) * seed + t / (threads / 2);
        for (unsigned i = 0; i < STEPS; i++) x = STEP(x, i);
        if (out[t] != x) return printf("thread %u is wrong\n", t), 1;
    }
    puts("right");
    return 0;
}

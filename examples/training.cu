// training [steps]      default: 10
//
// Moves a value through two layers, forward and backward, in each step.
//
// validate (guilty): it checks the whole data set in each step, by mistake, and takes most of the GPU's time.
// forward, backward (innocent): they launch the same kernel, `layer`, from different places.
//
// Known answers for N steps (gpuprofile): N launches of `check` under step > validate; 2 N of `layer` under step > forward, and 2 N
// under step > backward.
#include <vector>

#include "check.h"

#define FUNCTION static __attribute__((noinline))

constexpr int kThreads = 128, kData = 1000;

__global__ void layer(float *x, int turns) {
    float sum = x[threadIdx.x];
#pragma unroll 1
    for (int i = 0; i < turns; i++) sum = sum * 0.5f + 1.0f;
    x[threadIdx.x] = sum;
}

__global__ void check(const float *x, int *bad, int turns) {
    int wrong = 0;
#pragma unroll 1
    for (int i = 0; i < turns; i++) wrong += x[(threadIdx.x + i) % kThreads] < 0.0f;
    bad[threadIdx.x] = wrong;
}

FUNCTION void run(float *x, int turns) {
    layer<<<1, kThreads>>>(x, turns);
    CHECK(cudaGetLastError());
}

FUNCTION void forward(float *x) {
    for (int i = 0; i < 2; i++) run(x, 50);
    CHECK(cudaStreamSynchronize(nullptr));
}

FUNCTION void backward(float *x) {
    for (int i = 0; i < 2; i++) run(x, 100);
    CHECK(cudaStreamSynchronize(nullptr));
}

FUNCTION void validate(const float *x, int *bad) {
    check<<<1, kThreads>>>(x, bad, kData);
    CHECK(cudaDeviceSynchronize());
}

FUNCTION void step(float *x, int *bad) {
    forward(x);
    backward(x);
    validate(x, bad);
    CHECK(cudaGetLastError());
}

int main(int argc, char **argv) {
    const int steps = argument(argc, argv, 1, 10);
    float *x;
    int *bad;
    CHECK(cudaMalloc(&x, kThreads * sizeof(float)));
    CHECK(cudaMalloc(&bad, kThreads * sizeof(int)));
    CHECK(cudaMemset(x, 0, kThreads * sizeof(float)));
    for (int i = 0; i < steps; i++) step(x, bad);
    std::vector<float> found(kThreads);
    std::vector<int> wrong(kThreads);
    CHECK(cudaMemcpy(found.data(), x, kThreads * sizeof(float), cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(wrong.data(), bad, kThreads * sizeof(int), cudaMemcpyDeviceToHost));
    long failed = 0;
    for (int i = 0; i < kThreads; i++) failed += wrong[i] != 0 || found[i] < 1.999f || found[i] > 2.001f;
    return verdict("training", failed);
}

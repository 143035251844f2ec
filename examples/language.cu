// language
//
// What C++ kernels are made of: templates in namespaces, structures by value, functions that are not inlined, recursion,
// functors, virtual functions, function pointers, constant, static and managed variables, printf, 64-bit floats.
//
// Known answers: every kernel runs once on 2 blocks of 16 threads; `threadhist --list language` names shapes::area
// (float and double), shapes::(anonymous namespace)::apply, counted, climb, make, called and speak. `called` calls each of
// Rule::apply, Shifting::apply, plus and minus in half of its threads. `counted` counts 32 launched threads in a
// __device__ variable, which the host reads back: a tool that counts in a copy of it instead is found out.
#include <new>
#include <vector>

#include "check.h"

constexpr int kBlocks = 2, kThreads = 16, kCount = kBlocks * kThreads;

__constant__ int weights[4] = {1, 10, 100, 1000};
__device__ unsigned arrivals;
__managed__ int managed[kCount];

namespace shapes {

template <typename T>
struct Box {
    T width, height;
    char tag;  // padding behind it
};

template <typename T>
__global__ void area(Box<T> box, T *out) {
    int thread = blockIdx.x * blockDim.x + threadIdx.x;
    out[thread] = box.width * box.height + thread + box.tag;
}

namespace {
struct Weighted {
    int shift;
    __device__ int operator()(int x) const { return weights[(x + shift) % 4]; }
};

template <typename F>
__global__ void apply(F f, int *out) {
    int thread = blockIdx.x * blockDim.x + threadIdx.x;
    out[thread] = f(thread);
}
}  // namespace

}  // namespace shapes

__device__ __noinline__ int distance(int a, int b) { return a > b ? a - b : b - a; }

__device__ __noinline__ int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }

__global__ void counted(int *out) {
    static __device__ int runs;  // a variable that no runtime registers
    int thread = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&runs, 1);
    atomicAdd(&arrivals, 1u);
    managed[thread] += distance(thread, 20);
    out[thread] = distance(20, thread);
}

__global__ void climb(int *out) {
    int thread = blockIdx.x * blockDim.x + threadIdx.x;
    out[thread] = fibonacci(thread % 10);
}

struct Rule {
    int by;
    __device__ explicit Rule(int by) : by(by) {}
    __device__ virtual int apply(int x) const { return x * by; }
};

struct Shifting : Rule {
    __device__ explicit Shifting(int by) : Rule(by) {}
    __device__ int apply(int x) const override { return x + by; }
};

__device__ __noinline__ int plus(int a, int b) { return a + b; }

__device__ __noinline__ int minus(int a, int b) { return a - b; }

__global__ void make(Rule *rules) {
    int thread = blockIdx.x * blockDim.x + threadIdx.x;
    if (thread % 2)
        new (rules + thread) Shifting(100);
    else
        new (rules + thread) Rule(3);
}

__global__ void called(const Rule *rules, int *out) {
    static int (*const steps[])(int, int) = {plus, minus};
    int thread = blockIdx.x * blockDim.x + threadIdx.x;
    out[thread] = steps[thread / 2 % 2](rules[thread].apply(thread), 1000);
}

__global__ void speak(int *out) {
    int thread = blockIdx.x * blockDim.x + threadIdx.x;
    out[thread] = thread;
    if (thread == 7) printf("thread %d of block %d says %s and %.2f\n", threadIdx.x, blockIdx.x, "hello", 2.5);
}

template <typename T>
std::vector<T> fetch(const T *from) {
    std::vector<T> to(kCount);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(to.data(), from, kCount * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
}

int main() {
    int *ints;
    double *doubles;
    CHECK(cudaMalloc(&ints, kCount * sizeof(int)));
    CHECK(cudaMalloc(&doubles, kCount * sizeof(double)));
    long wrong = 0;

    shapes::area<<<kBlocks, kThreads>>>(shapes::Box<double>{2.5, 4, 1}, doubles);
    auto areas = fetch(doubles);
    for (int i = 0; i < kCount; i++) wrong += areas[i] != 11 + i;
    shapes::area<<<kBlocks, kThreads>>>(shapes::Box<float>{3, 5, 2}, (float *)doubles);
    auto floats = fetch((float *)doubles);
    for (int i = 0; i < kCount; i++) wrong += floats[i] != 17 + i;

    shapes::apply<<<kBlocks, kThreads>>>(shapes::Weighted{3}, ints);
    const int powers[4] = {1, 10, 100, 1000};
    auto results = fetch(ints);
    for (int i = 0; i < kCount; i++) wrong += results[i] != powers[(i + 3) % 4];

    for (int i = 0; i < kCount; i++) managed[i] = 1000;
    counted<<<kBlocks, kThreads>>>(ints);
    results = fetch(ints);
    unsigned seen;
    CHECK(cudaMemcpyFromSymbol(&seen, arrivals, sizeof seen));
    wrong += seen != kCount;
    for (int i = 0; i < kCount; i++) wrong += results[i] != std::abs(20 - i) || managed[i] != 1000 + std::abs(20 - i);

    climb<<<kBlocks, kThreads>>>(ints);
    results = fetch(ints);
    const int numbers[10] = {0, 1, 1, 2, 3, 5, 8, 13, 21, 34};
    for (int i = 0; i < kCount; i++) wrong += results[i] != numbers[i % 10];

    Rule *rules;
    CHECK(cudaMalloc(&rules, kCount * sizeof(Rule)));
    make<<<kBlocks, kThreads>>>(rules);
    called<<<kBlocks, kThreads>>>(rules, ints);
    results = fetch(ints);
    for (int i = 0; i < kCount; i++) wrong += results[i] != (i % 2 ? i + 100 : 3 * i) + (i / 2 % 2 ? -1000 : 1000);

    speak<<<kBlocks, kThreads>>>(ints);
    results = fetch(ints);
    for (int i = 0; i < kCount; i++) wrong += results[i] != i;
    CHECK(cudaDeviceSynchronize());
    return verdict("language", wrong);
}

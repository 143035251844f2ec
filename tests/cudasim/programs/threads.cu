// Eight host threads, each with streams, events and graphs of its own, and one executable graph that all of them launch.
#include "check.h"

#include <atomic>
#include <thread>
#include <vector>

constexpr int kThreads = 8, kRounds = 12;

__global__ void add(int *where, int value) { *where += value; }  // not atomic: replays must not overlap
__global__ void work(int *where, int turns) {
    for (int i = 0; i < turns; i++) atomicAdd(where, 1);
}

static cudaGraphExec_t shared;
static std::atomic<int> calls{0};
static void CUDART_CB call(void *) { calls++; }

static void thread(int *cell, int number) {
    cudaStream_t mine, other;
    cudaEvent_t fork, join;
    CHECK(cudaStreamCreateWithFlags(&mine, number % 2 ? cudaStreamNonBlocking : cudaStreamDefault));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&fork));
    CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    CHECK(cudaMemsetAsync(cell, 0, 2 * sizeof(int), mine));
    CHECK(cudaStreamSynchronize(mine));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(mine, cudaStreamCaptureModeThreadLocal));
    CHECK(cudaEventRecord(fork, mine));
    CHECK(cudaStreamWaitEvent(other, fork, 0));
    work<<<1, 1, 0, mine>>>(cell, 3);
    work<<<1, 1, 0, other>>>(cell, 4);
    CHECK(cudaEventRecord(join, other));
    CHECK(cudaStreamWaitEvent(mine, join, 0));
    add<<<1, 1, 0, mine>>>(cell, 5);
    CHECK(cudaLaunchHostFunc(mine, call, nullptr));
    CHECK(cudaStreamEndCapture(mine, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t before, after;
    CHECK(cudaEventCreate(&before));
    CHECK(cudaEventCreate(&after));
    for (int i = 0; i < kRounds; i++) {
        CHECK(cudaEventRecord(before, mine));
        CHECK(cudaGraphLaunch(exec, i % 2 ? mine : other));
        CHECK(cudaGraphLaunch(shared, mine));
        CHECK(cudaEventRecord(after, mine));
        CHECK(cudaStreamWaitEvent(other, after, 0));
        if (i % 5 == 0) CHECK(cudaGraphExecUpdate(exec, graph, nullptr));
        if (i % 4 == 0) {
            CHECK(cudaEventSynchronize(after));
            float milliseconds = -1;
            CHECK(cudaEventElapsedTime(&milliseconds, before, after));
            REQUIRE(milliseconds >= 0);
        }
        while (cudaEventQuery(after) == cudaErrorNotReady) cudaGetLastError();
    }
    CHECK(cudaStreamSynchronize(mine));
    CHECK(cudaStreamSynchronize(other));
    int sum = 0;
    CHECK(cudaMemcpyAsync(&sum, cell, sizeof sum, cudaMemcpyDeviceToHost, mine));
    CHECK(cudaStreamSynchronize(mine));
    REQUIRE(sum == kRounds * (3 + 4 + 5));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaEventDestroy(fork));
    CHECK(cudaEventDestroy(join));
    CHECK(cudaEventDestroy(before));
    CHECK(cudaEventDestroy(after));
    CHECK(cudaStreamDestroy(mine));
    CHECK(cudaStreamDestroy(other));
}

int main() {
    int *cells = nullptr, total = 0, one = 1;
    CHECK(cudaMalloc(&cells, 2 * (kThreads + 1) * sizeof(int)));
    int *last = cells + 2 * kThreads;
    CHECK(cudaMemset(last, 0, sizeof(int)));
    CHECK(cudaDeviceSynchronize());
    cudaGraph_t graph;
    cudaGraphNode_t first, second;
    void *arguments[] = {&last, &one};
    cudaKernelNodeParams parameters = {};
    parameters.func = reinterpret_cast<void *>(&add);
    parameters.gridDim = parameters.blockDim = dim3(1, 1, 1);
    parameters.kernelParams = arguments;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddKernelNode(&first, graph, nullptr, 0, &parameters));
    CHECK(cudaGraphAddKernelNode(&second, graph, &first, 1, &parameters));
    CHECK(cudaGraphInstantiate(&shared, graph, 0));
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; i++) threads.emplace_back(thread, cells + 2 * i, i);
    for (std::thread &one_of : threads) one_of.join();
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(&total, last, sizeof total, cudaMemcpyDeviceToHost));
    REQUIRE(total == 2 * kThreads * kRounds && calls == kThreads * kRounds);
    puts("threads ok");
    return 0;
}

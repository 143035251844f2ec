// Threads that launch together for the first time since a tool attached. Each of THREADS threads launches 3 kernels
// LAUNCHES times, 32 threads each. Prints how often each kernel ran.
//   together HOW   HOW has letters: b launches once before the tool comes, s own streams, g graphs,
//                  d a device for each thread, c a context for each thread, made before the tool comes,
//                  n no pause: starts at once
#include <cstdio>
#include <cstring>
#include <cuda.h>
#include <thread>
#include <vector>

constexpr int kThreads = 4, kLaunches = 5;

__global__ void one(unsigned *counts) { atomicAdd(counts, 1u); }
__global__ void two(unsigned *counts) { atomicAdd(counts + 1, 1u); }
__global__ void three(unsigned *counts) { atomicAdd(counts + 2, 1u); }

void launch(unsigned *counts, cudaStream_t s) {
    one<<<1, 32, 0, s>>>(counts);
    two<<<1, 32, 0, s>>>(counts);
    three<<<1, 32, 0, s>>>(counts);
}

int main(int, char **argv) {
    const auto has = [&](char letter) { return strchr(argv[1], letter) != nullptr; };
    const bool apart = has('d') || has('c');  // threads share no context
    unsigned *shared = nullptr;
    cudaMalloc(&shared, 12);
    cudaMemset(shared, 0, 12);
    if (has('b')) launch(shared, nullptr);
    cudaDeviceSynchronize();
    std::vector<CUcontext> contexts(kThreads);
    for (int i = 0; has('c') && i < kThreads; ++i) {
        CUcontext popped;
        cuCtxCreate(&contexts[i], nullptr, 0, 0);
        cuCtxPopCurrent(&popped);
    }
    if (!has('n')) {
        puts("ready");
        fflush(stdout);
        getchar();
    }
    unsigned ran[kThreads][3] = {};
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i)
        threads.emplace_back([&, i] {
            if (has('d')) cudaSetDevice(i);
            if (has('c')) cuCtxSetCurrent(contexts[i]);
            unsigned *counts = shared;
            cudaStream_t stream = nullptr;
            if (apart) {
                cudaMalloc(&counts, 12);
                cudaMemset(counts, 0, 12);
                cudaDeviceSynchronize();
            }
            if (has('s') || has('g')) cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
            if (has('g')) {
                cudaGraph_t graph;
                cudaGraphExec_t made;
                cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
                launch(counts, stream);
                cudaStreamEndCapture(stream, &graph);
                cudaGraphInstantiate(&made, graph, 0);
                for (int n = 0; n < kLaunches; ++n) cudaGraphLaunch(made, stream);
            } else {
                for (int n = 0; n < kLaunches; ++n) launch(counts, stream);
            }
            cudaStreamSynchronize(stream);
            if (apart) cudaMemcpy(ran[i], counts, 12, cudaMemcpyDefault);
        });
    for (auto &t : threads) t.join();
    if (!apart) cudaMemcpy(ran[0], shared, 12, cudaMemcpyDefault);
    for (int k = 0; k < 3; ++k) {
        unsigned sum = 0;
        for (auto &r : ran) sum += r[k];
        printf("%u ", sum);
    }
    puts(cudaDeviceSynchronize() == cudaSuccess ? "done" : "failed");
}

// launch_rates RATE SECONDS [NODES]     launches empty kernels for SECONDS, at RATE a second, or as fast as it can (0)
//
// With NODES, by a graph of that many kernels. It waits for the GPU each 1,024 launches. It prints the number of launches, the seconds
// until all kernels were over, and the seconds of CPU time that the process used.
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

__global__ void empty() {}

static void check(cudaError_t error) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s\n", cudaGetErrorString(error));
    exit(1);
}

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int main(int argc, char **argv) {
    const double rate = atof(argv[1]), seconds = atof(argv[2]);
    const long nodes = argc > 3 ? atol(argv[3]) : 0, each = nodes ? nodes : 1;
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    empty<<<1, 1, 0, stream>>>();
    cudaGraphExec_t graph = nullptr;
    if (nodes) {
        cudaGraph_t captured;
        check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (long n = 0; n < nodes; n++) empty<<<1, 1, 0, stream>>>();
        check(cudaStreamEndCapture(stream, &captured));
        check(cudaGraphInstantiate(&graph, captured, 0));
    }
    check(cudaStreamSynchronize(stream));
    const double begin = now();
    long launched = 0, waited = 0;
    while (now() - begin < seconds) {
        // Not after each launch, because a pause takes at least 50 us.
        while (rate && launched > rate * (now() - begin))
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        for (long n = 0; n < 64; n += each, launched += each) {
            if (nodes) check(cudaGraphLaunch(graph, stream));
            else empty<<<1, 1, 0, stream>>>();
        }
        if (launched - waited < 1024) continue;
        check(cudaStreamSynchronize(stream));
        waited = launched;
    }
    check(cudaStreamSynchronize(stream));
    const double took = now() - begin;
    rusage used;
    getrusage(RUSAGE_SELF, &used);
    const auto cpu = [](timeval t) { return t.tv_sec + t.tv_usec / 1e6; };
    fprintf(stderr, "rate %ld %f %f\n", launched, took, cpu(used.ru_utime) + cpu(used.ru_stime));
    return 0;
}

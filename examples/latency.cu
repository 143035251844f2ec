// latency [us]      default: 500; one thread each
//
// Kernels of known length in the order that a launch waits for: behind each other, behind a copy, behind an event of another stream,
// eight streams at once, a graph replayed, and a host that sleeps in between. Each kernel spins for that many microseconds
// (a tenth in the eight streams and the graph).
//
// Known answers: `second` waits for `first`, `consumer` for `producer` through an event, `filled` for a copy; `together` is
// launched 8 times and none waits; `step` runs 30 times, 10 replays of 3; `alone` 3 times and never waits.
#include <unistd.h>

#include "check.h"

__device__ long long now() {
    long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

__device__ void spin(long long *span, long long ns) {
    long long begin = now(), end = begin;
    while (end - begin < ns) end = now();
    span[0] = begin;
    span[1] = end;
}

__global__ void first(long long *span, long long ns) { spin(span, ns); }
__global__ void second(long long *span, long long ns) { spin(span, ns); }
__global__ void filled(long long *span, long long ns, const char *data) { spin(span, ns + data[0]); }
__global__ void producer(long long *span, long long ns) { spin(span, ns); }
__global__ void consumer(long long *span, long long ns) { spin(span, ns); }
__global__ void together(long long *span, long long ns) { spin(span, ns); }
__global__ void step(long long *span, long long ns) { spin(span, ns); }
__global__ void alone(long long *span, long long ns) { spin(span, ns); }

int main(int argc, char **argv) {
    constexpr int kStreams = 8, kSteps = 3, kReplays = 10;
    constexpr size_t kBytes = 1 << 20;
    const long long ns = argument(argc, argv, 1, 500) * 1000;
    long long *spans;  // of each kernel in turn: when it began, when it ended
    char *data, *host;
    CHECK(cudaMallocManaged(&spans, 64 * 2 * sizeof(long long)));
    CHECK(cudaMalloc(&data, kBytes));
    CHECK(cudaMallocHost(&host, kBytes));
    for (size_t i = 0; i < kBytes; i++) host[i] = 0;
    cudaStream_t stream[kStreams];
    for (auto &s : stream) CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    int used = 0;
    auto span = [&] { return spans + 2 * used++; };

    first<<<1, 1, 0, stream[0]>>>(span(), ns);
    second<<<1, 1, 0, stream[0]>>>(span(), ns);
    CHECK(cudaStreamSynchronize(stream[0]));

    CHECK(cudaMemcpyAsync(data, host, kBytes, cudaMemcpyHostToDevice, stream[0]));
    filled<<<1, 1, 0, stream[0]>>>(span(), ns, data);
    CHECK(cudaStreamSynchronize(stream[0]));

    cudaEvent_t done;
    CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    producer<<<1, 1, 0, stream[0]>>>(span(), ns);
    CHECK(cudaEventRecord(done, stream[0]));
    CHECK(cudaStreamWaitEvent(stream[1], done, 0));
    consumer<<<1, 1, 0, stream[1]>>>(span(), ns);
    CHECK(cudaDeviceSynchronize());

    for (auto &s : stream) together<<<1, 1, 0, s>>>(span(), ns / 10);
    CHECK(cudaDeviceSynchronize());

    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(stream[0], cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kSteps; i++) step<<<1, 1, 0, stream[0]>>>(span(), ns / 10);
    CHECK(cudaStreamEndCapture(stream[0], &graph));
    CHECK(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    for (int i = 0; i < kReplays; i++) CHECK(cudaGraphLaunch(exec, stream[0]));
    CHECK(cudaStreamSynchronize(stream[0]));

    for (int i = 0; i < 3; i++) {
        alone<<<1, 1, 0, stream[0]>>>(span(), ns);
        CHECK(cudaStreamSynchronize(stream[0]));
        usleep(2000);
    }

    long wrong = 0;
    for (int i = 0; i < used; i++) wrong += spans[2 * i + 1] - spans[2 * i] < ns / 10;
    auto follows = [&](int later, int earlier) { return spans[2 * later] >= spans[2 * earlier + 1]; };
    wrong += !follows(1, 0) + !follows(4, 3);  // second after first, consumer after producer
    for (int i = 0; i < kSteps - 1; i++) wrong += !follows(5 + kStreams + i + 1, 5 + kStreams + i);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaEventDestroy(done));
    for (auto &s : stream) CHECK(cudaStreamDestroy(s));
    CHECK(cudaFreeHost(host));
    CHECK(cudaFree(data));
    CHECK(cudaFree(spans));
    return verdict("latency", wrong);
}

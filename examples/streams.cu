// streams [streams [launches per stream]]      default: 4 5; 2 blocks of 32 threads
//
// Several streams, each with its own buffer, asynchronous copies and an event that another stream waits for.
//
// Known answers: `step` is launched streams * launches times (20), and each of its 64 threads runs that often;
// `gather` once. Every element of stream s ends as launches * (s + 1).
#include <vector>

#include "check.h"

constexpr int kBlocks = 2, kThreads = 32, kElements = kBlocks * kThreads;

__global__ void step(int *values, int amount) { values[blockIdx.x * blockDim.x + threadIdx.x] += amount; }

__global__ void gather(const int *values, int *sums, int streams) {
    int element = blockIdx.x * blockDim.x + threadIdx.x, sum = 0;
    for (int s = 0; s < streams; s++) sum += values[s * kElements + element];
    sums[element] = sum;
}

int main(int argc, char **argv) {
    const int streams = argument(argc, argv, 1, 4), launches = argument(argc, argv, 2, 5);
    int *values, *sums, *host;
    CHECK(cudaMalloc(&values, streams * kElements * sizeof(int)));
    CHECK(cudaMalloc(&sums, kElements * sizeof(int)));
    CHECK(cudaMallocHost(&host, (streams + 1) * kElements * sizeof(int)));
    std::vector<cudaStream_t> stream(streams);
    std::vector<cudaEvent_t> done(streams);
    cudaStream_t last;
    CHECK(cudaStreamCreateWithFlags(&last, cudaStreamNonBlocking));
    for (int s = 0; s < streams; s++) {
        int *mine = values + s * kElements;
        CHECK(cudaStreamCreate(&stream[s]));
        CHECK(cudaEventCreateWithFlags(&done[s], cudaEventDisableTiming));
        CHECK(cudaMemsetAsync(mine, 0, kElements * sizeof(int), stream[s]));
        for (int i = 0; i < launches; i++) step<<<kBlocks, kThreads, 0, stream[s]>>>(mine, s + 1);
        CHECK(cudaMemcpyAsync(host + s * kElements, mine, kElements * sizeof(int), cudaMemcpyDeviceToHost, stream[s]));
        CHECK(cudaEventRecord(done[s], stream[s]));
        CHECK(cudaStreamWaitEvent(last, done[s], 0));
    }
    gather<<<kBlocks, kThreads, 0, last>>>(values, sums, streams);
    int *total = host + streams * kElements;
    CHECK(cudaMemcpyAsync(total, sums, kElements * sizeof(int), cudaMemcpyDeviceToHost, last));
    CHECK(cudaStreamSynchronize(last));
    CHECK(cudaDeviceSynchronize());
    long wrong = 0;
    for (int i = 0; i < kElements; i++) {
        for (int s = 0; s < streams; s++) wrong += host[s * kElements + i] != launches * (s + 1);
        wrong += total[i] != launches * streams * (streams + 1) / 2;
    }
    for (int s = 0; s < streams; s++) {
        CHECK(cudaEventDestroy(done[s]));
        CHECK(cudaStreamDestroy(stream[s]));
    }
    CHECK(cudaStreamDestroy(last));
    CHECK(cudaFreeHost(host));
    CHECK(cudaFree(values));
    CHECK(cudaFree(sums));
    return verdict("streams", wrong);
}

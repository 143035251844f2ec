// steady: T threads launch kernels on streams of their own until standard input ends, each thread with events, copies and synchronizing
// as they come. A kernel adds 1 to each element; every result is checked. Prints "ready", and at the end "right", and the launches.
#include "check.h"

#include <atomic>
#include <thread>
#include <unistd.h>

__global__ void step(int *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += 1;
}

__global__ void shared_sum(const int *x, int *sum) {
    __shared__ int part[64];
    part[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
    __syncthreads();
    for (int width = 32; width; width /= 2) {
        if (threadIdx.x < width) part[threadIdx.x] += part[threadIdx.x + width];
        __syncthreads();
    }
    if (threadIdx.x == 0) atomicAdd(sum, part[0]);
}

int main(int count, char **words) {
    const int threads = count > 1 ? atoi(words[1]) : 2, n = 256;
    std::atomic<bool> over{false};
    std::atomic<long> launches{0};
    std::atomic<int> under_way{0};
    std::vector<std::thread> all;
    OK(hipSetDeviceFlags(hipDeviceScheduleBlockingSync));
    for (int t = 0; t < threads; t++)
        all.emplace_back([&, t] {
            hipStream_t stream;
            hipEvent_t event;
            OK(hipStreamCreate(&stream));
            OK(hipEventCreate(&event));
            Buffer<int> data(std::vector<int>(n, 0)), sum(std::vector<int>(1, 0));
            std::vector<int> host(n);
            int expected = 0;
            for (int round = 0; !over; round++) {
                const int steps = 1 + (round + t) % 7;
                for (int k = 0; k < steps; k++) {
                    step<<<n / 64, 64, 0, stream>>>(data, n);
                    if (k == 2) OK(hipEventRecord(event, stream));
                }
                OK(hipMemsetAsync(sum, 0, sizeof(int), stream));
                shared_sum<<<n / 64, 64, 0, stream>>>(data, sum);
                expected += steps;
                launches += steps + 1;
                if (round % 3 == 0) OK(hipStreamWaitEvent(stream, event, 0));
                int got = 0;
                OK(hipMemcpyAsync(host.data(), data, n * sizeof(int), hipMemcpyDeviceToHost, stream));
                OK(hipMemcpyAsync(&got, sum, sizeof got, hipMemcpyDeviceToHost, stream));
                OK(hipStreamSynchronize(stream));
                for (int x : host) CHECK(x == expected);
                CHECK(got == n * expected);
                if (round % 16 == 15) usleep(500);
                if (round == 15) ++under_way;
            }
            OK(hipStreamDestroy(stream));
        });
    while (under_way < threads) usleep(1000);
    puts("ready");
    fflush(stdout);
    char byte;
    while (read(0, &byte, 1) > 0) continue;
    over = true;
    for (std::thread &thread : all) thread.join();
    printf("right %ld\n", launches.load());
}

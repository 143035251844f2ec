// Streams, events, graphs, callbacks.
#include "check.h"

__global__ void scale(int *data, int n, int factor) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        data[i] = data[i] * factor + 1;
}
__global__ void wait_for(volatile int *flag) {
    while (*flag == 0) {
    }
}
__global__ void set(volatile int *flag) { *flag = 1; }

static int expected(int value, std::initializer_list<int> factors) {
    for (int factor : factors) value = value * factor + 1;
    return value;
}

int main() {
    const int n = 3000;
    std::vector<int> start(n);
    std::iota(start.begin(), start.end(), 0);

    // Four streams with their own work; each waits for the one before.
    hipStream_t streams[4];
    hipEvent_t events[4], begin, end;
    OK(hipEventCreate(&begin));
    OK(hipEventCreate(&end));
    Buffer<int> data(start);
    OK(hipEventRecord(begin, nullptr));
    for (int i = 0; i < 4; i++) {
        OK(hipStreamCreateWithFlags(&streams[i], hipStreamNonBlocking));
        OK(hipEventCreateWithFlags(&events[i], hipEventDisableTiming));
    }
    OK(hipDeviceSynchronize());
    for (int i = 0; i < 4; i++) {
        if (i > 0) OK(hipStreamWaitEvent(streams[i], events[i - 1], 0));
        scale<<<4, 64, 0, streams[i]>>>(data, n, i + 2);
        OK(hipEventRecord(events[i], streams[i]));
    }
    OK(hipEventSynchronize(events[3]));
    std::vector<int> got = data.read();
    for (int i = 0; i < n; i++) CHECK(got[i] == expected(i, {2, 3, 4, 5}));

    // A kernel that waits for another stream's kernel.
    int *flag;
    OK(hipHostMalloc(reinterpret_cast<void **>(&flag), sizeof(int)));
    *flag = 0;
    wait_for<<<1, 64, 0, streams[0]>>>(flag);
    CHECK(hipStreamQuery(streams[0]) == hipErrorNotReady);
    set<<<1, 1, 0, streams[1]>>>(flag);
    OK(hipStreamSynchronize(streams[0]));

    // A callback runs after the work before it and before the work behind it.
    static int calls = 0;
    *flag = 0;
    OK(hipStreamAddCallback(streams[2], [](hipStream_t, hipError_t, void *) { calls++; }, nullptr, 0));
    scale<<<4, 64, 0, streams[2]>>>(data, n, 1);
    OK(hipStreamSynchronize(streams[2]));
    CHECK(calls == 1);

    OK(hipEventRecord(end, nullptr));
    OK(hipEventSynchronize(end));
    float milliseconds = -1;
    OK(hipEventElapsedTime(&milliseconds, begin, end));
    CHECK(milliseconds > 0 && milliseconds < 60000);

    // A graph, captured and launched three times.
    OK(hipMemcpy(data, start.data(), n * sizeof(int), hipMemcpyHostToDevice));
    hipGraph_t graph;
    hipGraphExec_t executable;
    OK(hipStreamBeginCapture(streams[3], hipStreamCaptureModeGlobal));
    scale<<<4, 64, 0, streams[3]>>>(data, n, 2);
    scale<<<4, 64, 0, streams[3]>>>(data, n, 3);
    OK(hipStreamEndCapture(streams[3], &graph));
    OK(hipGraphInstantiate(&executable, graph, nullptr, nullptr, 0));
    for (int i = 0; i < 3; i++) OK(hipGraphLaunch(executable, streams[3]));
    OK(hipStreamSynchronize(streams[3]));
    got = data.read();
    for (int i = 0; i < n; i++) CHECK(got[i] == expected(i, {2, 3, 2, 3, 2, 3}));
    OK(hipGraphExecDestroy(executable));
    OK(hipGraphDestroy(graph));

    for (int i = 0; i < 4; i++) OK(hipStreamDestroy(streams[i]));
    // Memory in the order of a stream, which is not destroyed: after hipFreeAsync, HIP 5.2 never returns from that call
    // (Heap::RemoveStream does not advance its iterator). It crashes for the null stream, too.
    hipStream_t pool;
    int *pooled;
    OK(hipStreamCreate(&pool));
    OK(hipMallocAsync(reinterpret_cast<void **>(&pooled), n * sizeof(int), pool));
    OK(hipMemcpyAsync(pooled, start.data(), n * sizeof(int), hipMemcpyHostToDevice, pool));
    scale<<<4, 64, 0, pool>>>(pooled, n, 9);
    OK(hipMemcpyAsync(got.data(), pooled, n * sizeof(int), hipMemcpyDeviceToHost, pool));
    OK(hipFreeAsync(pooled, pool));
    OK(hipStreamSynchronize(pool));
    for (int i = 0; i < n; i++) CHECK(got[i] == expected(i, {9}));
    puts("streams are right");
}

// Streams that overlap, events, callbacks, capture and graphs, ordered allocation.
#include "check.h"

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

__global__ void wait_for(volatile int *flag) {
    while (*flag == 0) {
    }
}

__global__ void set(int *where, int value) { *where = value; }

__global__ void add(int *where, int value) { *where += value; }

__global__ void fill(int *data, int n, int value) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) data[i] = value;
}

static std::atomic<int> called{0};
static void CUDART_CB host_function(void *data) { called += *static_cast<int *>(data); }
static void CUDART_CB callback(cudaStream_t, cudaError_t status, void *data) {
    if (status == cudaSuccess) called += *static_cast<int *>(data);
    if (cudaDeviceSynchronize() != cudaErrorNotPermitted) called += 1000;
}

// Streams and events that are destroyed during a capture leave their work in it. A stream that was not joined before is an
// error at the end.
static void destroyed_in_capture(cudaStream_t first, int *cell) {
    for (bool join : {true, false}) {
        cudaStream_t forked;
        cudaEvent_t begin, end;
        cudaGraph_t graph = nullptr;
        CHECK(cudaStreamBeginCapture(first, cudaStreamCaptureModeGlobal));
        CHECK(cudaStreamCreate(&forked));
        CHECK(cudaEventCreate(&begin));
        CHECK(cudaEventCreate(&end));
        set<<<1, 1, 0, first>>>(cell, 20);
        CHECK(cudaEventRecord(begin, first));
        CHECK(cudaStreamWaitEvent(forked, begin, 0));
        add<<<1, 1, 0, forked>>>(cell, 3);
        CHECK(cudaEventRecord(end, forked));
        if (join) CHECK(cudaStreamWaitEvent(first, end, 0));
        CHECK(cudaStreamDestroy(forked));
        CHECK(cudaEventDestroy(begin));
        CHECK(cudaEventDestroy(end));
        add<<<1, 1, 0, first>>>(cell, 4);
        if (!join) {
            FAILS(cudaStreamEndCapture(first, &graph), cudaErrorStreamCaptureUnjoined);
            REQUIRE(graph == nullptr);
            continue;
        }
        CHECK(cudaStreamEndCapture(first, &graph));
        cudaGraphExec_t exec;
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        CHECK(cudaGraphDestroy(graph));
        CHECK(cudaGraphLaunch(exec, first));
        CHECK(cudaStreamSynchronize(first));
        CHECK(cudaGraphExecDestroy(exec));
        int host = 0;
        CHECK(cudaMemcpy(&host, cell, sizeof host, cudaMemcpyDeviceToHost));
        REQUIRE(host == 27);
    }
}

int main() {
    int *flag = nullptr, *cell = nullptr, host = 0, three = 3;
    CHECK(cudaMallocHost(&flag, sizeof(int)));
    CHECK(cudaMalloc(&cell, sizeof(int)));
    cudaStream_t first, second;
    CHECK(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
    CHECK(cudaStreamCreate(&second));

    // a kernel that waits for another stream's kernel
    *flag = 0;
    wait_for<<<1, 1, 0, first>>>(flag);
    CHECK(cudaGetLastError());
    REQUIRE(cudaStreamQuery(first) == cudaErrorNotReady);
    CHECK(cudaGetLastError());
    set<<<1, 1, 0, second>>>(flag, 1);
    CHECK(cudaStreamSynchronize(first));
    CHECK(cudaStreamQuery(first));

    // the legacy default stream waits for blocking streams, and they for it
    *flag = 0;
    wait_for<<<1, 1, 0, second>>>(flag);
    set<<<1, 1>>>(cell, 1);  // must wait
    add<<<1, 1, 0, second>>>(cell, 10);
    add<<<1, 1, 0, first>>>(flag, 1);  // not blocking: runs at once
    CHECK(cudaMemcpy(&host, cell, sizeof host, cudaMemcpyDeviceToHost));
    REQUIRE(host == 11);

    // events
    cudaEvent_t before, after, untimed;
    CHECK(cudaEventCreate(&before));
    CHECK(cudaEventCreate(&after));
    CHECK(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
    CHECK(cudaEventQuery(before));  // never recorded
    *flag = 0;
    CHECK(cudaEventRecord(before, first));
    wait_for<<<1, 1, 0, first>>>(flag);
    CHECK(cudaEventRecord(after, first));
    CHECK(cudaEventRecord(untimed, first));
    REQUIRE(cudaEventQuery(after) == cudaErrorNotReady);
    CHECK(cudaGetLastError());
    float milliseconds = -1;
    FAILS(cudaEventElapsedTime(&milliseconds, before, after), cudaErrorNotReady);
    CHECK(cudaStreamWaitEvent(second, untimed, 0));
    set<<<1, 1, 0, second>>>(cell, 77);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    *static_cast<volatile int *>(flag) = 1;
    CHECK(cudaEventSynchronize(after));
    CHECK(cudaEventElapsedTime(&milliseconds, before, after));
    REQUIRE(milliseconds > 10 && milliseconds < 10000);
    FAILS(cudaEventElapsedTime(&milliseconds, before, untimed), cudaErrorInvalidResourceHandle);
    CHECK(cudaStreamSynchronize(second));

    // a stream is idle when its last event is done
    for (int i = 0; i < 300; i++) {
        add<<<1, 1, 0, first>>>(cell, 1);
        CHECK(cudaEventRecord(after, first));
        CHECK(cudaEventSynchronize(after));
        CHECK(cudaStreamQuery(first));
    }

    // calls on the host, in order
    CHECK(cudaLaunchHostFunc(first, host_function, &three));
    CHECK(cudaStreamAddCallback(first, callback, &three, 0));
    CHECK(cudaStreamSynchronize(first));
    REQUIRE(called == 6);

    // asynchronous copies of pageable memory may reuse it at once
    std::vector<int> pageable(1000, 4), back(1000, 0);
    int *array = nullptr;
    CHECK(cudaMallocAsync(&array, 1000 * sizeof(int), first));
    CHECK(cudaMemcpyAsync(array, pageable.data(), 1000 * sizeof(int), cudaMemcpyHostToDevice, first));
    pageable.assign(1000, 5);
    CHECK(cudaMemcpyAsync(back.data(), array, 1000 * sizeof(int), cudaMemcpyDeviceToHost, first));
    REQUIRE(back[999] == 4);
    CHECK(cudaMemsetAsync(array, 0, 1000 * sizeof(int), first));
    CHECK(cudaFreeAsync(array, first));
    CHECK(cudaStreamSynchronize(first));

    // capture with a fork and a join, and replays
    int *data = nullptr;
    CHECK(cudaMalloc(&data, 100 * sizeof(int)));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaMemset(cell, 0, sizeof(int)));
    CHECK(cudaStreamBeginCapture(first, cudaStreamCaptureModeGlobal));
    add<<<1, 1, 0, first>>>(cell, 1);
    CHECK(cudaEventRecord(untimed, first));
    CHECK(cudaStreamWaitEvent(second, untimed, 0));
    fill<<<1, 32, 0, second>>>(data, 100, 9);
    CHECK(cudaEventRecord(after, second));
    CHECK(cudaStreamWaitEvent(first, after, 0));
    CHECK(cudaMemcpyAsync(data + 1, cell, sizeof(int), cudaMemcpyDeviceToDevice, first));
    cudaStreamCaptureStatus status;
    CHECK(cudaStreamIsCapturing(second, &status));
    REQUIRE(status == cudaStreamCaptureStatusActive);
    CHECK(cudaStreamEndCapture(first, &graph));
    size_t nodes = 0, edges = 0;
    CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
    CHECK(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &edges));
    REQUIRE(nodes == 3 && edges == 3);
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 5; i++) CHECK(cudaGraphLaunch(exec, second));
    CHECK(cudaStreamSynchronize(second));
    CHECK(cudaMemcpy(back.data(), data, 100 * sizeof(int), cudaMemcpyDeviceToHost));
    REQUIRE(back[0] == 9 && back[1] == 5 && back[99] == 9);

    // parameters of a captured kernel, read and replaced
    std::vector<cudaGraphNode_t> list(nodes);
    CHECK(cudaGraphGetRootNodes(graph, list.data(), &nodes));
    REQUIRE(nodes == 1);
    cudaKernelNodeParams parameters;
    CHECK(cudaGraphKernelNodeGetParams(list[0], &parameters));
    REQUIRE(parameters.func == reinterpret_cast<void *>(&add));
    REQUIRE(*static_cast<int *>(parameters.kernelParams[1]) == 1);
    int step = 100;
    void *arguments[] = {&cell, &step};
    parameters.kernelParams = arguments;
    CHECK(cudaGraphExecKernelNodeSetParams(exec, list[0], &parameters));
    CHECK(cudaGraphLaunch(exec, second));
    CHECK(cudaStreamSynchronize(second));
    CHECK(cudaMemcpy(&host, cell, sizeof host, cudaMemcpyDeviceToHost));
    REQUIRE(host == 105);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));

    // what capture forbids ends it
    void *more = nullptr;
    CHECK(cudaStreamBeginCapture(first, cudaStreamCaptureModeGlobal));
    add<<<1, 1, 0, first>>>(cell, 1);
    FAILS(cudaMalloc(&more, 100), cudaErrorStreamCaptureUnsupported);
    FAILS(cudaStreamEndCapture(first, &graph), cudaErrorStreamCaptureInvalidated);
    REQUIRE(graph == nullptr);
    CHECK(cudaStreamBeginCapture(first, cudaStreamCaptureModeRelaxed));
    CHECK(cudaMalloc(&more, 100));
    CHECK(cudaStreamEndCapture(first, &graph));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamBeginCapture(second, cudaStreamCaptureModeThreadLocal));
    add<<<1, 1>>>(cell, 1);  // the legacy stream would have to wait for a captured one
    FAILS(cudaGetLastError(), cudaErrorStreamCaptureImplicit);
    FAILS(cudaStreamEndCapture(second, &graph), cudaErrorStreamCaptureInvalidated);
    CHECK(cudaStreamBeginCapture(first, cudaStreamCaptureModeGlobal));
    CHECK(cudaEventRecord(untimed, first));
    CHECK(cudaStreamWaitEvent(second, untimed, 0));
    add<<<1, 1, 0, second>>>(cell, 1);
    FAILS(cudaStreamEndCapture(first, &graph), cudaErrorStreamCaptureUnjoined);
    destroyed_in_capture(first, cell);

    // a graph made by hand
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t clear, kernel, fetch;
    cudaMemsetParams zero = {};
    zero.dst = cell;
    zero.elementSize = 4;
    zero.width = 1;
    zero.height = 1;
    zero.value = 40;
    CHECK(cudaGraphAddMemsetNode(&clear, graph, nullptr, 0, &zero));
    parameters = {};
    parameters.func = reinterpret_cast<void *>(&add);
    parameters.gridDim = dim3(1);
    parameters.blockDim = dim3(1);
    step = 2;
    parameters.kernelParams = arguments;
    CHECK(cudaGraphAddKernelNode(&kernel, graph, &clear, 1, &parameters));
    CHECK(cudaGraphAddMemcpyNode1D(&fetch, graph, &kernel, 1, &host, cell, sizeof host, cudaMemcpyDeviceToHost));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphLaunch(exec, nullptr));
    CHECK(cudaDeviceSynchronize());
    REQUIRE(host == 42);

    // a destroyed stream finishes its work; many streams at once
    std::vector<cudaStream_t> many(40);
    CHECK(cudaMemset(data, 0, 100 * sizeof(int)));
    for (size_t i = 0; i < many.size(); i++) {
        CHECK(cudaStreamCreate(&many[i]));
        set<<<1, 1, 0, many[i]>>>(data + i, static_cast<int>(i) + 1);
        CHECK(cudaStreamDestroy(many[i]));
    }
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(back.data(), data, 40 * sizeof(int), cudaMemcpyDeviceToHost));
    for (int i = 0; i < 40; i++) REQUIRE(back[i] == i + 1);
    FAILS(cudaStreamSynchronize(many[0]), cudaErrorInvalidResourceHandle);

    // threads that launch side by side
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; t++)
        threads.emplace_back([t, data] {
            for (int i = 0; i < 50; i++) add<<<1, 1, 0, cudaStreamPerThread>>>(data + 50 + t, 1);
            CHECK(cudaStreamSynchronize(cudaStreamPerThread));
        });
    for (std::thread &thread : threads) thread.join();
    CHECK(cudaMemcpy(back.data(), data + 50, 4 * sizeof(int), cudaMemcpyDeviceToHost));
    for (int t = 0; t < 4; t++) REQUIRE(back[t] == 50);
    puts("streams ok");
    return 0;
}

// Graphs: every kind of node, made by hand and by capture; reading, replacing, updating, cloning; branches beside each other.
#include "check.h"

#include <atomic>
#include <thread>
#include <vector>

__global__ void set(int *where, int value) { *where = value; }
__global__ void add(int *where, int value) { *where += value; }
__global__ void scale(int *where, int value) { *where *= value; }
__global__ void raise_flag(volatile int *flag, int value) { *flag = value; }
__global__ void meet(volatile int *mine, volatile int *other) {  // both must run at once
    *mine = 1;
    while (*other == 0) {
    }
}

__device__ int counter;
static std::atomic<int> called{0}, destroyed{0};
static void CUDART_CB call(void *data) { called += *static_cast<int *>(data); }
static void CUDART_CB destroy(void *) { destroyed++; }

static cudaStream_t first, second;
static int *cell, *host;

static int value_of(int *where) {
    int value = 0;
    CHECK(cudaMemcpy(&value, where, sizeof value, cudaMemcpyDeviceToHost));
    return value;
}

static unsigned long long graph_memory(cudaGraphMemAttributeType which) {
    unsigned long long bytes = 1;
    CHECK(cudaDeviceGetGraphMemAttribute(0, which, &bytes));
    return bytes;
}

static cudaKernelNodeParams kernel(void *function, void **arguments) {
    cudaKernelNodeParams made = {};
    made.func = function;
    made.gridDim = made.blockDim = dim3(1, 1, 1);
    made.kernelParams = arguments;
    return made;
}

// set(4) → { memset of another cell, host call } → add(3) → empty → child graph that scales by 10 → copy to the host
static void by_hand() {
    cudaGraph_t graph, child, clone;
    cudaGraphExec_t exec;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphCreate(&child, 0));
    int four = 4, three = 3, ten = 10, one = 1;
    void *to_four[] = {&cell, &four}, *by_three[] = {&cell, &three}, *by_ten[] = {&cell, &ten};
    cudaGraphNode_t setting, clearing, calling, adding, nothing, scaling, inner, fetching;
    cudaKernelNodeParams parameters = kernel((void *)set, to_four);
    CHECK(cudaGraphAddKernelNode(&setting, graph, nullptr, 0, &parameters));
    four = -1;  // the node has its own copy
    cudaMemsetParams fill = {};
    fill.dst = cell + 1;
    fill.elementSize = 4;
    fill.width = fill.height = 1;
    fill.value = 0x01020304;
    CHECK(cudaGraphAddMemsetNode(&clearing, graph, &setting, 1, &fill));
    cudaHostNodeParams calls = {call, &one};
    CHECK(cudaGraphAddHostNode(&calling, graph, &setting, 1, &calls));
    parameters = kernel((void *)add, by_three);
    cudaGraphNode_t both[] = {clearing, calling};
    CHECK(cudaGraphAddKernelNode(&adding, graph, both, 2, &parameters));
    CHECK(cudaGraphAddEmptyNode(&nothing, graph, &adding, 1));
    parameters = kernel((void *)scale, by_ten);
    CHECK(cudaGraphAddKernelNode(&inner, child, nullptr, 0, &parameters));
    CHECK(cudaGraphAddChildGraphNode(&scaling, graph, &nothing, 1, child));
    CHECK(cudaGraphAddMemcpyNode1D(&fetching, graph, &scaling, 1, host, cell, 2 * sizeof(int),
                                   cudaMemcpyDeviceToHost));

    size_t count = 0, edges = 0;
    CHECK(cudaGraphGetNodes(graph, nullptr, &count));
    CHECK(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &edges));
    REQUIRE(count == 7 && edges == 7);
    std::vector<cudaGraphNode_t> list(9, setting);
    count = 9;
    CHECK(cudaGraphNodeGetDependencies(adding, list.data(), nullptr, &count));
    REQUIRE(count == 2 && list[0] == clearing && list[1] == calling && list[2] == nullptr);
    count = 9;
    CHECK(cudaGraphNodeGetDependentNodes(setting, list.data(), nullptr, &count));
    REQUIRE(count == 2);
    cudaGraphNodeType type;
    CHECK(cudaGraphNodeGetType(scaling, &type));
    REQUIRE(type == cudaGraphNodeTypeGraph);
    FAILS(cudaGraphAddDependencies(graph, &setting, &clearing, nullptr, 1),
          cudaErrorInvalidValue);  // is there
    CHECK(cudaGraphAddDependencies(graph, &clearing, &calling, nullptr, 1));
    CHECK(cudaGraphRemoveDependencies(graph, &clearing, &calling, nullptr, 1));
    FAILS(cudaGraphRemoveDependencies(graph, &clearing, &calling, nullptr, 1), cudaErrorInvalidValue);
    CHECK(cudaGraphAddDependencies(graph, &adding, &setting, nullptr, 1));
    FAILS(cudaGraphInstantiate(&exec, graph, 0), cudaErrorInvalidValue);  // a circle
    CHECK(cudaGraphRemoveDependencies(graph, &adding, &setting, nullptr, 1));

    CHECK(cudaGraphInstantiateWithFlags(&exec, graph, cudaGraphInstantiateFlagAutoFreeOnLaunch));
    unsigned long long flags = 0;
    CHECK(cudaGraphExecGetFlags(exec, &flags));
    REQUIRE(flags == cudaGraphInstantiateFlagAutoFreeOnLaunch);
    CHECK(cudaGraphUpload(exec, first));
    CHECK(cudaGraphLaunch(exec, first));
    CHECK(cudaStreamSynchronize(first));
    REQUIRE(host[0] == 70 && host[1] == 0x01020304 && called == 1);

    // what was given is what is read
    CHECK(cudaGraphKernelNodeGetParams(adding, &parameters));
    REQUIRE(parameters.func == (void *)add && *static_cast<int *>(parameters.kernelParams[1]) == 3);
    cudaMemcpy3DParms copy = {};
    CHECK(cudaGraphMemcpyNodeGetParams(fetching, &copy));
    REQUIRE(copy.dstPtr.ptr == host && copy.srcPtr.ptr == cell && copy.kind == cudaMemcpyDeviceToHost);
    REQUIRE(copy.extent.width == 2 * sizeof(int));
    CHECK(cudaGraphMemcpyNodeSetParams(fetching, &copy));
    CHECK(cudaGraphHostNodeGetParams(calling, &calls));
    REQUIRE(calls.fn == call && calls.userData == &one);
    CHECK(cudaGraphMemsetNodeGetParams(clearing, &fill));
    REQUIRE(fill.value == 0x01020304 && fill.dst == cell + 1);
    cudaGraph_t embedded;
    CHECK(cudaGraphChildGraphNodeGetGraph(scaling, &embedded));
    REQUIRE(embedded != child);

    // changes of the graph change what is instantiated later, changes of an executable graph itself what it does from now on
    int five = 5;
    void *by_five[] = {&cell, &five};
    parameters = kernel((void *)add, by_five);
    CHECK(cudaGraphKernelNodeSetParams(adding, &parameters));
    CHECK(cudaGraphLaunch(exec, first));
    CHECK(cudaStreamSynchronize(first));
    REQUIRE(host[0] == 70);
    CHECK(cudaGraphExecKernelNodeSetParams(exec, adding, &parameters));
    fill.value = 9;
    CHECK(cudaGraphExecMemsetNodeSetParams(exec, clearing, &fill));
    int hundred = 100;
    calls.userData = &hundred;
    CHECK(cudaGraphExecHostNodeSetParams(exec, calling, &calls));
    CHECK(cudaGraphExecMemcpyNodeSetParams1D(exec, fetching, host + 2, cell, 2 * sizeof(int),
                                             cudaMemcpyDeviceToHost));
    called = 0;
    CHECK(cudaGraphLaunch(exec, first));
    CHECK(cudaStreamSynchronize(first));
    REQUIRE(host[0] == 70 && host[2] == 90 && host[3] == 9 && called == 100);
    CHECK(cudaGraphNodeSetEnabled(exec, adding, 0));
    unsigned enabled = 7;
    CHECK(cudaGraphNodeGetEnabled(exec, adding, &enabled));
    REQUIRE(enabled == 0);
    FAILS(cudaGraphNodeSetEnabled(exec, scaling, 0), cudaErrorInvalidValue);
    CHECK(cudaGraphLaunch(exec, first));
    CHECK(cudaStreamSynchronize(first));
    REQUIRE(host[2] == 40);
    int two = 2;
    void *by_two[] = {&cell, &two};
    parameters = kernel((void *)scale, by_two);
    CHECK(cudaGraphKernelNodeSetParams(inner, &parameters));
    CHECK(cudaGraphExecChildGraphNodeSetParams(exec, scaling, child));
    CHECK(cudaGraphLaunch(exec, first));
    CHECK(cudaStreamSynchronize(first));
    REQUIRE(host[2] == 8);

    // a clone is a graph of its own
    CHECK(cudaGraphClone(&clone, graph));
    cudaGraphNode_t twin;
    CHECK(cudaGraphNodeFindInClone(&twin, adding, clone));
    REQUIRE(twin != adding);
    CHECK(cudaGraphDestroyNode(twin));
    CHECK(cudaGraphGetNodes(graph, nullptr, &count));
    REQUIRE(count == 7);
    CHECK(cudaGraphGetNodes(clone, nullptr, &count));
    REQUIRE(count == 6);

    // updates: the same shape is taken over, another is refused with the reason
    CHECK(cudaGraphExecUpdate(exec, graph, nullptr));
    CHECK(cudaGraphNodeSetEnabled(exec, adding, 1));  // nodes are still known by those it was made from
    CHECK(cudaGraphLaunch(exec, second));
    CHECK(cudaStreamSynchronize(second));
    REQUIRE(host[0] == (4 + 5) * 10);
    cudaGraphExecUpdateResultInfo info;
    FAILS(cudaGraphExecUpdate(exec, clone, &info), cudaErrorGraphExecUpdateFailure);
    REQUIRE(info.result == cudaGraphExecUpdateErrorTopologyChanged);
    cudaGraphNode_t other;
    CHECK(cudaGraphNodeFindInClone(&twin, fetching, clone));
    CHECK(cudaGraphDestroyNode(twin));
    CHECK(cudaGraphNodeFindInClone(&twin, clearing, clone));
    CHECK(cudaGraphDestroyNode(twin));
    CHECK(cudaGraphNodeFindInClone(&twin, scaling, clone));
    CHECK(cudaGraphAddEmptyNode(&other, clone, nullptr, 0));
    CHECK(cudaGraphAddEmptyNode(&other, clone, nullptr, 0));
    CHECK(cudaGraphAddEmptyNode(&other, clone, nullptr, 0));
    FAILS(cudaGraphExecUpdate(exec, clone, &info), cudaErrorGraphExecUpdateFailure);
    REQUIRE(info.result == cudaGraphExecUpdateErrorNodeTypeChanged ||
            info.result == cudaGraphExecUpdateErrorTopologyChanged);
    REQUIRE(info.errorNode != nullptr);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(clone));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaGraphDestroy(child));
    FAILS(cudaGraphNodeGetType(adding, &type), cudaErrorInvalidValue);
}

// Nodes that do not depend on each other run at once; replays of one executable graph never do.
static void branches() {
    int *flags = nullptr, zero = 0;
    CHECK(cudaMallocHost(&flags, 2 * sizeof(int)));
    int *a = flags, *b = flags + 1;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaGraphCreate(&graph, 0));
    void *one[] = {&a, &b}, *other[] = {&b, &a};
    cudaGraphNode_t clear[2], pair[2], last;
    void *clear_a[] = {&a, &zero}, *clear_b[] = {&b, &zero};
    cudaKernelNodeParams parameters = kernel((void *)raise_flag, clear_a);
    CHECK(cudaGraphAddKernelNode(&clear[0], graph, nullptr, 0, &parameters));
    parameters = kernel((void *)raise_flag, clear_b);
    CHECK(cudaGraphAddKernelNode(&clear[1], graph, &clear[0], 1, &parameters));
    parameters = kernel((void *)meet, one);
    CHECK(cudaGraphAddKernelNode(&pair[0], graph, &clear[1], 1, &parameters));
    parameters = kernel((void *)meet, other);
    CHECK(cudaGraphAddKernelNode(&pair[1], graph, &clear[1], 1, &parameters));
    int step = 1;
    void *count[] = {&cell, &step};
    parameters = kernel((void *)add, count);
    CHECK(cudaGraphAddKernelNode(&last, graph, pair, 2, &parameters));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaMemset(cell, 0, sizeof(int)));
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < 10; i++) CHECK(cudaGraphLaunch(exec, i % 2 ? first : second));
    CHECK(cudaDeviceSynchronize());
    REQUIRE(value_of(cell) == 10);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaFreeHost(flags));
}

static void events_and_memory() {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t ready, done, spare;
    CHECK(cudaEventCreate(&ready));
    CHECK(cudaEventCreate(&done));
    CHECK(cudaEventCreate(&spare));
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t waiting, adding, recording, allocating, using_it, freeing;
    CHECK(cudaGraphAddEventWaitNode(&waiting, graph, nullptr, 0, spare));
    cudaEvent_t found;
    CHECK(cudaGraphEventWaitNodeGetEvent(waiting, &found));
    REQUIRE(found == spare);
    CHECK(cudaGraphEventWaitNodeSetEvent(waiting, ready));
    int seven = 7;
    void *by_seven[] = {&cell, &seven};
    cudaGraphNodeParams any = {};
    any.type = cudaGraphNodeTypeKernel;
    any.kernel.func = (void *)add;
    any.kernel.gridDim = any.kernel.blockDim = dim3(1, 1, 1);
    any.kernel.kernelParams = by_seven;
    CHECK(cudaGraphAddNode(&adding, graph, &waiting, nullptr, 1, &any));
    CHECK(cudaGraphAddEventRecordNode(&recording, graph, &adding, 1, spare));
    CHECK(cudaGraphEventRecordNodeSetEvent(recording, done));
    CHECK(cudaGraphEventRecordNodeGetEvent(recording, &found));
    REQUIRE(found == done);
    cudaMemAllocNodeParams memory = {};
    memory.poolProps.allocType = cudaMemAllocationTypePinned;
    memory.poolProps.location.type = cudaMemLocationTypeDevice;
    memory.bytesize = 4096;
    CHECK(cudaGraphAddMemAllocNode(&allocating, graph, &recording, 1, &memory));
    REQUIRE(memory.dptr != nullptr);
    REQUIRE(graph_memory(cudaGraphMemAttrUsedMemCurrent) == 4096);
    int *inside = static_cast<int *>(memory.dptr);
    void *to_seven[] = {&inside, &seven};
    cudaKernelNodeParams parameters = kernel((void *)set, to_seven);
    CHECK(cudaGraphAddKernelNode(&using_it, graph, &allocating, 1, &parameters));
    CHECK(cudaGraphAddMemFreeNode(&freeing, graph, &using_it, 1, inside));
    FAILS(cudaGraphAddMemFreeNode(&freeing, graph, &using_it, 1, cell), cudaErrorInvalidValue);
    CHECK(cudaGraphInstantiate(&exec, graph, 0));

    CHECK(cudaMemsetAsync(cell, 0, sizeof(int), second));
    CHECK(cudaEventRecord(ready, second));
    CHECK(cudaGraphLaunch(exec, first));
    CHECK(cudaStreamWaitEvent(second, done, 0));  // recorded by this replay
    add<<<1, 1, 0, second>>>(cell, 100);
    CHECK(cudaEventSynchronize(done));
    CHECK(cudaStreamSynchronize(second));
    REQUIRE(value_of(cell) == 107);
    any.kernel.func = (void *)scale;
    CHECK(cudaGraphExecNodeSetParams(exec, adding, &any));
    CHECK(cudaGraphNodeSetParams(adding, &any));
    any.type = cudaGraphNodeTypeEmpty;
    FAILS(cudaGraphExecNodeSetParams(exec, adding, &any), cudaErrorInvalidValue);
    CHECK(cudaGraphLaunch(exec, first));
    CHECK(cudaEventSynchronize(done));
    REQUIRE(value_of(cell) == 749);
    CHECK(cudaStreamSynchronize(first));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));

    // memory that a capture allocates
    int *taken = nullptr;
    CHECK(cudaStreamBeginCapture(first, cudaStreamCaptureModeGlobal));
    CHECK(cudaMallocAsync(&taken, 1000, first));
    set<<<1, 1, 0, first>>>(taken, 21);
    CHECK(cudaMemcpyAsync(cell, taken, sizeof(int), cudaMemcpyDeviceToDevice, first));
    CHECK(cudaFreeAsync(taken, first));
    CHECK(cudaStreamEndCapture(first, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    for (int i = 0; i < 3; i++) CHECK(cudaGraphLaunch(exec, first));
    CHECK(cudaStreamSynchronize(first));
    REQUIRE(value_of(cell) == 21);
    REQUIRE(graph_memory(cudaGraphMemAttrReservedMemCurrent) == 1000);
    CHECK(cudaGraphExecDestroy(exec));
    REQUIRE(graph_memory(cudaGraphMemAttrReservedMemCurrent) == 0);
    REQUIRE(graph_memory(cudaGraphMemAttrUsedMemHigh) == 4096);
    unsigned long long zero = 0;
    CHECK(cudaDeviceSetGraphMemAttribute(0, cudaGraphMemAttrUsedMemHigh, &zero));
    REQUIRE(graph_memory(cudaGraphMemAttrUsedMemHigh) == 0);
}

static void captures() {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    // into a graph that is there, behind one of its nodes
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t setting;
    int one = 1;
    void *to_one[] = {&cell, &one};
    cudaKernelNodeParams parameters = kernel((void *)set, to_one);
    CHECK(cudaGraphAddKernelNode(&setting, graph, nullptr, 0, &parameters));
    CHECK(cudaStreamBeginCaptureToGraph(first, graph, &setting, nullptr, 1, cudaStreamCaptureModeRelaxed));
    add<<<1, 1, 0, first>>>(cell, 1);
    cudaStreamCaptureStatus status;
    unsigned long long id = 0;
    cudaGraph_t into = nullptr;
    const cudaGraphNode_t *last = nullptr;
    size_t count = 0;
    CHECK(cudaStreamGetCaptureInfo(first, &status, &id, &into, &last, nullptr, &count));
    REQUIRE(status == cudaStreamCaptureStatusActive && into == graph && count == 1 && id != 0);
    // a node added by hand takes its place in the stream's order
    int three = 3;
    void *by_three[] = {&cell, &three};
    parameters = kernel((void *)scale, by_three);
    cudaGraphNode_t scaling;
    CHECK(cudaGraphAddKernelNode(&scaling, graph, last, count, &parameters));
    CHECK(cudaStreamUpdateCaptureDependencies(first, &scaling, nullptr, 1, cudaStreamSetCaptureDependencies));
    // another thread, in a capture that allows it
    std::thread([] { add<<<1, 1, 0, first>>>(cell, 5); }).join();
    CHECK(cudaStreamEndCapture(first, &into));
    REQUIRE(into == graph);
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphLaunch(exec, second));
    CHECK(cudaStreamSynchronize(second));
    REQUIRE(value_of(cell) == (1 + 1) * 3 + 5);

    // a replay in a capture is a graph within a graph
    cudaGraph_t outer;
    cudaGraphExec_t twice;
    CHECK(cudaStreamBeginCapture(first, cudaStreamCaptureModeThreadLocal));
    CHECK(cudaGraphLaunch(exec, first));
    CHECK(cudaLaunchHostFunc(first, call, &three));
    CHECK(cudaStreamEndCapture(first, &outer));
    CHECK(cudaGraphGetRootNodes(outer, nullptr, &count));
    REQUIRE(count == 1);
    CHECK(cudaGraphInstantiate(&twice, outer, 0));
    CHECK(cudaMemsetAsync(cell, 0, sizeof(int), first));
    called = 0;
    CHECK(cudaGraphLaunch(twice, first));
    CHECK(cudaStreamSynchronize(first));
    REQUIRE(value_of(cell) == 11 && called == 3);
    CHECK(cudaGraphExecDestroy(twice));
    CHECK(cudaGraphDestroy(outer));

    // what graphs keep alive
    cudaUserObject_t object;
    CHECK(cudaUserObjectCreate(&object, nullptr, destroy, 1, cudaUserObjectNoDestructorSync));
    CHECK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    REQUIRE(destroyed == 0);
    CHECK(cudaGraphExecDestroy(exec));
    REQUIRE(destroyed == 1);
}

static void symbols() {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaGraphNode_t in, out;
    host[0] = 31;
    host[1] = 32;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddMemcpyNodeToSymbol(&in, graph, nullptr, 0, counter, host, sizeof(int), 0,
                                         cudaMemcpyHostToDevice));
    CHECK(cudaGraphAddMemcpyNodeFromSymbol(&out, graph, &in, 1, host + 2, counter, sizeof(int), 0,
                                           cudaMemcpyDeviceToHost));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphLaunch(exec, first));
    CHECK(cudaStreamSynchronize(first));
    REQUIRE(host[2] == 31);
    CHECK(cudaGraphExecMemcpyNodeSetParamsToSymbol(exec, in, counter, host + 1, sizeof(int), 0,
                                                   cudaMemcpyHostToDevice));
    CHECK(cudaGraphExecMemcpyNodeSetParamsFromSymbol(exec, out, host + 3, counter, sizeof(int), 0,
                                                     cudaMemcpyDeviceToHost));
    CHECK(cudaGraphLaunch(exec, first));
    CHECK(cudaStreamSynchronize(first));
    REQUIRE(host[2] == 31 && host[3] == 32);
    FAILS(cudaGraphMemcpyNodeSetParamsToSymbol(in, counter, host, 8, 0, cudaMemcpyHostToDevice),
          cudaErrorInvalidValue);
    CHECK(cudaGraphMemcpyNodeSetParamsFromSymbol(out, host, counter, sizeof(int), 0, cudaMemcpyDeviceToHost));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
}

// A reset ends the captures of its streams, also of those that joined.
void resets_during_captures() {
    for (int mode = 0; mode < 3; mode++) {
        cudaStream_t origin, joined;
        cudaEvent_t event;
        CHECK(cudaStreamCreate(&origin));
        CHECK(cudaStreamCreate(&joined));
        CHECK(cudaEventCreate(&event));
        CHECK(cudaStreamBeginCapture(origin, static_cast<cudaStreamCaptureMode>(mode)));
        CHECK(cudaEventRecord(event, origin));
        CHECK(cudaStreamWaitEvent(joined, event, 0));
        CHECK(cudaDeviceReset());
        CHECK(cudaMalloc(&cell, sizeof(int)));
        CHECK(cudaMemset(cell, 0, sizeof(int)));
        CHECK(cudaDeviceSynchronize());
    }
}

int main() {
    CHECK(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithPriority(&second, cudaStreamNonBlocking, -1));
    CHECK(cudaMalloc(&cell, 4 * sizeof(int)));
    CHECK(cudaMallocHost(&host, 4 * sizeof(int)));
    by_hand();
    branches();
    events_and_memory();
    captures();
    symbols();
    CHECK(cudaDeviceSynchronize());
    resets_during_captures();
    puts("graphs ok");
    return 0;
}

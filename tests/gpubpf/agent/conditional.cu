// What a tool must count of conditional nodes: kernels in bodies that run again and again, once, or never, in child graphs and inner
// bodies there, beside copies and memsets, made by hand and by capture, with parameters that a program sets as an array or as a buffer.
// Prints what the GPU computed.
#include <cstdio>
#include <cstring>
#include <cuda.h>
#include <vector>

#define CHECK(call)                                         \
    do {                                                    \
        if (int error = static_cast<int>(call)) {           \
            printf("line %d: error %d\n", __LINE__, error); \
            return 1;                                       \
        }                                                   \
    } while (0)

__global__ void decide(cudaGraphConditionalHandle handle, unsigned value) {
    cudaGraphSetConditional(handle, value);
}
__global__ void turn(int *left, cudaGraphConditionalHandle handle) {
    if (threadIdx.x + threadIdx.y + blockIdx.x == 0) cudaGraphSetConditional(handle, --*left > 0);
}
__global__ void once(int *sum, int by) { atomicAdd(sum, by); }
__global__ void often(int *sum, int by) { atomicAdd(sum, by); }
__global__ void never(int *sum, int by) { atomicAdd(sum, by); }
__global__ void after(int *sum, int by) { atomicAdd(sum, by); }

template <class... A>
static cudaGraphNode_t kernel(cudaGraph_t graph, std::vector<cudaGraphNode_t> before, void (*of)(A...),
                              int blocks, A... values) {
    void *pointers[] = {&values...};
    cudaKernelNodeParams p{};
    p.func = reinterpret_cast<void *>(of);
    p.gridDim = dim3(blocks);
    p.blockDim = dim3(8, 2);
    p.kernelParams = pointers;
    cudaGraphNode_t made = nullptr;
    if (cudaGraphAddKernelNode(&made, graph, before.data(), before.size(), &p)) printf("no kernel node\n");
    return made;
}

static std::vector<cudaGraph_t> condition(cudaGraph_t graph, std::vector<cudaGraphNode_t> before,
                                          cudaGraphConditionalHandle handle,
                                          cudaGraphConditionalNodeType type, unsigned bodies) {
    cudaGraphNodeParams p{};
    p.type = cudaGraphNodeTypeConditional;
    p.conditional.handle = handle;
    p.conditional.type = type;
    p.conditional.size = bodies;
    cudaGraphNode_t made;
    if (cudaGraphAddNode(&made, graph, before.data(), nullptr, before.size(), &p))
        printf("no conditional node\n");
    return {p.conditional.phGraph_out, p.conditional.phGraph_out + bodies};
}

int main() {
    int *sum, *left, seven = 7, found[2];
    CHECK(cudaMalloc(&sum, 8));
    CHECK(cudaMemset(sum, 0, 8));
    left = sum + 1;
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));

    // A loop of seven turns: copy, memset, two kernels of the same shape, a child graph, an inner choice.
    cudaGraph_t graph, child;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphCreate(&child, 0));
    kernel(child, {}, often, 2, sum, 1);
    cudaGraphConditionalHandle loop, inner;
    CHECK(cudaGraphConditionalHandleCreate(&loop, graph, 1, cudaGraphCondAssignDefault));
    CHECK(cudaGraphConditionalHandleCreate(&inner, graph, 1, cudaGraphCondAssignDefault));
    cudaGraph_t body = condition(graph, {}, loop, cudaGraphCondTypeWhile, 1)[0];
    cudaGraphNode_t first = kernel(body, {}, turn, 2, left, loop), node;
    kernel(body, {first}, often, 2, sum, 1);
    CHECK(cudaGraphAddChildGraphNode(&node, body, &first, 1, child));
    int *scratch;
    CHECK(cudaMalloc(&scratch, 8));
    CHECK(cudaGraphAddMemcpyNode1D(&node, body, nullptr, 0, scratch, sum, 4, cudaMemcpyDeviceToDevice));
    cudaMemsetParams memset{};
    memset.dst = scratch + 1;
    memset.elementSize = 4;
    memset.width = memset.height = 1;
    CHECK(cudaGraphAddMemsetNode(&node, body, nullptr, 0, &memset));
    std::vector<cudaGraph_t> choice = condition(body, {first}, inner, cudaGraphCondTypeSwitch, 2);
    kernel(choice[0], {}, never, 1, sum, 1000);
    CHECK(
        cudaStreamBeginCaptureToGraph(stream, choice[1], nullptr, nullptr, 0, cudaStreamCaptureModeRelaxed));
    often<<<1, 32, 0, stream>>>(sum, 1);
    CHECK(cudaStreamEndCapture(stream, nullptr));
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 3; ++i) {
        CHECK(cudaMemcpyAsync(left, &seven, 4, cudaMemcpyHostToDevice, stream));
        CHECK(cudaGraphLaunch(exec, stream));
    }
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(found, sum, 8, cudaMemcpyDefault));
    printf("loop %d %d\n", found[0], found[1]);

    // The program's own graph still has its own kernel and values.
    cudaKernelNodeParams read{};
    CHECK(cudaGraphKernelNodeGetParams(first, &read));
    printf("own %d %d %d\n", read.func == reinterpret_cast<void *>(turn), read.gridDim.x,
           *static_cast<int **>(read.kernelParams[0]) == left);

    // An update changes the body. Parameters in a buffer.
    CUgraphNode nodes[8];
    size_t n = 8;
    CHECK(cudaGraphGetNodes(choice[1], nodes, &n));
    CUDA_KERNEL_NODE_PARAMS buffered{};
    struct {
        int *sum;
        int by;
    } values = {sum, 100};
    size_t size = sizeof(int *) + sizeof(int);
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &values, CU_LAUNCH_PARAM_BUFFER_SIZE, &size,
                     CU_LAUNCH_PARAM_END};
    cudaFunction_t function;
    CHECK(cudaGetFuncBySymbol(&function, reinterpret_cast<const void *>(once)));
    buffered.func = function;
    buffered.gridDimX = buffered.gridDimY = buffered.gridDimZ = buffered.blockDimX = buffered.blockDimY =
        buffered.blockDimZ = 1;
    buffered.extra = extra;
    CHECK(cuGraphKernelNodeSetParams(nodes[0], &buffered));
    cudaGraphExecUpdateResultInfo info;
    CHECK(cudaGraphExecUpdate(exec, graph, &info));
    const int two = 2;
    CHECK(cudaMemcpy(left, &two, 4, cudaMemcpyHostToDevice));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(found, sum, 8, cudaMemcpyDefault));
    printf("updated %d\n", found[0]);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));

    // Both ways of an if, and a kernel behind it.
    for (unsigned value : {0u, 5u}) {
        CHECK(cudaGraphCreate(&graph, 0));
        CHECK(cudaGraphConditionalHandleCreate(&loop, graph, 0, 0));
        cudaGraphNode_t chosen = kernel(graph, {}, decide, 1, loop, value);
        std::vector<cudaGraph_t> ways = condition(graph, {chosen}, loop, cudaGraphCondTypeIf, 2);
        kernel(ways[0], {}, once, 1, sum, 1);
        kernel(ways[1], {}, often, 1, sum, 1);
        kernel(graph, {chosen}, after, 1, sum, 1);
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaGraphExecDestroy(exec));
        CHECK(cudaGraphDestroy(graph));
    }
    CHECK(cudaMemcpy(found, sum, 8, cudaMemcpyDefault));
    printf("both %d\n", found[0]);
    return 0;
}

// Conditional nodes of graphs: if, if-else, while and switch, nested, captured, and launched again and again.
#include "check.h"

#include <vector>

__global__ void set(cudaGraphConditionalHandle handle, const int *value) { cudaGraphSetConditional(handle, *value); }
__global__ void append(int *log, int what) { log[++log[0]] = what; }
__global__ void count_down(cudaGraphConditionalHandle handle, int *left) { cudaGraphSetConditional(handle, --*left > 0); }

int *logged, *value;

void start(int first) {
    CHECK(cudaMemset(logged, 0, 1024 * sizeof(int)));
    CHECK(cudaMemcpy(value, &first, sizeof first, cudaMemcpyHostToDevice));
}

void expect(std::vector<int> numbers) {
    CHECK(cudaDeviceSynchronize());
    std::vector<int> host(1024);
    CHECK(cudaMemcpy(host.data(), logged, 1024 * sizeof(int), cudaMemcpyDeviceToHost));
    REQUIRE(host[0] == static_cast<int>(numbers.size()));
    for (size_t i = 0; i < numbers.size(); i++) REQUIRE(host[i + 1] == numbers[i]);
}

template <class... Arguments>
cudaGraphNode_t kernel(cudaGraph_t graph, std::vector<cudaGraphNode_t> after, void (*function)(Arguments...), Arguments... arguments) {
    void *pointers[] = {&arguments...};
    cudaGraphNodeParams parameters = {cudaGraphNodeTypeKernel};
    parameters.kernel.func = reinterpret_cast<void *>(function);
    parameters.kernel.gridDim = parameters.kernel.blockDim = dim3(1);
    parameters.kernel.kernelParams = pointers;
    cudaGraphNode_t node;
    CHECK(cudaGraphAddNode(&node, graph, after.data(), nullptr, after.size(), &parameters));
    return node;
}

cudaGraphNode_t conditional(cudaGraph_t graph, std::vector<cudaGraphNode_t> after, cudaGraphConditionalHandle handle,
                            cudaGraphConditionalNodeType type, unsigned size, cudaGraph_t *bodies) {
    cudaGraphNodeParams parameters = {cudaGraphNodeTypeConditional};
    parameters.conditional.handle = handle;
    parameters.conditional.type = type;
    parameters.conditional.size = size;
    cudaGraphNode_t node;
    CHECK(cudaGraphAddNode(&node, graph, after.data(), nullptr, after.size(), &parameters));
    for (unsigned i = 0; i < size; i++) bodies[i] = parameters.conditional.phGraph_out[i];
    cudaGraphNodeType found;
    CHECK(cudaGraphNodeGetType(node, &found));
    REQUIRE(found == cudaGraphNodeTypeConditional);
    return node;
}

cudaGraphExec_t instantiate(cudaGraph_t graph) {
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    return exec;
}

void choices(cudaGraphConditionalNodeType type, unsigned size, std::vector<std::pair<int, std::vector<int>>> runs) {
    cudaGraph_t graph, bodies[4];
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphConditionalHandle handle;
    CHECK(cudaGraphConditionalHandleCreate(&handle, graph, 0, 0));
    cudaGraphNode_t first = kernel<cudaGraphConditionalHandle, const int *>(graph, {}, set, handle, value);
    cudaGraphNode_t node = conditional(graph, {first}, handle, type, size, bodies);
    for (unsigned i = 0; i < size; i++) kernel(graph == nullptr ? graph : bodies[i], {}, append, logged, static_cast<int>(i));
    kernel(graph, {node}, append, logged, 99);
    cudaGraphExec_t exec = instantiate(graph);
    for (const auto &[chosen, expected] : runs) {
        start(chosen);
        CHECK(cudaGraphLaunch(exec, nullptr));
        expect(expected);
    }
    CHECK(cudaGraphExecDestroy(exec));
}

// A loop in a body: while (value) { if (true) append 7; }, filled in by capture. The default begins the loop in each launch.
void loops() {
    cudaGraph_t graph, body, inner;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphConditionalHandle handle, always;
    CHECK(cudaGraphConditionalHandleCreate(&handle, graph, 1, cudaGraphCondAssignDefault));
    CHECK(cudaGraphConditionalHandleCreate(&always, graph, 1, cudaGraphCondAssignDefault));
    conditional(graph, {}, handle, cudaGraphCondTypeWhile, 1, &body);
    cudaGraphNode_t down = kernel(body, {}, count_down, handle, value);
    conditional(body, {down}, always, cudaGraphCondTypeIf, 1, &inner);
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamBeginCaptureToGraph(stream, inner, nullptr, nullptr, 0, cudaStreamCaptureModeGlobal));
    append<<<1, 1, 0, stream>>>(logged, 7);
    CHECK(cudaStreamEndCapture(stream, nullptr));
    cudaGraphExec_t exec = instantiate(graph);
    for (int launch = 0; launch < 3; launch++) {
        start(4);
        CHECK(cudaGraphLaunch(exec, stream));
        expect({7, 7, 7, 7});
    }
    start(2);
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaGraphLaunch(exec, stream));  // value is 0 now, so the body runs once
    expect({7, 7, 7});
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaStreamDestroy(stream));
}

void refused() {
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphConditionalHandle handle;
    FAILS(cudaGraphConditionalHandleCreate(&handle, nullptr, 0, 0), cudaErrorInvalidValue);
    FAILS(cudaGraphConditionalHandleCreate(&handle, graph, 0, 8), cudaErrorInvalidValue);
    CHECK(cudaGraphConditionalHandleCreate(&handle, graph, 0, 0));
    cudaGraphNodeParams parameters = {cudaGraphNodeTypeConditional};
    cudaGraphNode_t node;
    auto fails = [&](cudaGraphConditionalHandle of, cudaGraphConditionalNodeType type, unsigned size) {
        parameters.conditional.handle = of;
        parameters.conditional.type = type;
        parameters.conditional.size = size;
        FAILS(cudaGraphAddNode(&node, graph, nullptr, nullptr, 0, &parameters), cudaErrorInvalidValue);
    };
    fails(handle, cudaGraphCondTypeIf, 0);
    fails(handle, cudaGraphCondTypeIf, 3);
    fails(handle, cudaGraphCondTypeWhile, 2);
    fails(handle + 1000, cudaGraphCondTypeIf, 1);
    parameters.conditional.type = cudaGraphCondTypeIf;
    parameters.conditional.size = 1;
    parameters.conditional.handle = handle;
    FAILS(cudaGraphAddNode(&node, nullptr, nullptr, nullptr, 0, &parameters), cudaErrorInvalidValue);
    cudaGraph_t body;  // the handle is still free
    conditional(graph, {}, handle, cudaGraphCondTypeIf, 1, &body);
    fails(handle, cudaGraphCondTypeIf, 1);  // it has a node
    CHECK(cudaGraphDestroy(graph));
}

int main() {
    CHECK(cudaMalloc(&logged, 1024 * sizeof(int)));
    CHECK(cudaMalloc(&value, sizeof(int)));
    choices(cudaGraphCondTypeIf, 1, {{0, {99}}, {1, {0, 99}}, {-5, {0, 99}}, {0, {99}}});
    choices(cudaGraphCondTypeIf, 2, {{0, {1, 99}}, {3, {0, 99}}});
    choices(cudaGraphCondTypeSwitch, 3, {{0, {0, 99}}, {2, {2, 99}}, {3, {99}}, {1, {1, 99}}});
    loops();
    refused();
    puts("conditions ok");
    return 0;
}

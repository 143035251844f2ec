// Graphs: nodes that hold operations, and executable copies of them. A replay runs its nodes in an order that the
// dependencies allow; nodes that do not depend on each other run beside each other, in lanes.
#include "driver.h"

#include <stdio.h>
#include <string.h>

#include <algorithm>

namespace cudasim::driver {
namespace {

using NodePointer = std::shared_ptr<GraphNode>;

// Nodes with every node after its dependencies; empty when they form a circle.
std::vector<NodePointer> in_order(const std::vector<NodePointer> &nodes) {
    std::vector<NodePointer> ordered;
    std::set<const GraphNode *> placed;
    std::vector<NodePointer> left = nodes;
    while (!left.empty()) {
        std::vector<NodePointer> later;
        for (const NodePointer &node : left) {
            bool ready = std::all_of(node->after.begin(), node->after.end(),
                                     [&](const NodePointer &before) { return placed.count(before.get()) != 0; });
            if (!ready) {
                later.push_back(node);
                continue;
            }
            ordered.push_back(node);
            placed.insert(node.get());
        }
        if (later.size() == left.size()) return {};
        left = std::move(later);
    }
    return ordered;
}

// A deep copy whose nodes know the nodes they were copied from. `handles`: the copies are for the application too.
std::shared_ptr<Graph> copy_graph(const Graph &graph, const std::vector<NodePointer> &nodes, bool handles) {
    auto copy = std::make_shared<Graph>();
    copy->context = graph.context;
    copy->next_id = graph.next_id;
    copy->lanes = graph.lanes;
    copy->held = graph.held;
    std::map<const GraphNode *, NodePointer> copies;
    for (const NodePointer &node : nodes) {
        auto made = std::make_shared<GraphNode>();
        made->id = node->id;
        made->graph = copy;
        made->operation = node->operation;
        made->original = node;
        made->enabled = node->enabled;
        made->attributes = node->attributes;
        made->position = node->position;
        made->lane = node->lane;
        if (node->operation.child) {
            std::lock_guard lock(node->operation.child->mutex);
            made->operation.child =
                copy_graph(*node->operation.child, in_order(node->operation.child->nodes), handles);
        }
        for (const NodePointer &before : node->after) made->after.push_back(copies.at(before.get()));
        if (handles) made->handle = tables().nodes.add(made);
        copies[node.get()] = made;
        copy->nodes.push_back(made);
    }
    if (handles) copy->handle = tables().graphs.add(copy);
    return copy;
}

void forget(const Graph &graph) {
    for (const NodePointer &node : graph.nodes) {
        if (node->operation.child) {
            forget(*node->operation.child);
            if (node->operation.child->handle != nullptr) tables().graphs.remove(node->operation.child->handle);
        }
        if (node->handle != nullptr) tables().nodes.remove(node->handle);
    }
}

CUresult find_nodes(const CUgraphNode *handles, size_t count, const std::shared_ptr<Graph> &graph,
                    std::vector<NodePointer> &nodes) {
    if (count != 0 && handles == nullptr) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        NodePointer node = tables().nodes.get(handles[i]);
        if (!node || node->graph.lock() != graph) return CUDA_ERROR_INVALID_VALUE;
        nodes.push_back(node);
    }
    return CUDA_SUCCESS;
}

CUresult add(CUgraphNode *handle, CUgraph graph_handle, const CUgraphNode *after, size_t count, Operation operation) {
    std::shared_ptr<Graph> graph = tables().graphs.get(graph_handle);
    if (!graph || handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::vector<NodePointer> before;
    if (CUresult status = find_nodes(after, count, graph, before)) return status;
    *handle = static_cast<CUgraphNode>(add_node(graph, std::move(operation), before)->handle);
    return CUDA_SUCCESS;
}

CUresult find_node(CUgraphNode handle, CUgraphNodeType type, NodePointer &node) {
    if (CUresult status = initialized()) return status;
    node = tables().nodes.get(handle);
    return node && node->operation.type == type ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// The node of an executable graph that was copied from `handle`.
CUresult find_exec_node(CUgraphExec exec_handle, CUgraphNode handle, CUgraphNodeType type,
                        std::shared_ptr<GraphExec> &exec, NodePointer &copy) {
    NodePointer node;
    if (CUresult status = find_node(handle, type, node)) return status;
    exec = tables().execs.get(exec_handle);
    if (!exec) return CUDA_ERROR_INVALID_VALUE;
    for (const NodePointer &candidate : exec->graph->nodes)
        if (candidate->original == node) copy = candidate;
    return copy ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult kernel_operation(const CUDA_KERNEL_NODE_PARAMS &parameters, Operation &operation) {
    const void *handle = parameters.func != nullptr ? static_cast<const void *>(parameters.func)
                                                    : static_cast<const void *>(parameters.kern);
    std::shared_ptr<Context> context;
    if (parameters.func == nullptr && parameters.ctx != nullptr) {
        context = tables().contexts.get(parameters.ctx);
        if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    } else if (CUresult status = current(context)) {
        return status;
    }
    operation.type = CU_GRAPH_NODE_TYPE_KERNEL;
    return describe_launch(handle, context, {parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ},
                           {parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ},
                           parameters.sharedMemBytes, operation.kernel.cooperative, parameters.kernelParams,
                           parameters.extra, operation.kernel);
}

CUDA_KERNEL_NODE_PARAMS newest(const CUDA_KERNEL_NODE_PARAMS_v1 &old) {
    CUDA_KERNEL_NODE_PARAMS parameters{};
    parameters.func = old.func;
    parameters.gridDimX = old.gridDimX;
    parameters.gridDimY = old.gridDimY;
    parameters.gridDimZ = old.gridDimZ;
    parameters.blockDimX = old.blockDimX;
    parameters.blockDimY = old.blockDimY;
    parameters.blockDimZ = old.blockDimZ;
    parameters.sharedMemBytes = old.sharedMemBytes;
    parameters.kernelParams = old.kernelParams;
    parameters.extra = old.extra;
    return parameters;
}

CUresult copy_operation(const CUDA_MEMCPY3D *parameters, Operation &operation) {
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    operation.type = CU_GRAPH_NODE_TYPE_MEMCPY;
    return describe_copy(*parameters, operation.copy);
}

CUresult fill_operation(const CUDA_MEMSET_NODE_PARAMS *parameters, Operation &operation) {
    if (parameters == nullptr || parameters->width == 0 || parameters->height == 0) return CUDA_ERROR_INVALID_VALUE;
    unsigned element = parameters->elementSize;
    if (element != 1 && element != 2 && element != 4) return CUDA_ERROR_INVALID_VALUE;
    operation.type = CU_GRAPH_NODE_TYPE_MEMSET;
    size_t pitch = parameters->height == 1 ? parameters->width * element : parameters->pitch;
    operation.fill = {parameters->dst, parameters->value, element, parameters->width, parameters->height, pitch};
    return check_range(parameters->dst, (parameters->height - 1) * pitch + parameters->width * element);
}

CUresult host_operation(const CUDA_HOST_NODE_PARAMS *parameters, Operation &operation) {
    if (parameters == nullptr || parameters->fn == nullptr) return CUDA_ERROR_INVALID_VALUE;
    operation.type = CU_GRAPH_NODE_TYPE_HOST;
    operation.host = {};
    operation.host.function = parameters->fn;
    operation.host.data = parameters->userData;
    return CUDA_SUCCESS;
}

CUresult list(const std::vector<NodePointer> &nodes, CUgraphNode *out, size_t *count) {
    if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (out == nullptr) {
        *count = nodes.size();
        return CUDA_SUCCESS;
    }
    size_t room = *count;
    for (size_t i = 0; i < room; i++) out[i] = i < nodes.size() ? static_cast<CUgraphNode>(nodes[i]->handle) : nullptr;
    *count = std::min(room, nodes.size());
    return CUDA_SUCCESS;
}

}  // namespace

std::shared_ptr<GraphNode> add_node(const std::shared_ptr<Graph> &graph, Operation operation,
                                    const std::vector<std::shared_ptr<GraphNode>> &after) {
    auto node = std::make_shared<GraphNode>();
    node->graph = graph;
    node->operation = std::move(operation);
    node->after = after;
    node->handle = tables().nodes.add(node);
    std::lock_guard lock(graph->mutex);
    node->id = graph->next_id++;
    graph->nodes.push_back(node);
    return node;
}

CUresult check_memory_operations(const std::vector<CUstreamBatchMemOpParams> &operations) {
    for (const CUstreamBatchMemOpParams &one : operations) {
        size_t bytes = 0;
        switch (one.operation) {
            case CU_STREAM_MEM_OP_WRITE_VALUE_32:
            case CU_STREAM_MEM_OP_WAIT_VALUE_32: bytes = 4; break;
            case CU_STREAM_MEM_OP_WRITE_VALUE_64:
            case CU_STREAM_MEM_OP_WAIT_VALUE_64: bytes = 8; break;
            case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
            case CU_STREAM_MEM_OP_BARRIER: continue;
            default: return CUDA_ERROR_INVALID_VALUE;
        }
        if (one.writeValue.address % bytes != 0) return CUDA_ERROR_INVALID_VALUE;
        if (CUresult status = check_range(one.writeValue.address, bytes)) return status;
    }
    return CUDA_SUCCESS;
}

namespace {

// Says which nodes share a lane: those that follow each other do, so that a graph without branches needs none.
void plan(Graph &graph) {
    constexpr size_t kLanes = 16;
    std::set<const GraphNode *> continued;
    size_t lanes = 0;
    for (size_t i = 0; i < graph.nodes.size(); i++) {
        GraphNode &node = *graph.nodes[i];
        node.position = i;
        node.lane = SIZE_MAX;
        for (const NodePointer &before : node.after)
            if (node.lane == SIZE_MAX && continued.insert(before.get()).second) node.lane = before->lane;
        if (node.lane == SIZE_MAX) node.lane = lanes++ % kLanes;
        if (node.operation.child) plan(*node.operation.child);
    }
    graph.lanes.clear();
    if (lanes < 2) return;
    for (size_t i = 0; i < std::min(lanes, kLanes); i++) graph.lanes.push_back(std::make_shared<Queue>());
}

// Makes what event nodes of a replay wait for and complete. Waits are for what was recorded before this replay.
void prepare_events(Graph &graph, CUgraphNodeType type) {
    for (const NodePointer &node : graph.nodes) {
        Operation &operation = node->operation;
        if (operation.child) prepare_events(*operation.child, type);
        if (operation.type != type) continue;
        if (type == CU_GRAPH_NODE_TYPE_EVENT_RECORD) {
            operation.recording = std::make_shared<EventState>();
            continue;
        }
        std::lock_guard lock(operation.event->mutex);
        operation.recording = operation.event->last;
    }
}

void publish_events(Graph &graph) {
    for (const NodePointer &node : graph.nodes) {
        Operation &operation = node->operation;
        if (operation.child) publish_events(*operation.child);
        if (operation.type != CU_GRAPH_NODE_TYPE_EVENT_RECORD) continue;
        if (!node->enabled) continue;
        std::lock_guard lock(operation.event->mutex);
        operation.event->last = operation.recording;
        operation.event->captured_graph.reset();
        operation.event->captured_after.clear();
    }
}

}  // namespace

CUresult launch_graph(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                      const std::shared_ptr<GraphExec> &exec) {
    std::lock_guard lock(context->lock);
    std::lock_guard own(exec->mutex);
    Operation operation;
    operation.type = CU_GRAPH_NODE_TYPE_GRAPH;
    // Its nodes with the parameters of this moment. In a capture it becomes a child graph, which has handles.
    std::shared_ptr<Graph> frozen = copy_graph(*exec->graph, exec->graph->nodes, stream->capture != nullptr);
    operation.child = frozen;
    if (stream->capture) return submit(context, stream, std::move(operation), nullptr, kLaunch);
    prepare_events(*frozen, CU_GRAPH_NODE_TYPE_WAIT_EVENT);
    prepare_events(*frozen, CU_GRAPH_NODE_TYPE_EVENT_RECORD);
    operation.after.push_back(exec->last);
    if (CUresult status = submit(context, stream, std::move(operation), &exec->last, kLaunch)) return status;
    publish_events(*frozen);
    return CUDA_SUCCESS;
}

uint64_t execute_graph(Context &context, const Graph &graph, uint64_t start) {
    std::vector<uint64_t> ends(graph.nodes.size(), start);
    auto run = [&](size_t index) {
        const GraphNode &node = *graph.nodes[index];
        uint64_t begin = start;
        for (const NodePointer &before : node.after) begin = std::max(begin, ends[before->position]);
        ends[index] = node.enabled ? execute(context, node.operation, begin) : begin;
    };
    if (graph.lanes.empty()) {
        for (size_t i = 0; i < graph.nodes.size(); i++) run(i);
    } else {
        std::vector<Fence> fences(graph.nodes.size());
        for (const NodePointer &node : graph.nodes) {
            std::vector<Fence> after;
            for (const NodePointer &before : node->after)
                if (before->lane != node->lane) after.push_back(fences[before->position]);
            auto work = [&run, index = node->position](uint64_t) {
                run(index);
                return uint64_t{0};
            };
            fences[node->position] = graph.lanes[node->lane]->submit(std::move(after), std::move(work));
        }
        for (const Fence &fence : fences) fence.wait();
    }
    return ends.empty() ? start : *std::max_element(ends.begin(), ends.end());
}

namespace {

struct GraphMemory {
    std::mutex mutex;
    std::set<uint64_t> addresses;
};

GraphMemory &graph_memory() {
    static GraphMemory *const made = new GraphMemory();
    return *made;
}

}  // namespace

bool belongs_to_graph(uint64_t address) {
    std::lock_guard lock(graph_memory().mutex);
    return graph_memory().addresses.count(address) != 0;
}

CUresult allocate_for_graph(const std::shared_ptr<Context> &context, size_t bytes, Operation &operation) {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    uint64_t address = Memory::instance().allocate(bytes, MemoryKind::device, context->device, context->handle);
    if (address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
    std::lock_guard lock(graph_memory().mutex);
    graph_memory().addresses.insert(address);
    operation.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC;
    operation.allocation.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    operation.allocation.poolProps.location = {CU_MEM_LOCATION_TYPE_DEVICE, {context->device}};
    operation.allocation.bytesize = bytes;
    operation.allocation.dptr = address;
    uint64_t id = Memory::instance().find(address)->id;
    operation.keep = std::shared_ptr<void>(nullptr, [address, id](void *) {
        std::lock_guard forget(graph_memory().mutex);
        graph_memory().addresses.erase(address);
        Memory::instance().release(address, id);
    });
    return CUDA_SUCCESS;
}

}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

// ---------------------------------------------------------------------------------------------------- graphs

CUresult cuGraphCreate(CUgraph *handle, unsigned int flags) {
    if (CUresult status = initialized()) return status;
    if (handle == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    auto graph = std::make_shared<Graph>();
    if (std::shared_ptr<Context> context = current_or_null()) graph->context = context;
    graph->handle = tables().graphs.add(graph);
    *handle = static_cast<CUgraph>(graph->handle);
    return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph handle) {
    if (CUresult status = initialized()) return status;
    std::shared_ptr<Graph> graph = tables().graphs.remove(handle);
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(graph->mutex);
    forget(*graph);
    for (const NodePointer &node : graph->nodes) node->after.clear();
    return CUDA_SUCCESS;
}

CUresult cuGraphClone(CUgraph *clone, CUgraph handle) {
    std::shared_ptr<Graph> graph = tables().graphs.get(handle);
    if (!graph || clone == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(graph->mutex);
    *clone = static_cast<CUgraph>(copy_graph(*graph, in_order(graph->nodes), true)->handle);
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeFindInClone(CUgraphNode *found, CUgraphNode original, CUgraph clone) {
    std::shared_ptr<Graph> graph = tables().graphs.get(clone);
    NodePointer node = tables().nodes.get(original);
    if (!graph || !node || found == nullptr) return CUDA_ERROR_INVALID_VALUE;
    for (const NodePointer &candidate : graph->nodes)
        if (candidate->original == node) {
            *found = static_cast<CUgraphNode>(candidate->handle);
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode *nodes, size_t *count) {
    std::shared_ptr<Graph> graph = tables().graphs.get(handle);
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(graph->mutex);
    return list(graph->nodes, nodes, count);
}

CUresult cuGraphGetRootNodes(CUgraph handle, CUgraphNode *nodes, size_t *count) {
    std::shared_ptr<Graph> graph = tables().graphs.get(handle);
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(graph->mutex);
    std::vector<NodePointer> roots;
    for (const NodePointer &node : graph->nodes)
        if (node->after.empty()) roots.push_back(node);
    return list(roots, nodes, count);
}

CUresult cuGraphGetEdges(CUgraph handle, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data, size_t *count) {
    std::shared_ptr<Graph> graph = tables().graphs.get(handle);
    if (!graph || count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(graph->mutex);
    size_t index = 0;
    for (const NodePointer &node : graph->nodes)
        for (const NodePointer &before : node->after) {
            if (from != nullptr && to != nullptr && index < *count) {
                from[index] = static_cast<CUgraphNode>(before->handle);
                to[index] = static_cast<CUgraphNode>(node->handle);
                if (data != nullptr) data[index] = {};
            }
            index++;
        }
    *count = from == nullptr || to == nullptr ? index : std::min(index, *count);
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetDependencies(CUgraphNode handle, CUgraphNode *nodes, CUgraphEdgeData *data, size_t *count) {
    NodePointer node = tables().nodes.get(handle);
    if (!node) return CUDA_ERROR_INVALID_VALUE;
    if (data != nullptr && count != nullptr) memset(data, 0, *count * sizeof *data);
    return list(node->after, nodes, count);
}

CUresult cuGraphNodeGetDependentNodes(CUgraphNode handle, CUgraphNode *nodes, CUgraphEdgeData *data, size_t *count) {
    NodePointer node = tables().nodes.get(handle);
    std::shared_ptr<Graph> graph = node ? node->graph.lock() : nullptr;
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    std::vector<NodePointer> dependent;
    std::lock_guard lock(graph->mutex);
    for (const NodePointer &other : graph->nodes)
        if (std::find(other->after.begin(), other->after.end(), node) != other->after.end()) dependent.push_back(other);
    if (data != nullptr && count != nullptr) memset(data, 0, *count * sizeof *data);
    return list(dependent, nodes, count);
}

CUresult cuGraphAddDependencies(CUgraph handle, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *,
                                size_t count) {
    std::shared_ptr<Graph> graph = tables().graphs.get(handle);
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    std::vector<NodePointer> sources, targets;
    if (CUresult status = find_nodes(from, count, graph, sources)) return status;
    if (CUresult status = find_nodes(to, count, graph, targets)) return status;
    std::lock_guard lock(graph->mutex);
    for (size_t i = 0; i < count; i++) targets[i]->after.push_back(sources[i]);
    return CUDA_SUCCESS;
}

CUresult cuGraphRemoveDependencies(CUgraph handle, const CUgraphNode *from, const CUgraphNode *to,
                                   const CUgraphEdgeData *, size_t count) {
    std::shared_ptr<Graph> graph = tables().graphs.get(handle);
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    std::vector<NodePointer> sources, targets;
    if (CUresult status = find_nodes(from, count, graph, sources)) return status;
    if (CUresult status = find_nodes(to, count, graph, targets)) return status;
    std::lock_guard lock(graph->mutex);
    for (size_t i = 0; i < count; i++) {
        auto &after = targets[i]->after;
        auto found = std::find(after.begin(), after.end(), sources[i]);
        if (found == after.end()) return CUDA_ERROR_INVALID_VALUE;
        after.erase(found);
    }
    return CUDA_SUCCESS;
}

CUresult cuGraphDestroyNode(CUgraphNode handle) {
    NodePointer node = tables().nodes.get(handle);
    std::shared_ptr<Graph> graph = node ? node->graph.lock() : nullptr;
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(graph->mutex);
    graph->nodes.erase(std::remove(graph->nodes.begin(), graph->nodes.end(), node), graph->nodes.end());
    for (const NodePointer &other : graph->nodes)
        other->after.erase(std::remove(other->after.begin(), other->after.end(), node), other->after.end());
    tables().nodes.remove(handle);
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetType(CUgraphNode handle, CUgraphNodeType *type) {
    NodePointer node = tables().nodes.get(handle);
    if (!node || type == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *type = node->operation.type;
    return CUDA_SUCCESS;
}

CUresult cuGraphDebugDotPrint(CUgraph handle, const char *path, unsigned int) {
    std::shared_ptr<Graph> graph = tables().graphs.get(handle);
    if (!graph || path == nullptr) return CUDA_ERROR_INVALID_VALUE;
    FILE *file = fopen(path, "w");
    if (file == nullptr) return CUDA_ERROR_OPERATING_SYSTEM;
    std::lock_guard lock(graph->mutex);
    fprintf(file, "digraph graph_0 {\n");
    for (const NodePointer &node : graph->nodes) {
        const char *name = node->operation.kernel.function ? node->operation.kernel.function->kernel().name.c_str() : "";
        fprintf(file, "n%llu [label=\"type %d %s\"]\n", static_cast<unsigned long long>(node->id),
                static_cast<int>(node->operation.type), name);
        for (const NodePointer &before : node->after)
            fprintf(file, "n%llu -> n%llu\n", static_cast<unsigned long long>(before->id),
                    static_cast<unsigned long long>(node->id));
    }
    fprintf(file, "}\n");
    fclose(file);
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------- kernel nodes

CUresult cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count,
                              const CUDA_KERNEL_NODE_PARAMS *parameters) {
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    Operation operation;
    if (CUresult status = kernel_operation(*parameters, operation)) return status;
    return add(node, graph, after, count, std::move(operation));
}

CUresult cuGraphKernelNodeGetParams(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS *parameters) {
    NodePointer node;
    if (CUresult status = find_node(handle, CU_GRAPH_NODE_TYPE_KERNEL, node)) return status;
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    KernelLaunch &launch = node->operation.kernel;
    node->parameter_pointers.clear();
    for (const Parameter &parameter : launch.function->kernel().parameters)
        node->parameter_pointers.push_back(launch.parameters.data() + parameter.offset);
    *parameters = {};
    parameters->func = static_cast<CUfunction>(launch.function->handle);
    parameters->gridDimX = launch.grid.x;
    parameters->gridDimY = launch.grid.y;
    parameters->gridDimZ = launch.grid.z;
    parameters->blockDimX = launch.block.x;
    parameters->blockDimY = launch.block.y;
    parameters->blockDimZ = launch.block.z;
    parameters->sharedMemBytes = launch.shared_bytes;
    parameters->kernelParams = node->parameter_pointers.empty() ? nullptr : node->parameter_pointers.data();
    return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeSetParams(CUgraphNode handle, const CUDA_KERNEL_NODE_PARAMS *parameters) {
    NodePointer node;
    if (CUresult status = find_node(handle, CU_GRAPH_NODE_TYPE_KERNEL, node)) return status;
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    Operation operation;
    operation.kernel.cooperative = node->operation.kernel.cooperative;
    if (CUresult status = kernel_operation(*parameters, operation)) return status;
    node->operation = std::move(operation);
    return CUDA_SUCCESS;
}

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec_handle, CUgraphNode handle,
                                        const CUDA_KERNEL_NODE_PARAMS *parameters) {
    std::shared_ptr<GraphExec> exec;
    NodePointer copy;
    if (CUresult status = find_exec_node(exec_handle, handle, CU_GRAPH_NODE_TYPE_KERNEL, exec, copy)) return status;
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    Operation operation;
    operation.kernel.cooperative = copy->operation.kernel.cooperative;
    if (CUresult status = kernel_operation(*parameters, operation)) return status;
    std::lock_guard lock(exec->mutex);
    copy->operation = std::move(operation);
    return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeGetAttribute(CUgraphNode handle, CUkernelNodeAttrID attribute, CUkernelNodeAttrValue *value) {
    NodePointer node;
    if (CUresult status = find_node(handle, CU_GRAPH_NODE_TYPE_KERNEL, node)) return status;
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *value = {};
    if (attribute == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) value->cooperative = node->operation.kernel.cooperative;
    return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeSetAttribute(CUgraphNode handle, CUkernelNodeAttrID attribute,
                                       const CUkernelNodeAttrValue *value) {
    NodePointer node;
    if (CUresult status = find_node(handle, CU_GRAPH_NODE_TYPE_KERNEL, node)) return status;
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) node->operation.kernel.cooperative = value->cooperative != 0;
    return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeCopyAttributes(CUgraphNode to, CUgraphNode from) {
    NodePointer target, source;
    if (CUresult status = find_node(to, CU_GRAPH_NODE_TYPE_KERNEL, target)) return status;
    if (CUresult status = find_node(from, CU_GRAPH_NODE_TYPE_KERNEL, source)) return status;
    target->operation.kernel.cooperative = source->operation.kernel.cooperative;
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------- other nodes

CUresult cuGraphAddMemcpyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count,
                              const CUDA_MEMCPY3D *parameters, CUcontext) {
    Operation operation;
    if (CUresult status = copy_operation(parameters, operation)) return status;
    return add(node, graph, after, count, std::move(operation));
}

CUresult cuGraphMemcpyNodeGetParams(CUgraphNode handle, CUDA_MEMCPY3D *parameters) {
    NodePointer node;
    if (CUresult status = find_node(handle, CU_GRAPH_NODE_TYPE_MEMCPY, node)) return status;
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *parameters = node->operation.copy.described;
    return CUDA_SUCCESS;
}

CUresult cuGraphMemcpyNodeSetParams(CUgraphNode handle, const CUDA_MEMCPY3D *parameters) {
    NodePointer node;
    if (CUresult status = find_node(handle, CU_GRAPH_NODE_TYPE_MEMCPY, node)) return status;
    return copy_operation(parameters, node->operation);
}

CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec exec_handle, CUgraphNode handle, const CUDA_MEMCPY3D *parameters,
                                        CUcontext) {
    std::shared_ptr<GraphExec> exec;
    NodePointer copy;
    if (CUresult status = find_exec_node(exec_handle, handle, CU_GRAPH_NODE_TYPE_MEMCPY, exec, copy)) return status;
    std::lock_guard lock(exec->mutex);
    return copy_operation(parameters, copy->operation);
}

CUresult cuGraphAddMemsetNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count,
                              const CUDA_MEMSET_NODE_PARAMS *parameters, CUcontext) {
    Operation operation;
    if (CUresult status = fill_operation(parameters, operation)) return status;
    return add(node, graph, after, count, std::move(operation));
}

CUresult cuGraphMemsetNodeGetParams(CUgraphNode handle, CUDA_MEMSET_NODE_PARAMS *parameters) {
    NodePointer node;
    if (CUresult status = find_node(handle, CU_GRAPH_NODE_TYPE_MEMSET, node)) return status;
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const Fill &fill = node->operation.fill;
    *parameters = {};
    parameters->dst = fill.destination;
    parameters->pitch = fill.pitch;
    parameters->value = fill.value;
    parameters->elementSize = fill.element_size;
    parameters->width = fill.width;
    parameters->height = fill.height;
    return CUDA_SUCCESS;
}

CUresult cuGraphMemsetNodeSetParams(CUgraphNode handle, const CUDA_MEMSET_NODE_PARAMS *parameters) {
    NodePointer node;
    if (CUresult status = find_node(handle, CU_GRAPH_NODE_TYPE_MEMSET, node)) return status;
    return fill_operation(parameters, node->operation);
}

CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec exec_handle, CUgraphNode handle,
                                        const CUDA_MEMSET_NODE_PARAMS *parameters, CUcontext) {
    std::shared_ptr<GraphExec> exec;
    NodePointer copy;
    if (CUresult status = find_exec_node(exec_handle, handle, CU_GRAPH_NODE_TYPE_MEMSET, exec, copy)) return status;
    std::lock_guard lock(exec->mutex);
    return fill_operation(parameters, copy->operation);
}

CUresult cuGraphAddHostNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count,
                            const CUDA_HOST_NODE_PARAMS *parameters) {
    Operation operation;
    if (CUresult status = host_operation(parameters, operation)) return status;
    return add(node, graph, after, count, std::move(operation));
}

CUresult cuGraphHostNodeGetParams(CUgraphNode handle, CUDA_HOST_NODE_PARAMS *parameters) {
    NodePointer node;
    if (CUresult status = find_node(handle, CU_GRAPH_NODE_TYPE_HOST, node)) return status;
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    parameters->fn = node->operation.host.function;
    parameters->userData = node->operation.host.data;
    return CUDA_SUCCESS;
}

CUresult cuGraphHostNodeSetParams(CUgraphNode handle, const CUDA_HOST_NODE_PARAMS *parameters) {
    NodePointer node;
    if (CUresult status = find_node(handle, CU_GRAPH_NODE_TYPE_HOST, node)) return status;
    return host_operation(parameters, node->operation);
}

CUresult cuGraphExecHostNodeSetParams(CUgraphExec exec_handle, CUgraphNode handle,
                                      const CUDA_HOST_NODE_PARAMS *parameters) {
    std::shared_ptr<GraphExec> exec;
    NodePointer copy;
    if (CUresult status = find_exec_node(exec_handle, handle, CU_GRAPH_NODE_TYPE_HOST, exec, copy)) return status;
    std::lock_guard lock(exec->mutex);
    return host_operation(parameters, copy->operation);
}

CUresult cuGraphAddEmptyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count) {
    return add(node, graph, after, count, Operation{});
}

CUresult cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count,
                                  CUgraph child_handle) {
    std::shared_ptr<Graph> child = tables().graphs.get(child_handle);
    if (!child) return CUDA_ERROR_INVALID_VALUE;
    Operation operation;
    operation.type = CU_GRAPH_NODE_TYPE_GRAPH;
    {
        std::lock_guard lock(child->mutex);
        operation.child = copy_graph(*child, in_order(child->nodes), true);
    }
    return add(node, graph, after, count, std::move(operation));
}

CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode handle, CUgraph *graph) {
    NodePointer node;
    if (CUresult status = find_node(handle, CU_GRAPH_NODE_TYPE_GRAPH, node)) return status;
    if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *graph = static_cast<CUgraph>(node->operation.child->handle);
    return CUDA_SUCCESS;
}

CUresult cuGraphAddEventRecordNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count,
                                   CUevent event) {
    Operation operation;
    operation.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD;
    operation.event = tables().events.get(event);
    if (!operation.event) return CUDA_ERROR_INVALID_VALUE;
    return add(node, graph, after, count, std::move(operation));
}

CUresult cuGraphAddEventWaitNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count,
                                 CUevent event) {
    Operation operation;
    operation.type = CU_GRAPH_NODE_TYPE_WAIT_EVENT;
    operation.event = tables().events.get(event);
    if (!operation.event) return CUDA_ERROR_INVALID_VALUE;
    return add(node, graph, after, count, std::move(operation));
}

CUresult cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *,
                        size_t count, CUgraphNodeParams *parameters) {
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    switch (static_cast<int>(parameters->type)) {
        case CU_GRAPH_NODE_TYPE_KERNEL: {
            CUDA_KERNEL_NODE_PARAMS kernel{};
            kernel.func = parameters->kernel.func;
            kernel.gridDimX = parameters->kernel.gridDimX;
            kernel.gridDimY = parameters->kernel.gridDimY;
            kernel.gridDimZ = parameters->kernel.gridDimZ;
            kernel.blockDimX = parameters->kernel.blockDimX;
            kernel.blockDimY = parameters->kernel.blockDimY;
            kernel.blockDimZ = parameters->kernel.blockDimZ;
            kernel.sharedMemBytes = parameters->kernel.sharedMemBytes;
            kernel.kernelParams = parameters->kernel.kernelParams;
            kernel.extra = parameters->kernel.extra;
            kernel.kern = parameters->kernel.kern;
            kernel.ctx = parameters->kernel.ctx;
            return cuGraphAddKernelNode(node, graph, after, count, &kernel);
        }
        case CU_GRAPH_NODE_TYPE_MEMCPY:
            return cuGraphAddMemcpyNode(node, graph, after, count, &parameters->memcpy.copyParams, nullptr);
        case CU_GRAPH_NODE_TYPE_MEMSET: {
            CUDA_MEMSET_NODE_PARAMS fill{};
            fill.dst = parameters->memset.dst;
            fill.pitch = parameters->memset.pitch;
            fill.value = parameters->memset.value;
            fill.elementSize = parameters->memset.elementSize;
            fill.width = parameters->memset.width;
            fill.height = parameters->memset.height;
            return cuGraphAddMemsetNode(node, graph, after, count, &fill, nullptr);
        }
        case CU_GRAPH_NODE_TYPE_HOST: {
            CUDA_HOST_NODE_PARAMS host{};
            host.fn = parameters->host.fn;
            host.userData = parameters->host.userData;
            return cuGraphAddHostNode(node, graph, after, count, &host);
        }
        case CU_GRAPH_NODE_TYPE_GRAPH:
            return cuGraphAddChildGraphNode(node, graph, after, count, parameters->graph.graph);
        case CU_GRAPH_NODE_TYPE_EMPTY: return cuGraphAddEmptyNode(node, graph, after, count);
        case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
            return cuGraphAddEventRecordNode(node, graph, after, count, parameters->eventRecord.event);
        case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
            return cuGraphAddEventWaitNode(node, graph, after, count, parameters->eventWait.event);
        default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}

// ---------------------------------------------------------------------------------------------------- executable graphs

CUresult cuGraphInstantiateWithFlags(CUgraphExec *handle, CUgraph graph_handle, unsigned long long flags) {
    std::shared_ptr<Context> context;
    if (CUresult status = current(context)) return status;
    std::shared_ptr<Graph> graph = tables().graphs.get(graph_handle);
    if (!graph || handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(graph->mutex);
    std::vector<NodePointer> ordered = in_order(graph->nodes);
    if (ordered.size() != graph->nodes.size()) return CUDA_ERROR_INVALID_VALUE;
    auto exec = std::make_shared<GraphExec>();
    exec->flags = flags;
    exec->context = context;
    exec->graph = copy_graph(*graph, ordered, false);
    plan(*exec->graph);
    exec->handle = tables().execs.add(exec);
    *handle = static_cast<CUgraphExec>(exec->handle);
    return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec handle) {
    if (CUresult status = initialized()) return status;
    return tables().execs.remove(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphExecGetFlags(CUgraphExec handle, cuuint64_t *flags) {
    std::shared_ptr<GraphExec> exec = tables().execs.get(handle);
    if (!exec || flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *flags = exec->flags;
    return CUDA_SUCCESS;
}

CUresult cuGraphExecUpdate(CUgraphExec handle, CUgraph graph_handle, CUgraphExecUpdateResultInfo *result) {
    std::shared_ptr<GraphExec> exec = tables().execs.get(handle);
    std::shared_ptr<Graph> graph = tables().graphs.get(graph_handle);
    if (!exec || !graph) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(graph->mutex);
    std::vector<NodePointer> ordered = in_order(graph->nodes);
    bool same = ordered.size() == exec->graph->nodes.size();
    for (size_t i = 0; same && i < ordered.size(); i++)
        same = ordered[i]->operation.type == exec->graph->nodes[i]->operation.type &&
               ordered[i]->after.size() == exec->graph->nodes[i]->after.size();
    if (result != nullptr) {
        *result = {};
        result->result =
            same ? CU_GRAPH_EXEC_UPDATE_SUCCESS : CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    }
    if (!same) return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    std::lock_guard own(exec->mutex);
    exec->graph = copy_graph(*graph, ordered, false);
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeSetEnabled(CUgraphExec exec_handle, CUgraphNode handle, unsigned int enabled) {
    NodePointer node = tables().nodes.get(handle), copy;
    std::shared_ptr<GraphExec> exec;
    if (!node) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult status = find_exec_node(exec_handle, handle, node->operation.type, exec, copy)) return status;
    std::lock_guard lock(exec->mutex);
    copy->enabled = enabled != 0;
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetEnabled(CUgraphExec exec_handle, CUgraphNode handle, unsigned int *enabled) {
    NodePointer node = tables().nodes.get(handle), copy;
    std::shared_ptr<GraphExec> exec;
    if (!node || enabled == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult status = find_exec_node(exec_handle, handle, node->operation.type, exec, copy)) return status;
    *enabled = copy->enabled;
    return CUDA_SUCCESS;
}

// ------------------------------------------------------------------------------------- earlier versions of entry points

extern "C" {
CUresult add_kernel_v1(CUgraphNode *, CUgraph, const CUgraphNode *, size_t,
                       const CUDA_KERNEL_NODE_PARAMS_v1 *) __asm__("cuGraphAddKernelNode");
CUresult get_kernel_v1(CUgraphNode, CUDA_KERNEL_NODE_PARAMS_v1 *) __asm__("cuGraphKernelNodeGetParams");
CUresult set_kernel_v1(CUgraphNode, const CUDA_KERNEL_NODE_PARAMS_v1 *) __asm__("cuGraphKernelNodeSetParams");
CUresult exec_set_kernel_v1(CUgraphExec, CUgraphNode,
                            const CUDA_KERNEL_NODE_PARAMS_v1 *) __asm__("cuGraphExecKernelNodeSetParams");
CUresult edges_v1(CUgraph, CUgraphNode *, CUgraphNode *, size_t *) __asm__("cuGraphGetEdges");
CUresult dependencies_v1(CUgraphNode, CUgraphNode *, size_t *) __asm__("cuGraphNodeGetDependencies");
CUresult dependents_v1(CUgraphNode, CUgraphNode *, size_t *) __asm__("cuGraphNodeGetDependentNodes");
CUresult add_dependencies_v1(CUgraph, const CUgraphNode *, const CUgraphNode *,
                             size_t) __asm__("cuGraphAddDependencies");
CUresult remove_dependencies_v1(CUgraph, const CUgraphNode *, const CUgraphNode *,
                                size_t) __asm__("cuGraphRemoveDependencies");
CUresult instantiate_v1(CUgraphExec *, CUgraph, CUgraphNode *, char *, size_t) __asm__("cuGraphInstantiate");
CUresult instantiate_v2(CUgraphExec *, CUgraph, CUgraphNode *, char *, size_t) __asm__("cuGraphInstantiate_v2");

CUresult add_kernel_v1(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count,
                       const CUDA_KERNEL_NODE_PARAMS_v1 *parameters) {
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    CUDA_KERNEL_NODE_PARAMS now = newest(*parameters);
    return cuGraphAddKernelNode(node, graph, after, count, &now);
}
CUresult get_kernel_v1(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v1 *parameters) {
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    CUDA_KERNEL_NODE_PARAMS now;
    if (CUresult status = cuGraphKernelNodeGetParams(node, &now)) return status;
    memcpy(parameters, &now, sizeof *parameters);  // the later version appends fields
    return CUDA_SUCCESS;
}
CUresult set_kernel_v1(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *parameters) {
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    CUDA_KERNEL_NODE_PARAMS now = newest(*parameters);
    return cuGraphKernelNodeSetParams(node, &now);
}
CUresult exec_set_kernel_v1(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *parameters) {
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    CUDA_KERNEL_NODE_PARAMS now = newest(*parameters);
    return cuGraphExecKernelNodeSetParams(exec, node, &now);
}
CUresult edges_v1(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count) {
    return cuGraphGetEdges(graph, from, to, nullptr, count);
}
CUresult dependencies_v1(CUgraphNode node, CUgraphNode *nodes, size_t *count) {
    return cuGraphNodeGetDependencies(node, nodes, nullptr, count);
}
CUresult dependents_v1(CUgraphNode node, CUgraphNode *nodes, size_t *count) {
    return cuGraphNodeGetDependentNodes(node, nodes, nullptr, count);
}
CUresult add_dependencies_v1(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count) {
    return cuGraphAddDependencies(graph, from, to, nullptr, count);
}
CUresult remove_dependencies_v1(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count) {
    return cuGraphRemoveDependencies(graph, from, to, nullptr, count);
}
CUresult instantiate_v1(CUgraphExec *exec, CUgraph graph, CUgraphNode *node, char *log, size_t size) {
    if (node != nullptr) *node = nullptr;
    if (log != nullptr && size != 0) *log = '\0';
    return cuGraphInstantiateWithFlags(exec, graph, 0);
}
CUresult instantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *node, char *log, size_t size) {
    return instantiate_v1(exec, graph, node, log, size);
}
}

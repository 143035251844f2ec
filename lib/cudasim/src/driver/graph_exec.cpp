// Executable graphs: private copies with their nodes in topological order. Nodes that do not depend on each other run in
// parallel, in different queues.
#include "driver/graph.h"
#include "sanitizer/hooks.h"

#include <algorithm>

namespace cudasim::driver {
namespace {

// Assigns nodes to queues. A node goes to the queue of one of its dependencies if it can, so a graph without branches needs
// no queues.
void assign_queues(Graph &graph) {
    constexpr size_t kMaxQueues = 16;
    std::set<const GraphNode *> continued;
    size_t count = 0;
    for (size_t i = 0; i < graph.nodes.size(); i++) {
        GraphNode &node = *graph.nodes[i];
        node.position = i;
        node.queue = SIZE_MAX;
        for (const NodePointer &dependency : node.dependencies)
            if (node.queue == SIZE_MAX && continued.insert(dependency.get()).second)
                node.queue = dependency->queue;
        if (node.queue == SIZE_MAX) node.queue = count++ % kMaxQueues;
        for (const std::shared_ptr<Graph> &child : node.operation.children) assign_queues(*child);
    }
    graph.queues.clear();
    if (count < 2) return;
    for (size_t i = 0; i < std::min(count, kMaxQueues); i++)
        graph.queues.push_back(std::make_shared<Queue>());
}

// Prepares the event nodes of one launch. Event waits are for the last record before this launch.
void prepare_events(Graph &graph, CUgraphNodeType type) {
    for (const NodePointer &node : graph.nodes) {
        Operation &operation = node->operation;
        for (const std::shared_ptr<Graph> &child : operation.children) prepare_events(*child, type);
        if (operation.type != type) continue;
        if (type == CU_GRAPH_NODE_TYPE_EVENT_RECORD) {
            operation.recording = std::make_shared<EventState>();
            continue;
        }
        std::lock_guard lock(operation.event->mutex);
        operation.recording = operation.event->last;
    }
}

// Sets conditionals to their values at the start of a launch.
void assign_defaults(const Graph &graph) {
    for (const std::shared_ptr<Conditional> &one : graph.conditionals)
        if (one->assigns_default) one->value = one->default_value;
    for (const NodePointer &node : graph.nodes)
        for (const std::shared_ptr<Graph> &child : node->operation.children) assign_defaults(*child);
}

void publish_events(Graph &graph) {
    for (const NodePointer &node : graph.nodes) {
        Operation &operation = node->operation;
        for (const std::shared_ptr<Graph> &child : operation.children) publish_events(*child);
        if (operation.type != CU_GRAPH_NODE_TYPE_EVENT_RECORD) continue;
        if (!node->enabled) continue;
        std::lock_guard lock(operation.event->mutex);
        operation.event->last = operation.recording;
        operation.event->captured_graph.reset();
        operation.event->captured_dependencies.clear();
    }
}

}  // namespace

CUresult find_exec_node(CUgraphExec exec_handle, CUgraphNode handle, CUgraphNodeType type,
                        std::shared_ptr<GraphExec> &exec, NodePointer &copy) {
    NodePointer node;
    if (CUresult status = find_node(handle, type, node)) return status;
    exec = tables().execs.get(exec_handle);
    if (!exec) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(exec->mutex);
    for (const NodePointer &candidate : exec->graph->nodes)
        if (candidate->original == node) copy = candidate;
    return copy ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult launch_graph(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                      const std::shared_ptr<GraphExec> &exec) {
    std::optional<sanitizer::GraphLaunch> told;  // destroyed after the locks
    std::unique_lock lock(context->mutex);
    std::unique_lock exec_lock(exec->mutex);
    Operation operation;
    operation.type = CU_GRAPH_NODE_TYPE_GRAPH;
    // A copy, because the parameters may change before it runs. In a capture it becomes a child graph, which has handles.
    std::shared_ptr<Graph> snapshot =
        copy_graph(*exec->graph, exec->graph->nodes, stream->capture != nullptr);
    operation.children = {snapshot};
    if (sanitizer::active() && !stream->capture) {
        exec_lock.unlock();
        lock.unlock();
        told.emplace(context, stream, static_cast<CUgraphExec>(exec->handle), *snapshot, false);
        lock.lock();
        exec_lock.lock();
    }
    if (stream->capture) return submit(context, stream, std::move(operation), nullptr, kLaunchNs);
    operation.stream_only = [snapshot] { assign_defaults(*snapshot); };
    prepare_events(*snapshot, CU_GRAPH_NODE_TYPE_WAIT_EVENT);
    prepare_events(*snapshot, CU_GRAPH_NODE_TYPE_EVENT_RECORD);
    operation.wait_for.push_back(exec->last);
    if (CUresult status = submit(context, stream, std::move(operation), &exec->last, kLaunchNs))
        return status;
    publish_events(*snapshot);
    return CUDA_SUCCESS;
}

CUresult update_graph(Graph &exec, const Graph &graph, CUgraphExecUpdateResultInfo *result) {
    CUgraphExecUpdateResultInfo ignored;
    CUgraphExecUpdateResultInfo &found = result != nullptr ? *result : ignored;
    found = {};
    std::vector<NodePointer> ordered = topological_order(graph.nodes);
    auto differs = [&found](CUgraphExecUpdateResult reason, const NodePointer &node) {
        found.result = reason;
        if (node) found.errorNode = static_cast<CUgraphNode>(node->handle);
        return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    };
    if (ordered.size() != exec.nodes.size())
        return differs(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, nullptr);
    std::map<const GraphNode *, size_t> positions;
    for (size_t i = 0; i < ordered.size(); i++) {
        const GraphNode &updated = *ordered[i], &current = *exec.nodes[i];
        positions[&updated] = i;
        if (updated.operation.type != current.operation.type)
            return differs(CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED, ordered[i]);
        std::set<size_t> new_dependencies, dependencies;
        for (const NodePointer &node : updated.dependencies)
            new_dependencies.insert(positions.at(node.get()));
        for (const NodePointer &node : current.dependencies) dependencies.insert(node->position);
        if (new_dependencies != dependencies)
            return differs(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, ordered[i]);
        if (updated.operation.type == CU_GRAPH_NODE_TYPE_KERNEL &&
            (updated.operation.kernel.cooperative != current.operation.kernel.cooperative ||
             !(updated.operation.kernel.cluster == current.operation.kernel.cluster)))
            return differs(CU_GRAPH_EXEC_UPDATE_ERROR_ATTRIBUTES_CHANGED, ordered[i]);
        if (updated.operation.children.size() != current.operation.children.size() ||
            updated.operation.conditional != current.operation.conditional ||
            updated.operation.conditional_type != current.operation.conditional_type)
            return differs(CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED, ordered[i]);
    }
    for (size_t i = 0; i < ordered.size(); i++) {
        const auto &children = ordered[i]->operation.children;
        for (size_t k = 0; k < children.size(); k++)
            if (CUresult status = update_graph(*exec.nodes[i]->operation.children[k], *children[k], result))
                return status;
        if (!children.empty()) continue;
        exec.nodes[i]->operation = ordered[i]->operation;
        exec.nodes[i]->attributes = ordered[i]->attributes;
    }
    return CUDA_SUCCESS;
}

}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

// ---------------------------------------------------------------------------------------------------- executable graphs

CUresult cuGraphInstantiateWithFlags(CUgraphExec *handle, CUgraph graph_handle, unsigned long long flags) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    std::shared_ptr<Graph> graph = tables().graphs.get(graph_handle);
    if (!graph || handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(graph->mutex);
    std::vector<NodePointer> ordered = topological_order(graph->nodes);
    if (ordered.size() != graph->nodes.size()) return CUDA_ERROR_INVALID_VALUE;
    auto exec = std::make_shared<GraphExec>();
    exec->flags = flags;
    exec->context = context;
    exec->graph = copy_graph(*graph, ordered, false);
    assign_queues(*exec->graph);
    exec->handle = tables().execs.add(exec);
    *handle = static_cast<CUgraphExec>(exec->handle);
    if (sanitizer::active())
        sanitizer::graph_exec_changed(sanitizer::kGraphExecCreated, graph_handle, *handle);
    return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec handle) {
    if (CUresult status = check_initialized()) return status;
    if (sanitizer::active() && tables().execs.get(handle))
        sanitizer::graph_exec_changed(sanitizer::kGraphExecDestroying, nullptr, handle);
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
    std::lock_guard exec_lock(exec->mutex);
    return update_graph(*exec->graph, *graph, result);
}

namespace {

bool can_be_disabled(const GraphNode &node) {
    CUgraphNodeType type = node.operation.type;
    return type == CU_GRAPH_NODE_TYPE_KERNEL || type == CU_GRAPH_NODE_TYPE_MEMCPY ||
           type == CU_GRAPH_NODE_TYPE_MEMSET;
}

}  // namespace

CUresult cuGraphNodeSetEnabled(CUgraphExec exec_handle, CUgraphNode handle, unsigned int enabled) {
    NodePointer node = tables().nodes.get(handle), copy;
    std::shared_ptr<GraphExec> exec;
    if (!node || !can_be_disabled(*node)) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult status = find_exec_node(exec_handle, handle, node->operation.type, exec, copy))
        return status;
    std::lock_guard lock(exec->mutex);
    copy->enabled = enabled != 0;
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetEnabled(CUgraphExec exec_handle, CUgraphNode handle, unsigned int *enabled) {
    NodePointer node = tables().nodes.get(handle), copy;
    std::shared_ptr<GraphExec> exec;
    if (!node || enabled == nullptr || !can_be_disabled(*node)) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult status = find_exec_node(exec_handle, handle, node->operation.type, exec, copy))
        return status;
    *enabled = copy->enabled;
    return CUDA_SUCCESS;
}

// ------------------------------------------------------------------------------------- earlier versions of entry points

extern "C" {
CUresult instantiate_v1(CUgraphExec *, CUgraph, CUgraphNode *, char *, size_t) __asm__("cuGraphInstantiate");
CUresult instantiate_v2(CUgraphExec *, CUgraph, CUgraphNode *, char *,
                        size_t) __asm__("cuGraphInstantiate_v2");
CUresult update_v1(CUgraphExec, CUgraph, CUgraphNode *,
                   CUgraphExecUpdateResult *) __asm__("cuGraphExecUpdate");

CUresult instantiate_v1(CUgraphExec *exec, CUgraph graph, CUgraphNode *node, char *log, size_t size) {
    if (node != nullptr) *node = nullptr;
    if (log != nullptr && size != 0) *log = '\0';
    return cuGraphInstantiateWithFlags(exec, graph, 0);
}
CUresult instantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *node, char *log, size_t size) {
    return instantiate_v1(exec, graph, node, log, size);
}
CUresult update_v1(CUgraphExec exec, CUgraph graph, CUgraphNode *node, CUgraphExecUpdateResult *result) {
    CUgraphExecUpdateResultInfo found{};
    CUresult status = cuGraphExecUpdate(exec, graph, &found);
    if (node != nullptr) *node = found.errorNode;
    if (result != nullptr) *result = found.result;
    return status;
}
}

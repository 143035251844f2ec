// Executable graphs: private copies whose nodes are in order. A replay runs them in an order that the dependencies allow;
// nodes that do not depend on each other run beside each other, in lanes.
#include "driver/graph.h"

#include <algorithm>

namespace cudasim::driver {
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

CUresult update_graph(Graph &exec, const Graph &graph, CUgraphExecUpdateResultInfo *result) {
    CUgraphExecUpdateResultInfo ignored;
    CUgraphExecUpdateResultInfo &found = result != nullptr ? *result : ignored;
    found = {};
    std::vector<NodePointer> ordered = in_order(graph.nodes);
    auto differs = [&found](CUgraphExecUpdateResult why, const NodePointer &node) {
        found.result = why;
        if (node) found.errorNode = static_cast<CUgraphNode>(node->handle);
        return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    };
    if (ordered.size() != exec.nodes.size())
        return differs(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, nullptr);
    std::map<const GraphNode *, size_t> positions;
    for (size_t i = 0; i < ordered.size(); i++) {
        const GraphNode &now = *ordered[i], &before = *exec.nodes[i];
        positions[&now] = i;
        if (now.operation.type != before.operation.type)
            return differs(CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED, ordered[i]);
        std::set<size_t> after, used;
        for (const NodePointer &node : now.after) after.insert(positions.at(node.get()));
        for (const NodePointer &node : before.after) used.insert(node->position);
        if (after != used) return differs(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, ordered[i]);
        if (now.operation.type == CU_GRAPH_NODE_TYPE_KERNEL &&
            now.operation.kernel.cooperative != before.operation.kernel.cooperative)
            return differs(CU_GRAPH_EXEC_UPDATE_ERROR_ATTRIBUTES_CHANGED, ordered[i]);
    }
    for (size_t i = 0; i < ordered.size(); i++) {
        if (ordered[i]->operation.type == CU_GRAPH_NODE_TYPE_GRAPH) {
            if (CUresult status =
                    update_graph(*exec.nodes[i]->operation.child, *ordered[i]->operation.child, result))
                return status;
            continue;
        }
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
    std::lock_guard own(exec->mutex);
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

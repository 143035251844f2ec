// Graphs and user objects. graph_nodes.cpp has the types of nodes, graph_exec.cpp executable graphs.
#include "driver/graph.h"

#include <stdio.h>
#include <string.h>

#include <algorithm>

namespace cudasim::driver {

namespace {

// The conditionals of the process by number. A kernel may set one after its graph was destroyed.
struct Conditionals {
    std::shared_mutex mutex;
    uint64_t next = 1;
    std::map<uint64_t, std::weak_ptr<Conditional>> by_number;
};

Conditionals &conditionals() {
    static Conditionals *const instance = new Conditionals();
    return *instance;
}

}  // namespace

std::shared_ptr<Conditional> Conditional::create() {
    auto made = std::make_shared<Conditional>();
    std::unique_lock lock(conditionals().mutex);
    made->number = conditionals().next++;
    conditionals().by_number[made->number] = made;
    return made;
}

std::shared_ptr<Conditional> Conditional::find(uint64_t number) {
    std::shared_lock lock(conditionals().mutex);
    auto found = conditionals().by_number.find(number);
    return found == conditionals().by_number.end() ? nullptr : found->second.lock();
}

Conditional::~Conditional() {
    std::unique_lock lock(conditionals().mutex);
    conditionals().by_number.erase(number);
}

std::vector<NodePointer> topological_order(const std::vector<NodePointer> &nodes) {
    std::vector<NodePointer> ordered;
    std::set<const GraphNode *> done;
    std::vector<NodePointer> remaining = nodes;
    while (!remaining.empty()) {
        std::vector<NodePointer> later;
        for (const NodePointer &node : remaining) {
            bool ready =
                std::all_of(node->dependencies.begin(), node->dependencies.end(),
                            [&](const NodePointer &dependency) { return done.count(dependency.get()) != 0; });
            if (!ready) {
                later.push_back(node);
                continue;
            }
            ordered.push_back(node);
            done.insert(node.get());
        }
        if (later.size() == remaining.size()) return {};
        remaining = std::move(later);
    }
    return ordered;
}

std::shared_ptr<Graph> copy_graph(const Graph &graph, const std::vector<NodePointer> &nodes, bool handles) {
    auto copy = std::make_shared<Graph>();
    copy->context = graph.context;
    copy->next_id = graph.next_id;
    copy->queues = graph.queues;
    copy->user_objects = graph.user_objects;
    copy->conditionals = graph.conditionals;
    std::map<const GraphNode *, NodePointer> copies;
    for (const NodePointer &node : nodes) {
        auto copied = std::make_shared<GraphNode>();
        copied->id = node->id;
        copied->graph = copy;
        copied->operation = node->operation;
        copied->original = node;
        copied->enabled = node->enabled;
        copied->attributes = node->attributes;
        copied->position = node->position;
        copied->queue = node->queue;
        for (std::shared_ptr<Graph> &child : copied->operation.children) {
            std::lock_guard lock(child->mutex);
            child = copy_graph(*child, topological_order(child->nodes), handles);
        }
        for (const NodePointer &dependency : node->dependencies)
            copied->dependencies.push_back(copies.at(dependency.get()));
        if (handles) copied->handle = tables().nodes.add(copied);
        copies[node.get()] = copied;
        copy->nodes.push_back(copied);
    }
    if (handles) copy->handle = tables().graphs.add(copy);
    return copy;
}

namespace {

void remove_handles(const Graph &graph) {
    for (const NodePointer &node : graph.nodes) {
        for (const std::shared_ptr<Graph> &child : node->operation.children) {
            remove_handles(*child);
            if (child->handle != nullptr) tables().graphs.remove(child->handle);
        }
        if (node->handle != nullptr) tables().nodes.remove(node->handle);
    }
}

// Calls `change` for each pair of a source and a target in a graph, until it returns false.
template <class Change>
CUresult change_edges(CUgraph handle, const CUgraphNode *from, const CUgraphNode *to, size_t count,
                      Change change) {
    std::shared_ptr<Graph> graph = tables().graphs.get(handle);
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    std::vector<NodePointer> sources, targets;
    if (CUresult status = find_nodes(from, count, graph, sources)) return status;
    if (CUresult status = find_nodes(to, count, graph, targets)) return status;
    std::lock_guard lock(graph->mutex);
    for (size_t i = 0; i < count; i++)
        if (!change(sources[i], *targets[i])) return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

}  // namespace

bool has_conditional_nodes(const Graph &graph) {
    return std::any_of(graph.nodes.begin(), graph.nodes.end(), [](const NodePointer &node) {
        return node->operation.type == CU_GRAPH_NODE_TYPE_CONDITIONAL;
    });
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

CUresult find_node(CUgraphNode handle, CUgraphNodeType type, NodePointer &node) {
    if (CUresult status = check_initialized()) return status;
    node = tables().nodes.get(handle);
    return node && node->operation.type == type ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult list_nodes(const std::vector<NodePointer> &nodes, CUgraphNode *out, size_t *count) {
    if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (out == nullptr) {
        *count = nodes.size();
        return CUDA_SUCCESS;
    }
    size_t room = *count;
    for (size_t i = 0; i < room; i++)
        out[i] = i < nodes.size() ? static_cast<CUgraphNode>(nodes[i]->handle) : nullptr;
    *count = std::min(room, nodes.size());
    return CUDA_SUCCESS;
}

std::shared_ptr<GraphNode> add_node(const std::shared_ptr<Graph> &graph, Operation operation,
                                    const std::vector<std::shared_ptr<GraphNode>> &dependencies) {
    auto node = std::make_shared<GraphNode>();
    node->graph = graph;
    node->operation = std::move(operation);
    node->dependencies = dependencies;
    node->handle = tables().nodes.add(node);
    std::lock_guard lock(graph->mutex);
    node->id = graph->next_id++;
    graph->nodes.push_back(node);
    return node;
}

}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

// ---------------------------------------------------------------------------------------------------- graphs

CUresult cuGraphCreate(CUgraph *handle, unsigned int flags) {
    if (CUresult status = check_initialized()) return status;
    if (handle == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    auto graph = std::make_shared<Graph>();
    if (std::shared_ptr<Context> context = current_context_or_null()) graph->context = context;
    graph->handle = tables().graphs.add(graph);
    *handle = static_cast<CUgraph>(graph->handle);
    return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph handle) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<Graph> graph = tables().graphs.remove(handle);
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(graph->mutex);
    remove_handles(*graph);
    for (const NodePointer &node : graph->nodes) node->dependencies.clear();
    return CUDA_SUCCESS;
}

CUresult cuGraphClone(CUgraph *clone, CUgraph handle) {
    std::shared_ptr<Graph> graph = tables().graphs.get(handle);
    if (!graph || clone == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(graph->mutex);
    if (has_conditional_nodes(*graph)) return CUDA_ERROR_NOT_SUPPORTED;
    *clone = static_cast<CUgraph>(copy_graph(*graph, topological_order(graph->nodes), true)->handle);
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
    return list_nodes(graph->nodes, nodes, count);
}

CUresult cuGraphGetRootNodes(CUgraph handle, CUgraphNode *nodes, size_t *count) {
    std::shared_ptr<Graph> graph = tables().graphs.get(handle);
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(graph->mutex);
    std::vector<NodePointer> roots;
    for (const NodePointer &node : graph->nodes)
        if (node->dependencies.empty()) roots.push_back(node);
    return list_nodes(roots, nodes, count);
}

CUresult cuGraphGetEdges(CUgraph handle, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data,
                         size_t *count) {
    std::shared_ptr<Graph> graph = tables().graphs.get(handle);
    if (!graph || count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(graph->mutex);
    size_t index = 0;
    for (const NodePointer &node : graph->nodes)
        for (const NodePointer &dependency : node->dependencies) {
            if (from != nullptr && to != nullptr && index < *count) {
                from[index] = static_cast<CUgraphNode>(dependency->handle);
                to[index] = static_cast<CUgraphNode>(node->handle);
                if (data != nullptr) data[index] = {};
            }
            index++;
        }
    *count = from == nullptr || to == nullptr ? index : std::min(index, *count);
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetDependencies(CUgraphNode handle, CUgraphNode *nodes, CUgraphEdgeData *data,
                                    size_t *count) {
    NodePointer node = tables().nodes.get(handle);
    if (!node) return CUDA_ERROR_INVALID_VALUE;
    if (data != nullptr && count != nullptr) memset(data, 0, *count * sizeof *data);
    return list_nodes(node->dependencies, nodes, count);
}

CUresult cuGraphNodeGetDependentNodes(CUgraphNode handle, CUgraphNode *nodes, CUgraphEdgeData *data,
                                      size_t *count) {
    NodePointer node = tables().nodes.get(handle);
    std::shared_ptr<Graph> graph = node ? node->graph.lock() : nullptr;
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    std::vector<NodePointer> dependent;
    std::lock_guard lock(graph->mutex);
    for (const NodePointer &other : graph->nodes)
        if (std::find(other->dependencies.begin(), other->dependencies.end(), node) !=
            other->dependencies.end())
            dependent.push_back(other);
    if (data != nullptr && count != nullptr) memset(data, 0, *count * sizeof *data);
    return list_nodes(dependent, nodes, count);
}

CUresult cuGraphAddDependencies(CUgraph handle, const CUgraphNode *from, const CUgraphNode *to,
                                const CUgraphEdgeData *, size_t count) {
    return change_edges(handle, from, to, count, [](const NodePointer &source, GraphNode &target) {
        auto &dependencies = target.dependencies;
        if (source.get() == &target ||
            std::find(dependencies.begin(), dependencies.end(), source) != dependencies.end())
            return false;
        dependencies.push_back(source);
        return true;
    });
}

CUresult cuGraphRemoveDependencies(CUgraph handle, const CUgraphNode *from, const CUgraphNode *to,
                                   const CUgraphEdgeData *, size_t count) {
    return change_edges(handle, from, to, count, [](const NodePointer &source, GraphNode &target) {
        auto &dependencies = target.dependencies;
        auto found = std::find(dependencies.begin(), dependencies.end(), source);
        if (found == dependencies.end()) return false;
        dependencies.erase(found);
        return true;
    });
}

CUresult cuGraphDestroyNode(CUgraphNode handle) {
    NodePointer node = tables().nodes.get(handle);
    std::shared_ptr<Graph> graph = node ? node->graph.lock() : nullptr;
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(graph->mutex);
    graph->nodes.erase(std::remove(graph->nodes.begin(), graph->nodes.end(), node), graph->nodes.end());
    for (const NodePointer &other : graph->nodes)
        other->dependencies.erase(std::remove(other->dependencies.begin(), other->dependencies.end(), node),
                                  other->dependencies.end());
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
        const char *name =
            node->operation.kernel.function ? node->operation.kernel.function->kernel().name.c_str() : "";
        fprintf(file, "n%llu [label=\"type %d %s\"]\n", static_cast<unsigned long long>(node->id),
                static_cast<int>(node->operation.type), name);
        for (const NodePointer &dependency : node->dependencies)
            fprintf(file, "n%llu -> n%llu\n", static_cast<unsigned long long>(dependency->id),
                    static_cast<unsigned long long>(node->id));
    }
    fprintf(file, "}\n");
    fclose(file);
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------- user objects

CUresult cuUserObjectCreate(CUuserObject *handle, void *data, CUhostFn destroy, unsigned int count,
                            unsigned int flags) {
    if (CUresult status = check_initialized()) return status;
    if (handle == nullptr || destroy == nullptr || count == 0 || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
        return CUDA_ERROR_INVALID_VALUE;
    auto references = std::make_shared<UserReferences>();
    references->object = std::make_shared<UserObject>();
    references->object->data = data;
    references->object->destroy = destroy;
    references->count = count;
    *handle = static_cast<CUuserObject>(tables().user_objects.add(references));
    return CUDA_SUCCESS;
}

CUresult cuUserObjectRetain(CUuserObject handle, unsigned int count) {
    std::shared_ptr<UserReferences> references = tables().user_objects.get(handle);
    if (!references || count == 0) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(references->mutex);
    references->count += count;
    return CUDA_SUCCESS;
}

CUresult cuUserObjectRelease(CUuserObject handle, unsigned int count) {
    std::shared_ptr<UserReferences> references = tables().user_objects.get(handle);
    if (!references || count == 0) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<UserObject> last;  // destroyed after the mutex is released
    std::lock_guard lock(references->mutex);
    if (count > references->count) return CUDA_ERROR_INVALID_VALUE;
    references->count -= count;
    // The handle stays valid: graphs that hold the object release it by the handle.
    if (references->count == 0) last = std::move(references->object);
    return CUDA_SUCCESS;
}

CUresult cuGraphRetainUserObject(CUgraph graph_handle, CUuserObject handle, unsigned int count,
                                 unsigned int flags) {
    std::shared_ptr<Graph> graph = tables().graphs.get(graph_handle);
    std::shared_ptr<UserReferences> references = tables().user_objects.get(handle);
    if (!graph || !references || count == 0 || (flags & ~unsigned{CU_GRAPH_USER_OBJECT_MOVE}) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    {
        std::lock_guard references_lock(references->mutex);
        std::lock_guard lock(graph->mutex);
        if (!references->object) return CUDA_ERROR_INVALID_VALUE;
        auto &held = graph->user_objects[handle];
        held.first = references->object;
        held.second += count;
    }
    return (flags & CU_GRAPH_USER_OBJECT_MOVE) != 0 ? cuUserObjectRelease(handle, count) : CUDA_SUCCESS;
}

CUresult cuGraphReleaseUserObject(CUgraph graph_handle, CUuserObject handle, unsigned int count) {
    std::shared_ptr<Graph> graph = tables().graphs.get(graph_handle);
    if (!graph || count == 0) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<UserObject> last;
    std::lock_guard lock(graph->mutex);
    auto held = graph->user_objects.find(handle);
    if (held == graph->user_objects.end() || held->second.second < count) return CUDA_ERROR_INVALID_VALUE;
    held->second.second -= count;
    if (held->second.second != 0) return CUDA_SUCCESS;
    last = std::move(held->second.first);
    graph->user_objects.erase(held);
    return CUDA_SUCCESS;
}

// ------------------------------------------------------------------------------------- earlier versions of entry points

extern "C" {
CUresult edges_v1(CUgraph, CUgraphNode *, CUgraphNode *, size_t *) __asm__("cuGraphGetEdges");
CUresult dependencies_v1(CUgraphNode, CUgraphNode *, size_t *) __asm__("cuGraphNodeGetDependencies");
CUresult dependents_v1(CUgraphNode, CUgraphNode *, size_t *) __asm__("cuGraphNodeGetDependentNodes");
CUresult add_dependencies_v1(CUgraph, const CUgraphNode *, const CUgraphNode *,
                             size_t) __asm__("cuGraphAddDependencies");
CUresult remove_dependencies_v1(CUgraph, const CUgraphNode *, const CUgraphNode *,
                                size_t) __asm__("cuGraphRemoveDependencies");

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
}

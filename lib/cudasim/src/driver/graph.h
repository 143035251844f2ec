// Shared by the files about graphs.
#pragma once

#include "driver/driver.h"

namespace cudasim::driver {

using NodePointer = std::shared_ptr<GraphNode>;

// Sorts nodes so that each comes after its dependencies. Returns nothing if they form a cycle.
std::vector<NodePointer> topological_order(const std::vector<NodePointer> &nodes);
// Copies a graph and its child graphs; each copy's `original` is the node it was copied from. `handles`: gives the copies
// handles.
std::shared_ptr<Graph> copy_graph(const Graph &graph, const std::vector<NodePointer> &nodes, bool handles);
// Whether the graph itself has conditional nodes. Such a graph can be neither cloned nor a child graph.
bool has_conditional_nodes(const Graph &graph);
// Finds nodes by their handles. Fails if one is not in `graph`.
CUresult find_nodes(const CUgraphNode *handles, size_t count, const std::shared_ptr<Graph> &graph,
                    std::vector<NodePointer> &nodes);
// Finds a node. Fails if it has another type.
CUresult find_node(CUgraphNode handle, CUgraphNodeType type, NodePointer &node);
// Finds the node of an executable graph that was copied from `handle`.
CUresult find_exec_node(CUgraphExec exec_handle, CUgraphNode handle, CUgraphNodeType type,
                        std::shared_ptr<GraphExec> &exec, NodePointer &copy);
// Updates an executable graph, or a child of one, with the parameters of a graph of the same topology. Otherwise returns
// CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, with the reason in `result` (may be null). The caller holds both mutexes.
CUresult update_graph(Graph &exec, const Graph &graph, CUgraphExecUpdateResultInfo *result);
// Writes the handles of nodes as the API does: if `out` is null, only their number.
CUresult list_nodes(const std::vector<NodePointer> &nodes, CUgraphNode *out, size_t *count);

}  // namespace cudasim::driver

// What the files about graphs share.
#pragma once

#include "driver/driver.h"

namespace cudasim::driver {

using NodePointer = std::shared_ptr<GraphNode>;

// Nodes with every node after its dependencies; empty when they form a circle.
std::vector<NodePointer> in_order(const std::vector<NodePointer> &nodes);
// A deep copy whose nodes know the nodes they were copied from. `handles`: the copies are for the application too.
std::shared_ptr<Graph> copy_graph(const Graph &graph, const std::vector<NodePointer> &nodes, bool handles);
// The nodes behind handles, all of one graph.
CUresult find_nodes(const CUgraphNode *handles, size_t count, const std::shared_ptr<Graph> &graph,
                    std::vector<NodePointer> &nodes);
CUresult find_node(CUgraphNode handle, CUgraphNodeType type, NodePointer &node);
// The node of an executable graph that was copied from `handle`.
CUresult find_exec_node(CUgraphExec exec_handle, CUgraphNode handle, CUgraphNodeType type,
                        std::shared_ptr<GraphExec> &exec, NodePointer &copy);
// Gives a part of an executable graph the parameters of a graph that looks the same; else
// CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, with the reason in `result`, if there is one. With both locked.
CUresult update_graph(Graph &exec, const Graph &graph, CUgraphExecUpdateResultInfo *result);
// Lists nodes as the API does: with no room to write them to, only how many there are.
CUresult list(const std::vector<NodePointer> &nodes, CUgraphNode *out, size_t *count);

}  // namespace cudasim::driver

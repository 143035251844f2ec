// Graphs: which kernels a replay runs, and their instrumented copies in executable graphs (docs/timing.md, "Launch identity").
//
// The program's own graphs are never touched. Once it has made or updated an executable graph, a clone of its graph gets the copies, and
// the executable graph is updated from the clone. So nothing that the program can read back is anything but its own.
#pragma once

#include <functional>

#include "operation.h"
#include "state.h"

namespace gpubpf {

void new_graphs();  // at the agent's start, see new_operations()

// After the driver's calls; `graph` is what it was made, or updated, from.
void graph_made(CUgraphExec exec, CUgraph graph, uint64_t flags);
void graph_updated(CUgraphExec exec, CUgraph graph);
void kernel_node_set(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS &params);
void child_node_set(CUgraphExec exec, CUgraphNode node, CUgraph child);
void node_enabled(CUgraphExec exec, CUgraphNode node, bool enabled);
void graph_gone(CUgraphExec exec);  // before it is destroyed

// The launch itself, through `original`.
CUresult launch_graph(CUgraphExec exec, Where where, const std::function<CUresult()> &original);

// The program's function where a graph gives back a copy: one that was made from the launch of an executable graph.
CUfunction own_function(CUfunction function);

// Room for the numbers of replays. With context.busy held and the context current.
void prepare_cells(Context &context);

}  // namespace gpubpf

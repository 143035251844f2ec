// Graphs: which kernels a graph launch runs, and their instrumented copies in executable graphs
// (docs/timing.md, "Launch identity").
//
// The program's own graphs are never changed. When the program has made or updated an executable graph, the
// agent clones the source graph, puts the copies into the clone, and updates the executable graph from it. So
// the program can only read back its own graphs. Graphs with conditional nodes cannot be cloned: the program's
// graph has the copies while the agent updates the executable graph.
#pragma once

#include <functional>
#include <memory>

#include "log/operation.h"
#include "state.h"

namespace gpubpf {

extern const Lifetime graph_lifetime;
struct Leftovers;
void gather_graphs(const Context &context, Leftovers &to);  // collects their driver objects on detach

// Call these after the driver's calls. `graph`: the graph from which the executable graph was made or updated.
void graph_made(CUgraphExec exec, CUgraph graph, uint64_t flags);
void graph_updated(CUgraphExec exec, CUgraph graph);
void conditional_node_made(CUgraphNode node, const CUgraph *bodies, uint32_t count);
void kernel_node_set(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS &params);
void child_node_set(CUgraphExec exec, CUgraphNode node, CUgraph child);
void node_enabled(CUgraphExec exec, CUgraphNode node, bool enabled);
void graph_gone(CUgraphExec exec);     // before it is destroyed
void graph_changed(CUgraphExec exec);  // changed in another way; its copies stay as long as it exists
// While the result exists, no other thread changes the executable graph. Hold it around the driver's call and
// the calls above. The result is null for an unknown graph.
std::shared_ptr<void> hold_exec(CUgraphExec exec);
// Launches are no longer replaced: gives executable graphs the program's own kernels again. Waits up to
// wait_ms for each one that is in use.
void graphs_back(uint32_t wait_ms);
// The same for one graph, which is about to be launched. Its copies' counts would not be read.
void graph_back(CUgraphExec exec);

// Launches the graph through `original`.
CUresult launch_graph(const HookCall &hook, CUgraphExec exec, StreamRef where,
                      const std::function<CUresult()> &original);

// Returns the program's function for a copy's. A graph that was captured from the launch of an executable
// graph may return a copy's.
CUfunction own_function(CUfunction function);

}  // namespace gpubpf

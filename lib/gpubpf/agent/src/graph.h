// Graphs: which kernels a replay runs, and their instrumented copies in executable graphs (docs/timing.md, "Launch identity").
//
// The program's own graphs are never touched. Once it has made or updated an executable graph, a clone of its graph gets the copies, and
// the executable graph is updated from the clone. So nothing that the program can read back is anything but its own.
#pragma once

#include <functional>
#include <memory>

#include "operation.h"
#include "state.h"

namespace gpubpf {

extern const Lifetime graph_lifetime;
struct Remains;
void gather_graphs(const Context &context, Remains &to);  // what they have in the driver, at the end

// After the driver's calls; `graph` is what it was made, or updated, from.
void graph_made(CUgraphExec exec, CUgraph graph, uint64_t flags);
void graph_updated(CUgraphExec exec, CUgraph graph);
void kernel_node_set(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS &params);
void child_node_set(CUgraphExec exec, CUgraphNode node, CUgraph child);
void node_enabled(CUgraphExec exec, CUgraphNode node, bool enabled);
void graph_gone(CUgraphExec exec);     // before it is destroyed
void graph_changed(CUgraphExec exec);  // in another way: its copies stay for as long as it is there
// While the result lives nobody else changes it: around the driver's call and what is done of the above. Null: it is not known.
std::shared_ptr<void> hold_exec(CUgraphExec exec);
// No launch is swapped any more: executable graphs get the program's own kernels again. Waits for the use of each for so long.
void graphs_back(uint32_t wait_ms);
// The same for one, which is about to be launched: nobody would count what its copies do.
void graph_back(CUgraphExec exec);

// The launch itself, through `original`.
CUresult launch_graph(const Outer &outer, CUgraphExec exec, Where where,
                      const std::function<CUresult()> &original);

// The program's function where a graph gives back a copy: one that was made from the launch of an executable graph.
CUfunction own_function(CUfunction function);

// Room for the numbers of replays. With context.busy held and the context current.
void prepare_cells(Context &context);

}  // namespace gpubpf

// The replacements of functions that make, change and launch executable graphs.
#include "graph.h"
#include "hook_call.h"

namespace gpubpf {

namespace {

CUresult made(const Outer &outer, CUresult r, const CUgraphExec *exec, CUgraph graph, uint64_t flags) {
  if (outer && r == CUDA_SUCCESS && exec) quietly([&] { graph_made(*exec, graph, flags); });
  return r;
}

CUresult hook_cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *node, char *log, size_t size) {
  Outer outer;
  return made(outer, ORIGINAL(cuGraphInstantiate)(exec, graph, node, log, size), exec, graph, 0);
}

CUresult hook_cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *node, char *log, size_t size) {
  Outer outer;
  return made(outer, ORIGINAL(cuGraphInstantiate_v2)(exec, graph, node, log, size), exec, graph, 0);
}

CUresult hook_cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
  Outer outer;
  return made(outer, ORIGINAL(cuGraphInstantiateWithFlags)(exec, graph, flags), exec, graph, flags);
}

CUresult hook_cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
  Outer outer;
  CUresult r = ORIGINAL(cuGraphInstantiateWithParams)(exec, graph, params);
  return made(outer, r, exec, graph, params ? params->flags : 0);
}

CUresult hook_cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
  Outer outer;
  CUresult r = ORIGINAL(cuGraphInstantiateWithParams_ptsz)(exec, graph, params);
  return made(outer, r, exec, graph, params ? params->flags : 0);
}

CUresult hook_cuGraphExecDestroy(CUgraphExec exec) {
  Outer outer;
  if (outer.keeps_records()) quietly([&] { graph_gone(exec); });
  return ORIGINAL(cuGraphExecDestroy)(exec);
}

CUresult hook_cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *node, CUgraphExecUpdateResult *result) {
  Outer outer;
  CUresult r = ORIGINAL(cuGraphExecUpdate)(exec, graph, node, result);
  if (outer && r == CUDA_SUCCESS) quietly([&] { graph_updated(exec, graph); });
  return r;
}

CUresult hook_cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *result) {
  Outer outer;
  CUresult r = ORIGINAL(cuGraphExecUpdate_v2)(exec, graph, result);
  if (outer && r == CUDA_SUCCESS) quietly([&] { graph_updated(exec, graph); });
  return r;
}

CUDA_KERNEL_NODE_PARAMS newest(const CUDA_KERNEL_NODE_PARAMS_v1 &p) {
  return {p.func, p.gridDimX, p.gridDimY, p.gridDimZ, p.blockDimX, p.blockDimY, p.blockDimZ, p.sharedMemBytes, p.kernelParams,
          p.extra, nullptr, nullptr};
}

CUresult hook_cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *params) {
  Outer outer;
  CUresult r = ORIGINAL(cuGraphExecKernelNodeSetParams)(exec, node, params);
  if (outer && r == CUDA_SUCCESS && params) quietly([&] { kernel_node_set(exec, node, newest(*params)); });
  return r;
}

CUresult hook_cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params) {
  Outer outer;
  CUresult r = ORIGINAL(cuGraphExecKernelNodeSetParams_v2)(exec, node, params);
  if (outer && r == CUDA_SUCCESS && params) quietly([&] { kernel_node_set(exec, node, *params); });
  return r;
}

CUresult hook_cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams *params) {
  Outer outer;
  CUresult r = ORIGINAL(cuGraphExecNodeSetParams)(exec, node, params);
  if (!outer || r != CUDA_SUCCESS || !params) return r;
  quietly([&] {
    if (params->type == CU_GRAPH_NODE_TYPE_KERNEL) {
      const CUDA_KERNEL_NODE_PARAMS_v3 &p = params->kernel;
      kernel_node_set(exec, node, {p.func, p.gridDimX, p.gridDimY, p.gridDimZ, p.blockDimX, p.blockDimY, p.blockDimZ,
                                   p.sharedMemBytes, p.kernelParams, p.extra, p.kern, p.ctx});
    } else if (params->type == CU_GRAPH_NODE_TYPE_GRAPH) {
      child_node_set(exec, node, params->graph.graph);
    }
  });
  return r;
}

CUresult hook_cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraph child) {
  Outer outer;
  CUresult r = ORIGINAL(cuGraphExecChildGraphNodeSetParams)(exec, node, child);
  if (outer && r == CUDA_SUCCESS) quietly([&] { child_node_set(exec, node, child); });
  return r;
}

CUresult hook_cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned enabled) {
  Outer outer;
  CUresult r = ORIGINAL(cuGraphNodeSetEnabled)(exec, node, enabled);
  if (outer && r == CUDA_SUCCESS) quietly([&] { node_enabled(exec, node, enabled != 0); });
  return r;
}

CUresult hook_cuGraphLaunch(CUgraphExec graph, CUstream stream) {
  Outer outer;
  auto original = [&] { return ORIGINAL(cuGraphLaunch)(graph, stream); };
  return outer ? launch_graph(graph, {stream, false}, original) : original();
}

CUresult hook_cuGraphLaunch_ptsz(CUgraphExec graph, CUstream stream) {
  Outer outer;
  auto original = [&] { return ORIGINAL(cuGraphLaunch_ptsz)(graph, stream); };
  return outer ? launch_graph(graph, {stream, true}, original) : original();
}

CUresult hook_cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v1 *params) {
  Outer outer;
  CUresult r = ORIGINAL(cuGraphKernelNodeGetParams)(node, params);
  if (outer.keeps_records() && r == CUDA_SUCCESS && params) quietly([&] { params->func = own_function(params->func); });
  return r;
}

CUresult hook_cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *params) {
  Outer outer;
  CUresult r = ORIGINAL(cuGraphKernelNodeGetParams_v2)(node, params);
  if (outer.keeps_records() && r == CUDA_SUCCESS && params) quietly([&] { params->func = own_function(params->func); });
  return r;
}

}  // namespace

void graph_hooks() {
#define GPUBPF_HOOK(symbol) hooks[kHook_##symbol].replacement = reinterpret_cast<void *>(&hook_##symbol);
#include "hooks_graph.def"
#undef GPUBPF_HOOK
}

}  // namespace gpubpf

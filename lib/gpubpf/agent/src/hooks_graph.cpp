// Replacements of functions that create, change and launch executable graphs.
#include "copies/graph.h"
#include "driver/gpu_idle.h"
#include "hook_call.h"

namespace gpubpf {

namespace {

// Reserves an executable graph for this call and for the bookkeeping after it.
std::shared_ptr<void> held(const HookCall &hook, CUgraphExec exec) {
    std::shared_ptr<void> hold;
    if (hook.keeps_records()) quietly([&] { hold = hold_exec(exec); });
    return hold;
}

CUresult made(const HookCall &hook, CUresult r, const CUgraphExec *exec, CUgraph graph, uint64_t flags) {
    SlowPath slow_path;
    if (hook && r == CUDA_SUCCESS && exec) quietly([&] { graph_made(*exec, graph, flags); });
    return r;
}

CUresult hook_cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *node, char *log,
                                 size_t size) {
    HookCall hook;
    CUresult r = FORWARD(cuGraphInstantiate)(exec, graph, node, log, size);
    return made(hook, r, exec, graph, 0);
}

CUresult hook_cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *node, char *log,
                                    size_t size) {
    HookCall hook;
    CUresult r = FORWARD(cuGraphInstantiate_v2)(exec, graph, node, log, size);
    return made(hook, r, exec, graph, 0);
}

CUresult hook_cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    HookCall hook;
    CUresult r = FORWARD(cuGraphInstantiateWithFlags)(exec, graph, flags);
    return made(hook, r, exec, graph, flags);
}

CUresult hook_cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph,
                                           CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    HookCall hook;
    CUresult r = FORWARD(cuGraphInstantiateWithParams)(exec, graph, params);
    return made(hook, r, exec, graph, params ? params->flags : 0);
}

CUresult hook_cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph,
                                                CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    HookCall hook;
    CUresult r = FORWARD(cuGraphInstantiateWithParams_ptsz)(exec, graph, params);
    return made(hook, r, exec, graph, params ? params->flags : 0);
}

CUresult added(const HookCall &hook, CUresult r, const CUgraphNode *node, const CUgraphNodeParams *params) {
    if (hook.keeps_records() && r == CUDA_SUCCESS && node && params &&
        params->type == CU_GRAPH_NODE_TYPE_CONDITIONAL && params->conditional.phGraph_out)
        quietly(
            [&] { conditional_node_made(*node, params->conditional.phGraph_out, params->conditional.size); });
    return r;
}

CUresult hook_cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                             CUgraphNodeParams *params) {
    HookCall hook;
    return added(hook, FORWARD(cuGraphAddNode)(node, graph, dependencies, count, params), node, params);
}

CUresult hook_cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                const CUgraphEdgeData *edges, size_t count, CUgraphNodeParams *params) {
    HookCall hook;
    return added(hook, FORWARD(cuGraphAddNode_v2)(node, graph, dependencies, edges, count, params), node,
                 params);
}

CUresult hook_cuGraphExecDestroy(CUgraphExec exec) {
    HookCall hook;
    if (hook.keeps_records()) quietly([&] { graph_gone(exec); });
    return FORWARD(cuGraphExecDestroy)(exec);
}

CUresult hook_cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *node,
                                CUgraphExecUpdateResult *result) {
    HookCall hook;
    auto hold = held(hook, exec);
    CUresult r = FORWARD(cuGraphExecUpdate)(exec, graph, node, result);
    if (hook.keeps_records() && r == CUDA_SUCCESS) quietly([&] { graph_updated(exec, graph); });
    return r;
}

CUresult hook_cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *result) {
    HookCall hook;
    auto hold = held(hook, exec);
    CUresult r = FORWARD(cuGraphExecUpdate_v2)(exec, graph, result);
    if (hook.keeps_records() && r == CUDA_SUCCESS) quietly([&] { graph_updated(exec, graph); });
    return r;
}

CUDA_KERNEL_NODE_PARAMS newest(const CUDA_KERNEL_NODE_PARAMS_v1 &p) {
    return {p.func,      p.gridDimX,       p.gridDimY,     p.gridDimZ, p.blockDimX, p.blockDimY,
            p.blockDimZ, p.sharedMemBytes, p.kernelParams, p.extra,    nullptr,     nullptr};
}

CUresult hook_cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                             const CUDA_KERNEL_NODE_PARAMS_v1 *params) {
    HookCall hook;
    auto hold = held(hook, exec);
    CUresult r = FORWARD(cuGraphExecKernelNodeSetParams)(exec, node, params);
    if (hook.keeps_records() && r == CUDA_SUCCESS && params)
        quietly([&] { kernel_node_set(exec, node, newest(*params)); });
    return r;
}

CUresult hook_cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node,
                                                const CUDA_KERNEL_NODE_PARAMS *params) {
    HookCall hook;
    auto hold = held(hook, exec);
    CUresult r = FORWARD(cuGraphExecKernelNodeSetParams_v2)(exec, node, params);
    if (hook.keeps_records() && r == CUDA_SUCCESS && params)
        quietly([&] { kernel_node_set(exec, node, *params); });
    return r;
}

CUresult hook_cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams *params) {
    HookCall hook;
    auto hold = held(hook, exec);
    CUresult r = FORWARD(cuGraphExecNodeSetParams)(exec, node, params);
    if (!hook.keeps_records() || r != CUDA_SUCCESS || !params) return r;
    quietly([&] {
        if (params->type == CU_GRAPH_NODE_TYPE_KERNEL) {
            const CUDA_KERNEL_NODE_PARAMS_v3 &p = params->kernel;
            kernel_node_set(exec, node,
                            {p.func, p.gridDimX, p.gridDimY, p.gridDimZ, p.blockDimX, p.blockDimY,
                             p.blockDimZ, p.sharedMemBytes, p.kernelParams, p.extra, p.kern, p.ctx});
        } else if (params->type == CU_GRAPH_NODE_TYPE_GRAPH) {
            child_node_set(exec, node, params->graph.graph);
        } else {
            graph_changed(exec);
        }
    });
    return r;
}

CUresult hook_cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraph child) {
    HookCall hook;
    auto hold = held(hook, exec);
    CUresult r = FORWARD(cuGraphExecChildGraphNodeSetParams)(exec, node, child);
    if (hook.keeps_records() && r == CUDA_SUCCESS) quietly([&] { child_node_set(exec, node, child); });
    return r;
}

CUresult hook_cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned enabled) {
    HookCall hook;
    auto hold = held(hook, exec);
    CUresult r = FORWARD(cuGraphNodeSetEnabled)(exec, node, enabled);
    if (hook.keeps_records() && r == CUDA_SUCCESS) quietly([&] { node_enabled(exec, node, enabled != 0); });
    return r;
}

#define CHANGES(symbol, PARAMETERS, ARGUMENTS)                                                \
    CUresult hook_##symbol PARAMETERS {                                                       \
        HookCall hook;                                                                        \
        auto hold = held(hook, exec);                                                         \
        CUresult r = FORWARD(symbol) ARGUMENTS;                                               \
        if (hook.keeps_records() && r == CUDA_SUCCESS) quietly([&] { graph_changed(exec); }); \
        return r;                                                                             \
    }
CHANGES(cuGraphExecMemcpyNodeSetParams,
        (CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D *params, CUcontext context),
        (exec, node, params, context))
CHANGES(cuGraphExecMemsetNodeSetParams,
        (CUgraphExec exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *params, CUcontext context),
        (exec, node, params, context))
CHANGES(cuGraphExecHostNodeSetParams,
        (CUgraphExec exec, CUgraphNode node, const CUDA_HOST_NODE_PARAMS *params), (exec, node, params))
CHANGES(cuGraphExecEventRecordNodeSetEvent, (CUgraphExec exec, CUgraphNode node, CUevent event),
        (exec, node, event))
CHANGES(cuGraphExecEventWaitNodeSetEvent, (CUgraphExec exec, CUgraphNode node, CUevent event),
        (exec, node, event))
CHANGES(cuGraphExecExternalSemaphoresSignalNodeSetParams,
        (CUgraphExec exec, CUgraphNode node, const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS *params),
        (exec, node, params))
CHANGES(cuGraphExecExternalSemaphoresWaitNodeSetParams,
        (CUgraphExec exec, CUgraphNode node, const CUDA_EXT_SEM_WAIT_NODE_PARAMS *params),
        (exec, node, params))
CHANGES(cuGraphExecBatchMemOpNodeSetParams,
        (CUgraphExec exec, CUgraphNode node, const CUDA_BATCH_MEM_OP_NODE_PARAMS *params),
        (exec, node, params))

CUresult hook_cuGraphLaunch(CUgraphExec graph, CUstream stream) {
    Launching launching;
    HookCall hook;
    auto original = [&] { return ORIGINAL(cuGraphLaunch)(graph, stream); };
    if (hook) return launch_graph(hook, graph, {stream, false}, original);
    auto hold = held(hook, graph);
    if (hold) quietly([&] { graph_back(graph); });
    CUresult r = in_driver(original);
    if (hook.keeps_records()) launched_in({stream, false});
    return r;
}

CUresult hook_cuGraphLaunch_ptsz(CUgraphExec graph, CUstream stream) {
    Launching launching;
    HookCall hook;
    auto original = [&] { return ORIGINAL(cuGraphLaunch_ptsz)(graph, stream); };
    if (hook) return launch_graph(hook, graph, {stream, true}, original);
    auto hold = held(hook, graph);
    if (hold) quietly([&] { graph_back(graph); });
    CUresult r = in_driver(original);
    if (hook.keeps_records()) launched_in({stream, true});
    return r;
}

CUresult hook_cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v1 *params) {
    HookCall hook;
    CUresult r = FORWARD(cuGraphKernelNodeGetParams)(node, params);
    if (hook.keeps_records() && r == CUDA_SUCCESS && params)
        quietly([&] { params->func = own_function(params->func); });
    return r;
}

CUresult hook_cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *params) {
    HookCall hook;
    CUresult r = FORWARD(cuGraphKernelNodeGetParams_v2)(node, params);
    if (hook.keeps_records() && r == CUDA_SUCCESS && params)
        quietly([&] { params->func = own_function(params->func); });
    return r;
}

}  // namespace

void graph_hooks() {
#define GPUBPF_HOOK(symbol) hooks[kHook_##symbol].replacement = reinterpret_cast<void *>(&hook_##symbol);
#include "hooks_graph.def"
#undef GPUBPF_HOOK
}

}  // namespace gpubpf

// Graphs in the runtime's API, which names kernels by host functions and describes copies by pointers and kinds.
#include "runtime/runtime.h"

#include <string.h>

using namespace cudasim::runtime;

namespace {

// Both APIs have several versions of the parameters, with the same fields.
template <class Parameters, class Converted>
cudaError_t convert_kernel(const Parameters &parameters, Converted &converted) {
    if (!valid_configuration(parameters.gridDim, parameters.blockDim)) return cudaErrorInvalidConfiguration;
    CUkernel kernel = nullptr;
    converted = {};
    if (find_kernel(parameters.func, kernel) == cudaSuccess) {
        if (CUresult status = cu().KernelGetFunction(&converted.func, kernel))
            return static_cast<cudaError_t>(status);
    } else {
        // A cudaFunction_t, which GetParams returns for a node that the driver API added.
        converted.func = static_cast<CUfunction>(parameters.func);
    }
    converted.gridDimX = parameters.gridDim.x;
    converted.gridDimY = parameters.gridDim.y;
    converted.gridDimZ = parameters.gridDim.z;
    converted.blockDimX = parameters.blockDim.x;
    converted.blockDimY = parameters.blockDim.y;
    converted.blockDimZ = parameters.blockDim.z;
    converted.sharedMemBytes = parameters.sharedMemBytes;
    converted.kernelParams = parameters.kernelParams;
    converted.extra = parameters.extra;
    return cudaSuccess;
}

template <class Converted, class Parameters>
Converted convert_memset(const Parameters &parameters) {
    Converted converted{};
    converted.dst = reinterpret_cast<CUdeviceptr>(parameters.dst);
    converted.pitch = parameters.pitch;
    converted.value = parameters.value;
    converted.elementSize = parameters.elementSize;
    converted.width = parameters.width;
    converted.height = parameters.height;
    return converted;
}

CUDA_HOST_NODE_PARAMS convert_host(const cudaHostNodeParams &parameters) {
    return {parameters.fn, parameters.userData};
}

CUDA_MEMCPY3D linear_copy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    cudaMemcpy3DParms parameters{};
    parameters.srcPtr = {const_cast<void *>(from), bytes, bytes, 1};
    parameters.dstPtr = {to, bytes, bytes, 1};
    parameters.extent = {bytes, 1, 1};
    parameters.kind = kind;
    CUDA_MEMCPY3D described;
    describe_copy(parameters, described);
    return described;
}

// Converts a node of any type. Nodes other than kernels and copies have the same layout in both APIs.
cudaError_t convert_node(const cudaGraphNodeParams &parameters, CUgraphNodeParams &converted) {
    static_assert(sizeof(CUgraphNodeParams) == sizeof(cudaGraphNodeParams), "both APIs use the same layout");
    memcpy(&converted, &parameters, sizeof converted);
    switch (static_cast<int>(parameters.type)) {
        case cudaGraphNodeTypeKernel: return convert_kernel(parameters.kernel, converted.kernel);
        case cudaGraphNodeTypeMemcpy:
            converted.memcpy = {};
            return describe_copy(parameters.memcpy.copyParams, converted.memcpy.copyParams);
        case cudaGraphNodeTypeMemset:
            converted.memset = convert_memset<decltype(converted.memset)>(parameters.memset);
            return cudaSuccess;
        case cudaGraphNodeTypeHost:
            converted.host = {};
            converted.host.fn = parameters.host.fn;
            converted.host.userData = parameters.host.userData;
            return cudaSuccess;
        case cudaGraphNodeTypeGraph:
        case cudaGraphNodeTypeEmpty:
        case cudaGraphNodeTypeEventRecord:
        case cudaGraphNodeTypeWaitEvent:
        case cudaGraphNodeTypeMemAlloc:
        case cudaGraphNodeTypeMemFree: return cudaSuccess;
        case cudaGraphNodeTypeConditional: return cudaSuccess;
        default: return cudaErrorNotSupported;
    }
}

CUcontext current_context() {
    CUcontext current = nullptr;
    cu().CtxGetCurrent(&current);
    return current;
}

}  // namespace

extern "C" {

cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned int flags) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphCreate(graph, flags));
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphDestroy(graph));
}

cudaError_t cudaGraphClone(cudaGraph_t *clone, cudaGraph_t graph) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphClone(clone, graph));
}

cudaError_t cudaGraphNodeFindInClone(cudaGraphNode_t *node, cudaGraphNode_t original, cudaGraph_t clone) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphNodeFindInClone(node, original, clone));
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphGetNodes(graph, nodes, count));
}

cudaError_t cudaGraphGetRootNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphGetRootNodes(graph, nodes, count));
}

cudaError_t cudaGraphGetEdges(cudaGraph_t graph, cudaGraphNode_t *from, cudaGraphNode_t *to,
                              cudaGraphEdgeData *data, size_t *count) {
    ENSURE_CONTEXT();
    return record_error(
        cu().GraphGetEdges(graph, from, to, reinterpret_cast<CUgraphEdgeData *>(data), count));
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *nodes,
                                         cudaGraphEdgeData *data, size_t *count) {
    ENSURE_CONTEXT();
    return record_error(
        cu().GraphNodeGetDependencies(node, nodes, reinterpret_cast<CUgraphEdgeData *>(data), count));
}

cudaError_t cudaGraphNodeGetDependentNodes(cudaGraphNode_t node, cudaGraphNode_t *nodes,
                                           cudaGraphEdgeData *data, size_t *count) {
    ENSURE_CONTEXT();
    return record_error(
        cu().GraphNodeGetDependentNodes(node, nodes, reinterpret_cast<CUgraphEdgeData *>(data), count));
}

cudaError_t cudaGraphAddDependencies(cudaGraph_t graph, const cudaGraphNode_t *from,
                                     const cudaGraphNode_t *to, const cudaGraphEdgeData *, size_t count) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphAddDependencies(graph, from, to, nullptr, count));
}

cudaError_t cudaGraphRemoveDependencies(cudaGraph_t graph, const cudaGraphNode_t *from,
                                        const cudaGraphNode_t *to, const cudaGraphEdgeData *, size_t count) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphRemoveDependencies(graph, from, to, nullptr, count));
}

cudaError_t cudaGraphDestroyNode(cudaGraphNode_t node) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphDestroyNode(node));
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, enum cudaGraphNodeType *type) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphNodeGetType(node, reinterpret_cast<CUgraphNodeType *>(type)));
}

cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned int flags) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphDebugDotPrint(graph, path, flags));
}

// ---------------------------------------------------------------------------------------------------- kernel nodes

cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t *node, cudaGraph_t graph,
                                   const cudaGraphNode_t *dependencies, size_t count,
                                   const struct cudaKernelNodeParams *parameters) {
    ENSURE_CONTEXT();
    CUDA_KERNEL_NODE_PARAMS converted;
    if (parameters == nullptr) return record_error(cudaErrorInvalidValue);
    if (cudaError_t error = convert_kernel(*parameters, converted)) return record_error(error);
    return record_error(cu().GraphAddKernelNode(node, graph, dependencies, count, &converted));
}

cudaError_t cudaGraphKernelNodeGetParams(cudaGraphNode_t node, struct cudaKernelNodeParams *parameters) {
    ENSURE_CONTEXT();
    if (parameters == nullptr) return record_error(cudaErrorInvalidValue);
    CUDA_KERNEL_NODE_PARAMS found;
    if (CUresult status = cu().GraphKernelNodeGetParams(node, &found)) return record_error(status);
    *parameters = {};
    CUfunction function = found.func;
    if (function == nullptr) {
        if (CUresult status = cu().KernelGetFunction(&function, found.kern)) return record_error(status);
    }
    parameters->func = const_cast<void *>(host_function_of(function));
    parameters->gridDim = dim3(found.gridDimX, found.gridDimY, found.gridDimZ);
    parameters->blockDim = dim3(found.blockDimX, found.blockDimY, found.blockDimZ);
    parameters->sharedMemBytes = found.sharedMemBytes;
    parameters->kernelParams = found.kernelParams;
    parameters->extra = found.extra;
    return cudaSuccess;
}

cudaError_t cudaGraphKernelNodeSetParams(cudaGraphNode_t node,
                                         const struct cudaKernelNodeParams *parameters) {
    ENSURE_CONTEXT();
    CUDA_KERNEL_NODE_PARAMS converted;
    if (parameters == nullptr) return record_error(cudaErrorInvalidValue);
    if (cudaError_t error = convert_kernel(*parameters, converted)) return record_error(error);
    return record_error(cu().GraphKernelNodeSetParams(node, &converted));
}

cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                             const struct cudaKernelNodeParams *parameters) {
    ENSURE_CONTEXT();
    CUDA_KERNEL_NODE_PARAMS converted;
    if (parameters == nullptr) return record_error(cudaErrorInvalidValue);
    if (cudaError_t error = convert_kernel(*parameters, converted)) return record_error(error);
    return record_error(cu().GraphExecKernelNodeSetParams(exec, node, &converted));
}

cudaError_t cudaGraphKernelNodeGetAttribute(cudaGraphNode_t node, cudaKernelNodeAttrID which,
                                            cudaKernelNodeAttrValue *value) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphKernelNodeGetAttribute(node, static_cast<CUkernelNodeAttrID>(which),
                                                         reinterpret_cast<CUkernelNodeAttrValue *>(value)));
}

cudaError_t cudaGraphKernelNodeSetAttribute(cudaGraphNode_t node, cudaKernelNodeAttrID which,
                                            const cudaKernelNodeAttrValue *value) {
    ENSURE_CONTEXT();
    return record_error(
        cu().GraphKernelNodeSetAttribute(node, static_cast<CUkernelNodeAttrID>(which),
                                         reinterpret_cast<const CUkernelNodeAttrValue *>(value)));
}

cudaError_t cudaGraphKernelNodeCopyAttributes(cudaGraphNode_t to, cudaGraphNode_t from) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphKernelNodeCopyAttributes(to, from));
}

// ---------------------------------------------------------------------------------------------------- other nodes

cudaError_t cudaGraphAddMemcpyNode(cudaGraphNode_t *node, cudaGraph_t graph,
                                   const cudaGraphNode_t *dependencies, size_t count,
                                   const struct cudaMemcpy3DParms *parameters) {
    ENSURE_CONTEXT();
    CUDA_MEMCPY3D described;
    if (parameters == nullptr) return record_error(cudaErrorInvalidValue);
    if (cudaError_t error = describe_copy(*parameters, described)) return record_error(error);
    return record_error(
        cu().GraphAddMemcpyNode(node, graph, dependencies, count, &described, current_context()));
}

cudaError_t cudaGraphAddMemcpyNode1D(cudaGraphNode_t *node, cudaGraph_t graph,
                                     const cudaGraphNode_t *dependencies, size_t count, void *to,
                                     const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    ENSURE_CONTEXT();
    CUDA_MEMCPY3D described = linear_copy(to, from, bytes, kind);
    return record_error(
        cu().GraphAddMemcpyNode(node, graph, dependencies, count, &described, current_context()));
}

cudaError_t cudaGraphAddMemcpyNodeToSymbol(cudaGraphNode_t *node, cudaGraph_t graph,
                                           const cudaGraphNode_t *dependencies, size_t count,
                                           const void *symbol, const void *from, size_t bytes, size_t offset,
                                           enum cudaMemcpyKind kind) {
    ENSURE_CONTEXT();
    void *to = nullptr;
    if (cudaError_t error = find_symbol_range(symbol, bytes, offset, to)) return record_error(error);
    return cudaGraphAddMemcpyNode1D(node, graph, dependencies, count, to, from, bytes, kind);
}

cudaError_t cudaGraphAddMemcpyNodeFromSymbol(cudaGraphNode_t *node, cudaGraph_t graph,
                                             const cudaGraphNode_t *dependencies, size_t count, void *to,
                                             const void *symbol, size_t bytes, size_t offset,
                                             enum cudaMemcpyKind kind) {
    ENSURE_CONTEXT();
    void *from = nullptr;
    if (cudaError_t error = find_symbol_range(symbol, bytes, offset, from)) return record_error(error);
    return cudaGraphAddMemcpyNode1D(node, graph, dependencies, count, to, from, bytes, kind);
}

cudaError_t cudaGraphMemcpyNodeSetParams1D(cudaGraphNode_t node, void *to, const void *from, size_t bytes,
                                           enum cudaMemcpyKind kind) {
    ENSURE_CONTEXT();
    CUDA_MEMCPY3D described = linear_copy(to, from, bytes, kind);
    return record_error(cu().GraphMemcpyNodeSetParams(node, &described));
}

cudaError_t cudaGraphMemcpyNodeSetParams(cudaGraphNode_t node, const struct cudaMemcpy3DParms *parameters) {
    ENSURE_CONTEXT();
    CUDA_MEMCPY3D described;
    if (parameters == nullptr) return record_error(cudaErrorInvalidValue);
    if (cudaError_t error = describe_copy(*parameters, described)) return record_error(error);
    return record_error(cu().GraphMemcpyNodeSetParams(node, &described));
}

cudaError_t cudaGraphExecMemcpyNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                             const struct cudaMemcpy3DParms *parameters) {
    ENSURE_CONTEXT();
    CUDA_MEMCPY3D described;
    if (parameters == nullptr) return record_error(cudaErrorInvalidValue);
    if (cudaError_t error = describe_copy(*parameters, described)) return record_error(error);
    return record_error(cu().GraphExecMemcpyNodeSetParams(exec, node, &described, current_context()));
}

cudaError_t cudaGraphExecMemcpyNodeSetParams1D(cudaGraphExec_t exec, cudaGraphNode_t node, void *to,
                                               const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    ENSURE_CONTEXT();
    CUDA_MEMCPY3D described = linear_copy(to, from, bytes, kind);
    return record_error(cu().GraphExecMemcpyNodeSetParams(exec, node, &described, current_context()));
}

cudaError_t cudaGraphMemcpyNodeGetParams(cudaGraphNode_t node, struct cudaMemcpy3DParms *parameters) {
    ENSURE_CONTEXT();
    if (parameters == nullptr) return record_error(cudaErrorInvalidValue);
    CUDA_MEMCPY3D found;
    if (CUresult status = cu().GraphMemcpyNodeGetParams(node, &found)) return record_error(status);
    return record_error(describe_parameters(found, *parameters));
}

cudaError_t cudaGraphMemcpyNodeSetParamsToSymbol(cudaGraphNode_t node, const void *symbol, const void *from,
                                                 size_t bytes, size_t offset, enum cudaMemcpyKind kind) {
    ENSURE_CONTEXT();
    void *to = nullptr;
    if (cudaError_t error = find_symbol_range(symbol, bytes, offset, to)) return record_error(error);
    return cudaGraphMemcpyNodeSetParams1D(node, to, from, bytes, kind);
}

cudaError_t cudaGraphMemcpyNodeSetParamsFromSymbol(cudaGraphNode_t node, void *to, const void *symbol,
                                                   size_t bytes, size_t offset, enum cudaMemcpyKind kind) {
    ENSURE_CONTEXT();
    void *from = nullptr;
    if (cudaError_t error = find_symbol_range(symbol, bytes, offset, from)) return record_error(error);
    return cudaGraphMemcpyNodeSetParams1D(node, to, from, bytes, kind);
}

cudaError_t cudaGraphExecMemcpyNodeSetParamsToSymbol(cudaGraphExec_t exec, cudaGraphNode_t node,
                                                     const void *symbol, const void *from, size_t bytes,
                                                     size_t offset, enum cudaMemcpyKind kind) {
    ENSURE_CONTEXT();
    void *to = nullptr;
    if (cudaError_t error = find_symbol_range(symbol, bytes, offset, to)) return record_error(error);
    return cudaGraphExecMemcpyNodeSetParams1D(exec, node, to, from, bytes, kind);
}

cudaError_t cudaGraphExecMemcpyNodeSetParamsFromSymbol(cudaGraphExec_t exec, cudaGraphNode_t node, void *to,
                                                       const void *symbol, size_t bytes, size_t offset,
                                                       enum cudaMemcpyKind kind) {
    ENSURE_CONTEXT();
    void *from = nullptr;
    if (cudaError_t error = find_symbol_range(symbol, bytes, offset, from)) return record_error(error);
    return cudaGraphExecMemcpyNodeSetParams1D(exec, node, to, from, bytes, kind);
}

cudaError_t cudaGraphAddMemsetNode(cudaGraphNode_t *node, cudaGraph_t graph,
                                   const cudaGraphNode_t *dependencies, size_t count,
                                   const struct cudaMemsetParams *parameters) {
    ENSURE_CONTEXT();
    if (parameters == nullptr) return record_error(cudaErrorInvalidValue);
    auto converted = convert_memset<CUDA_MEMSET_NODE_PARAMS>(*parameters);
    return record_error(
        cu().GraphAddMemsetNode(node, graph, dependencies, count, &converted, current_context()));
}

cudaError_t cudaGraphMemsetNodeGetParams(cudaGraphNode_t node, struct cudaMemsetParams *parameters) {
    ENSURE_CONTEXT();
    if (parameters == nullptr) return record_error(cudaErrorInvalidValue);
    CUDA_MEMSET_NODE_PARAMS found;
    if (CUresult status = cu().GraphMemsetNodeGetParams(node, &found)) return record_error(status);
    *parameters = {};
    parameters->dst = reinterpret_cast<void *>(found.dst);
    parameters->pitch = found.pitch;
    parameters->value = found.value;
    parameters->elementSize = found.elementSize;
    parameters->width = found.width;
    parameters->height = found.height;
    return cudaSuccess;
}

cudaError_t cudaGraphMemsetNodeSetParams(cudaGraphNode_t node, const struct cudaMemsetParams *parameters) {
    ENSURE_CONTEXT();
    if (parameters == nullptr) return record_error(cudaErrorInvalidValue);
    auto converted = convert_memset<CUDA_MEMSET_NODE_PARAMS>(*parameters);
    return record_error(cu().GraphMemsetNodeSetParams(node, &converted));
}

cudaError_t cudaGraphExecMemsetNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                             const struct cudaMemsetParams *parameters) {
    ENSURE_CONTEXT();
    if (parameters == nullptr) return record_error(cudaErrorInvalidValue);
    auto converted = convert_memset<CUDA_MEMSET_NODE_PARAMS>(*parameters);
    return record_error(cu().GraphExecMemsetNodeSetParams(exec, node, &converted, current_context()));
}

cudaError_t cudaGraphAddHostNode(cudaGraphNode_t *node, cudaGraph_t graph,
                                 const cudaGraphNode_t *dependencies, size_t count,
                                 const struct cudaHostNodeParams *parameters) {
    ENSURE_CONTEXT();
    if (parameters == nullptr) return record_error(cudaErrorInvalidValue);
    CUDA_HOST_NODE_PARAMS converted = convert_host(*parameters);
    return record_error(cu().GraphAddHostNode(node, graph, dependencies, count, &converted));
}

cudaError_t cudaGraphHostNodeGetParams(cudaGraphNode_t node, struct cudaHostNodeParams *parameters) {
    ENSURE_CONTEXT();
    if (parameters == nullptr) return record_error(cudaErrorInvalidValue);
    CUDA_HOST_NODE_PARAMS found{};
    if (CUresult status = cu().GraphHostNodeGetParams(node, &found)) return record_error(status);
    parameters->fn = found.fn;
    parameters->userData = found.userData;
    return cudaSuccess;
}

cudaError_t cudaGraphHostNodeSetParams(cudaGraphNode_t node, const struct cudaHostNodeParams *parameters) {
    ENSURE_CONTEXT();
    if (parameters == nullptr) return record_error(cudaErrorInvalidValue);
    CUDA_HOST_NODE_PARAMS converted = convert_host(*parameters);
    return record_error(cu().GraphHostNodeSetParams(node, &converted));
}

cudaError_t cudaGraphExecHostNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                           const struct cudaHostNodeParams *parameters) {
    ENSURE_CONTEXT();
    if (parameters == nullptr) return record_error(cudaErrorInvalidValue);
    CUDA_HOST_NODE_PARAMS converted = convert_host(*parameters);
    return record_error(cu().GraphExecHostNodeSetParams(exec, node, &converted));
}

cudaError_t cudaGraphAddEmptyNode(cudaGraphNode_t *node, cudaGraph_t graph,
                                  const cudaGraphNode_t *dependencies, size_t count) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphAddEmptyNode(node, graph, dependencies, count));
}

cudaError_t cudaGraphAddChildGraphNode(cudaGraphNode_t *node, cudaGraph_t graph,
                                       const cudaGraphNode_t *dependencies, size_t count, cudaGraph_t child) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphAddChildGraphNode(node, graph, dependencies, count, child));
}

cudaError_t cudaGraphChildGraphNodeGetGraph(cudaGraphNode_t node, cudaGraph_t *graph) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphChildGraphNodeGetGraph(node, graph));
}

cudaError_t cudaGraphAddEventRecordNode(cudaGraphNode_t *node, cudaGraph_t graph,
                                        const cudaGraphNode_t *dependencies, size_t count,
                                        cudaEvent_t event) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphAddEventRecordNode(node, graph, dependencies, count, event));
}

cudaError_t cudaGraphAddEventWaitNode(cudaGraphNode_t *node, cudaGraph_t graph,
                                      const cudaGraphNode_t *dependencies, size_t count, cudaEvent_t event) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphAddEventWaitNode(node, graph, dependencies, count, event));
}

cudaError_t cudaGraphExecChildGraphNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                                 cudaGraph_t child) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphExecChildGraphNodeSetParams(exec, node, child));
}

cudaError_t cudaGraphEventRecordNodeGetEvent(cudaGraphNode_t node, cudaEvent_t *event) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphEventRecordNodeGetEvent(node, event));
}

cudaError_t cudaGraphEventRecordNodeSetEvent(cudaGraphNode_t node, cudaEvent_t event) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphEventRecordNodeSetEvent(node, event));
}

cudaError_t cudaGraphExecEventRecordNodeSetEvent(cudaGraphExec_t exec, cudaGraphNode_t node,
                                                 cudaEvent_t event) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphExecEventRecordNodeSetEvent(exec, node, event));
}

cudaError_t cudaGraphEventWaitNodeGetEvent(cudaGraphNode_t node, cudaEvent_t *event) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphEventWaitNodeGetEvent(node, event));
}

cudaError_t cudaGraphEventWaitNodeSetEvent(cudaGraphNode_t node, cudaEvent_t event) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphEventWaitNodeSetEvent(node, event));
}

cudaError_t cudaGraphExecEventWaitNodeSetEvent(cudaGraphExec_t exec, cudaGraphNode_t node,
                                               cudaEvent_t event) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphExecEventWaitNodeSetEvent(exec, node, event));
}

cudaError_t cudaGraphAddMemAllocNode(cudaGraphNode_t *node, cudaGraph_t graph,
                                     const cudaGraphNode_t *dependencies, size_t count,
                                     struct cudaMemAllocNodeParams *parameters) {
    ENSURE_CONTEXT();
    static_assert(sizeof(CUDA_MEM_ALLOC_NODE_PARAMS) == sizeof(cudaMemAllocNodeParams),
                  "both APIs use the same layout");
    return record_error(cu().GraphAddMemAllocNode(
        node, graph, dependencies, count, reinterpret_cast<CUDA_MEM_ALLOC_NODE_PARAMS *>(parameters)));
}

cudaError_t cudaGraphMemAllocNodeGetParams(cudaGraphNode_t node, struct cudaMemAllocNodeParams *parameters) {
    ENSURE_CONTEXT();
    return record_error(
        cu().GraphMemAllocNodeGetParams(node, reinterpret_cast<CUDA_MEM_ALLOC_NODE_PARAMS *>(parameters)));
}

cudaError_t cudaGraphAddMemFreeNode(cudaGraphNode_t *node, cudaGraph_t graph,
                                    const cudaGraphNode_t *dependencies, size_t count, void *pointer) {
    ENSURE_CONTEXT();
    return record_error(
        cu().GraphAddMemFreeNode(node, graph, dependencies, count, reinterpret_cast<CUdeviceptr>(pointer)));
}

cudaError_t cudaGraphMemFreeNodeGetParams(cudaGraphNode_t node, void *pointer) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphMemFreeNodeGetParams(node, static_cast<CUdeviceptr *>(pointer)));
}

cudaError_t cudaDeviceGetGraphMemAttribute(int device, enum cudaGraphMemAttributeType attribute,
                                           void *value) {
    ENSURE_CONTEXT();
    return record_error(
        cu().DeviceGetGraphMemAttribute(device, static_cast<CUgraphMem_attribute>(attribute), value));
}

cudaError_t cudaDeviceSetGraphMemAttribute(int device, enum cudaGraphMemAttributeType attribute,
                                           void *value) {
    ENSURE_CONTEXT();
    return record_error(
        cu().DeviceSetGraphMemAttribute(device, static_cast<CUgraphMem_attribute>(attribute), value));
}

cudaError_t cudaDeviceGraphMemTrim(int device) {
    ENSURE_CONTEXT();
    return record_error(cu().DeviceGraphMemTrim(device));
}

cudaError_t cudaGraphAddNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *dependencies,
                             const cudaGraphEdgeData *, size_t count,
                             struct cudaGraphNodeParams *parameters) {
    ENSURE_CONTEXT();
    if (parameters == nullptr) return record_error(cudaErrorInvalidValue);
    CUgraphNodeParams converted;
    if (cudaError_t error = convert_node(*parameters, converted)) return record_error(error);
    CUresult status = cu().GraphAddNode(node, graph, dependencies, nullptr, count, &converted);
    if (status == CUDA_SUCCESS && parameters->type == cudaGraphNodeTypeMemAlloc)
        parameters->alloc.dptr = reinterpret_cast<void *>(converted.alloc.dptr);
    if (status == CUDA_SUCCESS && parameters->type == cudaGraphNodeTypeConditional)
        parameters->conditional.phGraph_out = converted.conditional.phGraph_out;
    return record_error(status);
}

cudaError_t cudaGraphConditionalHandleCreate(cudaGraphConditionalHandle *handle, cudaGraph_t graph,
                                             unsigned int default_value, unsigned int flags) {
    ENSURE_CONTEXT();
    CUgraphConditionalHandle made = 0;
    CUresult status =
        cu().GraphConditionalHandleCreate(&made, graph, current_context(), default_value, flags);
    if (status == CUDA_SUCCESS && handle != nullptr) *handle = made;
    return record_error(handle == nullptr ? CUDA_ERROR_INVALID_VALUE : status);
}

cudaError_t cudaGraphNodeSetParams(cudaGraphNode_t node, struct cudaGraphNodeParams *parameters) {
    ENSURE_CONTEXT();
    if (parameters == nullptr) return record_error(cudaErrorInvalidValue);
    CUgraphNodeParams converted;
    if (cudaError_t error = convert_node(*parameters, converted)) return record_error(error);
    return record_error(cu().GraphNodeSetParams(node, &converted));
}

cudaError_t cudaGraphExecNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                       struct cudaGraphNodeParams *parameters) {
    ENSURE_CONTEXT();
    if (parameters == nullptr) return record_error(cudaErrorInvalidValue);
    CUgraphNodeParams converted;
    if (cudaError_t error = convert_node(*parameters, converted)) return record_error(error);
    return record_error(cu().GraphExecNodeSetParams(exec, node, &converted));
}

// ---------------------------------------------------------------------------------------------------- user objects

cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *data, cudaHostFn_t destroy,
                                 unsigned int count, unsigned int flags) {
    ENSURE_CONTEXT();
    return record_error(cu().UserObjectCreate(object, data, destroy, count, flags));
}

cudaError_t cudaUserObjectRetain(cudaUserObject_t object, unsigned int count) {
    ENSURE_CONTEXT();
    return record_error(cu().UserObjectRetain(object, count));
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned int count) {
    ENSURE_CONTEXT();
    return record_error(cu().UserObjectRelease(object, count));
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned int count,
                                      unsigned int flags) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphRetainUserObject(graph, object, count, flags));
}

cudaError_t cudaGraphReleaseUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned int count) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphReleaseUserObject(graph, object, count));
}

// ---------------------------------------------------------------------------------------------------- executable graphs

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph,
                                          unsigned long long flags) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphInstantiateWithFlags(exec, graph, flags));
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(exec, graph, flags);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphExecDestroy(exec));
}

cudaError_t cudaGraphExecGetFlags(cudaGraphExec_t exec, unsigned long long *flags) {
    ENSURE_CONTEXT();
    cuuint64_t value = 0;
    CUresult status = cu().GraphExecGetFlags(exec, &value);
    if (flags != nullptr) *flags = value;
    return record_error(status);
}

cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph,
                                cudaGraphExecUpdateResultInfo *result) {
    ENSURE_CONTEXT();
    CUgraphExecUpdateResultInfo found{};
    CUresult status = cu().GraphExecUpdate(exec, graph, &found);
    if (result != nullptr) {
        result->result = static_cast<cudaGraphExecUpdateResult>(found.result);
        result->errorNode = found.errorNode;
        result->errorFromNode = found.errorFromNode;
    }
    return record_error(status);
}

cudaError_t cudaGraphNodeSetEnabled(cudaGraphExec_t exec, cudaGraphNode_t node, unsigned int enabled) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphNodeSetEnabled(exec, node, enabled));
}

cudaError_t cudaGraphNodeGetEnabled(cudaGraphExec_t exec, cudaGraphNode_t node, unsigned int *enabled) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphNodeGetEnabled(exec, node, enabled));
}

}  // extern "C"

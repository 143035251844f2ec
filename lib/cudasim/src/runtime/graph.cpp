// Graphs in the runtime's terms: kernels by host function, copies by pointers and kinds.
#include "runtime/runtime.h"

#include <string.h>

using namespace cudasim::runtime;

namespace {

const Driver &cu() { return driver(false); }

#define READY() \
    if (cudaError_t error = ready()) return done(error)

cudaError_t driver_parameters(const cudaKernelNodeParams &parameters, CUDA_KERNEL_NODE_PARAMS &made) {
    if (!valid_configuration(parameters.gridDim, parameters.blockDim)) return cudaErrorInvalidConfiguration;
    CUkernel kernel = nullptr;
    made = {};
    if (find_kernel(parameters.func, kernel) == cudaSuccess) {
        if (CUresult status = cu().KernelGetFunction(&made.func, kernel))
            return static_cast<cudaError_t>(status);
    } else {
        made.func = static_cast<CUfunction>(
            parameters.func);  // a cudaFunction_t, as GetParams gives for foreign nodes
    }
    made.gridDimX = parameters.gridDim.x;
    made.gridDimY = parameters.gridDim.y;
    made.gridDimZ = parameters.gridDim.z;
    made.blockDimX = parameters.blockDim.x;
    made.blockDimY = parameters.blockDim.y;
    made.blockDimZ = parameters.blockDim.z;
    made.sharedMemBytes = parameters.sharedMemBytes;
    made.kernelParams = parameters.kernelParams;
    made.extra = parameters.extra;
    return cudaSuccess;
}

CUDA_MEMSET_NODE_PARAMS driver_parameters(const cudaMemsetParams &parameters) {
    CUDA_MEMSET_NODE_PARAMS made{};
    made.dst = reinterpret_cast<CUdeviceptr>(parameters.dst);
    made.pitch = parameters.pitch;
    made.value = parameters.value;
    made.elementSize = parameters.elementSize;
    made.width = parameters.width;
    made.height = parameters.height;
    return made;
}

CUDA_HOST_NODE_PARAMS driver_parameters(const cudaHostNodeParams &parameters) {
    CUDA_HOST_NODE_PARAMS made{};
    made.fn = parameters.fn;
    made.userData = parameters.userData;
    return made;
}

CUDA_MEMCPY3D line(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    cudaMemcpy3DParms parameters{};
    parameters.srcPtr = {const_cast<void *>(from), bytes, bytes, 1};
    parameters.dstPtr = {to, bytes, bytes, 1};
    parameters.extent = {bytes, 1, 1};
    parameters.kind = kind;
    CUDA_MEMCPY3D described;
    describe_copy(parameters, described);
    return described;
}

// A node of any kind. The two APIs lay out alike what holds no kernel and no copy.
cudaError_t driver_parameters(const cudaGraphNodeParams &parameters, CUgraphNodeParams &made) {
    static_assert(sizeof(CUgraphNodeParams) == sizeof(cudaGraphNodeParams), "the two APIs share it");
    memcpy(&made, &parameters, sizeof made);
    switch (static_cast<int>(parameters.type)) {
        case cudaGraphNodeTypeKernel: {
            cudaKernelNodeParams kernel{};
            kernel.func = parameters.kernel.func;
            kernel.gridDim = parameters.kernel.gridDim;
            kernel.blockDim = parameters.kernel.blockDim;
            kernel.sharedMemBytes = parameters.kernel.sharedMemBytes;
            kernel.kernelParams = parameters.kernel.kernelParams;
            kernel.extra = parameters.kernel.extra;
            CUDA_KERNEL_NODE_PARAMS described;
            if (cudaError_t error = driver_parameters(kernel, described)) return error;
            made.kernel = {};
            memcpy(&made.kernel, &described, sizeof described);  // the later version appends fields
            return cudaSuccess;
        }
        case cudaGraphNodeTypeMemcpy:
            made.memcpy = {};
            return describe_copy(parameters.memcpy.copyParams, made.memcpy.copyParams);
        case cudaGraphNodeTypeMemset:
            made.memset = {};
            made.memset.dst = reinterpret_cast<CUdeviceptr>(parameters.memset.dst);
            made.memset.pitch = parameters.memset.pitch;
            made.memset.value = parameters.memset.value;
            made.memset.elementSize = parameters.memset.elementSize;
            made.memset.width = parameters.memset.width;
            made.memset.height = parameters.memset.height;
            return cudaSuccess;
        case cudaGraphNodeTypeHost:
            made.host = {};
            made.host.fn = parameters.host.fn;
            made.host.userData = parameters.host.userData;
            return cudaSuccess;
        case cudaGraphNodeTypeGraph:
        case cudaGraphNodeTypeEmpty:
        case cudaGraphNodeTypeEventRecord:
        case cudaGraphNodeTypeWaitEvent:
        case cudaGraphNodeTypeMemAlloc:
        case cudaGraphNodeTypeMemFree: return cudaSuccess;
        default: return cudaErrorNotSupported;
    }
}

CUcontext context() {
    CUcontext current = nullptr;
    cu().CtxGetCurrent(&current);
    return current;
}

cudaError_t symbol_address(const void *symbol, size_t bytes, size_t offset, void *&pointer) {
    Symbol found;
    if (cudaError_t error = find_symbol(symbol, found)) return error;
    if (offset > found.size || bytes > found.size - offset) return cudaErrorInvalidValue;
    pointer = reinterpret_cast<void *>(found.address + offset);
    return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned int flags) {
    READY();
    return done(cu().GraphCreate(graph, flags));
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    READY();
    return done(cu().GraphDestroy(graph));
}

cudaError_t cudaGraphClone(cudaGraph_t *clone, cudaGraph_t graph) {
    READY();
    return done(cu().GraphClone(clone, graph));
}

cudaError_t cudaGraphNodeFindInClone(cudaGraphNode_t *node, cudaGraphNode_t original, cudaGraph_t clone) {
    READY();
    return done(cu().GraphNodeFindInClone(node, original, clone));
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    READY();
    return done(cu().GraphGetNodes(graph, nodes, count));
}

cudaError_t cudaGraphGetRootNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    READY();
    return done(cu().GraphGetRootNodes(graph, nodes, count));
}

cudaError_t cudaGraphGetEdges(cudaGraph_t graph, cudaGraphNode_t *from, cudaGraphNode_t *to,
                              cudaGraphEdgeData *data, size_t *count) {
    READY();
    return done(cu().GraphGetEdges(graph, from, to, reinterpret_cast<CUgraphEdgeData *>(data), count));
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *nodes,
                                         cudaGraphEdgeData *data, size_t *count) {
    READY();
    return done(cu().GraphNodeGetDependencies(node, nodes, reinterpret_cast<CUgraphEdgeData *>(data), count));
}

cudaError_t cudaGraphNodeGetDependentNodes(cudaGraphNode_t node, cudaGraphNode_t *nodes,
                                           cudaGraphEdgeData *data, size_t *count) {
    READY();
    return done(
        cu().GraphNodeGetDependentNodes(node, nodes, reinterpret_cast<CUgraphEdgeData *>(data), count));
}

cudaError_t cudaGraphAddDependencies(cudaGraph_t graph, const cudaGraphNode_t *from,
                                     const cudaGraphNode_t *to, const cudaGraphEdgeData *, size_t count) {
    READY();
    return done(cu().GraphAddDependencies(graph, from, to, nullptr, count));
}

cudaError_t cudaGraphRemoveDependencies(cudaGraph_t graph, const cudaGraphNode_t *from,
                                        const cudaGraphNode_t *to, const cudaGraphEdgeData *, size_t count) {
    READY();
    return done(cu().GraphRemoveDependencies(graph, from, to, nullptr, count));
}

cudaError_t cudaGraphDestroyNode(cudaGraphNode_t node) {
    READY();
    return done(cu().GraphDestroyNode(node));
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, enum cudaGraphNodeType *type) {
    READY();
    return done(cu().GraphNodeGetType(node, reinterpret_cast<CUgraphNodeType *>(type)));
}

cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned int flags) {
    READY();
    return done(cu().GraphDebugDotPrint(graph, path, flags));
}

// ---------------------------------------------------------------------------------------------------- kernel nodes

cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                                   size_t count, const struct cudaKernelNodeParams *parameters) {
    READY();
    CUDA_KERNEL_NODE_PARAMS made;
    if (parameters == nullptr) return done(cudaErrorInvalidValue);
    if (cudaError_t error = driver_parameters(*parameters, made)) return done(error);
    return done(cu().GraphAddKernelNode(node, graph, after, count, &made));
}

cudaError_t cudaGraphKernelNodeGetParams(cudaGraphNode_t node, struct cudaKernelNodeParams *parameters) {
    READY();
    if (parameters == nullptr) return done(cudaErrorInvalidValue);
    CUDA_KERNEL_NODE_PARAMS found;
    if (CUresult status = cu().GraphKernelNodeGetParams(node, &found)) return done(status);
    *parameters = {};
    CUfunction function = found.func;
    if (function == nullptr) {
        if (CUresult status = cu().KernelGetFunction(&function, found.kern)) return done(status);
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
    READY();
    CUDA_KERNEL_NODE_PARAMS made;
    if (parameters == nullptr) return done(cudaErrorInvalidValue);
    if (cudaError_t error = driver_parameters(*parameters, made)) return done(error);
    return done(cu().GraphKernelNodeSetParams(node, &made));
}

cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                             const struct cudaKernelNodeParams *parameters) {
    READY();
    CUDA_KERNEL_NODE_PARAMS made;
    if (parameters == nullptr) return done(cudaErrorInvalidValue);
    if (cudaError_t error = driver_parameters(*parameters, made)) return done(error);
    return done(cu().GraphExecKernelNodeSetParams(exec, node, &made));
}

cudaError_t cudaGraphKernelNodeGetAttribute(cudaGraphNode_t node, cudaKernelNodeAttrID which,
                                            cudaKernelNodeAttrValue *value) {
    READY();
    return done(cu().GraphKernelNodeGetAttribute(node, static_cast<CUkernelNodeAttrID>(which),
                                                 reinterpret_cast<CUkernelNodeAttrValue *>(value)));
}

cudaError_t cudaGraphKernelNodeSetAttribute(cudaGraphNode_t node, cudaKernelNodeAttrID which,
                                            const cudaKernelNodeAttrValue *value) {
    READY();
    return done(cu().GraphKernelNodeSetAttribute(node, static_cast<CUkernelNodeAttrID>(which),
                                                 reinterpret_cast<const CUkernelNodeAttrValue *>(value)));
}

cudaError_t cudaGraphKernelNodeCopyAttributes(cudaGraphNode_t to, cudaGraphNode_t from) {
    READY();
    return done(cu().GraphKernelNodeCopyAttributes(to, from));
}

// ---------------------------------------------------------------------------------------------------- other nodes

cudaError_t cudaGraphAddMemcpyNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                                   size_t count, const struct cudaMemcpy3DParms *parameters) {
    READY();
    CUDA_MEMCPY3D described;
    if (parameters == nullptr) return done(cudaErrorInvalidValue);
    if (cudaError_t error = describe_copy(*parameters, described)) return done(error);
    return done(cu().GraphAddMemcpyNode(node, graph, after, count, &described, context()));
}

cudaError_t cudaGraphAddMemcpyNode1D(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                                     size_t count, void *to, const void *from, size_t bytes,
                                     enum cudaMemcpyKind kind) {
    READY();
    CUDA_MEMCPY3D described = line(to, from, bytes, kind);
    return done(cu().GraphAddMemcpyNode(node, graph, after, count, &described, context()));
}

cudaError_t cudaGraphAddMemcpyNodeToSymbol(cudaGraphNode_t *node, cudaGraph_t graph,
                                           const cudaGraphNode_t *after, size_t count, const void *symbol,
                                           const void *from, size_t bytes, size_t offset,
                                           enum cudaMemcpyKind kind) {
    READY();
    void *to = nullptr;
    if (cudaError_t error = symbol_address(symbol, bytes, offset, to)) return done(error);
    return cudaGraphAddMemcpyNode1D(node, graph, after, count, to, from, bytes, kind);
}

cudaError_t cudaGraphAddMemcpyNodeFromSymbol(cudaGraphNode_t *node, cudaGraph_t graph,
                                             const cudaGraphNode_t *after, size_t count, void *to,
                                             const void *symbol, size_t bytes, size_t offset,
                                             enum cudaMemcpyKind kind) {
    READY();
    void *from = nullptr;
    if (cudaError_t error = symbol_address(symbol, bytes, offset, from)) return done(error);
    return cudaGraphAddMemcpyNode1D(node, graph, after, count, to, from, bytes, kind);
}

cudaError_t cudaGraphMemcpyNodeSetParams1D(cudaGraphNode_t node, void *to, const void *from, size_t bytes,
                                           enum cudaMemcpyKind kind) {
    READY();
    CUDA_MEMCPY3D described = line(to, from, bytes, kind);
    return done(cu().GraphMemcpyNodeSetParams(node, &described));
}

cudaError_t cudaGraphMemcpyNodeSetParams(cudaGraphNode_t node, const struct cudaMemcpy3DParms *parameters) {
    READY();
    CUDA_MEMCPY3D described;
    if (parameters == nullptr) return done(cudaErrorInvalidValue);
    if (cudaError_t error = describe_copy(*parameters, described)) return done(error);
    return done(cu().GraphMemcpyNodeSetParams(node, &described));
}

cudaError_t cudaGraphExecMemcpyNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                             const struct cudaMemcpy3DParms *parameters) {
    READY();
    CUDA_MEMCPY3D described;
    if (parameters == nullptr) return done(cudaErrorInvalidValue);
    if (cudaError_t error = describe_copy(*parameters, described)) return done(error);
    return done(cu().GraphExecMemcpyNodeSetParams(exec, node, &described, context()));
}

cudaError_t cudaGraphExecMemcpyNodeSetParams1D(cudaGraphExec_t exec, cudaGraphNode_t node, void *to,
                                               const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    READY();
    CUDA_MEMCPY3D described = line(to, from, bytes, kind);
    return done(cu().GraphExecMemcpyNodeSetParams(exec, node, &described, context()));
}

cudaError_t cudaGraphMemcpyNodeGetParams(cudaGraphNode_t node, struct cudaMemcpy3DParms *parameters) {
    READY();
    if (parameters == nullptr) return done(cudaErrorInvalidValue);
    CUDA_MEMCPY3D found;
    if (CUresult status = cu().GraphMemcpyNodeGetParams(node, &found)) return done(status);
    bool from_host = found.srcMemoryType == CU_MEMORYTYPE_HOST,
         to_host = found.dstMemoryType == CU_MEMORYTYPE_HOST;
    *parameters = {};
    parameters->srcPos = {found.srcXInBytes, found.srcY, found.srcZ};
    parameters->dstPos = {found.dstXInBytes, found.dstY, found.dstZ};
    parameters->srcPtr = {
        from_host ? const_cast<void *>(found.srcHost) : reinterpret_cast<void *>(found.srcDevice),
        found.srcPitch, found.WidthInBytes, found.srcHeight};
    parameters->dstPtr = {to_host ? found.dstHost : reinterpret_cast<void *>(found.dstDevice), found.dstPitch,
                          found.WidthInBytes, found.dstHeight};
    parameters->extent = {found.WidthInBytes, found.Height, found.Depth};
    if (found.srcMemoryType == CU_MEMORYTYPE_UNIFIED || found.dstMemoryType == CU_MEMORYTYPE_UNIFIED)
        parameters->kind = cudaMemcpyDefault;
    else if (from_host) parameters->kind = to_host ? cudaMemcpyHostToHost : cudaMemcpyHostToDevice;
    else parameters->kind = to_host ? cudaMemcpyDeviceToHost : cudaMemcpyDeviceToDevice;
    return cudaSuccess;
}

cudaError_t cudaGraphMemcpyNodeSetParamsToSymbol(cudaGraphNode_t node, const void *symbol, const void *from,
                                                 size_t bytes, size_t offset, enum cudaMemcpyKind kind) {
    READY();
    void *to = nullptr;
    if (cudaError_t error = symbol_address(symbol, bytes, offset, to)) return done(error);
    return cudaGraphMemcpyNodeSetParams1D(node, to, from, bytes, kind);
}

cudaError_t cudaGraphMemcpyNodeSetParamsFromSymbol(cudaGraphNode_t node, void *to, const void *symbol,
                                                   size_t bytes, size_t offset, enum cudaMemcpyKind kind) {
    READY();
    void *from = nullptr;
    if (cudaError_t error = symbol_address(symbol, bytes, offset, from)) return done(error);
    return cudaGraphMemcpyNodeSetParams1D(node, to, from, bytes, kind);
}

cudaError_t cudaGraphExecMemcpyNodeSetParamsToSymbol(cudaGraphExec_t exec, cudaGraphNode_t node,
                                                     const void *symbol, const void *from, size_t bytes,
                                                     size_t offset, enum cudaMemcpyKind kind) {
    READY();
    void *to = nullptr;
    if (cudaError_t error = symbol_address(symbol, bytes, offset, to)) return done(error);
    return cudaGraphExecMemcpyNodeSetParams1D(exec, node, to, from, bytes, kind);
}

cudaError_t cudaGraphExecMemcpyNodeSetParamsFromSymbol(cudaGraphExec_t exec, cudaGraphNode_t node, void *to,
                                                       const void *symbol, size_t bytes, size_t offset,
                                                       enum cudaMemcpyKind kind) {
    READY();
    void *from = nullptr;
    if (cudaError_t error = symbol_address(symbol, bytes, offset, from)) return done(error);
    return cudaGraphExecMemcpyNodeSetParams1D(exec, node, to, from, bytes, kind);
}

cudaError_t cudaGraphAddMemsetNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                                   size_t count, const struct cudaMemsetParams *parameters) {
    READY();
    if (parameters == nullptr) return done(cudaErrorInvalidValue);
    CUDA_MEMSET_NODE_PARAMS made = driver_parameters(*parameters);
    return done(cu().GraphAddMemsetNode(node, graph, after, count, &made, context()));
}

cudaError_t cudaGraphMemsetNodeGetParams(cudaGraphNode_t node, struct cudaMemsetParams *parameters) {
    READY();
    if (parameters == nullptr) return done(cudaErrorInvalidValue);
    CUDA_MEMSET_NODE_PARAMS found;
    if (CUresult status = cu().GraphMemsetNodeGetParams(node, &found)) return done(status);
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
    READY();
    if (parameters == nullptr) return done(cudaErrorInvalidValue);
    CUDA_MEMSET_NODE_PARAMS made = driver_parameters(*parameters);
    return done(cu().GraphMemsetNodeSetParams(node, &made));
}

cudaError_t cudaGraphExecMemsetNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                             const struct cudaMemsetParams *parameters) {
    READY();
    if (parameters == nullptr) return done(cudaErrorInvalidValue);
    CUDA_MEMSET_NODE_PARAMS made = driver_parameters(*parameters);
    return done(cu().GraphExecMemsetNodeSetParams(exec, node, &made, context()));
}

cudaError_t cudaGraphAddHostNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                                 size_t count, const struct cudaHostNodeParams *parameters) {
    READY();
    if (parameters == nullptr) return done(cudaErrorInvalidValue);
    CUDA_HOST_NODE_PARAMS made = driver_parameters(*parameters);
    return done(cu().GraphAddHostNode(node, graph, after, count, &made));
}

cudaError_t cudaGraphHostNodeGetParams(cudaGraphNode_t node, struct cudaHostNodeParams *parameters) {
    READY();
    if (parameters == nullptr) return done(cudaErrorInvalidValue);
    CUDA_HOST_NODE_PARAMS found{};
    if (CUresult status = cu().GraphHostNodeGetParams(node, &found)) return done(status);
    parameters->fn = found.fn;
    parameters->userData = found.userData;
    return cudaSuccess;
}

cudaError_t cudaGraphHostNodeSetParams(cudaGraphNode_t node, const struct cudaHostNodeParams *parameters) {
    READY();
    if (parameters == nullptr) return done(cudaErrorInvalidValue);
    CUDA_HOST_NODE_PARAMS made = driver_parameters(*parameters);
    return done(cu().GraphHostNodeSetParams(node, &made));
}

cudaError_t cudaGraphExecHostNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                           const struct cudaHostNodeParams *parameters) {
    READY();
    if (parameters == nullptr) return done(cudaErrorInvalidValue);
    CUDA_HOST_NODE_PARAMS made = driver_parameters(*parameters);
    return done(cu().GraphExecHostNodeSetParams(exec, node, &made));
}

cudaError_t cudaGraphAddEmptyNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                                  size_t count) {
    READY();
    return done(cu().GraphAddEmptyNode(node, graph, after, count));
}

cudaError_t cudaGraphAddChildGraphNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                                       size_t count, cudaGraph_t child) {
    READY();
    return done(cu().GraphAddChildGraphNode(node, graph, after, count, child));
}

cudaError_t cudaGraphChildGraphNodeGetGraph(cudaGraphNode_t node, cudaGraph_t *graph) {
    READY();
    return done(cu().GraphChildGraphNodeGetGraph(node, graph));
}

cudaError_t cudaGraphAddEventRecordNode(cudaGraphNode_t *node, cudaGraph_t graph,
                                        const cudaGraphNode_t *after, size_t count, cudaEvent_t event) {
    READY();
    return done(cu().GraphAddEventRecordNode(node, graph, after, count, event));
}

cudaError_t cudaGraphAddEventWaitNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                                      size_t count, cudaEvent_t event) {
    READY();
    return done(cu().GraphAddEventWaitNode(node, graph, after, count, event));
}

cudaError_t cudaGraphExecChildGraphNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                                 cudaGraph_t child) {
    READY();
    return done(cu().GraphExecChildGraphNodeSetParams(exec, node, child));
}

cudaError_t cudaGraphEventRecordNodeGetEvent(cudaGraphNode_t node, cudaEvent_t *event) {
    READY();
    return done(cu().GraphEventRecordNodeGetEvent(node, event));
}

cudaError_t cudaGraphEventRecordNodeSetEvent(cudaGraphNode_t node, cudaEvent_t event) {
    READY();
    return done(cu().GraphEventRecordNodeSetEvent(node, event));
}

cudaError_t cudaGraphExecEventRecordNodeSetEvent(cudaGraphExec_t exec, cudaGraphNode_t node,
                                                 cudaEvent_t event) {
    READY();
    return done(cu().GraphExecEventRecordNodeSetEvent(exec, node, event));
}

cudaError_t cudaGraphEventWaitNodeGetEvent(cudaGraphNode_t node, cudaEvent_t *event) {
    READY();
    return done(cu().GraphEventWaitNodeGetEvent(node, event));
}

cudaError_t cudaGraphEventWaitNodeSetEvent(cudaGraphNode_t node, cudaEvent_t event) {
    READY();
    return done(cu().GraphEventWaitNodeSetEvent(node, event));
}

cudaError_t cudaGraphExecEventWaitNodeSetEvent(cudaGraphExec_t exec, cudaGraphNode_t node,
                                               cudaEvent_t event) {
    READY();
    return done(cu().GraphExecEventWaitNodeSetEvent(exec, node, event));
}

cudaError_t cudaGraphAddMemAllocNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                                     size_t count, struct cudaMemAllocNodeParams *parameters) {
    READY();
    static_assert(sizeof(CUDA_MEM_ALLOC_NODE_PARAMS) == sizeof(cudaMemAllocNodeParams),
                  "the two APIs share it");
    return done(cu().GraphAddMemAllocNode(node, graph, after, count,
                                          reinterpret_cast<CUDA_MEM_ALLOC_NODE_PARAMS *>(parameters)));
}

cudaError_t cudaGraphMemAllocNodeGetParams(cudaGraphNode_t node, struct cudaMemAllocNodeParams *parameters) {
    READY();
    return done(
        cu().GraphMemAllocNodeGetParams(node, reinterpret_cast<CUDA_MEM_ALLOC_NODE_PARAMS *>(parameters)));
}

cudaError_t cudaGraphAddMemFreeNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                                    size_t count, void *pointer) {
    READY();
    return done(cu().GraphAddMemFreeNode(node, graph, after, count, reinterpret_cast<CUdeviceptr>(pointer)));
}

cudaError_t cudaGraphMemFreeNodeGetParams(cudaGraphNode_t node, void *pointer) {
    READY();
    return done(cu().GraphMemFreeNodeGetParams(node, static_cast<CUdeviceptr *>(pointer)));
}

cudaError_t cudaDeviceGraphMemTrim(int device) {
    READY();
    return done(cu().DeviceGraphMemTrim(device));
}

cudaError_t cudaGraphAddNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                             const cudaGraphEdgeData *, size_t count,
                             struct cudaGraphNodeParams *parameters) {
    READY();
    if (parameters == nullptr) return done(cudaErrorInvalidValue);
    CUgraphNodeParams made;
    if (cudaError_t error = driver_parameters(*parameters, made)) return done(error);
    CUresult status = cu().GraphAddNode(node, graph, after, nullptr, count, &made);
    if (status == CUDA_SUCCESS && parameters->type == cudaGraphNodeTypeMemAlloc)
        parameters->alloc.dptr = reinterpret_cast<void *>(made.alloc.dptr);
    return done(status);
}

cudaError_t cudaGraphNodeSetParams(cudaGraphNode_t node, struct cudaGraphNodeParams *parameters) {
    READY();
    if (parameters == nullptr) return done(cudaErrorInvalidValue);
    CUgraphNodeParams made;
    if (cudaError_t error = driver_parameters(*parameters, made)) return done(error);
    return done(cu().GraphNodeSetParams(node, &made));
}

cudaError_t cudaGraphExecNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                       struct cudaGraphNodeParams *parameters) {
    READY();
    if (parameters == nullptr) return done(cudaErrorInvalidValue);
    CUgraphNodeParams made;
    if (cudaError_t error = driver_parameters(*parameters, made)) return done(error);
    return done(cu().GraphExecNodeSetParams(exec, node, &made));
}

// ---------------------------------------------------------------------------------------------------- user objects

cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *data, cudaHostFn_t destroy,
                                 unsigned int count, unsigned int flags) {
    READY();
    return done(cu().UserObjectCreate(object, data, destroy, count, flags));
}

cudaError_t cudaUserObjectRetain(cudaUserObject_t object, unsigned int count) {
    READY();
    return done(cu().UserObjectRetain(object, count));
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned int count) {
    READY();
    return done(cu().UserObjectRelease(object, count));
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned int count,
                                      unsigned int flags) {
    READY();
    return done(cu().GraphRetainUserObject(graph, object, count, flags));
}

cudaError_t cudaGraphReleaseUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned int count) {
    READY();
    return done(cu().GraphReleaseUserObject(graph, object, count));
}

// ---------------------------------------------------------------------------------------------------- executable graphs

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph,
                                          unsigned long long flags) {
    READY();
    return done(cu().GraphInstantiateWithFlags(exec, graph, flags));
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(exec, graph, flags);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    READY();
    return done(cu().GraphExecDestroy(exec));
}

cudaError_t cudaGraphExecGetFlags(cudaGraphExec_t exec, unsigned long long *flags) {
    READY();
    cuuint64_t value = 0;
    CUresult status = cu().GraphExecGetFlags(exec, &value);
    if (flags != nullptr) *flags = value;
    return done(status);
}

cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph,
                                cudaGraphExecUpdateResultInfo *result) {
    READY();
    CUgraphExecUpdateResultInfo found{};
    CUresult status = cu().GraphExecUpdate(exec, graph, &found);
    if (result != nullptr) {
        result->result = static_cast<cudaGraphExecUpdateResult>(found.result);
        result->errorNode = found.errorNode;
        result->errorFromNode = found.errorFromNode;
    }
    return done(status);
}

cudaError_t cudaGraphNodeSetEnabled(cudaGraphExec_t exec, cudaGraphNode_t node, unsigned int enabled) {
    READY();
    return done(cu().GraphNodeSetEnabled(exec, node, enabled));
}

cudaError_t cudaGraphNodeGetEnabled(cudaGraphExec_t exec, cudaGraphNode_t node, unsigned int *enabled) {
    READY();
    return done(cu().GraphNodeGetEnabled(exec, node, enabled));
}

}  // extern "C"

// The types of graph nodes: adding them, and getting and setting their parameters, in graphs and in executable graphs.
#include "driver/context.h"
#include "driver/graph.h"

#include <string.h>

#include <algorithm>

namespace cudasim::driver {
namespace {

constexpr unsigned kMostBodies = 65536;  // of a conditional node

CUresult add(CUgraphNode *handle, CUgraph graph_handle, const CUgraphNode *dependencies, size_t count,
             Operation operation) {
    std::shared_ptr<Graph> graph = tables().graphs.get(graph_handle);
    if (!graph || handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::vector<NodePointer> nodes;
    if (CUresult status = find_nodes(dependencies, count, graph, nodes)) return status;
    *handle = static_cast<CUgraphNode>(add_node(graph, std::move(operation), nodes)->handle);
    return CUDA_SUCCESS;
}

// Replaces a node's operation by the one that `make` fills in. Nothing changes if `make` fails. The mutex is not held during
// `make`, which may lock the context and compile a kernel.
template <class Make>
CUresult replace(GraphNode &node, std::mutex &mutex, Make make) {
    Operation operation;
    operation.kernel.cooperative = node.operation.kernel.cooperative;
    operation.kernel.asked_cluster = node.operation.kernel.asked_cluster;
    if (CUresult status = make(operation)) return status;
    std::lock_guard lock(mutex);
    if (operation.type != node.operation.type) return CUDA_ERROR_INVALID_VALUE;
    node.operation = std::move(operation);
    return CUDA_SUCCESS;
}

template <class Make>
CUresult set(CUgraphNode handle, CUgraphNodeType type, Make make) {
    NodePointer node;
    if (CUresult status = find_node(handle, type, node)) return status;
    std::shared_ptr<Graph> graph = node->graph.lock();
    return graph ? replace(*node, graph->mutex, make) : CUDA_ERROR_INVALID_VALUE;
}

template <class Make>
CUresult set_exec(CUgraphExec exec_handle, CUgraphNode handle, CUgraphNodeType type, Make make) {
    std::shared_ptr<GraphExec> exec;
    NodePointer copy;
    if (CUresult status = find_exec_node(exec_handle, handle, type, exec, copy)) return status;
    return replace(*copy, exec->mutex, make);
}

// Writes what `read` returns for a node.
template <class Value, class Read>
CUresult get(CUgraphNode handle, CUgraphNodeType type, Value *value, Read read) {
    NodePointer node;
    if (CUresult status = find_node(handle, type, node)) return status;
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *value = read(*node);
    return CUDA_SUCCESS;
}

// The parameters of a node have several versions with the same fields.
template <class Parameters>
CUresult kernel_operation(const Parameters *pointer, Operation &operation) {
    if (pointer == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const Parameters &parameters = *pointer;
    const void *handle = parameters.func != nullptr ? static_cast<const void *>(parameters.func)
                                                    : static_cast<const void *>(parameters.kern);
    std::shared_ptr<Context> context;
    if (parameters.func == nullptr && parameters.ctx != nullptr) {
        context = find_context(parameters.ctx).context;
        if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    } else if (CUresult status = current_context(context)) {
        return status;
    }
    operation.type = CU_GRAPH_NODE_TYPE_KERNEL;
    operation.kernel.by_kernel = parameters.func == nullptr;
    return describe_launch(handle, context, {parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ},
                           {parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ},
                           parameters.sharedMemBytes, operation.kernel.cooperative, parameters.kernelParams,
                           parameters.extra, operation.kernel);
}

// Returns the parameters of a kernel node, with `func` or `kern` as they were set. `function_only`: always with `func`, for the
// old version of the structure.
CUDA_KERNEL_NODE_PARAMS kernel_parameters(GraphNode &node, bool function_only) {
    KernelLaunch &launch = node.operation.kernel;
    node.parameter_pointers.clear();
    for (const Parameter &parameter : launch.function->kernel().parameters)
        node.parameter_pointers.push_back(launch.parameters.data() + parameter.offset);
    CUDA_KERNEL_NODE_PARAMS parameters{};
    if (launch.by_kernel && !function_only) {
        std::shared_ptr<Module> module = launch.function->module.lock();
        std::shared_ptr<Context> context = module ? module->context.lock() : nullptr;
        parameters.kern = static_cast<CUkernel>(const_cast<void *>(launch.handle));
        if (context) parameters.ctx = static_cast<CUcontext>(context->handle);
    } else {
        parameters.func = static_cast<CUfunction>(launch.function->handle);
    }
    parameters.gridDimX = launch.grid.x;
    parameters.gridDimY = launch.grid.y;
    parameters.gridDimZ = launch.grid.z;
    parameters.blockDimX = launch.block.x;
    parameters.blockDimY = launch.block.y;
    parameters.blockDimZ = launch.block.z;
    parameters.sharedMemBytes = launch.shared_bytes;
    parameters.kernelParams = node.parameter_pointers.empty() ? nullptr : node.parameter_pointers.data();
    return parameters;
}

CUDA_KERNEL_NODE_PARAMS current_version(const CUDA_KERNEL_NODE_PARAMS_v1 &old) {
    CUDA_KERNEL_NODE_PARAMS parameters{};
    parameters.func = old.func;
    parameters.gridDimX = old.gridDimX;
    parameters.gridDimY = old.gridDimY;
    parameters.gridDimZ = old.gridDimZ;
    parameters.blockDimX = old.blockDimX;
    parameters.blockDimY = old.blockDimY;
    parameters.blockDimZ = old.blockDimZ;
    parameters.sharedMemBytes = old.sharedMemBytes;
    parameters.kernelParams = old.kernelParams;
    parameters.extra = old.extra;
    return parameters;
}

CUresult copy_operation(const CUDA_MEMCPY3D *parameters, Operation &operation) {
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    operation.type = CU_GRAPH_NODE_TYPE_MEMCPY;
    return describe_copy(*parameters, operation.copy);
}

template <class Parameters>
CUresult memset_operation(const Parameters *parameters, Operation &operation) {
    if (parameters == nullptr || parameters->width == 0 || parameters->height == 0)
        return CUDA_ERROR_INVALID_VALUE;
    unsigned element = parameters->elementSize;
    if (element != 1 && element != 2 && element != 4) return CUDA_ERROR_INVALID_VALUE;
    operation.type = CU_GRAPH_NODE_TYPE_MEMSET;
    size_t pitch = parameters->height == 1 ? parameters->width * element : parameters->pitch;
    operation.memset = {parameters->dst,   parameters->value,  element,
                        parameters->width, parameters->height, pitch};
    return check_range(parameters->dst, (parameters->height - 1) * pitch + parameters->width * element);
}

template <class Parameters>
CUresult host_operation(const Parameters *parameters, Operation &operation) {
    if (parameters == nullptr || parameters->fn == nullptr) return CUDA_ERROR_INVALID_VALUE;
    operation.type = CU_GRAPH_NODE_TYPE_HOST;
    operation.host = {};
    operation.host.function = parameters->fn;
    operation.host.data = parameters->userData;
    return CUDA_SUCCESS;
}

CUresult child_operation(CUgraph handle, Operation &operation) {
    std::shared_ptr<Graph> child = tables().graphs.get(handle);
    if (!child) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(child->mutex);
    if (has_conditional_nodes(*child)) return CUDA_ERROR_NOT_SUPPORTED;
    std::vector<NodePointer> ordered = topological_order(child->nodes);
    if (ordered.size() != child->nodes.size()) return CUDA_ERROR_INVALID_VALUE;
    operation.type = CU_GRAPH_NODE_TYPE_GRAPH;
    operation.children = {copy_graph(*child, ordered, true)};
    return CUDA_SUCCESS;
}

// Makes the operation of a conditional node, with empty bodies.
CUresult conditional_operation(const CUDA_CONDITIONAL_NODE_PARAMS &parameters, Operation &operation) {
    std::shared_ptr<Conditional> conditional = Conditional::find(parameters.handle);
    if (!conditional || parameters.size == 0 || parameters.size > kMostBodies)
        return CUDA_ERROR_INVALID_VALUE;
    switch (parameters.type) {
        case CU_GRAPH_COND_TYPE_IF:
            if (parameters.size > 2) return CUDA_ERROR_INVALID_VALUE;
            break;
        case CU_GRAPH_COND_TYPE_WHILE:
            if (parameters.size > 1) return CUDA_ERROR_INVALID_VALUE;
            break;
        case CU_GRAPH_COND_TYPE_SWITCH: break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    if (conditional->used.exchange(true)) return CUDA_ERROR_INVALID_VALUE;
    operation.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
    operation.conditional = conditional;
    operation.conditional_type = parameters.type;
    for (unsigned i = 0; i < parameters.size; i++) {
        auto body = std::make_shared<Graph>();
        if (std::shared_ptr<Context> context = current_context_or_null()) body->context = context;
        body->handle = tables().graphs.add(body);
        operation.children.push_back(body);
    }
    return CUDA_SUCCESS;
}

CUresult event_operation(CUgraphNodeType type, CUevent event, Operation &operation) {
    operation.type = type;
    operation.event = tables().events.get(event);
    return operation.event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult memory_operation(unsigned count, const CUstreamBatchMemOpParams *operations, unsigned flags,
                          Operation &operation) {
    if ((count != 0 && operations == nullptr) || count > 256 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    operation.type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP;
    operation.memory = {operations, operations + count};
    return check_memory_operations(operation.memory);
}

// Allocates the memory of an allocation node, and sets the address in its parameters.
template <class Parameters>
CUresult allocation_operation(Parameters &parameters, Operation &operation) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (parameters.poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
    if (CUresult status = allocate_for_graph(context, parameters.bytesize, operation)) return status;
    operation.allocation.poolProps = parameters.poolProps;
    parameters.dptr = operation.allocation.dptr;
    return CUDA_SUCCESS;
}

// Makes the operation of a node of any type.
CUresult any_operation(CUgraphNodeParams &parameters, Operation &operation) {
    switch (static_cast<int>(parameters.type)) {
        case CU_GRAPH_NODE_TYPE_KERNEL: return kernel_operation(&parameters.kernel, operation);
        case CU_GRAPH_NODE_TYPE_MEMCPY: return copy_operation(&parameters.memcpy.copyParams, operation);
        case CU_GRAPH_NODE_TYPE_MEMSET: return memset_operation(&parameters.memset, operation);
        case CU_GRAPH_NODE_TYPE_HOST: return host_operation(&parameters.host, operation);
        case CU_GRAPH_NODE_TYPE_GRAPH: return child_operation(parameters.graph.graph, operation);
        case CU_GRAPH_NODE_TYPE_CONDITIONAL: return conditional_operation(parameters.conditional, operation);
        case CU_GRAPH_NODE_TYPE_EMPTY: return CUDA_SUCCESS;
        case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
            return event_operation(CU_GRAPH_NODE_TYPE_EVENT_RECORD, parameters.eventRecord.event, operation);
        case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
            return event_operation(CU_GRAPH_NODE_TYPE_WAIT_EVENT, parameters.eventWait.event, operation);
        case CU_GRAPH_NODE_TYPE_MEM_ALLOC: return allocation_operation(parameters.alloc, operation);
        case CU_GRAPH_NODE_TYPE_MEM_FREE: return free_operation(parameters.free.dptr, operation);
        case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
            return memory_operation(parameters.memOp.count, parameters.memOp.paramArray,
                                    parameters.memOp.flags, operation);
        default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}

// Adds a node with the operation that `make` fills in.
template <class Make>
CUresult add(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count, Make make) {
    if (CUresult status = check_initialized()) return status;
    if (node == nullptr || !tables().graphs.get(graph)) return CUDA_ERROR_INVALID_VALUE;
    Operation operation;
    if (CUresult status = make(operation)) return status;
    return add(node, graph, dependencies, count, std::move(operation));
}

CUresult get_event(CUgraphNode handle, CUgraphNodeType type, CUevent *event) {
    return get(handle, type, event,
               [](GraphNode &node) { return static_cast<CUevent>(node.operation.event->handle); });
}

}  // namespace

CUresult check_memory_operations(const std::vector<CUstreamBatchMemOpParams> &operations) {
    for (const CUstreamBatchMemOpParams &one : operations) {
        size_t bytes = 0;
        switch (one.operation) {
            case CU_STREAM_MEM_OP_WRITE_VALUE_32:
            case CU_STREAM_MEM_OP_WAIT_VALUE_32: bytes = 4; break;
            case CU_STREAM_MEM_OP_WRITE_VALUE_64:
            case CU_STREAM_MEM_OP_WAIT_VALUE_64: bytes = 8; break;
            case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
            case CU_STREAM_MEM_OP_BARRIER: continue;
            default: return CUDA_ERROR_INVALID_VALUE;
        }
        if (one.writeValue.address % bytes != 0) return CUDA_ERROR_INVALID_VALUE;
        if (CUresult status = check_range(one.writeValue.address, bytes)) return status;
    }
    return CUDA_SUCCESS;
}

}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

// ---------------------------------------------------------------------------------------------------- kernel nodes

CUresult cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                              const CUDA_KERNEL_NODE_PARAMS *parameters) {
    return add(node, graph, dependencies, count,
               [&](Operation &operation) { return kernel_operation(parameters, operation); });
}

CUresult cuGraphKernelNodeGetParams(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS *parameters) {
    return get(handle, CU_GRAPH_NODE_TYPE_KERNEL, parameters,
               [](GraphNode &node) { return kernel_parameters(node, false); });
}

CUresult cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *parameters) {
    return set(node, CU_GRAPH_NODE_TYPE_KERNEL,
               [&](Operation &operation) { return kernel_operation(parameters, operation); });
}

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                        const CUDA_KERNEL_NODE_PARAMS *parameters) {
    return set_exec(exec, node, CU_GRAPH_NODE_TYPE_KERNEL,
                    [&](Operation &operation) { return kernel_operation(parameters, operation); });
}

CUresult cuGraphKernelNodeGetAttribute(CUgraphNode handle, CUkernelNodeAttrID attribute,
                                       CUkernelNodeAttrValue *value) {
    return get(handle, CU_GRAPH_NODE_TYPE_KERNEL, value, [&](GraphNode &node) {
        auto set = node.attributes.find(attribute);
        CUkernelNodeAttrValue found = set == node.attributes.end() ? CUkernelNodeAttrValue{} : set->second;
        if (attribute == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
            found.cooperative = node.operation.kernel.cooperative;
        const Dim3 &cluster = node.operation.kernel.asked_cluster;
        if (attribute == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            found.clusterDim = {cluster.x, cluster.y, cluster.z};
        return found;
    });
}

CUresult cuGraphKernelNodeSetAttribute(CUgraphNode handle, CUkernelNodeAttrID attribute,
                                       const CUkernelNodeAttrValue *value) {
    NodePointer node;
    if (CUresult status = find_node(handle, CU_GRAPH_NODE_TYPE_KERNEL, node)) return status;
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE &&
        value->deviceUpdatableKernelNode.deviceUpdatable) {
        log_line("the embedded device has no kernel nodes that kernels update");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (attribute == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
        if (CUresult status = set_cluster(node->operation.kernel, cluster_of(*value))) return status;
    if (attribute == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
        node->operation.kernel.cooperative = value->cooperative != 0;
    node->attributes[attribute] = *value;
    return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeCopyAttributes(CUgraphNode to, CUgraphNode from) {
    NodePointer target, source;
    if (CUresult status = find_node(to, CU_GRAPH_NODE_TYPE_KERNEL, target)) return status;
    if (CUresult status = find_node(from, CU_GRAPH_NODE_TYPE_KERNEL, source)) return status;
    if (CUresult status = set_cluster(target->operation.kernel, source->operation.kernel.asked_cluster))
        return status;
    target->attributes = source->attributes;
    target->operation.kernel.cooperative = source->operation.kernel.cooperative;
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------- copies, memsets

CUresult cuGraphAddMemcpyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                              const CUDA_MEMCPY3D *parameters, CUcontext) {
    return add(node, graph, dependencies, count,
               [&](Operation &operation) { return copy_operation(parameters, operation); });
}

CUresult cuGraphMemcpyNodeGetParams(CUgraphNode handle, CUDA_MEMCPY3D *parameters) {
    return get(handle, CU_GRAPH_NODE_TYPE_MEMCPY, parameters,
               [](GraphNode &node) { return node.operation.copy.described; });
}

CUresult cuGraphMemcpyNodeSetParams(CUgraphNode node, const CUDA_MEMCPY3D *parameters) {
    return set(node, CU_GRAPH_NODE_TYPE_MEMCPY,
               [&](Operation &operation) { return copy_operation(parameters, operation); });
}

CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D *parameters,
                                        CUcontext) {
    return set_exec(exec, node, CU_GRAPH_NODE_TYPE_MEMCPY,
                    [&](Operation &operation) { return copy_operation(parameters, operation); });
}

CUresult cuGraphAddMemsetNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                              const CUDA_MEMSET_NODE_PARAMS *parameters, CUcontext) {
    return add(node, graph, dependencies, count,
               [&](Operation &operation) { return memset_operation(parameters, operation); });
}

CUresult cuGraphMemsetNodeGetParams(CUgraphNode handle, CUDA_MEMSET_NODE_PARAMS *parameters) {
    return get(handle, CU_GRAPH_NODE_TYPE_MEMSET, parameters, [](GraphNode &node) {
        const Memset &memset = node.operation.memset;
        CUDA_MEMSET_NODE_PARAMS described{};
        described.dst = memset.destination;
        described.pitch = memset.pitch;
        described.value = memset.value;
        described.elementSize = memset.element_size;
        described.width = memset.width;
        described.height = memset.height;
        return described;
    });
}

CUresult cuGraphMemsetNodeSetParams(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *parameters) {
    return set(node, CU_GRAPH_NODE_TYPE_MEMSET,
               [&](Operation &operation) { return memset_operation(parameters, operation); });
}

CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                        const CUDA_MEMSET_NODE_PARAMS *parameters, CUcontext) {
    return set_exec(exec, node, CU_GRAPH_NODE_TYPE_MEMSET,
                    [&](Operation &operation) { return memset_operation(parameters, operation); });
}

// ---------------------------------------------------------------------------------------------------- host nodes

CUresult cuGraphAddHostNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                            const CUDA_HOST_NODE_PARAMS *parameters) {
    return add(node, graph, dependencies, count,
               [&](Operation &operation) { return host_operation(parameters, operation); });
}

CUresult cuGraphHostNodeGetParams(CUgraphNode handle, CUDA_HOST_NODE_PARAMS *parameters) {
    return get(handle, CU_GRAPH_NODE_TYPE_HOST, parameters, [](GraphNode &node) {
        return CUDA_HOST_NODE_PARAMS{node.operation.host.function, node.operation.host.data};
    });
}

CUresult cuGraphHostNodeSetParams(CUgraphNode node, const CUDA_HOST_NODE_PARAMS *parameters) {
    return set(node, CU_GRAPH_NODE_TYPE_HOST,
               [&](Operation &operation) { return host_operation(parameters, operation); });
}

CUresult cuGraphExecHostNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                      const CUDA_HOST_NODE_PARAMS *parameters) {
    return set_exec(exec, node, CU_GRAPH_NODE_TYPE_HOST,
                    [&](Operation &operation) { return host_operation(parameters, operation); });
}

// ---------------------------------------------------------------------------------------------------- structure

CUresult cuGraphAddEmptyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                             size_t count) {
    return add(node, graph, dependencies, count, [](Operation &) { return CUDA_SUCCESS; });
}

CUresult cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                  size_t count, CUgraph child) {
    return add(node, graph, dependencies, count,
               [&](Operation &operation) { return child_operation(child, operation); });
}

CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode handle, CUgraph *graph) {
    return get(handle, CU_GRAPH_NODE_TYPE_GRAPH, graph,
               [](GraphNode &node) { return static_cast<CUgraph>(node.operation.children.front()->handle); });
}

CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec exec_handle, CUgraphNode handle,
                                            CUgraph child_handle) {
    std::shared_ptr<GraphExec> exec;
    NodePointer copy;
    if (CUresult status = find_exec_node(exec_handle, handle, CU_GRAPH_NODE_TYPE_GRAPH, exec, copy))
        return status;
    std::shared_ptr<Graph> child = tables().graphs.get(child_handle);
    if (!child) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(child->mutex);
    std::lock_guard exec_lock(exec->mutex);
    return update_graph(*copy->operation.children.front(), *child, nullptr);
}

// ---------------------------------------------------------------------------------------------------- events

CUresult cuGraphAddEventRecordNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                   size_t count, CUevent event) {
    return add(node, graph, dependencies, count, [&](Operation &operation) {
        return event_operation(CU_GRAPH_NODE_TYPE_EVENT_RECORD, event, operation);
    });
}

CUresult cuGraphEventRecordNodeGetEvent(CUgraphNode node, CUevent *event) {
    return get_event(node, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event);
}

CUresult cuGraphEventRecordNodeSetEvent(CUgraphNode node, CUevent event) {
    return set(node, CU_GRAPH_NODE_TYPE_EVENT_RECORD, [&](Operation &operation) {
        return event_operation(CU_GRAPH_NODE_TYPE_EVENT_RECORD, event, operation);
    });
}

CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent event) {
    return set_exec(exec, node, CU_GRAPH_NODE_TYPE_EVENT_RECORD, [&](Operation &operation) {
        return event_operation(CU_GRAPH_NODE_TYPE_EVENT_RECORD, event, operation);
    });
}

CUresult cuGraphAddEventWaitNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                 size_t count, CUevent event) {
    return add(node, graph, dependencies, count, [&](Operation &operation) {
        return event_operation(CU_GRAPH_NODE_TYPE_WAIT_EVENT, event, operation);
    });
}

CUresult cuGraphEventWaitNodeGetEvent(CUgraphNode node, CUevent *event) {
    return get_event(node, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event);
}

CUresult cuGraphEventWaitNodeSetEvent(CUgraphNode node, CUevent event) {
    return set(node, CU_GRAPH_NODE_TYPE_WAIT_EVENT, [&](Operation &operation) {
        return event_operation(CU_GRAPH_NODE_TYPE_WAIT_EVENT, event, operation);
    });
}

CUresult cuGraphExecEventWaitNodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent event) {
    return set_exec(exec, node, CU_GRAPH_NODE_TYPE_WAIT_EVENT, [&](Operation &operation) {
        return event_operation(CU_GRAPH_NODE_TYPE_WAIT_EVENT, event, operation);
    });
}

// ---------------------------------------------------------------------------------------------------- memory

CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                size_t count, CUDA_MEM_ALLOC_NODE_PARAMS *parameters) {
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return add(node, graph, dependencies, count,
               [&](Operation &operation) { return allocation_operation(*parameters, operation); });
}

CUresult cuGraphMemAllocNodeGetParams(CUgraphNode handle, CUDA_MEM_ALLOC_NODE_PARAMS *parameters) {
    return get(handle, CU_GRAPH_NODE_TYPE_MEM_ALLOC, parameters,
               [](GraphNode &node) { return node.operation.allocation; });
}

CUresult cuGraphAddMemFreeNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                               size_t count, CUdeviceptr address) {
    return add(node, graph, dependencies, count,
               [&](Operation &operation) { return free_operation(address, operation); });
}

CUresult cuGraphMemFreeNodeGetParams(CUgraphNode handle, CUdeviceptr *address) {
    return get(handle, CU_GRAPH_NODE_TYPE_MEM_FREE, address,
               [](GraphNode &node) { return node.operation.allocation.dptr; });
}

CUresult cuDeviceGraphMemTrim(CUdevice device) {
    if (CUresult status = check_initialized()) return status;
    return is_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuGraphAddBatchMemOpNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                  size_t count, const CUDA_BATCH_MEM_OP_NODE_PARAMS *parameters) {
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return add(node, graph, dependencies, count, [&](Operation &operation) {
        return memory_operation(parameters->count, parameters->paramArray, parameters->flags, operation);
    });
}

CUresult cuGraphBatchMemOpNodeGetParams(CUgraphNode handle, CUDA_BATCH_MEM_OP_NODE_PARAMS *parameters) {
    return get(handle, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, parameters, [](GraphNode &node) {
        CUDA_BATCH_MEM_OP_NODE_PARAMS described{};
        described.count = static_cast<unsigned>(node.operation.memory.size());
        described.paramArray = node.operation.memory.data();
        return described;
    });
}

CUresult cuGraphBatchMemOpNodeSetParams(CUgraphNode node, const CUDA_BATCH_MEM_OP_NODE_PARAMS *parameters) {
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return set(node, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, [&](Operation &operation) {
        return memory_operation(parameters->count, parameters->paramArray, parameters->flags, operation);
    });
}

CUresult cuGraphExecBatchMemOpNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                            const CUDA_BATCH_MEM_OP_NODE_PARAMS *parameters) {
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return set_exec(exec, node, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, [&](Operation &operation) {
        return memory_operation(parameters->count, parameters->paramArray, parameters->flags, operation);
    });
}

// ---------------------------------------------------------------------------------------------------- nodes of any type

CUresult cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                        const CUgraphEdgeData *, size_t count, CUgraphNodeParams *parameters) {
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    CUresult status = add(node, graph, dependencies, count,
                          [&](Operation &operation) { return any_operation(*parameters, operation); });
    if (status == CUDA_SUCCESS && parameters->type == CU_GRAPH_NODE_TYPE_CONDITIONAL) {
        GraphNode &added = *tables().nodes.get(*node);
        for (const std::shared_ptr<Graph> &body : added.operation.children)
            added.body_handles.push_back(static_cast<CUgraph>(body->handle));
        parameters->conditional.phGraph_out = added.body_handles.data();
    }
    return status;
}

CUresult cuGraphConditionalHandleCreate(CUgraphConditionalHandle *handle, CUgraph graph_handle, CUcontext,
                                        unsigned int default_value, unsigned int flags) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<Graph> graph = tables().graphs.get(graph_handle);
    if (!graph || handle == nullptr || (flags & ~unsigned{CU_GRAPH_COND_ASSIGN_DEFAULT}) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<Conditional> conditional = Conditional::create();
    conditional->default_value = default_value;
    conditional->assigns_default = flags != 0;
    *handle = conditional->number;
    std::lock_guard lock(graph->mutex);
    graph->conditionals.push_back(std::move(conditional));
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeSetParams(CUgraphNode node, CUgraphNodeParams *parameters) {
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return set(node, parameters->type,
               [&](Operation &operation) { return any_operation(*parameters, operation); });
}

CUresult cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams *parameters) {
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (parameters->type == CU_GRAPH_NODE_TYPE_GRAPH)
        return cuGraphExecChildGraphNodeSetParams(exec, node, parameters->graph.graph);
    return set_exec(exec, node, parameters->type,
                    [&](Operation &operation) { return any_operation(*parameters, operation); });
}

// ------------------------------------------------------------------------------------- earlier versions of entry points

extern "C" {
CUresult add_v1(CUgraphNode *, CUgraph, const CUgraphNode *, size_t,
                CUgraphNodeParams *) __asm__("cuGraphAddNode");
CUresult add_kernel_v1(CUgraphNode *, CUgraph, const CUgraphNode *, size_t,
                       const CUDA_KERNEL_NODE_PARAMS_v1 *) __asm__("cuGraphAddKernelNode");
CUresult get_kernel_v1(CUgraphNode, CUDA_KERNEL_NODE_PARAMS_v1 *) __asm__("cuGraphKernelNodeGetParams");
CUresult set_kernel_v1(CUgraphNode, const CUDA_KERNEL_NODE_PARAMS_v1 *) __asm__("cuGraphKernelNodeSetParams");
CUresult exec_set_kernel_v1(CUgraphExec, CUgraphNode,
                            const CUDA_KERNEL_NODE_PARAMS_v1 *) __asm__("cuGraphExecKernelNodeSetParams");

CUresult add_v1(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                CUgraphNodeParams *parameters) {
    return cuGraphAddNode(node, graph, dependencies, nullptr, count, parameters);
}
CUresult add_kernel_v1(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                       const CUDA_KERNEL_NODE_PARAMS_v1 *parameters) {
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    CUDA_KERNEL_NODE_PARAMS now = current_version(*parameters);
    return cuGraphAddKernelNode(node, graph, dependencies, count, &now);
}
CUresult get_kernel_v1(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS_v1 *parameters) {
    return get(handle, CU_GRAPH_NODE_TYPE_KERNEL, parameters, [](GraphNode &node) {
        const CUDA_KERNEL_NODE_PARAMS now = kernel_parameters(node, true);
        CUDA_KERNEL_NODE_PARAMS_v1 old;
        memcpy(&old, &now, sizeof old);  // the current version appends fields
        return old;
    });
}
CUresult set_kernel_v1(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *parameters) {
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    CUDA_KERNEL_NODE_PARAMS now = current_version(*parameters);
    return cuGraphKernelNodeSetParams(node, &now);
}
CUresult exec_set_kernel_v1(CUgraphExec exec, CUgraphNode node,
                            const CUDA_KERNEL_NODE_PARAMS_v1 *parameters) {
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    CUDA_KERNEL_NODE_PARAMS now = current_version(*parameters);
    return cuGraphExecKernelNodeSetParams(exec, node, &now);
}
}

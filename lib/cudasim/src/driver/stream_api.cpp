// Entry points whose meaning depends on the default stream. This file is compiled twice. With
// CUDA_API_PER_THREAD_DEFAULT_STREAM, cuda.h renames the functions to their _ptds and _ptsz variants, and a null stream
// means the calling thread's default stream.
#include "driver/context.h"
#include "driver/graph.h"
#include "sanitizer/hooks.h"

#include <sched.h>
#include <string.h>

#include <algorithm>

using namespace cudasim;
using namespace cudasim::driver;

namespace {

#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
constexpr bool kPerThread = true;
#else
constexpr bool kPerThread = false;
#endif

// Up to this size, pageable host memory is copied before the call returns.
constexpr size_t kMaxStaged = 64 << 20;

CUresult find_stream(CUstream handle, std::shared_ptr<Stream> &stream, std::shared_ptr<Context> &context) {
    return find_stream(handle, kPerThread, stream, context);
}

uint64_t address_of(const void *pointer) { return reinterpret_cast<uint64_t>(pointer); }

bool pageable(uint64_t address, size_t bytes) { return !Memory::instance().touches(address, bytes); }

bool on_device(uint64_t address) {
    std::optional<Allocation> found = Memory::instance().find(address);
    return found && (found->kind == MemoryKind::device || found->kind == MemoryKind::mapped);
}

// The kind of memory at one end of a copy, as the call states it.
enum class Endpoint { host, device, any };

CUresult check_endpoint(uint64_t address, size_t bytes, Endpoint end) {
    if (bytes == 0) return CUDA_SUCCESS;
    if (address == 0) return CUDA_ERROR_INVALID_VALUE;
    if (end == Endpoint::device || Memory::instance().in_region(address)) return check_range(address, bytes);
    return CUDA_SUCCESS;
}

Operation copy_operation(uint64_t destination, uint64_t source, size_t bytes) {
    Operation operation;
    operation.type = CU_GRAPH_NODE_TYPE_MEMCPY;
    Copy &copy = operation.copy;
    copy.destination = destination;
    copy.source = source;
    copy.width = bytes;
    copy.source_pitch = copy.source_slice = copy.destination_pitch = copy.destination_slice = bytes;
    copy.described.srcMemoryType = copy.described.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
    copy.described.srcDevice = source;
    copy.described.dstDevice = destination;
    copy.described.srcPitch = copy.described.dstPitch = bytes;
    copy.described.srcHeight = copy.described.dstHeight = 1;
    copy.described.WidthInBytes = bytes;
    copy.described.Height = copy.described.Depth = 1;
    return operation;
}

// Submits a copy. `wait`: the call is synchronous, so it waits, unless both ends are device memory. An asynchronous copy to
// pageable host memory waits too; one from pageable host memory is staged ("API synchronization behavior", CUDA driver
// API).
CUresult copy(CUstream handle, uint64_t destination, Endpoint destination_end, uint64_t source,
              Endpoint source_end, size_t bytes, bool wait) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    if (CUresult status = check_endpoint(destination, bytes, destination_end)) return status;
    if (CUresult status = check_endpoint(source, bytes, source_end)) return status;
    if (bytes == 0) return CUDA_SUCCESS;
    Operation operation = copy_operation(destination, source, bytes);
    if (wait && stream->capture) return invalidate_capture(context, stream);
    if (wait && !(on_device(destination) && on_device(source)))
        return submit_and_wait(context, stream, std::move(operation));
    if (stream->capture) return submit(context, stream, std::move(operation));
    if (destination_end != Endpoint::device && pageable(destination, bytes))
        return submit_and_wait(context, stream, std::move(operation));
    if (source_end != Endpoint::device && pageable(source, bytes)) {
        if (bytes > kMaxStaged) return submit_and_wait(context, stream, std::move(operation));
        auto staged = std::make_shared<std::vector<uint8_t>>(
            reinterpret_cast<const uint8_t *>(source), reinterpret_cast<const uint8_t *>(source) + bytes);
        Operation staged_operation;
        staged_operation.type = CU_GRAPH_NODE_TYPE_MEMCPY;
        staged_operation.copy = operation.copy;
        staged_operation.copy.source = address_of(staged->data());
        staged_operation.keep_alive = staged;
        return submit(context, stream, std::move(staged_operation));
    }
    return submit(context, stream, std::move(operation));
}

CUresult copy_described(CUstream handle, const CUDA_MEMCPY3D &described, bool wait) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    Operation operation;
    operation.type = CU_GRAPH_NODE_TYPE_MEMCPY;
    if (CUresult status = describe_copy(described, operation.copy)) return status;
    if (operation.copy.bytes() == 0) return CUDA_SUCCESS;
    if (!stream->capture) {
        auto is_pageable = [](CUmemorytype type, uint64_t address) {
            return type != CU_MEMORYTYPE_DEVICE && pageable(address, 1);
        };
        wait = wait || is_pageable(described.srcMemoryType, operation.copy.source) ||
               is_pageable(described.dstMemoryType, operation.copy.destination);
    }
    if (wait && stream->capture) return invalidate_capture(context, stream);
    if (wait && !(on_device(operation.copy.destination) && on_device(operation.copy.source)))
        return submit_and_wait(context, stream, std::move(operation));
    return submit(context, stream, std::move(operation));
}

CUDA_MEMCPY3D as_3d(const CUDA_MEMCPY2D &flat) {
    CUDA_MEMCPY3D described{};
    described.srcXInBytes = flat.srcXInBytes;
    described.srcY = flat.srcY;
    described.srcMemoryType = flat.srcMemoryType;
    described.srcHost = flat.srcHost;
    described.srcDevice = flat.srcDevice;
    described.srcArray = flat.srcArray;
    described.srcPitch = flat.srcPitch;
    described.dstXInBytes = flat.dstXInBytes;
    described.dstY = flat.dstY;
    described.dstMemoryType = flat.dstMemoryType;
    described.dstHost = flat.dstHost;
    described.dstDevice = flat.dstDevice;
    described.dstArray = flat.dstArray;
    described.dstPitch = flat.dstPitch;
    described.WidthInBytes = flat.WidthInBytes;
    described.Height = flat.Height;
    described.Depth = 1;
    return described;
}

CUDA_MEMCPY3D as_3d(const CUDA_MEMCPY3D_PEER &peer) {
    CUDA_MEMCPY3D described{};
    described.srcXInBytes = peer.srcXInBytes;
    described.srcY = peer.srcY;
    described.srcZ = peer.srcZ;
    described.srcMemoryType = peer.srcMemoryType;
    described.srcHost = peer.srcHost;
    described.srcDevice = peer.srcDevice;
    described.srcArray = peer.srcArray;
    described.srcPitch = peer.srcPitch;
    described.srcHeight = peer.srcHeight;
    described.dstXInBytes = peer.dstXInBytes;
    described.dstY = peer.dstY;
    described.dstZ = peer.dstZ;
    described.dstMemoryType = peer.dstMemoryType;
    described.dstHost = peer.dstHost;
    described.dstDevice = peer.dstDevice;
    described.dstArray = peer.dstArray;
    described.dstPitch = peer.dstPitch;
    described.dstHeight = peer.dstHeight;
    described.WidthInBytes = peer.WidthInBytes;
    described.Height = peer.Height;
    described.Depth = peer.Depth;
    return described;
}

// The source or the destination of a copy of consecutive bytes. In an array, they lie in one row.
struct RowEnd {
    CUmemorytype type;
    const void *host;
    CUdeviceptr device;
    CUarray array;
    size_t offset;
};

RowEnd array_end(CUarray array, size_t offset) { return {CU_MEMORYTYPE_ARRAY, nullptr, 0, array, offset}; }
RowEnd host_end(const void *host) { return {CU_MEMORYTYPE_HOST, host, 0, nullptr, 0}; }
RowEnd device_end(CUdeviceptr device) { return {CU_MEMORYTYPE_DEVICE, nullptr, device, nullptr, 0}; }

CUresult copy_row(CUstream handle, const RowEnd &destination, const RowEnd &source, size_t bytes, bool wait) {
    CUDA_MEMCPY3D described{};
    described.srcMemoryType = source.type;
    described.srcHost = source.host;
    described.srcDevice = source.device;
    described.srcArray = source.array;
    described.srcXInBytes = source.offset;
    described.dstMemoryType = destination.type;
    described.dstHost = const_cast<void *>(destination.host);
    described.dstDevice = destination.device;
    described.dstArray = destination.array;
    described.dstXInBytes = destination.offset;
    described.WidthInBytes = bytes;
    described.Height = described.Depth = 1;
    return copy_described(handle, described, wait);
}

CUresult submit_memset(CUstream handle, uint64_t address, unsigned value, unsigned element, size_t width,
                       size_t height, size_t pitch) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    if (width == 0 || height == 0) return CUDA_SUCCESS;
    if (address % element != 0 || (height > 1 && (pitch < width * element || pitch % element != 0)))
        return CUDA_ERROR_INVALID_VALUE;
    if (height == 1) pitch = width * element;
    if (CUresult status = check_range(address, (height - 1) * pitch + width * element)) return status;
    Operation operation;
    operation.type = CU_GRAPH_NODE_TYPE_MEMSET;
    operation.memset = {address, value, element, width, height, pitch};
    return submit(context, stream, std::move(operation));
}

CUresult launch(CUstream handle, CUfunction function, Dim3 grid, Dim3 block, unsigned shared,
                bool cooperative, void **parameters, void **extra, Dim3 cluster = kNoCluster) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    if (context != current_context_or_null())
        return CUDA_ERROR_INVALID_HANDLE;  // a stream of another context
    KernelLaunch described;
    described.asked_cluster = cluster;
    if (CUresult status = describe_launch(function, context, grid, block, shared, cooperative, parameters,
                                          extra, described))
        return status;
    return launch_kernel(context, stream, std::move(described));
}

std::shared_ptr<Event> find_event(CUevent handle) { return tables().events.get(handle); }

CUresult allocate_in_stream(CUdeviceptr *address, size_t bytes, const std::shared_ptr<MemoryPool> &pool,
                            CUstream handle) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    if (address == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (stream->capture) {
        Operation operation;
        if (CUresult status = allocate_for_graph(context, bytes, operation)) return status;
        uint64_t allocated = operation.allocation.dptr;
        if (CUresult status = submit(context, stream, std::move(operation))) return status;
        *address = allocated;
        return CUDA_SUCCESS;
    }
    uint64_t allocated = 0;
    if (CUresult status = allocate_from_pool(pool, bytes, *context, allocated)) return status;
    *address = allocated;
    return CUDA_SUCCESS;
}

// Writes what `get` returns for a stream and its context.
template <class Value, class Get>
CUresult get_of_stream(CUstream handle, Value *value, Get get) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *value = get(*stream, *context);
    return CUDA_SUCCESS;
}

// The green context of a stream. That of a default stream is the current one.
std::shared_ptr<GreenContext> green_of(const Stream &stream) {
    const bool own = stream.handle != nullptr && stream.handle != CU_STREAM_PER_THREAD;
    return own ? stream.green : context_stack().back().green;
}

// Some queries of a stream end its capture, in every mode, although they do nothing (driver 580 on an H200).
CUresult not_captured(CUstream handle) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    return invalidate_capture(context, stream);
}

// Submits stream memory operations: values to write or to wait for.
CUresult memory_operations(CUstream handle, std::vector<CUstreamBatchMemOpParams> operations) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    if (CUresult status = check_memory_operations(operations)) return status;
    Operation operation;
    operation.type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP;
    operation.memory = std::move(operations);
    return submit(context, stream, std::move(operation));
}

CUresult memory_operation(CUstream handle, CUstreamBatchMemOpType type, CUdeviceptr address, cuuint64_t value,
                          unsigned flags) {
    CUstreamBatchMemOpParams one{};
    one.writeValue.operation = type;  // waits and writes share the layout of these fields
    one.writeValue.address = address;
    one.writeValue.value64 = value;
    one.writeValue.flags = flags;
    return memory_operations(handle, {one});
}

}  // namespace

// ---------------------------------------------------------------------------------------------------- copies

CUresult cuMemcpy(CUdeviceptr destination, CUdeviceptr source, size_t bytes) {
    return copy(nullptr, destination, Endpoint::any, source, Endpoint::any, bytes, true);
}

CUresult cuMemcpyPeer(CUdeviceptr destination, CUcontext, CUdeviceptr source, CUcontext, size_t bytes) {
    return copy(nullptr, destination, Endpoint::device, source, Endpoint::device, bytes, true);
}

CUresult cuMemcpyHtoD(CUdeviceptr destination, const void *source, size_t bytes) {
    return copy(nullptr, destination, Endpoint::device, address_of(source), Endpoint::host, bytes, true);
}

CUresult cuMemcpyDtoH(void *destination, CUdeviceptr source, size_t bytes) {
    return copy(nullptr, address_of(destination), Endpoint::host, source, Endpoint::device, bytes, true);
}

CUresult cuMemcpyDtoD(CUdeviceptr destination, CUdeviceptr source, size_t bytes) {
    return copy(nullptr, destination, Endpoint::device, source, Endpoint::device, bytes, true);
}

CUresult cuMemcpyAsync(CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream) {
    return copy(stream, destination, Endpoint::any, source, Endpoint::any, bytes, false);
}

CUresult cuMemcpyPeerAsync(CUdeviceptr destination, CUcontext, CUdeviceptr source, CUcontext, size_t bytes,
                           CUstream stream) {
    return copy(stream, destination, Endpoint::device, source, Endpoint::device, bytes, false);
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr destination, const void *source, size_t bytes, CUstream stream) {
    return copy(stream, destination, Endpoint::device, address_of(source), Endpoint::host, bytes, false);
}

CUresult cuMemcpyDtoHAsync(void *destination, CUdeviceptr source, size_t bytes, CUstream stream) {
    return copy(stream, address_of(destination), Endpoint::host, source, Endpoint::device, bytes, false);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream) {
    return copy(stream, destination, Endpoint::device, source, Endpoint::device, bytes, false);
}

CUresult cuMemcpy2D(const CUDA_MEMCPY2D *flat) {
    return flat == nullptr ? CUDA_ERROR_INVALID_VALUE : copy_described(nullptr, as_3d(*flat), true);
}

CUresult cuMemcpy2DUnaligned(const CUDA_MEMCPY2D *flat) {
    return flat == nullptr ? CUDA_ERROR_INVALID_VALUE : copy_described(nullptr, as_3d(*flat), true);
}

CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D *flat, CUstream stream) {
    return flat == nullptr ? CUDA_ERROR_INVALID_VALUE : copy_described(stream, as_3d(*flat), false);
}

CUresult cuMemcpy3D(const CUDA_MEMCPY3D *described) {
    return described == nullptr ? CUDA_ERROR_INVALID_VALUE : copy_described(nullptr, *described, true);
}

CUresult cuMemcpy3DAsync(const CUDA_MEMCPY3D *described, CUstream stream) {
    return described == nullptr ? CUDA_ERROR_INVALID_VALUE : copy_described(stream, *described, false);
}

CUresult cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER *described) {
    return described == nullptr ? CUDA_ERROR_INVALID_VALUE : copy_described(nullptr, as_3d(*described), true);
}

CUresult cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER *described, CUstream stream) {
    return described == nullptr ? CUDA_ERROR_INVALID_VALUE : copy_described(stream, as_3d(*described), false);
}

CUresult cuMemcpyHtoA(CUarray destination, size_t offset, const void *source, size_t bytes) {
    return copy_row(nullptr, array_end(destination, offset), host_end(source), bytes, true);
}

CUresult cuMemcpyAtoH(void *destination, CUarray source, size_t offset, size_t bytes) {
    return copy_row(nullptr, host_end(destination), array_end(source, offset), bytes, true);
}

CUresult cuMemcpyDtoA(CUarray destination, size_t offset, CUdeviceptr source, size_t bytes) {
    return copy_row(nullptr, array_end(destination, offset), device_end(source), bytes, true);
}

CUresult cuMemcpyAtoD(CUdeviceptr destination, CUarray source, size_t offset, size_t bytes) {
    return copy_row(nullptr, device_end(destination), array_end(source, offset), bytes, true);
}

CUresult cuMemcpyAtoA(CUarray destination, size_t destination_offset, CUarray source, size_t source_offset,
                      size_t bytes) {
    return copy_row(nullptr, array_end(destination, destination_offset), array_end(source, source_offset),
                    bytes, true);
}

CUresult cuMemcpyHtoAAsync(CUarray destination, size_t offset, const void *source, size_t bytes,
                           CUstream stream) {
    return copy_row(stream, array_end(destination, offset), host_end(source), bytes, false);
}

CUresult cuMemcpyAtoHAsync(void *destination, CUarray source, size_t offset, size_t bytes, CUstream stream) {
    return copy_row(stream, host_end(destination), array_end(source, offset), bytes, false);
}

// ---------------------------------------------------------------------------------------------------- memsets

CUresult cuMemsetD8(CUdeviceptr address, unsigned char value, size_t count) {
    return submit_memset(nullptr, address, value, 1, count, 1, 0);
}
CUresult cuMemsetD16(CUdeviceptr address, unsigned short value, size_t count) {
    return submit_memset(nullptr, address, value, 2, count, 1, 0);
}
CUresult cuMemsetD32(CUdeviceptr address, unsigned int value, size_t count) {
    return submit_memset(nullptr, address, value, 4, count, 1, 0);
}
CUresult cuMemsetD2D8(CUdeviceptr address, size_t pitch, unsigned char value, size_t width, size_t height) {
    return submit_memset(nullptr, address, value, 1, width, height, pitch);
}
CUresult cuMemsetD2D16(CUdeviceptr address, size_t pitch, unsigned short value, size_t width, size_t height) {
    return submit_memset(nullptr, address, value, 2, width, height, pitch);
}
CUresult cuMemsetD2D32(CUdeviceptr address, size_t pitch, unsigned int value, size_t width, size_t height) {
    return submit_memset(nullptr, address, value, 4, width, height, pitch);
}
CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t count, CUstream stream) {
    return submit_memset(stream, address, value, 1, count, 1, 0);
}
CUresult cuMemsetD16Async(CUdeviceptr address, unsigned short value, size_t count, CUstream stream) {
    return submit_memset(stream, address, value, 2, count, 1, 0);
}
CUresult cuMemsetD32Async(CUdeviceptr address, unsigned int value, size_t count, CUstream stream) {
    return submit_memset(stream, address, value, 4, count, 1, 0);
}
CUresult cuMemsetD2D8Async(CUdeviceptr address, size_t pitch, unsigned char value, size_t width,
                           size_t height, CUstream stream) {
    return submit_memset(stream, address, value, 1, width, height, pitch);
}
CUresult cuMemsetD2D16Async(CUdeviceptr address, size_t pitch, unsigned short value, size_t width,
                            size_t height, CUstream stream) {
    return submit_memset(stream, address, value, 2, width, height, pitch);
}
CUresult cuMemsetD2D32Async(CUdeviceptr address, size_t pitch, unsigned int value, size_t width,
                            size_t height, CUstream stream) {
    return submit_memset(stream, address, value, 4, width, height, pitch);
}

// ---------------------------------------------------------------------------------------------------- launches

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared,
                        CUstream stream, void **parameters, void **extra) {
    return launch(stream, function, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared, false,
                  parameters, extra);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                          void **extra) {
    if (config == nullptr || (config->numAttrs != 0 && config->attrs == nullptr))
        return CUDA_ERROR_INVALID_VALUE;
    bool cooperative = false;
    Dim3 cluster = kNoCluster;
    std::vector<CUevent> events;  // recorded after the kernel, later than a real device might
    for (unsigned i = 0; i < config->numAttrs; i++) {
        const CUlaunchAttribute &attribute = config->attrs[i];
        const CUlaunchAttributeValue &value = attribute.value;
        switch (static_cast<int>(attribute.id)) {
            case CU_LAUNCH_ATTRIBUTE_COOPERATIVE: cooperative = value.cooperative != 0; break;
            case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
                cluster = cluster_of(value);
                if (cluster.count() == 0) return CUDA_ERROR_INVALID_CLUSTER_SIZE;
                break;
            case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT:
                events.push_back(value.programmaticEvent.event);
                break;
            case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT:
                events.push_back(value.launchCompletionEvent.event);
                break;
            case CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE:
                if (value.deviceUpdatableKernelNode.deviceUpdatable) {
                    log_line("the embedded device has no kernel nodes that kernels update");
                    return CUDA_ERROR_NOT_SUPPORTED;
                }
                break;
            default: break;  // hints
        }
    }
    for (CUevent event : events)
        if (!find_event(event)) return CUDA_ERROR_INVALID_HANDLE;
    if (CUresult status =
            launch(config->hStream, function, {config->gridDimX, config->gridDimY, config->gridDimZ},
                   {config->blockDimX, config->blockDimY, config->blockDimZ}, config->sharedMemBytes,
                   cooperative, parameters, extra, cluster))
        return status;
    for (CUevent event : events)
        if (CUresult status = cuEventRecord(event, config->hStream)) return status;
    return CUDA_SUCCESS;
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                   unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                   unsigned int block_z, unsigned int shared, CUstream stream,
                                   void **parameters) {
    return launch(stream, function, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared, true,
                  parameters, nullptr);
}

#ifndef CUDA_API_PER_THREAD_DEFAULT_STREAM
// The kernels do not wait for each other: no toolkit that cudasim supports can compile multi_grid_group::sync().
CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *launches, unsigned int count,
                                              unsigned int) {
    if (launches == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
    for (const CUDA_LAUNCH_PARAMS *l = launches; l < launches + count; l++) {
        if (l->hStream == nullptr) return CUDA_ERROR_INVALID_VALUE;
        if (CUresult status = launch(l->hStream, l->function, {l->gridDimX, l->gridDimY, l->gridDimZ},
                                     {l->blockDimX, l->blockDimY, l->blockDimZ}, l->sharedMemBytes, true,
                                     l->kernelParams, nullptr))
            return status;
    }
    return CUDA_SUCCESS;
}
#endif

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
    Operation operation;
    operation.type = CU_GRAPH_NODE_TYPE_HOST;
    operation.host.function = function;
    operation.host.data = data;
    return submit(context, stream, std::move(operation));
}

CUresult cuStreamAddCallback(CUstream handle, CUstreamCallback callback, void *data, unsigned int flags) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    if (callback == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (stream->capture) return invalidate_capture(context, stream);
    Operation operation;
    operation.type = CU_GRAPH_NODE_TYPE_HOST;
    operation.host.callback = callback;
    operation.host.data = data;
    operation.host.stream = handle;
    return submit(context, stream, std::move(operation));
}

// ---------------------------------------------------------------------------------------------------- streams

CUresult cuStreamQuery(CUstream handle) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    if (CUresult status = invalidate_capture(context, stream)) return status;
    return host_query(stream->queue->tail()) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamSynchronize(CUstream handle) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    if (on_worker_thread()) return CUDA_ERROR_NOT_PERMITTED;
    if (CUresult status = invalidate_capture(context, stream)) return status;
    if (CUresult status = check_unsafe_call()) return status;  // as it seems on an H200 (docs/gpu.md)
    if (stream->legacy) {
        Operation operation;  // an empty operation waits for all blocking streams
        Fence fence;
        if (CUresult status = submit(context, stream, std::move(operation), &fence)) return status;
        wait_on_host(fence);
    } else {
        wait_on_host(stream->queue->tail());
    }
    flush_printf(*context);
    if (sanitizer::active()) sanitizer::synchronized(*context, stream.get());
    return static_cast<CUresult>(context->sticky_error.load());
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned int flags) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    std::shared_ptr<Event> event = find_event(event_handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    return wait_event(context, stream, event, (flags & CU_EVENT_WAIT_EXTERNAL) != 0);
}

CUresult cuEventRecordWithFlags(CUevent event_handle, CUstream handle, unsigned int flags) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    std::shared_ptr<Event> event = find_event(event_handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    return record_event(context, stream, event, (flags & CU_EVENT_RECORD_EXTERNAL) != 0);
}

CUresult cuEventRecord(CUevent event, CUstream stream) { return cuEventRecordWithFlags(event, stream, 0); }

CUresult cuStreamGetPriority(CUstream handle, int *priority) {
    return get_of_stream(handle, priority, [](Stream &stream, Context &) { return stream.priority; });
}

CUresult cuStreamGetFlags(CUstream handle, unsigned int *flags) {
    if (CUresult status = not_captured(handle)) return status;
    return get_of_stream(handle, flags, [](Stream &stream, Context &) { return stream.flags; });
}

CUresult cuStreamGetId(CUstream handle, unsigned long long *id) {
    if (CUresult status = not_captured(handle)) return status;
    return get_of_stream(handle, id,
                         [](Stream &stream, Context &context) { return stream.id | context.id << 32; });
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext *out) {
    return get_of_stream(handle, out, [](Stream &stream, Context &context) {
        const std::shared_ptr<GreenContext> green = green_of(stream);
        return static_cast<CUcontext>(green ? green->converted : context.handle);
    });
}

CUresult cuStreamGetDevice(CUstream handle, CUdevice *device) {
    return get_of_stream(handle, device, [](Stream &, Context &context) { return context.device; });
}

CUresult cuStreamCopyAttributes(CUstream to, CUstream from) {
    std::shared_ptr<Stream> target, source;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(to, target, context)) return status;
    if (CUresult status = find_stream(from, source, context)) return status;
    std::lock_guard lock(context->mutex);
    target->attributes = source->attributes;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetAttribute(CUstream handle, CUstreamAttrID attribute, CUstreamAttrValue *value) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(context->mutex);
    auto set = stream->attributes.find(attribute);
    if (set != stream->attributes.end()) {
        *value = set->second;
        return CUDA_SUCCESS;
    }
    *value = {};
    if (attribute == CU_LAUNCH_ATTRIBUTE_PRIORITY) value->priority = stream->priority;
    return CUDA_SUCCESS;
}

CUresult cuStreamSetAttribute(CUstream handle, CUstreamAttrID attribute, const CUstreamAttrValue *value) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(context->mutex);
    stream->attributes[attribute] = *value;
    return CUDA_SUCCESS;
}

CUresult cuStreamAttachMemAsync(CUstream handle, CUdeviceptr address, size_t, unsigned int) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    return check_range(address, 1);
}

// ---------------------------------------------------------------------------------------------------- capture

CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    return begin_capture(context, stream, mode, nullptr, {});
}

CUresult cuStreamBeginCaptureToGraph(CUstream handle, CUgraph graph_handle, const CUgraphNode *dependencies,
                                     const CUgraphEdgeData *, size_t count, CUstreamCaptureMode mode) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    std::shared_ptr<Graph> graph = tables().graphs.get(graph_handle);
    if (!graph || (count != 0 && dependencies == nullptr)) return CUDA_ERROR_INVALID_VALUE;
    std::vector<std::shared_ptr<GraphNode>> nodes;
    for (size_t i = 0; i < count; i++) {
        nodes.push_back(tables().nodes.get(dependencies[i]));
        if (!nodes.back()) return CUDA_ERROR_INVALID_VALUE;
    }
    return begin_capture(context, stream, mode, graph, nodes);
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    return end_capture(context, stream, graph);
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *out) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(context->mutex);
    // The query does not invalidate the capture (CUDA driver API, cuStreamIsCapturing).
    if (stream->legacy && captures_blocking_stream(context)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    *out = !stream->capture           ? CU_STREAM_CAPTURE_STATUS_NONE
           : stream->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                      : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus *out, cuuint64_t *id, CUgraph *graph,
                                const CUgraphNode **dependencies, const CUgraphEdgeData **edges,
                                size_t *count) {
    if (CUresult status = cuStreamIsCapturing(handle, out)) return status;
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    std::lock_guard lock(context->mutex);
    if (!stream->capture || stream->capture->invalid) return CUDA_SUCCESS;
    if (id != nullptr) *id = stream->capture->id;
    if (graph != nullptr) *graph = stream->capture->graph_handle;
    stream->capture_handles.clear();
    for (const std::shared_ptr<GraphNode> &node : stream->capture_dependencies)
        stream->capture_handles.push_back(static_cast<CUgraphNode>(node->handle));
    if (dependencies != nullptr) *dependencies = stream->capture_handles.data();
    if (edges != nullptr) *edges = nullptr;
    if (count != nullptr) *count = stream->capture_handles.size();
    return CUDA_SUCCESS;
}

CUresult cuStreamUpdateCaptureDependencies(CUstream handle, CUgraphNode *nodes, const CUgraphEdgeData *,
                                           size_t count, unsigned int flags) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    std::lock_guard lock(context->mutex);
    if (!stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    if (count != 0 && nodes == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if ((flags & CU_STREAM_SET_CAPTURE_DEPENDENCIES) != 0) stream->capture_dependencies.clear();
    for (size_t i = 0; i < count; i++) {
        std::shared_ptr<GraphNode> node = tables().nodes.get(nodes[i]);
        if (!node) return CUDA_ERROR_INVALID_VALUE;
        stream->capture_dependencies.push_back(node);
    }
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------- stream-ordered memory, memory operations

CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream handle) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    CUmemoryPool pool;
    if (CUresult status = cuDeviceGetMemPool(&pool, context->device)) return status;
    return allocate_in_stream(address, bytes, tables().pools.get(pool), handle);
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, CUmemoryPool pool_handle,
                                 CUstream handle) {
    std::shared_ptr<MemoryPool> pool = tables().pools.get(pool_handle);
    if (!pool) return CUDA_ERROR_INVALID_VALUE;
    return allocate_in_stream(address, bytes, pool, handle);
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    if (address == 0) return CUDA_SUCCESS;
    std::optional<Allocation> found = Memory::instance().find(address);
    if (!found || found->base != address || found->kind != MemoryKind::device)
        return CUDA_ERROR_INVALID_VALUE;
    if (belongs_to_graph(address)) {  // freed with the last graph that has it
        Operation operation;
        if (CUresult status = free_operation(address, operation)) return status;
        return submit(context, stream, std::move(operation));
    }
    if (stream->capture) return invalidate_capture(context, stream);
    Operation operation;
    operation.stream_only = [address, id = found->id] { free_memory(address, id); };
    return submit(context, stream, std::move(operation));
}

CUresult cuMemPrefetchAsync(CUdeviceptr address, size_t bytes, CUmemLocation location, unsigned int flags,
                            CUstream handle) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(handle, stream, context)) return status;
    return flags != 0 ? CUDA_ERROR_INVALID_VALUE : note_prefetch(address, bytes, location);
}

CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
    return memory_operation(stream, CU_STREAM_MEM_OP_WRITE_VALUE_32, address, value, flags);
}
CUresult cuStreamWriteValue64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
    return memory_operation(stream, CU_STREAM_MEM_OP_WRITE_VALUE_64, address, value, flags);
}
CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
    return memory_operation(stream, CU_STREAM_MEM_OP_WAIT_VALUE_32, address, value, flags);
}
CUresult cuStreamWaitValue64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
    return memory_operation(stream, CU_STREAM_MEM_OP_WAIT_VALUE_64, address, value, flags);
}
CUresult cuStreamBatchMemOp(CUstream stream, unsigned int count, CUstreamBatchMemOpParams *operations,
                            unsigned int flags) {
    if ((count != 0 && operations == nullptr) || count > 256 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    return memory_operations(stream, {operations, operations + count});
}

// ---------------------------------------------------------------------------------------------------- graphs

CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(stream_handle, stream, context)) return status;
    std::shared_ptr<GraphExec> exec = tables().execs.get(handle);
    if (!exec) return CUDA_ERROR_INVALID_VALUE;
    return launch_graph(context, stream, exec);
}

CUresult cuGraphUpload(CUgraphExec handle, CUstream stream_handle) {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Context> context;
    if (CUresult status = find_stream(stream_handle, stream, context)) return status;
    std::shared_ptr<GraphExec> exec = tables().execs.get(handle);
    if (!exec) return CUDA_ERROR_INVALID_VALUE;
    if (sanitizer::active()) sanitizer::GraphLaunch(context, stream, handle, *exec->graph, true);
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *handle, CUgraph graph,
                                      CUDA_GRAPH_INSTANTIATE_PARAMS *parameters) {
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    CUresult status = cuGraphInstantiateWithFlags(handle, graph, parameters->flags);
    parameters->hErrNode_out = nullptr;
    parameters->result_out = status == CUDA_SUCCESS               ? CUDA_GRAPH_INSTANTIATE_SUCCESS
                             : status == CUDA_ERROR_INVALID_VALUE ? CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE
                                                                  : CUDA_GRAPH_INSTANTIATE_ERROR;
    return status;
}

// ------------------------------------------------------------------------------------- earlier versions of entry points

#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
#define EXPORTED(name) name "_ptsz"
#else
#define EXPORTED(name) name
#endif

extern "C" {
CUresult begin_capture_v1(CUstream) __asm__(EXPORTED("cuStreamBeginCapture"));
CUresult capture_info_v1(CUstream, CUstreamCaptureStatus *,
                         cuuint64_t *) __asm__(EXPORTED("cuStreamGetCaptureInfo"));
CUresult capture_info_v2(CUstream, CUstreamCaptureStatus *, cuuint64_t *, CUgraph *, const CUgraphNode **,
                         size_t *) __asm__(EXPORTED("cuStreamGetCaptureInfo_v2"));
CUresult update_capture_v1(CUstream, CUgraphNode *, size_t,
                           unsigned) __asm__(EXPORTED("cuStreamUpdateCaptureDependencies"));
CUresult prefetch_v1(CUdeviceptr, size_t, CUdevice, CUstream) __asm__(EXPORTED("cuMemPrefetchAsync"));
CUresult context_v2(CUstream, CUcontext *, CUgreenCtx *) __asm__(EXPORTED("cuStreamGetCtx_v2"));

CUresult begin_capture_v1(CUstream stream) {
    return cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
}
CUresult capture_info_v1(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id) {
    return cuStreamGetCaptureInfo(stream, status, id, nullptr, nullptr, nullptr, nullptr);
}
CUresult capture_info_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                         const CUgraphNode **dependencies, size_t *count) {
    return cuStreamGetCaptureInfo(stream, status, id, graph, dependencies, nullptr, count);
}
CUresult update_capture_v1(CUstream stream, CUgraphNode *nodes, size_t count, unsigned flags) {
    return cuStreamUpdateCaptureDependencies(stream, nodes, nullptr, count, flags);
}
CUresult prefetch_v1(CUdeviceptr address, size_t bytes, CUdevice device, CUstream stream) {
    CUmemLocation location{};
    location.type = device < 0 ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = device;
    return cuMemPrefetchAsync(address, bytes, location, 0, stream);
}
CUresult context_v2(CUstream handle, CUcontext *out, CUgreenCtx *green) {
    return get_of_stream(handle, out, [&](Stream &stream, Context &context) {
        const std::shared_ptr<GreenContext> found = green_of(stream);
        if (green != nullptr) *green = found ? static_cast<CUgreenCtx>(found->handle) : nullptr;
        return static_cast<CUcontext>(context.handle);
    });
}
}

// The API of memory: allocations, host memory, pointer attributes, and the checks of copies.
#include "driver/array.h"

#include <string.h>

#include <algorithm>

namespace cudasim::driver {
namespace {

// Allocations of graph allocation nodes. They exist as long as the graphs, so all reserved memory is in use.
struct GraphMemory {
    std::mutex mutex;
    std::set<uint64_t> addresses;
    std::map<int, uint64_t> used, used_high, reserved_high;  // bytes, by device
};

GraphMemory &graph_memory() {
    static GraphMemory *const instance = new GraphMemory();
    return *instance;
}

}  // namespace

bool belongs_to_graph(uint64_t address) {
    std::lock_guard lock(graph_memory().mutex);
    return graph_memory().addresses.count(address) != 0;
}

CUresult allocate_for_graph(const std::shared_ptr<Context> &context, size_t bytes, Operation &operation) {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    uint64_t address =
        Memory::instance().allocate(bytes, MemoryKind::device, context->device, context->handle);
    if (address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
    std::lock_guard lock(graph_memory().mutex);
    GraphMemory &all = graph_memory();
    all.addresses.insert(address);
    const uint64_t used = all.used[context->device] += bytes;
    for (auto *high : {&all.used_high, &all.reserved_high})
        (*high)[context->device] = std::max((*high)[context->device], used);
    operation.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC;
    operation.allocation.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    operation.allocation.poolProps.location = {CU_MEM_LOCATION_TYPE_DEVICE, {context->device}};
    operation.allocation.bytesize = bytes;
    operation.allocation.dptr = address;
    uint64_t id = Memory::instance().find(address)->id;
    operation.keep_alive =
        std::shared_ptr<void>(nullptr, [address, id, bytes, device = context->device](void *) {
            std::lock_guard lock(graph_memory().mutex);
            graph_memory().addresses.erase(address);
            graph_memory().used[device] -= bytes;
            Memory::instance().release(address, id);
        });
    return CUDA_SUCCESS;
}

CUresult free_operation(uint64_t address, Operation &operation) {
    if (!belongs_to_graph(address)) return CUDA_ERROR_INVALID_VALUE;
    operation.type = CU_GRAPH_NODE_TYPE_MEM_FREE;
    operation.allocation.dptr = address;
    return CUDA_SUCCESS;
}

namespace {

constexpr size_t kPitchAlignment = 512;

CUresult allocate(const std::shared_ptr<Context> &context, size_t bytes, MemoryKind kind, unsigned flags,
                  uint64_t &address) {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult status = check_unsafe_call()) return status;
    ExclusiveContext exclusive(context);
    address = Memory::instance().allocate(bytes, kind, context->device, context->handle, flags);
    return address == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult release(uint64_t address, bool pinned) {
    if (CUresult status = check_initialized()) return status;
    std::optional<Allocation> found = Memory::instance().find(address);
    if (!found || found->base != address) return CUDA_ERROR_INVALID_VALUE;
    if ((found->kind == MemoryKind::pinned) != pinned || found->kind == MemoryKind::registered ||
        found->kind == MemoryKind::mapped)
        return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<Context> context = tables().contexts.get(found->owner);
    if (context) {
        if (CUresult status = check_unsafe_call()) return status;
        if (on_worker_thread()) return CUDA_ERROR_NOT_PERMITTED;
        ExclusiveContext exclusive(context);
        drain(*context);  // running kernels may still use it
        if (!belongs_to_graph(address)) free_memory(address, found->id);
        return static_cast<CUresult>(context->sticky_error.load());
    }
    free_memory(address, found->id);
    return CUDA_SUCCESS;
}

size_t pitch_of(size_t width) { return (width + kPitchAlignment - 1) / kPitchAlignment * kPitchAlignment; }

CUresult pointer_attribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
    std::optional<Allocation> found = Memory::instance().find(address);
    auto set = [data](auto value) { memcpy(data, &value, sizeof value); };
    if (!found) {
        switch (static_cast<int>(attribute)) {  // attributes that an unknown pointer has
            case CU_POINTER_ATTRIBUTE_MAPPED: set(0); return CUDA_SUCCESS;
            default: return CUDA_ERROR_INVALID_VALUE;
        }
    }
    bool host = found->kind == MemoryKind::pinned || found->kind == MemoryKind::registered;
    switch (static_cast<int>(attribute)) {
        case CU_POINTER_ATTRIBUTE_CONTEXT: set(found->owner); break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            set(static_cast<unsigned>(host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE));
            break;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: set(address); break;
        case CU_POINTER_ATTRIBUTE_HOST_POINTER:
            if (found->kind == MemoryKind::device || found->kind == MemoryKind::mapped)
                return CUDA_ERROR_INVALID_VALUE;
            set(address);
            break;
        case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: set(static_cast<int>(0)); break;
        case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: set(found->id); break;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
            set(static_cast<unsigned>(found->kind == MemoryKind::managed));
            break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: set(found->device); break;
        case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: set(static_cast<int>(0)); break;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: set(found->base); break;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        case CU_POINTER_ATTRIBUTE_MAPPING_SIZE: set(found->size); break;
        case CU_POINTER_ATTRIBUTE_MAPPED: set(static_cast<int>(1)); break;
        case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: {
            const bool shareable = found->pool && found->pool->file;
            set(uint64_t{shareable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE});
            break;
        }
        case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
            set(static_cast<unsigned>(CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE));
            break;
        case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: set(found->pool ? found->pool->handle : nullptr); break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

size_t attribute_size(CUpointer_attribute attribute) {
    switch (static_cast<int>(attribute)) {
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        case CU_POINTER_ATTRIBUTE_MAPPED:
        case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
        case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: return 4;
        default: return 8;
    }
}

// The same as describe_end() for an array, whose texels have no address that an application knows.
CUresult describe_array(CUarray handle, size_t x, size_t y, size_t z, size_t lod,
                        const CUDA_MEMCPY3D &described, uint64_t &start, size_t &pitch, size_t &slice,
                        std::shared_ptr<Array> &array) {
    array = tables().arrays.get(handle);
    if (!array) return CUDA_ERROR_INVALID_HANDLE;
    const TextureLevel &level = array->level;
    auto inside = [](size_t begin, size_t count, size_t size) {
        return begin <= size && count <= size - begin;
    };
    if (lod != 0 || !inside(x, described.WidthInBytes, level.pitch) ||
        !inside(y, described.Height, level.height) || !inside(z, described.Depth, level.depth))
        return CUDA_ERROR_INVALID_VALUE;
    pitch = level.pitch;
    slice = level.slice;
    start = level.base + z * slice + y * pitch + x;
    return CUDA_SUCCESS;
}

// Computes the start and the pitches of one end of a copy, and checks its range. A host end may be any memory of the
// process.
CUresult describe_end(CUmemorytype type, const void *host, CUdeviceptr device, size_t pitch, size_t rows,
                      size_t x, size_t y, size_t z, const CUDA_MEMCPY3D &described, uint64_t &start,
                      size_t &out_pitch, size_t &out_slice) {
    uint64_t base = 0;
    switch (type) {
        case CU_MEMORYTYPE_HOST: base = reinterpret_cast<uint64_t>(host); break;
        case CU_MEMORYTYPE_DEVICE:
        case CU_MEMORYTYPE_UNIFIED: base = device; break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    out_pitch = pitch != 0 ? pitch : described.WidthInBytes + x;
    if (out_pitch < described.WidthInBytes) return CUDA_ERROR_INVALID_VALUE;
    out_slice = out_pitch * (rows != 0 ? rows : described.Height + y);
    start = base + z * out_slice + y * out_pitch + x;
    if (base == 0 && described.WidthInBytes != 0 && described.Height != 0 && described.Depth != 0)
        return CUDA_ERROR_INVALID_VALUE;
    size_t bytes =
        (described.Depth - 1) * out_slice + (described.Height - 1) * out_pitch + described.WidthInBytes;
    if (described.WidthInBytes == 0 || described.Height == 0 || described.Depth == 0) return CUDA_SUCCESS;
    if (type == CU_MEMORYTYPE_DEVICE || Memory::instance().in_region(start)) return check_range(start, bytes);
    return CUDA_SUCCESS;
}

}  // namespace

CUresult check_range(uint64_t address, size_t bytes) {
    return bytes == 0 || Memory::instance().covers(address, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult describe_copy(const CUDA_MEMCPY3D &described, Copy &copy) {
    CUresult status =
        described.srcMemoryType == CU_MEMORYTYPE_ARRAY
            ? describe_array(described.srcArray, described.srcXInBytes, described.srcY, described.srcZ,
                             described.srcLOD, described, copy.source, copy.source_pitch, copy.source_slice,
                             copy.from_array)
            : describe_end(described.srcMemoryType, described.srcHost, described.srcDevice,
                           described.srcPitch, described.srcHeight, described.srcXInBytes, described.srcY,
                           described.srcZ, described, copy.source, copy.source_pitch, copy.source_slice);
    if (status != CUDA_SUCCESS) return status;
    status = described.dstMemoryType == CU_MEMORYTYPE_ARRAY
                 ? describe_array(described.dstArray, described.dstXInBytes, described.dstY, described.dstZ,
                                  described.dstLOD, described, copy.destination, copy.destination_pitch,
                                  copy.destination_slice, copy.to_array)
                 : describe_end(described.dstMemoryType, described.dstHost, described.dstDevice,
                                described.dstPitch, described.dstHeight, described.dstXInBytes,
                                described.dstY, described.dstZ, described, copy.destination,
                                copy.destination_pitch, copy.destination_slice);
    if (status != CUDA_SUCCESS) return status;
    copy.width = described.WidthInBytes;
    copy.height = described.Height;
    copy.depth = described.Depth;
    copy.described = described;
    return CUDA_SUCCESS;
}

}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

// ---------------------------------------------------------------------------------------------------- device memory

CUresult cuMemGetInfo(size_t *free, size_t *total) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    size_t all = Memory::instance().total();
    if (free != nullptr) *free = all - std::min(all, Memory::instance().used(context->device));
    if (total != nullptr) *total = all;
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *address, size_t bytes) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (address == nullptr) return CUDA_ERROR_INVALID_VALUE;
    uint64_t allocated = 0;
    if (CUresult status = allocate(context, bytes, MemoryKind::device, 0, allocated)) return status;
    *address = allocated;
    return CUDA_SUCCESS;
}

CUresult cuMemAllocPitch(CUdeviceptr *address, size_t *pitch, size_t width, size_t height,
                         unsigned int element) {
    if (pitch == nullptr || width == 0 || height == 0) return CUDA_ERROR_INVALID_VALUE;
    if (element != 4 && element != 8 && element != 16) return CUDA_ERROR_INVALID_VALUE;
    *pitch = pitch_of(width);
    return cuMemAlloc(address, *pitch * height);
}

CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    unsigned attach = flags & ~unsigned{CU_MEM_ATTACH_SINGLE};
    if (address == nullptr || (attach != CU_MEM_ATTACH_GLOBAL && attach != CU_MEM_ATTACH_HOST))
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t allocated = 0;
    if (CUresult status = allocate(context, bytes, MemoryKind::managed, flags, allocated)) return status;
    *address = allocated;
    return CUDA_SUCCESS;
}

CUresult cuMemFree(CUdeviceptr address) {
    if (address == 0) return check_initialized();
    return release(address, false);
}

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    std::optional<Allocation> found = Memory::instance().find(address);
    if (!found) return CUDA_ERROR_NOT_FOUND;
    if (base != nullptr) *base = found->base;
    if (size != nullptr) *size = found->size;
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------- host memory

CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned int flags) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    constexpr unsigned known =
        CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
    if (pointer == nullptr || (flags & ~known) != 0) return CUDA_ERROR_INVALID_VALUE;
    uint64_t allocated = 0;
    if (CUresult status = allocate(context, bytes, MemoryKind::pinned, flags, allocated)) return status;
    *pointer = reinterpret_cast<void *>(allocated);
    return CUDA_SUCCESS;
}

CUresult cuMemAllocHost(void **pointer, size_t bytes) {
    return cuMemHostAlloc(pointer, bytes, CU_MEMHOSTALLOC_DEVICEMAP);
}

CUresult cuMemFreeHost(void *pointer) {
    if (pointer == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return release(reinterpret_cast<uint64_t>(pointer), true);
}

CUresult cuMemHostRegister(void *pointer, size_t bytes, unsigned int flags) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    constexpr unsigned known =
        CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_READ_ONLY;
    if (pointer == nullptr || bytes == 0 || (flags & ~known) != 0) return CUDA_ERROR_INVALID_VALUE;
    auto base = reinterpret_cast<uint64_t>(pointer);
    if (Memory::instance().in_region(base)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if (CUresult status = check_unsafe_call()) return status;
    ExclusiveContext exclusive(context);
    return Memory::instance().add_registered(base, bytes, context->device, context->handle, flags)
               ? CUDA_SUCCESS
               : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

CUresult cuMemHostUnregister(void *pointer) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (pointer == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult status = check_unsafe_call()) return status;
    ExclusiveContext exclusive(context);
    drain(*context);
    return Memory::instance().remove_registered(reinterpret_cast<uint64_t>(pointer))
               ? CUDA_SUCCESS
               : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr *address, void *pointer, unsigned int flags) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (address == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    std::optional<Allocation> found = Memory::instance().find(reinterpret_cast<uint64_t>(pointer));
    if (!found || found->kind == MemoryKind::device || found->kind == MemoryKind::mapped)
        return CUDA_ERROR_INVALID_VALUE;
    *address = reinterpret_cast<uint64_t>(pointer);
    return CUDA_SUCCESS;
}

CUresult cuMemHostGetFlags(unsigned int *flags, void *pointer) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    std::optional<Allocation> found = Memory::instance().find(reinterpret_cast<uint64_t>(pointer));
    if (flags == nullptr || !found || found->kind == MemoryKind::device) return CUDA_ERROR_INVALID_VALUE;
    *flags = found->flags | CU_MEMHOSTALLOC_DEVICEMAP;
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------- attributes

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
    if (CUresult status = check_initialized()) return status;
    if (data == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return pointer_attribute(data, attribute, address);
}

CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data,
                                CUdeviceptr address) {
    if (CUresult status = check_initialized()) return status;
    if (attributes == nullptr || data == nullptr) return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++) {
        if (data[i] == nullptr) return CUDA_ERROR_INVALID_VALUE;
        memset(data[i], 0, attribute_size(attributes[i]));
        if (pointer_attribute(data[i], attributes[i], address) != CUDA_SUCCESS &&
            attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
            int none = -2;
            memcpy(data[i], &none, sizeof none);
        }
    }
    return CUDA_SUCCESS;
}

CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    if (CUresult status = check_initialized()) return status;
    if (value == nullptr || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) return CUDA_ERROR_INVALID_VALUE;
    return Memory::instance().find(address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// ---------------------------------------------------------------------------------------------------- graphs

CUresult cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value) {
    if (CUresult status = check_initialized()) return status;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    GraphMemory &all = graph_memory();
    std::lock_guard lock(all.mutex);
    uint64_t bytes = 0;
    switch (attribute) {
        case CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT:
        case CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT: bytes = all.used[device]; break;
        case CU_GRAPH_MEM_ATTR_USED_MEM_HIGH: bytes = all.used_high[device]; break;
        case CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH: bytes = all.reserved_high[device]; break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    memcpy(value, &bytes, sizeof bytes);
    return CUDA_SUCCESS;
}

// A high watermark can only be reset, by the value zero. It is then the memory in use.
CUresult cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value) {
    if (CUresult status = check_initialized()) return status;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    uint64_t bytes = 1;
    if (value != nullptr) memcpy(&bytes, value, sizeof bytes);
    if (bytes != 0) return CUDA_ERROR_INVALID_VALUE;
    GraphMemory &all = graph_memory();
    std::lock_guard lock(all.mutex);
    switch (attribute) {
        case CU_GRAPH_MEM_ATTR_USED_MEM_HIGH: all.used_high[device] = all.used[device]; return CUDA_SUCCESS;
        case CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH:
            all.reserved_high[device] = all.used[device];
            return CUDA_SUCCESS;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
}

extern "C" {
CUresult register_v1(void *, size_t, unsigned) __asm__("cuMemHostRegister");
CUresult register_v1(void *pointer, size_t bytes, unsigned flags) {
    return cuMemHostRegister(pointer, bytes, flags);
}
}

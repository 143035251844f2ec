// The API of memory pools.
//
// The allocations of a shareable pool are parts of one file in memory. The descriptor that another process gets is that file;
// the exported data of a pointer says which part of it.
#include "driver/driver.h"

#include <fcntl.h>

#include <algorithm>
#include <cstring>

namespace cudasim::driver {
namespace {

struct ExportedPointer {
    static constexpr uint64_t kMagic = 0x5254505f53434355;
    uint64_t magic = kMagic;
    uint64_t inode = 0;              // of the pool's file
    uint64_t offset = 0, bytes = 0;  // the part of the file
    uint64_t start = 0, size = 0;    // of the allocation in it
};
static_assert(sizeof(ExportedPointer) <= sizeof(CUmemPoolPtrExportData));

std::mutex pools_mutex;  // guards the two tables, by device

std::map<int, std::shared_ptr<MemoryPool>> &default_pools() {
    static auto *const pools = new std::map<int, std::shared_ptr<MemoryPool>>();
    return *pools;
}

std::map<int, std::shared_ptr<MemoryPool>> &current_pools() {  // that cuDeviceSetMemPool chose
    static auto *const pools = new std::map<int, std::shared_ptr<MemoryPool>>();
    return *pools;
}

void *add_pool(const std::shared_ptr<MemoryPool> &pool) { return pool->handle = tables().pools.add(pool); }

std::shared_ptr<MemoryPool> default_pool(int device) {
    std::lock_guard lock(pools_mutex);
    std::shared_ptr<MemoryPool> &pool = default_pools()[device];
    if (!pool) {
        pool = std::make_shared<MemoryPool>();
        pool->device = device;
        pool->is_default = true;
        add_pool(pool);
    }
    return pool;
}

bool imported(const MemoryPool &pool) { return pool.file && pool.file->imported(); }

void count_used(MemoryPool &pool, size_t bytes) {  // its mutex is held
    pool.used += bytes;
    pool.used_high = std::max(pool.used_high, pool.used);
}

bool is_switch(CUmemPool_attribute attribute) {
    return attribute == CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES ||
           attribute == CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC ||
           attribute == CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
}

// Checks which memory cuMemGetMemPool and its relatives are asked for: only devices have pools.
CUresult check_location(const CUmemLocation *location, CUmemAllocationType type) {
    if (location == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (location->type != CU_MEM_LOCATION_TYPE_DEVICE || type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

}  // namespace

CUresult allocate_from_pool(const std::shared_ptr<MemoryPool> &pool, size_t bytes, const Context &context,
                            uint64_t &address) {
    if (imported(*pool)) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(pool->mutex);
    if (pool->most != 0 && (bytes > pool->most || pool->used > pool->most - bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    address = Memory::instance().allocate_from_pool(bytes, pool->device, context.handle, pool, pool->file);
    if (address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
    count_used(*pool, bytes);
    return CUDA_SUCCESS;
}

void free_memory(uint64_t base, uint64_t id) {
    const std::optional<Allocation> found = Memory::instance().find(base);
    if (!found || !Memory::instance().release(base, id)) return;
    if (found->kind == MemoryKind::managed) forget_advice(id);
    if (!found->pool) return;
    std::lock_guard lock(found->pool->mutex);
    found->pool->used -= found->size;
}

}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
    if (CUresult status = check_initialized()) return status;
    if (pool == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *pool = static_cast<CUmemoryPool>(default_pool(device)->handle);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) {
    if (CUresult status = check_initialized()) return status;
    if (pool == nullptr) return CUDA_ERROR_INVALID_VALUE;
    {
        std::lock_guard lock(pools_mutex);
        auto found = current_pools().find(device);
        if (found != current_pools().end()) {
            *pool = static_cast<CUmemoryPool>(found->second->handle);
            return CUDA_SUCCESS;
        }
    }
    return cuDeviceGetDefaultMemPool(pool, device);
}

CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool handle) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<MemoryPool> pool = tables().pools.get(handle);
    if (!pool || pool->device != device || imported(*pool)) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(pools_mutex);
    current_pools()[device] = pool;
    return CUDA_SUCCESS;
}

CUresult cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type) {
    if (CUresult status = check_location(location, type)) return status;
    return cuDeviceGetDefaultMemPool(pool, location->id);
}

CUresult cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type) {
    if (CUresult status = check_location(location, type)) return status;
    return cuDeviceGetMemPool(pool, location->id);
}

CUresult cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool) {
    if (CUresult status = check_location(location, type)) return status;
    return cuDeviceSetMemPool(location->id, pool);
}

CUresult cuMemPoolCreate(CUmemoryPool *handle, const CUmemPoolProps *properties) {
    if (CUresult status = check_initialized()) return status;
    if (handle == nullptr || properties == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (properties->allocType != CU_MEM_ALLOCATION_TYPE_PINNED ||
        properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!is_device(properties->location.id)) return CUDA_ERROR_INVALID_DEVICE;
    const unsigned handles = properties->handleTypes;
    if ((handles & ~unsigned{CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR}) != 0) return CUDA_ERROR_NOT_SUPPORTED;
    auto pool = std::make_shared<MemoryPool>();
    pool->device = properties->location.id;
    pool->most = properties->maxSize;
    if (handles != CU_MEM_HANDLE_TYPE_NONE) {
        pool->file = PoolFile::create(pool->device);
        if (!pool->file) return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = static_cast<CUmemoryPool>(add_pool(pool));
    return CUDA_SUCCESS;
}

CUresult cuMemPoolDestroy(CUmemoryPool handle) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<MemoryPool> pool = tables().pools.get(handle);
    if (!pool || pool->is_default) return CUDA_ERROR_INVALID_VALUE;
    tables().pools.remove(handle);
    std::lock_guard lock(pools_mutex);
    auto found = current_pools().find(pool->device);
    if (found != current_pools().end() && found->second == pool) current_pools().erase(found);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t) {  // a pool reserves no more than is in use
    if (CUresult status = check_initialized()) return status;
    return tables().pools.get(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void *value) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<MemoryPool> pool = tables().pools.get(handle);
    if (!pool || value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(pool->mutex);
    if (is_switch(attribute)) {
        memcpy(&pool->switches[attribute], value, sizeof(int));
        return CUDA_SUCCESS;
    }
    uint64_t wide;
    memcpy(&wide, value, sizeof wide);
    if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) {
        pool->release_threshold = wide;
        return CUDA_SUCCESS;
    }
    // A high watermark can only be reset, by the value zero. It is then the memory in use.
    if ((attribute != CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH && attribute != CU_MEMPOOL_ATTR_USED_MEM_HIGH) ||
        wide != 0)
        return CUDA_ERROR_INVALID_VALUE;
    pool->used_high = pool->used;
    return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void *value) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<MemoryPool> pool = tables().pools.get(handle);
    if (!pool || value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(pool->mutex);
    if (is_switch(attribute)) {
        auto set = pool->switches.find(attribute);
        const int answer = set == pool->switches.end() ? 1 : set->second;
        memcpy(value, &answer, sizeof answer);
        return CUDA_SUCCESS;
    }
    uint64_t wide = 0;
    switch (static_cast<int>(attribute)) {
        case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: wide = pool->release_threshold; break;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: wide = pool->used; break;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        case CU_MEMPOOL_ATTR_USED_MEM_HIGH: wide = pool->used_high; break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    memcpy(value, &wide, sizeof wide);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc *descriptions, size_t count) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<MemoryPool> pool = tables().pools.get(handle);
    if (!pool || (descriptions == nullptr && count != 0)) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        const auto &[location, flags] = descriptions[i];
        if (location.type != CU_MEM_LOCATION_TYPE_DEVICE || !is_device(location.id))
            return CUDA_ERROR_INVALID_VALUE;
        if (flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE &&  // the device of the pool always has access
            (flags != CU_MEM_ACCESS_FLAGS_PROT_NONE || location.id == pool->device))
            return CUDA_ERROR_INVALID_VALUE;
    }
    std::lock_guard lock(pool->mutex);
    for (size_t i = 0; i < count; i++) pool->access[descriptions[i].location.id] = descriptions[i].flags;
    return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool handle, CUmemLocation *location) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<MemoryPool> pool = tables().pools.get(handle);
    if (!pool || flags == nullptr || location == nullptr || location->type != CU_MEM_LOCATION_TYPE_DEVICE ||
        !is_device(location->id))
        return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(pool->mutex);
    auto set = pool->access.find(location->id);
    *flags = location->id == pool->device ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
             : set == pool->access.end()  ? CU_MEM_ACCESS_FLAGS_PROT_NONE
                                          : set->second;
    return CUDA_SUCCESS;
}

CUresult cuMemPoolExportToShareableHandle(void *out, CUmemoryPool handle, CUmemAllocationHandleType type,
                                          unsigned long long flags) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<MemoryPool> pool = tables().pools.get(handle);
    if (!pool || !pool->file || pool->file->imported() || out == nullptr || flags != 0 ||
        type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    const int file = fcntl(pool->file->file(), F_DUPFD_CLOEXEC, 0);
    if (file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    *static_cast<int *>(out) = file;
    return CUDA_SUCCESS;
}

CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *handle, void *os_handle,
                                            CUmemAllocationHandleType type, unsigned long long flags) {
    if (CUresult status = check_initialized()) return status;
    if (handle == nullptr || flags != 0 || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    auto pool = std::make_shared<MemoryPool>();
    pool->file = PoolFile::import(static_cast<int>(reinterpret_cast<intptr_t>(os_handle)));
    if (!pool->file || !is_device(pool->file->device())) return CUDA_ERROR_INVALID_VALUE;
    pool->device = pool->file->device();
    *handle = static_cast<CUmemoryPool>(add_pool(pool));
    return CUDA_SUCCESS;
}

CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *out, CUdeviceptr address) {
    if (CUresult status = check_initialized()) return status;
    std::optional<Allocation> found = Memory::instance().find(address);
    if (out == nullptr || !found || found->base != address || !found->range || imported(*found->pool))
        return CUDA_ERROR_INVALID_VALUE;
    ExportedPointer exported;
    exported.inode = found->range->file->inode();
    exported.offset = found->range->offset;
    exported.bytes = found->range->bytes;
    exported.start = found->base - found->mapping;
    exported.size = found->size;
    memset(out, 0, sizeof *out);
    memcpy(out, &exported, sizeof exported);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolImportPointer(CUdeviceptr *address, CUmemoryPool handle, CUmemPoolPtrExportData *data) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    std::shared_ptr<MemoryPool> pool = tables().pools.get(handle);
    if (address == nullptr || data == nullptr || !pool || !imported(*pool)) return CUDA_ERROR_INVALID_VALUE;
    ExportedPointer exported;  // from another process, so it must be checked
    memcpy(static_cast<void *>(&exported), data, sizeof exported);
    if (exported.magic != ExportedPointer::kMagic || exported.inode != pool->file->inode() ||
        exported.size == 0 || exported.size > exported.bytes ||
        exported.start > exported.bytes - exported.size)
        return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<const FileRange> range = pool->file->part(exported.offset, exported.bytes);
    if (!range) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(pool->mutex);
    const uint64_t imported =
        Memory::instance().import(range, exported.start, exported.size, pool->device, context->handle, pool);
    if (imported == 0) return CUDA_ERROR_OUT_OF_MEMORY;
    count_used(*pool, exported.size);
    *address = imported;
    return CUDA_SUCCESS;
}

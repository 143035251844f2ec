// The API of virtual memory management: physical memory, reserved addresses, and mappings of one to the other.
//
// Physical memory is a file in memory (memfd), so other processes can import it. Access is the same for all devices, because
// the page tables are those of the process.
#include "driver/virtual_memory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

namespace cudasim::driver {

PhysicalMemory::~PhysicalMemory() {
    if (file < 0) return;
    if (counted) Memory::instance().close_file(file, size, properties.location.id);
    else close(file);
}

Mappings &all_mappings() {
    static Mappings *const instance = new Mappings();
    return *instance;
}

std::map<uint64_t, Mapping>::const_iterator Mappings::find(uint64_t address, size_t size) const {
    auto found = at.upper_bound(address);
    if (found == at.begin()) return at.end();
    const uint64_t offset = address - (--found)->first;
    return offset <= found->second.size && size <= found->second.size - offset ? found : at.end();
}

CUmemGenericAllocationHandle hand_out(const std::shared_ptr<PhysicalMemory> &physical) {
    if (physical->handle == nullptr) physical->handle = tables().physical.add(physical);
    physical->references++;
    return reinterpret_cast<uint64_t>(physical->handle);
}

std::shared_ptr<PhysicalMemory> find_physical(CUmemGenericAllocationHandle handle) {
    return tables().physical.get(reinterpret_cast<const void *>(handle));
}

namespace {

CUresult check_properties(const CUmemAllocationProp *properties) {
    if (properties == nullptr || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
    if (!is_device(properties->location.id)) return CUDA_ERROR_INVALID_DEVICE;
    if ((properties->requestedHandleTypes & ~unsigned{CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR}) != 0)
        return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

}  // namespace
}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags) {
    if (CUresult status = check_initialized()) return status;
    if (granularity == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult status = check_properties(properties)) return status;
    *granularity = kPhysicalGranularity;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr,
                             unsigned long long flags) {
    if (CUresult status = check_initialized()) return status;
    if (address == nullptr || size == 0 || !aligned(size) || flags != 0 || (alignment & (alignment - 1)) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    *address = Memory::instance().reserve(size, std::max(alignment, kPhysicalGranularity));
    return *address == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    if (CUresult status = check_initialized()) return status;
    return Memory::instance().unreserve(address, size) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    if (CUresult status = check_initialized()) return status;
    if (handle == nullptr || size == 0 || !aligned(size) || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult status = check_properties(properties)) return status;
    auto physical = std::make_shared<PhysicalMemory>();
    physical->size = size;
    physical->properties = *properties;
    physical->properties.allocFlags.compressionType = CU_MEM_ALLOCATION_COMP_NONE;
    physical->file = Memory::instance().create_file(size, properties->location.id);
    if (physical->file < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    std::lock_guard lock(all_mappings().mutex);
    *handle = hand_out(physical);
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    if (CUresult status = check_initialized()) return status;
    std::lock_guard lock(all_mappings().mutex);
    std::shared_ptr<PhysicalMemory> physical = find_physical(handle);
    if (!physical) return CUDA_ERROR_INVALID_VALUE;
    if (--physical->references == 0) {
        tables().physical.remove(physical->handle);
        physical->handle = nullptr;
    }
    return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    if (CUresult status = check_initialized()) return status;
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::optional<Allocation> found = Memory::instance().find(reinterpret_cast<uint64_t>(address));
    if (!found || found->kind != MemoryKind::mapped) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(all_mappings().mutex);
    auto mapping = all_mappings().at.find(found->base);
    if (mapping == all_mappings().at.end()) return CUDA_ERROR_INVALID_VALUE;
    *handle = hand_out(mapping->second.physical);
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                CUmemGenericAllocationHandle handle) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<PhysicalMemory> physical = find_physical(handle);
    if (!physical || properties == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *properties = physical->properties;
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    if (CUresult status = check_initialized()) return status;
    std::lock_guard lock(all_mappings().mutex);
    std::shared_ptr<PhysicalMemory> physical = find_physical(handle);
    if (!physical || size == 0 || !aligned(address) || !aligned(size) || !aligned(offset) || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (offset > physical->size || size > physical->size - offset) return CUDA_ERROR_INVALID_VALUE;
    if (!Memory::instance().map(address, size, physical->file, offset, physical->properties.location.id))
        return CUDA_ERROR_INVALID_VALUE;
    all_mappings().at[address] = {physical, offset, size};
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    if (CUresult status = check_initialized()) return status;
    std::lock_guard lock(all_mappings().mutex);
    const std::vector<Allocation> mappings = Memory::instance().mappings(address, size);
    if (mappings.empty()) return CUDA_ERROR_INVALID_VALUE;
    for (const Allocation &mapping : mappings) {
        Memory::instance().unmap(mapping);
        all_mappings().at.erase(mapping.base);
    }
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *descriptions, size_t count) {
    if (CUresult status = check_initialized()) return status;
    if (descriptions == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
    bool accessible = false;
    for (size_t i = 0; i < count; i++) {
        if (descriptions[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
        if (!is_device(descriptions[i].location.id)) return CUDA_ERROR_INVALID_DEVICE;
        // A copy into memory that the page tables protect would end the process.
        if (descriptions[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READ) return CUDA_ERROR_NOT_SUPPORTED;
        accessible = accessible || descriptions[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    }
    const std::vector<Allocation> mappings = Memory::instance().mappings(address, size);
    if (mappings.empty()) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(all_mappings().mutex);
    for (const Allocation &mapping : mappings) {
        auto found = all_mappings().at.find(mapping.base);
        if (found == all_mappings().at.end()) return CUDA_ERROR_INVALID_VALUE;  // unmapped meanwhile
        found->second.accessible = accessible;
        // Only multimem instructions may use the addresses of a multicast object.
        if (!found->second.physical->multicast) Memory::instance().set_access(mapping.base, accessible);
    }
    return CUDA_SUCCESS;
}

CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address) {
    if (CUresult status = check_initialized()) return status;
    std::lock_guard lock(all_mappings().mutex);
    auto found = all_mappings().find(address, 1);
    if (flags == nullptr || location == nullptr || found == all_mappings().at.end())
        return CUDA_ERROR_INVALID_VALUE;
    *flags = found->second.accessible ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<PhysicalMemory> physical = find_physical(handle);
    if (!physical || out == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    if ((physical->properties.requestedHandleTypes & type) == 0) return CUDA_ERROR_INVALID_VALUE;
    const int file = fcntl(physical->file, F_DUPFD_CLOEXEC, 0);
    if (file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    *static_cast<int *>(out) = file;
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle,
                                        CUmemAllocationHandleType type) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    const auto given = static_cast<int>(reinterpret_cast<intptr_t>(os_handle));
    struct stat found = {};
    const int seals = fcntl(given, F_GET_SEALS);  // a file that can shrink may end the process by SIGBUS
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || fstat(given, &found) != 0 || found.st_size <= 0 ||
        !aligned(static_cast<uint64_t>(found.st_size)))
        return CUDA_ERROR_INVALID_VALUE;
    auto physical = std::make_shared<PhysicalMemory>();
    physical->file = fcntl(given, F_DUPFD_CLOEXEC, 0);
    if (physical->file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    physical->counted = false;
    physical->size = static_cast<size_t>(found.st_size);
    physical->properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    physical->properties.requestedHandleTypes = type;
    physical->properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {context->device}};
    std::lock_guard lock(all_mappings().mutex);
    *handle = hand_out(physical);
    return CUDA_SUCCESS;
}

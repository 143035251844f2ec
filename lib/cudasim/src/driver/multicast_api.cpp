// The API of multicast objects: memory of several devices under one address, for the multimem instructions.
//
// A multicast object is mapped like physical memory, but loads and stores of its addresses are faults. An object belongs to one
// process: it has no handle that another process could import.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "device_abi.h"
#include "driver/virtual_memory.h"

namespace cudasim::driver {

Multicast::~Multicast() {
    for (const Binding &binding : bindings) munmap(binding.bytes, binding.size);
}

uint32_t replicas(void *, uint64_t address, uint32_t size, uint8_t **out) {
    std::lock_guard lock(all_mappings().mutex);
    const auto found = all_mappings().find(address, size);
    if (found == all_mappings().at.end()) return 0;
    const Mapping &mapping = found->second;
    const Multicast *multicast = mapping.physical->multicast.get();
    if (multicast == nullptr || !mapping.accessible) return 0;
    const uint64_t offset = mapping.offset + (address - found->first);
    uint32_t count = 0;
    for (const Multicast::Binding &binding : multicast->bindings)
        if (offset >= binding.offset && offset - binding.offset + size <= binding.size)
            out[count++] = binding.bytes + (offset - binding.offset);
    return count == multicast->team ? count : 0;
}

namespace {

CUresult bind(Multicast &multicast, size_t offset, size_t room,
              const std::shared_ptr<PhysicalMemory> &physical, size_t from, size_t size) {
    const int device = physical->properties.location.id;
    if (physical->multicast || size == 0 || !aligned(offset) || !aligned(from) || !aligned(size))
        return CUDA_ERROR_INVALID_VALUE;
    if (offset > room || size > room - offset || from > physical->size || size > physical->size - from)
        return CUDA_ERROR_INVALID_VALUE;
    if (multicast.devices.size() != multicast.team || multicast.devices.count(device) == 0)
        return CUDA_ERROR_INVALID_DEVICE;
    for (const Multicast::Binding &other : multicast.bindings)
        if (other.device == device && offset < other.offset + other.size && other.offset < offset + size)
            return CUDA_ERROR_INVALID_VALUE;
    void *bytes =
        mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, physical->file, static_cast<off_t>(from));
    if (bytes == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    multicast.bindings.push_back({device, offset, size, static_cast<uint8_t *>(bytes), physical});
    return CUDA_SUCCESS;
}

std::shared_ptr<PhysicalMemory> find_object(CUmemGenericAllocationHandle handle) {
    std::shared_ptr<PhysicalMemory> found = find_physical(handle);
    return found && found->multicast ? found : nullptr;
}

}  // namespace
}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

CUresult cuMulticastGetGranularity(size_t *granularity, const CUmulticastObjectProp *properties,
                                   CUmulticastGranularity_flags) {
    if (CUresult status = check_initialized()) return status;
    if (granularity == nullptr || properties == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *granularity = kPhysicalGranularity;
    return CUDA_SUCCESS;
}

CUresult cuMulticastCreate(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *properties) {
    if (CUresult status = check_initialized()) return status;
    if (handle == nullptr || properties == nullptr || properties->size == 0 || !aligned(properties->size) ||
        properties->numDevices == 0 || properties->numDevices > CS_MOST_REPLICAS || properties->flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->handleTypes != 0) return CUDA_ERROR_NOT_SUPPORTED;
    auto object = std::make_shared<PhysicalMemory>();
    object->size = properties->size;
    object->counted = false;
    object->file = memfd_create("cudasim-multicast", MFD_CLOEXEC);  // nothing is ever stored in it
    if (object->file < 0 || ftruncate(object->file, static_cast<off_t>(object->size)) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    object->multicast = std::make_unique<Multicast>();
    object->multicast->team = properties->numDevices;
    std::lock_guard lock(all_mappings().mutex);
    *handle = hand_out(object);
    return CUDA_SUCCESS;
}

CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device) {
    if (CUresult status = check_initialized()) return status;
    std::lock_guard lock(all_mappings().mutex);
    const std::shared_ptr<PhysicalMemory> object = find_object(handle);
    if (!object) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    std::set<int> &devices = object->multicast->devices;
    if (devices.size() == object->multicast->team || !devices.insert(device).second)
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

CUresult cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t offset,
                            CUmemGenericAllocationHandle memory, size_t from, size_t size,
                            unsigned long long flags) {
    if (CUresult status = check_initialized()) return status;
    std::lock_guard lock(all_mappings().mutex);
    const std::shared_ptr<PhysicalMemory> object = find_object(handle), physical = find_physical(memory);
    if (!object || !physical || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    return bind(*object->multicast, offset, object->size, physical, from, size);
}

CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle handle, size_t offset, CUdeviceptr address,
                             size_t size, unsigned long long flags) {
    if (CUresult status = check_initialized()) return status;
    std::lock_guard lock(all_mappings().mutex);
    const std::shared_ptr<PhysicalMemory> object = find_object(handle);
    const auto mapping = all_mappings().find(address, size);
    if (!object || mapping == all_mappings().at.end() || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    const size_t from = mapping->second.offset + (address - mapping->first);
    return bind(*object->multicast, offset, object->size, mapping->second.physical, from, size);
}

CUresult cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, size_t size) {
    if (CUresult status = check_initialized()) return status;
    std::lock_guard lock(all_mappings().mutex);
    const std::shared_ptr<PhysicalMemory> object = find_object(handle);
    if (!object) return CUDA_ERROR_INVALID_VALUE;
    std::vector<Multicast::Binding> &bindings = object->multicast->bindings;
    const auto found = std::find_if(bindings.begin(), bindings.end(), [&](const Multicast::Binding &binding) {
        return binding.device == device && binding.offset == offset && binding.size == size;
    });
    if (found == bindings.end()) return CUDA_ERROR_INVALID_VALUE;
    munmap(found->bytes, found->size);
    bindings.erase(found);
    return CUDA_SUCCESS;
}

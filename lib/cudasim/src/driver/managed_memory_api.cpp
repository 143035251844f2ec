// The API of advice for managed memory. Advice has no effect here, but the application can ask for it.
#include "driver/driver.h"

#include <algorithm>
#include <cstring>

namespace cudasim::driver {
namespace {

constexpr uint64_t kPage = 4096;

struct Advice {
    bool read_mostly = false;
    CUmemLocation preferred{CU_MEM_LOCATION_TYPE_INVALID, {0}}, prefetched{CU_MEM_LOCATION_TYPE_INVALID, {0}};
    std::set<int> accessed_by;  // devices, CU_DEVICE_CPU
};

// The advice for the pages of an allocation: each entry is for the pages up to the next one.
using Pages = std::map<uint64_t, Advice>;

struct AllAdvice {
    std::mutex mutex;
    std::map<uint64_t, Pages> by_allocation;  // by id
};

AllAdvice &all_advice() {
    static AllAdvice *const instance = new AllAdvice();
    return *instance;
}

// Makes `address` the start of an entry.
Pages::iterator split(Pages &pages, uint64_t address) {
    auto next = pages.upper_bound(address);
    const Advice before = next == pages.begin() ? Advice() : std::prev(next)->second;
    return pages.emplace(address, before).first;
}

// Calls `use` with the advice for each part of a range of managed memory.
template <class Use>
CUresult for_each_part(uint64_t address, size_t bytes, Use use) {
    std::optional<Allocation> found = Memory::instance().find(address);
    if (!found || found->kind != MemoryKind::managed || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult status = check_range(address, bytes)) return status;
    std::lock_guard lock(all_advice().mutex);
    Pages &pages = all_advice().by_allocation[found->id];
    const uint64_t end = (address + bytes + kPage - 1) / kPage * kPage;
    const auto last = split(pages, end);
    for (auto part = split(pages, address / kPage * kPage); part != last; ++part) use(part->second);
    return CUDA_SUCCESS;
}

CUresult check_location(const CUmemLocation &location) {
    if (location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        return is_device(location.id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
    const bool host = location.type == CU_MEM_LOCATION_TYPE_HOST ||
                      location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA ||
                      location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
    return host ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

int number_of(const CUmemLocation &location) {
    if (location.type == CU_MEM_LOCATION_TYPE_INVALID) return CU_DEVICE_INVALID;
    return location.type == CU_MEM_LOCATION_TYPE_DEVICE ? location.id : CU_DEVICE_CPU;
}

// Returns the location that all parts of the range have.
CUresult common_location(CUmemLocation Advice::*which, uint64_t address, size_t bytes,
                         CUmemLocation &common) {
    bool first = true;
    return for_each_part(address, bytes, [&](const Advice &advice) {
        const CUmemLocation &location = advice.*which;
        if (first) common = location;
        else if (location.type != common.type || location.id != common.id)
            common.type = CU_MEM_LOCATION_TYPE_INVALID;
        first = false;
    });
}

CUresult devices_with_access(uint64_t address, size_t bytes, std::set<int> &devices) {
    for (int device = 0; device < config().devices; device++) devices.insert(device);
    devices.insert(CU_DEVICE_CPU);
    return for_each_part(address, bytes, [&](const Advice &advice) {
        for (auto device = devices.begin(); device != devices.end();)
            device = advice.accessed_by.count(*device) != 0 ? std::next(device) : devices.erase(device);
    });
}

}  // namespace

CUresult note_prefetch(uint64_t address, size_t bytes, const CUmemLocation &location) {
    if (CUresult status = check_location(location)) return status;
    return for_each_part(address, bytes, [&](Advice &advice) { advice.prefetched = location; });
}

void forget_advice(uint64_t id) {
    std::lock_guard lock(all_advice().mutex);
    all_advice().by_allocation.erase(id);
}

}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

CUresult cuMemAdvise(CUdeviceptr address, size_t bytes, CUmem_advise what, CUmemLocation location) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    const bool needs_location = what == CU_MEM_ADVISE_SET_PREFERRED_LOCATION ||
                                what == CU_MEM_ADVISE_SET_ACCESSED_BY ||
                                what == CU_MEM_ADVISE_UNSET_ACCESSED_BY;
    if (needs_location)
        if (CUresult status = check_location(location)) return status;
    if (what < CU_MEM_ADVISE_SET_READ_MOSTLY || what > CU_MEM_ADVISE_UNSET_ACCESSED_BY)
        return CUDA_ERROR_INVALID_VALUE;
    return for_each_part(address, bytes, [&](Advice &advice) {
        switch (what) {
            case CU_MEM_ADVISE_SET_READ_MOSTLY: advice.read_mostly = true; break;
            case CU_MEM_ADVISE_UNSET_READ_MOSTLY: advice.read_mostly = false; break;
            case CU_MEM_ADVISE_SET_PREFERRED_LOCATION: advice.preferred = location; break;
            case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION: advice.preferred = Advice().preferred; break;
            case CU_MEM_ADVISE_SET_ACCESSED_BY: advice.accessed_by.insert(number_of(location)); break;
            case CU_MEM_ADVISE_UNSET_ACCESSED_BY: advice.accessed_by.erase(number_of(location)); break;
        }
    });
}

CUresult cuMemRangeGetAttribute(void *data, size_t size, CUmem_range_attribute attribute, CUdeviceptr address,
                                size_t bytes) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (data == nullptr || size == 0 || size % sizeof(int) != 0) return CUDA_ERROR_INVALID_VALUE;
    auto *values = static_cast<int *>(data);
    if (attribute == CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY) {
        std::set<int> devices;
        if (CUresult status = devices_with_access(address, bytes, devices)) return status;
        std::fill_n(values, size / sizeof(int), CU_DEVICE_INVALID);
        std::copy_n(devices.begin(), std::min(devices.size(), size / sizeof(int)), values);
        return CUDA_SUCCESS;
    }
    if (size != sizeof(int)) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY) {
        bool all = true;
        if (CUresult status =
                for_each_part(address, bytes, [&](const Advice &advice) { all = all && advice.read_mostly; }))
            return status;
        *values = all;
        return CUDA_SUCCESS;
    }
    const bool prefetched = attribute == CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION ||
                            attribute == CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE ||
                            attribute == CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID;
    CUmemLocation common{};
    if (CUresult status =
            common_location(prefetched ? &Advice::prefetched : &Advice::preferred, address, bytes, common))
        return status;
    switch (attribute) {
        case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION:
        case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION: *values = number_of(common); break;
        case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE:
        case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE: *values = common.type; break;
        case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID:
        case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID: *values = common.id; break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult cuMemRangeGetAttributes(void **data, size_t *sizes, CUmem_range_attribute *attributes, size_t count,
                                 CUdeviceptr address, size_t bytes) {
    if (data == nullptr || sizes == nullptr || attributes == nullptr || count == 0)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (CUresult status = cuMemRangeGetAttribute(data[i], sizes[i], attributes[i], address, bytes))
            return status;
    return CUDA_SUCCESS;
}

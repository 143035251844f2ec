// Physical memory, and where it is mapped: what virtual memory management and multicast objects share.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "driver/driver.h"

namespace cudasim::driver {

constexpr size_t kPhysicalGranularity = size_t{2} << 20;

inline bool aligned(uint64_t value) { return value % kPhysicalGranularity == 0; }

struct PhysicalMemory;

struct Multicast {    // memory of several devices under one address
    struct Binding {  // part of a device's memory, and its place in the object
        int device = 0;
        size_t offset = 0, size = 0;
        uint8_t *bytes = nullptr;  // mapped here
        std::shared_ptr<PhysicalMemory> physical;
    };
    ~Multicast();
    unsigned team = 0;  // devices that may be added
    std::set<int> devices;
    std::vector<Binding> bindings;
};

struct PhysicalMemory {
    void *handle = nullptr;   // null: released, but still mapped
    unsigned references = 0;  // that the application holds
    int file = -1;
    bool counted = true;  // as memory of the device; imported memory counts where it was created
    size_t size = 0;
    CUmemAllocationProp properties{};
    std::unique_ptr<Multicast> multicast;  // null: memory of one device
    ~PhysicalMemory();
};

struct Mapping {
    std::shared_ptr<PhysicalMemory> physical;
    size_t offset = 0, size = 0;  // of `physical`
    bool accessible = false;
};

struct Mappings {
    std::mutex mutex;  // also of the handles and of the multicast objects
    std::map<uint64_t, Mapping> at;
    // Finds the mapping that contains [address, address + size). Returns at.end() if no mapping does.
    std::map<uint64_t, Mapping>::const_iterator find(uint64_t address, size_t size) const;
};

Mappings &all_mappings();
CUmemGenericAllocationHandle hand_out(const std::shared_ptr<PhysicalMemory> &physical);
std::shared_ptr<PhysicalMemory> find_physical(CUmemGenericAllocationHandle handle);  // null: not a handle

// Finds the memory of each device at an address of a multicast object (Environment::replicas).
uint32_t replicas(void *self, uint64_t address, uint32_t size, uint8_t **out);

}  // namespace cudasim::driver

// Shared by the files about devices and contexts.
#pragma once

#include "driver/driver.h"

namespace cudasim::driver {

struct Device {
    std::mutex mutex;
    std::shared_ptr<Context> primary;
    unsigned retained = 0;
    unsigned flags = 0;
};

constexpr size_t kDefaultHeapSize = size_t{8}
                                    << 20;  // of the heap for device-side malloc (CU_LIMIT_MALLOC_HEAP_SIZE)

Device &device_state(int device);
std::vector<std::shared_ptr<Context>> &context_stack();  // of the calling thread
std::shared_ptr<Context> create_context(int device, unsigned flags, bool primary);
// Finds the device's primary context, and creates it if necessary. `count`: also adds a reference for the application.
CUresult retain_primary(CUdevice device, std::shared_ptr<Context> &context, bool count);

}  // namespace cudasim::driver

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

struct CurrentContext {
    std::shared_ptr<Context> context;
    std::shared_ptr<GreenContext> green;  // null, or a part of `context`
    CUcontext handle() const { return static_cast<CUcontext>(green ? green->converted : context->handle); }
    bool destroyed() const { return context->destroyed || (green && green->destroyed); }
};

std::vector<CurrentContext> &context_stack();  // of the calling thread
// Without a context if `handle` is unknown.
CurrentContext find_context(const void *handle);
// Waits for a context's work and frees what the context holds.
void destroy_context(const std::shared_ptr<Context> &context);
CUresult release_primary(CUdevice device);
std::shared_ptr<Context> create_context(int device, unsigned flags, bool primary);
// Finds the device's primary context, and creates it if necessary. `count`: also adds a reference for the application.
CUresult retain_primary(CUdevice device, std::shared_ptr<Context> &context, bool count);

}  // namespace cudasim::driver

// What the files about devices and contexts share.
#pragma once

#include "driver/driver.h"

namespace cudasim::driver {

struct Device {
    std::mutex mutex;
    std::shared_ptr<Context> primary;
    unsigned retained = 0;
    unsigned flags = 0;
};

constexpr size_t kHeapLimit =
    size_t{8} << 20;  // of the heap for device-side malloc, unless cuCtxSetLimit says otherwise

Device &device_state(int device);
bool is_device(CUdevice device);
std::vector<std::shared_ptr<Context>> &context_stack();  // of the calling thread
std::shared_ptr<Context> make_context(int device, unsigned flags, bool primary);
// Sets `context` to the device's primary context, and makes it first if necessary. `count`: add a reference for
// the application.
CUresult retain_primary(CUdevice device, std::shared_ptr<Context> &context, bool count);

}  // namespace cudasim::driver

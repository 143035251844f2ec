// The agent's objects in the driver, as the files that made them hand them over for their release (leftovers.h).
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "driver/driver.h"

namespace gpubpf {

// The objects in one context. Running copies may still use all of them. There may be no objects, but a thread
// of the agent that is still in the context.
struct Leftovers {
    CUcontext context = nullptr;
    CUdevice device = 0;
    bool primary = false;     // the context is the device's primary context
    uint64_t attachment = 0;  // the attachment that launched the copies
    bool graphs = false;      // an executable graph holds copies, so only the end of the context frees them
    std::vector<CUdeviceptr> memory;
    std::vector<std::pair<void *, uint64_t>> registered;  // mapped host memory
    std::vector<CUmodule> modules;
    std::vector<CUevent> events;
    std::vector<CUstream> streams;
};

}  // namespace gpubpf

// The agent's own work in a context.
#pragma once

#include "state.h"

namespace gpubpf {

// Makes a context current on this thread while the object exists.
class Current {
  public:
    explicit Current(const Context &context)
        : ok_(driver.cuCtxPushCurrent_v2(context.handle) == CUDA_SUCCESS) {}
    ~Current() {
        CUcontext popped;
        if (ok_) driver.cuCtxPopCurrent_v2(&popped);
    }
    Current(const Current &) = delete;
    Current &operator=(const Current &) = delete;
    bool ok() const { return ok_; }

  private:
    DriverScope scope_;
    bool ok_;
};

// Waits for a stream without blocking in the driver. Returns false on timeout or failure.
bool wait_for(CUstream stream, uint32_t wait_ms);
// Returns whether all work of the context finished in time. A separate thread waits, because a persistent
// kernel never ends. `goes_on`: the application continues, so its captures must not be disturbed.
bool idle_within(const Context &context, uint32_t wait_ms, bool goes_on);
extern const Lifetime drain_lifetime;
// Takes a lock that is held across driver calls. Returns false on timeout.
bool lock_within(std::mutex &lock, uint32_t wait_ms);

// Adds a zeroed pool to the context. Returns false if memory is short. The context must be current.
bool add_pool(Context &context, uint64_t size);

}  // namespace gpubpf

// The agent's own work in a context.
#pragma once

#include "state.h"

namespace gpubpf {

// Makes a context current on this thread for as long as the object lives.
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

// Waits for a stream without blocking in the driver; false: not done in time, or failed.
bool wait_for(CUstream stream, uint32_t wait_ms);
// Whether all work of the context ended in time. A thread of its own waits: a persistent kernel never ends. `goes_on`: the application does, so
// its captures must not be disturbed.
bool idle_within(const Context &context, uint32_t wait_ms, bool goes_on);
extern const Lifetime idle_lifetime;
// Takes a lock that is held across driver calls; false: not in time.
bool lock_within(std::mutex &lock, uint32_t wait_ms);

// A pool of zeros, added to the context's; false: no memory. The context is current.
bool add_pool(Context &context, uint64_t size);

}  // namespace gpubpf

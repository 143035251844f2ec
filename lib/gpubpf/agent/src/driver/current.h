// The agent's own work in a context.
#pragma once

#include <atomic>
#include <utility>

#include "state.h"

namespace gpubpf {

// A thread of the agent is in a context while the object exists, or is about to enter it.
class Stay {
  public:
    // Refused if the program is ending the context. Waits while it is closed, for 2 s at most.
    explicit Stay(const Context &context) noexcept : Stay(context.handle, &context.dead) {}
    // For a context that has leftovers: call it before the check that it still has some.
    explicit Stay(CUcontext context) noexcept : Stay(context, nullptr) {}
    Stay(Stay &&other) noexcept : stays_(std::exchange(other.stays_, nullptr)), context_(other.context_) {}
    ~Stay();
    explicit operator bool() const { return stays_; }

  private:
    Stay(CUcontext context, const std::atomic<bool> *dead) noexcept;
    struct Stays *stays_ = nullptr;
    CUcontext context_;
};

// Must exist while the program's call ends a context, or may end it: no other thread may use the context then
// (CUDA driver API, cuCtxDestroy). Waits for the agent's threads that are in it, for 2 s at most. From then on,
// no thread enters.
class ContextClosed {
  public:
    explicit ContextClosed(CUcontext context) noexcept;  // null: none
    ~ContextClosed();
    ContextClosed(const ContextClosed &) = delete;
    ContextClosed &operator=(const ContextClosed &) = delete;

  private:
    Stays *stays_ = nullptr;
    CUcontext context_;
};
// Waits up to `wait_ms`. Returns whether no thread of the agent is in the context.
bool left_within(CUcontext context, uint32_t wait_ms);
extern const Lifetime current_lifetime;

// Makes a context current on this thread while the object exists.
class Current {
  public:
    explicit Current(const Context &context)
        : stay_(context), ok_(stay_ && driver.cuCtxPushCurrent_v2(context.handle) == CUDA_SUCCESS) {}
    ~Current() {
        CUcontext popped;
        if (ok_) driver.cuCtxPopCurrent_v2(&popped);
    }
    Current(const Current &) = delete;
    Current &operator=(const Current &) = delete;
    bool ok() const { return ok_; }

  private:
    Stay stay_;
    DriverScope scope_;
    bool ok_;
};

// Waits for a stream without blocking in the driver. Returns false on timeout or failure.
bool wait_for(CUstream stream, uint32_t wait_ms);
// Takes a lock that is held across driver calls. Returns false on timeout.
bool lock_within(std::mutex &lock, uint32_t wait_ms);

// Adds a zeroed pool to the context. Returns false if memory is short. The context must be current.
bool add_pool(Context &context, uint64_t size, uint64_t used = 0);

}  // namespace gpubpf

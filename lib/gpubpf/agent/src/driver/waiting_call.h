// The agent's driver calls that wait for a context. While a stream of the context is being captured, such a
// call is an error that ends the capture, whatever the thread's capture mode (CUDA programming guide,
// "Prohibited and Unhandled Operations"). So no call begins during a capture, and no capture begins until the
// calls that were about to begin wait inside the driver. A call that already waits does no harm.
#pragma once

#include <cstdint>
#include <sys/types.h>

#include "lifetime.h"

namespace gpubpf {

struct CallSlot;

// A thread that has used this much CPU time since its check counts as inside the driver, in ns. Entering the
// driver takes far less, but in a virtual machine, a thread may be charged time that the host took from the CPU.
constexpr int64_t kInsideAfter = 1'000'000;
constexpr int64_t kMostHeld = 1'000'000'000;  // ns that a capture waits at most

// Must exist from before the check for captures until the driver call has returned. The thread must make the
// call next.
class WaitingCall {
  public:
    // `captured`: whether a stream is being captured. The program's captures count before they begin.
    explicit WaitingCall(bool (*captured)()) noexcept;
    ~WaitingCall();
    WaitingCall(const WaitingCall &) = delete;
    WaitingCall &operator=(const WaitingCall &) = delete;
    explicit operator bool() const { return may_; }  // whether the call may be made

  private:
    CallSlot *slot_ = nullptr;
    bool may_ = false;
};

// Called in a hook when a capture is counted but has not begun. Returns once each waiting call is inside the
// driver, or after kMostHeld.
void before_capture() noexcept;

// Some drivers wait in a busy loop. Gives a thread the lowest nice value if its call is inside the driver; not
// before, because captures would have to wait for a thread that is rarely scheduled.
void yield_if_inside(pid_t thread) noexcept;

extern const Lifetime waiting_call_lifetime;

}  // namespace gpubpf

// The virtual clock (CUDASIM_CLOCK=virtual): what time it is for a host thread, and what a call adds to it.
//
// Host threads, queues and events each have a time of their own in virtual nanoseconds. Calls take none, except a launch
// (kLaunch) and calls that wait, whose thread is then where the thing is that it waited for. Every function here does
// nothing on the real clock.
#pragma once

#include <cstdint>

#include "driver/queue.h"

namespace cudasim::driver {

constexpr uint64_t kLaunch = 1000;        // ns that a launch call takes
constexpr uint64_t kCopyBytes = 10;       // bytes that a copy moves in 1 ns
constexpr uint64_t kFillBytes = 100;      // bytes that a memset writes in 1 ns
constexpr uint64_t kBeginning = 1000000;  // where the timeline begins: 0 could be taken for "unknown"

bool virtual_clock();

// The calling thread's time. Its first call gives it the largest that any host thread of the process has.
uint64_t host_time();
// The calling thread has waited for something that ended at `end`, or has spent time in a call.
void host_reaches(uint64_t end);
// Waits, and takes the calling thread's time along.
void host_waits(const Fence &fence);
// Is it done, as far as the calling thread can know: has any host thread's time come to its end? On the virtual clock this
// waits a while for the real work, so that the answer depends on virtual times alone. A thread that asks the same again at
// the same time is polling: its time moves on to the next of the ends that it asked for.
bool host_sees(const Fence &fence);

// Is the calling thread between cudasim_untimed(1) and cudasim_untimed(0)? A tool's own work takes no virtual time, and
// nobody's time changes by it.
bool untimed();

// In a worker thread that calls a function of the application: the virtual time of the call.
class WorkerTime {
  public:
    explicit WorkerTime(uint64_t now);
    ~WorkerTime();
};

}  // namespace cudasim::driver

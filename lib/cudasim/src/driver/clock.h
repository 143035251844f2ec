// The virtual clock (CUDASIM_CLOCK=virtual): the time of each host thread.
//
// Each host thread, queue and event has its own time in virtual nanoseconds. A launch takes
// kLaunchNs; other calls take no time. A call that waits advances the thread's time to the end of what it waited for.
// On the real clock, the functions here do nothing.
#pragma once

#include <cstdint>

#include "driver/queue.h"

namespace cudasim::driver {

constexpr uint64_t kLaunchNs = 1000;         // ns that a launch call takes
constexpr uint64_t kCopyBytesPerNs = 10;     // bytes that a copy moves in 1 ns
constexpr uint64_t kMemsetBytesPerNs = 100;  // bytes that a memset writes in 1 ns
constexpr uint64_t kTimelineStart =
    1000000;  // the start of the timeline; not 0, which could be mistaken for "unknown"

bool virtual_clock();

// Returns the calling thread's time. A new thread begins at the latest time of all host threads.
uint64_t host_time();
// Advances the calling thread's time to `end`, unless it is later already.
void advance_host_time(uint64_t end);
// Waits for a fence and advances the calling thread's time to its end.
void wait_on_host(const Fence &fence);
// Returns whether a fence is done, as cuEventQuery does. On the virtual clock it is done if a host thread's time has
// reached its end. The query waits up to two seconds for the real work, so that the result depends on virtual times alone.
// A thread that queries a fence again at the same time is polling: its time advances to the next end of the fences that
// it queried.
bool host_query(const Fence &fence);

// Returns whether the calling thread is between cudasim_untimed(1) and cudasim_untimed(0). A tool's work there changes
// no virtual time.
bool untimed();

// While it exists: the virtual time that a worker thread's callback into the application reads.
class WorkerTime {
  public:
    explicit WorkerTime(uint64_t now);
    ~WorkerTime();
};

}  // namespace cudasim::driver

// The clocks that programs read: hsaKmtGetClockCounters, timestamps in signals, counters of waves.
//
// The real clock is CLOCK_BOOTTIME in nanoseconds, for host and devices alike. On the virtual clock (HIPSIM_CLOCK=virtual), a
// kernel lasts as long as its longest wave, at one instruction per nanosecond; a copy takes 1 ns for 10 bytes, a fill 1 ns for
// 100. Each queue and each host thread has its own time. Work starts at the latest of: the time at which a host thread submitted
// it, the end of the work before it in its queue, and the end of what it depends on. So no time depends on the host's speed.
//
// runtime.cpp keeps the times of host threads. They take no time, except for launches and waits.
#pragma once

#include <cstdint>

namespace hipsim {

// The time now; with the virtual clock, the latest time of any work that is complete and of any host thread.
uint64_t now();

// Virtual clock: work is complete at `time`.
void advance(uint64_t time);

// The time that a copy or a fill takes on the virtual clock, by its size.
constexpr uint64_t copy_ns(uint64_t bytes) { return (bytes + 9) / 10; }
constexpr uint64_t fill_ns(uint64_t bytes) { return (bytes + 99) / 100; }

// --- host threads; virtual clock only ---

// Returns the calling thread's time. A thread begins at the latest time of the others.
uint64_t host_time();
// Returns the latest time of all host threads.
uint64_t latest_host_time();
// The calling thread has waited until `time`.
void advance_host(uint64_t time);
// All host threads have waited until `time`.
void advance_all_hosts(uint64_t time);
// Returns whether what the calling thread does takes no time, because a tool does it.
bool untimed();
// Returns whether a thread of this process has a time.
bool has_time(int thread);

// While it exists, the calling thread runs a function that the program asked to be called at `time`.
class WorkerTime {
  public:
    explicit WorkerTime(uint64_t time);
    ~WorkerTime();
    WorkerTime(const WorkerTime &) = delete;
    WorkerTime &operator=(const WorkerTime &) = delete;
};

}  // namespace hipsim

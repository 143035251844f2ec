// The clocks that programs read: hsaKmtGetClockCounters, timestamps in signals, counters of waves.
//
// The real clock is CLOCK_BOOTTIME in nanoseconds, for host and devices alike. The virtual clock (HIPSIM_CLOCK=virtual)
// counts what the devices do: a kernel lasts as long as its longest wave, at one instruction per nanosecond; a copy
// takes 1 ns for 10 bytes, a fill 1 ns for 100. Each queue has its own time. When it takes a packet, its time is at least
// the end of all work that was complete then. Host time does not count.
#pragma once

#include <cstdint>

namespace hipsim {

// The time now; with the virtual clock, the end of the last work that is complete.
uint64_t now();

// Virtual clock: work is complete at `time`.
void advance(uint64_t time);

}  // namespace hipsim

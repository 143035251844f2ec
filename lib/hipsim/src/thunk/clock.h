// The clocks that programs read: hsaKmtGetClockCounters, timestamps in signals, counters of waves.
//
// The real clock is CLOCK_BOOTTIME in nanoseconds, for host and devices alike. The virtual clock (HIPSIM_CLOCK=virtual)
// counts what the devices do: a kernel lasts as long as its longest wave, one instruction a nanosecond; a copy takes
// 1 ns for 10 bytes, a fill 1 ns for 100. Each queue has its own time, which never lies before what was complete when
// it took its next packet. Host time does not count.
#pragma once

#include <cstdint>

namespace hipsim {

// The time now; with the virtual clock, the end of the last work that is complete.
uint64_t now();

// Virtual clock: work is complete at `time`.
void advance(uint64_t time);

}  // namespace hipsim

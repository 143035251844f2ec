// Hostile mode (HIPSIM_HOSTILE=1): behaviour that hardware may show, but seldom does. Without it, these functions do
// nothing.
#pragma once

#include <cstdint>

namespace hipsim {

// Returns an unpredictable number below `bound`; 0 without hostile mode.
uint32_t hostile_number(uint32_t bound);

// Sleeps up to `microseconds`.
void hostile_delay(uint32_t microseconds);

// Whether an allocation of device memory fails now. ROCr then frees its cached memory, and tries once more.
bool hostile_failure();

}  // namespace hipsim

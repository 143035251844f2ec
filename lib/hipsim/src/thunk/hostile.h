// Hostile mode (HIPSIM_HOSTILE=1): what hardware may do, but seldom does. Everything here does nothing without it.
#pragma once

#include <cstdint>

namespace hipsim {

// A number that nobody can expect, below `bound`; 0 without hostile mode.
uint32_t hostile_number(uint32_t bound);

// Sleeps up to `microseconds`.
void hostile_delay(uint32_t microseconds);

// Whether an allocation of device memory fails now. ROCr frees what it keeps for later, and asks once more.
bool hostile_failure();

}  // namespace hipsim

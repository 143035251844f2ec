// HSA signals, as the device sees them: amd_signal_t in memory that it can use.
#pragma once

#include <cstdint>

namespace hipsim {

// Returns the value of the signal, or false if the device may not read it.
bool read_signal(uint32_t node, uint64_t handle, int64_t *value);

// Returns the handle of the signal whose value is at this address, or whose timestamp of a copy is. 0: no signal has it there.
uint64_t signal_of_value(uint32_t node, uint64_t address);
uint64_t signal_of_timestamp(uint32_t node, uint64_t address);

// Sets when the signal's work began and ended.
void set_signal_times(uint32_t node, uint64_t handle, uint64_t start, uint64_t end);

// Returns when the signal's work was complete; 0 if it has no timestamps.
uint64_t signal_time(uint32_t node, uint64_t handle);

// Decrements the signal of work that ran from `start` to `end`, and sets its event. A handle of 0 stands for none.
// Returns false if the device may not write the signal.
bool complete_signal(uint32_t node, uint64_t handle, uint64_t start, uint64_t end);

// Stores a value and sets the event: how the device reports errors of a queue.
bool store_signal(uint32_t node, uint64_t handle, int64_t value);

}  // namespace hipsim

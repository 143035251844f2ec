// Events of KFD: what the host waits for, and what interrupts of the device set.
#pragma once

#include <cstdint>

#include <hsakmt.h>

namespace hipsim {

// Sets the event with this number, as the packet processor does when it has decremented a signal.
void set_event(uint32_t id);

// An interrupt of a wave (s_sendmsg) or of SDMA. Carries only the low 8 bits of the event's number; the wave has
// stored the number in the event's mailbox before. As KFD does, sets every event that fits.
void interrupt(uint32_t id);

// Sets the events for memory faults. Returns false if the program has none: ROCr creates none without interrupts.
bool report_memory_fault(uint32_t node, uint64_t address, HsaAccessAttributeFailure failure);

}  // namespace hipsim

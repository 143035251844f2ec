// A child process has no device, as with AMD's library: it shares the memory file with its parent, but has none of the
// threads. Locks may be held by threads that the child does not have, so this is the only question asked there.
#pragma once

#include <hsakmt.h>

namespace hipsim {

// Whether this process was forked from one that had opened the device.
bool forked();
void note_opened();

}  // namespace hipsim

// Calls that free something succeed and do nothing, because it is not the child's. ROCr asserts that they succeed.
#define HIPSIM_NOTHING_IN_CHILD \
    if (hipsim::forked()) return HSAKMT_STATUS_SUCCESS
#define HIPSIM_NOT_IN_CHILD \
    if (hipsim::forked()) return HSAKMT_STATUS_KERNEL_IO_CHANNEL_NOT_OPENED

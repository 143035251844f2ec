#include <atomic>
#include <time.h>

#include <hsakmt.h>

#include "config.h"
#include "thunk/clock.h"
#include "thunk/forked.h"

namespace hipsim {
namespace {

// Not 0: for ROCr, a timestamp of 0 has not been written.
std::atomic<uint64_t> virtual_time{1'000'000'000};

}  // namespace

uint64_t now() {
    if (config().virtual_clock) return virtual_time.load(std::memory_order_acquire);
    timespec time{};
    clock_gettime(CLOCK_BOOTTIME, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
}

void advance(uint64_t time) {
    uint64_t before = virtual_time.load(std::memory_order_relaxed);
    while (before < time && !virtual_time.compare_exchange_weak(before, time, std::memory_order_acq_rel)) {
    }
}

}  // namespace hipsim

using namespace hipsim;

extern "C" {
#pragma GCC visibility push(default)

HSAKMT_STATUS hsaKmtGetClockCounters(HSAuint32 node, HsaClockCounters *counters) {
    HIPSIM_NOT_IN_CHILD;
    if (counters == nullptr) return HSAKMT_STATUS_INVALID_PARAMETER;
    if (node > static_cast<uint32_t>(config().devices)) return HSAKMT_STATUS_INVALID_NODE_UNIT;
    uint64_t time = now();
    counters->GPUClockCounter = time;
    counters->CPUClockCounter = time;
    counters->SystemClockCounter = time;
    counters->SystemClockFrequencyHz = 1'000'000'000;
    return HSAKMT_STATUS_SUCCESS;
}

// For tools: the time of the virtual clock; UINT64_MAX with the real clock.
uint64_t hipsim_virtual_now() { return config().virtual_clock ? now() : UINT64_MAX; }

#pragma GCC visibility pop
}

#include <atomic>
#include <time.h>

#include "config.h"
#include "thunk/hostile.h"

namespace hipsim {
namespace {

std::atomic<uint64_t> state{0};

// The finalizer of SplitMix64 over a counter: any thread may take a number.
uint64_t next() {
    uint64_t z = state.fetch_add(0x9e3779b97f4a7c15, std::memory_order_relaxed) + config().seed;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

}  // namespace

uint32_t hostile_number(uint32_t bound) {
    return config().hostile && bound > 0 ? static_cast<uint32_t>(next() % bound) : 0;
}

void hostile_delay(uint32_t microseconds) {
    uint32_t chosen = hostile_number(microseconds + 1);
    if (chosen == 0) return;
    timespec time{0, static_cast<long>(chosen) * 1000};
    nanosleep(&time, nullptr);
}

bool hostile_failure() {
    // Never twice in a row: the caller's second attempt must be able to succeed.
    static std::atomic<bool> failed{false};
    if (!config().hostile || hostile_number(16) != 0) {
        failed = false;
        return false;
    }
    return !failed.exchange(true);
}

}  // namespace hipsim

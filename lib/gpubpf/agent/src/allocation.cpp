#include "allocation.h"

#include <atomic>

namespace gpubpf {

namespace {

std::atomic<uint64_t> epoch{0};

}  // namespace

uint64_t allocation_epoch() { return epoch.load(std::memory_order_relaxed); }

}  // namespace gpubpf

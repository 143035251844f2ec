// Which allocation an address means, and until when (docs/memory.md, "Allocations and epochs").
#pragma once

#include <cstdint>

namespace gpubpf {

// How often addresses had come to mean another allocation.
uint64_t allocation_epoch();

}  // namespace gpubpf

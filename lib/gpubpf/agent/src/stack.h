// The host stack that launches: which way the program came to the driver.
#pragma once

#include <cstdint>

namespace gpubpf {

void new_stacks();  // at the agent's start, see new_operations()

// The number of the calling thread's stack, the agent's own frames left out; told to the tool when it is new. 0: not known, or there
// are too many. Never throws.
uint32_t host_stack() noexcept;

}  // namespace gpubpf

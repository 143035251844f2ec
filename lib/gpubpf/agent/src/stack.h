// The host stack that launches: which way the program came to the driver.
#pragma once

#include <cstdint>
#include <string>

#include "lifetime.h"

namespace gpubpf {

extern const Lifetime stack_lifetime;

// The number of the calling thread's stack, the agent's own frames left out; told to the tool when it is new. 0: not known, or there
// are too many. Never throws.
uint32_t host_stack() noexcept;

// A name that is too long for a record, told as a stack of one frame whose symbol it is. 0: there are too many.
uint32_t told_name(const std::string &name);

// Whether an address is in the driver or in the agent; after stack_lifetime began.
bool is_internal(uintptr_t code) noexcept;
// Whether no frame on the calling thread's stack has its return address at `slot`, though the stack goes on behind that. False also where it cannot
// be told.
bool stack_lacks(uintptr_t slot) noexcept;

}  // namespace gpubpf

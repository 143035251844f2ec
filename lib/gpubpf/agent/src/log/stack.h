// The host stack of a launch: how the program reached the driver.
#pragma once

#include <cstdint>
#include <string>

#include "lifetime.h"

namespace gpubpf {

extern const Lifetime stack_lifetime;

// Returns the number of the calling thread's stack, without the agent's own frames. Sends new stacks to the
// tool. Returns 0 if the stack is unknown, or there are too many. Never throws.
uint32_t host_stack() noexcept;

// Returns the symbol of the driver function that the program has called, if the calling thread is in one; null if unknown.
const char *called_function() noexcept;

// Returns a number for a name that is too long for a record. The tool gets it as a stack of one frame with
// that symbol. Returns 0 if there are too many.
uint32_t told_name(const std::string &name);

// Whether an address is in the driver or the agent. Call it only after stack_lifetime has begun.
bool is_internal(uintptr_t code) noexcept;
// Whether the calling thread's stack has no frame with its return address at `slot`, although it extends
// beyond that. Also false if that cannot be determined.
bool stack_lacks(uintptr_t slot) noexcept;

}  // namespace gpubpf

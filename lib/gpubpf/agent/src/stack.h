// The host stack that launches: which way the program came to the driver.
#pragma once

#include <cstdint>
#include <string>

namespace gpubpf {

void new_stacks();  // at the agent's start, see new_operations()

// The number of the calling thread's stack, the agent's own frames left out; told to the tool when it is new. 0: not known, or there
// are too many. Never throws.
uint32_t host_stack() noexcept;

// A name that is too long for a record, told as a stack of one frame whose symbol it is. 0: there are too many.
uint32_t told_name(const std::string &name);

}  // namespace gpubpf

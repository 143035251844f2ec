// The driver's information about a kernel of the program: parameters and attributes, which its copy must also have.
#pragma once

#include <cstdint>
#include <cuda.h>
#include <utility>
#include <vector>

#include "messages.h"

namespace gpubpf {

using Parameter = std::pair<uint32_t, uint32_t>;  // offset and size

// Gets the kernel's parameters. Returns false if the driver does not report them.
bool parameters_of(CUfunction f, std::vector<Parameter> &parameters);
// Compares a preexisting kernel with the one that the tool matched it to. Returns null, or the reason why they
// differ. The context must be current.
const char *mismatch(CUfunction original, const Layout &layout);
// Gives the copy the attributes that the program has set on the original. Returns false if that fails.
bool mirror_attributes(CUfunction original, CUfunction copy);

}  // namespace gpubpf

// Modules that cuLink makes from PTX. Their PTX inputs can be instrumented.
#pragma once

#include <cstdint>
#include <cuda.h>

#include "lifetime.h"

namespace gpubpf {

extern const Lifetime link_lifetime;

void link_began(CUlinkState link);
void link_given(CUlinkState link, CUjitInputType type, const void *data, size_t bytes);
void link_given_file(CUlinkState link, CUjitInputType type, const char *path);
void link_made(CUlinkState link, const void *image);
void link_ended(CUlinkState link);

// Returns the number of inputs that the image was linked from, wherever the program has moved it; 0: it was
// not linked. Sets `ptx` to a memory file of `size` bytes with the PTX inputs, separated by zero bytes, or to
// -1.
uint32_t linked_of(const void *image, uint64_t bytes, int &ptx, uint64_t &size);

}  // namespace gpubpf

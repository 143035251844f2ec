// Modules that cuLink makes of PTX: what it was made of is what can be instrumented.
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

// Of how many inputs the image was linked, wherever the program has it by now; 0: it was not. `ptx`: a copy of the PTX among them, a zero
// between two, in a memory file of `size` bytes, or -1.
uint32_t linked_of(const void *image, uint64_t bytes, int &ptx, uint64_t &size);

}  // namespace gpubpf

// Images of modules: where they begin and end, as files for the tool, and what cubins were made from.
#pragma once

#include <cstdint>

#include "compiled.h"
#include "lifetime.h"
#include "state.h"

namespace gpubpf {

extern const Lifetime image_lifetime;

// Returns the image behind a wrapper, and its size. Supports fatbins, ELF and PTX; returns null for anything else.
const void *image_at(const void *image, uint64_t &size);
// Copies an image to a memory file, and the PTX that it was made from behind it, if that is known.
ImageFile image_of(const void *image);
ImageFile image_of_file(const char *path);

// Remembers what a cubin was made from.
void remember_inputs(const void *cubin, uint64_t bytes, Inputs of);
// Returns whether the inputs of a cubin are known, wherever the program has moved it.
bool inputs_of(const void *cubin, uint64_t bytes, Inputs &of);

}  // namespace gpubpf

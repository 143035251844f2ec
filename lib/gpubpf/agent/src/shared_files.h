// The tool's files with shared arrays: memory for the tool, for host programs, and for the GPU.
#pragma once

#include <cstdint>

#include "lifetime.h"
#include "wire.h"

namespace gpubpf {

// Maps the tool's file of map `map`, before the Welcome. Returns false if memory is short, or if the file has
// another size.
bool take_shared(Reader &reader, int file);
void *shared_array(uint32_t map);  // returns its address; null if the map has no file
// Maps the file again, for a GPU: the same address cannot be registered twice, and a registration ends with its context.
// Returns null if there is no such file, or if the program closed it.
void *map_shared_file(uint32_t map, uint64_t &bytes);
extern const Lifetime shared_lifetime;

}  // namespace gpubpf

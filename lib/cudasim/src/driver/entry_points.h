// The table behind cuGetProcAddress. It does not include cuda.h: entry_points.cpp declares the functions differently.
#pragma once

#include <cstddef>

namespace cudasim::driver {

struct EntryPoint {
    const char *name;
    int version;  // the CUDA version that introduced this variant
    void *legacy;
    void *per_thread;  // the variant for a default stream per thread
};

extern const EntryPoint entry_points[];
extern const size_t entry_point_count;

}  // namespace cudasim::driver

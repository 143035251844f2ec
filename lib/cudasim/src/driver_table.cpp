// Every entry point of the driver with the version in which it got its present meaning. Declared without parameters,
// since only addresses are taken: this file must not include cuda.h.
#include <cstddef>

#define CUDASIM_DECLARE
#include "entries.inc"
#undef CUDASIM_DECLARE

namespace cudasim::driver {

struct EntryPoint {
    const char *name;
    int version;
    void *legacy;
    void *per_thread;
};

extern const EntryPoint entry_points[] = {
#define X(name, version, symbol, per_thread) \
    {name, version, reinterpret_cast<void *>(&symbol), reinterpret_cast<void *>(&per_thread)},
#include "entries.inc"
#undef X
};

extern const size_t entry_point_count = sizeof entry_points / sizeof entry_points[0];

}  // namespace cudasim::driver

// Every entry point of the driver, with the CUDA version that introduced it. The functions are declared without
// parameters, because only their addresses are needed: so this file must not include cuda.h.
#include "driver/entry_points.h"

#define CUDASIM_DECLARE
#include "entries.inc"
#undef CUDASIM_DECLARE

namespace cudasim::driver {

const EntryPoint entry_points[] = {
#define X(name, version, symbol, per_thread) \
    {name, version, reinterpret_cast<void *>(&symbol), reinterpret_cast<void *>(&per_thread)},
#include "entries.inc"
#undef X
};

const size_t entry_point_count = sizeof entry_points / sizeof entry_points[0];

}  // namespace cudasim::driver

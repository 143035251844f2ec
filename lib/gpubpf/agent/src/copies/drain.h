// Reads map memory back, in bulk, into a file for the tool.
#pragma once

#include <cstdint>

#include "state.h"

namespace gpubpf {

extern const Lifetime drain_lifetime;

// Reads every context. `rings`: read only the rings in GPU memory.
bool drain(uint32_t sequence, uint32_t wait_ms, bool rings);
void read_maps();  // in every context, without a request from the tool
// The same, once earlier launches have ended. Returns false if that takes longer than a few milliseconds.
bool read_complete_maps();
// After the program waited for work in the context: keeps values of the latest launches (Config::kept) and logs
// the times of timing events. Neither can be read once a kernel has failed. Returns the id of the first of these
// launches; 0: nothing was kept.
uint64_t keep_latest(Context &context);
void calibrate_all();                  // for every context's GPU
void close_context(Context *context);  // the final drain, before the context is destroyed
void drain_context(Context *context);  // a drain before the context may be destroyed
void drop_context(Context *context);   // the context no longer exists: the agent stops using it
void enlarge_pools();                  // enlarges pools that are too small, as soon as that blocks no thread
void enlarge_pool(Context &context);

}  // namespace gpubpf

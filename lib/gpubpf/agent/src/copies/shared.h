// Memory that the GPU shares with the host: arrays in files of the tool, and the records of rings.
#pragma once

#include <cstdint>

#include "driver/driver.h"
#include "wire.h"

namespace gpubpf {

struct Context;

constexpr uint64_t kKeptLaunches = 1024;       // the latest launches, whose values `keep_latest` keeps
constexpr uint64_t kStagedLaunches = 1 << 14;  // launches whose words are copied at once

// Prepares the context's shared arrays and rings, and fills in its `storage`. `control` is the GPU memory for
// the rings' control blocks. Call it with `busy` held and the context current. Returns false if
// memory is short or the driver refuses.
bool prepare_shared(Context &context, CUdeviceptr control);
uint64_t ring_control_bytes(const Context &context);  // of all rings, in the pool
uint64_t first_record(uint32_t shards);               // its offset in the data of a ring
// The tool consumed records of a ring in GPU memory.
void take_consumed(Reader &reader);
// The context ends, and nothing runs in it any longer.
void release_shared(Context &context);

}  // namespace gpubpf

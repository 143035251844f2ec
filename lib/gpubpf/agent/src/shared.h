// Memory that the tool reads and writes while the program runs: arrays that GPU and host share, and the records of rings.
#pragma once

#include <cstdint>

#include "driver.h"
#include "lifetime.h"
#include "wire.h"

namespace gpubpf {

struct Context;

// The tool's file of map `map`, mapped; before the Welcome. False: no memory, or not a file of that size.
bool take_shared(Reader &reader, int file);
void *shared_array(uint32_t map);  // where it is mapped; null: there is none
extern const Lifetime shared_lifetime;

// The context's shared arrays and rings: fills in its storage. `control` gives each ring's control block in GPU memory. With `busy` held
// and the context current. False: no memory, or the driver does not take it.
bool prepare_shared(Context &context, CUdeviceptr control);
uint64_t ring_control_bytes(const Context &context);  // of all rings, in the pool
// The tool took records out of a ring in GPU memory.
void take_consumed(Reader &reader);
// The context goes away, and nothing runs in it any more.
void release_shared(Context &context);

}  // namespace gpubpf

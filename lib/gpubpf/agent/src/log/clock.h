// The host's clock, and its relation to the clock of each GPU (docs/timing.md, "Clocks").
#pragma once

#include <cstdint>
#include <memory>

#include "driver/driver.h"
#include "this_agent.h"

namespace gpubpf {

struct Context;

// Looks for the embedded device's virtual clock in the loaded driver. Call it once, before any use of the
// time.
void find_clock(void *library);
uint64_t last_ns();  // the latest time of any thread, on the virtual clock

// A timing event whose time on the GPU's clock (globaltimer, ns) is known. cuEventElapsedTime gives the times
// of the context's other events relative to it. Several exist at a time, so hold the pointer while you use
// the event. Null before the first bracket, and on the virtual clock.
struct Reference {
    CUevent event;
    uint64_t gpu_ns;
    uint32_t error_ns;
};
std::shared_ptr<const Reference> reference_of(Context &context);

// Measures the GPU's clock between two readings of the host's clock, and puts these brackets into the
// operation log. Call it with context.busy held and the context current. It waits for a few milliseconds at
// most. It does nothing if the GPU has no room, during captures, without a log, and on the virtual clock.
void calibrate(Context &context);

struct Leftovers;
// Collects the driver objects of the clock, on detach.
void gather_clock(Context &context, Leftovers &to);

}  // namespace gpubpf

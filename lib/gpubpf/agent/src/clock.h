// The host's clock, and how it relates to the clock of each GPU (docs/timing.md, "Clocks").
#pragma once

#include <cstdint>
#include <memory>

#include "driver.h"

namespace gpubpf {

struct Context;

// Looks for the embedded device's virtual clock in the loaded driver. Once, before anything asks for the time.
void find_clock(void *library);
bool virtual_clock();

// CLOCK_MONOTONIC in ns; on the virtual clock the time of the calling thread. Any thread, no locks.
uint64_t now_ns();
uint64_t last_ns();  // on the virtual clock the largest time of any thread

// A timing event whose time on the GPU's clock (globaltimer, ns) is known. Times of other events of the context follow by
// cuEventElapsedTime. Several live at a time: hold the pointer for as long as the event is used. Null before the first bracket, and on
// the virtual clock.
struct Reference {
    CUevent event;
    uint64_t gpu_ns;
    uint32_t error_ns;
};
std::shared_ptr<const Reference> reference_of(Context &context);

// Brackets of the GPU's clock, as records of the operation log. With context.busy held and the context current; waits for milliseconds
// at most, and does nothing for a GPU that has no room, in captures, without a log, and on the virtual clock.
void calibrate(Context &context);

struct Remains;
void gather_clock(Context &context, Remains &to);  // what it has in the driver, at the end of the attachment

}  // namespace gpubpf

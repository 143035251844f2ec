// When the GPU did what no probe times: timing events before and after an operation, in its stream (docs/timing.md, record kind 16).
#pragma once

#include <cstdint>

#include "log.h"
#include "state.h"

namespace gpubpf {

class Stamp;

extern const Lifetime stamp_lifetime;  // its stop() joins the thread that polls, which may still log
void gather_stamps(
    const Context &context,
    std::vector<CUevent> &events);  // all of the context's, with context.busy held: none is used any more

// Before the driver's call: records the first event. Null: there is none, and nothing happened. The stream is not being captured.
Stamp *begin_stamp(Context &context, CUstream stream) noexcept;
// After it: records the second, unless the operation failed. The span is logged once both have happened.
void end_stamp(Stamp *stamp, CUstream stream, const Record &operation, CUresult result) noexcept;

// Logs what is over; waits for the rest for so long. With context.busy held.
void collect_stamps(Context &context, uint32_t wait_ms);

}  // namespace gpubpf

// Times of operations that no probe measures: timing events before and after an operation, in its stream
// (docs/timing.md, record kind 16).
#pragma once

#include <cstdint>

#include "log/log.h"
#include "state.h"

namespace gpubpf {

class Stamp;

extern const Lifetime stamp_lifetime;  // stop() joins the polling thread, which may still log
// Collects all of the context's events, with context.busy held. None of them is used afterwards.
void gather_stamps(const Context &context, std::vector<CUevent> &events);

// Call this before the driver's call: records the first event. Returns null if that failed, without any
// effect. The stream must not be in a capture.
Stamp *begin_stamp(Context &context, CUstream stream) noexcept;
// Call this after it: records the second event, unless the operation failed. The span is logged when both
// events have completed.
void end_stamp(Stamp *stamp, CUstream stream, const Record &operation, CUresult result) noexcept;

// Logs finished spans. Waits up to wait_ms for the others. Call it with context.busy held.
void collect_stamps(Context &context, uint32_t wait_ms);

}  // namespace gpubpf

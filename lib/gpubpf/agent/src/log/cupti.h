// Times of operations that no probe measures, from CUPTI's activity records. This is an alternative to timing
// events (stamp.h), at the user's request. CUPTI's library is NVIDIA's; cupti.cpp declares the parts of its
// interface that are used here.
#pragma once

#include <cstdint>
#include <string>

#include "log/log.h"

namespace gpubpf {

// Loads the first usable library in a colon-separated list, and makes it record kernels, copies and memsets.
// Returns "" on success, else the reason. Call it inside cuInit.
std::string start_cupti(const std::string &libraries);
bool cupti_records();
void end_cupti_records();  // at the end of an attachment

// For use around the driver call of an operation, in its thread. A span is logged when CUPTI has reported its
// times.
void begin_cupti(const Record &operation) noexcept;
void end_cupti() noexcept;

void collect_cupti() noexcept;  // logs finished operations

}  // namespace gpubpf

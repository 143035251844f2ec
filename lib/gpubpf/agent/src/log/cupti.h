// Times of operations that no probe measures, from CUPTI's activity records. They replace timing events
// (stamp.h) where the user wants it, or where nobody else can use CUPTI (other_profilers.h). CUPTI's library is
// NVIDIA's; cupti.cpp declares the parts of its interface that are used here.
#pragma once

#include <cstdint>
#include <string>

#include "log/log.h"

namespace gpubpf {

// Loads the first usable library in a colon-separated list. CUPTI records kernels, copies and memsets from the
// first one on that begin_cupti() is called for. Returns "" on success, else the reason. Call it inside cuInit.
// With `yields`, recording ends for good when the program loads a library, which could use CUPTI itself.
std::string start_cupti(const std::string &libraries, bool yields);
void end_cupti_records();  // at the end of an attachment

// For use around the driver call of an operation, in its thread. A span is logged when CUPTI has reported its
// times. The first function returns whether CUPTI records the operation; the second is called only then.
bool begin_cupti(const Record &operation) noexcept;
void end_cupti() noexcept;

void collect_cupti() noexcept;  // logs finished operations

// Replacements of dlopen() and dlmopen(), in use with `yields`. Both pass the caller's return address on to the
// original, which looks for libraries where the caller's own file says.
void hook_dlopen();
void hook_dlmopen();

}  // namespace gpubpf

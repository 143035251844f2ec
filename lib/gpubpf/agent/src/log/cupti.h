// Times of operations that no probe measures, from CUPTI's activity records. They replace timing events
// (stamp.h) if the user requests it, or if nothing else can use CUPTI (other_profilers.h). CUPTI's library is
// NVIDIA's; cupti.cpp declares the parts of its interface that are used here.
#pragma once

#include <cstdint>
#include <string>

#include "log/log.h"

namespace gpubpf {

// Loads the first library in a colon-separated list that works, and begins to record. Returns "" on success,
// otherwise the reason. Call it inside cuInit: nothing runs on a GPU then, so CUPTI waits for nothing.
// With `yields`, recording ends for good when the program loads a library, which could use CUPTI itself. The
// agent then has its own copy of CUPTI. It records kernels from the first one without a probe, because that
// slows all of them.
std::string start_cupti(const std::string &libraries, bool yields);
void record_kernels();     // for the worker thread: begins if nothing runs; otherwise it is requested again
void end_cupti_records();  // on detach

enum class Recorded { No, Perhaps, Yes };  // Perhaps: CUPTI has not reported an operation of this kind yet

// For use around the driver call of an operation, in its thread. A span is logged when CUPTI has reported its
// times. The first function returns whether CUPTI records the operation; if it may, call the second.
Recorded begin_cupti(const Record &operation) noexcept;
void end_cupti(const Record &operation, bool failed) noexcept;

void collect_cupti() noexcept;  // logs finished operations

// Replacements of dlopen() and dlmopen(), in use with `yields`. Both pass the caller's return address on to the
// original, which looks for libraries in the directories that the caller's own file names.
void hook_dlopen();
void hook_dlmopen();

}  // namespace gpubpf

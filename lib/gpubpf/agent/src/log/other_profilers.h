// Whether a program could use CUPTI itself. CUPTI has one set of buffers and one clock per process, so without a
// request, the agent uses CUPTI only if nothing else can.
#pragma once

#include <string>

namespace gpubpf {

// Returns whether no profiler is in the process or announced by its environment, no loaded code mentions CUPTI,
// and the program has not loaded a library itself (dlopen), as interpreters do. Call it inside cuInit.
bool cupti_is_free();

// Returns the variable or the library of a profiler that uses the GPU, other than through CUPTI calls of the program: for example
// compute-sanitizer or Nsight. "": there is no such profiler.
std::string other_profiler();

// Returns whether this address is in code of the driver or the agent, or in the library that contains `cupti`.
bool is_drivers(const void *address, const void *cupti);

}  // namespace gpubpf

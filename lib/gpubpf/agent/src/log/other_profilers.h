// Whether a program could use CUPTI itself. CUPTI has one set of buffers and one clock per process, so the agent
// uses CUPTI without a request only where nobody else can.
#pragma once

namespace gpubpf {

// Returns whether no profiler is in the process or announced by its environment, no code that is loaded mentions
// CUPTI, and the program has loaded no library itself (dlopen), as interpreters do. Call it inside cuInit.
bool cupti_is_free();

// Returns whether this address is in code of the driver or the agent, or in the library that has `cupti` in it.
bool is_drivers(const void *address, const void *cupti);

}  // namespace gpubpf

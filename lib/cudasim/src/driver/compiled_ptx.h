// The PTX of cubins that compilers in this process made: NVRTC and nvJitLink. The device runs that PTX.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace cudasim {

// Finds the compilers in the process, now and later, and hooks them.
void watch_compilers();
void compilers_in_forked_child();
// Returns the PTX texts that a cubin was made from; none if they are unknown.
std::vector<std::string> compiled_ptx(const void *cubin, size_t size);

}  // namespace cudasim

// Patches: programs that NVIDIA's Compute Sanitizer API calls in kernels without PTX (docs/machine-code.md).
//
// The program's own kernels are launched. A patch finds its launch block in GPU memory, in a table that
// lower/patch_function.py describes. The agent fills the table before a launch, in its own hooks and not in callbacks of the API, where
// calls of the driver are not allowed.
#pragma once

#include <string>

#include "state.h"

namespace gpubpf {

// Loads the first usable library of `libraries`, which are separated by colons, and subscribes. Returns why it cannot, or "".
std::string start_sanitizer(const std::string &libraries);
// Whether kernels may have patches, which count until they are unpatched.
bool has_patches();
// Unpatches every module that exists, instruments no further launches, and unsubscribes. If the kernels of a context do not end soon, its
// modules stay patched. Patches::modules keeps them, because the memory that the patches use must stay.
void stop_sanitizer();

// The driver has unloaded the module: another module's code may replace its code.
void forget_patches(Module *module);

}  // namespace gpubpf

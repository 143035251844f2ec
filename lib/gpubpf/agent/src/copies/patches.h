// Patches: programs that NVIDIA's Compute Sanitizer API calls in kernels without PTX (docs/machine-code.md).
//
// The program's own kernels are launched. A patch finds its launch block in GPU memory, in a table that
// lower/patch_function.py describes. The agent fills the table before a launch, in its own hooks: the API allows no
// calls of the driver in callbacks, so the agent has none.
#pragma once

#include <string>

#include "state.h"

namespace gpubpf {

// Loads the first usable library of `libraries`, which are separated by colons, and subscribes. Returns why it cannot, or "".
std::string start_sanitizer(const std::string &libraries);
// Whether kernels may have patches, which count until they are unpatched.
bool has_patches();
// Unpatches every module that exists, instruments no more launches from that moment on, and unsubscribes. A module of a context whose kernels do not end soon stays patched, and
// Patches::modules keeps it: the memory that its patches use must stay.
void stop_sanitizer();

// The driver has unloaded the module: its code may be replaced by that of another.
void forget_patches(Module *module);

}  // namespace gpubpf

// Which functions of the driver are hooked. patch.cpp redirects each target to its replacement.
#pragma once

#include <cstddef>

#include "hook_table.h"

namespace gpubpf {

size_t hook_count();  // how many to install, from the start of the table

// Fills in the targets from the loaded libcuda (a handle of dlopen). The tool has not sent its configuration
// yet.
void find_hook_targets(void *library);
// Leaves out the hooks for operations, unless the tool wants a log or a program at operations. Leaves out the
// hooks of functions that load libraries, unless CUPTI yields to the program.
void choose_hooks(bool operations, bool loads);
bool is_in(HookIndex hook);  // whether the function was hooked

}  // namespace gpubpf

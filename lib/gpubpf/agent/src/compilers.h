// Compilers in the process: NVRTC and nvJitLink. Both make cubins from PTX that the program does not keep, so hooks take the PTX when the
// program gets the cubin.
//
// Libraries may appear at any time, in several versions. A hook of the function that the dynamic linker calls after each change
// (r_debug.r_brk, meant for debuggers) finds those that are opened later, before their code can run.
#pragma once

#include <cstddef>

#include "compiled.h"
#include "patch.h"

namespace gpubpf {

// Who wants to know what is compiled: the agent or the embedded device. Any thread may call these functions.
struct CompilerUser {
    bool (*wants)();
    void (*made)(const void *cubin, size_t bytes, const Inputs &of);
    bool (*known)(const void *cubin, size_t bytes,
                  Inputs &of);  // whether the cubin was made from known inputs
};

// Fills in the hooks of the libraries that are loaded now, and of the dynamic linker. The caller installs them (patch.h). Once they are
// installed, libraries that appear later are hooked at once.
void find_compilers(const CompilerUser &user, const char *lack);
Hook *compiler_hooks();
size_t compiler_hook_count();
void compilers_in_forked_child();

}  // namespace gpubpf

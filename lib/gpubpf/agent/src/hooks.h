// The table of hooked functions. patch.cpp redirects each target to its replacement.
//
// hooks_module.def, hooks.def, hooks_graph.def: the agent needs them, except for obsolete and libc's functions
// hooks_held.def: may put work into a stream that does not end by itself; hooked so that it can be held back
// hooks_log.def: hooked only if the tool wants an operation log or a program at operations
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpubpf {

struct Hook {
    const char *name;
    void *replacement;
    void *original;         // calls the unhooked function; set before the hook is active
    void *target;           // null: the library lacks the function
    bool optional = false;  // without it the agent sees less, but still works
};

enum HookIndex : size_t {
#define GPUBPF_HOOK(symbol) kHook_##symbol,
#include "hooks_module.def"
#include "hooks.def"
#include "hooks_graph.def"
    kNeeded,
    kBeforeHeld = kNeeded - 1,
#include "hooks_held.def"
    kAlways,
    kBeforeLog = kAlways - 1,
#include "hooks_log.def"
#undef GPUBPF_HOOK
    kHooks
};

extern Hook hooks[2 * kHooks];  // the second half: other addresses of the same functions
size_t hook_count();            // the first ones in the table, which are to be put in place

// Fills in the targets from the loaded libcuda (a handle of dlopen). The tool has not sent its configuration
// yet.
void find_hook_targets(void *library);
// Leaves out the hooks for operations, unless the tool wants a log or a program at operations.
void choose_hooks(bool operations);

// Each function fills in the replacements of one table.
void module_hooks();
void graph_hooks();
void log_hooks();

}  // namespace gpubpf

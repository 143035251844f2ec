// The table of hooked functions (hooks_all.def). patch.cpp redirects each target to its replacement.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpubpf {

struct Hook {
    const char *name;
    void *replacement;
    void *original;              // calls the unhooked function; set before the hook is active
    void *target;                // null: the library lacks the function
    const char *lack = nullptr;  // what the agent lacks without the hook (kLacks...); null: it cannot work
};

enum HookIndex : size_t {
#define GPUBPF_HOOK(symbol) kHook_##symbol,
#define GPUBPF_HOOKS_SO_FAR(name) name, kLastBefore_##name = name - 1,
#include "hooks_all.def"
    kHooks
};

extern Hook hooks[2 * kHooks];  // the second half: other addresses of the same functions
size_t hook_count();            // how many to install, from the start of the table

// Fills in the targets from the loaded libcuda (a handle of dlopen). The tool has not sent its configuration
// yet.
void find_hook_targets(void *library);
// Leaves out the hooks for operations, unless the tool wants a log or a program at operations. Leaves out the
// hooks of functions that load libraries, unless CUPTI yields to the program.
void choose_hooks(bool operations, bool loads);
bool is_in(HookIndex hook);  // whether the function was hooked

// Each function fills in the replacements of one table.
void module_hooks();
void graph_hooks();
void log_hooks();

}  // namespace gpubpf

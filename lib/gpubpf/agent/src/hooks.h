// The table of hooked functions; patch.cpp puts each replacement onto its target. Those of hooks_log.def are hooked only where an
// operation log or a program at operations is wanted.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpubpf {

struct Hook {
    const char *name;
    void *replacement;
    void *original;         // calls the unhooked function; written before the hook goes live
    void *target;           // null: the library lacks it, nothing to hook
    bool optional = false;  // without it less is seen, and no more than that
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
size_t hook_count();            // of those to be put in place, the first ones

// Fills in targets from the loaded libcuda (handle of dlopen); before the tool has said what it wants.
void find_hook_targets(void *library);
// Once it has: where neither a log nor a program at operations is wanted, their hooks are left out.
void choose_hooks(bool operations);

// Each fills in the replacements of one table.
void module_hooks();
void graph_hooks();
void log_hooks();

}  // namespace gpubpf

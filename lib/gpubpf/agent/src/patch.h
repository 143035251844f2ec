// Inline hooks: write a jump over the first instructions of a function, and move these instructions elsewhere, where they can
// still be called.
//
// Inside the first cuInit, no other thread is in a hooked function, so the agent writes the jumps at once. In a running process,
// the tool stops all threads and writes the jumps (patching.py) from the agent's list. The agent itself removes the jumps,
// because a single store removes each. The moved instructions stay, and the next attachment reuses them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "definitions.h"
#include "lifetime.h"

namespace gpubpf {

struct Hook {
    const char *name;
    void *replacement;
    void *original;              // calls the unhooked function; set before the hook is active
    void *target;                // null: the library lacks the function
    const char *lack = nullptr;  // what the agent lacks without the hook (kLacks...); null: it cannot work
};

// Hook `count` functions. Each hook's `original` is set before its jump is written. Return a line "name: reason" for each
// function that cannot be hooked. Lines for optional hooks go to `left_out`, as "lack: name: reason".
std::string install(Hook *hooks, size_t count, std::string &left_out);
// Do the same while threads are running: prepare everything except the jumps, and append those to `patches`.
std::string prepare(Hook *hooks, size_t count, std::string &left_out, std::vector<Patch> &patches);
// On detach: direct calls to the driver's own code again, except for functions named by `keep`. Those still call their
// replacements. Each function takes one store, because threads may be anywhere.
void take_out(bool (*keep)(const char *name));
// Do the same at a later time. Hooks that another attachment already uses stay.
void take_out_rest(bool (*keep)(const char *name));
// Wait until every thread sees earlier stores, including those to code.
void barrier_in_all_threads();
extern const Lifetime patch_lifetime;
// Return a file descriptor of a sealed file with the patches, or -1.
int patch_file(const std::vector<Patch> &patches);

}  // namespace gpubpf

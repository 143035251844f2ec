// Inline hooks: write a jump over the first instructions of a function, and move these instructions elsewhere, where they can
// still be called.
//
// Inside the first cuInit no other thread is in a hooked function, so the agent writes the jumps at once. Where threads run,
// the tool stops them all and writes the jumps (patching.py) from a list that the agent makes. The agent removes the jumps
// itself, since one store removes each. The moved instructions stay, and the next attachment uses them again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "definitions.h"
#include "lifetime.h"

namespace gpubpf {

struct Hook;

// Hook `count` functions; each hook's `original` is set before its jump is written. Return one line, "name: reason", for each
// function that cannot be hooked; those of optional hooks go to `left_out`, as
// "lack: name: reason".
std::string install(Hook *hooks, size_t count, std::string &left_out);
// Do the same while threads run: prepare everything but the jumps, and append these to `patches`.
std::string prepare(Hook *hooks, size_t count, std::string &left_out, std::vector<Patch> &patches);
// On detach: send calls to the driver's own code again, except for functions that `keep` names. They still call their
// replacements. Each function takes one store, since threads may be anywhere.
void take_out(bool (*keep)(const char *name));
// The same at a later time: hooks that another attachment uses by now stay.
void take_out_rest(bool (*keep)(const char *name));
// Wait until every thread sees earlier stores, including those to code.
void barrier_in_all_threads();
extern const Lifetime patch_lifetime;
// Return a file descriptor of a sealed file with the patches, or -1.
int patch_file(const std::vector<Patch> &patches);

}  // namespace gpubpf

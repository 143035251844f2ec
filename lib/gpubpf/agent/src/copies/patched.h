// The functions of patches that launches and sidecars need. patches.cpp, on a higher floor, defines them.
#pragma once

#include <memory>

#include "messages.h"
#include "state.h"

namespace gpubpf {

struct Choice;

// Patches a module in the context, and makes the copies of its kernels that stand for the patched kernels. Asks the tool
// for the patches if the context has none yet.
void install_patches(Module *module, Context *context, const std::shared_ptr<const Answer> &answer);
// Puts the launch block of a patched kernel's shape into GPU memory. Returns false if there is no room or no time for it.
bool publish(const Choice &choice);
}  // namespace gpubpf

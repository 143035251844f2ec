// The table of hooked functions; patch.cpp puts each replacement onto its target.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpubpf {

struct Hook {
  const char *name;
  void *replacement;
  void *original;  // calls the unhooked function; written before the hook goes live
  void *target;    // null: the library lacks it, nothing to hook
};

enum HookIndex : size_t {
#define GPUBPF_HOOK(symbol) kHook_##symbol,
#include "hooks.def"
#undef GPUBPF_HOOK
  kHooks
};

extern Hook hooks[2 * kHooks];  // the second half: other addresses of the same functions
size_t hook_count();

// Fills in targets from the loaded libcuda (handle of dlopen).
void find_hook_targets(void *library);

}  // namespace gpubpf

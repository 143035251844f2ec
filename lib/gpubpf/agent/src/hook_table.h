// The table of hooked functions (hooks_all.def), and the functions of the unhooked driver in it. hooks.cpp fills it in.
#pragma once

#include <cstddef>

#include "patch.h"

namespace gpubpf {

enum HookIndex : size_t {
#define GPUBPF_HOOK(symbol) kHook_##symbol,
#define GPUBPF_HOOKS_SO_FAR(name) name, kLastBefore_##name = name - 1,
#include "hooks_all.def"
    kHooks
};

extern Hook hooks[2 * kHooks];  // the second half: other addresses of the same functions

}  // namespace gpubpf

// libc functions that end the process without running exit handlers. The agent sends the measurements first.
#include <dlfcn.h>

#include "agent.h"

namespace gpubpf {

namespace {

template <size_t kIndex>
void replacement(int status);

Hook end_hooks[] = {
    {"_exit", reinterpret_cast<void *>(&replacement<0>), nullptr, nullptr, kLacksExit},
    {"_Exit", reinterpret_cast<void *>(&replacement<1>), nullptr, nullptr, kLacksExit},
};

template <size_t kIndex>
void replacement(int status) {
    agent.finish(kAtExit);
    reinterpret_cast<void (*)(int)>(end_hooks[kIndex].original)(status);
}

}  // namespace

HookTable ends_to_hook() {
    for (Hook &hook : end_hooks) hook.target = dlsym(RTLD_DEFAULT, hook.name);
    return {end_hooks, sizeof end_hooks / sizeof *end_hooks};
}

}  // namespace gpubpf

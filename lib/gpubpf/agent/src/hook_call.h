// What every replacement of a driver function needs.
#pragma once

#include "agent.h"
#include "driver.h"
#include "hooks.h"

// The original of SYMBOL, as the type of its replacement.
#define ORIGINAL(symbol) reinterpret_cast<decltype(&hook_##symbol)>(hooks[kHook_##symbol].original)

// The same, to be called where the program's own call goes to the driver.
#define FORWARD(symbol) \
    ::gpubpf::forward(reinterpret_cast<decltype(&hook_##symbol)>(hooks[kHook_##symbol].original))

namespace gpubpf {

inline Outer::operator bool() const { return keeps_records() && agent.live.load(std::memory_order_acquire); }

template <class Call>
auto away(const Call &call) {
    Away scope;
    return call();
}

// What is called launches a copy.
template <class Call>
auto with_copy(const Call &call) {
    Away scope(Inside::AwayWithCopy);
    return call();
}

// Called, it is the thread's way into the driver and back.
template <class Result, class... Arguments>
auto forward(Result (*original)(Arguments...)) {
    return [original](Arguments... arguments) {
        Away away;
        return original(arguments...);
    };
}

}  // namespace gpubpf

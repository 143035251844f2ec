// Helpers for every replacement of a driver function.
#pragma once

#include "attachment.h"
#include "driver/driver.h"
#include "hook_table.h"

// The original of SYMBOL, with the type of its replacement.
#define ORIGINAL(symbol) reinterpret_cast<decltype(&hook_##symbol)>(hooks[kHook_##symbol].original)

// The same, for the program's own call of the driver.
#define FORWARD(symbol) \
    ::gpubpf::forward(reinterpret_cast<decltype(&hook_##symbol)>(hooks[kHook_##symbol].original))

namespace gpubpf {

// Each function fills in the replacements of one table.
void module_hooks();
void graph_hooks();
void log_hooks();

inline HookCall::operator bool() const {
    return keeps_records() && agent.live.load(std::memory_order_acquire);
}

template <class Call>
auto in_driver(const Call &call) {
    InDriver scope;
    return call();
}

// For a call that launches a copy.
template <class Call>
auto in_driver_with_copy(const Call &call) {
    InDriver scope(ThreadIn::DriverWithCopy);
    return call();
}

// Returns a function that calls the driver and marks the thread as being there.
template <class Result, class... Arguments>
auto forward(Result (*original)(Arguments...)) {
    return [original](Arguments... arguments) {
        InDriver in_driver;
        return original(arguments...);
    };
}

}  // namespace gpubpf

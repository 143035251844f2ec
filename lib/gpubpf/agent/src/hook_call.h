// What every replacement of a driver function needs.
#pragma once

#include "agent.h"
#include "driver.h"
#include "hooks.h"

// The original of SYMBOL, as the type of its replacement.
#define ORIGINAL(symbol) reinterpret_cast<decltype(&hook_##symbol)>(hooks[kHook_##symbol].original)

namespace gpubpf {

// Whether the application itself is calling, rather than the driver from inside another hooked function.
class Outer {
 public:
  Outer() : outer_(depth()++ == 0) {}
  ~Outer() { --depth(); }
  Outer(const Outer &) = delete;
  Outer &operator=(const Outer &) = delete;
  explicit operator bool() const { return outer_ && agent.live.load(std::memory_order_acquire); }
  // Whether records are kept, though launches may not be swapped any more.
  bool keeps_records() const { return outer_ && agent.present.load(std::memory_order_acquire); }

 private:
  bool outer_;
};

}  // namespace gpubpf

// What the agent has in the driver, and how it is given back (docs/attach.md, "The life of an agent"). A kernel that does not end keeps it; then
// it outlives the attachment.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "driver.h"

namespace gpubpf {

struct Context;

// Of one context. All that it holds may still be used by copies that run.
struct Remains {
    CUcontext context = nullptr;
    CUdevice device = 0;
    bool primary = false;     // the context is the device's primary one
    uint64_t attachment = 0;  // that launched the copies
    bool graphs = false;      // an executable graph holds copies: only the end of the context frees this
    std::vector<CUdeviceptr> memory;
    std::vector<std::pair<void *, uint64_t>> registered;  // host memory, mapped
    std::vector<CUmodule> modules;
    std::vector<CUevent> events;
    std::vector<CUstream> streams;
};

// The last that an attachment does in the driver, on a thread of the agent's: gives back what it has in all contexts. Where that would make
// somebody wait, it is left to a thread that ends with it. Nothing of the agent's works in a context afterwards.
void give_back(uint64_t attachment);

// Whether something is left of an attachment that is over. Any thread.
bool has_remains();
// What stays hooked where something is left: it goes with its context; nobody waits for one that is captured; what could run for long is held back
// while it is given back.
bool serves_remains(const char *name);
// In the hooks: a context goes away, and with it what is left there. Before and after the driver's call.
void remains_end_with(CUcontext context);
void remains_end_with_device(CUdevice device);  // its primary context, where that is gone now
// Whether it is the device's primary context. Needs nobody's lock; asks the driver.
bool is_primary(CUcontext context, CUdevice device);
// A capture began or ended (+1, -1), as far as is seen: no one may wait for a context meanwhile.
void remains_captured(int more);

extern const Lifetime remains_lifetime;
// The process ends, and with it the driver: none of it is touched any more.
void abandon_remains();

}  // namespace gpubpf

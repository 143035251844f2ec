// The agent's objects in the driver, and how they are released (docs/attach.md, "The life of an agent"). A
// kernel that does not end keeps them in use. Then they outlive the attachment.
#pragma once

#include <cstdint>

#include "driver/driver.h"

namespace gpubpf {

// The attachment's last work in the driver, on one of the agent's threads. Releases the agent's objects in
// all contexts. If that would block a thread, a separate thread does it later, and ends afterwards. From then
// on, the agent does nothing in any context.
void release_driver_objects(uint64_t attachment);

// Whether objects of an ended attachment remain. Any thread may call it.
bool has_leftovers();
// Which functions stay hooked while objects remain: those that end a context (its objects end with it), those
// that begin or end a capture (a context must not be waited for while it is captured), and those that start
// work that could run for long (it is held back during the release).
bool serves_leftovers(const char *name);
// Called in hooks before and after the driver's call: a context ends, and the remaining objects in it.
void leftovers_end_with(CUcontext context);
void leftovers_end_with_device(CUdevice device);  // the device's primary context, if it has ended
// Returns the device's primary context, or null if it has none now. Takes no lock; asks the driver.
CUcontext primary_of(CUdevice device);
bool is_primary(CUcontext context, CUdevice device);
// A capture began (+1) or ended (-1). While one is known, no thread may wait for a context.
void leftovers_captured(int more);

extern const Lifetime leftovers_lifetime;
// The process ends, and the driver with it: no thread may access the objects any longer.
void abandon_leftovers();

}  // namespace gpubpf

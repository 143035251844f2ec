// Shared by the files of the stand-in for NVIDIA's Compute Sanitizer API.
#pragma once

#include "sanitizer/hooks.h"

namespace cudasim::sanitizer {

// Calls the subscriber's function, if it wants this callback.
void call(uint32_t domain, uint32_t callback, const void *data);
bool wants(uint32_t domain, uint32_t callback);

StreamHandle handle_of(const driver::Stream &stream);
// Finds the stream of a handle, and its context. A null handle means the default stream of the current context.
std::shared_ptr<driver::Stream> find_stream(StreamHandle handle, std::shared_ptr<driver::Context> &context);

// Sets the data of a launch that is in progress in this thread. Returns false if it is not.
bool set_launch_data(LaunchHandle handle, uint64_t data);

// Data of patch functions where none was set. NVIDIA's library then gives a pointer to nothing in particular.
uint64_t missing_data();

// Sets the program counters of a module's functions, unless they are set. The module's mutex must be held.
bool lay_out(const driver::Module &module, ModuleState &state);

}  // namespace cudasim::sanitizer

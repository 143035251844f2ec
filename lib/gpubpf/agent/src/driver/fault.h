// Failed kernels: after such an error the context cannot be used.
#pragma once

#include "state.h"

namespace gpubpf {

// Whether the error leaves the context unusable and is returned by every later call (cuda.h, CUresult).
bool is_sticky(CUresult result);

// Tells the tool, once, that a kernel failed in the context, if one did. A GPU's driver only reports an error. The embedded device
// also reports the kernel and the place. Call it with a current context.
void tell_fault(Context &context);

}  // namespace gpubpf

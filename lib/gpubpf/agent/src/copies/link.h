// Modules that cuLink, NVRTC and nvJitLink make from PTX. Their PTX inputs can be instrumented.
#pragma once

#include <cstdint>
#include <cuda.h>

#include "lifetime.h"

namespace gpubpf {

extern const Lifetime link_lifetime;

// Finds the compilers in the process. Returns whether their hooks are to be installed (compilers.h): not if the driver, a handle of
// dlopen, watches them.
bool watches_compilers(void *driver);

void link_began(CUlinkState link);
void link_given(CUlinkState link, CUjitInputType type, const void *data, size_t bytes);
void link_given_file(CUlinkState link, CUjitInputType type, const char *path);
void link_made(CUlinkState link, const void *image);
void link_ended(CUlinkState link);

}  // namespace gpubpf

// Virtual clock: which call of HIP the calling thread is in.
//
// ROCr's functions do not show this: HIP launches the kernels of a graph one by one, and copies between host addresses by itself. So
// the slots through which the program and its libraries call some functions of HIP get other functions, which call HIP's own.
#pragma once

namespace hipsim {

// HIP initializes ROCr. Calls of libraries that are loaded later, and of functions by dlsym, stay unknown.
void watch_hip_calls();

// The calling thread is about to submit work. Takes the time of a launch call, if a kernel of the program is launched, or a graph:
// once for each call.
void begin_submission(bool launches_kernel);

}  // namespace hipsim

#include "driver/driver.h"

#include <dlfcn.h>

namespace gpubpf {

Driver driver;

bool Driver::find(void *library) {
    // The next attachment looks them up again, while threads of the last one (leftovers.cpp) may be using
    // them. So an equal value is not written.
#define GPUBPF_FIND(name, ...) \
    if (auto at = reinterpret_cast<CUresult (*)(__VA_ARGS__)>(dlsym(library, #name)); at != name) name = at;
    GPUBPF_DRIVER_FUNCTIONS(GPUBPF_FIND)
#undef GPUBPF_FIND
    if (auto at = reinterpret_cast<void (*)(int)>(dlsym(library, "cudasim_untimed")); at != cudasim_untimed)
        cudasim_untimed = at;
    return cuCtxGetCurrent && cuCtxPushCurrent_v2 && cuCtxPopCurrent_v2 && cuCtxGetDevice &&
           cuCtxSynchronize && cuDeviceGetAttribute && cuMemAlloc_v2 && cuMemFree_v2 && cuMemsetD8Async &&
           cuMemcpyHtoDAsync_v2 && cuMemcpyDtoHAsync_v2 && cuStreamCreate && cuStreamQuery &&
           cuModuleGetGlobal_v2 && cuOccupancyMaxActiveBlocksPerMultiprocessor;
}

Untimed::Untimed() {
    ++depth();
    if (driver.cudasim_untimed) driver.cudasim_untimed(1);
}

Untimed::~Untimed() {
    if (driver.cudasim_untimed) driver.cudasim_untimed(0);
    --depth();
}

DriverScope::DriverScope() {
    ++depth();
    if (driver.cudasim_untimed) driver.cudasim_untimed(1);
    if (driver.cuThreadExchangeStreamCaptureMode)
        exchanged_ = driver.cuThreadExchangeStreamCaptureMode(&mode_) == CUDA_SUCCESS;
}

DriverScope::~DriverScope() {
    if (exchanged_) driver.cuThreadExchangeStreamCaptureMode(&mode_);
    if (driver.cudasim_untimed) driver.cudasim_untimed(0);
    --depth();
}

}  // namespace gpubpf

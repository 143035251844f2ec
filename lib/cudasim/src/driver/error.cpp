// Names and descriptions of the driver's errors.
#include <cuda.h>

#include <map>

#include "error_text.h"

using namespace cudasim;

namespace {

const std::map<int, const char *> &names() {
    static const auto *const map = new std::map<int, const char *>{
#define CUDASIM_DRIVER_ERRORS
#define X(number, name) {number, name},
#include "errors.inc"
#undef X
    };
    return *map;
}

}  // namespace

extern "C" __attribute__((visibility("hidden"))) int cudasim_stub(const char *function) {  // stubs call it
    return unsupported(function);
}

CUresult cuGetErrorName(CUresult error, const char **text) {
    if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
    auto found = names().find(error);
    *text = found == names().end() ? nullptr : found->second;
    return *text == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
    auto found = names().find(error);
    *text = found == names().end() ? nullptr : error_text(error, found->second);
    return *text == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

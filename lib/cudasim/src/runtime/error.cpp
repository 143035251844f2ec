// Names and descriptions of the runtime's errors.
#include <cuda_runtime_api.h>

#include <map>

#include "error_text.h"

namespace {

const std::map<int, const char *> &names() {
    static const auto *const map = new std::map<int, const char *>{
#define X(number, name) {number, name},
#include "errors.inc"
#undef X
    };
    return *map;
}

}  // namespace

extern "C" {

const char *cudaGetErrorName(cudaError_t error) {
    auto found = names().find(error);
    return found == names().end() ? "unrecognized error code" : found->second;
}

const char *cudaGetErrorString(cudaError_t error) {
    auto found = names().find(error);
    return found == names().end() ? "unrecognized error code" : cudasim::error_text(error, found->second);
}

}  // extern "C"

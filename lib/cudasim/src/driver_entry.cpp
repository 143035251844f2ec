// Finding entry points by name and version, and names for errors.
#include <cuda.h>
#include <string.h>

#include <map>
#include <string>
#include <vector>

#include "error_text.h"

namespace cudasim::driver {

struct EntryPoint {
    const char *name;
    int version;
    void *legacy;
    void *per_thread;
};

extern const EntryPoint entry_points[];
extern const size_t entry_point_count;

}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

// What the driver knows by its exported name alone.
CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *status) {
    if (symbol == nullptr || function == nullptr || version > CUDA_VERSION) return CUDA_ERROR_INVALID_VALUE;
    static const auto *const by_name = [] {
        auto *made = new std::multimap<std::string, const EntryPoint *>();
        for (size_t i = 0; i < entry_point_count; i++) made->emplace(entry_points[i].name, &entry_points[i]);
        return made;
    }();
    *function = nullptr;
    auto [first, last] = by_name->equal_range(symbol);
    const EntryPoint *best = nullptr;
    for (auto at = first; at != last; ++at)
        if (at->second->version <= version && (best == nullptr || at->second->version > best->version))
            best = at->second;
    if (status != nullptr)
        *status = best != nullptr ? CU_GET_PROC_ADDRESS_SUCCESS
                  : first != last ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                                  : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    if (best == nullptr) return status != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
    *function =
        (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0 ? best->per_thread : best->legacy;
    return CUDA_SUCCESS;
}

extern "C" {
CUresult get_proc_address_v1(const char *, void **, int, cuuint64_t) __asm__("cuGetProcAddress");
CUresult get_proc_address_v1(const char *symbol, void **function, int version, cuuint64_t flags) {
    return cuGetProcAddress(symbol, function, version, flags, nullptr);
}
}

namespace {

const std::map<int, const char *> &names() {
    static const auto *const made = new std::map<int, const char *>{
#define CUDASIM_DRIVER_ERRORS
#define X(number, name) {number, name},
#include "errors.inc"
#undef X
    };
    return *made;
}

}  // namespace

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

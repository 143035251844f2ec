// cuGetProcAddress: find an entry point by name and version.
#include <cuda.h>

#include <map>
#include <string>

#include "driver/entry_points.h"

using namespace cudasim::driver;

CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *status) {
    if (symbol == nullptr || function == nullptr || version > CUDA_VERSION) return CUDA_ERROR_INVALID_VALUE;
    static const auto *const by_name = [] {
        auto *map = new std::multimap<std::string, const EntryPoint *>();
        for (size_t i = 0; i < entry_point_count; i++) map->emplace(entry_points[i].name, &entry_points[i]);
        return map;
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

#include "copies/original.h"

#include "driver/driver.h"
#include "hook_table.h"

namespace gpubpf {

namespace {

constexpr size_t kMostParameters = 4096;

// Attributes that a program can set.
constexpr CUfunction_attribute kSet[] = {
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
    CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
    CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
    CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE,
    CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH,
    CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT,
    CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH,
};

}  // namespace

bool parameters_of(CUfunction f, std::vector<Parameter> &parameters) {
    if (!driver.cuFuncGetParamInfo) return false;
    for (size_t i = 0; i < kMostParameters; ++i) {
        size_t offset = 0, size = 0;
        CUresult r = driver.cuFuncGetParamInfo(f, i, &offset, &size);
        if (r == CUDA_ERROR_INVALID_VALUE) return true;  // that was the last parameter
        if (r != CUDA_SUCCESS) return false;
        parameters.emplace_back(offset, size);
    }
    return false;
}

const char *mismatch(CUfunction original, const Layout &layout) {
    std::vector<Parameter> parameters;
    DriverScope scope;
    if (!original || !parameters_of(original, parameters)) return nullptr;
    bool same = parameters.size() == layout.parameters.size();
    for (size_t i = 0; same && i < parameters.size(); ++i)
        same = parameters[i].second == layout.parameters[i] &&
               parameters[i].first + parameters[i].second <= layout.block_offset;
    return same ? nullptr : "another kernel of that name";
}

bool mirror_attributes(CUfunction original, CUfunction copy) {
    using Set = CUresult (*)(CUfunction, CUfunction_attribute, int);
    auto set = reinterpret_cast<Set>(hooks[kHook_cuFuncSetAttribute].original);
    if (!original || !driver.cuFuncGetAttribute) return true;
    for (CUfunction_attribute a : kSet) {
        int theirs = 0, ours = 0;
        if (driver.cuFuncGetAttribute(&theirs, a, original) != CUDA_SUCCESS ||
            driver.cuFuncGetAttribute(&ours, a, copy) != CUDA_SUCCESS || theirs == ours)
            continue;
        if (!set || set(copy, a, theirs) != CUDA_SUCCESS) return false;
    }
    return true;
}

}  // namespace gpubpf

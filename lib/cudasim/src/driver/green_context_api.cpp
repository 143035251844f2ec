// Green contexts: parts of a device's multiprocessors (cuGreenCtx*, cuDevSmResource*).
#include <algorithm>
#include <memory>

#include "driver/context.h"

namespace cudasim::driver {
namespace {

// CUdevResourceDesc points to one. It is never freed: the API has no function for that.
struct Description {
    CUdevSmResource multiprocessors;
};

// The smallest part, and the step between sizes (CUDA driver API, "Green Contexts").
unsigned smallest_part() { return config().cc_major >= 9 ? 8 : config().cc_major == 8 ? 4 : 2; }
unsigned step() { return config().cc_major >= 9 ? 8 : 2; }

CUresult describe(CUdevResource *resource, CUdevResourceType type, unsigned count) {
    if (resource == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
    *resource = {};
    resource->type = type;
    resource->sm = {count, smallest_part(), step()};
    return CUDA_SUCCESS;
}

CUresult find_green(CUgreenCtx handle, std::shared_ptr<GreenContext> &green) {
    if (CUresult status = check_initialized()) return status;
    green = tables().green_contexts.get(handle);
    if (!green) return CUDA_ERROR_INVALID_CONTEXT;
    return green->primary->destroyed ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS;
}

}  // namespace
}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource *resource, CUdevResourceType type) {
    if (CUresult status = check_initialized()) return status;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    return describe(resource, type, kMultiprocessors);
}

CUresult cuCtxGetDevResource(CUcontext handle, CUdevResource *resource, CUdevResourceType type) {
    if (CUresult status = check_initialized()) return status;
    const CurrentContext found = find_context(handle);
    if (!found.context) return CUDA_ERROR_INVALID_CONTEXT;
    return describe(resource, type, found.green ? found.green->multiprocessors.smCount : kMultiprocessors);
}

CUresult cuGreenCtxGetDevResource(CUgreenCtx handle, CUdevResource *resource, CUdevResourceType type) {
    std::shared_ptr<GreenContext> green;
    if (CUresult status = find_green(handle, green)) return status;
    return describe(resource, type, green->multiprocessors.smCount);
}

CUresult cuDevSmResourceSplitByCount(CUdevResource *result, unsigned int *groups, const CUdevResource *input,
                                     CUdevResource *remaining, unsigned int flags, unsigned int least) {
    if (CUresult status = check_initialized()) return status;
    if (groups == nullptr || input == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (input->type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
    const unsigned all = input->sm.smCount;
    if (least > all) return CUDA_ERROR_INVALID_VALUE;
    const bool fine = (flags & CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING) != 0;
    const unsigned multiple = fine ? 2 : step();
    unsigned size = std::max(least, fine ? 2 : smallest_part());
    size = (size + multiple - 1) / multiple * multiple;
    if (size > all) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    const unsigned made = result == nullptr ? all / size : std::min(*groups, all / size);
    *groups = made;
    for (unsigned i = 0; result != nullptr && i < made; i++)
        describe(&result[i], CU_DEV_RESOURCE_TYPE_SM, size);
    if (remaining != nullptr) describe(remaining, CU_DEV_RESOURCE_TYPE_SM, all - made * size);
    return CUDA_SUCCESS;
}

CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *out, CUdevResource *resources, unsigned int count) {
    if (CUresult status = check_initialized()) return status;
    if (out == nullptr || resources == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
    auto description = std::make_unique<Description>();
    description->multiprocessors = {0, smallest_part(), step()};
    for (unsigned i = 0; i < count; i++) {
        if (resources[i].type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
        description->multiprocessors.smCount += resources[i].sm.smCount;
    }
    if (description->multiprocessors.smCount == 0 || description->multiprocessors.smCount > kMultiprocessors)
        return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    *out = reinterpret_cast<CUdevResourceDesc>(description.release());
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxCreate(CUgreenCtx *handle, CUdevResourceDesc description, CUdevice device,
                          unsigned int flags) {
    if (CUresult status = check_initialized()) return status;
    if (handle == nullptr || description == nullptr || flags != CU_GREEN_CTX_DEFAULT_STREAM)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    static std::atomic<uint64_t> next_id{1};
    auto green = std::make_shared<GreenContext>();
    if (CUresult status = retain_primary(device, green->primary, true)) return status;
    green->id = next_id++;
    green->multiprocessors = reinterpret_cast<const Description *>(description)->multiprocessors;
    green->handle = tables().green_contexts.add(green);
    green->converted = tables().converted_green_contexts.add(green);
    *handle = static_cast<CUgreenCtx>(green->handle);
    return CUDA_SUCCESS;
}

// After a reset of the primary context, there is nothing to release.
CUresult cuGreenCtxDestroy(CUgreenCtx handle) {
    std::shared_ptr<GreenContext> green;
    const CUresult status = find_green(handle, green);
    if (!green) return status;
    if (!green->primary->destroyed) drain(*green->primary);
    green->destroyed = true;
    tables().green_contexts.remove(green->handle);
    tables().converted_green_contexts.remove(green->converted);
    return status ? status : release_primary(green->primary->device);
}

CUresult cuCtxFromGreenCtx(CUcontext *context, CUgreenCtx handle) {
    std::shared_ptr<GreenContext> green;
    if (CUresult status = find_green(handle, green)) return status;
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *context = static_cast<CUcontext>(green->converted);
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxGetId(CUgreenCtx handle, unsigned long long *id) {
    std::shared_ptr<GreenContext> green;
    if (CUresult status = find_green(handle, green)) return status;
    if (id == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *id = green->id;
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxStreamCreate(CUstream *handle, CUgreenCtx green_handle, unsigned int flags, int priority) {
    std::shared_ptr<GreenContext> green;
    if (CUresult status = find_green(green_handle, green)) return status;
    if (handle == nullptr || flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    *handle = add_stream(green->primary, green, flags, priority);
    return CUDA_SUCCESS;
}

CUresult cuStreamGetGreenCtx(CUstream stream, CUgreenCtx *green) {
    CUcontext context;
    return green == nullptr ? CUDA_ERROR_INVALID_VALUE : cuStreamGetCtx_v2(stream, &context, green);
}

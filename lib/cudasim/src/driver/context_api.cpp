// The API of devices and contexts: cuDevice*, cuDevicePrimaryCtx*, cuCtx*.
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#include "driver/context.h"
#include "sanitizer/hooks.h"
#include "per_thread.h"

namespace cudasim::driver {
namespace {

const std::shared_ptr<ThreadToken> &this_thread() {
    auto &token = per_thread<std::shared_ptr<ThreadToken>>();
    if (!token) token = std::make_shared<ThreadToken>();
    return token;
}

// "A green context can be current to only one thread at a time" (CUDA driver API): in hostile mode the process ends then.
void take_green(GreenContext *green) {
    if (green == nullptr) return;
    std::lock_guard lock(green->primary->mutex);
    std::shared_ptr<ThreadToken> user = green->user.lock();
    if (config().hostile && user && user != this_thread()) {
        log_line("a green context is made current to two threads");
        abort();
    }
    green->user = this_thread();
}

void leave_green(const std::shared_ptr<GreenContext> &green) {
    const auto &stack = context_stack();
    if (!green ||
        std::any_of(stack.begin(), stack.end(), [&](const CurrentContext &c) { return c.green == green; }))
        return;
    std::lock_guard lock(green->primary->mutex);
    green->user.reset();
}

CurrentContext pop_context() {
    CurrentContext top = std::move(context_stack().back());
    context_stack().pop_back();
    leave_green(top.green);
    return top;
}

void push_context(CurrentContext context) {
    take_green(context.green.get());
    context_stack().push_back(std::move(context));
}

}  // namespace

// "It is the responsibility of the calling function to ensure
// that no API call issues using ctx while cuCtxDestroy() is executing" (CUDA driver API): in hostile mode the process ends then.
void destroy_context(const std::shared_ptr<Context> &context) {
    if (config().hostile && context->waiting != 0) {
        log_line("a context is destroyed while another thread waits for it in cuCtxSynchronize");
        abort();
    }
    if (sanitizer::active()) sanitizer::context_changed(sanitizer::kContextDestroyStarting, *context);
    drain(*context);
    context->destroyed = true;
    tables().contexts.remove(context->handle);
    drop_context_modules(context.get());
    std::lock_guard lock(context->mutex);
    for (const std::shared_ptr<Stream> &stream : context->streams) {
        abandon_capture(stream);
        tables().streams.remove(stream->handle);
    }
    for (const std::shared_ptr<Event> &event : tables().events.all())
        if (event->context.lock() == context) tables().events.remove(event->handle);
    for (const std::shared_ptr<Module> &module : context->modules) remove_handles(*module);
    context->modules.clear();
    sanitizer::forget_patches(*context);
    context->streams.clear();
    context->per_thread.clear();
    for (const Allocation &left : Memory::instance().owned_by(context->handle)) {
        if (left.kind == MemoryKind::registered) Memory::instance().remove_registered(left.base);
        else free_memory(left.base, left.id);
    }
    std::lock_guard heap(context->heap_mutex);
    context->heap = 0;
    context->heap_free.clear();
    context->heap_used.clear();
}

CUresult release_primary(CUdevice device) {
    Device &state = device_state(device);
    std::shared_ptr<Context> context;
    {
        std::lock_guard lock(state.mutex);
        if (!state.primary || state.retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
        if (--state.retained == 0) context = std::move(state.primary);
        if (context) state.primary = nullptr;
    }
    if (context) destroy_context(context);
    return CUDA_SUCCESS;
}

}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

// ---------------------------------------------------------------------------------------------------- devices

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (CUresult status = check_initialized()) return status;
    if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    if (CUresult status = check_initialized()) return status;
    if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *count = config().devices;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    if (CUresult status = check_initialized()) return status;
    if (name == nullptr || length <= 0) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, static_cast<size_t>(length), "cudasim embedded device (software)");
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    if (CUresult status = check_initialized()) return status;
    if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    memcpy(uuid->bytes, "cudasim-device-", 15);
    uuid->bytes[15] = static_cast<char>(device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetLuid(char *, unsigned int *, CUdevice) { return CUDA_ERROR_NOT_SUPPORTED; }

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    if (CUresult status = check_initialized()) return status;
    if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = Memory::instance().total();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    if (CUresult status = check_initialized()) return status;
    if (value == nullptr || attribute < 1 || attribute >= CU_DEVICE_ATTRIBUTE_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    switch (static_cast<int>(attribute)) {
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *value = kThreadsPerBlock; break;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *value = 64; break;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = INT_MAX; break;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = 65535; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = kSharedPerBlock; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = kSharedPerBlockOptin; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
            *value = kSharedPerMultiprocessor;
            break;
        case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: *value = kSharedReserved; break;
        case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: *value = 65536; break;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
        case CU_DEVICE_ATTRIBUTE_MAX_PITCH: *value = INT_MAX; break;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = kRegisters; break;
        case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1000000; break;
        case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 1000000; break;
        case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 64; break;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = kL2Cache; break;
        case CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE:
            *value = config().cc_major >= 8 ? kPersistingL2Cache : 0;
            break;
        case CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE:
            *value = config().cc_major >= 8 ? kAccessPolicyWindow : 0;
            break;
        case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT:
        case CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT: *value = 512; break;
        case CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT: *value = 32; break;
        case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
        case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
        case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
        case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
        case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
        case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1:
        case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1:
        case CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT:
        case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: *value = 1; break;
        case CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES:
            *value = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
            break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = kMultiprocessors; break;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = kThreadsPerMultiprocessor; break;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: *value = kBlocksPerMultiprocessor; break;
        case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *value = 2; break;
        case CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO: *value = 2; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = config().cc_major; break;
        case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: *value = config().cc_major >= 9; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = config().cc_minor; break;
        case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID: *value = device; break;
        // The sizes of textures and surfaces: those of compute capability 8.0 and 9.0.
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_WIDTH:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_WIDTH: *value = 131072; break;
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_HEIGHT: *value = 65536; break;
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_HEIGHT: *value = 65000; break;
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_PITCH: *value = 2097120; break;
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LINEAR_WIDTH: *value = 1 << 28; break;
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH_ALTERNATE:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT_ALTERNATE:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH_ALTERNATE:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_WIDTH:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_HEIGHT:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_DEPTH: *value = 16384; break;
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_WIDTH:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_WIDTH:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_HEIGHT:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_WIDTH:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_HEIGHT:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_WIDTH:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_WIDTH:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_WIDTH:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_WIDTH:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_WIDTH:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_WIDTH:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_HEIGHT:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_WIDTH:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_WIDTH: *value = 32768; break;
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_LAYERS:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_LAYERS:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_LAYERS:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_LAYERS: *value = 2048; break;
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_LAYERS:
        case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_LAYERS: *value = 2046; break;
        case CU_DEVICE_ATTRIBUTE_NUMA_ID:
        case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: *value = -1; break;
        default: *value = 0; break;  // unsupported: peers, IPC, …
    }
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetProperties(CUdevprop *properties, CUdevice device) {
    if (CUresult status = check_initialized()) return status;
    if (properties == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *properties = {};
    properties->maxThreadsPerBlock = kThreadsPerBlock;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = kThreadsPerBlock;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = INT_MAX;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->sharedMemPerBlock = kSharedPerBlock;
    properties->totalConstantMemory = 65536;
    properties->SIMDWidth = 32;
    properties->memPitch = INT_MAX;
    properties->regsPerBlock = kRegisters;
    properties->clockRate = 1000000;
    properties->textureAlign = 512;
    return CUDA_SUCCESS;
}

CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device) {
    if (CUresult status = check_initialized()) return status;
    if (major == nullptr || minor == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *major = config().cc_major;
    *minor = config().cc_minor;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
    if (CUresult status = check_initialized()) return status;
    if (text == nullptr || length <= 0) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(text, static_cast<size_t>(length), "0000:00:%02x.0", device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text) {
    if (CUresult status = check_initialized()) return status;
    if (device == nullptr || text == nullptr) return CUDA_ERROR_INVALID_VALUE;
    for (int candidate = 0; candidate < config().devices; candidate++) {
        char bus_id[32];
        cuDeviceGetPCIBusId(bus_id, sizeof bus_id, candidate);
        if (strcasecmp(bus_id, text) == 0 || strcasecmp(bus_id + 5, text) == 0) {
            *device = candidate;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetExecAffinitySupport(int *value, CUexecAffinityType, CUdevice device) {
    if (CUresult status = check_initialized()) return status;
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *value = 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    if (CUresult status = check_initialized()) return status;
    if (can == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device) || !is_device(peer)) return CUDA_ERROR_INVALID_DEVICE;
    *can = device != peer ? 1 : 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attribute, CUdevice device,
                                 CUdevice peer) {
    if (CUresult status = check_initialized()) return status;
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device) || !is_device(peer) || device == peer) return CUDA_ERROR_INVALID_DEVICE;
    *value = attribute == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED ||
             attribute == CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
    return CUDA_SUCCESS;
}

CUresult cuCtxEnablePeerAccess(CUcontext handle, unsigned int flags) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    std::shared_ptr<Context> peer = find_context(handle).context;
    if (!peer) return CUDA_ERROR_INVALID_CONTEXT;
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (peer->device == context->device) return CUDA_ERROR_INVALID_DEVICE;
    std::lock_guard lock(context->mutex);
    return context->peers.insert(peer->device).second ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

CUresult cuCtxDisablePeerAccess(CUcontext handle) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    std::shared_ptr<Context> peer = find_context(handle).context;
    if (!peer) return CUDA_ERROR_INVALID_CONTEXT;
    std::lock_guard lock(context->mutex);
    return context->peers.erase(peer->device) != 0 ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}

// ---------------------------------------------------------------------------------------------------- primary contexts

CUresult cuDevicePrimaryCtxRetain(CUcontext *handle, CUdevice device) {
    if (CUresult status = check_initialized()) return status;
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    std::shared_ptr<Context> context;
    if (CUresult status = retain_primary(device, context, true)) return status;
    *handle = static_cast<CUcontext>(context->handle);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    if (CUresult status = check_initialized()) return status;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    return release_primary(device);
}

CUresult cuDevicePrimaryCtxReset(CUdevice device) {
    if (CUresult status = check_initialized()) return status;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    Device &state = device_state(device);
    std::shared_ptr<Context> context;
    {
        std::lock_guard lock(state.mutex);
        context = std::move(state.primary);
        state.primary = nullptr;
        state.retained = 0;
    }
    if (context) destroy_context(context);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned int flags) {
    if (CUresult status = check_initialized()) return status;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    Device &state = device_state(device);
    std::lock_guard lock(state.mutex);
    state.flags = flags;
    if (state.primary) state.primary->flags = flags;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
    if (CUresult status = check_initialized()) return status;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    Device &state = device_state(device);
    std::lock_guard lock(state.mutex);
    if (flags != nullptr) *flags = state.flags;
    if (active != nullptr) *active = state.primary ? 1 : 0;
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------- contexts

CUresult cuCtxCreate(CUcontext *handle, CUctxCreateParams *parameters, unsigned int flags, CUdevice device) {
    if (CUresult status = check_initialized()) return status;
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (parameters != nullptr && (parameters->numExecAffinityParams != 0 || parameters->cigParams != nullptr))
        return CUDA_ERROR_NOT_SUPPORTED;
    std::shared_ptr<Context> context = create_context(device, flags, false);
    push_context({context, nullptr});
    *handle = static_cast<CUcontext>(context->handle);
    return CUDA_SUCCESS;
}

CUresult cuCtxDestroy(CUcontext handle) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<Context> context = tables().contexts.get(handle);
    if (!context || context->primary) return CUDA_ERROR_INVALID_CONTEXT;
    destroy_context(context);
    if (!context_stack().empty() && context_stack().back().context == context) pop_context();
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext handle) {
    if (CUresult status = check_initialized()) return status;
    CurrentContext found = find_context(handle);
    if (!found.context) return CUDA_ERROR_INVALID_CONTEXT;
    push_context(std::move(found));
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *handle) {
    if (CUresult status = check_initialized()) return status;
    if (context_stack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
    const CurrentContext top = pop_context();
    if (handle != nullptr) *handle = top.handle();
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext handle) {
    if (CUresult status = check_initialized()) return status;
    CurrentContext found = find_context(handle);
    if (handle != nullptr && !found.context) return CUDA_ERROR_INVALID_CONTEXT;
    if (!context_stack().empty()) pop_context();
    if (found.context) push_context(std::move(found));
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *handle) {
    if (CUresult status = check_initialized()) return status;
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *handle = context_stack().empty() ? nullptr : context_stack().back().handle();
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    if (CUresult status = check_initialized()) return status;
    if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<Context> context = current_context_or_null();
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    *device = context->device;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext handle) {
    if (CUresult status = check_initialized()) return status;
    if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<Context> context = find_context(handle).context;
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    *device = context->device;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetFlags(unsigned int *flags) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *flags = context->flags;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetFlags(unsigned int flags) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    context->flags = flags;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext handle, unsigned long long *id) {
    if (CUresult status = check_initialized()) return status;
    if (id == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<Context> context =
        handle == nullptr ? current_context_or_null() : find_context(handle).context;
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    *id = context->id;
    return CUDA_SUCCESS;
}

namespace {

CUresult synchronize(const std::shared_ptr<Context> &context) {
    if (on_worker_thread()) return CUDA_ERROR_NOT_PERMITTED;
    if (CUresult status = check_not_capturing(context)) return status;
    context->waiting++;
    drain(*context);
    context->waiting--;
    if (sanitizer::active()) sanitizer::synchronized(*context, nullptr);
    return static_cast<CUresult>(context->sticky_error.load());
}

}  // namespace

CUresult cuCtxSynchronize(void) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    return synchronize(context);
}

// There is no profiler to start or stop. cudaProfiler.h, which declares these, is not in every toolkit.
extern "C" CUresult cuProfilerStart(void);
extern "C" CUresult cuProfilerStop(void);

CUresult cuProfilerStart(void) {
    std::shared_ptr<Context> context;
    return current_context(context);
}

CUresult cuProfilerStop(void) { return cuProfilerStart(); }

CUresult cuCtxSynchronize_v2(CUcontext handle) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<Context> context = find_context(handle).context;
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    return synchronize(context);
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (limit >= CU_LIMIT_MAX) return CUDA_ERROR_INVALID_VALUE;
    if (limit == CU_LIMIT_STACK_SIZE && value > (512 << 10)) return CUDA_ERROR_INVALID_VALUE;
    if (limit == CU_LIMIT_PERSISTING_L2_CACHE_SIZE) {
        if (config().cc_major < 8) return CUDA_ERROR_UNSUPPORTED_LIMIT;
        if (value > kPersistingL2Cache) return CUDA_ERROR_INVALID_VALUE;
    }
    std::lock_guard lock(context->limits_mutex);
    if (limit == CU_LIMIT_MALLOC_HEAP_SIZE && context->heap != 0) return CUDA_ERROR_INVALID_VALUE;
    context->limits[limit] = value;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (value == nullptr || limit >= CU_LIMIT_MAX) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(context->limits_mutex);
    auto set = context->limits.find(limit);
    if (set != context->limits.end()) {
        *value = set->second;
        return CUDA_SUCCESS;
    }
    switch (limit) {
        case CU_LIMIT_STACK_SIZE: *value = 1024; break;
        case CU_LIMIT_PRINTF_FIFO_SIZE: *value = 1 << 20; break;
        case CU_LIMIT_MALLOC_HEAP_SIZE: *value = kDefaultHeapSize; break;
        case CU_LIMIT_MAX_L2_FETCH_GRANULARITY: *value = 64; break;
        default: *value = 0; break;
    }
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCacheConfig(CUfunc_cache *preference) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (preference == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *preference = context->cache_config;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCacheConfig(CUfunc_cache preference) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    context->cache_config = preference;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetSharedMemConfig(CUsharedconfig *bank_size) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (bank_size == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *bank_size = CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetSharedMemConfig(CUsharedconfig) {
    std::shared_ptr<Context> context;
    return current_context(context);
}

CUresult cuCtxGetApiVersion(CUcontext handle, unsigned int *version) {
    if (CUresult status = check_initialized()) return status;
    if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (handle != nullptr && !find_context(handle).context) return CUDA_ERROR_INVALID_CONTEXT;
    *version = 3020;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
    return CUDA_SUCCESS;
}

CUresult cuCtxResetPersistingL2Cache(void) {
    std::shared_ptr<Context> context;
    return current_context(context);
}

// ------------------------------------------------------------------------------------- for tools

extern "C" {
// The first fault of a context. The texts live as long as the context. file is empty and line 0 without line information.
struct cudasim_fault_report {
    int32_t error;  // CUresult
    uint32_t line, block[3], thread[3];
    uint64_t address;  // 0: not a memory access
    const char *kernel, *file;
};

// For tools: says which kernel failed and where, which a GPU's driver does not. Returns NOT_FOUND without a fault.
CUresult cudasim_fault(CUcontext handle, cudasim_fault_report *report) {
    std::shared_ptr<Context> context = find_context(handle).context;
    if (!context || report == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    std::lock_guard lock(context->fault_mutex);
    const Fault &fault = context->fault;
    if (!fault) return CUDA_ERROR_NOT_FOUND;
    *report = {fault.code,
               fault.source_line,
               {fault.block[0], fault.block[1], fault.block[2]},
               {fault.thread[0], fault.thread[1], fault.thread[2]},
               fault.access ? fault.address : 0,
               fault.kernel.c_str(),
               fault.file.c_str()};
    return CUDA_SUCCESS;
}

// For tools: the program counter of that fault if it is in a patch function. Returns NOT_FOUND if it is not.
CUresult cudasim_fault_in_patch(CUcontext handle, uint64_t *pc) {
    std::shared_ptr<Context> context = find_context(handle).context;
    if (!context || pc == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    std::lock_guard lock(context->fault_mutex);
    *pc = context->fault.patch_pc;
    return *pc ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
}

// ------------------------------------------------------------------------------------- earlier versions of entry points

extern "C" {
CUresult create_v1(CUcontext *, unsigned, CUdevice) __asm__("cuCtxCreate");
CUresult create_v2(CUcontext *, unsigned, CUdevice) __asm__("cuCtxCreate_v2");
CUresult create_v3(CUcontext *, CUexecAffinityParam *, int, unsigned, CUdevice) __asm__("cuCtxCreate_v3");
CUresult destroy_v1(CUcontext) __asm__("cuCtxDestroy");
CUresult push_v1(CUcontext) __asm__("cuCtxPushCurrent");
CUresult pop_v1(CUcontext *) __asm__("cuCtxPopCurrent");
CUresult release_v1(CUdevice) __asm__("cuDevicePrimaryCtxRelease");
CUresult reset_v1(CUdevice) __asm__("cuDevicePrimaryCtxReset");
CUresult set_flags_v1(CUdevice, unsigned) __asm__("cuDevicePrimaryCtxSetFlags");
CUresult uuid_v1(CUuuid *, CUdevice) __asm__("cuDeviceGetUuid");

CUresult create_v1(CUcontext *context, unsigned flags, CUdevice device) {
    return cuCtxCreate(context, nullptr, flags, device);
}
CUresult create_v2(CUcontext *context, unsigned flags, CUdevice device) {
    return cuCtxCreate(context, nullptr, flags, device);
}
CUresult create_v3(CUcontext *context, CUexecAffinityParam *, int count, unsigned flags, CUdevice device) {
    return count != 0 ? CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY : cuCtxCreate(context, nullptr, flags, device);
}
CUresult destroy_v1(CUcontext context) { return cuCtxDestroy(context); }
CUresult push_v1(CUcontext context) { return cuCtxPushCurrent(context); }
CUresult pop_v1(CUcontext *context) { return cuCtxPopCurrent(context); }
CUresult release_v1(CUdevice device) { return cuDevicePrimaryCtxRelease(device); }
CUresult reset_v1(CUdevice device) { return cuDevicePrimaryCtxReset(device); }
CUresult set_flags_v1(CUdevice device, unsigned flags) { return cuDevicePrimaryCtxSetFlags(device, flags); }
CUresult uuid_v1(CUuuid *uuid, CUdevice device) { return cuDeviceGetUuid(uuid, device); }
}

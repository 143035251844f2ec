// The runtime's calls that do not depend on the kind of default stream: devices, memory, kernels, libraries, and creating
// and destroying streams and events.
#include "runtime/runtime.h"

#include <string.h>

#include <algorithm>
#include <climits>

using namespace cudasim::runtime;

namespace {

int attribute(CUdevice_attribute which, int device) {
    int value = 0;
    cu().DeviceGetAttribute(&value, which, device);
    return value;
}

bool is_device(int device) {
    int count = 0;
    return cu().DeviceGetCount(&count) == CUDA_SUCCESS && device >= 0 && device < count;
}

cudaError_t function_attribute(const void *host, CUfunction_attribute which, int &value) {
    CUkernel kernel = nullptr;
    if (cudaError_t error = find_kernel(host, kernel)) return error;
    return static_cast<cudaError_t>(cu().KernelGetAttribute(&value, which, kernel, current_device()));
}

}  // namespace

extern "C" {

// ---------------------------------------------------------------------------------------------------- versions, devices

cudaError_t cudaDriverGetVersion(int *version) {
    if (version == nullptr) return record_error(cudaErrorInvalidValue);
    *version = 0;
    if (cu().DriverGetVersion == nullptr) {
        ensure_driver();
        if (cu().DriverGetVersion == nullptr) return cudaSuccess;
    }
    return record_error(cu().DriverGetVersion(version));
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    if (version == nullptr) return record_error(cudaErrorInvalidValue);
    *version = 13000;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
    ENSURE_DRIVER();
    return record_error(cu().DeviceGetAttribute(value, static_cast<CUdevice_attribute>(which), device));
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    ENSURE_DRIVER();
    if (properties == nullptr) return record_error(cudaErrorInvalidValue);
    if (!is_device(device)) return record_error(cudaErrorInvalidDevice);
    *properties = {};
    auto get = [device](CUdevice_attribute which) { return attribute(which, device); };
    cu().DeviceGetName(properties->name, sizeof properties->name, device);
    cu().DeviceGetUuid(reinterpret_cast<CUuuid *>(&properties->uuid), device);
    cu().DeviceTotalMem(&properties->totalGlobalMem, device);
    properties->sharedMemPerBlock = get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
    properties->regsPerBlock = get(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK);
    properties->warpSize = get(CU_DEVICE_ATTRIBUTE_WARP_SIZE);
    properties->memPitch = get(CU_DEVICE_ATTRIBUTE_MAX_PITCH);
    properties->maxThreadsPerBlock = get(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
    properties->maxThreadsDim[0] = get(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X);
    properties->maxThreadsDim[1] = get(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y);
    properties->maxThreadsDim[2] = get(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z);
    properties->maxGridSize[0] = get(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X);
    properties->maxGridSize[1] = get(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y);
    properties->maxGridSize[2] = get(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z);
    properties->totalConstMem = get(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY);
    properties->major = get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    properties->minor = get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    properties->textureAlignment = get(CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT);
    properties->texturePitchAlignment = get(CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT);
    properties->maxTexture1D = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH);
    properties->maxTexture1DMipmap = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH);
    properties->maxTexture2D[0] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH);
    properties->maxTexture2D[1] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT);
    properties->maxTexture2DMipmap[0] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_WIDTH);
    properties->maxTexture2DMipmap[1] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT);
    properties->maxTexture2DLinear[0] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_WIDTH);
    properties->maxTexture2DLinear[1] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_HEIGHT);
    properties->maxTexture2DLinear[2] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_PITCH);
    properties->maxTexture2DGather[0] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_WIDTH);
    properties->maxTexture2DGather[1] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_HEIGHT);
    for (int d = 0; d < 3; d++) {
        properties->maxTexture3D[d] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH);
        properties->maxTexture3DAlt[d] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH_ALTERNATE);
        properties->maxSurface3D[d] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_WIDTH);
    }
    properties->maxTextureCubemap = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_WIDTH);
    properties->maxTexture1DLayered[0] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_WIDTH);
    properties->maxTexture1DLayered[1] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_LAYERS);
    properties->maxTexture2DLayered[0] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_WIDTH);
    properties->maxTexture2DLayered[1] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_HEIGHT);
    properties->maxTexture2DLayered[2] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_LAYERS);
    properties->maxTextureCubemapLayered[0] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_WIDTH);
    properties->maxTextureCubemapLayered[1] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_LAYERS);
    properties->maxSurface1D = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_WIDTH);
    properties->maxSurface2D[0] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_WIDTH);
    properties->maxSurface2D[1] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_HEIGHT);
    properties->maxSurface1DLayered[0] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_WIDTH);
    properties->maxSurface1DLayered[1] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_LAYERS);
    properties->maxSurface2DLayered[0] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_WIDTH);
    properties->maxSurface2DLayered[1] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_HEIGHT);
    properties->maxSurface2DLayered[2] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_LAYERS);
    properties->maxSurfaceCubemap = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_WIDTH);
    properties->maxSurfaceCubemapLayered[0] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_WIDTH);
    properties->maxSurfaceCubemapLayered[1] = get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_LAYERS);
    properties->multiProcessorCount = get(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    properties->integrated = get(CU_DEVICE_ATTRIBUTE_INTEGRATED);
    properties->canMapHostMemory = get(CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY);
    properties->surfaceAlignment = get(CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT);
    properties->concurrentKernels = get(CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS);
    properties->pciBusID = get(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID);
    properties->pciDeviceID = get(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID);
    properties->pciDomainID = get(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID);
    properties->asyncEngineCount = get(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);
    properties->unifiedAddressing = get(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
    properties->memoryBusWidth = get(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
    properties->l2CacheSize = get(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
    properties->persistingL2CacheMaxSize = get(CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE);
    properties->accessPolicyMaxWindowSize = get(CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE);
    properties->maxThreadsPerMultiProcessor = get(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
    properties->streamPrioritiesSupported = get(CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED);
    properties->globalL1CacheSupported = get(CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED);
    properties->localL1CacheSupported = get(CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED);
    properties->sharedMemPerMultiprocessor = get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
    properties->regsPerMultiprocessor = get(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR);
    properties->managedMemory = get(CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY);
    properties->concurrentManagedAccess = get(CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS);
    properties->computePreemptionSupported = get(CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED);
    properties->canUseHostPointerForRegisteredMem =
        get(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
    properties->cooperativeLaunch = get(CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH);
    properties->sharedMemPerBlockOptin = get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    properties->maxBlocksPerMultiProcessor = get(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR);
    properties->reservedSharedMemPerBlock = get(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK);
    properties->hostRegisterSupported = get(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED);
    properties->hostRegisterReadOnlySupported = get(CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED);
    properties->memoryPoolsSupported = get(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);
    properties->memoryPoolSupportedHandleTypes =
        static_cast<unsigned>(get(CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES));
    properties->deviceNumaId = get(CU_DEVICE_ATTRIBUTE_NUMA_ID);
    properties->hostNumaId = get(CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID);
    return cudaSuccess;
}

cudaError_t cudaChooseDevice(int *device, const struct cudaDeviceProp *) {
    ENSURE_DRIVER();
    if (device == nullptr) return record_error(cudaErrorInvalidValue);
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetValidDevices(int *, int) {
    ENSURE_DRIVER();
    return cudaSuccess;
}

cudaError_t cudaSetDeviceFlags(unsigned int flags) {
    ENSURE_DRIVER();
    return record_error(
        cu().DevicePrimaryCtxSetFlags(current_device(), flags & ~unsigned{cudaDeviceMapHost}));
}

cudaError_t cudaGetDeviceFlags(unsigned int *flags) {
    ENSURE_CONTEXT();
    if (flags == nullptr) return record_error(cudaErrorInvalidValue);
    int active = 0;
    CUresult status = cu().DevicePrimaryCtxGetState(current_device(), flags, &active);
    *flags |= cudaDeviceMapHost;
    return record_error(status);
}

cudaError_t cudaDeviceSynchronize(void) {
    ENSURE_CONTEXT();
    return record_error(cu().CtxSynchronize());
}

cudaError_t cudaDeviceSetLimit(enum cudaLimit limit, size_t value) {
    ENSURE_CONTEXT();
    return record_error(cu().CtxSetLimit(static_cast<CUlimit>(limit), value));
}

cudaError_t cudaDeviceGetLimit(size_t *value, enum cudaLimit limit) {
    ENSURE_CONTEXT();
    return record_error(cu().CtxGetLimit(value, static_cast<CUlimit>(limit)));
}

cudaError_t cudaDeviceGetCacheConfig(enum cudaFuncCache *preference) {
    ENSURE_CONTEXT();
    if (preference == nullptr) return record_error(cudaErrorInvalidValue);
    CUfunc_cache value = CU_FUNC_CACHE_PREFER_NONE;
    CUresult status = cu().CtxGetCacheConfig(&value);
    *preference = static_cast<cudaFuncCache>(value);
    return record_error(status);
}

cudaError_t cudaDeviceSetCacheConfig(enum cudaFuncCache preference) {
    ENSURE_CONTEXT();
    return record_error(cu().CtxSetCacheConfig(static_cast<CUfunc_cache>(preference)));
}

// The size of shared memory's banks is fixed, as on every device since sm_50: what the application asks for has no effect.
cudaError_t cudaDeviceGetSharedMemConfig(enum cudaSharedMemConfig *config) {
    ENSURE_CONTEXT();
    if (config == nullptr) return record_error(cudaErrorInvalidValue);
    *config = cudaSharedMemBankSizeFourByte;
    return cudaSuccess;
}

cudaError_t cudaDeviceSetSharedMemConfig(enum cudaSharedMemConfig) {
    ENSURE_CONTEXT();
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    ENSURE_CONTEXT();
    return record_error(cu().CtxGetStreamPriorityRange(least, greatest));
}

cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *text) {
    ENSURE_DRIVER();
    return record_error(cu().DeviceGetByPCIBusId(device, text));
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    ENSURE_DRIVER();
    return record_error(cu().DeviceGetPCIBusId(text, length, device));
}

cudaError_t cudaCtxResetPersistingL2Cache(void) {
    ENSURE_CONTEXT();
    return record_error(cu().CtxResetPersistingL2Cache());
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    ENSURE_DRIVER();
    return record_error(cu().DeviceCanAccessPeer(can, device, peer));
}

cudaError_t cudaDeviceGetP2PAttribute(int *value, enum cudaDeviceP2PAttr which, int source, int destination) {
    ENSURE_DRIVER();
    return record_error(
        cu().DeviceGetP2PAttribute(value, static_cast<CUdevice_P2PAttribute>(which), source, destination));
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags) {
    ENSURE_CONTEXT();
    if (!is_device(peer)) return record_error(cudaErrorInvalidDevice);
    CUcontext context = nullptr;
    if (CUresult status = cu().DevicePrimaryCtxRetain(&context, peer)) return record_error(status);
    return record_error(cu().CtxEnablePeerAccess(context, flags));
}

cudaError_t cudaDeviceDisablePeerAccess(int peer) {
    ENSURE_CONTEXT();
    if (!is_device(peer)) return record_error(cudaErrorInvalidDevice);
    CUcontext context = nullptr;
    if (CUresult status = cu().DevicePrimaryCtxRetain(&context, peer)) return record_error(status);
    return record_error(cu().CtxDisablePeerAccess(context));
}

// ---------------------------------------------------------------------------------------------------- memory

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    ENSURE_CONTEXT();
    if (pointer == nullptr) return record_error(cudaErrorInvalidValue);
    if (bytes == 0) {
        *pointer = nullptr;
        return cudaSuccess;
    }
    CUdeviceptr address = 0;
    CUresult status = cu().MemAlloc(&address, bytes);
    if (status == CUDA_SUCCESS) *pointer = reinterpret_cast<void *>(address);
    return record_error(status);
}

cudaError_t cudaFree(void *pointer) {
    ENSURE_CONTEXT();
    if (pointer == nullptr) return cudaSuccess;
    return record_error(cu().MemFree(device_pointer(pointer)));
}

cudaError_t cudaMallocPitch(void **pointer, size_t *pitch, size_t width, size_t height) {
    ENSURE_CONTEXT();
    if (pointer == nullptr || pitch == nullptr) return record_error(cudaErrorInvalidValue);
    if (width == 0 || height == 0) {
        *pointer = nullptr;
        *pitch = 0;
        return cudaSuccess;
    }
    CUdeviceptr address = 0;
    CUresult status = cu().MemAllocPitch(&address, pitch, width, height, 4);
    if (status == CUDA_SUCCESS) *pointer = reinterpret_cast<void *>(address);
    return record_error(status);
}

cudaError_t cudaMalloc3D(struct cudaPitchedPtr *pitched, struct cudaExtent extent) {
    if (pitched == nullptr) return record_error(cudaErrorInvalidValue);
    void *pointer = nullptr;
    size_t pitch = 0;
    if (cudaError_t error = cudaMallocPitch(&pointer, &pitch, extent.width, extent.height * extent.depth))
        return error;
    *pitched = {pointer, pitch, extent.width, extent.height};
    return cudaSuccess;
}

cudaError_t cudaMallocManaged(void **pointer, size_t bytes, unsigned int flags) {
    ENSURE_CONTEXT();
    if (pointer == nullptr || bytes == 0) return record_error(cudaErrorInvalidValue);
    CUdeviceptr address = 0;
    CUresult status = cu().MemAllocManaged(&address, bytes, flags);
    if (status == CUDA_SUCCESS) *pointer = reinterpret_cast<void *>(address);
    return record_error(status);
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned int flags) {
    ENSURE_CONTEXT();
    if (pointer == nullptr) return record_error(cudaErrorInvalidValue);
    if (bytes == 0) {
        *pointer = nullptr;
        return cudaSuccess;
    }
    return record_error(cu().MemHostAlloc(pointer, bytes, flags));
}

cudaError_t cudaMallocHost(void **pointer, size_t bytes) {
    return cudaHostAlloc(pointer, bytes, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void *pointer) {
    ENSURE_CONTEXT();
    if (pointer == nullptr) return cudaSuccess;
    return record_error(cu().MemFreeHost(pointer));
}

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned int flags) {
    ENSURE_CONTEXT();
    return record_error(cu().MemHostRegister(pointer, bytes, flags));
}

cudaError_t cudaHostUnregister(void *pointer) {
    ENSURE_CONTEXT();
    return record_error(cu().MemHostUnregister(pointer));
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned int flags) {
    ENSURE_CONTEXT();
    if (device == nullptr) return record_error(cudaErrorInvalidValue);
    CUdeviceptr address = 0;
    CUresult status = cu().MemHostGetDevicePointer(&address, host, flags);
    if (status == CUDA_SUCCESS) *device = reinterpret_cast<void *>(address);
    return record_error(status);
}

cudaError_t cudaHostGetFlags(unsigned int *flags, void *host) {
    ENSURE_CONTEXT();
    return record_error(cu().MemHostGetFlags(flags, host));
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    ENSURE_CONTEXT();
    return record_error(cu().MemGetInfo(free, total));
}

cudaError_t cudaMemAdvise(const void *pointer, size_t bytes, enum cudaMemoryAdvise advice,
                          struct cudaMemLocation location) {
    ENSURE_CONTEXT();
    return record_error(cu().MemAdvise(device_pointer(pointer), bytes, static_cast<CUmem_advise>(advice),
                                       driver_location(location)));
}

cudaError_t cudaMemRangeGetAttribute(void *data, size_t size, enum cudaMemRangeAttribute which,
                                     const void *pointer, size_t bytes) {
    ENSURE_CONTEXT();
    return record_error(cu().MemRangeGetAttribute(data, size, static_cast<CUmem_range_attribute>(which),
                                                  device_pointer(pointer), bytes));
}

cudaError_t cudaMemRangeGetAttributes(void **data, size_t *sizes, enum cudaMemRangeAttribute *which,
                                      size_t count, const void *pointer, size_t bytes) {
    ENSURE_CONTEXT();
    return record_error(cu().MemRangeGetAttributes(data, sizes,
                                                   reinterpret_cast<CUmem_range_attribute *>(which), count,
                                                   device_pointer(pointer), bytes));
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    ENSURE_CONTEXT();
    if (attributes == nullptr) return record_error(cudaErrorInvalidValue);
    *attributes = {};
    CUdeviceptr address = device_pointer(pointer);
    unsigned type = 0, managed = 0;
    attributes->device = -2;
    if (cu().PointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) != CUDA_SUCCESS) {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->hostPointer = const_cast<void *>(pointer);
        return cudaSuccess;
    }
    cu().PointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, address);
    cu().PointerGetAttribute(&attributes->device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address);
    attributes->type = managed != 0                 ? cudaMemoryTypeManaged
                       : type == CU_MEMORYTYPE_HOST ? cudaMemoryTypeHost
                                                    : cudaMemoryTypeDevice;
    attributes->devicePointer = const_cast<void *>(pointer);
    attributes->hostPointer =
        attributes->type == cudaMemoryTypeDevice ? nullptr : const_cast<void *>(pointer);
    return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    ENSURE_CONTEXT();
    Symbol found;
    if (pointer == nullptr) return record_error(cudaErrorInvalidValue);
    if (cudaError_t error = find_symbol(symbol, found)) return record_error(error);
    *pointer = reinterpret_cast<void *>(found.address);
    return cudaSuccess;
}

cudaError_t cudaGetSymbolSize(size_t *size, const void *symbol) {
    ENSURE_CONTEXT();
    Symbol found;
    if (size == nullptr) return record_error(cudaErrorInvalidValue);
    if (cudaError_t error = find_symbol(symbol, found)) return record_error(error);
    *size = found.size;
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------- pools

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    ENSURE_DRIVER();
    return record_error(cu().DeviceGetDefaultMemPool(pool, device));
}

cudaError_t cudaDeviceGetMemPool(cudaMemPool_t *pool, int device) {
    ENSURE_DRIVER();
    return record_error(cu().DeviceGetMemPool(pool, device));
}

cudaError_t cudaDeviceSetMemPool(int device, cudaMemPool_t pool) {
    ENSURE_DRIVER();
    return record_error(cu().DeviceSetMemPool(device, pool));
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const struct cudaMemPoolProps *properties) {
    ENSURE_DRIVER();
    if (properties == nullptr) return record_error(cudaErrorInvalidValue);
    CUmemPoolProps converted{};
    converted.allocType = static_cast<CUmemAllocationType>(properties->allocType);
    converted.handleTypes = static_cast<CUmemAllocationHandleType>(properties->handleTypes);
    converted.location = driver_location(properties->location);
    converted.maxSize = properties->maxSize;
    return record_error(cu().MemPoolCreate(pool, &converted));
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
    ENSURE_DRIVER();
    return record_error(cu().MemPoolDestroy(pool));
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes) {
    ENSURE_DRIVER();
    return record_error(cu().MemPoolTrimTo(pool, bytes));
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr which, void *value) {
    ENSURE_DRIVER();
    return record_error(cu().MemPoolSetAttribute(pool, static_cast<CUmemPool_attribute>(which), value));
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr which, void *value) {
    ENSURE_DRIVER();
    return record_error(cu().MemPoolGetAttribute(pool, static_cast<CUmemPool_attribute>(which), value));
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *access, size_t count) {
    ENSURE_DRIVER();
    return record_error(
        cu().MemPoolSetAccess(pool, reinterpret_cast<const CUmemAccessDesc *>(access), count));
}

cudaError_t cudaMemPoolGetAccess(enum cudaMemAccessFlags *flags, cudaMemPool_t pool,
                                 struct cudaMemLocation *location) {
    ENSURE_DRIVER();
    return record_error(cu().MemPoolGetAccess(reinterpret_cast<CUmemAccess_flags *>(flags), pool,
                                              reinterpret_cast<CUmemLocation *>(location)));
}

cudaError_t cudaMemPoolExportToShareableHandle(void *handle, cudaMemPool_t pool,
                                               enum cudaMemAllocationHandleType type, unsigned int flags) {
    ENSURE_DRIVER();
    return record_error(cu().MemPoolExportToShareableHandle(
        handle, pool, static_cast<CUmemAllocationHandleType>(type), flags));
}

cudaError_t cudaMemPoolImportFromShareableHandle(cudaMemPool_t *pool, void *handle,
                                                 enum cudaMemAllocationHandleType type, unsigned int flags) {
    ENSURE_DRIVER();
    return record_error(cu().MemPoolImportFromShareableHandle(
        pool, handle, static_cast<CUmemAllocationHandleType>(type), flags));
}

cudaError_t cudaMemPoolExportPointer(struct cudaMemPoolPtrExportData *data, void *pointer) {
    ENSURE_CONTEXT();
    return record_error(
        cu().MemPoolExportPointer(reinterpret_cast<CUmemPoolPtrExportData *>(data), device_pointer(pointer)));
}

cudaError_t cudaMemPoolImportPointer(void **pointer, cudaMemPool_t pool,
                                     struct cudaMemPoolPtrExportData *data) {
    ENSURE_CONTEXT();
    if (pointer == nullptr) return record_error(cudaErrorInvalidValue);
    CUdeviceptr address = 0;
    CUresult status =
        cu().MemPoolImportPointer(&address, pool, reinterpret_cast<CUmemPoolPtrExportData *>(data));
    if (status == CUDA_SUCCESS) *pointer = reinterpret_cast<void *>(address);
    return record_error(status);
}

cudaError_t cudaMemGetDefaultMemPool(cudaMemPool_t *pool, struct cudaMemLocation *location,
                                     enum cudaMemAllocationType type) {
    ENSURE_DRIVER();
    return record_error(cu().MemGetDefaultMemPool(pool, reinterpret_cast<CUmemLocation *>(location),
                                                  static_cast<CUmemAllocationType>(type)));
}

cudaError_t cudaMemGetMemPool(cudaMemPool_t *pool, struct cudaMemLocation *location,
                              enum cudaMemAllocationType type) {
    ENSURE_DRIVER();
    return record_error(cu().MemGetMemPool(pool, reinterpret_cast<CUmemLocation *>(location),
                                           static_cast<CUmemAllocationType>(type)));
}

cudaError_t cudaMemSetMemPool(struct cudaMemLocation *location, enum cudaMemAllocationType type,
                              cudaMemPool_t pool) {
    ENSURE_DRIVER();
    return record_error(cu().MemSetMemPool(reinterpret_cast<CUmemLocation *>(location),
                                           static_cast<CUmemAllocationType>(type), pool));
}

// ---------------------------------------------------------------------------------------------------- streams, events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority) {
    ENSURE_CONTEXT();
    return record_error(cu().StreamCreateWithPriority(stream, flags, priority));
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    ENSURE_CONTEXT();
    return record_error(cu().StreamDestroy(stream));
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    ENSURE_CONTEXT();
    return record_error(cu().ThreadExchangeStreamCaptureMode(reinterpret_cast<CUstreamCaptureMode *>(mode)));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
    ENSURE_CONTEXT();
    return record_error(cu().EventCreate(event, flags));
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
    ENSURE_CONTEXT();
    return record_error(cu().IpcGetMemHandle(reinterpret_cast<CUipcMemHandle *>(handle),
                                             reinterpret_cast<CUdeviceptr>(pointer)));
}

cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned int flags) {
    ENSURE_CONTEXT();
    CUipcMemHandle same;
    static_assert(sizeof same == sizeof handle);
    memcpy(&same, &handle, sizeof same);
    return record_error(cu().IpcOpenMemHandle(reinterpret_cast<CUdeviceptr *>(pointer), same, flags));
}

cudaError_t cudaIpcCloseMemHandle(void *pointer) {
    ENSURE_CONTEXT();
    return record_error(cu().IpcCloseMemHandle(reinterpret_cast<CUdeviceptr>(pointer)));
}

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event) {
    ENSURE_CONTEXT();
    return record_error(cu().IpcGetEventHandle(reinterpret_cast<CUipcEventHandle *>(handle), event));
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) {
    ENSURE_CONTEXT();
    CUipcEventHandle same;
    static_assert(sizeof same == sizeof handle);
    memcpy(&same, &handle, sizeof same);
    return record_error(cu().IpcOpenEventHandle(event, same));
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventQuery(cudaEvent_t event) {
    ENSURE_CONTEXT();
    return record_query(cu().EventQuery(event));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    ENSURE_CONTEXT();
    return record_error(cu().EventSynchronize(event));
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    ENSURE_CONTEXT();
    return record_error(cu().EventDestroy(event));
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    ENSURE_CONTEXT();
    return record_error(cu().EventElapsedTime(milliseconds, start, end));
}

// ---------------------------------------------------------------------------------------------------- kernels

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    ENSURE_CONTEXT();
    if (attributes == nullptr) return record_error(cudaErrorInvalidValue);
    *attributes = {};
    int values[16];
    for (int i = 0; i < 16; i++)
        if (cudaError_t error = function_attribute(function, static_cast<CUfunction_attribute>(i), values[i]))
            return record_error(error);
    attributes->maxThreadsPerBlock = values[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK];
    attributes->sharedSizeBytes = static_cast<size_t>(values[CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES]);
    attributes->constSizeBytes = static_cast<size_t>(values[CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES]);
    attributes->localSizeBytes = static_cast<size_t>(values[CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES]);
    attributes->numRegs = values[CU_FUNC_ATTRIBUTE_NUM_REGS];
    attributes->ptxVersion = values[CU_FUNC_ATTRIBUTE_PTX_VERSION];
    attributes->binaryVersion = values[CU_FUNC_ATTRIBUTE_BINARY_VERSION];
    attributes->cacheModeCA = values[CU_FUNC_ATTRIBUTE_CACHE_MODE_CA];
    attributes->maxDynamicSharedSizeBytes = values[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES];
    attributes->preferredShmemCarveout = values[CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT];
    attributes->clusterDimMustBeSet = values[CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET];
    attributes->requiredClusterWidth = values[CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH];
    attributes->requiredClusterHeight = values[CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT];
    attributes->requiredClusterDepth = values[CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH];
    attributes->clusterSchedulingPolicyPreference =
        values[CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE];
    attributes->nonPortableClusterSizeAllowed = values[CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED];
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute which, int value) {
    ENSURE_CONTEXT();
    CUkernel kernel = nullptr;
    if (cudaError_t error = find_kernel(function, kernel)) return record_error(error);
    return record_error(
        cu().KernelSetAttribute(static_cast<CUfunction_attribute>(which), value, kernel, current_device()));
}

cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute which, int value,
                                            int device) {
    ENSURE_CONTEXT();
    CUkernel found = nullptr;
    if (cudaError_t error = find_kernel(kernel, found)) return record_error(error);
    return record_error(
        cu().KernelSetAttribute(static_cast<CUfunction_attribute>(which), value, found, device));
}

cudaError_t cudaFuncSetCacheConfig(const void *function, enum cudaFuncCache preference) {
    ENSURE_CONTEXT();
    CUkernel kernel = nullptr;
    if (cudaError_t error = find_kernel(function, kernel)) return record_error(error);
    return record_error(
        cu().KernelSetCacheConfig(kernel, static_cast<CUfunc_cache>(preference), current_device()));
}

cudaError_t cudaFuncSetSharedMemConfig(const void *function, enum cudaSharedMemConfig) {
    ENSURE_CONTEXT();
    CUkernel kernel = nullptr;
    return record_error(find_kernel(function, kernel));
}

cudaError_t cudaFuncGetName(const char **name, const void *function) {
    ENSURE_CONTEXT();
    CUkernel kernel = nullptr;
    if (cudaError_t error = find_kernel(function, kernel)) return record_error(error);
    return record_error(cu().KernelGetName(name, kernel));
}

cudaError_t cudaFuncGetParamInfo(const void *function, size_t index, size_t *offset, size_t *size) {
    ENSURE_CONTEXT();
    CUkernel kernel = nullptr;
    if (cudaError_t error = find_kernel(function, kernel)) return record_error(error);
    return record_error(cu().KernelGetParamInfo(kernel, index, offset, size));
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function,
                                                                   int block, size_t shared,
                                                                   unsigned int flags) {
    ENSURE_CONTEXT();
    CUkernel kernel = nullptr;
    if (cudaError_t error = find_kernel(function, kernel)) return record_error(error);
    CUfunction loaded = nullptr;
    if (CUresult status = cu().KernelGetFunction(&loaded, kernel)) return record_error(status);
    return record_error(
        cu().OccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, loaded, block, shared, flags));
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int block,
                                                          size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block, shared, 0);
}

cudaError_t cudaOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, const void *function, int blocks,
                                                      int block) {
    ENSURE_CONTEXT();
    CUkernel kernel = nullptr;
    if (cudaError_t error = find_kernel(function, kernel)) return record_error(error);
    CUfunction loaded = nullptr;
    if (CUresult status = cu().KernelGetFunction(&loaded, kernel)) return record_error(status);
    return record_error(cu().OccupancyAvailableDynamicSMemPerBlock(bytes, loaded, blocks, block));
}

// ---------------------------------------------------------------------------------------------------- libraries

// The runtime's options have the same numbers as the driver's (driver_types.h, cuda.h).
cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *jit,
                                void **jit_values, unsigned int jits, enum cudaLibraryOption *options,
                                void **values, unsigned int count) {
    ENSURE_CONTEXT();
    return record_error(cu().LibraryLoadData(reinterpret_cast<CUlibrary *>(library), code,
                                             reinterpret_cast<CUjit_option *>(jit), jit_values, jits,
                                             reinterpret_cast<CUlibraryOption *>(options), values, count));
}

cudaError_t cudaLibraryLoadFromFile(cudaLibrary_t *library, const char *path, enum cudaJitOption *jit,
                                    void **jit_values, unsigned int jits, enum cudaLibraryOption *options,
                                    void **values, unsigned int count) {
    ENSURE_CONTEXT();
    return record_error(cu().LibraryLoadFromFile(
        reinterpret_cast<CUlibrary *>(library), path, reinterpret_cast<CUjit_option *>(jit), jit_values, jits,
        reinterpret_cast<CUlibraryOption *>(options), values, count));
}

cudaError_t cudaLibraryUnload(cudaLibrary_t library) {
    ENSURE_CONTEXT();
    return record_error(cu().LibraryUnload(reinterpret_cast<CUlibrary>(library)));
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
    ENSURE_CONTEXT();
    return record_error(cu().LibraryGetKernel(reinterpret_cast<CUkernel *>(kernel),
                                              reinterpret_cast<CUlibrary>(library), name));
}

cudaError_t cudaLibraryGetGlobal(void **pointer, size_t *bytes, cudaLibrary_t library, const char *name) {
    ENSURE_CONTEXT();
    return record_error(cu().LibraryGetGlobal(reinterpret_cast<CUdeviceptr *>(pointer), bytes,
                                              reinterpret_cast<CUlibrary>(library), name));
}

cudaError_t cudaLibraryGetManaged(void **pointer, size_t *bytes, cudaLibrary_t library, const char *name) {
    ENSURE_CONTEXT();
    return record_error(cu().LibraryGetManaged(reinterpret_cast<CUdeviceptr *>(pointer), bytes,
                                               reinterpret_cast<CUlibrary>(library), name));
}

cudaError_t cudaLibraryGetKernelCount(unsigned int *count, cudaLibrary_t library) {
    ENSURE_CONTEXT();
    return record_error(cu().LibraryGetKernelCount(count, reinterpret_cast<CUlibrary>(library)));
}

cudaError_t cudaLibraryEnumerateKernels(cudaKernel_t *kernels, unsigned int count, cudaLibrary_t library) {
    ENSURE_CONTEXT();
    return record_error(cu().LibraryEnumerateKernels(reinterpret_cast<CUkernel *>(kernels), count,
                                                     reinterpret_cast<CUlibrary>(library)));
}

struct cudaChannelFormatDesc cudaCreateChannelDesc(int x, int y, int z, int w,
                                                   enum cudaChannelFormatKind kind) {
    return {x, y, z, w, kind};
}

cudaError_t cudaGetExportTable(const void **table, const cudaUUID_t *) {
    if (table != nullptr) *table = nullptr;
    return record_error(cudaErrorNotSupported);
}

cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

}  // extern "C"

// The runtime, on top of the driver. It uses the driver as any program does: it loads libcuda.so.1 and gets the public
// functions from cuGetProcAddress.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <mutex>
#include <string>
#include <vector>

namespace cudasim::runtime {

// The driver functions that the runtime uses, with the CUDA version of each one's interface.
// clang-format off
#define CUDASIM_DRIVER_FUNCTIONS(X)                                                                                 \
    X(Init, 12030) X(DriverGetVersion, 12030) X(GetErrorName, 12030) X(GetErrorString, 12030)                        \
    X(DeviceGet, 12030) X(DeviceGetCount, 12030) X(DeviceGetName, 12030) X(DeviceGetUuid, 12030)                     \
    X(DeviceTotalMem, 12030) X(DeviceGetAttribute, 12030) X(DeviceGetPCIBusId, 12030)                                \
    X(DeviceGetByPCIBusId, 12030) X(DeviceCanAccessPeer, 12030) X(DeviceGetP2PAttribute, 12030)                      \
    X(DevicePrimaryCtxRetain, 12030) X(DevicePrimaryCtxReset, 12030) X(DevicePrimaryCtxSetFlags, 12030)              \
    X(DevicePrimaryCtxGetState, 12030) X(DeviceGetDefaultMemPool, 12030) X(DeviceGetMemPool, 12030)                  \
    X(DeviceSetMemPool, 12030) X(CtxGetCurrent, 12030) X(CtxSetCurrent, 12030) X(CtxGetDevice, 12030)                \
    X(CtxSynchronize, 12030) X(CtxGetLimit, 12030) X(CtxSetLimit, 12030) X(CtxGetCacheConfig, 12030)                 \
    X(CtxSetCacheConfig, 12030) X(CtxGetStreamPriorityRange, 12030) X(CtxResetPersistingL2Cache, 12030)              \
    X(CtxEnablePeerAccess, 12030) X(CtxDisablePeerAccess, 12030)                                                     \
    X(LibraryLoadData, 12030) X(LibraryLoadFromFile, 12030) X(LibraryUnload, 12030) X(LibraryGetKernel, 12030)       \
    X(LibraryGetGlobal, 12030) X(LibraryGetManaged, 12030) X(LibraryGetKernelCount, 12040)                           \
    X(LibraryEnumerateKernels, 12040) X(KernelGetFunction, 12030) X(KernelGetAttribute, 12030)                       \
    X(KernelSetAttribute, 12030) X(KernelSetCacheConfig, 12030) X(KernelGetName, 12030)                              \
    X(KernelGetParamInfo, 12040) X(FuncGetName, 12030)                                                               \
    X(OccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 12030)                                                     \
    X(OccupancyMaxActiveClusters, 12030) X(OccupancyMaxPotentialClusterSize, 12030)                                  \
    X(OccupancyAvailableDynamicSMemPerBlock, 12030) X(MemAlloc, 12030) X(MemAllocPitch, 12030) X(MemFree, 12030)     \
    X(MemHostAlloc, 12030) X(MemFreeHost, 12030) X(MemHostRegister, 12030) X(MemHostUnregister, 12030)               \
    X(MemHostGetDevicePointer, 12030) X(MemHostGetFlags, 12030) X(MemAllocManaged, 12030) X(MemGetInfo, 12030)       \
    X(MemAdvise, 12030) X(MemPrefetchAsync, 12030) X(MemRangeGetAttribute, 12030) X(MemAllocAsync, 12030)            \
    X(MemFreeAsync, 12030) X(MemAllocFromPoolAsync, 12030) X(MemPoolCreate, 12030) X(MemPoolDestroy, 12030)          \
    X(MemPoolTrimTo, 12030) X(MemPoolSetAttribute, 12030) X(MemPoolGetAttribute, 12030) X(MemPoolSetAccess, 12030)   \
    X(MemPoolGetAccess, 12030) X(PointerGetAttribute, 12030) X(PointerGetAttributes, 12030) X(Memcpy, 12030)         \
    X(MemcpyAsync, 12030) X(MemcpyHtoD, 12030) X(MemcpyDtoH, 12030) X(MemcpyDtoD, 12030) X(MemcpyHtoDAsync, 12030)   \
    X(MemcpyDtoHAsync, 12030) X(MemcpyDtoDAsync, 12030) X(Memcpy3D, 12030) X(Memcpy3DAsync, 12030)                   \
    X(MemsetD8, 12030) X(MemsetD8Async, 12030) X(MemsetD2D8, 12030) X(MemsetD2D8Async, 12030)                        \
    X(StreamCreateWithPriority, 12030) X(StreamDestroy, 12030) X(StreamQuery, 12030) X(StreamSynchronize, 12030)     \
    X(StreamWaitEvent, 12030) X(StreamAddCallback, 12030) X(StreamGetPriority, 12030) X(StreamGetFlags, 12030)       \
    X(StreamGetId, 12030) X(StreamGetCtx, 12030) X(StreamAttachMemAsync, 12030) X(StreamCopyAttributes, 12030)       \
    X(StreamGetAttribute, 12030) X(StreamSetAttribute, 12030) X(StreamBeginCapture, 12030)                           \
    X(StreamBeginCaptureToGraph, 12030) X(StreamEndCapture, 12030) X(StreamIsCapturing, 12030)                       \
    X(StreamGetCaptureInfo, 12030) X(StreamUpdateCaptureDependencies, 12030)                                         \
    X(ThreadExchangeStreamCaptureMode, 12030) X(EventCreate, 12030) X(EventDestroy, 12030) X(EventQuery, 12030)      \
    X(IpcGetMemHandle, 12030) X(IpcOpenMemHandle, 12030) X(IpcCloseMemHandle, 12030)                                 \
    X(IpcGetEventHandle, 12030) X(IpcOpenEventHandle, 12030)                                                         \
    X(EventSynchronize, 12030) X(EventElapsedTime, 12030) X(EventRecordWithFlags, 12030) X(LaunchKernel, 12030)      \
    X(LaunchKernelEx, 12030) X(LaunchCooperativeKernel, 12030) X(LaunchHostFunc, 12030) X(GraphCreate, 12030)        \
    X(GraphDestroy, 12030) X(GraphClone, 12030) X(GraphNodeFindInClone, 12030) X(GraphGetNodes, 12030)               \
    X(GraphGetRootNodes, 12030) X(GraphGetEdges, 12030) X(GraphNodeGetDependencies, 12030)                           \
    X(GraphNodeGetDependentNodes, 12030) X(GraphAddDependencies, 12030) X(GraphRemoveDependencies, 12030)            \
    X(GraphDestroyNode, 12030) X(GraphNodeGetType, 12030) X(GraphDebugDotPrint, 12030)                               \
    X(GraphAddKernelNode, 12030) X(GraphKernelNodeGetParams, 12030) X(GraphKernelNodeSetParams, 12030)               \
    X(GraphExecKernelNodeSetParams, 12030) X(GraphKernelNodeGetAttribute, 12030)                                     \
    X(GraphKernelNodeSetAttribute, 12030) X(GraphKernelNodeCopyAttributes, 12030) X(GraphAddMemcpyNode, 12030)       \
    X(GraphAddMemsetNode, 12030) X(GraphMemsetNodeGetParams, 12030) X(GraphMemsetNodeSetParams, 12030)               \
    X(GraphExecMemsetNodeSetParams, 12030) X(GraphExecMemcpyNodeSetParams, 12030)                                    \
    X(GraphMemcpyNodeSetParams, 12030) X(GraphAddHostNode, 12030) X(GraphHostNodeGetParams, 12030)                   \
    X(GraphHostNodeSetParams, 12030) X(GraphExecHostNodeSetParams, 12030) X(GraphAddEmptyNode, 12030)                \
    X(GraphAddChildGraphNode, 12030) X(GraphChildGraphNodeGetGraph, 12030) X(GraphAddEventRecordNode, 12030)         \
    X(GraphAddEventWaitNode, 12030) X(GraphInstantiateWithFlags, 12030) X(GraphInstantiateWithParams, 12030)         \
    X(GraphExecDestroy, 12030) X(GraphExecGetFlags, 12030) X(GraphExecUpdate, 12030) X(GraphNodeSetEnabled, 12030)   \
    X(GraphNodeGetEnabled, 12030) X(GraphUpload, 12030) X(GraphLaunch, 12030)                                        \
    X(GraphConditionalHandleCreate, 12030) X(GraphAddNode, 12030) X(GraphNodeSetParams, 12030) X(GraphExecNodeSetParams, 12030)                             \
    X(GraphMemcpyNodeGetParams, 12030) X(GraphExecChildGraphNodeSetParams, 12030)                                    \
    X(GraphEventRecordNodeGetEvent, 12030) X(GraphEventRecordNodeSetEvent, 12030)                                    \
    X(GraphExecEventRecordNodeSetEvent, 12030) X(GraphEventWaitNodeGetEvent, 12030)                                  \
    X(GraphEventWaitNodeSetEvent, 12030) X(GraphExecEventWaitNodeSetEvent, 12030) X(GraphAddMemAllocNode, 12030)     \
    X(GraphMemAllocNodeGetParams, 12030) X(GraphAddMemFreeNode, 12030) X(GraphMemFreeNodeGetParams, 12030)           \
    X(DeviceGraphMemTrim, 12030) X(UserObjectCreate, 12030) X(UserObjectRetain, 12030) X(UserObjectRelease, 12030)   \
    X(GraphRetainUserObject, 12030) X(GraphReleaseUserObject, 12030)                                                 \
    X(Array3DCreate, 12030) X(Array3DGetDescriptor, 12030) X(ArrayDestroy, 12030)                                    \
    X(ArrayGetMemoryRequirements, 12030) X(MipmappedArrayCreate, 12030) X(MipmappedArrayGetLevel, 12030)             \
    X(MipmappedArrayDestroy, 12030) X(TexObjectCreate, 12030) X(TexObjectDestroy, 12030)                             \
    X(TexObjectGetResourceDesc, 12030) X(TexObjectGetTextureDesc, 12030) X(TexObjectGetResourceViewDesc, 12030)      \
    X(SurfObjectCreate, 12030) X(SurfObjectDestroy, 12030) X(SurfObjectGetResourceDesc, 12030)                       \
    X(DeviceGetTexture1DLinearMaxWidth, 12030) X(DeviceGetGraphMemAttribute, 12030)                                  \
    X(DeviceSetGraphMemAttribute, 12030) X(MemPoolExportToShareableHandle, 12030)                                    \
    X(MemPoolImportFromShareableHandle, 12030) X(MemPoolExportPointer, 12030) X(MemPoolImportPointer, 12030)         \
    X(MemGetDefaultMemPool, 13000) X(MemGetMemPool, 13000) X(MemSetMemPool, 13000)                                   \
    X(MemRangeGetAttributes, 12030)
// clang-format on

struct Driver {
    CUresult (*GetProcAddress)(const char *, void **, int, cuuint64_t,
                               CUdriverProcAddressQueryResult *) = nullptr;
#define X(name, version) decltype(&cu##name) name = nullptr;
    CUDASIM_DRIVER_FUNCTIONS(X)
#undef X
};

// Returns the driver's functions for the legacy default stream, or for one default stream per thread. They are null without
// a driver.
const Driver &driver(bool per_thread);

// The driver's functions for the default stream that this file is compiled for.
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
constexpr bool kPerThread = true;
#else
constexpr bool kPerThread = false;
#endif
[[maybe_unused]] static const Driver &cu() { return driver(kPerThread); }

// Initialises the driver if necessary.
cudaError_t ensure_driver();
// Initialises the driver and makes a context current, if necessary. Almost every call begins with this.
cudaError_t ensure_context();

#define ENSURE_DRIVER() \
    if (cudaError_t error = ensure_driver()) return record_error(error)
#define ENSURE_CONTEXT() \
    if (cudaError_t error = ensure_context()) return record_error(error)

// Records an error for cudaGetLastError, and returns it.
cudaError_t record_error(cudaError_t error);
cudaError_t record_error(CUresult status);
// The same for queries of events and streams: "not ready" is not an error (CUDA programming guide, "Error Checking").
cudaError_t record_query(CUresult status);

int &current_device();

// Finds the kernel of a host function. A cudaKernel_t is returned as it is.
cudaError_t find_kernel(const void *host_function, CUkernel &kernel);
// Returns the host function of a CUfunction. A CUfunction that no host function stands for is returned as it is.
const void *host_function_of(CUfunction function);

struct Symbol {
    CUdeviceptr address = 0;
    size_t size = 0;
};
// Finds the device variable of a host variable.
cudaError_t find_symbol(const void *host_variable, Symbol &symbol);
// Finds the address of `bytes` bytes at `offset` in a device variable. Fails if the variable is smaller.
cudaError_t find_symbol_range(const void *host_variable, size_t bytes, size_t offset, void *&pointer);

// Returns whether a device can run this launch configuration.
bool valid_configuration(dim3 grid, dim3 block);

inline CUdeviceptr device_pointer(const void *pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

inline CUmemLocation driver_location(const cudaMemLocation &location) {
    CUmemLocation result{};
    result.type = static_cast<CUmemLocationType>(location.type);
    result.id = location.id;
    return result;
}

cudaError_t describe_copy(const cudaMemcpy3DParms &parameters, CUDA_MEMCPY3D &described);
// Describes a copy as cudaMemcpy3D's parameters.
cudaError_t describe_parameters(const CUDA_MEMCPY3D &described, cudaMemcpy3DParms &parameters);
// Finds the size of an array, and the bytes of its elements. Null is an error.
cudaError_t find_array(cudaArray_const_t array, CUDA_ARRAY3D_DESCRIPTOR &described, size_t &element);

}  // namespace cudasim::runtime

// The driver's functions. Hooked ones are called through their originals, all others by name. A function that
// an older driver lacks is null.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda.h>

#include "thread.h"

namespace gpubpf {

// For the embedded device: the first fault of a context (cudasim/src/driver/context_api.cpp).
struct cudasim_fault_report {
    int32_t error;  // CUresult
    uint32_t line, block[3], thread[3];
    uint64_t address;  // 0: not a memory access
    const char *kernel, *file;
};

// name, parameters. Names are those of the exported symbols.
// clang-format off
#define GPUBPF_DRIVER_FUNCTIONS(F)                                                                                        \
  F(cuGetProcAddress_v2, const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *)                        \
  F(cuDriverGetVersion, int *)                                                                                            \
  F(cuCtxGetCurrent, CUcontext *)                                                                                         \
  F(cuCtxPushCurrent_v2, CUcontext)                                                                                       \
  F(cuCtxPopCurrent_v2, CUcontext *)                                                                                      \
  F(cuCtxGetDevice, CUdevice *)                                                                                           \
  F(cuCtxGetDevice_v2, CUdevice *, CUcontext)                                                                             \
  F(cuCtxFromGreenCtx, CUcontext *, CUgreenCtx)                                                                           \
  F(cuDevicePrimaryCtxGetState, CUdevice, unsigned *, int *)                                                              \
  F(cuCtxSynchronize, void)                                                                                               \
  F(cuDeviceGetAttribute, int *, CUdevice_attribute, CUdevice)                                                            \
  F(cuMemAlloc_v2, CUdeviceptr *, size_t)                                                                                 \
  F(cuMemFree_v2, CUdeviceptr)                                                                                            \
  F(cuMemGetInfo_v2, size_t *, size_t *)                                                                                  \
  F(cuModuleUnload, CUmodule)                                                                                             \
  F(cuModuleGetLoadingMode, CUmoduleLoadingMode *)                                                                        \
  F(cuMemsetD8Async, CUdeviceptr, unsigned char, size_t, CUstream)                                                        \
  F(cuMemcpyHtoDAsync_v2, CUdeviceptr, const void *, size_t, CUstream)                                                    \
  F(cuMemcpyDtoHAsync_v2, void *, CUdeviceptr, size_t, CUstream)                                                          \
  F(cuMemcpyDtoDAsync_v2, CUdeviceptr, CUdeviceptr, size_t, CUstream)                                                     \
  F(cuMemcpy2DAsync_v2, const CUDA_MEMCPY2D *, CUstream)                                                                  \
  F(cuMemHostRegister_v2, void *, size_t, unsigned)                                                                       \
  F(cuMemHostUnregister, void *)                                                                                          \
  F(cuMemHostGetDevicePointer_v2, CUdeviceptr *, void *, unsigned)                                                        \
  F(cuStreamCreate, CUstream *, unsigned)                                                                                 \
  F(cuStreamDestroy_v2, CUstream)                                                                                         \
  F(cuStreamQuery, CUstream)                                                                                              \
  F(cuStreamGetCtx, CUstream, CUcontext *)                                                                                \
  F(cuStreamGetCtx_v2, CUstream, CUcontext *, CUgreenCtx *)                                                               \
  F(cuStreamGetFlags, CUstream, unsigned *)                                                                               \
  F(cuStreamGetPriority, CUstream, int *)                                                                                 \
  F(cuStreamIsCapturing, CUstream, CUstreamCaptureStatus *)                                                               \
  F(cuThreadExchangeStreamCaptureMode, CUstreamCaptureMode *)                                                             \
  F(cuEventCreate, CUevent *, unsigned)                                                                                   \
  F(cuEventDestroy_v2, CUevent)                                                                                           \
  F(cuEventRecord, CUevent, CUstream)                                                                                     \
  F(cuEventQuery, CUevent)                                                                                                \
  F(cuEventElapsedTime, float *, CUevent, CUevent)                                                                        \
  F(cuStreamWaitEvent, CUstream, CUevent, unsigned)                                                                       \
  F(cuStreamWriteValue64_v2, CUstream, CUdeviceptr, cuuint64_t, unsigned)                                                 \
  F(cuMemsetD32Async, CUdeviceptr, unsigned, size_t, CUstream)                                                            \
  F(cuGraphGetNodes, CUgraph, CUgraphNode *, size_t *)                                                                    \
  F(cuGraphGetEdges_v2, CUgraph, CUgraphNode *, CUgraphNode *, CUgraphEdgeData *, size_t *)                               \
  F(cuGraphNodeGetType, CUgraphNode, CUgraphNodeType *)                                                                   \
  F(cuGraphChildGraphNodeGetGraph, CUgraphNode, CUgraph *)                                                                \
  F(cuGraphKernelNodeGetParams_v2, CUgraphNode, CUDA_KERNEL_NODE_PARAMS *)                                                \
  F(cuGraphKernelNodeSetParams_v2, CUgraphNode, const CUDA_KERNEL_NODE_PARAMS *)                                          \
  F(cuGraphKernelNodeGetAttribute, CUgraphNode, CUkernelNodeAttrID, CUkernelNodeAttrValue *)                              \
  F(cuGraphClone, CUgraph *, CUgraph)                                                                                     \
  F(cuGraphNodeFindInClone, CUgraphNode *, CUgraphNode, CUgraph)                                                          \
  F(cuGraphDestroy, CUgraph)                                                                                              \
  F(cuGraphExecUpdate_v2, CUgraphExec, CUgraph, CUgraphExecUpdateResultInfo *)                                            \
  F(cuGraphExecKernelNodeSetParams_v2, CUgraphExec, CUgraphNode, const CUDA_KERNEL_NODE_PARAMS *)                         \
  F(cuGraphExecChildGraphNodeSetParams, CUgraphExec, CUgraphNode, CUgraph)                                                \
  F(cuMemGetAddressRange_v2, CUdeviceptr *, size_t *, CUdeviceptr)                                                        \
  F(cuPointerGetAttribute, void *, CUpointer_attribute, CUdeviceptr)                                                      \
  F(cudasim_event_time, CUevent, uint64_t *)                                                                              \
  F(cudasim_fault, CUcontext, cudasim_fault_report *)                                                                     \
  F(cudasim_fault_in_patch, CUcontext, uint64_t *)                                                                        \
  F(cudasim_is_copy_of, CUfunction, CUfunction)                                                                           \
  F(cuModuleGetGlobal_v2, CUdeviceptr *, size_t *, CUmodule, const char *)                                                \
  F(cuLibraryGetGlobal, CUdeviceptr *, size_t *, CUlibrary, const char *)                                                 \
  F(cuLibraryGetManaged, CUdeviceptr *, size_t *, CUlibrary, const char *)                                                \
  F(cuFuncGetName, const char **, CUfunction)                                                                             \
  F(cuKernelGetName, const char **, CUkernel)                                                                             \
  F(cuFuncGetModule, CUmodule *, CUfunction)                                                                              \
  F(cuFuncGetParamInfo, CUfunction, size_t, size_t *, size_t *)                                                           \
  F(cuFuncGetAttribute, int *, CUfunction_attribute, CUfunction)                                                          \
  F(cuKernelGetLibrary, CUlibrary *, CUkernel)                                                                            \
  F(cuModuleGetFunctionCount, unsigned *, CUmodule)                                                                       \
  F(cuLibraryGetKernelCount, unsigned *, CUlibrary)                                                                       \
  F(cuFuncLoad, CUfunction)                                                                                               \
  F(cuOccupancyMaxActiveBlocksPerMultiprocessor, int *, CUfunction, int, size_t)                                          \
  F(cuOccupancyMaxActiveClusters, int *, CUfunction, const CUlaunchConfig *)
// clang-format on

struct Driver {
#define GPUBPF_DECLARE(name, ...) CUresult (*name)(__VA_ARGS__) = nullptr;
    GPUBPF_DRIVER_FUNCTIONS(GPUBPF_DECLARE)
#undef GPUBPF_DECLARE
    // For the embedded device: the thread's calls take no virtual time until 0 is passed. Calls nest.
    void (*cudasim_untimed)(int) = nullptr;
    // Looks up the functions in the loaded libcuda. Returns false if an indispensable one is missing.
    bool find(void *library);
};

extern Driver driver;

// For the agent's own driver calls. The thread may make calls that a capture elsewhere forbids
// (cuThreadExchangeStreamCaptureMode), and hooks that these calls reach count nothing.
class DriverScope {
  public:
    DriverScope();
    ~DriverScope();
    DriverScope(const DriverScope &) = delete;
    DriverScope &operator=(const DriverScope &) = delete;

  private:
    CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
    bool exchanged_ = false;
};

// For a single query that changes nothing.
class Untimed {
  public:
    Untimed();
    ~Untimed();
    Untimed(const Untimed &) = delete;
    Untimed &operator=(const Untimed &) = delete;
};

}  // namespace gpubpf

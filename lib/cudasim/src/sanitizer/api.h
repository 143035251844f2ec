// What the stand-in for NVIDIA's Compute Sanitizer API has in common with it: numbers and structures of sanitizer.h (13.5). NVIDIA's
// headers may not be part of this project; tests/cudasim/test_sanitizer.py compares these with them.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

namespace cudasim::sanitizer {

enum Result : uint32_t {
    kSuccess = 0,
    kInvalidParameter = 1,
    kInvalidDevice = 2,
    kInvalidContext = 3,
    kInvalidDomain = 4,
    kInvalidCallback = 5,
    kInvalidOperation = 6,
    kOutOfMemory = 7,
    kNotImplemented = 9,
    kMaxLimitReached = 10,
    kNotReady = 11,
    kNotCompatible = 12,
    kNotInitialized = 13,
    kNotSupported = 14,
    kNotInDeviceMemory = 15,
    kUnknown = 999,
};

enum Domain : uint32_t {
    kResource = 3,
    kSynchronize = 4,
    kLaunch = 5,
    kGraphs = 10,
    kDomains = 14,
};

enum ResourceCallback : uint32_t {
    kInitFinished = 1,
    kContextCreationStarting = 2,
    kContextCreationFinished = 3,
    kContextDestroyStarting = 4,
    kContextDestroyFinished = 5,
    kStreamCreated = 6,
    kStreamDestroyStarting = 7,
    kStreamDestroyFinished = 8,
    kModuleLoaded = 9,
    kModuleUnloadStarting = 10,
    kFunctionsLazyLoaded = 24,
    kFunctionsLazyPatched = 25,
};
enum SynchronizeCallback : uint32_t { kStreamSynchronized = 1, kContextSynchronized = 2 };
enum LaunchCallback : uint32_t { kLaunchBegin = 1, kLaunchAfterSyscallSetup = 2, kLaunchEnd = 3 };
enum GraphsCallback : uint32_t {
    kGraphExecCreating = 1,
    kGraphExecCreated = 2,
    kGraphExecDestroying = 3,
    kNodeLaunchBegin = 4,
    kNodeLaunchEnd = 5,
    kGraphLaunchBegin = 6,
    kGraphLaunchEnd = 7,
};
constexpr uint32_t kCallbacks = 64;  // more than any domain has here

using SubscriberHandle = struct Subscriber_st *;
using LaunchHandle = struct Launch_st *;
using StreamHandle = struct Stream_st *;
using CallbackFunction = void (*)(void *userdata, uint32_t domain, uint32_t callback, const void *data);

struct ResourceContextData {
    CUcontext context;
    CUgreenCtx greenContext;
    CUdevice device;
};

struct ResourceStreamData {
    CUcontext context;
    CUgreenCtx greenContext;
    CUstream stream;
    StreamHandle hStream;
};

struct ResourceModuleData {
    CUcontext context;
    CUmodule module;
    size_t cubinSize;
    const char *pCubin;
    CUlibrary library;
};

struct ResourceFunctionsLazyLoadedData {
    CUcontext context;
    CUmodule module;
    const CUfunction *functions;
    uint32_t numFunctions;
};

struct SynchronizeData {
    CUcontext context;
    CUstream stream;
    StreamHandle hStream;
    CUgreenCtx greenContext;
};

struct LaunchData {
    CUcontext context;
    CUstream stream;
    StreamHandle hStream;
    CUmodule module;
    CUfunction function;
    const char *functionName;
    uint32_t gridDim_x, gridDim_y, gridDim_z;
    uint32_t blockDim_x, blockDim_y, blockDim_z;
    uint32_t clusterDim_x, clusterDim_y, clusterDim_z;
    uint64_t gridId;
    LaunchHandle hLaunch;
    CUdevice device;
    CUcontext apiContext;
    CUstream apiStream;
    StreamHandle hApiStream;
    uint32_t splitLaunchPart;
};

struct GraphExecData {
    CUgraph graph;
    CUgraphExec graphExec;
    uint32_t isDeviceLaunch;
    uint32_t containsDeviceGraphLaunches;
    CUcontext deviceGraphLaunchesContext;
};

struct GraphNodeLaunchData {
    CUgraphExec graphExec;
    uint32_t launchId;
    CUgraphNode node;
    CUgraphNodeType nodeType;
    union {
        LaunchData launchData;  // of other nodes than kernels: nothing is filled in
    };
    uint32_t isGraphUpload;
};

struct GraphLaunchData {
    CUcontext context;
    CUstream stream;
    StreamHandle hStream;
    CUgraphExec graphExec;
    uint32_t isGraphUpload;
};

}  // namespace cudasim::sanitizer

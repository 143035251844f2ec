// What the agent uses of NVIDIA's Compute Sanitizer API: sanitizer_callbacks.h, sanitizer_patching.h and sanitizer_result.h. NVIDIA's
// headers may not be part of this project; tests/gpubpf/agent/test_sanitizer_api.py compares this file with them.
#pragma once

#include <cstdint>
#include <cuda.h>

namespace gpubpf::sanitizer {

enum Result { kSuccess = 0, kMaxLimitReached = 10, kNotInitialized = 13 };
constexpr uint32_t kResourceDomain = 3, kLaunchDomain = 5, kGraphsDomain = 10;
constexpr uint32_t kLaunchBegin = 1, kNodeLaunchBegin = 4;  // callbacks
using LaunchHandle = struct Launch_st *;
using StreamHandle = struct Stream_st *;
using Subscriber = struct SubscriberHandle *;
using Callback = void (*)(void *, uint32_t, uint32_t, const void *);

struct LaunchData {  // Sanitizer_LaunchData, the fields that are in all versions
    CUcontext context;
    CUstream stream;
    StreamHandle hStream;
    CUmodule module;
    CUfunction function;
    const char *functionName;
    uint32_t gridDim[3], blockDim[3], clusterDim[3];
    uint64_t gridId;
    LaunchHandle hLaunch;
};
struct GraphNodeLaunchData {  // Sanitizer_GraphNodeLaunchData, likewise
    CUgraphExec graphExec;
    uint32_t launchId;
    CUgraphNode node;
    CUgraphNodeType nodeType;
    LaunchData launchData;
};

struct Functions {
    int (*Subscribe)(Subscriber *, Callback, void *);
    int (*Unsubscribe)(Subscriber);
    int (*EnableDomain)(uint32_t, Subscriber, uint32_t);
    int (*EnableCallback)(uint32_t, Subscriber, uint32_t, uint32_t);
    int (*SetLaunchCallbackData)(LaunchHandle, CUfunction, StreamHandle, const void *);
    int (*AddPatches)(const void *, CUcontext);
    int (*PatchInstructions)(uint32_t, CUmodule, const char *);
    int (*PatchModule)(CUmodule);
    int (*UnpatchModule)(CUmodule);
    int (*GetFunctionPcAndSize)(CUmodule, const char *, uint64_t *, uint64_t *);
    int (*GetCallbackPcAndSize)(CUcontext, const char *, uint64_t *, uint64_t *);
};

}  // namespace gpubpf::sanitizer

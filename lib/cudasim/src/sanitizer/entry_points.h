// The functions of NVIDIA's Compute Sanitizer API that the stand-in has, without the prefix `sanitizer`.
#pragma once

#include "sanitizer/api.h"

// X(name, parameters, arguments)
#define SANITIZER_ENTRY_POINTS(X)                                                                          \
    X(Subscribe, (SubscriberHandle * handle, CallbackFunction function, void *userdata),                   \
      (handle, function, userdata))                                                                        \
    X(Unsubscribe, (SubscriberHandle handle), (handle))                                                    \
    X(GetCallbackState, (uint32_t *enabled, SubscriberHandle handle, uint32_t domain, uint32_t callback),  \
      (enabled, handle, domain, callback))                                                                 \
    X(EnableCallback, (uint32_t enable, SubscriberHandle handle, uint32_t domain, uint32_t callback),      \
      (enable, handle, domain, callback))                                                                  \
    X(EnableDomain, (uint32_t enable, SubscriberHandle handle, uint32_t domain), (enable, handle, domain)) \
    X(EnableAllDomains, (uint32_t enable, SubscriberHandle handle), (enable, handle))                      \
    X(IsInsideRecursiveCallback, (uint32_t *inside), (inside))                                             \
    X(GetResultString, (Result result, const char **text), (result, text))                                 \
    X(AddPatches, (const void *image, CUcontext context), (image, context))                                \
    X(AddPatchesFromFile, (const char *file, CUcontext context), (file, context))                          \
    X(PatchInstructions, (uint32_t instruction, CUmodule module, const char *name),                        \
      (instruction, module, name))                                                                         \
    X(PatchModule, (CUmodule module), (module))                                                            \
    X(UnpatchModule, (CUmodule module), (module))                                                          \
    X(SetCallbackData, (CUfunction function, const void *userdata), (function, userdata))                  \
    X(SetLaunchCallbackData,                                                                               \
      (LaunchHandle launch, CUfunction function, StreamHandle stream, const void *userdata),               \
      (launch, function, stream, userdata))                                                                \
    X(SetDeviceGraphData, (CUgraphExec exec, StreamHandle stream, const void *userdata),                   \
      (exec, stream, userdata))                                                                            \
    X(GetFunctionPcAndSize, (CUmodule module, const char *name, uint64_t *pc, uint64_t *size),             \
      (module, name, pc, size))                                                                            \
    X(GetCallbackPcAndSize, (CUcontext context, const char *name, uint64_t *pc, uint64_t *size),           \
      (context, name, pc, size))                                                                           \
    X(GetFunctionLoadedStatus, (CUfunction function, uint32_t *status), (function, status))                \
    X(GetCudaBarrierCount, (CUfunction function, uint32_t *count), (function, count))                      \
    X(Alloc, (CUcontext context, void **memory, size_t size), (context, memory, size))                     \
    X(AllocHost, (CUcontext context, void **memory, size_t size), (context, memory, size))                 \
    X(Free, (CUcontext context, void *memory), (context, memory))                                          \
    X(FreeHost, (CUcontext context, void *memory), (context, memory))                                      \
    X(MemcpyHostToDeviceAsync, (void *to, void *from, size_t size, StreamHandle stream),                   \
      (to, from, size, stream))                                                                            \
    X(MemcpyDeviceToHost, (void *to, void *from, size_t size, StreamHandle stream),                        \
      (to, from, size, stream))                                                                            \
    X(Memset, (void *memory, int value, size_t size, StreamHandle stream), (memory, value, size, stream))  \
    X(StreamSynchronize, (StreamHandle stream), (stream))                                                  \
    X(GetStream, (StreamHandle handle, CUstream * stream), (handle, stream))                               \
    X(GetStreamHandle, (CUcontext context, CUstream stream, StreamHandle * handle), (context, stream, handle))

namespace cudasim::sanitizer::entry {

#define X(name, parameters, arguments) Result name parameters;
SANITIZER_ENTRY_POINTS(X)
#undef X

struct Table {
#define X(name, parameters, arguments) decltype(&entry::name) name;
    SANITIZER_ENTRY_POINTS(X)
#undef X
};

}  // namespace cudasim::sanitizer::entry

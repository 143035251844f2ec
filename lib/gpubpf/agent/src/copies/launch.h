// The decision at a launch: original or instrumented copy.
#pragma once

#include <cstdint>
#include <vector>

#include "driver/stream.h"
#include "state.h"

namespace gpubpf {

struct LaunchShape {
    uint32_t grid[3], block[3], shared;
    StreamRef where;
    bool cluster;
    uint32_t cluster_size[3];
    const CUlaunchConfig *config;  // null unless the call is cuLaunchKernelEx
};

// The replacement of a launch. It owns the bytes that its pointers refer to, until the launch call returns.
struct Swap {
    CUfunction function = nullptr;
    void **parameters = nullptr;
    void **extra = nullptr;
    Copy *copy = nullptr;
    Instance *instance = nullptr;
    uint64_t patch_data = 0;  // for PatchData

    void *few[64];
    std::vector<void *> many;
    alignas(16) uint8_t small[1024];
    std::vector<uint8_t> large;
    size_t extra_size = 0;
    void *extra_array[5];
};

struct Choice {
    Copy *copy = nullptr;
    CUfunction function = nullptr;  // of the copy: the ordinary or the limited one
    Instance *instance = nullptr;
    const uint8_t *block = nullptr;  // complete except for the launch id
    CUdeviceptr executions = 0;      // where the copy counts how often it runs; 0: the host counts
};
// Finds a copy that can be launched in this shape, and its memory. Counts nothing. Returns the outcome.
uint32_t choose(const Function &function, Context *context, const LaunchShape &shape, Choice &choice);
// Fills in `swap`: the application's parameters, followed by the launch block. Returns false if the
// parameters are invalid.
bool build(const Choice &choice, uint64_t launch, uint64_t replay, void **parameters, void **extra,
           Swap &swap);

Copy *copy_in(const Kernel &kernel, const Context *context);  // null: none

// Makes a chosen copy count on the GPU how often it runs. Returns false if there is no memory for its counter.
bool count_on_gpu(Choice &choice);

// Counts launches of a copy that the driver accepted, in its instance and its kernel.
void count_launch(CUfunction function, const Copy &copy, Instance &instance, uint64_t launches = 1);

// Decides about one launch and counts it. On kInstrumented, launch `swap` and then call swapped(). Otherwise,
// launch the original.
uint32_t prepare(const Function &function, const LaunchShape &shape, uint64_t id, void **parameters,
                 void **extra, Swap &swap);
// Call it after launching the copy. Returns false if the original must be launched instead: then call unswapped().
bool swapped(const HookCall &hook, Swap &swap, CUresult result);
// Counts a launch of the original for which prepare() returned kCopyFailed, or swapped() false, by the driver's result. Returns the
// outcome.
uint32_t unswapped(const HookCall &hook, const Kernel &kernel, CUresult result);

uint32_t count(const Function &function, Reason reason);  // returns the outcome

}  // namespace gpubpf

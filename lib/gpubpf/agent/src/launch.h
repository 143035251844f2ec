// The decision at a launch: original or instrumented copy.
#pragma once

#include <cstdint>
#include <vector>

#include "operation.h"
#include "state.h"

namespace gpubpf {

struct LaunchShape {
    uint32_t grid[3], block[3], shared;
    Where where;
    bool cluster;
    uint32_t cluster_size[3];
    const CUlaunchConfig *config;  // null but for cuLaunchKernelEx
};

// What to launch instead. Holds the bytes that the pointers lead to until the launch call returns.
struct Swap {
    CUfunction function = nullptr;
    void **parameters = nullptr;
    void **extra = nullptr;
    Copy *copy = nullptr;
    Instance *instance = nullptr;

    void *few[64];
    std::vector<void *> many;
    alignas(16) uint8_t small[1024];
    std::vector<uint8_t> large;
    size_t extra_size = 0;
    void *extra_array[5];
};

// Whether there is a copy that can be launched in this shape, and its memory. Counts nothing.
struct Choice {
    Copy *copy = nullptr;
    Instance *instance = nullptr;
    const uint8_t *block = nullptr;  // filled in but for the launch
};
uint32_t choose(const Function &function, Context *context, const LaunchShape &shape, Choice &choice);
// Fills in `swap`: the application's parameters and, after them, the launch block. False: they make no sense.
bool build(const Choice &choice, uint64_t launch, uint64_t replay, void **parameters, void **extra,
           Swap &swap);

// Of one launch, counted. kInstrumented: launch `swap`, then tell swapped(). Else the original.
uint32_t prepare(const Function &function, const LaunchShape &shape, uint64_t id, void **parameters,
                 void **extra, Swap &swap);
// After the launch call of the copy. False: launch the original instead.
bool swapped(const Outer &outer, Swap &swap, CUresult result);

uint32_t count(const Function &function, Reason reason);  // gives the outcome

}  // namespace gpubpf

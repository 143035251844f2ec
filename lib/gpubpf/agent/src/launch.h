// The decision at a launch: original or instrumented copy.
#pragma once

#include <cstdint>
#include <vector>

#include "state.h"

namespace gpubpf {

struct LaunchShape {
  uint32_t grid[3], block[3], shared;
  CUstream stream;  // CU_STREAM_PER_THREAD where that is the default
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

// True: launch `swap`. False: the original, already counted under its reason.
bool prepare(const Function &function, const LaunchShape &shape, void **parameters, void **extra, Swap &swap);
// After the launch call of the copy. False: launch the original instead.
bool swapped(Swap &swap, CUresult result);

void count(const Function &function, Reason reason);

}  // namespace gpubpf

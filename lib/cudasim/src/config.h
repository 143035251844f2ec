// Settings of the embedded device, from environment variables. They are read once, at first use.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cudasim {

struct Config {
    int devices;   // CUDASIM_DEVICES, default 1
    int cc_major;  // CUDASIM_CC=M.m, default 9.0
    int cc_minor;
    int compute_capability() const { return cc_major * 10 + cc_minor; }  // 90 for 9.0
    size_t memory;  // CUDASIM_MEMORY: bytes, or with a suffix K, M, G; default 16G
    bool hostile;   // CUDASIM_HOSTILE=1
    uint32_t
        sanitizer_instructions;  // CUDASIM_SANITIZER_INSTRUCTIONS: the highest number of an instruction that the stand-in for
    // Compute Sanitizer knows; default 47. Older versions of NVIDIA's library know fewer
    bool
        hide_variables;  // CUDASIM_HIDE_VARIABLES=1: cuModuleGetGlobal does not find variables that nvcc never registers
    int queue;      // CUDASIM_QUEUE: operations that a stream can hold before a call waits; default 1024
    uint64_t seed;  // CUDASIM_SEED
    uint64_t optimize_after;  // CUDASIM_OPTIMIZE_AFTER: ns; UINT64_MAX: never. See set_optimize_after()
    bool virtual_clock;       // CUDASIM_CLOCK=virtual
    bool
        eager_loading;  // CUDA_MODULE_LOADING=EAGER: kernels are loaded with their modules, not at their first use
    bool
        lazy_loading_waits;  // CUDA_MODULE_LOADING=LAZY in hostile mode: a kernel's first use waits for running work
};

const Config &config();

}  // namespace cudasim

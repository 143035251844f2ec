// What the environment says about the embedded device; read once, at first use.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cudasim {

struct Config {
    int devices;   // CUDASIM_DEVICES, default 1
    int cc_major;  // CUDASIM_CC=M.m, default 9.0
    int cc_minor;
    size_t memory;        // CUDASIM_MEMORY: bytes, or with a suffix K, M, G; default 16G
    bool hostile;         // CUDASIM_HOSTILE=1
    bool hide_variables;  // CUDASIM_HIDE_VARIABLES=1: variables that a runtime never registers are not found
    uint64_t seed;        // CUDASIM_SEED
    bool virtual_clock;   // CUDASIM_CLOCK=virtual
    bool eager;  // CUDA_MODULE_LOADING=EAGER: kernels are loaded with their modules, not at their first use
    bool lazy_waits;  // CUDA_MODULE_LOADING=LAZY in hostile mode: a kernel's first use waits for what runs
};

const Config &config();

}  // namespace cudasim

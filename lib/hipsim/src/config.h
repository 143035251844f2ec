// Settings of the embedded AMD device, from environment variables. They are read once, at first use.
#pragma once

#include <cstdint>
#include <string>

namespace hipsim {

struct Config {
    std::string
        gpu;      // HIPSIM_GPU: a name in thunk/gpus.h, default the first one that the program has code for
    int devices;  // HIPSIM_DEVICES: 0 to 4, default 1
    uint64_t memory;     // HIPSIM_MEMORY: bytes of each device, or with a suffix K, M, G, T; default 16G
    int threads;         // HIPSIM_THREADS: host threads that run waves; 0, the default, is one for each CPU
    bool virtual_clock;  // HIPSIM_CLOCK=virtual
    bool hostile;        // HIPSIM_HOSTILE=1
    uint64_t seed;       // HIPSIM_SEED: what hostile mode does next; default 1
};

const Config &config();

}  // namespace hipsim

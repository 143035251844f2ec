// The GPUs that can be emulated. A row has what KFD's topology says about one of them.
#pragma once

#include <cstdint>

namespace hipsim {

struct Gpu {
    const char *name;  // as LLVM calls the processor
    uint32_t major, minor, stepping;
    uint16_t device_id;  // PCI device
    uint32_t wave;       // work-items of a wave
    uint32_t waves_per_simd;
    uint32_t simds_per_unit;
    uint32_t units;  // compute units; few, because programs choose their grid sizes by them
    bool sram_ecc;   // the "sramecc" feature of the target
};

inline constexpr Gpu kGpus[] = {
    {"gfx906", 9, 0, 6, 0x66a1, 64, 10, 4, 8, true},
    {"gfx90a", 9, 0, 10, 0x740f, 64, 8, 4, 8, true},
    {"gfx1030", 10, 3, 0, 0x73bf, 32, 16, 2, 8, false},
};

// The GPU that HIPSIM_GPU names.
const Gpu &gpu();

inline constexpr uint32_t kLdsBytes = 64 << 10;              // of a compute unit
inline constexpr uint32_t kGlobalWaveSyncs = 64;             // of a device, for cooperative launches
inline constexpr uint64_t kLdsAperture = uint64_t{1} << 48;  // flat addresses of LDS begin here,
inline constexpr uint64_t kScratchAperture = uint64_t{2}
                                             << 48;  // those of scratch here; not canonical on the host

}  // namespace hipsim

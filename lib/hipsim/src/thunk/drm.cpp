// The functions of libdrm that ROCr 6.1 and newer (Debian 13) call: the rate of a device's clock, and memory that has no address yet.
//
// Their handles of a device come from hsaKmtGetAMDGPUDeviceHandle, so those of this device are never libdrm's. libhsakmt.so.1 comes
// before libdrm in ROCr's search order, so ROCr calls these functions. Handles of other devices go to libdrm's functions.
// Memory that is mapped later (hipMemCreate) is not supported: ROCr cannot map it, as hsaKmtExportDMABufHandle refuses.

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <dlfcn.h>

#include <hsakmt.h>

#include "config.h"

namespace hipsim {
namespace {

constexpr uint32_t kMostDevices = 64;
constexpr uint32_t kClockKhz = 1'000'000;  // s_memrealtime counts nanoseconds

// Targets of the handles of devices, by node.
char handles[kMostDevices];

bool is_ours(const void *device) { return device >= handles && device < handles + kMostDevices; }

// The beginning of struct amdgpu_gpu_info, in libdrm's amdgpu.h.
struct GpuInfo {
    uint32_t asic_id, chip_rev, chip_external_rev, family_id;
    uint64_t ids_flags, max_engine_clk, max_memory_clk;
    uint32_t num_shader_engines, num_shader_arrays_per_engine, avail_quad_shader_pipes, max_quad_shader_pipes,
        cache_entries_per_quad_pipe, num_hw_gfx_contexts, rb_pipes, enabled_rb_pipes_mask, gpu_counter_freq;
};
static_assert(offsetof(GpuInfo, gpu_counter_freq) == 72);

}  // namespace
}  // namespace hipsim

using namespace hipsim;

extern "C" {
#pragma GCC visibility push(default)

HSAKMT_STATUS hsaKmtGetAMDGPUDeviceHandle(HSAuint32 node, void **device) {
    if (device == nullptr) return HSAKMT_STATUS_INVALID_PARAMETER;
    if (node == 0 || node > static_cast<uint32_t>(config().devices) || node >= kMostDevices)
        return HSAKMT_STATUS_INVALID_NODE_UNIT;
    *device = handles + node;
    return HSAKMT_STATUS_SUCCESS;
}

int amdgpu_query_gpu_info(void *device, GpuInfo *info) {
    if (!is_ours(device)) {
        const auto next =
            reinterpret_cast<int (*)(void *, GpuInfo *)>(dlsym(RTLD_NEXT, "amdgpu_query_gpu_info"));
        return next ? next(device, info) : -ENOSYS;
    }
    // ROCr reads nothing else. The caller's structure is longer; its size depends on the version of libdrm.
    *info = {};
    info->gpu_counter_freq = kClockKhz;
    return 0;
}

#pragma GCC visibility pop
}

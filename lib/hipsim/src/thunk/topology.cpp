// KFD's description of the machine: node 0 is the host; the nodes from 1 on are GPUs, each on its own PCI bus.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <unistd.h>

#include <hsakmt.h>

#include "config.h"
#include "thunk/clock.h"
#include "thunk/gpus.h"
#include "thunk/heap.h"
#include "thunk/forked.h"

namespace hipsim {
namespace {

// The interface version tells ROCr which calls it may use: 1.4 is the least for gfx906, 1.9 what Debian 12 expects.
constexpr uint32_t kInterfaceMajor = 1, kInterfaceMinor = 9;
constexpr uint32_t kClockMhz = 1000;  // one instruction of a wave takes 1 ns on the virtual clock
constexpr uint32_t kLinkWeight = 20;

// Members that newer headers have at the end, where older ones reserve bytes. ROCr 6.1 needs at least one XCC.
struct Newer {
    uint32_t xccs, kfd_gpu_id, family;
};
constexpr size_t kNewer = offsetof(HsaNodeProperties, SGPRSizePerCU) + sizeof(uint32_t);
constexpr uint32_t kFamilyAi = 141, kFamilyNv = 143;  // of gfx9 and gfx10 in the Linux kernel's amdgpu_drm.h

uint32_t node_count() { return 1 + static_cast<uint32_t>(config().devices); }

uint64_t host_memory() {
    return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) &
           ~(kPage - 1);
}

void describe_host(HsaNodeProperties *node) {
    node->NumCPUCores = static_cast<uint32_t>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
    node->NumMemoryBanks = 1;
    node->NumCaches = 1;
    node->NumIOLinks = node_count() - 1;
}

void describe_gpu(uint32_t id, HsaNodeProperties *node) {
    const Gpu &model = gpu();
    node->NumFComputeCores = model.units * model.simds_per_unit;
    node->NumMemoryBanks = 3;
    node->NumCaches = 2;
    node->NumIOLinks = node_count() - 1;
    node->FComputeIdLo = 0x80000000 + id * 0x1000;
    node->Capability.ui32.DoorbellType = 2;  // 64-bit doorbells that take the index of an AQL packet
    node->Capability.ui32.QueueSizePowerOfTwo = 1;
    node->Capability.ui32.SRAM_EDCSupport = model.sram_ecc;
    node->MaxWavesPerSIMD = model.waves_per_simd;
    node->LDSSizeInKB = kLdsBytes >> 10;
    node->WaveFrontSize = model.wave;
    node->NumShaderBanks = 1;
    node->NumArrays = 1;
    node->NumCUPerArray = model.units;
    node->NumSIMDPerCU = model.simds_per_unit;
    node->MaxSlotsScratchCU = 32;
    node->EngineId.ui32.Major = model.major;
    node->EngineId.ui32.Minor = model.minor;
    node->EngineId.ui32.Stepping = model.stepping;
    node->EngineId.ui32.uCode = 469;  // recent enough for every feature that ROCr asks the firmware for
    node->uCodeEngineVersions.uCodeSDMA = 145;
    node->VendorId = 0x1002;
    node->DeviceId = model.device_id;
    node->LocationId = id << 8;  // bus `id`, device 0, function 0
    node->LocalMemSize = config().memory;
    node->MaxEngineClockMhzFCompute = kClockMhz;
    node->MaxEngineClockMhzCCompute = kClockMhz;
    node->DrmRenderMinor = -1;
    node->NumSdmaEngines = 2;
    node->NumSdmaQueuesPerEngine = 8;
    node->NumCpQueues = 24;
    node->NumGws = kGlobalWaveSyncs;
    node->UniqueID = 0x6869'7073'696d'0000 + id;  // "hipsim"
    const Newer newer = {1, id, model.major == 9 ? kFamilyAi : kFamilyNv};
    static_assert(sizeof(newer) <= sizeof(*node) - kNewer);
    memcpy(reinterpret_cast<char *>(node) + kNewer, &newer, sizeof(newer));
    std::string name = std::string("hipsim: ") + model.name + " in software, no GPU";
    for (size_t i = 0; i < name.size() && i + 1 < HSA_PUBLIC_NAME_SIZE; i++)
        node->MarketingName[i] = static_cast<unsigned char>(name[i]);
    memcpy(node->AMDName, "hipsim", sizeof("hipsim"));
}

HsaIoLinkProperties link(uint32_t from, uint32_t to) {
    HsaIoLinkProperties link{};
    link.IoLinkType = HSA_IOLINKTYPE_PCIEXPRESS;
    link.NodeFrom = from;
    link.NodeTo = to;
    link.Weight = from == 0 || to == 0 ? kLinkWeight : 2 * kLinkWeight;  // GPU to GPU goes through the host
    return link;
}

}  // namespace

const Gpu &gpu() {
    for (const Gpu &known : kGpus)
        if (config().gpu == known.name) return known;
    return kGpus[0];
}

}  // namespace hipsim

using namespace hipsim;

extern "C" {
#pragma GCC visibility push(default)

HSAKMT_STATUS hsaKmtOpenKFD(void) {
    HIPSIM_NOT_IN_CHILD;
    note_opened();
    // Without devices, behaves as without a driver: HIP then finds no device.
    return config().devices > 0 ? HSAKMT_STATUS_SUCCESS : HSAKMT_STATUS_KERNEL_IO_CHANNEL_NOT_OPENED;
}

HSAKMT_STATUS hsaKmtCloseKFD(void) {
    HIPSIM_NOTHING_IN_CHILD;
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS hsaKmtGetVersion(HsaVersionInfo *version) {
    if (version == nullptr) return HSAKMT_STATUS_INVALID_PARAMETER;
    version->KernelInterfaceMajorVersion = kInterfaceMajor;
    version->KernelInterfaceMinorVersion = kInterfaceMinor;
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS hsaKmtAcquireSystemProperties(HsaSystemProperties *properties) {
    HIPSIM_NOT_IN_CHILD;
    if (properties == nullptr) return HSAKMT_STATUS_INVALID_PARAMETER;
    memset(properties, 0, sizeof(*properties));
    properties->NumNodes = node_count();
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS hsaKmtReleaseSystemProperties(void) {
    HIPSIM_NOTHING_IN_CHILD;
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS hsaKmtGetNodeProperties(HSAuint32 id, HsaNodeProperties *node) {
    HIPSIM_NOT_IN_CHILD;
    if (node == nullptr) return HSAKMT_STATUS_INVALID_PARAMETER;
    if (id >= node_count()) return HSAKMT_STATUS_INVALID_NODE_UNIT;
    memset(node, 0, sizeof(*node));
    if (id == 0) describe_host(node);
    else describe_gpu(id, node);
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS hsaKmtGetNodeMemoryProperties(HSAuint32 id, HSAuint32 count, HsaMemoryProperties *banks) {
    HIPSIM_NOT_IN_CHILD;
    if (banks == nullptr) return HSAKMT_STATUS_INVALID_PARAMETER;
    if (id >= node_count()) return HSAKMT_STATUS_INVALID_NODE_UNIT;
    HsaMemoryProperties all[3]{};
    uint32_t known = 1;
    if (id == 0) {
        all[0].HeapType = HSA_HEAPTYPE_SYSTEM;
        all[0].SizeInBytes = host_memory();
        all[0].Width = 64;
    } else {
        known = 3;
        all[0].HeapType =
            HSA_HEAPTYPE_FRAME_BUFFER_PUBLIC;  // the host reaches all of it, as on a server ("large BAR")
        all[0].SizeInBytes = config().memory;
        all[0].Width = 4096;
        all[0].MemoryClockMax = kClockMhz;
        all[1].HeapType = HSA_HEAPTYPE_GPU_LDS;
        all[1].SizeInBytes = kLdsBytes;
        all[1].VirtualBaseAddress = kLdsAperture;
        all[2].HeapType = HSA_HEAPTYPE_GPU_SCRATCH;
        all[2].SizeInBytes = uint64_t{1} << 32;
        all[2].VirtualBaseAddress = kScratchAperture;
    }
    std::copy(all, all + std::min(count, known), banks);
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS hsaKmtGetNodeCacheProperties(HSAuint32 id, HSAuint32 processor, HSAuint32 count,
                                           HsaCacheProperties *caches) {
    HIPSIM_NOT_IN_CHILD;
    if (caches == nullptr) return HSAKMT_STATUS_INVALID_PARAMETER;
    if (id >= node_count()) return HSAKMT_STATUS_INVALID_NODE_UNIT;
    for (uint32_t level = 1; level <= std::min(count, id == 0 ? 1u : 2u); level++) {
        HsaCacheProperties &cache = caches[level - 1];
        memset(&cache, 0, sizeof(cache));
        cache.ProcessorIdLow = processor;
        cache.CacheLevel = level;
        cache.CacheSize = level == 1 ? 16 : 4096;  // KiB
        cache.CacheLineSize = 64;
        cache.CacheType.ui32.Data = 1;
        cache.CacheType.ui32.CPU = id == 0;
        cache.CacheType.ui32.HSACU = id != 0;
    }
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS hsaKmtGetNodeIoLinkProperties(HSAuint32 id, HSAuint32 count, HsaIoLinkProperties *links) {
    HIPSIM_NOT_IN_CHILD;
    if (links == nullptr) return HSAKMT_STATUS_INVALID_PARAMETER;
    if (id >= node_count()) return HSAKMT_STATUS_INVALID_NODE_UNIT;
    for (uint32_t other = 0; other < node_count() && count > 0; other++) {
        if (other == id) continue;
        *links++ = link(id, other);
        count--;
    }
    return HSAKMT_STATUS_SUCCESS;
}

#pragma GCC visibility pop
}

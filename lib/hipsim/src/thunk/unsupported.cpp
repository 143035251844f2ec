// KFD's functions beyond computing: debugging, performance counters, graphics. They answer like a KFD without them.
//
// Some of these functions are in newer headers only: those of ROCr 5.7 (Ubuntu 24.04), 6.1 (Debian 13) and 6.2.

#include <cstring>

#include <hsakmt.h>

#define REFUSED                             \
    {                                       \
        return HSAKMT_STATUS_NOT_SUPPORTED; \
    }

extern "C" {
#pragma GCC visibility push(default)

// ROCr passes the address of its list of code objects. If KFD does not support exceptions, ROCr reads errors of
// queues from their inactive signals (faults.cpp).
HSAKMT_STATUS hsaKmtRuntimeEnable(void *, bool) REFUSED HSAKMT_STATUS
    hsaKmtRuntimeDisable(void) REFUSED HSAKMT_STATUS
    hsaKmtGetKernelDebugTrapVersionInfo(HSAuint32 *, HSAuint32 *) REFUSED HSAKMT_STATUS
    hsaKmtDbgRegister(HSAuint32) REFUSED HSAKMT_STATUS hsaKmtDbgUnregister(HSAuint32) REFUSED HSAKMT_STATUS
    hsaKmtDbgWavefrontControl(HSAuint32, HSA_DBG_WAVEOP, HSA_DBG_WAVEMODE, HSAuint32,
                              HsaDbgWaveMessage *) REFUSED HSAKMT_STATUS
    hsaKmtDbgAddressWatch(HSAuint32, HSAuint32, HSA_DBG_WATCH_MODE *, void **, HSAuint64 *,
                          HsaEvent **) REFUSED

    HSAKMT_STATUS hsaKmtPmcGetCounterProperties(HSAuint32, HsaCounterProperties **) REFUSED HSAKMT_STATUS
    hsaKmtPmcRegisterTrace(HSAuint32, HSAuint32, HsaCounter *, HsaPmcTraceRoot *) REFUSED HSAKMT_STATUS
    hsaKmtPmcUnregisterTrace(HSAuint32, HSATraceId) REFUSED HSAKMT_STATUS
    hsaKmtPmcAcquireTraceAccess(HSAuint32, HSATraceId) REFUSED HSAKMT_STATUS
    hsaKmtPmcReleaseTraceAccess(HSAuint32, HSATraceId) REFUSED HSAKMT_STATUS
    hsaKmtPmcStartTrace(HSATraceId, void *, HSAuint64) REFUSED HSAKMT_STATUS
    hsaKmtPmcQueryTrace(HSATraceId) REFUSED HSAKMT_STATUS hsaKmtPmcStopTrace(HSATraceId) REFUSED HSAKMT_STATUS
    hsaKmtSPMAcquire(HSAuint32) REFUSED HSAKMT_STATUS hsaKmtSPMRelease(HSAuint32) REFUSED HSAKMT_STATUS
    hsaKmtSPMSetDestBuffer(HSAuint32, HSAuint32, HSAuint32 *, HSAuint32 *, void *, bool *) REFUSED

    HSAKMT_STATUS hsaKmtMapGraphicHandle(HSAuint32, HSAuint64, HSAuint64, HSAuint64, HSAuint64,
                                         HSAuint64 *) REFUSED HSAKMT_STATUS
    hsaKmtUnmapGraphicHandle(HSAuint32, HSAuint64, HSAuint64) REFUSED HSAKMT_STATUS
    hsaKmtRegisterGraphicsHandleToNodes(HSAuint64, HsaGraphicsResourceInfo *, HSAuint64, HSAuint32 *) REFUSED

    HSAKMT_STATUS hsaKmtProcessVMRead(HSAuint32, HsaMemoryRange *, HSAuint64, HsaMemoryRange *, HSAuint64,
                                      HSAuint64 *) REFUSED HSAKMT_STATUS
    hsaKmtProcessVMWrite(HSAuint32, HsaMemoryRange *, HSAuint64, HsaMemoryRange *, HSAuint64,
                         HSAuint64 *) REFUSED

    // ROCr's image code asserts that this works. There are no tiles: images are not supported.
    HSAKMT_STATUS hsaKmtGetTileConfig(HSAuint32, HsaGpuTileConfig *config) {
    if (config == nullptr) return HSAKMT_STATUS_INVALID_PARAMETER;
    config->NumTileConfigs = config->NumMacroTileConfigs = 0;
    config->GbAddrConfig = config->NumBanks = config->NumRanks = 0;
    return HSAKMT_STATUS_SUCCESS;
}

// Newer headers declare these, with types that older ones lack. So they have other names here, and no parameters.
#define NEWER(name)                              \
    HSAKMT_STATUS newer_##name(void) asm(#name); \
    HSAKMT_STATUS newer_##name(void) REFUSED
NEWER(hsaKmtOpenSMI)
NEWER(hsaKmtExportDMABufHandle)
NEWER(hsaKmtReplaceAsanHeaderPage)
NEWER(hsaKmtReturnAsanHeaderPage)
NEWER(hsaKmtGetRuntimeCapabilities)
NEWER(hsaKmtDbgEnable)
NEWER(hsaKmtDbgDisable)
NEWER(hsaKmtDbgGetDeviceData)
NEWER(hsaKmtDbgGetQueueData)
NEWER(hsaKmtPcSamplingQueryCapabilities)
NEWER(hsaKmtPcSamplingCreate)
NEWER(hsaKmtPcSamplingDestroy)
NEWER(hsaKmtPcSamplingStart)
NEWER(hsaKmtPcSamplingStop)
NEWER(hsaKmtPcSamplingSupport)

#pragma GCC visibility pop
}

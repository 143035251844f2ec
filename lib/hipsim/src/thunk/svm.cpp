// Shared virtual memory (hipMallocManaged on GPUs that migrate pages) and XNACK: this device has neither. ROCr then
// gives managed memory from the host's memory, which every device can use.

#include <hsakmt.h>
#include "thunk/forked.h"

extern "C" {
#pragma GCC visibility push(default)

HSAKMT_STATUS hsaKmtSVMSetAttr(void *, HSAuint64, unsigned int, HSA_SVM_ATTRIBUTE *) {
    HIPSIM_NOT_IN_CHILD;
    return HSAKMT_STATUS_NOT_SUPPORTED;
}
HSAKMT_STATUS hsaKmtSVMGetAttr(void *, HSAuint64, unsigned int, HSA_SVM_ATTRIBUTE *) {
    HIPSIM_NOT_IN_CHILD;
    return HSAKMT_STATUS_NOT_SUPPORTED;
}

HSAKMT_STATUS hsaKmtSetXNACKMode(HSAint32 enable) {
    HIPSIM_NOT_IN_CHILD;
    return enable == 0 ? HSAKMT_STATUS_SUCCESS : HSAKMT_STATUS_NOT_SUPPORTED;
}

HSAKMT_STATUS hsaKmtGetXNACKMode(HSAint32 *enable) {
    HIPSIM_NOT_IN_CHILD;
    if (enable == nullptr) return HSAKMT_STATUS_INVALID_PARAMETER;
    *enable = 0;
    return HSAKMT_STATUS_SUCCESS;
}

#pragma GCC visibility pop
}

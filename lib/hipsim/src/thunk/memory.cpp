// The calls of hsakmt.h on memory; heap.cpp does the work.

#include <hsakmt.h>

#include "config.h"
#include "thunk/heap.h"
#include "thunk/forked.h"

namespace hipsim {
namespace {

bool is_node(uint32_t id) { return id <= static_cast<uint32_t>(config().devices); }

HSAKMT_STATUS nodes_of(uint64_t count, const HSAuint32 *list, Nodes *nodes) {
    if (count > 0 && list == nullptr) return HSAKMT_STATUS_INVALID_PARAMETER;
    for (uint64_t i = 0; i < count; i++) {
        if (!is_node(list[i])) return HSAKMT_STATUS_INVALID_NODE_UNIT;
        nodes->add(list[i]);
    }
    return HSAKMT_STATUS_SUCCESS;
}

}  // namespace
}  // namespace hipsim

using namespace hipsim;

extern "C" {
#pragma GCC visibility push(default)

HSAKMT_STATUS hsaKmtAllocMemoryAlign(HSAuint32 node, HSAuint64 size, HSAuint64 alignment, HsaMemFlags flags,
                                     void **address) {
    HIPSIM_NOT_IN_CHILD;
    if (!is_node(node)) return HSAKMT_STATUS_INVALID_NODE_UNIT;
    return heap().allocate(node, size, alignment, flags, address);
}

HSAKMT_STATUS hsaKmtAllocMemory(HSAuint32 node, HSAuint64 size, HsaMemFlags flags, void **address) {
    HIPSIM_NOT_IN_CHILD;
    return hsaKmtAllocMemoryAlign(node, size, 0, flags, address);
}

HSAKMT_STATUS hsaKmtFreeMemory(void *address, HSAuint64) {
    HIPSIM_NOTHING_IN_CHILD;
    return address == nullptr ? HSAKMT_STATUS_ERROR : heap().release(address);
}

HSAKMT_STATUS hsaKmtAvailableMemory(HSAuint32 node, HSAuint64 *bytes) {
    HIPSIM_NOT_IN_CHILD;
    if (bytes == nullptr) return HSAKMT_STATUS_INVALID_PARAMETER;
    if (node == 0 || !is_node(node)) return HSAKMT_STATUS_INVALID_NODE_UNIT;
    *bytes = heap().available(node);
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS hsaKmtRegisterMemoryToNodes(void *address, HSAuint64 size, HSAuint64 count, HSAuint32 *list) {
    HIPSIM_NOT_IN_CHILD;
    Nodes nodes;
    HsaMemFlags flags{};
    flags.ui32.HostAccess = 1;
    HSAKMT_STATUS status = nodes_of(count, list, &nodes);
    return status != HSAKMT_STATUS_SUCCESS ? status : heap().add_registered(address, size, flags, nodes);
}

HSAKMT_STATUS hsaKmtRegisterMemory(void *address, HSAuint64 size) {
    HIPSIM_NOT_IN_CHILD;
    return hsaKmtRegisterMemoryToNodes(address, size, 0, nullptr);
}

HSAKMT_STATUS hsaKmtRegisterMemoryWithFlags(void *address, HSAuint64 size, HsaMemFlags flags) {
    HIPSIM_NOT_IN_CHILD;
    // Only ordinary memory of the host, as in KFD's library.
    if (!flags.ui32.HostAccess || flags.ui32.NonPaged) return HSAKMT_STATUS_NOT_SUPPORTED;
    return heap().add_registered(address, size, flags, Nodes{});
}

HSAKMT_STATUS hsaKmtDeregisterMemory(void *address) {
    HIPSIM_NOTHING_IN_CHILD;
    return heap().deregister(address);
}

HSAKMT_STATUS hsaKmtMapMemoryToGPU(void *address, HSAuint64 size, HSAuint64 *alternate) {
    HIPSIM_NOT_IN_CHILD;
    if (address == nullptr) return HSAKMT_STATUS_ERROR;
    return heap().map(address, size, Nodes{}, alternate);
}

HSAKMT_STATUS hsaKmtMapMemoryToGPUNodes(void *address, HSAuint64 size, HSAuint64 *alternate, HsaMemMapFlags,
                                        HSAuint64 count, HSAuint32 *list) {
    HIPSIM_NOT_IN_CHILD;
    if (address == nullptr) return HSAKMT_STATUS_ERROR;
    Nodes nodes;
    if (HSAKMT_STATUS status = nodes_of(count, list, &nodes); status != HSAKMT_STATUS_SUCCESS) return status;
    return heap().map(address, size, nodes, alternate);
}

HSAKMT_STATUS hsaKmtUnmapMemoryToGPU(void *address) {
    HIPSIM_NOTHING_IN_CHILD;
    return address == nullptr ? HSAKMT_STATUS_SUCCESS : heap().unmap(address);
}

HSAKMT_STATUS hsaKmtQueryPointerInfo(const void *address, HsaPointerInfo *info) {
    HIPSIM_NOT_IN_CHILD;
    return info == nullptr ? HSAKMT_STATUS_INVALID_PARAMETER : heap().describe(address, info);
}

HSAKMT_STATUS hsaKmtSetMemoryUserData(const void *address, void *data) {
    HIPSIM_NOT_IN_CHILD;
    return heap().set_user_data(address, data);
}

// Coherency and traps need no set-up here. ROCr's trap handler never runs: faults.cpp reports what the handler would report.
HSAKMT_STATUS hsaKmtSetMemoryPolicy(HSAuint32, HSAuint32, HSAuint32, void *, HSAuint64) {
    HIPSIM_NOT_IN_CHILD;
    return HSAKMT_STATUS_SUCCESS;
}
HSAKMT_STATUS hsaKmtSetTrapHandler(HSAuint32, void *, HSAuint64, void *, HSAuint64) {
    HIPSIM_NOT_IN_CHILD;
    return HSAKMT_STATUS_SUCCESS;
}

#pragma GCC visibility pop
}

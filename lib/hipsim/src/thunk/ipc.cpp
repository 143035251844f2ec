// Memory that processes share: a handle names the process, its memory file, and the offset in the file.

#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <hsakmt.h>

#include "config.h"
#include "thunk/heap.h"
#include "thunk/forked.h"

namespace hipsim {
namespace {

constexpr uint32_t kMagic = 0x48495053;  // "HIPS"

// Word 6 is ROCr's: it stores there which part of an allocation is meant.
struct Handle {
    uint32_t magic;
    uint32_t process;
    uint32_t file;
    uint32_t offset_pages;
    uint32_t size_pages;
    uint32_t node;
    uint32_t for_rocr;
    uint32_t check;
};
static_assert(sizeof(Handle) == sizeof(HsaSharedMemoryHandle));

uint32_t check_of(const Handle &handle) {
    return handle.magic ^ handle.process * 3 ^ handle.file * 5 ^ handle.offset_pages * 7 ^
           handle.size_pages * 11 ^ handle.node * 13;
}

// The memory file of a handle, or −1. The creator of a handle may have named any file of any process.
int open_memory(const Handle &handle) {
    char path[64], name[64] = {};
    snprintf(path, sizeof(path), "/proc/%u/fd/%u", handle.process, handle.file);
    if (readlink(path, name, sizeof(name) - 1) < 0 || strstr(name, kMemoryFile) != name + strlen("/memfd:"))
        return -1;
    int file = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    struct stat status{};
    uint64_t end = (uint64_t{handle.offset_pages} + handle.size_pages) * kPage;
    if (file >= 0 && (fstat(file, &status) != 0 || uint64_t(status.st_size) < end)) {
        close(file);
        file = -1;
    }
    return file;
}

}  // namespace
}  // namespace hipsim

using namespace hipsim;

extern "C" {
#pragma GCC visibility push(default)

HSAKMT_STATUS hsaKmtShareMemory(void *address, HSAuint64 size, HsaSharedMemoryHandle *shared) {
    HIPSIM_NOT_IN_CHILD;
    if (address == nullptr || shared == nullptr || size == 0) return HSAKMT_STATUS_INVALID_PARAMETER;
    uint64_t offset, bytes;
    uint32_t node;
    int file;
    if (!heap().exported(address, &offset, &bytes, &node, &file) || bytes != size)
        return HSAKMT_STATUS_INVALID_PARAMETER;
    if (offset / kPage > UINT32_MAX || bytes / kPage > UINT32_MAX) return HSAKMT_STATUS_NOT_SUPPORTED;
    Handle handle{kMagic,
                  static_cast<uint32_t>(getpid()),
                  static_cast<uint32_t>(file),
                  static_cast<uint32_t>(offset / kPage),
                  static_cast<uint32_t>(bytes / kPage),
                  node,
                  0,
                  0};
    handle.check = check_of(handle);
    memcpy(shared, &handle, sizeof(handle));
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS hsaKmtRegisterSharedHandleToNodes(const HsaSharedMemoryHandle *shared, void **address,
                                                HSAuint64 *size, HSAuint64 count, HSAuint32 *list) {
    HIPSIM_NOT_IN_CHILD;
    if (shared == nullptr || address == nullptr || size == nullptr) return HSAKMT_STATUS_INVALID_PARAMETER;
    Handle handle;
    memcpy(&handle, shared, sizeof(handle));
    Nodes nodes;
    for (uint64_t i = 0; i < count; i++) {
        if (list == nullptr || list[i] > static_cast<uint32_t>(config().devices))
            return HSAKMT_STATUS_INVALID_NODE_UNIT;
        nodes.add(list[i]);
    }
    if (handle.magic != kMagic || handle.check != check_of(handle)) return HSAKMT_STATUS_INVALID_PARAMETER;
    *size = uint64_t{handle.size_pages} * kPage;
    int file = open_memory(handle);
    if (file < 0) return HSAKMT_STATUS_INVALID_PARAMETER;
    HSAKMT_STATUS status = heap().import(
        file, uint64_t{handle.offset_pages} * kPage, *size,
        handle.node <= static_cast<uint32_t>(config().devices) ? handle.node : 0, nodes, address);
    close(file);
    return status;
}

HSAKMT_STATUS hsaKmtRegisterSharedHandle(const HsaSharedMemoryHandle *shared, void **address,
                                         HSAuint64 *size) {
    HIPSIM_NOT_IN_CHILD;
    return hsaKmtRegisterSharedHandleToNodes(shared, address, size, 0, nullptr);
}

#pragma GCC visibility pop
}

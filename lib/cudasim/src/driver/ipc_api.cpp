// The API of memory and events that several processes share.
//
// A handle names a file in memory (memfd) that the exporting process has open; others open it through /proc. When an
// allocation is exported, its contents are copied to such a file, and the file is mapped in its place.
#include "driver/ipc.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <ctime>

#include "driver/driver.h"

namespace cudasim::driver {
namespace {

enum class Kind : uint32_t { memory = 1, event };

struct Handle {
    static constexpr uint64_t kMagic = 0x4350495f53434355;
    uint64_t magic = kMagic;
    Kind kind = Kind::memory;
    int32_t process = 0, file = -1, device = 0;
    uint64_t inode = 0;
    uint64_t size = 0, offset = 0;  // bytes of the file; where the allocation begins
};
static_assert(sizeof(Handle) <= CU_IPC_HANDLE_SIZE);

CUresult export_file(int file, Handle handle, char *to) {
    struct stat found{};
    if (fstat(file, &found) != 0) return CUDA_ERROR_INVALID_VALUE;
    handle.process = getpid();
    handle.file = file;
    handle.inode = found.st_ino;
    memset(to, 0, CU_IPC_HANDLE_SIZE);
    memcpy(to, &handle, sizeof handle);
    return CUDA_SUCCESS;
}

// Opens the file of a handle. The bytes come from another process, so the file must be checked: it must be one of this device.
CUresult open_file(const char *bytes, Kind kind, Handle &handle, int &file) {
    memcpy(static_cast<void *>(&handle), bytes, sizeof handle);
    if (handle.magic != Handle::kMagic || handle.kind != kind) return CUDA_ERROR_INVALID_VALUE;
    if (handle.process == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    char path[64], target[64] = {};
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.process, handle.file);
    constexpr char kName[] = "/memfd:cudasim";
    if (readlink(path, target, sizeof target - 1) < 0 || strncmp(target, kName, sizeof kName - 1) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    file = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) return CUDA_ERROR_MAP_FAILED;
    struct stat found{};
    const bool same =
        fstat(file, &found) == 0 && found.st_ino == handle.inode && S_ISREG(found.st_mode) &&
        static_cast<uint64_t>(found.st_size) >= handle.size && handle.offset <= handle.size &&
        (fcntl(file, F_GET_SEALS) & F_SEAL_SHRINK) != 0;  // otherwise an access could end this process
    if (same) return CUDA_SUCCESS;
    close(file);
    return CUDA_ERROR_INVALID_VALUE;
}

struct Imported {
    uint64_t base = 0, address = 0;
    size_t size = 0;
    unsigned opened = 0;  // how often
};

struct Imports {
    std::mutex mutex;
    std::map<uint64_t, Imported> by_inode;
};

Imports &imports() {
    static Imports *const instance = new Imports();
    return *instance;
}

CUresult import_memory(const Handle &handle, int file, Imported &imported) {
    Memory &memory = Memory::instance();
    constexpr size_t kPage = 4096;
    if (handle.size == 0 || handle.size % kPage != 0 || !is_device(handle.device))
        return CUDA_ERROR_INVALID_VALUE;
    imported.size = handle.size;
    imported.base = memory.reserve(imported.size, kPage);
    if (imported.base == 0) return CUDA_ERROR_OUT_OF_MEMORY;
    if (!memory.map(imported.base, imported.size, file, 0, handle.device)) {
        memory.unreserve(imported.base, imported.size);
        return CUDA_ERROR_MAP_FAILED;
    }
    memory.set_access(imported.base, true);
    imported.address = imported.base + handle.offset;
    return CUDA_SUCCESS;
}

}  // namespace

std::shared_ptr<SharedEvent> SharedEvent::create() {
    const int file = memfd_create("cudasim-event", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (file < 0) return nullptr;
    if (ftruncate(file, sizeof(State)) != 0 || fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
        close(file);
        return nullptr;
    }
    return map(file);
}

std::shared_ptr<SharedEvent> SharedEvent::open(int file) {
    struct stat found{};
    if (fstat(file, &found) == 0 && found.st_size == sizeof(State)) return map(file);
    close(file);
    return nullptr;
}

std::shared_ptr<SharedEvent> SharedEvent::map(int file) {
    void *at = mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) {
        close(file);
        return nullptr;
    }
    return std::shared_ptr<SharedEvent>(new SharedEvent(file, static_cast<State *>(at)));
}

SharedEvent::~SharedEvent() {
    munmap(static_cast<void *>(state_), sizeof(State));
    close(file_);
}

uint64_t SharedEvent::begin_record() {
    state_->recorder = getpid();
    return ++state_->recorded;
}

void SharedEvent::finish_record(uint64_t number) {
    uint64_t done = state_->done;
    while (done < number && !state_->done.compare_exchange_weak(done, number)) {
    }
}

bool SharedEvent::done(uint64_t number) const {
    return state_->done >= number || (kill(state_->recorder, 0) != 0 && errno == ESRCH);
}

void SharedEvent::wait(uint64_t number, const Context &context) const {
    constexpr long kPause = 50000;  // ns
    while (!done(number) && !context.cancel && !context.destroyed) {
        const timespec pause = {0, kPause};
        nanosleep(&pause, nullptr);
    }
}

}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::optional<Allocation> found = Memory::instance().find(address);
    if (!found || found->base != address || found->kind != MemoryKind::device || found->pool != nullptr)
        return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(context->mutex);
    if (found->file < 0) drain(*context);  // nothing may write to the memory while it moves
    Handle made;
    made.device = found->device;
    made.size = found->mapped;
    made.offset = found->base - found->mapping;
    const int file = Memory::instance().share(found->base);
    return file < 0 ? CUDA_ERROR_OUT_OF_MEMORY : export_file(file, made, handle->reserved);
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle bytes, unsigned flags) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (address == nullptr || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
    Handle handle;
    int file = -1;
    if (CUresult status = open_file(bytes.reserved, Kind::memory, handle, file)) return status;
    std::lock_guard lock(imports().mutex);
    Imported &imported = imports().by_inode[handle.inode];
    CUresult status = imported.opened == 0 ? import_memory(handle, file, imported) : CUDA_SUCCESS;
    close(file);
    if (status == CUDA_SUCCESS) {
        imported.opened++;
        *address = imported.address;
    } else {
        imports().by_inode.erase(handle.inode);
    }
    return status;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    std::lock_guard lock(context->mutex);
    std::lock_guard imports_lock(imports().mutex);
    for (auto &[inode, imported] : imports().by_inode) {
        if (imported.address != address) continue;
        if (--imported.opened != 0) return CUDA_SUCCESS;
        drain(*context);
        for (const Allocation &mapping : Memory::instance().mappings(imported.base, imported.size))
            Memory::instance().unmap(mapping);
        Memory::instance().unreserve(imported.base, imported.size);
        imports().by_inode.erase(inode);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event_handle) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<Event> event = tables().events.get(event_handle);
    if (!event || handle == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (!event->shared) return CUDA_ERROR_INVALID_HANDLE;
    Handle made;
    made.kind = Kind::event;
    return export_file(event->shared->file(), made, handle->reserved);
}

CUresult cuIpcOpenEventHandle(CUevent *to, CUipcEventHandle bytes) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (to == nullptr) return CUDA_ERROR_INVALID_VALUE;
    Handle handle;
    int file = -1;
    if (CUresult status = open_file(bytes.reserved, Kind::event, handle, file)) return status;
    auto event = std::make_shared<Event>();
    event->shared = SharedEvent::open(file);
    if (!event->shared) return CUDA_ERROR_MAP_FAILED;
    event->context = context;
    event->flags = CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    event->handle = tables().events.add(event);
    *to = static_cast<CUevent>(event->handle);
    return CUDA_SUCCESS;
}

extern "C" {
CUresult open_memory_v1(CUdeviceptr *, CUipcMemHandle, unsigned) __asm__("cuIpcOpenMemHandle");
CUresult open_memory_v1(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags) {
    return cuIpcOpenMemHandle(address, handle, flags);
}
}

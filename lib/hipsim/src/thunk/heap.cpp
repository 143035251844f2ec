#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <mutex>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "config.h"
#include "engine/engine.h"
#include "thunk/heap.h"
#include "thunk/hostile.h"

namespace hipsim {
namespace {

constexpr uint64_t kHugePage = 2 << 20;
constexpr uint64_t kFileSize = uint64_t{1} << 46;  // sparse; offsets are never used twice

uint64_t number(const void *address) { return reinterpret_cast<uint64_t>(address); }
void *pointer(uint64_t address) { return reinterpret_cast<void *>(address); }
uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) & ~(unit - 1); }

// The limit on file sizes also counts for memory files, and exceeding it kills the process.
bool may_have_file() {
    rlimit limit{};
    return getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur == RLIM_INFINITY;
}

}  // namespace

bool Nodes::contains(uint32_t node) const {
    return std::find(list.begin(), list.begin() + count, node) != list.begin() + count;
}

void Nodes::add(uint32_t node) {
    if (count < list.size() && !contains(node)) list[count++] = node;
}

Heap &heap() {
    static Heap *const instance = new Heap;
    return *instance;
}

// Returns address space that is followed by a page that stays unmapped; null on failure.
void *Heap::reserve(uint64_t size, uint64_t alignment, void *fixed) {
    if (fixed != nullptr) {
        void *got = mmap(fixed, size, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
        if (got == fixed) return got;
        if (got != MAP_FAILED) munmap(got, size);
        return nullptr;
    }
    uint64_t length = size + kPage + alignment;
    void *got = mmap(nullptr, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) return nullptr;
    uint64_t first = number(got), begin = round_up(first, alignment), last = begin + size + kPage;
    if (begin > first) munmap(got, begin - first);
    if (first + length > last) munmap(pointer(last), first + length - last);
    return pointer(begin);
}

// Puts memory behind reserved addresses: a part of the memory file where that is possible.
bool Heap::back(void *address, uint64_t size, uint64_t *offset) {
    if (file_ < 0 && !no_file_) {
        file_ = may_have_file() ? memfd_create(kMemoryFile, MFD_CLOEXEC) : -1;
        if (file_ >= 0 && ftruncate(file_, kFileSize) != 0) {
            close(file_);
            file_ = -1;
        }
        no_file_ = file_ < 0;
    }
    int protection = PROT_READ | PROT_WRITE, flags = MAP_FIXED | MAP_NORESERVE;
    void *got = MAP_FAILED;
    *offset = kNoFile;
    if (file_ >= 0 && file_size_ + size <= kFileSize) {
        got = mmap(address, size, protection, flags | MAP_SHARED, file_, static_cast<off_t>(file_size_));
        if (got != MAP_FAILED) {
            *offset = file_size_;
            file_size_ += size;
        }
    }
    if (got == MAP_FAILED) got = mmap(address, size, protection, flags | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    // As in KFD's library: a child process has no device, and must not keep its memory alive.
    if (got != MAP_FAILED) madvise(address, size, MADV_DONTFORK);
    return got != MAP_FAILED;
}

HSAKMT_STATUS Heap::allocate(uint32_t node, uint64_t size, uint64_t alignment, HsaMemFlags flags,
                             void **address) {
    if (address == nullptr || size == 0 || size % kPage != 0) return HSAKMT_STATUS_INVALID_PARAMETER;
    if (alignment != 0 && (alignment < kPage || (alignment & (alignment - 1)) != 0))
        return HSAKMT_STATUS_INVALID_PARAMETER;
    if (size >= kFileSize) return HSAKMT_STATUS_NO_MEMORY;
    void *fixed = flags.ui32.FixedAddress ? *address : nullptr;
    if (flags.ui32.FixedAddress && (fixed == nullptr || number(fixed) % kPage != 0))
        return HSAKMT_STATUS_INVALID_PARAMETER;
    *address = nullptr;

    // Paged memory that is requested on a GPU comes from the host, as in KFD's library.
    bool local = node != 0 && flags.ui32.NonPaged && !flags.ui32.Scratch;
    if (local && hostile_failure()) return HSAKMT_STATUS_NO_MEMORY;
    if (alignment == 0) alignment = size >= kHugePage ? kHugePage : kPage;

    std::unique_lock lock(mutex_);
    if (local && used_[node] + size > config().memory) return HSAKMT_STATUS_NO_MEMORY;
    void *got = reserve(size, alignment, fixed);
    if (got == nullptr) return HSAKMT_STATUS_NO_MEMORY;
    uint64_t guard = fixed == nullptr ? kPage : 0;
    auto allocation = std::make_unique<Allocation>();
    if (!back(got, size, &allocation->offset)) {
        munmap(got, size + guard);
        return HSAKMT_STATUS_NO_MEMORY;
    }
    allocation->guard = guard;
    allocation->begin = allocation->address = number(got);
    allocation->end = number(got) + size;
    allocation->size = size;
    allocation->node = local || flags.ui32.Scratch ? node : 0;
    allocation->flags = flags;
    allocation->local = local;
    if (local) used_[node] += size;
    *address = got;
    map_[allocation->begin] = std::move(allocation);
    return HSAKMT_STATUS_SUCCESS;
}

// Gives memory back to the host. Addresses stay mapped until no device works, but lose their contents now.
void Heap::discard(std::unique_ptr<Allocation> allocation) {
    if (allocation->local) used_[allocation->node] -= allocation->size;
    bool ours = allocation->type == HSA_POINTER_ALLOCATED;
    if (!ours && allocation->type != HSA_POINTER_REGISTERED_SHARED) return;  // the program's own
    if (ours && allocation->offset != kNoFile)
        fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(allocation->offset),
                  static_cast<off_t>(allocation->size));
    if (working_ > 0) freed_.push_back(std::move(allocation));
    else munmap(pointer(allocation->begin), allocation->end - allocation->begin + allocation->guard);
}

HSAKMT_STATUS Heap::release(void *address) {
    std::unique_lock lock(mutex_);
    auto found = map_.find(number(address));
    if (found == map_.end() || found->second->type != HSA_POINTER_ALLOCATED)
        return HSAKMT_STATUS_INVALID_PARAMETER;
    std::unique_ptr<Allocation> allocation = std::move(found->second);
    map_.erase(found);
    discard(std::move(allocation));
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS Heap::add_registered(void *address, uint64_t size, HsaMemFlags flags, const Nodes &nodes) {
    if (address == nullptr || size == 0 || number(address) >= registered_bit || size >= registered_bit)
        return HSAKMT_STATUS_INVALID_PARAMETER;
    std::unique_lock lock(mutex_);
    if (find(number(address)) != nullptr && map_.count(number(address)) != 0) {
        map_[number(address)]->registered = nodes;  // memory of a device that others may access
        return HSAKMT_STATUS_SUCCESS;
    }
    auto allocation = std::make_unique<Allocation>();
    allocation->type = HSA_POINTER_REGISTERED_USER;
    allocation->begin = number(address) & ~(kPage - 1);
    allocation->end = round_up(number(address) + size, kPage);
    allocation->address = number(address);
    allocation->size = size;
    allocation->offset = kNoFile;
    allocation->flags = flags;
    allocation->registered = nodes;
    registered_.push_back(std::move(allocation));
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS Heap::import(int file, uint64_t offset, uint64_t size, uint32_t node, const Nodes &nodes,
                           void **address) {
    std::unique_lock lock(mutex_);
    void *got = reserve(size, size >= kHugePage ? kHugePage : kPage, nullptr);
    if (got == nullptr) return HSAKMT_STATUS_NO_MEMORY;
    if (mmap(got, size, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_SHARED | MAP_NORESERVE, file,
             static_cast<off_t>(offset)) == MAP_FAILED) {
        munmap(got, size + kPage);
        return HSAKMT_STATUS_NO_MEMORY;
    }
    auto allocation = std::make_unique<Allocation>();
    allocation->type = HSA_POINTER_REGISTERED_SHARED;
    allocation->guard = kPage;
    allocation->begin = allocation->address = number(got);
    allocation->end = number(got) + size;
    allocation->size = size;
    allocation->offset = kNoFile;
    allocation->node = node;
    allocation->flags.ui32.HostAccess = 1;
    allocation->flags.ui32.CoarseGrain = 1;
    allocation->registered = nodes;
    map_[allocation->begin] = std::move(allocation);
    *address = got;
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS Heap::deregister(void *address) {
    std::unique_lock lock(mutex_);
    // If a range was registered several times, the last registration counts.
    for (auto found = registered_.rbegin(); found != registered_.rend(); ++found)
        if ((*found)->address == (number(address) & ~registered_bit)) {
            registered_.erase(std::next(found).base());
            return HSAKMT_STATUS_SUCCESS;
        }
    auto found = map_.find(number(address));
    if (found == map_.end()) return HSAKMT_STATUS_MEMORY_NOT_REGISTERED;
    if (found->second->type == HSA_POINTER_REGISTERED_SHARED) {
        std::unique_ptr<Allocation> allocation = std::move(found->second);
        map_.erase(found);
        discard(std::move(allocation));
    } else {
        found->second->registered = Nodes{};
    }
    return HSAKMT_STATUS_SUCCESS;
}

// Returns the allocation that contains an address. The caller holds the lock.
Allocation *Heap::find(uint64_t address) {
    bool registered = address & registered_bit;
    address &= ~registered_bit;
    auto after = map_.upper_bound(address);
    if (!registered && after != map_.begin()) {
        Allocation *before = std::prev(after)->second.get();
        if (address < before->end) return before;
    }
    for (auto found = registered_.rbegin(); found != registered_.rend(); ++found)
        if (address >= (*found)->begin && address < (*found)->end) return found->get();
    return nullptr;
}

// Returns the range that was allocated or registered with this address, or else the allocation that contains it.
Allocation *Heap::find_exactly(const void *address) {
    for (auto found = registered_.rbegin(); found != registered_.rend(); ++found)
        if ((*found)->address == (number(address) & ~registered_bit)) return found->get();
    return find(number(address));
}

HSAKMT_STATUS Heap::map(void *address, uint64_t size, const Nodes &nodes, uint64_t *device) {
    std::unique_lock lock(mutex_);
    Allocation *allocation = find_exactly(address);
    if (allocation == nullptr) return HSAKMT_STATUS_INVALID_PARAMETER;
    if (allocation->flags.ui32.Scratch) {
        uint64_t begin = number(address);
        if (size == 0 || size > allocation->end - begin) return HSAKMT_STATUS_INVALID_PARAMETER;
        allocation->parts[begin] = std::min((begin + size + kPage - 1) / kPage * kPage, allocation->end);
        if (!allocation->mapped.contains(allocation->node)) allocation->mapped.add(allocation->node);
        if (device != nullptr) *device = 0;
        return HSAKMT_STATUS_SUCCESS;
    }
    bool registered = allocation->type == HSA_POINTER_REGISTERED_USER;
    if (device != nullptr) *device = registered ? number(address) | registered_bit : 0;
    const Nodes &wanted = nodes.count > 0 ? nodes : allocation->registered;
    if (wanted.count == 0)
        for (int gpu = 1; gpu <= config().devices; gpu++) allocation->mapped.add(static_cast<uint32_t>(gpu));
    // A list replaces the previous nodes, as ROCr's access lists do.
    if (wanted.count > 0) allocation->mapped = wanted;
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS Heap::unmap(void *address) {
    std::unique_lock lock(mutex_);
    Allocation *allocation = find_exactly(address);
    if (allocation == nullptr) return HSAKMT_STATUS_INVALID_PARAMETER;
    if (allocation->flags.ui32.Scratch) allocation->parts.erase(number(address));
    else allocation->mapped = Nodes{};
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS Heap::describe(const void *address, HsaPointerInfo *info) {
    memset(info, 0, sizeof(*info));
    std::shared_lock lock(mutex_);
    const Allocation *allocation = find(number(address));
    if (allocation == nullptr || allocation->flags.ui32.Scratch) return HSAKMT_STATUS_ERROR;
    bool registered = allocation->type == HSA_POINTER_REGISTERED_USER;
    uint64_t place = number(address) & ~registered_bit;
    if (registered && (place < allocation->address || place >= allocation->address + allocation->size))
        return HSAKMT_STATUS_ERROR;
    info->Type = allocation->type;
    info->Node = allocation->node;
    info->MemFlags = allocation->flags;
    info->CPUAddress = pointer(allocation->address);
    info->GPUAddress = allocation->address | (registered ? registered_bit : 0);
    info->SizeInBytes = allocation->size;
    info->NRegisteredNodes = allocation->registered.count;
    info->RegisteredNodes = allocation->registered.list.data();
    info->NMappedNodes = allocation->mapped.count;
    info->MappedNodes = allocation->mapped.list.data();
    info->UserData = allocation->user_data;
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS Heap::set_user_data(const void *address, void *data) {
    std::unique_lock lock(mutex_);
    Allocation *allocation = find(number(address));
    if (allocation == nullptr) return HSAKMT_STATUS_ERROR;
    allocation->user_data = data;
    return HSAKMT_STATUS_SUCCESS;
}

void Heap::range(uint32_t node, uint64_t address, uint64_t *begin, uint64_t *end, bool *may_write) {
    std::shared_lock lock(mutex_);
    const Allocation *allocation = find(address);
    bool found = allocation != nullptr && allocation->mapped.contains(node);
    uint64_t first = found ? allocation->begin : 0, last = found ? allocation->end : 0;
    if (found && allocation->flags.ui32.Scratch) {
        auto part = allocation->parts.upper_bound(address);
        found = part != allocation->parts.begin() && address < (--part)->second;
        if (found) first = part->first, last = part->second;
    }
    *begin = found ? first | (address & registered_bit) : 0;
    *end = found ? last | (address & registered_bit) : 0;
    *may_write = found && !allocation->flags.ui32.ReadOnly;
}

// Returns whether a GPU may use these bytes, which may lie in several ranges of the program's memory.
bool Heap::usable(uint32_t node, uint64_t address, uint64_t size, bool write) {
    uint64_t at = address, last = address + size;
    if (last < address) return false;
    while (at < last) {
        uint64_t begin, end;
        bool may_write;
        range(node, at, &begin, &end, &may_write);
        if (begin == end || (write && !may_write)) return false;
        at = end;
    }
    return true;
}

bool Heap::exported(void *address, uint64_t *offset, uint64_t *size, uint32_t *node, int *file) {
    std::shared_lock lock(mutex_);
    auto found = map_.find(number(address));
    if (found == map_.end() || found->second->offset == kNoFile) return false;
    *offset = found->second->offset;
    *size = found->second->size;
    *node = found->second->node;
    *file = file_;
    return true;
}

uint64_t Heap::available(uint32_t node) {
    std::shared_lock lock(mutex_);
    return node < kMaxNodes && used_[node] < config().memory ? config().memory - used_[node] : 0;
}

void Heap::enter() {
    std::unique_lock lock(mutex_);
    working_++;
}

void Heap::leave() {
    std::unique_lock lock(mutex_);
    if (--working_ > 0) return;
    for (const auto &allocation : freed_)
        munmap(pointer(allocation->begin), allocation->end - allocation->begin + allocation->guard);
    freed_.clear();
}

}  // namespace hipsim

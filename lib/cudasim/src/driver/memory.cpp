#include "driver/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "config.h"

namespace cudasim {
namespace {

constexpr size_t kPage = 4096;
// cudaMalloc's alignment (CUDA C++ Programming Guide, "Device Memory Accesses").
constexpr size_t kAlignment = 256;
// A fixed base makes addresses the same in every run. On x86-64, Linux places a process's first mappings at most 1 TiB and
// 16 GiB below the end of its address space, so 1 TiB from here on is free.
constexpr uint64_t kPreferredBase = 0x7d0000000000;
constexpr size_t kMaxGuarded = 16384;  // allocations that get a guard page
constexpr size_t kMaxGarbage = size_t{32}
                               << 20;  // bytes to fill: more would touch pages that the program never uses

size_t page_up(size_t bytes) { return (bytes + kPage - 1) & ~(kPage - 1); }

// Fills new memory with noise from the seed, so that uninitialised memory is not zero by chance.
void fill_garbage(void *to, size_t bytes, uint64_t salt) {
    uint64_t state = config().seed * 0x9e3779b97f4a7c15u + salt;
    auto *words = static_cast<uint64_t *>(to);
    for (size_t i = 0; i < bytes / sizeof(uint64_t); i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        words[i] = state ^ (state >> 29);
    }
}

}  // namespace

Memory &Memory::instance() {
    static Memory *const instance =
        new Memory();  // never destroyed: streams may still run while the process exits
    return *instance;
}

Memory::Memory() : total_(config().memory) {
    for (size_t size : {size_t{1} << 40, size_t{1} << 38, size_t{1} << 36, size_t{1} << 34}) {
        for (void *hint : {reinterpret_cast<void *>(kPreferredBase), static_cast<void *>(nullptr)}) {
            int flags =
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (hint != nullptr ? MAP_FIXED_NOREPLACE : 0);
            void *at = mmap(hint, size, PROT_NONE, flags, -1, 0);
            if (at == MAP_FAILED) continue;
            if (hint != nullptr && at != hint) {  // Linux before 4.17 ignores MAP_FIXED_NOREPLACE
                munmap(at, size);
                continue;
            }
            madvise(at, size, MADV_DONTDUMP);
            begin_ = reinterpret_cast<uint64_t>(at);
            reserved_ = size;
            free_.add(begin_ + kPage, size - kConstantBytes - kPage);
            free_constant_.add(constant_base(), kConstantBytes - kPage);
            return;
        }
    }
}

uint64_t Memory::allocate(size_t size, MemoryKind kind, int device, const void *owner, unsigned flags,
                          const void *pool, bool constant) {
    if (size == 0 || size > reserved_) return 0;
    std::unique_lock lock(mutex_);
    if (kind != MemoryKind::pinned && used_[device] + size > total_) return 0;
    size_t mapped = page_up(size);
    // A guard page takes a mapping, and a process has about 65,000. So only the first allocations have one.
    size_t guard = allocations_.size() < kMaxGuarded ? kPage : 0;
    size_t taken = mapped + guard;
    uint64_t mapping = (constant ? free_constant_ : free_).take(taken);
    if (mapping == 0) return 0;
    auto *at = reinterpret_cast<void *>(mapping);
    int share =
        kind == MemoryKind::pinned ? MAP_SHARED : MAP_PRIVATE;  // a child of fork shares pinned memory
    if (mmap(at, mapped, PROT_READ | PROT_WRITE, share | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) ==
        MAP_FAILED) {
        free_list(mapping).add(mapping, taken);
        return 0;
    }
    uint64_t base = mapping;
    if (config().hostile) {
        fill_garbage(at, std::min(mapped, kMaxGarbage), next_id_);
        base += (mapped - size) & ~(kAlignment - 1);  // near the guard page, and only as aligned as promised
    }
    Allocation allocation;
    allocation.base = base;
    allocation.size = size;
    allocation.kind = kind;
    allocation.device = device;
    allocation.owner = owner;
    allocation.pool = pool;
    allocation.flags = flags;
    allocation.id = next_id_++;
    allocation.mapping = mapping;
    allocation.mapped = mapped;
    allocation.guard = guard;
    allocations_[base] = allocation;
    if (kind != MemoryKind::pinned) used_[device] += size;
    return base;
}

bool Memory::release(uint64_t base, uint64_t id) {
    std::unique_lock lock(mutex_);
    auto found = allocations_.find(base);
    if (found == allocations_.end() || found->second.kind == MemoryKind::registered) return false;
    const Allocation &allocation = found->second;
    if (id != 0 && allocation.id != id) return false;
    mmap(reinterpret_cast<void *>(allocation.mapping), allocation.mapped, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    if (allocation.kind != MemoryKind::pinned) used_[allocation.device] -= allocation.size;
    free_list(allocation.mapping).add(allocation.mapping, allocation.mapped + allocation.guard);
    allocations_.erase(found);
    return true;
}

bool Memory::add_registered(uint64_t base, size_t size, int device, const void *owner, unsigned flags) {
    std::unique_lock lock(mutex_);
    auto next = allocations_.lower_bound(base);
    if (next != allocations_.end() && next->first < base + size) return false;
    if (next != allocations_.begin()) {
        const Allocation &previous = std::prev(next)->second;
        if (previous.base + previous.size > base) return false;
    }
    Allocation allocation;
    allocation.base = base;
    allocation.size = size;
    allocation.kind = MemoryKind::registered;
    allocation.device = device;
    allocation.owner = owner;
    allocation.flags = flags;
    allocation.id = next_id_++;
    allocation.mapping = base;
    allocation.mapped = size;
    allocations_[base] = allocation;
    return true;
}

bool Memory::remove_registered(uint64_t base) {
    std::unique_lock lock(mutex_);
    auto found = allocations_.find(base);
    if (found == allocations_.end() || found->second.kind != MemoryKind::registered) return false;
    allocations_.erase(found);
    return true;
}

std::optional<Allocation> Memory::find(uint64_t address) const {
    std::shared_lock lock(mutex_);
    auto next = allocations_.upper_bound(address);
    if (next == allocations_.begin()) return std::nullopt;
    const Allocation &candidate = std::prev(next)->second;
    if (address - candidate.base >= candidate.size) return std::nullopt;
    return candidate;
}

bool Memory::covers(uint64_t address, size_t size) const {
    std::optional<Allocation> found = find(address);
    return found && size <= found->size - (address - found->base);
}

bool Memory::touches(uint64_t address, size_t size) const {
    if (size == 0) return in_region(address);
    uint64_t last = address + size - 1;
    if (last < address) return true;
    if (address < end() && last >= begin_) return true;
    std::shared_lock lock(mutex_);
    auto next = allocations_.upper_bound(last);
    if (next == allocations_.begin()) return false;
    const Allocation &candidate = std::prev(next)->second;
    return candidate.base + candidate.size > address;
}

size_t Memory::used(int device) const {
    std::shared_lock lock(mutex_);
    auto found = used_.find(device);
    return found == used_.end() ? 0 : found->second;
}

std::vector<Allocation> Memory::owned_by(const void *owner) const {
    std::shared_lock lock(mutex_);
    std::vector<Allocation> owned;
    for (const auto &[base, allocation] : allocations_)
        if (allocation.owner == owner) owned.push_back(allocation);
    return owned;
}

}  // namespace cudasim

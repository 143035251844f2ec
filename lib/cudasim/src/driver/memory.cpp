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
constexpr size_t kAlignment =
    256;  // what cudaMalloc promises (CUDA C++ Programming Guide, "Device Memory Accesses")
// The kernel puts a process's first mappings 1 TiB and 16 GiB below the end of its memory at the lowest (x86-64, randomised): with 1 TiB from
// here on, addresses are the same in every run.
constexpr uint64_t kWishedBase = 0x7d0000000000;
constexpr size_t kGuarded = 16384;
constexpr size_t kGarbageLimit = size_t{32}
                                 << 20;  // filling more than this would touch memory that nobody uses

size_t page_up(size_t bytes) { return (bytes + kPage - 1) & ~(kPage - 1); }

// Cheap noise from the seed: uninitialised memory must not happen to be zero.
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
    static Memory *const made =
        new Memory();  // never destroyed: streams may still run while the process exits
    return *made;
}

Memory::Memory() : total_(config().memory) {
    for (size_t size : {size_t{1} << 40, size_t{1} << 38, size_t{1} << 36, size_t{1} << 34}) {
        for (void *wish : {reinterpret_cast<void *>(kWishedBase), static_cast<void *>(nullptr)}) {
            int flags =
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (wish != nullptr ? MAP_FIXED_NOREPLACE : 0);
            void *at = mmap(wish, size, PROT_NONE, flags, -1, 0);
            if (at == MAP_FAILED) continue;
            if (wish != nullptr && at != wish) {  // a kernel that does not know MAP_FIXED_NOREPLACE
                munmap(at, size);
                continue;
            }
            madvise(at, size, MADV_DONTDUMP);
            begin_ = reinterpret_cast<uint64_t>(at);
            reserved_ = size;
            free_[begin_ + kPage] = size - kConstants - kPage;
            free_constant_[constants()] = kConstants - kPage;
            return;
        }
    }
}

uint64_t Memory::take(std::map<uint64_t, size_t> &free, size_t bytes) {
    for (auto at = free.begin(); at != free.end(); ++at) {
        if (at->second < bytes) continue;
        uint64_t base = at->first;
        size_t rest = at->second - bytes;
        free.erase(at);
        if (rest != 0) free[base + bytes] = rest;
        return base;
    }
    return 0;
}

void Memory::give(uint64_t base, size_t bytes) {
    std::map<uint64_t, size_t> &free = base >= constants() ? free_constant_ : free_;
    auto next = free.lower_bound(base);
    if (next != free.begin()) {
        auto previous = std::prev(next);
        if (previous->first + previous->second == base) {
            base = previous->first;
            bytes += previous->second;
            free.erase(previous);
        }
    }
    if (next != free.end() && base + bytes == next->first) {
        bytes += next->second;
        free.erase(next);
    }
    free[base] = bytes;
}

uint64_t Memory::allocate(size_t size, MemoryKind kind, int device, const void *owner, unsigned flags,
                          const void *pool, bool constant) {
    if (size == 0 || size > reserved_) return 0;
    std::unique_lock lock(mutex_);
    if (kind != MemoryKind::pinned && used_[device] + size > total_) return 0;
    size_t mapped = page_up(size);
    // A guard page costs the kernel a mapping, and a process has some 65,000: very many allocations do without.
    size_t guard = allocations_.size() < kGuarded ? kPage : 0;
    size_t taken = mapped + guard;
    uint64_t mapping = take(constant ? free_constant_ : free_, taken);
    if (mapping == 0) return 0;
    auto *at = reinterpret_cast<void *>(mapping);
    int share = kind == MemoryKind::pinned ? MAP_SHARED : MAP_PRIVATE;  // pinned memory is not copied by fork
    if (mmap(at, mapped, PROT_READ | PROT_WRITE, share | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) ==
        MAP_FAILED) {
        give(mapping, taken);
        return 0;
    }
    uint64_t base = mapping;
    if (config().hostile) {
        fill_garbage(at, std::min(mapped, kGarbageLimit), next_id_);
        base += (mapped - size) &
                ~(kAlignment - 1);  // its end is near the guard page, and no more aligned than promised
    }
    Allocation made;
    made.base = base;
    made.size = size;
    made.kind = kind;
    made.device = device;
    made.owner = owner;
    made.pool = pool;
    made.flags = flags;
    made.id = next_id_++;
    made.mapping = mapping;
    made.mapped = mapped;
    made.guard = guard;
    allocations_[base] = made;
    if (kind != MemoryKind::pinned) used_[device] += size;
    return base;
}

bool Memory::release(uint64_t base, uint64_t id) {
    std::unique_lock lock(mutex_);
    auto found = allocations_.find(base);
    if (found == allocations_.end() || found->second.kind == MemoryKind::registered) return false;
    const Allocation &gone = found->second;
    if (id != 0 && gone.id != id) return false;
    mmap(reinterpret_cast<void *>(gone.mapping), gone.mapped, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    if (gone.kind != MemoryKind::pinned) used_[gone.device] -= gone.size;
    give(gone.mapping, gone.mapped + gone.guard);
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
    Allocation made;
    made.base = base;
    made.size = size;
    made.kind = MemoryKind::registered;
    made.device = device;
    made.owner = owner;
    made.flags = flags;
    made.id = next_id_++;
    made.mapping = base;
    made.mapped = size;
    allocations_[base] = made;
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

#include "driver/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "config.h"

namespace cudasim {
namespace {

constexpr size_t kPage = 4096;
// cudaMalloc's alignment (CUDA C++ Programming Guide, "Device Memory Accesses").
constexpr size_t kAlignment = 256;
// A fixed base makes addresses the same in every run. On x86-64, Linux places a process's first mappings at most 1 TiB and
// 16 GiB below the end of its address space, so 1 TiB from here on is free.
constexpr uint64_t kPreferredBase = 0x7d0000000000;
// Sizes of allocations that may get huge pages: first touches of 4 KiB pages take longer than the kernel that touches them.
// Larger allocations may be used in few places.
constexpr size_t kMinHuge = size_t{4} << 20, kMaxHuge = size_t{1} << 30;
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
                          bool constant) {
    Allocation allocation;
    allocation.size = size;
    allocation.kind = kind;
    allocation.device = device;
    allocation.owner = owner;
    allocation.flags = flags;
    std::unique_lock lock(mutex_);
    return add(std::move(allocation), constant);
}

uint64_t Memory::allocate_from_pool(size_t size, int device, const void *owner,
                                    const std::shared_ptr<driver::MemoryPool> &pool,
                                    const std::shared_ptr<PoolFile> &file) {
    if (size == 0 || size > reserved_) return 0;
    Allocation allocation;
    allocation.size = size;
    allocation.device = device;
    allocation.owner = owner;
    allocation.pool = pool;
    if (file) {
        allocation.range = file->take(page_up(size));
        if (!allocation.range) return 0;
    }
    std::unique_lock lock(mutex_);
    return add(std::move(allocation));
}

uint64_t Memory::import(const std::shared_ptr<const FileRange> &range, size_t start, size_t size, int device,
                        const void *owner, const std::shared_ptr<driver::MemoryPool> &pool) {
    Allocation allocation;
    allocation.size = size;
    allocation.device = device;
    allocation.owner = owner;
    allocation.pool = pool;
    allocation.range = range;
    std::unique_lock lock(mutex_);
    return add(std::move(allocation), false, start);
}

uint64_t Memory::add(Allocation allocation, bool constant, size_t start) {
    const size_t size = allocation.size;
    if (size == 0 || size > reserved_) return 0;
    if (counts(allocation) && used_[allocation.device] + size > total_) return 0;
    const bool imported = allocation.range && allocation.range->file->imported();
    allocation.mapped = allocation.range ? allocation.range->bytes : page_up(size);
    // A guard page needs a mapping, and a process can have about 65,000. So only the first allocations have one.
    allocation.guard = allocations_.size() < kMaxGuarded ? kPage : 0;
    const size_t taken = allocation.mapped + allocation.guard;
    allocation.mapping = (constant ? free_constant_ : free_).take(taken);
    if (allocation.mapping == 0) return 0;
    auto *at = reinterpret_cast<void *>(allocation.mapping);
    // A child of fork shares pinned memory and that of shareable pools.
    const bool shared = allocation.kind == MemoryKind::pinned || allocation.range;
    const int flags = (shared ? MAP_SHARED : MAP_PRIVATE) | (allocation.range ? 0 : MAP_ANONYMOUS) |
                      MAP_FIXED | MAP_NORESERVE;
    const int file = allocation.range ? allocation.range->file->file() : -1;
    const off_t offset = allocation.range ? static_cast<off_t>(allocation.range->offset) : 0;
    if (mmap(at, allocation.mapped, PROT_READ | PROT_WRITE, flags, file, offset) == MAP_FAILED) {
        free_list(allocation.mapping).add(allocation.mapping, taken);
        return 0;
    }
    if (!shared && allocation.mapped >= kMinHuge && allocation.mapped <= kMaxHuge)
        madvise(at, allocation.mapped, MADV_HUGEPAGE);
    if (config().hostile && !imported) {
        fill_garbage(at, std::min(allocation.mapped, kMaxGarbage), next_id_);
        start = (allocation.mapped - size) &
                ~(kAlignment - 1);  // near the guard page, with only the promised alignment
    }
    const uint64_t base = allocation.base = allocation.mapping + start;
    allocation.id = next_id_++;
    if (counts(allocation)) used_[allocation.device] += size;
    allocations_[base] = std::move(allocation);
    return base;
}

bool Memory::release(uint64_t base, uint64_t id) {
    std::unique_lock lock(mutex_);
    auto found = allocations_.find(base);
    if (found == allocations_.end()) return false;
    const Allocation &allocation = found->second;
    if (allocation.kind == MemoryKind::registered || allocation.kind == MemoryKind::mapped) return false;
    if (id != 0 && allocation.id != id) return false;
    mmap(reinterpret_cast<void *>(allocation.mapping), allocation.mapped, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    if (allocation.file >= 0) close(allocation.file);
    if (counts(allocation)) used_[allocation.device] -= allocation.size;
    free_list(allocation.mapping).add(allocation.mapping, allocation.mapped + allocation.guard);
    allocations_.erase(found);
    return true;
}

int Memory::share(uint64_t base) {
    std::unique_lock lock(mutex_);
    auto found = allocations_.find(base);
    if (found == allocations_.end() || found->second.kind != MemoryKind::device) return -1;
    Allocation &allocation = found->second;
    if (allocation.file >= 0) return allocation.file;
    const int file = make_file(allocation.mapped);
    if (file < 0) return -1;
    auto *const at = reinterpret_cast<void *>(allocation.mapping);
    void *copy = mmap(nullptr, allocation.mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (copy == MAP_FAILED) {
        close(file);
        return -1;
    }
    memcpy(copy, at, allocation.mapped);
    if (mremap(copy, allocation.mapped, allocation.mapped, MREMAP_MAYMOVE | MREMAP_FIXED, at) == MAP_FAILED) {
        munmap(copy, allocation.mapped);
        close(file);
        return -1;
    }
    return allocation.file = file;
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
    while (found && found->mapped_to_device) {
        const size_t rest = found->size - (address - found->base);
        if (size <= rest) return true;
        if (found->kind != MemoryKind::mapped) return false;
        address += rest;
        size -= rest;
        found = find(address);
        if (found && found->kind != MemoryKind::mapped) return false;
    }
    return false;
}

uint64_t Memory::reserve(size_t size, size_t alignment) {
    if (size == 0 || size > reserved_ || alignment > reserved_) return 0;
    std::unique_lock lock(mutex_);
    Reservation reservation;
    reservation.size = size;
    reservation.taken_size = size + alignment;
    reservation.taken = free_.take(reservation.taken_size);
    if (reservation.taken == 0) return 0;
    const uint64_t base = (reservation.taken + alignment - 1) / alignment * alignment;
    reservations_[base] = reservation;
    return base;
}

bool Memory::unreserve(uint64_t base, size_t size) {
    std::unique_lock lock(mutex_);
    auto found = reservations_.find(base);
    if (found == reservations_.end() || found->second.size != size) return false;
    auto mapping = allocations_.lower_bound(base);
    if (mapping != allocations_.end() && mapping->first < base + size) return false;
    free_.add(found->second.taken, found->second.taken_size);
    reservations_.erase(found);
    return true;
}

int Memory::create_file(size_t size, int device) {
    std::unique_lock lock(mutex_);
    if (size > total_ || used_[device] + size > total_) return -1;
    const int file = make_file(size);
    if (file < 0) return -1;
    if (config().hostile) {
        const size_t bytes = std::min(size, kMaxGarbage);
        void *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (at != MAP_FAILED) {
            fill_garbage(at, bytes, next_id_);
            munmap(at, bytes);
        }
    }
    used_[device] += size;
    return file;
}

void Memory::close_file(int file, size_t size, int device) {
    std::unique_lock lock(mutex_);
    close(file);
    used_[device] -= std::min(used_[device], size);
}

bool Memory::map(uint64_t base, size_t size, int file, size_t offset, int device) {
    std::unique_lock lock(mutex_);
    auto reservation = reservations_.upper_bound(base);
    if (reservation == reservations_.begin()) return false;
    --reservation;
    const uint64_t before = base - reservation->first;
    if (before >= reservation->second.size || size > reservation->second.size - before) return false;
    auto next = allocations_.lower_bound(base);
    if (next != allocations_.end() && next->first < base + size) return false;
    if (next != allocations_.begin()) {
        const Allocation &previous = std::prev(next)->second;
        if (previous.base + previous.size > base) return false;
    }
    if (mmap(reinterpret_cast<void *>(base), size, PROT_NONE, MAP_SHARED | MAP_FIXED, file,
             static_cast<off_t>(offset)) == MAP_FAILED)
        return false;
    Allocation allocation;
    allocation.base = allocation.mapping = base;
    allocation.size = allocation.mapped = size;
    allocation.kind = MemoryKind::mapped;
    allocation.device = device;
    allocation.id = next_id_++;
    allocation.mapped_to_device = false;
    allocations_[base] = allocation;
    return true;
}

std::vector<Allocation> Memory::mappings(uint64_t base, size_t size) const {
    std::shared_lock lock(mutex_);
    std::vector<Allocation> found;
    uint64_t at = base;
    for (auto next = allocations_.find(base); next != allocations_.end() && at < base + size; ++next) {
        if (next->first != at || next->second.kind != MemoryKind::mapped) return {};
        found.push_back(next->second);
        at += next->second.size;
    }
    return at == base + size ? found : std::vector<Allocation>();
}

bool Memory::unmap(const Allocation &mapping) {
    std::unique_lock lock(mutex_);
    auto found = allocations_.find(mapping.base);
    if (found == allocations_.end() || found->second.id != mapping.id) return false;
    mmap(reinterpret_cast<void *>(mapping.base), mapping.size, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    allocations_.erase(found);
    return true;
}

void Memory::set_access(uint64_t base, bool accessible) {
    std::unique_lock lock(mutex_);
    auto found = allocations_.find(base);
    if (found == allocations_.end() || found->second.kind != MemoryKind::mapped) return;
    mprotect(reinterpret_cast<void *>(base), found->second.size,
             accessible ? PROT_READ | PROT_WRITE : PROT_NONE);
    found->second.mapped_to_device = accessible;
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

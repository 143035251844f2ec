// The agent's own heap: operator new and delete for the agent's code alone. The program's heap may be broken (AMD's runtime writes to
// memory that it has freed, if an exit handler launches), replaced, or locked in a forked child, and must stay as it is without a tool.
//
// Freed blocks are kept in a list for each size, and never returned to the system. Large blocks are mappings of their own. Lists and
// areas are changed with atomic instructions: no lock can be left behind by a fork, a signal or a thread that ended.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <sys/mman.h>

namespace gpubpf {
namespace {

constexpr size_t kUnit = 16;     // blocks' sizes are multiples of it; also the size of a header
constexpr size_t kSmall = 1024;  // up to here, there is a list for each multiple
constexpr size_t kLarge =
    64 << 10;  // from here on, a block is a mapping; between them, a list for each power of two
constexpr size_t kArea = 1 << 20;  // bytes of the mappings that smaller blocks are cut from
constexpr size_t kLists = kSmall / kUnit + 7;
constexpr uint64_t kAddress = (1ULL << 48) - 1;

// Precedes each block.
struct Header {
    uint64_t size;  // with the header, in bytes
    Header *next;   // a freed block: the next one in its list. A block in use: the header where it begins
};
static_assert(sizeof(Header) == kUnit);

// A list of freed blocks. The upper 16 bits count changes, so that a block that left the list and came back is noticed.
std::atomic<uint64_t> lists[kLists];

struct Area {
    std::atomic<size_t> used;
};
std::atomic<Area *> area{nullptr};

// Returns memory from the system, or null.
void *map(size_t bytes) {
    void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? nullptr : memory;
}

// Rounds a size up to one that has a list. Sets `list` to its number.
size_t rounded(size_t size, size_t &list) {
    if (size <= kSmall) {
        size = (size + kUnit - 1) / kUnit * kUnit;
        list = size / kUnit - 1;
        return size;
    }
    size_t power = kSmall * 2;
    for (list = kSmall / kUnit; power < size; power *= 2) ++list;
    return power;
}

Header *take_freed(std::atomic<uint64_t> &list) {
    uint64_t first = list.load(std::memory_order_acquire);
    while (first & kAddress) {
        auto *block = reinterpret_cast<Header *>(first & kAddress);
        // Another thread may take the block now: then `next` is wrong, and the exchange fails, because the count has changed.
        const auto next = reinterpret_cast<uint64_t>(__atomic_load_n(&block->next, __ATOMIC_RELAXED));
        const uint64_t wanted = ((first & ~kAddress) + kAddress + 1) | (next & kAddress);
        if (list.compare_exchange_weak(first, wanted, std::memory_order_acquire)) return block;
    }
    return nullptr;
}

void keep_freed(std::atomic<uint64_t> &list, Header *block) {
    uint64_t first = list.load(std::memory_order_relaxed), wanted;
    do {
        __atomic_store_n(&block->next, reinterpret_cast<Header *>(first & kAddress), __ATOMIC_RELAXED);
        wanted = ((first & ~kAddress) + kAddress + 1) | reinterpret_cast<uint64_t>(block);
    } while (!list.compare_exchange_weak(first, wanted, std::memory_order_release));
}

// Returns a new block, or null if the system has no memory.
Header *cut(size_t size) {
    for (;;) {
        Area *now = area.load(std::memory_order_acquire);
        if (now) {
            const size_t at = now->used.fetch_add(size, std::memory_order_relaxed);
            if (at + size <= kArea) return reinterpret_cast<Header *>(reinterpret_cast<char *>(now) + at);
        }
        auto *fresh = static_cast<Area *>(map(kArea));
        if (!fresh) return nullptr;
        fresh->used = kUnit;
        if (!area.compare_exchange_strong(now, fresh)) munmap(fresh, kArea);
    }
}

void *allocate(size_t bytes) noexcept {
    if (bytes > SIZE_MAX / 2) return nullptr;
    size_t size = bytes + sizeof(Header), list = 0;
    Header *block;
    if (size > kLarge) {
        block = static_cast<Header *>(map(size));
    } else {
        size = rounded(size, list);
        block = take_freed(lists[list]);
        if (!block) block = cut(size);
    }
    if (!block) return nullptr;
    *block = {size, block};
    return block + 1;
}

// alignment: a power of two
void *allocate_aligned(size_t bytes, size_t alignment) noexcept {
    if (bytes > SIZE_MAX / 4 || alignment > SIZE_MAX / 4) return nullptr;
    void *memory = allocate(bytes + alignment);
    if (!memory) return nullptr;
    const auto at = (reinterpret_cast<uintptr_t>(memory) + alignment - 1) & ~(alignment - 1);
    auto *aligned = reinterpret_cast<Header *>(at);
    aligned[-1].next = static_cast<Header *>(memory) - 1;
    return aligned;
}

void release(void *memory) noexcept {
    if (!memory) return;
    Header *block = static_cast<Header *>(memory)[-1].next;
    if (block->size > kLarge) {
        munmap(block, block->size);
        return;
    }
    size_t list = 0;
    rounded(block->size, list);
    keep_freed(lists[list], block);
}

}  // namespace
}  // namespace gpubpf

// new[] and the other forms call these.
void *operator new(size_t bytes) {
    if (void *memory = gpubpf::allocate(bytes)) return memory;
    throw std::bad_alloc();
}
void *operator new(size_t bytes, std::align_val_t alignment) {
    if (void *memory = gpubpf::allocate_aligned(bytes, static_cast<size_t>(alignment))) return memory;
    throw std::bad_alloc();
}
void *operator new(size_t bytes, const std::nothrow_t &) noexcept { return gpubpf::allocate(bytes); }
void operator delete(void *memory) noexcept { gpubpf::release(memory); }
void operator delete(void *memory, size_t) noexcept { gpubpf::release(memory); }
void operator delete(void *memory, std::align_val_t) noexcept { gpubpf::release(memory); }
void operator delete(void *memory, size_t, std::align_val_t) noexcept { gpubpf::release(memory); }

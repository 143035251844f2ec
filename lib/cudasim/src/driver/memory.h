// The device's memory: one region of virtual addresses, from which device, pinned and managed
// allocations are cut. A device address is the host address of its bytes, so that generated code
// checks an access with one compare against the region and the page tables catch the rest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <shared_mutex>
#include <vector>

namespace cudasim {

enum class MemoryKind { device, pinned, managed, registered };

struct Allocation {
    uint64_t base = 0;  // first byte that belongs to the caller
    size_t size = 0;    // bytes asked for
    MemoryKind kind = MemoryKind::device;
    int device = 0;
    const void *owner = nullptr;   // handle of the context
    const void *pool = nullptr;    // handle of the memory pool, if it came from one
    unsigned flags = 0;            // as given to the call that made it
    uint64_t id = 0;               // never reused within a process
    uint64_t mapping = 0;          // first mapped page
    size_t mapped = 0;             // bytes mapped, whole pages
    size_t guard = 0;              // bytes behind it that are never mapped
    bool mapped_to_device = true;  // registered host memory: may kernels use it?
};

class Memory {
  public:
    // The one region of this process; reserved at first use, never given back.
    static Memory &instance();

    uint64_t begin() const { return begin_; }
    uint64_t end() const { return begin_ + reserved_; }
    // The end of the region is for constant variables, so that their addresses tell what they are.
    static constexpr size_t kConstants = size_t{1} << 30;
    uint64_t constants() const { return end() - kConstants; }

    // A new allocation of `size` bytes (> 0), at least 256-byte aligned, with an unmapped guard page behind it.
    // 0 when the device's total or the region is used up.
    uint64_t allocate(size_t size, MemoryKind kind, int device, const void *owner, unsigned flags = 0,
                      const void *pool = nullptr, bool constant = false);
    // Unmaps the allocation that begins at `base`; false when there is none, it is registered memory, or it has
    // another id than the one given (0: any).
    bool release(uint64_t base, uint64_t id = 0);

    // Host memory of the application, made known to the device. False when it overlaps something known.
    bool add_registered(uint64_t base, size_t size, int device, const void *owner, unsigned flags);
    bool remove_registered(uint64_t base);

    // The allocation that holds `address`.
    std::optional<Allocation> find(uint64_t address) const;
    // Do all `size` bytes from `address` lie in one allocation that kernels may use?
    bool covers(uint64_t address, size_t size) const;
    // Does any byte of [address, address + size) lie in the region or in registered memory?
    bool touches(uint64_t address, size_t size) const;
    bool in_region(uint64_t address) const { return address - begin_ < reserved_; }

    size_t used(int device) const;
    size_t total() const { return total_; }

    // Everything `owner` still holds (a context that is destroyed).
    std::vector<Allocation> owned_by(const void *owner) const;

  private:
    Memory();
    uint64_t take(std::map<uint64_t, size_t> &free, size_t bytes);
    void give(uint64_t base, size_t bytes);

    mutable std::shared_mutex mutex_;
    uint64_t begin_ = 0;
    size_t reserved_ = 0;
    size_t total_ = 0;
    uint64_t next_id_ = 1;
    std::map<uint64_t, size_t> free_, free_constant_;  // address → bytes, whole pages
    std::map<uint64_t, Allocation> allocations_;       // by base
    std::map<int, size_t> used_;                       // device → bytes
};

}  // namespace cudasim

// The device's memory: one region of virtual addresses, which holds device, pinned and managed allocations. A device
// address is also the host address of its bytes. So generated code checks an access with one comparison against the
// region, and the page tables catch the rest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <vector>

#include "driver/free_list.h"
#include "driver/memory_file.h"

namespace cudasim {

namespace driver {
struct MemoryPool;
}

enum class MemoryKind { device, pinned, managed, registered, mapped };  // mapped: by cuMemMap

struct Allocation {
    uint64_t base = 0;  // the address that the application gets
    size_t size = 0;    // bytes requested
    MemoryKind kind = MemoryKind::device;
    int device = 0;
    const void *owner = nullptr;               // handle of the context
    std::shared_ptr<driver::MemoryPool> pool;  // if it is from a memory pool
    std::shared_ptr<const FileRange> range;    // the memory, if it is from a shareable memory pool
    unsigned flags = 0;                        // of the call that allocated or registered it
    uint64_t id = 0;                           // never reused within a process
    uint64_t mapping = 0;                      // first mapped page
    size_t mapped = 0;                         // bytes mapped, whole pages
    size_t guard = 0;                          // bytes of the guard page after it, which is never mapped
    int file = -1;                             // of device memory that other processes can map, see share()
    bool mapped_to_device = true;              // whether kernels and copies may access it
};

class Memory {
  public:
    // The region of this process. It is reserved at first use and never released.
    static Memory &instance();

    uint64_t begin() const { return begin_; }
    uint64_t end() const { return begin_ + reserved_; }
    // The end of the region is reserved for constant variables, so that isspacep recognises their addresses.
    static constexpr size_t kConstantBytes = size_t{1} << 30;
    uint64_t constant_base() const { return end() - kConstantBytes; }

    // Allocates `size` bytes (> 0), at least 256-byte aligned, with an unmapped guard page after them. Returns 0 if the
    // device's memory or the region is exhausted.
    uint64_t allocate(size_t size, MemoryKind kind, int device, const void *owner, unsigned flags = 0,
                      bool constant = false);
    // Allocates device memory from a memory pool; from `file`, if it is not null.
    uint64_t allocate_from_pool(size_t size, int device, const void *owner,
                                const std::shared_ptr<driver::MemoryPool> &pool,
                                const std::shared_ptr<PoolFile> &file);
    // Maps memory that another process allocated: `size` bytes, which begin `start` bytes into the range. Returns 0 if the
    // region is exhausted.
    uint64_t import(const std::shared_ptr<const FileRange> &range, size_t start, size_t size, int device,
                    const void *owner, const std::shared_ptr<driver::MemoryPool> &pool);
    // Frees the allocation that begins at `base`. Returns false if no allocation begins there, if it is
    // registered memory, or if its id is not `id` (0: any id).
    bool release(uint64_t base, uint64_t id = 0);

    // Makes device memory that begins at `base` a file, which other processes can map; returns the file, -1: not possible. Nothing may
    // use the memory meanwhile. release() closes the file.
    int share(uint64_t base);

    // Registers host memory of the application. Returns false if it overlaps another allocation.
    bool add_registered(uint64_t base, size_t size, int device, const void *owner, unsigned flags);
    bool remove_registered(uint64_t base);

    // Virtual memory management. A reservation is a range of addresses without memory. `file` is physical memory, which can
    // be mapped anywhere in reservations, several times. All sizes are whole pages.
    uint64_t reserve(size_t size, size_t alignment);  // 0: the region is exhausted
    bool unreserve(uint64_t base, size_t size);       // false if anything is mapped there
    int create_file(size_t size, int device);         // -1: the device's memory is exhausted
    void close_file(int file, size_t size, int device);
    // Maps part of a file, without access. Returns false if the addresses are not reserved, or mapped already.
    bool map(uint64_t base, size_t size, int file, size_t offset, int device);
    // Returns the mappings that fill [base, base + size) exactly; nothing if they do not.
    std::vector<Allocation> mappings(uint64_t base, size_t size) const;
    bool unmap(const Allocation &mapping);
    void set_access(uint64_t base, bool accessible);  // of a mapping

    // Finds the allocation that contains `address`.
    std::optional<Allocation> find(uint64_t address) const;
    // Returns whether [address, address + size) lies in one allocation, or in mappings without gaps, and may be accessed.
    bool covers(uint64_t address, size_t size) const;
    // Returns whether any byte of [address, address + size) lies in the region or in registered memory.
    bool touches(uint64_t address, size_t size) const;
    bool in_region(uint64_t address) const { return address - begin_ < reserved_; }

    size_t used(int device) const;
    size_t total() const { return total_; }

    // Returns the allocations of a context.
    std::vector<Allocation> owned_by(const void *owner) const;

  private:
    Memory();
    // Maps new memory for an allocation, whose other members are set, and adds it. The mutex must be held. `start`:
    // see import().
    uint64_t add(Allocation allocation, bool constant = false, size_t start = 0);
    bool counts(const Allocation &allocation) const {  // as memory of the device that this process uses
        return allocation.kind != MemoryKind::pinned &&
               !(allocation.range && allocation.range->file->imported());
    }
    FreeList &free_list(uint64_t address) { return address >= constant_base() ? free_constant_ : free_; }

    mutable std::shared_mutex mutex_;
    uint64_t begin_ = 0;
    size_t reserved_ = 0;
    size_t total_ = 0;
    uint64_t next_id_ = 1;
    FreeList free_, free_constant_;               // whole pages
    std::map<uint64_t, Allocation> allocations_;  // by base
    struct Reservation {
        size_t size = 0;
        uint64_t taken = 0;  // the range of the free list that it is in
        size_t taken_size = 0;
    };
    std::map<uint64_t, Reservation> reservations_;  // by base
    std::map<int, size_t> used_;                    // device → bytes
};

}  // namespace cudasim

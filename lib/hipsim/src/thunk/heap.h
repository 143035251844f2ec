// The memory that devices may use: allocations, and memory that the program registered.
//
// Device addresses are the host's, except for registered memory: there bit 47 is set (engine.h). All device memory comes
// from one memory file, so that other processes can map it (ipc.cpp). Each allocation is followed by a page that is never
// mapped, so that accesses past its end are found.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>
#include <vector>

#include <hsakmt.h>

namespace hipsim {

inline constexpr uint64_t kPage = 4096;
constexpr char kMemoryFile[] = "hipsim device memory";  // name of the file of device memory
inline constexpr uint32_t kMaxNodes = 5;                // the host, and up to four GPUs

// Nodes in the form in which hsaKmtQueryPointerInfo returns them. Readers may hold on to the array.
struct Nodes {
    std::array<HSAuint32, kMaxNodes> list{};
    HSAuint32 count = 0;
    bool contains(uint32_t node) const;
    void add(uint32_t node);
};

struct Allocation {
    HSA_POINTER_TYPE type = HSA_POINTER_ALLOCATED;
    uint64_t begin = 0, end = 0;     // whole pages that a device with access can reach
    uint64_t address = 0, size = 0;  // as the caller gave them
    uint64_t offset = 0;             // in the memory file; kNoFile for other memory
    uint64_t guard = 0;              // reserved bytes after the end
    uint32_t node = 0;
    HsaMemFlags flags{};
    bool local = false;  // counts against the memory of its node
    Nodes registered, mapped;
    std::map<uint64_t, uint64_t> parts;  // of scratch: what is mapped, end by begin
    void *user_data = nullptr;
};

inline constexpr uint64_t kNoFile = ~uint64_t{0};

class Heap {
  public:
    HSAKMT_STATUS allocate(uint32_t node, uint64_t size, uint64_t alignment, HsaMemFlags flags,
                           void **address);
    HSAKMT_STATUS release(void *address);

    // Memory of the program (registered), and of another process (imported from its memory file).
    HSAKMT_STATUS add_registered(void *address, uint64_t size, HsaMemFlags flags, const Nodes &nodes);
    HSAKMT_STATUS import(int file, uint64_t offset, uint64_t size, uint32_t node, const Nodes &nodes,
                         void **address);
    HSAKMT_STATUS deregister(void *address);

    // An empty list of nodes stands for all GPUs. Sets `device` to the device's address; 0 if it is the host's address.
    // Scratch belongs to one GPU, and is mapped there in parts of `size` bytes; other memory is mapped as a whole.
    HSAKMT_STATUS map(void *address, uint64_t size, const Nodes &nodes, uint64_t *device = nullptr);
    HSAKMT_STATUS unmap(void *address);

    HSAKMT_STATUS describe(const void *address, HsaPointerInfo *info);
    HSAKMT_STATUS set_user_data(const void *address, void *data);

    // Finds the allocation around an address that is mapped to a GPU. Without one, both ends are 0.
    void range(uint32_t node, uint64_t address, uint64_t *begin, uint64_t *end, bool *may_write);
    bool usable(uint32_t node, uint64_t address, uint64_t size, bool write);

    // Finds the allocation that begins at an address, for export to other processes. Returns false if there is none.
    bool exported(void *address, uint64_t *offset, uint64_t *size, uint32_t *node, int *file);

    uint64_t available(uint32_t node);

    // While a device works, memory that the program frees stays readable: the device may have looked it up just before.
    void enter();
    void leave();

  private:
    using Map = std::map<uint64_t, std::unique_ptr<Allocation>>;

    void *reserve(uint64_t size, uint64_t alignment, void *fixed);
    bool back(void *address, uint64_t size, uint64_t *offset);
    void discard(std::unique_ptr<Allocation> allocation);
    Allocation *find(uint64_t address);  // for the host's and the device's addresses
    Allocation *find_exactly(const void *address);

    std::shared_mutex mutex_;
    Map map_;                                              // by first page; ranges never overlap
    std::vector<std::unique_ptr<Allocation>> registered_;  // the program's ranges may overlap
    std::vector<std::unique_ptr<Allocation>> freed_;       // unmapped when no device works
    std::array<uint64_t, kMaxNodes> used_{};
    int working_ = 0;
    int file_ = -1;
    bool no_file_ = false;
    uint64_t file_size_ = 0;
};

Heap &heap();

}  // namespace hipsim

// Files in memory (memfd), whose contents several processes can map.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "driver/free_list.h"

namespace cudasim {

// Makes a file in memory that no process can make smaller. Returns -1 if that is not possible.
int make_file(size_t size);

class PoolFile;

// A part of a pool's file: whole pages. In the process that owns the pool, the part is unused again when this ends.
struct FileRange {
    std::shared_ptr<PoolFile> file;
    uint64_t offset = 0;
    size_t bytes = 0;
    FileRange(std::shared_ptr<PoolFile> in, uint64_t at, size_t size);
    FileRange(const FileRange &) = delete;
    FileRange &operator=(const FileRange &) = delete;
    ~FileRange();
};

// The file that holds the allocations of a shareable memory pool. It grows with them.
class PoolFile : public std::enable_shared_from_this<PoolFile> {
  public:
    static std::shared_ptr<PoolFile> create(int device);  // null: no memory
    // Opens the pool of another process, by a descriptor that remains the caller's. Null: it is not the file of a pool.
    static std::shared_ptr<PoolFile> import(int descriptor);
    PoolFile(const PoolFile &) = delete;
    PoolFile &operator=(const PoolFile &) = delete;
    ~PoolFile();

    int file() const { return file_; }
    int device() const { return device_; }
    bool imported() const { return imported_; }
    uint64_t inode() const { return inode_; }  // which file it is, for all processes

    std::shared_ptr<const FileRange> take(size_t bytes);  // for a new allocation; null: no memory
    // Returns the part of an allocation of another process; null if it is not inside of the file.
    std::shared_ptr<const FileRange> part(uint64_t offset, size_t bytes);

  private:
    friend struct FileRange;
    PoolFile(int file, int device, bool imported);

    int file_, device_;
    bool imported_;
    uint64_t inode_ = 0;
    std::mutex mutex_;
    FreeList free_;
    size_t size_ = 0;  // of the file
};

}  // namespace cudasim

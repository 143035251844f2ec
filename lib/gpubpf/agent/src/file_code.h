// Reads the code of functions as it was before anything changed it in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gpubpf {

// Reads code from the files that it was mapped from.
class FileCode {
  public:
    FileCode() = default;
    FileCode(const FileCode &) = delete;
    FileCode &operator=(const FileCode &) = delete;
    ~FileCode();
    // Return up to `size` bytes of code at `at`; fewer at the end of a mapping. If the file was deleted or replaced, read memory.
    std::vector<uint8_t> read(const uint8_t *at, size_t size);

  private:
    struct Mapping {
        uintptr_t start, end;
        uint64_t offset;
        int file;  // descriptor; -1: no such file
    };
    Mapping *mapping_of(uintptr_t at);
    std::vector<Mapping> mappings_;
};

}  // namespace gpubpf

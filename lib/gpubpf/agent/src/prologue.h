// Hooks beside the kernel's uprobes, which other tracers set where a function begins.
//
// The kernel writes its breakpoint (or, over a five-byte nop, a call) there whenever it likes, runs the instruction as the file has it, and
// goes on behind it: a hook in the same bytes would be torn apart. So a hook leaves a function's first instruction where it is, and
// begins behind it; what that instruction did is undone before the replacement runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gpubpf {

// The first instruction of a function as far as it can be undone.
struct Prologue {
    size_t length = 0;  // 0: it cannot
    uint8_t undo[8];
    size_t undo_size = 0;  // 0: it did nothing that a replacement would notice
};
Prologue prologue_of(const uint8_t *code);

// Code as it lies in the files that it was mapped from, whatever anybody has put into memory since.
class FileCode {
  public:
    FileCode() = default;
    FileCode(const FileCode &) = delete;
    FileCode &operator=(const FileCode &) = delete;
    ~FileCode();
    // Up to `size` bytes from `at` on; as many as there are. Of a file that is gone: what memory has.
    std::vector<uint8_t> read(const uint8_t *at, size_t size);

  private:
    struct Part {
        uintptr_t start, end;
        uint64_t offset;
        int file;
    };
    Part *part_of(uintptr_t at);
    std::vector<Part> parts_;
};

}  // namespace gpubpf

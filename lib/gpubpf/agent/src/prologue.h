// Keeps hooks apart from the kernel's uprobes, which other tracers put at the beginning of functions.
//
// The kernel can write a breakpoint there at any time (or a call, over a five-byte nop). When a thread reaches it, the kernel runs
// the file's instruction instead, and continues after it. A hook in the same bytes would be torn apart. So a hook leaves a
// function's first instruction in place and begins after it. The instruction's effect is undone before the replacement runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gpubpf {

// A function's first instruction, if its effect can be undone.
struct Prologue {
    size_t length = 0;     // 0: it cannot be undone
    uint8_t undo[8];       // code
    size_t undo_size = 0;  // 0: the replacement does not notice the effect
};
Prologue prologue_of(const uint8_t *code);

// Reads code from the files that it was mapped from, to see it without changes made in memory.
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

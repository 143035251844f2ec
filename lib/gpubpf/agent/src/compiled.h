// The PTX that a cubin was made from, as long as the program has both.
//
// The agent and the embedded device use this file and compilers.h, so neither file depends on the rest of the agent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>

namespace gpubpf {

constexpr size_t kMostPtx = 256u << 20;  // bytes of PTX to remember in total

// What a compiler or a linker made one cubin from.
struct Inputs {
    uint32_t count = 0;                           // inputs of any kind
    uint32_t texts = 0;                           // those that were PTX
    uint32_t lto = 0;                             // those that were LTO-IR, which has no PTX
    std::string text;                             // the PTX inputs, separated by zero bytes; empty if `lost`
    bool lost = false;                            // a PTX input could not be read, or was too large
    void add_ptx(const char *ptx, size_t bytes);  // up to the first zero byte
    void add(const Inputs &of);                   // a cubin that was itself made from these
    void add_other() { ++count; }
    void add_lto() { ++count, ++lto; }
};

// Cubins and their inputs, found by content, because programs move cubins. The oldest are forgotten.
class Compiled {
  public:
    void remember(const void *cubin, size_t bytes, Inputs of);
    bool find(const void *cubin, size_t bytes, Inputs &of);

  private:
    struct Result {
        uint64_t bytes, hash;
        Inputs of;
    };
    std::mutex lock_;  // guards the members below
    std::deque<Result> results_;
    size_t text_ = 0;  // bytes
};

}  // namespace gpubpf

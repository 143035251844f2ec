// The ranges that a program marks, and which of them a launch is in.
//
// A program may open ranges before a tool is attached, so they are followed from the start of the process.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lifetime.h"

namespace gpubpf {

extern const Lifetime ranges_lifetime;

// The same text always has the same number, from 1 to kMostTexts. Returns kUnknownText if there are too many texts.
constexpr uint32_t kMostTexts = 1 << 16, kUnknownText = UINT32_MAX;
uint32_t text_number(std::string_view text) noexcept;

// Open and close ranges of the calling thread. `domain`, `name`: numbers of texts; domain 0: the default one. Both return the level of
// the range among those of its domain, from 0, or -1 if the thread has none there.
int push_range(uint32_t domain, uint32_t name) noexcept;
int pop_range(uint32_t domain) noexcept;
// Open and close ranges of the process. Each thread may close them.
uint64_t start_range(uint32_t domain, uint32_t name) noexcept;  // 0: there are too many
void end_range(uint64_t id) noexcept;

// number: of the ranges that the calling thread and the process have open; 0: none are open, or there are too many different ones.
// chosen: the name of one of them matches a glob, or there are no globs.
struct OpenRanges {
    uint32_t number;
    bool chosen;
};
// Call it only during an attachment. Sends new combinations of ranges to the tool.
OpenRanges open_ranges(const std::vector<std::string> &globs) noexcept;

}  // namespace gpubpf

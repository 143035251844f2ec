// The tool's messages (Welcome, Sidecar), checked. definitions.py declares and documents them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "definitions.h"
#include "wire.h"

namespace gpubpf {

using message::BlockField;
using message::MapSpec;
using message::VariableSlot;
using Config = message::AgentConfig;
using Layout = message::KernelLayout;

// Whether the whole context shares the memory. Otherwise each instance of a kernel has its own.
inline bool is_shared(const MapSpec &map) { return map.unit == Unit::Context; }

inline uint64_t rows_kept(const Config &config) {
    return config.maps[config.kept.source].fixed / (config.kept.slots * 8ull);
}

constexpr uint32_t kLowLiteral = 8,
                   kHighLiteral = 16;  // of a reference (message::KernelLayout): bytes from its place

struct Answer : message::Answer {
    std::vector<char> image;  // ends with a zero byte; empty: nothing matches
};

// Reads a Welcome. Returns false if it is not valid.
bool parse_welcome(Reader &reader, message::Welcome &welcome);
// Makes an answer of what the tool sent. `image`: the file that came with it, or -1. Returns null if it is not valid.
std::shared_ptr<const Answer> checked_answer(message::Answer &&sent, int image,
                                             const std::vector<MapSpec> &maps);

}  // namespace gpubpf

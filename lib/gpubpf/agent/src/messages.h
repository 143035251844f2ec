// The tool's messages (Welcome, Sidecar), decoded. protocol.py encodes them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "definitions.h"
#include "wire.h"

namespace gpubpf {

struct MapSpec {
    // In bytes. Per context: `fixed`. Per instance: `fixed`, and `per_unit` for each unit (for Site: for each
    // site and shard). For rings, `fixed` is the limit of all records together, and `per_unit` is the stride
    // of a record.
    uint64_t fixed = 0, per_unit = 0;
    Unit unit = Unit::Context;
    Place place = Place::Gpu;
    std::vector<uint8_t> initial;  // initial contents; the rest is zero

    // Whether the whole context shares the memory. Otherwise each instance of a kernel has its own.
    bool shared() const { return unit == Unit::Context; }
};

// A map whose rows have one word for each of `slots` launches (`source`). After a wait, the largest word of a launch
// is kept in a shared array (`target`), at byte `offset` of an element. Snapshots contain only the largest word of
// each launch, not the whole `source`.
struct Kept {
    uint32_t source = 0, target = 0, offset = 0, slots = 0;  // maps by number; slots: 0: nothing is kept
};

struct Config {
    uint64_t process = 0;  // number of this process in the session
    std::string owner;     // name of the tool, for messages
    uint64_t map_memory = 0;
    uint64_t first = 1, last = UINT64_MAX, sample = 1;
    uint32_t image_wait_ms = 0;
    bool memory_is_zero = false;
    uint64_t log_records = 0;  // size of the operation log, a power of two; 0: no log
    bool stamps = false;       // timing events around operations that no probe measures
    bool stacks = false;       // host stacks of launches
    bool allocation_stacks = false;
    bool graphs = false;     // kernels in graphs are instrumented
    bool match_all = false;  // every kernel matches, even if its name was never seen
    bool budget = false;     // launches are measured as Slot::one_in says
    uint64_t pump = 0;       // the maps are read after this many launches, without a request; 0: never
    std::vector<MapSpec> maps;
    Kept kept;
    uint64_t rows_kept() const { return maps[kept.source].fixed / (kept.slots * 8ull); }
    // Cubins of clock.ptx by compute capability, ascending; without the right one, the driver compiles the PTX.
    std::vector<std::pair<uint32_t, std::vector<uint8_t>>> clock_kernels;
};

struct BlockField {                              // a map's location in the launch block
    uint32_t map, base_offset, capacity_offset;  // capacity_offset: kNoField for maps of the context
};

// A reference in an AMD GPU's code object: an address that a copied kernel computes from the program counter, and that must point
// into the original code object. `place`: offset of s_getpc_b64 from the kernel descriptor, in bytes; `distance`: its two literals.
struct CodeReference {
    int64_t place;
    uint64_t distance;
};
constexpr uint32_t kLowLiteral = 8, kHighLiteral = 16;  // bytes from `place`

struct Layout {  // the layout of one instrumented kernel
    std::string name;
    std::vector<uint32_t> sizes;   // sizes of the application's parameters in bytes
    uint32_t block_offset = 0;     // offset of the launch block in the parameter buffer
    uint32_t pid_tgid = kNoField;  // offset of the launching thread's id in the block
    bool waits = true;             // its blocks may wait for each other
    uint32_t sites = 0;
    uint32_t build = 0;   // the tool's number of this build, among those of kernels with this name
    std::string limited;  // name of a second copy, which uses fewer registers; empty: none
    // offsets of the kernel's number and of the allocation epoch in the block
    uint32_t kernel = kNoField, epoch = kNoField;
    uint32_t shape = kNoField;       // offset of the launch shape in the block
    uint32_t tick = kNoField;        // offset of an AMD GPU's tick length in the block
    uint32_t executions = kNoField;  // offset in the block of the address of Instance::executions
    uint32_t wave = 32;              // lanes per warp
    // How many of an AMD GPU's compute units a block can use (2 in WGP mode), and the threads that fit on
    // these at once, in the copy and in the original.
    uint32_t compute_units = 1;
    bool patched = false;  // the program's own kernel is launched, which has patches (copies/patches.h)
    uint32_t most_threads = UINT32_MAX, original_threads = UINT32_MAX;
    std::vector<uint8_t> block;
    std::vector<BlockField> fields;
    std::vector<CodeReference> references;
};

struct Variable {
    std::string name;
    uint32_t index = 0;
    bool copied = false;
    // Unless kNoField: the slot holds not the variable's address, but the function's address at this offset in it.
    uint32_t entry = kNoField;
    // Why the kernels cannot be instrumented if the program may have changed that entry; "": it cannot.
    std::string refusal;
    std::vector<std::string> kernels;  // kernels that need it
};

struct Answer {
    std::vector<char> image;  // ends with a zero byte; empty: nothing matches
    std::vector<Layout> kernels;
    std::vector<std::pair<std::string, std::string>> refusals;
    std::vector<Variable> variables;
    // Kernels that kernels launch, and the names of their copies.
    std::vector<std::pair<std::string, std::string>> launched;
    // Kernels whose copies the tool makes when Message::Kernel asks for them, and those that were probably launched before.
    std::vector<std::string> later, first;
    // The image has patches: numbers of instructions, and names of the functions for them.
    std::vector<std::pair<uint32_t, std::string>> patches;
};

// Reads a Welcome up to its host programs. Returns false if it is not valid.
bool parse_welcome(Reader &r, Config &config);
// Reads a Sidecar after its request number. `image`: the file that came with it, or -1. Returns null if it is not valid.
std::shared_ptr<const Answer> parse_answer(Reader &reader, int image, const std::vector<MapSpec> &maps);

}  // namespace gpubpf

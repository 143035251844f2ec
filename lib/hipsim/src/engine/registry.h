// Which function executes which instruction.

#pragma once

#include "engine/wave.h"

#include <string>
#include <string_view>
#include <unordered_map>

namespace hipsim {

// How to read constants and modifiers of an operand.
enum class Type : uint8_t { none, b32, f32, b64, i64, f64, b16, f16, packed16, packed_f16, packed_f32 };

struct Semantics {
    Handler run = nullptr;
    Handler run_clamped = nullptr;  // of integers with the clamp bit; null: clamp is not supported
    Type dst = Type::none;
    Type src[3] = {};
    bool accumulates = false;      // the third source is the destination
    bool keeps_high_half = false;  // a 16-bit result leaves the other half of the register; GFX10's all do
    bool own_op_sel = false;       // op_sel means something else
    uint8_t blocks = 0;            // of a matrix product
};

using Registry = std::unordered_map<std::string_view, Semantics>;

// Keeps a name that was built at run time.
const char *intern(const std::string &name);

// The scalar unit's instructions are compiled once, those of the lanes for each level of the CPU's vectors.
void add_scalar(Registry &registry);
void add_gws(Registry &registry);
namespace plain {
void add_vector(Registry &registry);
}
namespace avx2 {
void add_vector(Registry &registry);
}

// All instructions of a family that the engine can execute, with the widest vectors of this CPU. HIPSIM_VECTORS=plain|avx2 chooses.
const Registry &registry(isa::Family family);

}  // namespace hipsim

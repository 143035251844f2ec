// Which function executes which instruction.

#pragma once

#include "engine/wave.h"

#include <initializer_list>
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

// The levels add hundreds of instructions. What builds their names is here, where it is compiled once.

// Adds an instruction whose name is the concatenation of `parts`.
Semantics &add(Registry &registry, std::initializer_list<std::string_view> parts, const Semantics &semantics);

// The names and handlers of an atomic. A name is empty if memory or LDS does not have it.
struct Atomic {
    std::string_view memory, lds;
    std::string_view type;  // a letter, part of the name in LDS
    unsigned bits;
    Handler in_memory, in_lds, returns_from_lds;
    Handler src2 = nullptr;  // takes its data from LDS, too
};
void add_atomic(Registry &registry, const Atomic &atomic);
// Adds a load or store that FLAT, GLOBAL, SCRATCH and MUBUF have.
void add_everywhere(Registry &registry, std::string_view name, Handler handler);
// Adds a comparison, and the form of it that also writes EXEC.
void add_comparison(Registry &registry, std::string_view operation, std::string_view type,
                    const Semantics &semantics, Handler writes_exec);
// Adds a matrix product. size, depth, blocks: its shape.
void add_product(Registry &registry, std::string_view result, std::string_view type, unsigned size,
                 unsigned depth, unsigned blocks, Type sum, Handler handler);

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

// All vector instructions of one level of the CPU's vectors. Included by level_*.cpp, inside a namespace of its own.

namespace {
#include "engine/lanes.inl"
#include "engine/valu_integer.inl"
#include "engine/valu_float.inl"
#include "engine/valu_cross.inl"
#include "engine/memory.inl"
#include "engine/valu_gfx10.inl"
#include "engine/matrix.inl"
}  // namespace

void add_vector(Registry &registry) {
    Adder adder{registry};
    add_integer(adder);
    add_single(adder);
    add_double(adder);
    add_half(adder);
    add_comparisons(adder);
    add_cross(adder);
    add_memory(registry);
    add_gfx10(adder);
    add_matrix(registry);
}

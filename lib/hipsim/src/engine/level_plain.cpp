// The vector instructions, compiled for the vectors that every x86-64 has (or none, on other CPUs).

#include "engine/half.h"
#include "engine/registry.h"
#include "engine/transcendental.h"

#include <bit>
#include <cfenv>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace hipsim::plain {
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

}  // namespace hipsim::plain

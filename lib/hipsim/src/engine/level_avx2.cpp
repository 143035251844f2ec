// The vector instructions, compiled for AVX2.

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

#ifdef __x86_64__
#include <immintrin.h>

#pragma GCC target("avx2,fma,f16c,bmi,bmi2,lzcnt,popcnt")

namespace hipsim::avx2 {
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

}  // namespace hipsim::avx2

#else
namespace hipsim::avx2 {
void add_vector(Registry &registry) { plain::add_vector(registry); }
}  // namespace hipsim::avx2
#endif

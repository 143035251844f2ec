// The vector instructions, compiled for AVX2.

#include "engine/level.h"

namespace hipsim::avx2 {
#ifdef __x86_64__
#pragma GCC target("avx2,fma,f16c,bmi,bmi2,lzcnt,popcnt")
#include "engine/level.inl"
#else
void add_vector(Registry &registry) { plain::add_vector(registry); }
#endif
}  // namespace hipsim::avx2

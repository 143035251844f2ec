/*
 * gpubpf_floats.h: finds NaN, infinities and denormal numbers in the bits of values, because eBPF has no floating point. `low` and `high`
 * are the bytes of up to 16 elements of one type; missing elements are 0. A word is 8 bytes of elements.
 *
 * Where nobody knows what bits are (b16, b32, b64), they count as the floating-point types of their sizes. Integers never do: many of
 * them would look like NaN.
 */
#ifndef GPUBPF_FLOATS_H
#define GPUBPF_FLOATS_H

#include <gpubpf.h>

#define GPU_TYPE(_name) (1ull << GPU_##_name)
#define GPU_TYPES_SIGNED (GPU_TYPE(S8) | GPU_TYPE(S16) | GPU_TYPE(S32) | GPU_TYPE(S64))
#define GPU_TYPES_8 (GPU_TYPE(B8) | GPU_TYPE(U8) | GPU_TYPE(S8))
#define GPU_TYPES_F16 (GPU_TYPE(B16) | GPU_TYPE(F16))
#define GPU_TYPES_F32 (GPU_TYPE(B32) | GPU_TYPE(F32))
#define GPU_TYPES_F64 (GPU_TYPE(B64) | GPU_TYPE(F64))
#define GPU_TYPES_16 (GPU_TYPES_F16 | GPU_TYPE(BF16) | GPU_TYPE(U16) | GPU_TYPE(S16))
#define GPU_TYPES_32 (GPU_TYPES_F32 | GPU_TYPE(U32) | GPU_TYPE(S32))

/* All bits if the type is one of these, otherwise none. */
static inline u64 gpu_is(u64 type, u64 types) { return -(types >> (type & 63) & 1); }
/* The first element: sign-extended if the type is signed, otherwise zero-extended. unused: the bits above it. */
static inline u64 gpu_element(u64 type, u64 low) {
    u64 unused = 56 & gpu_is(type, GPU_TYPES_8) | 48 & gpu_is(type, GPU_TYPES_16) | 32 & gpu_is(type, GPU_TYPES_32);
    u64 sign = (u64)((s64)(low << unused) >> 63) & gpu_is(type, GPU_TYPES_SIGNED);
    return low << unused >> unused | sign & ~(~0ull >> unused);
}
/* The sign bit of each element, and the bits of its fraction. Types that are not floating-point numbers have none. */
static inline u64 gpu_signs(u64 type) {
    return gpu_is(type, GPU_TYPES_F16 | GPU_TYPE(BF16)) & 0x8000800080008000ull |
           gpu_is(type, GPU_TYPES_F32) & 0x8000000080000000ull | gpu_is(type, GPU_TYPES_F64) & 1ull << 63;
}
static inline u64 gpu_fractions(u64 type) {
    return gpu_is(type, GPU_TYPES_F16) & 0x03ff03ff03ff03ffull |
           gpu_is(type, GPU_TYPE(BF16)) & 0x007f007f007f007full |
           gpu_is(type, GPU_TYPES_F32) & 0x007fffff007fffffull |
           gpu_is(type, GPU_TYPES_F64) & 0x000fffffffffffffull;
}
/*
 * The following return the sign bit of each element of a word that is NaN, NaN or infinite, 0, or denormal. A sum of two numbers without
 * sign bits carries into the sign bit of an element, and never further.
 *
 * Without its sign bit, a NaN is larger than infinity, which is all ones above the fraction. So adding the largest fraction carries
 * into the sign bit of a NaN, and of nothing else.
 */
static inline u64 gpu_nans(u64 type, u64 word) {
    u64 signs = gpu_signs(type);
    return (word & ~signs) + gpu_fractions(type) & signs;
}
static inline u64 gpu_not_finite(u64 type, u64 word) {
    u64 signs = gpu_signs(type), fractions = gpu_fractions(type), least = fractions << 1 & ~fractions;
    return (word & ~signs) + least & signs;  /* least: that of the exponent's bits */
}
static inline u64 gpu_zeros(u64 type, u64 word) {
    u64 signs = gpu_signs(type);
    return ~((word & ~signs) + ~signs) & signs;
}
static inline u64 gpu_denormals(u64 type, u64 word) {
    u64 signs = gpu_signs(type);
    return gpu_zeros(type, word & ~gpu_fractions(type)) & ~gpu_zeros(type, word) & signs;
}
static inline u64 gpu_isnan(u64 type, u64 low, u64 high) {
    return (u64)!!(gpu_nans(type, low) | gpu_nans(type, high));
}
static inline u64 gpu_isinf(u64 type, u64 low, u64 high) {
    return (u64)!!(gpu_not_finite(type, low) & ~gpu_nans(type, low) | gpu_not_finite(type, high) & ~gpu_nans(type, high));
}
#endif

"""The values of loads, stores, atomics and instructions: what expressions may name, its C text, and numbers on the host.

eBPF has no floating point, so a program looks at bits. Where nobody knows what bits are (b16, b32, b64), they are taken for the
floating-point types of their sizes. Integers never are: many of them would look like NaN.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from gpubpf.ebpf.bytecode import OPERANDS, TYPES
from gpubpf.expressions.evaluate import signed
from gpubpf.record import Record


class Value(Record):
    """A name, or a function of one. c: its C text. fields: those of the context that it reads."""

    c: str
    fields: tuple[str, ...]


def _of(name: str, *whole: str) -> dict[str, Value]:
    """Return the names for a value: its first element, and whether any of its elements is NaN, or infinite.

    whole: the fields with its type, its first 8 bytes and, if it may have more, the next 8."""
    arguments = ", ".join([*(f"ctx_{field}" for field in whole), "0ull"][:3])
    return {
        name: Value(f"gpu_element(ctx_{whole[0]}, ctx_{whole[1]})", whole[:2]),
        f"isnan({name})": Value(f"gpu_isnan({arguments})", whole),
        f"isinf({name})": Value(f"gpu_isinf({arguments})", whole),
    }


# The names that gputrace can show as a floating-point number, and the fields with their types.
ELEMENTS = {"value": "type", "old": "type", **dict.fromkeys(OPERANDS, "operand_type")}
VALUES: Mapping[str, Value] = {
    **_of("value", "type", "low", "high"),
    **_of("old", "type", "old_low", "old_high"),
    **{name: one for field in OPERANDS for name, one in _of(field, "operand_type", field).items()},
}

# The functions of VALUES. `low` and `high` are the bytes of up to 16 elements of one type; missing elements are 0.
FUNCTIONS = """
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
/* Without its sign bit, a NaN is larger than infinity, which is all ones above the fraction. So adding the largest fraction carries
   into the sign bit of a NaN, and of nothing else. */
static inline u64 gpu_isnan(u64 type, u64 low, u64 high) {
    u64 signs = gpu_signs(type), fractions = gpu_fractions(type);
    return (u64)!!((((low & ~signs) + fractions) | ((high & ~signs) + fractions)) & signs);
}
/* The sign bit of each element that is not infinite. */
static inline u64 gpu_not_infinite(u64 word, u64 signs, u64 infinities) {
    return ((word & ~signs ^ infinities) + ~signs) & signs;
}
static inline u64 gpu_isinf(u64 type, u64 low, u64 high) {
    u64 signs = gpu_signs(type), infinities = ~signs & ~gpu_fractions(type);
    return (u64)((gpu_not_infinite(low, signs, infinities) & gpu_not_infinite(high, signs, infinities)) != signs);
}
"""
_AS_FLOATS = {"b16": "f16", "b32": "f32", "b64": "f64"}
_FORMS = {"f16": ("<H", "<e"), "bf16": ("<I", "<f"), "f32": ("<I", "<f"), "f64": ("<Q", "<d")}


def as_float(element: int, number: int) -> float:
    """Return a first element as a floating-point number. number: of its type, in TYPES.

    b16, b32 and b64 are read as the floating-point types of their sizes, other integers as their values."""
    kind = TYPES[number] if number < len(TYPES) else ""  # the traced program can write to the ring
    kind = _AS_FLOATS.get(kind, kind)
    if kind not in _FORMS:
        return float(signed(element) if kind.startswith("s") else element)
    bits, form = _FORMS[kind]
    raw = element << 16 if kind == "bf16" else element
    return float(struct.unpack(form, struct.pack(bits, raw & (1 << 8 * struct.calcsize(bits)) - 1))[0])

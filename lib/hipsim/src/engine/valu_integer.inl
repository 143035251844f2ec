// Integer and bit instructions of the VALU.

inline uint32_t saturate_u32(uint64_t x) { return x > 0xFFFFFFFF ? 0xFFFFFFFF : uint32_t(x); }
inline uint32_t saturate_u32(int64_t x) { return x < 0 ? 0 : saturate_u32(uint64_t(x)); }
inline int32_t saturate_i32(int64_t x) {
    return int32_t(x < INT32_MIN ? INT32_MIN : x > INT32_MAX ? INT32_MAX : x);
}
inline uint16_t saturate_u16(int64_t x) { return uint16_t(x < 0 ? 0 : x > 0xFFFF ? 0xFFFF : x); }
inline int16_t saturate_i16(int64_t x) { return int16_t(x < -0x8000 ? -0x8000 : x > 0x7FFF ? 0x7FFF : x); }

inline int32_t signed24(int32_t x) { return int32_t(uint32_t(x) << 8) >> 8; }
inline uint32_t unsigned24(uint32_t x) { return x & 0xFFFFFF; }
template <class T>
inline T least(T a, T b) {
    return a < b ? a : b;
}
template <class T>
inline T most(T a, T b) {
    return a > b ? a : b;
}
template <class T>
inline T middle(T a, T b, T c) {
    return most(least(a, b), least(most(a, b), c));
}

inline uint32_t reverse_bits(uint32_t x) {
    x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
    x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
    x = (x >> 4 & 0x0F0F0F0F) | (x & 0x0F0F0F0F) << 4;
    return x >> 24 | (x >> 8 & 0xFF00) | (x & 0xFF00) << 8 | x << 24;
}
inline uint32_t absolute_difference(uint32_t a, uint32_t b) { return a > b ? a - b : b - a; }
inline uint32_t byte_of(uint64_t word, unsigned n) { return uint32_t(word >> (8 * n)) & 0xFF; }
// Sum of absolute differences of four bytes; with `masked`, zero bytes of b are left out.
inline uint32_t sad_bytes(uint32_t a, uint32_t b, bool masked) {
    uint32_t sum = 0;
    for (unsigned n = 0; n < 4; ++n)
        if (!masked || byte_of(b, n)) sum += absolute_difference(byte_of(a, n), byte_of(b, n));
    return sum;
}

inline uint32_t permute_byte(uint64_t bytes, uint32_t selector) {
    if (selector >= 13) return 0xFF;
    if (selector == 12) return 0;
    if (selector >= 8) return (bytes >> (16 * (selector - 8) + 15) & 1) ? 0xFF : 0;  // the sign of a half
    return byte_of(bytes, selector);
}

inline void add_integer(Adder &a) {
    using u32 = uint32_t;
    using i32 = int32_t;
    using u64 = uint64_t;
    using i64 = int64_t;
    using u16 = uint16_t;
    using i16 = int16_t;

    a.op<U32, U32>("v_mov_b32", [](u32 x) { return x; });
    for (const char *name : {"v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32"})
        a.op<U32, U32>(name, [](u32 x) { return x; });
    a.op<U32, U32>("v_not_b32", [](u32 x) { return ~x; });
    a.op<U32, U32>("v_bfrev_b32", [](u32 x) { return reverse_bits(x); });
    a.op<U32, U32>("v_ffbh_u32", [](u32 x) { return x ? u32(std::countl_zero(x)) : ~0u; });
    a.op<U32, U32>("v_ffbl_b32", [](u32 x) { return x ? u32(std::countr_zero(x)) : ~0u; });
    a.op<U32, I32>("v_ffbh_i32", [](i32 x) {
        u32 flipped = u32(x < 0 ? ~x : x);
        return flipped ? u32(std::countl_zero(flipped)) : ~0u;
    });
    a.op<U32, U32>("v_sat_pk_u8_i16", [](u32 x) {
        auto saturate = [](i16 half) { return u32(half < 0 ? 0 : half > 255 ? 255 : half); };
        return saturate(i16(x)) | saturate(i16(x >> 16)) << 8;
    });

    a.op<U32, M32, M32, Mask>("v_cndmask_b32", [](u32 x, u32 y, u32 c) { return c ? y : x; });
    a.op<U32, U32, U32>(
        "v_add_u32", [](u32 x, u32 y) { return x + y; },
        [](u32 x, u32 y) { return saturate_u32(u64{x} + y); });
    a.op<U32, U32, U32>(
        "v_sub_u32", [](u32 x, u32 y) { return x - y; }, [](u32 x, u32 y) { return x < y ? 0 : x - y; });
    a.op<U32, U32, U32>(
        "v_subrev_u32", [](u32 x, u32 y) { return y - x; }, [](u32 x, u32 y) { return y < x ? 0 : y - x; });
    a.op<U32, U32, U32>(
        "v_add_i32", [](u32 x, u32 y) { return x + y; },
        [](u32 x, u32 y) { return u32(saturate_i32(i64{i32(x)} + i32(y))); });
    a.op<U32, U32, U32>(
        "v_sub_i32", [](u32 x, u32 y) { return x - y; },
        [](u32 x, u32 y) { return u32(saturate_i32(i64{i32(x)} - i32(y))); });
    a.flagged<U32, U32, U32>("v_add_co_u32", [](u32 x, u32 y) { return Flagged<u32>{x + y, x + y < x}; });
    a.flagged<U32, U32, U32>("v_sub_co_u32", [](u32 x, u32 y) { return Flagged<u32>{x - y, x < y}; });
    a.flagged<U32, U32, U32>("v_subrev_co_u32", [](u32 x, u32 y) { return Flagged<u32>{y - x, y < x}; });
    a.flagged<U32, U32, U32, Mask>("v_addc_co_u32", [](u32 x, u32 y, u32 c) {
        u32 sum = x + y + c;
        return Flagged<u32>{sum, sum < x || (c && sum == x)};
    });
    a.flagged<U32, U32, U32, Mask>(
        "v_subb_co_u32", [](u32 x, u32 y, u32 c) { return Flagged<u32>{x - y - c, x < y || (c && x == y)}; });
    a.flagged<U32, U32, U32, Mask>("v_subbrev_co_u32", [](u32 x, u32 y, u32 c) {
        return Flagged<u32>{y - x - c, y < x || (c && x == y)};
    });
    a.op<U32, U32, U32, U32>("v_add3_u32", [](u32 x, u32 y, u32 z) { return x + y + z; });
    a.op<U32, U32, U32, U32>("v_lshl_add_u32", [](u32 x, u32 y, u32 z) { return (x << (y & 31)) + z; });
    a.op<U32, U32, U32, U32>("v_add_lshl_u32", [](u32 x, u32 y, u32 z) { return (x + y) << (z & 31); });
    a.op<U32, U32, U32, U32>("v_xad_u32", [](u32 x, u32 y, u32 z) { return (x ^ y) + z; });

    a.op<I32, I32, I32>("v_mul_i32_i24", [](i32 x, i32 y) { return i32(i64{signed24(x)} * signed24(y)); });
    a.op<I32, I32, I32>("v_mul_hi_i32_i24",
                        [](i32 x, i32 y) { return i32(i64{signed24(x)} * signed24(y) >> 32); });
    a.op<U32, U32, U32>("v_mul_u32_u24", [](u32 x, u32 y) { return unsigned24(x) * unsigned24(y); });
    a.op<U32, U32, U32>("v_mul_hi_u32_u24",
                        [](u32 x, u32 y) { return u32(u64{unsigned24(x)} * unsigned24(y) >> 32); });
    a.op<U32, I32, I32, U32>(
        "v_mad_i32_i24", [](i32 x, i32 y, u32 z) { return u32(i64{signed24(x)} * signed24(y)) + z; },
        [](i32 x, i32 y, u32 z) { return u32(saturate_i32(i64{signed24(x)} * signed24(y) + i32(z))); });
    a.op<U32, U32, U32, U32>(
        "v_mad_u32_u24", [](u32 x, u32 y, u32 z) { return unsigned24(x) * unsigned24(y) + z; },
        [](u32 x, u32 y, u32 z) { return saturate_u32(u64{unsigned24(x)} * unsigned24(y) + z); });
    a.op<U32, U32, U32>("v_mul_lo_u32", [](u32 x, u32 y) { return x * y; });
    a.op<U32, U32, U32>("v_mul_hi_u32", [](u32 x, u32 y) { return u32(u64{x} * y >> 32); });
    a.op<I32, I32, I32>("v_mul_hi_i32", [](i32 x, i32 y) { return i32(i64{x} * y >> 32); });
    a.flagged<U64, U32, U32, U64>("v_mad_u64_u32", [](u32 x, u32 y, u64 z) {
        u64 sum = u64{x} * y + z;
        return Flagged<u64>{sum, sum < z};
    });
    a.flagged<U64, I32, I32, U64>("v_mad_i64_i32", [](i32 x, i32 y, u64 z) {
        i64 product = i64{x} * y;
        i64 sum;
        bool overflow = __builtin_add_overflow(product, i64(z), &sum);
        return Flagged<u64>{u64(sum), overflow};
    });
    a.op<U32, U16, U16, U32>(
        "v_mad_u32_u16", [](u16 x, u16 y, u32 z) { return u32{x} * y + z; },
        [](u16 x, u16 y, u32 z) { return saturate_u32(u64{x} * y + z); });
    a.op<U32, I16, I16, U32>(
        "v_mad_i32_i16", [](i16 x, i16 y, u32 z) { return u32(i32{x} * y) + z; },
        [](i16 x, i16 y, u32 z) { return u32(saturate_i32(i64{x} * y + i32(z))); });

    a.op<I32, I32, I32>("v_min_i32", [](i32 x, i32 y) { return least(x, y); });
    a.op<I32, I32, I32>("v_max_i32", [](i32 x, i32 y) { return most(x, y); });
    a.op<U32, U32, U32>("v_min_u32", [](u32 x, u32 y) { return least(x, y); });
    a.op<U32, U32, U32>("v_max_u32", [](u32 x, u32 y) { return most(x, y); });
    a.op<I32, I32, I32, I32>("v_min3_i32", [](i32 x, i32 y, i32 z) { return least(least(x, y), z); });
    a.op<I32, I32, I32, I32>("v_max3_i32", [](i32 x, i32 y, i32 z) { return most(most(x, y), z); });
    a.op<I32, I32, I32, I32>("v_med3_i32", [](i32 x, i32 y, i32 z) { return middle(x, y, z); });
    a.op<U32, U32, U32, U32>("v_min3_u32", [](u32 x, u32 y, u32 z) { return least(least(x, y), z); });
    a.op<U32, U32, U32, U32>("v_max3_u32", [](u32 x, u32 y, u32 z) { return most(most(x, y), z); });
    a.op<U32, U32, U32, U32>("v_med3_u32", [](u32 x, u32 y, u32 z) { return middle(x, y, z); });

    a.op<U32, U32, U32>("v_lshrrev_b32", [](u32 x, u32 y) { return y >> (x & 31); });
    a.op<I32, U32, I32>("v_ashrrev_i32", [](u32 x, i32 y) { return y >> (x & 31); });
    a.op<U32, U32, U32>("v_lshlrev_b32", [](u32 x, u32 y) { return y << (x & 31); });
    a.op<U64, U32, U64>("v_lshlrev_b64", [](u32 x, u64 y) { return y << (x & 63); });
    a.op<U64, U32, U64>("v_lshrrev_b64", [](u32 x, u64 y) { return y >> (x & 63); });
    a.op<I64, U32, I64>("v_ashrrev_i64", [](u32 x, i64 y) { return y >> (x & 63); });
    a.op<U32, U32, U32>("v_and_b32", [](u32 x, u32 y) { return x & y; });
    a.op<U32, U32, U32>("v_or_b32", [](u32 x, u32 y) { return x | y; });
    a.op<U32, U32, U32>("v_xor_b32", [](u32 x, u32 y) { return x ^ y; });
    a.op<U32, U32, U32>("v_xnor_b32", [](u32 x, u32 y) { return ~(x ^ y); });
    a.op<U32, U32, U32, U32>("v_and_or_b32", [](u32 x, u32 y, u32 z) { return (x & y) | z; });
    a.op<U32, U32, U32, U32>("v_or3_b32", [](u32 x, u32 y, u32 z) { return x | y | z; });
    a.op<U32, U32, U32, U32>("v_lshl_or_b32", [](u32 x, u32 y, u32 z) { return x << (y & 31) | z; });
    a.op<U32, U32, U32, U32>("v_bfi_b32", [](u32 x, u32 y, u32 z) { return (x & y) | (~x & z); });
    a.op<U32, U32, U32, U32>("v_bfe_u32",
                             [](u32 x, u32 y, u32 z) { return x >> (y & 31) & ((1u << (z & 31)) - 1); });
    a.op<I32, I32, U32, U32>("v_bfe_i32", [](i32 x, u32 y, u32 z) {
        // The field ends at bit 31 at the latest.
        u32 offset = y & 31, width = z & 31;
        if (width == 0) return 0;
        i32 field = x >> offset;
        return offset + width >= 32 ? field : i32(u32(field) << (32 - width)) >> (32 - width);
    });
    a.op<U32, U32, U32>("v_bfm_b32", [](u32 x, u32 y) { return ((1u << (x & 31)) - 1) << (y & 31); });
    a.op<U32, U32, U32, U32>("v_alignbit_b32",
                             [](u32 x, u32 y, u32 z) { return u32((u64{x} << 32 | y) >> (z & 31)); });
    a.op<U32, U32, U32, U32>("v_alignbyte_b32",
                             [](u32 x, u32 y, u32 z) { return u32((u64{x} << 32 | y) >> (8 * (z & 3))); });
    a.op<U32, U32, U32, U32>("v_perm_b32", [](u32 x, u32 y, u32 z) {
        u64 bytes = u64{x} << 32 | y;
        return permute_byte(bytes, z & 0xFF) | permute_byte(bytes, z >> 8 & 0xFF) << 8 |
               permute_byte(bytes, z >> 16 & 0xFF) << 16 | permute_byte(bytes, z >> 24) << 24;
    });
    a.op<U32, U32, U32>("v_bcnt_u32_b32", [](u32 x, u32 y) { return u32(std::popcount(x)) + y; });
    a.op<U32, U32, U32, U32>("v_lerp_u8", [](u32 x, u32 y, u32 z) {
        u32 result = 0;
        for (unsigned n = 0; n < 4; ++n)
            result |= ((byte_of(x, n) + byte_of(y, n) + (byte_of(z, n) & 1)) >> 1) << (8 * n);
        return result;
    });

    a.op<U32, U32, U32, U32>(
        "v_sad_u8", [](u32 x, u32 y, u32 z) { return sad_bytes(x, y, false) + z; },
        [](u32 x, u32 y, u32 z) { return saturate_u32(u64{sad_bytes(x, y, false)} + z); });
    a.op<U32, U32, U32, U32>(
        "v_sad_hi_u8", [](u32 x, u32 y, u32 z) { return (sad_bytes(x, y, false) << 16) + z; },
        [](u32 x, u32 y, u32 z) { return saturate_u32(u64{sad_bytes(x, y, false) << 16} + z); });
    a.op<U32, U32, U32, U32>(
        "v_msad_u8", [](u32 x, u32 y, u32 z) { return sad_bytes(x, y, true) + z; },
        [](u32 x, u32 y, u32 z) { return saturate_u32(u64{sad_bytes(x, y, true)} + z); });
    a.op<U32, U32, U32, U32>(
        "v_sad_u16",
        [](u32 x, u32 y, u32 z) {
            return absolute_difference(x & 0xFFFF, y & 0xFFFF) + absolute_difference(x >> 16, y >> 16) + z;
        },
        [](u32 x, u32 y, u32 z) {
            return saturate_u32(u64{absolute_difference(x & 0xFFFF, y & 0xFFFF)} +
                                absolute_difference(x >> 16, y >> 16) + z);
        });
    a.op<U32, U32, U32, U32>(
        "v_sad_u32", [](u32 x, u32 y, u32 z) { return absolute_difference(x, y) + z; },
        [](u32 x, u32 y, u32 z) { return saturate_u32(u64{absolute_difference(x, y)} + z); });
    a.op<U64, U64, U32, U64>("v_qsad_pk_u16_u8", [](u64 x, u32 y, u64 z) {
        u64 result = 0;
        for (unsigned n = 0; n < 4; ++n)
            result |= u64{u16(sad_bytes(u32(x >> (8 * n)), y, false) + (z >> (16 * n)))} << (16 * n);
        return result;
    });
    a.op<U64, U64, U32, U64>("v_mqsad_pk_u16_u8", [](u64 x, u32 y, u64 z) {
        u64 result = 0;
        for (unsigned n = 0; n < 4; ++n)
            result |= u64{u16(sad_bytes(u32(x >> (8 * n)), y, true) + (z >> (16 * n)))} << (16 * n);
        return result;
    });

    a.op<U16, U16, U16>(
        "v_add_u16", [](u16 x, u16 y) { return x + y; }, [](u16 x, u16 y) { return saturate_u16(x + y); });
    a.op<U16, U16, U16>(
        "v_sub_u16", [](u16 x, u16 y) { return x - y; }, [](u16 x, u16 y) { return saturate_u16(x - y); });
    a.op<U16, U16, U16>(
        "v_subrev_u16", [](u16 x, u16 y) { return y - x; }, [](u16 x, u16 y) { return saturate_u16(y - x); });
    a.op<U16, U16, U16>(
        "v_mul_lo_u16", [](u16 x, u16 y) { return u32{x} * y; },
        [](u16 x, u16 y) { return saturate_u16(i64{x} * y); });
    a.op<U16, U16, U16>("v_lshlrev_b16", [](u16 x, u16 y) { return y << (x & 15); });
    a.op<U16, U16, U16>("v_lshrrev_b16", [](u16 x, u16 y) { return y >> (x & 15); });
    a.op<I16, U16, I16>("v_ashrrev_i16", [](u16 x, i16 y) { return y >> (x & 15); });
    a.op<U16, U16, U16>("v_max_u16", [](u16 x, u16 y) { return most(x, y); });
    a.op<U16, U16, U16>("v_min_u16", [](u16 x, u16 y) { return least(x, y); });
    a.op<I16, I16, I16>("v_max_i16", [](i16 x, i16 y) { return most(x, y); });
    a.op<I16, I16, I16>("v_min_i16", [](i16 x, i16 y) { return least(x, y); });
    a.half<I16, I16, I16>(
        "v_add_i16", [](i16 x, i16 y) { return x + y; }, [](i16 x, i16 y) { return saturate_i16(x + y); });
    a.half<I16, I16, I16>(
        "v_sub_i16", [](i16 x, i16 y) { return x - y; }, [](i16 x, i16 y) { return saturate_i16(x - y); });
    a.half<U16, U16, U16, U16>(
        "v_mad_u16", [](u16 x, u16 y, u16 z) { return u32{x} * y + z; },
        [](u16 x, u16 y, u16 z) { return saturate_u16(i64{x} * y + z); });
    a.half<I16, I16, I16, I16>(
        "v_mad_i16", [](i16 x, i16 y, i16 z) { return x * y + z; },
        [](i16 x, i16 y, i16 z) { return saturate_i16(i64{x} * y + z); });
    a.op<U16, U16, U16, U16>(
        "v_mad_legacy_u16", [](u16 x, u16 y, u16 z) { return u32{x} * y + z; },
        [](u16 x, u16 y, u16 z) { return saturate_u16(i64{x} * y + z); });
    a.op<I16, I16, I16, I16>(
        "v_mad_legacy_i16", [](i16 x, i16 y, i16 z) { return x * y + z; },
        [](i16 x, i16 y, i16 z) { return saturate_i16(i64{x} * y + z); });
    a.half<I16, I16, I16, I16>("v_min3_i16", [](i16 x, i16 y, i16 z) { return least(least(x, y), z); });
    a.half<I16, I16, I16, I16>("v_max3_i16", [](i16 x, i16 y, i16 z) { return most(most(x, y), z); });
    a.half<I16, I16, I16, I16>("v_med3_i16", [](i16 x, i16 y, i16 z) { return middle(x, y, z); });
    a.half<U16, U16, U16, U16>("v_min3_u16", [](u16 x, u16 y, u16 z) { return least(least(x, y), z); });
    a.half<U16, U16, U16, U16>("v_max3_u16", [](u16 x, u16 y, u16 z) { return most(most(x, y), z); });
    a.half<U16, U16, U16, U16>("v_med3_u16", [](u16 x, u16 y, u16 z) { return middle(x, y, z); });
    a.op<U32, U16, U16>("v_pack_b32_f16", [](u16 x, u16 y) { return x | u32{y} << 16; });

    a.op<U32, U32, U32>("v_cvt_pk_u16_u32",
                        [](u32 x, u32 y) { return least(x, 0xFFFFu) | least(y, 0xFFFFu) << 16; });
    a.op<U32, I32, I32>("v_cvt_pk_i16_i32", [](i32 x, i32 y) {
        return u32(u16(saturate_i16(x))) | u32(u16(saturate_i16(y))) << 16;
    });

    a.packed_clamped<u16, 3>(
        "v_pk_mad_u16", [](u16 x, u16 y, u16 z) { return u32{x} * y + z; },
        [](u16 x, u16 y, u16 z) { return saturate_u16(i64{x} * y + z); });
    a.packed_clamped<i16, 3>(
        "v_pk_mad_i16", [](i16 x, i16 y, i16 z) { return x * y + z; },
        [](i16 x, i16 y, i16 z) { return saturate_i16(i64{x} * y + z); });
    a.packed_clamped<u16, 2>(
        "v_pk_mul_lo_u16", [](u16 x, u16 y) { return u32{x} * y; },
        [](u16 x, u16 y) { return saturate_u16(i64{x} * y); });
    a.packed_clamped<i16, 2>(
        "v_pk_add_i16", [](i16 x, i16 y) { return x + y; }, [](i16 x, i16 y) { return saturate_i16(x + y); });
    a.packed_clamped<i16, 2>(
        "v_pk_sub_i16", [](i16 x, i16 y) { return x - y; }, [](i16 x, i16 y) { return saturate_i16(x - y); });
    a.packed_clamped<u16, 2>(
        "v_pk_add_u16", [](u16 x, u16 y) { return x + y; }, [](u16 x, u16 y) { return saturate_u16(x + y); });
    a.packed_clamped<u16, 2>(
        "v_pk_sub_u16", [](u16 x, u16 y) { return x - y; }, [](u16 x, u16 y) { return saturate_u16(x - y); });
    a.packed<false, u16, 2>("v_pk_lshlrev_b16", [](u16 x, u16 y) { return y << (x & 15); });
    a.packed<false, u16, 2>("v_pk_lshrrev_b16", [](u16 x, u16 y) { return y >> (x & 15); });
    a.packed<false, i16, 2>("v_pk_ashrrev_i16", [](i16 x, i16 y) { return y >> (x & 15); });
    a.packed<false, i16, 2>("v_pk_max_i16", [](i16 x, i16 y) { return most(x, y); });
    a.packed<false, i16, 2>("v_pk_min_i16", [](i16 x, i16 y) { return least(x, y); });
    a.packed<false, u16, 2>("v_pk_max_u16", [](u16 x, u16 y) { return most(x, y); });
    a.packed<false, u16, 2>("v_pk_min_u16", [](u16 x, u16 y) { return least(x, y); });
}

template <class T>
void add_integer_comparisons(Adder &a, const char *type) {
    using V = typename T::value;
    a.compare<T>("f", "t", type, [](V, V) { return false; });
    a.compare<T>("lt", "ge", type, [](V x, V y) { return x < y; });
    a.compare<T>("eq", "ne", type, [](V x, V y) { return x == y; });
    a.compare<T>("le", "gt", type, [](V x, V y) { return x <= y; });
}

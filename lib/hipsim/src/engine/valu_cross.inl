// VALU instructions that look across lanes or mix types.

inline void read_first_lane(Wave &w, const Op &op) {
    alignas(64) uint32_t words[lanes];
    raw(w, op, 0, 0, 1, words);
    uint64_t exec = w.exec();
    w.s[op.dst] = words[exec ? std::countr_zero(exec) : 0];
}

inline void read_lane(Wave &w, const Op &op) {
    alignas(64) uint32_t words[lanes], lane[lanes];
    raw(w, op, 0, 0, 1, words);
    raw(w, op, 1, 0, 1, lane);
    w.s[op.dst] = words[lane[0] & (w.count - 1)];
}

inline void write_lane(Wave &w, const Op &op) {
    alignas(64) uint32_t words[lanes], lane[lanes];
    raw(w, op, 0, 0, 1, words);
    raw(w, op, 1, 0, 1, lane);
    w.v[op.dst][lane[0] & (w.count - 1)] = words[0];
}

inline void swap_registers(Wave &w, const Op &op) {
    uint32_t *a = w.v[op.dst], *b = w.v[op.src[0].index];
    for (uint64_t rest = w.exec(); rest; rest &= rest - 1)
        std::swap(a[std::countr_zero(rest)], b[std::countr_zero(rest)]);
}

// Counts the set bits of the lanes below this one.
template <bool high>
void masked_bit_count(Wave &w, const Op &op) {
    alignas(64) uint32_t buffer[2][lanes], result[lanes];
    const uint32_t *bits = source<U32>(w, op, 0, buffer[0]), *base = source<U32>(w, op, 1, buffer[1]);
    for (unsigned l = 0; l < lanes; ++l) {
        uint64_t below = (uint64_t{1} << l) - 1;
        result[l] = base[l] + uint32_t(std::popcount(bits[l] & uint32_t(high ? below >> 32 : below)));
    }
    write<U32>(w, op, result);
}

// Four sums of masked absolute differences, each of 32 bits.
inline void mqsad_words(Wave &w, const Op &op) {
    alignas(64) uint32_t s0[2][lanes], s1[lanes], result[4][lanes];
    for (unsigned n = 0; n < 2; ++n) raw(w, op, 0, n, 2, s0[n]);
    raw(w, op, 1, 0, 1, s1);
    for (unsigned n = 0; n < 4; ++n) {
        alignas(64) uint32_t s2[lanes];
        std::memcpy(s2, w.v[op.src[2].index + n], sizeof s2);
        for (unsigned l = 0; l < lanes; ++l)
            result[n][l] =
                sad_bytes(uint32_t((s0[0][l] | uint64_t(s0[1][l]) << 32) >> (8 * n)), s1[l], true) + s2[l];
    }
    for (unsigned n = 0; n < 4; ++n) merge(w, w.v[op.dst + n], result[n], w.exec());
}

enum class Mix { single, low, high };

// A fused multiplication and addition in single precision, whose sources may be halves.
inline void fused_mix(Wave &w, const Op &op, Mix mix) {
    const isa::Instruction &i = op.i;
    alignas(64) float s[3][lanes];
    for (unsigned n = 0; n < 3; ++n) {
        alignas(64) uint32_t words[lanes];
        raw(w, op, n, 0, 1, words);
        bool half = i.op_sel_hi >> n & 1, upper = i.op_sel >> n & 1;
        for (unsigned l = 0; l < lanes; ++l) {
            uint16_t bits = uint16_t(upper ? words[l] >> 16 : words[l]);
            float x = half ? widen(w.flush_in64 ? flush_half(bits) : bits) : std::bit_cast<float>(words[l]);
            if (!half && w.flush_in32) x = flush(x);
            if (i.neg_hi >> n & 1) x = std::fabs(x);
            s[n][l] = i.neg >> n & 1 ? negate(x) : x;
        }
    }
    alignas(64) uint32_t result[lanes];
    const uint32_t *old = w.v[op.dst];
    {
        Rounding<F32> rounding(w);
        for (unsigned l = 0; l < lanes; ++l) {
            float x = std::fma(s[0][l], s[1][l], s[2][l]);
            if (w.flush_out32) x = flush(x);
            if (i.clamp) x = clamp_float(x, w.mode & mode_dx10_clamp);
            uint16_t half = narrow_half(x, w.round64);
            if (w.flush_out64) half = flush_half(half);
            if (mix == Mix::single) result[l] = std::bit_cast<uint32_t>(x);
            else if (mix == Mix::low) result[l] = (old[l] & 0xFFFF0000) | half;
            else result[l] = (old[l] & 0xFFFF) | uint32_t(half) << 16;
        }
    }
    merge(w, w.v[op.dst], result, w.exec());
}

template <Mix mix>
void fma_mix(Wave &w, const Op &op) {
    fused_mix(w, op, mix);
}

// Products of the parts of two words, added to a third word.
template <unsigned bits, bool is_signed>
void dot_integer(Wave &w, const Op &op) {
    const isa::Instruction &i = op.i;
    alignas(64) uint32_t s[3][lanes];
    for (unsigned n = 0; n < 3; ++n) raw(w, op, n, 0, 1, s[n]);
    constexpr unsigned parts = 32 / bits;
    for (unsigned l = 0; l < lanes; ++l) {
        int64_t sum = is_signed ? int64_t(int32_t(s[2][l])) : int64_t(s[2][l]);
        for (unsigned n = 0; n < parts; ++n) {
            int64_t factor[2];
            for (unsigned k = 0; k < 2; ++k) {
                unsigned part = n;
                if (bits == 16) part = (n ? i.op_sel_hi : i.op_sel) >> k & 1;
                uint32_t field = s[k][l] >> (bits * part) & ((1u << bits) - 1);
                factor[k] =
                    is_signed ? int64_t(int32_t(field << (32 - bits)) >> (32 - bits)) : int64_t(field);
            }
            sum += factor[0] * factor[1];
        }
        s[2][l] = !i.clamp ? uint32_t(sum) : is_signed ? uint32_t(saturate_i32(sum)) : saturate_u32(sum);
    }
    merge(w, w.v[op.dst], s[2], written_lanes(w, op));
}

// The sum is rounded once. CDNA2 has no denormals here, whatever MODE says; how it rounds is unknown.
inline void dot_half(Wave &w, const Op &op) {
    const isa::Instruction &i = op.i;
    alignas(64) uint32_t s[3][lanes];
    alignas(64) float result[lanes];
    for (unsigned n = 0; n < 3; ++n) raw(w, op, n, 0, 1, s[n]);
    bool never = i.set->cdna2;
    Rounding<F32> rounding(w);
    for (unsigned l = 0; l < lanes; ++l) {
        float addend = std::bit_cast<float>(s[2][l] ^ (i.neg >> 2 & 1) << 31);
        double sum = w.flush_in32 || never ? flush(addend) : addend;
        for (unsigned n = 0; n < 2; ++n) {
            double factor[2];
            for (unsigned k = 0; k < 2; ++k) {
                unsigned upper = (n ? i.op_sel_hi : i.op_sel) >> k & 1,
                         sign = (n ? i.neg_hi : i.neg) >> k & 1;
                uint16_t half = uint16_t(s[k][l] >> (16 * upper)) ^ uint16_t(sign << 15);
                factor[k] = widen(never ? flush_half(half) : half);
            }
            sum += factor[0] * factor[1];
        }
        result[l] = float(sum);
        if (w.flush_out32 || never) result[l] = flush(result[l]);
        if (i.clamp) result[l] = clamp_float(result[l], w.mode & mode_dx10_clamp);
    }
    merge(w, w.v[op.dst], reinterpret_cast<const uint32_t *>(result), written_lanes(w, op));
}

// Each word of the result comes from the source of that word.
inline void move_pair(Wave &w, const Op &op) {
    alignas(64) uint32_t words[2][lanes];
    for (unsigned n = 0; n < 2; ++n) raw(w, op, n, op.i.op_sel >> n & 1, 2, words[n]);
    for (unsigned n = 0; n < 2; ++n) merge(w, w.v[op.dst + n], words[n], w.exec());
}

inline void nothing(Wave &, const Op &) {}

inline void add_cross(Adder &a) {
    a.custom("v_readfirstlane_b32", read_first_lane, Type::b32, Type::b32);
    a.custom("v_readlane_b32", read_lane, Type::b32, Type::b32, Type::b32);
    a.custom("v_writelane_b32", write_lane, Type::b32, Type::b32, Type::b32);
    a.custom("v_swap_b32", swap_registers, Type::b32, Type::b32);
    a.custom("v_mbcnt_lo_u32_b32", masked_bit_count<false>, Type::b32, Type::b32, Type::b32);
    a.custom("v_mbcnt_hi_u32_b32", masked_bit_count<true>, Type::b32, Type::b32, Type::b32);
    a.custom("v_mqsad_u32_u8", mqsad_words, Type::b64, Type::b64, Type::b32, Type::b64);
    a.custom("v_fma_mix_f32", fma_mix<Mix::single>, Type::packed_f16, Type::f32, Type::f32, Type::f32);
    a.custom("v_fma_mixlo_f16", fma_mix<Mix::low>, Type::packed_f16, Type::f32, Type::f32, Type::f32);
    a.custom("v_fma_mixhi_f16", fma_mix<Mix::high>, Type::packed_f16, Type::f32, Type::f32, Type::f32);
    a.custom("v_dot2_f32_f16", dot_half, Type::packed_f16, Type::packed_f16, Type::packed_f16, Type::f32);
    a.custom("v_dot2c_f32_f16", dot_half, Type::f32, Type::packed16, Type::packed16, Type::f32).accumulates =
        true;
    const std::pair<const char *, Handler> onto_themselves[] = {{"v_dot2c_i32_i16", dot_integer<16, true>},
                                                                {"v_dot4c_i32_i8", dot_integer<8, true>},
                                                                {"v_dot8c_i32_i4", dot_integer<4, true>}};
    for (auto [name, handler] : onto_themselves)
        a.custom(name, handler, Type::b32, Type::packed16, Type::packed16, Type::b32).accumulates = true;
    a.custom("v_pk_mov_b32", move_pair, Type::b64, Type::b32, Type::b32);
    const std::pair<const char *, Handler> dots[] = {
        {"v_dot2_i32_i16", dot_integer<16, true>}, {"v_dot2_u32_u16", dot_integer<16, false>},
        {"v_dot4_i32_i8", dot_integer<8, true>},   {"v_dot4_u32_u8", dot_integer<8, false>},
        {"v_dot8_i32_i4", dot_integer<4, true>},   {"v_dot8_u32_u4", dot_integer<4, false>}};
    for (auto [name, handler] : dots) {
        Semantics &entry = a.custom(name, handler, Type::packed16, Type::packed16, Type::packed16, Type::b32);
        entry.run_clamped = handler;
    }
    a.custom("v_nop", nothing, Type::none);
    a.custom("v_clrexcp", nothing, Type::none);
}

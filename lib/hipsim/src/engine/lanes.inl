// The frame of every VALU instruction: sources of 64 lanes, a loop that the compiler vectorizes, and the result.
// Included by level_*.cpp, once for each level of the CPU's vectors, inside a namespace of its own.

// Types of operands in the loops.
struct U32 {
    using value = uint32_t;
    static constexpr unsigned words = 1;
    static constexpr Type type = Type::b32;
};
struct I32 : U32 {
    using value = int32_t;
};
struct F32 : U32 {
    using value = float;
    static constexpr Type type = Type::f32;
};
struct Flushed32 : F32 {};  // no denormals, whatever MODE says
struct M32 : U32 {          // bits, with the modifiers of a float
    static constexpr Type type = Type::f32;
};
struct U64 {
    using value = uint64_t;
    static constexpr unsigned words = 2;
    static constexpr Type type = Type::b64;
};
struct I64 : U64 {
    using value = int64_t;
    static constexpr Type type = Type::i64;
};
struct F64 : U64 {
    using value = double;
    static constexpr Type type = Type::f64;
};
struct U16 {
    using value = uint16_t;
    static constexpr unsigned words = 1;
    static constexpr Type type = Type::b16;
};
struct I16 : U16 {
    using value = int16_t;
};
struct F16 : U16 {  // computed as float; the operations of half precision are exact enough there
    using value = float;
    static constexpr Type type = Type::f16;
};
struct Flushed16 : F16 {};
struct Wide16 : F16 {  // a half that is computed as double
    using value = double;
};
struct Mask : U32 {  // one bit of a pair of SGPRs for each lane, as 0 or 1
    static constexpr Type type = Type::b64;
};

template <class T>
constexpr bool is_half = std::is_base_of_v<F16, T>;
template <class T>
constexpr bool is_float32 = std::is_base_of_v<F32, T>;
template <class T>
constexpr bool is_float64 = std::is_same_v<T, F64>;
template <class T>
constexpr bool always_flushed = std::is_same_v<T, Flushed32> || std::is_same_v<T, Flushed16>;

template <class T>
inline bool flushes_in(const Wave &w) {
    if constexpr (always_flushed<T>) return true;
    if constexpr (is_float32<T>) return w.flush_in32;
    if constexpr (is_half<T> || is_float64<T>) return w.flush_in64;
    return false;
}

template <class T>
inline bool flushes_out(const Wave &w) {
    if constexpr (always_flushed<T>) return true;
    if constexpr (is_float32<T>) return w.flush_out32;
    if constexpr (is_half<T> || is_float64<T>) return w.flush_out64;
    return false;
}

// While it exists, results of type T are rounded as MODE says.
template <class T>
struct Rounding {
    bool changed = false;
    explicit Rounding(const Wave &w) {
        unsigned mode = is_float32<T> ? w.round32 : is_half<T> || is_float64<T> ? w.round64 : 0;
        if (mode == 0) return;
        static constexpr int modes[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
        std::fesetround(modes[mode]);
        changed = true;
    }
    ~Rounding() {
        if (changed) std::fesetround(FE_TONEAREST);
    }
};

// EXEC as a word of ones or zeros for each lane.
inline const uint32_t *exec_lanes(Wave &w, uint64_t exec) {
    if (w.lane_mask_of != exec) {
        for (unsigned i = 0; i < lanes; ++i) w.lane_mask[i] = -uint32_t(exec >> i & 1);
        w.lane_mask_of = exec;
    }
    return w.lane_mask;
}

// Writes the lanes of `mask`.
inline void merge(Wave &w, uint32_t *destination, const uint32_t *result, uint64_t mask) {
    const uint32_t *keep = exec_lanes(w, mask);
    for (unsigned i = 0; i < lanes; ++i) destination[i] ^= (destination[i] ^ result[i]) & keep[i];
}

// One bit for each lane whose word has its highest bit set.
[[gnu::noinline]] inline uint64_t pack(const uint32_t *words) {
    uint64_t bits = 0;
#ifdef __SSE2__
    for (unsigned i = 0; i < lanes; i += 4) {
        __m128i four = _mm_loadu_si128(reinterpret_cast<const __m128i *>(words + i));
        bits |= uint64_t(_mm_movemask_ps(_mm_castsi128_ps(four))) << i;
    }
#else
    for (unsigned i = 0; i < lanes; ++i) bits |= uint64_t(words[i] >> 31) << i;
#endif
    return bits;
}

inline uint32_t select_part(uint32_t word, unsigned sel, bool sext) {
    switch (sel) {
        case 0:
        case 1:
        case 2:
        case 3: {
            uint32_t byte = word >> (8 * sel) & 0xFF;
            return sext ? uint32_t(int32_t(int8_t(byte))) : byte;
        }
        case 4:
        case 5: {
            uint32_t half = word >> (16 * (sel - 4)) & 0xFFFF;
            return sext ? uint32_t(int32_t(int16_t(half))) : half;
        }
        default: return word;
    }
}

// The lane that lane `i` reads with DPP, or −1. prepare() checks which controls a family has.
inline int dpp_source(unsigned control, int i) {
    int row = i & ~15, in_row = i & 15;
    if (control < 0x100) return (i & ~3) + int(control >> (2 * (i & 3)) & 3);
    int n = int(control & 15);
    switch (control & 0x1F0) {
        case 0x100: return in_row + n < 16 ? i + n : -1;
        case 0x110: return in_row - n >= 0 ? i - n : -1;
        case 0x120: return row + ((in_row - n) & 15);
        case 0x150: return row + n;
        case 0x160: return row + (in_row ^ n);
        default: break;
    }
    switch (control) {
        case 0x130: return i + 1 < 64 ? i + 1 : -1;
        case 0x134: return (i + 1) & 63;
        case 0x138: return i - 1;
        case 0x13C: return (i - 1) & 63;
        case 0x140: return row + (15 - in_row);
        case 0x141: return (i & ~7) + (7 - (i & 7));
        case 0x142: return row ? row - 1 : -1;
        default: return i >= 32 ? 31 : -1;  // 0x143
    }
}

// Source 0 of a DPP instruction. Sets the lanes that the instruction may write.
inline void apply_dpp(Wave &w, const Op &op, uint32_t *words) {
    const isa::Instruction &i = op.i;
    uint32_t old[lanes];
    std::memcpy(old, words, sizeof old);
    uint64_t exec = w.exec(), written = 0, readable = i.fetch_inactive ? w.existing : exec;
    for (unsigned lane = 0; lane < lanes; ++lane) {
        int from = i.eight ? int((lane & ~7u) + (i.lane_sel >> (3 * (lane & 7)) & 7))
                           : dpp_source(i.dpp_ctrl, int(lane));
        bool valid = from >= 0 && (readable >> from & 1);
        words[lane] = valid ? old[from] : 0;
        if (i.eight && !valid && (exec >> lane & 1))
            w.fault(Fault::illegal_instruction, op, op.address, "DPP8 reads a lane that is not active");
        bool chosen = (i.row_mask >> (lane / 16) & 1) && (i.bank_mask >> (lane / 4 % 4) & 1);
        if (chosen && (valid || i.bound_ctrl)) written |= uint64_t{1} << lane;
    }
    w.dpp_lanes = written & exec;
}

// One word of a source in all lanes, with SDWA and DPP applied, but not the modifiers that depend on its type.
[[gnu::noinline]] inline void raw(Wave &w, const Op &op, unsigned n, unsigned word, unsigned width,
                                  uint32_t *out) {
    const isa::Instruction &i = op.i;
    unsigned code = i.src[n];
    if (code >= isa::vgpr0) {
        std::memcpy(out, w.v[op.src[n].index + word], sizeof(Vgpr));
        if (i.variant == isa::dpp && n == 0) apply_dpp(w, op, out);
    } else {
        bool constant = (code >= isa::zero && code <= 208) || code == isa::literal ||
                        (code >= isa::half_float && code <= isa::inverse_2pi);
        uint64_t value = constant ? op.src[n].value : w.scalar(code, width);
        for (unsigned l = 0; l < lanes; ++l) out[l] = uint32_t(value >> (32 * word));
    }
    if (i.variant == isa::sdwa && n < 2 && (i.sel[n] != 6))
        for (unsigned l = 0; l < lanes; ++l) out[l] = select_part(out[l], i.sel[n], i.sext >> n & 1);
}

inline float widen(uint32_t half) { return half_to_float(uint16_t(half)); }

// Converts one or two words to values of a type, and applies the type's modifiers.
template <class T>
[[gnu::noinline]] void slow_source(Wave &w, const Op &op, unsigned n, typename T::value *out) {
    const isa::Instruction &i = op.i;
    bool absolute = i.abs >> n & 1, negate = i.neg >> n & 1;
    alignas(64) uint32_t low[lanes];
    raw(w, op, n, 0, T::words, low);
    if constexpr (T::words == 2) {
        alignas(64) uint32_t high[lanes];
        raw(w, op, n, 1, 2, high);
        if (absolute)
            for (uint32_t &word : high) word &= 0x7FFFFFFF;
        if (negate)
            for (uint32_t &word : high) word ^= 0x80000000;
        for (unsigned l = 0; l < lanes; ++l)
            out[l] = std::bit_cast<typename T::value>(low[l] | uint64_t(high[l]) << 32);
    } else {
        constexpr bool narrow = T::type == Type::b16 || T::type == Type::f16;
        if (narrow && i.opcode->format == isa::Format::vop3 && (i.op_sel >> n & 1))
            for (uint32_t &word : low) word >>= 16;
        uint32_t sign = narrow ? 0x8000 : 0x80000000;
        if (absolute)
            for (uint32_t &word : low) word &= ~sign;
        if (negate)
            for (uint32_t &word : low) word ^= sign;
        for (unsigned l = 0; l < lanes; ++l) {
            if constexpr (is_half<T>)
                out[l] = widen(flushes_in<T>(w) ? flush_half(uint16_t(low[l])) : low[l]);
            else if constexpr (narrow) out[l] = typename T::value(low[l]);
            else out[l] = std::bit_cast<typename T::value>(low[l]);
        }
    }
    if constexpr (is_float32<T> || is_float64<T>)
        if (flushes_in<T>(w))
            for (unsigned l = 0; l < lanes; ++l) out[l] = flush(out[l]);
}

template <class T>
[[gnu::noinline]] const typename T::value *fetch(Wave &w, const Op &op, unsigned n,
                                                 typename T::value *buffer) {
    using value = typename T::value;
    const Source &s = op.src[n];
    if constexpr (std::is_same_v<T, Mask>) {
        uint64_t bits = s.kind == Source::constant ? s.value : w.scalar(op.i.src[n], 2);
        for (unsigned l = 0; l < lanes; ++l) buffer[l] = bits >> l & 1;
        return buffer;
    } else if constexpr (T::type == Type::b16 || T::type == Type::f16) {
        if (s.kind != Source::vgpr || is_half<T>) {
            if (s.kind == Source::vgpr && !flushes_in<T>(w)) {
                const uint32_t *words = w.v[s.index];
                for (unsigned l = 0; l < lanes; ++l) buffer[l] = value(widen(words[l]));
            } else {
                slow_source<T>(w, op, n, buffer);
            }
        } else {
            const uint32_t *words = w.v[s.index];
            for (unsigned l = 0; l < lanes; ++l) buffer[l] = value(words[l]);
        }
        return buffer;
    } else if constexpr (T::words == 1) {
        const value *plain = buffer;
        switch (s.kind) {
            case Source::vgpr: plain = reinterpret_cast<const value *>(w.v[s.index]); break;
            case Source::constant: {
                value x = std::bit_cast<value>(uint32_t(s.value));
                for (unsigned l = 0; l < lanes; ++l) buffer[l] = x;
                break;
            }
            case Source::sgpr: {
                value x = std::bit_cast<value>(w.s[s.index]);
                for (unsigned l = 0; l < lanes; ++l) buffer[l] = x;
                break;
            }
            default: slow_source<T>(w, op, n, buffer); return buffer;
        }
        if constexpr (is_float32<T>)
            if (flushes_in<T>(w)) {
                for (unsigned l = 0; l < lanes; ++l) buffer[l] = flush(plain[l]);
                return buffer;
            }
        return plain;
    } else {
        if (s.kind == Source::other || flushes_in<T>(w)) {
            slow_source<T>(w, op, n, buffer);
        } else if (s.kind == Source::vgpr) {
            const uint32_t *low = w.v[s.index], *high = w.v[s.index + 1];
            for (unsigned l = 0; l < lanes; ++l)
                buffer[l] = std::bit_cast<value>(low[l] | uint64_t(high[l]) << 32);
        } else {
            value x = std::bit_cast<value>(s.kind == Source::sgpr ? w.pair(s.index) : s.value);
            for (unsigned l = 0; l < lanes; ++l) buffer[l] = x;
        }
        return buffer;
    }
}

// The values of a source: in the register itself if possible, otherwise in the buffer.
template <class T>
inline const typename T::value *source(Wave &w, const Op &op, unsigned n, typename T::value *buffer) {
    if constexpr (T::words == 1 && T::type != Type::b16 && T::type != Type::f16 && !std::is_same_v<T, Mask>)
        if (op.src[n].kind == Source::vgpr && !flushes_in<T>(w))
            return reinterpret_cast<const typename T::value *>(w.v[op.src[n].index]);
    return fetch<T>(w, op, n, buffer);
}

template <class Value>
inline Value clamp_float(Value x, bool nan_is_zero) {
    if (x != x) return nan_is_zero ? Value(0) : x;
    return x < 0 ? Value(0) : x > 1 ? Value(1) : x == 0 ? Value(0) : x;
}

// The output modifiers of floats: flushing, omod, clamp.
template <class T>
[[gnu::noinline]] void modify(Wave &w, const Op &op, typename T::value *r) {
    using value = typename T::value;
    if constexpr (is_float32<T> || is_float64<T>)
        if (flushes_out<T>(w))
            for (unsigned l = 0; l < lanes; ++l) r[l] = flush(r[l]);
    // omod works only if MODE requests neither denormals nor IEEE's rules.
    if (op.i.omod && flushes_out<T>(w) && !(w.mode & mode_ieee)) {
        static constexpr value factors[] = {1, 2, 4, value(0.5)};
        value factor = factors[op.i.omod];
        for (unsigned l = 0; l < lanes; ++l) {
            r[l] = r[l] * factor;
            if constexpr (is_float32<T> || is_float64<T>) r[l] = flush(r[l]);
            if (r[l] == 0) r[l] = 0;  // no −0
        }
    }
    if (op.i.clamp)
        for (unsigned l = 0; l < lanes; ++l) r[l] = clamp_float(r[l], w.mode & mode_dx10_clamp);
}

inline uint64_t written_lanes(const Wave &w, const Op &op) {
    return op.i.variant == isa::dpp ? w.dpp_lanes : w.exec();
}

// Writes words to the destination under EXEC, and places them as SDWA says.
[[gnu::noinline]] inline void write_words(Wave &w, const Op &op, uint32_t *r) {
    uint32_t *destination = w.v[op.dst];
    const isa::Instruction &i = op.i;
    if (i.variant == isa::sdwa && i.dst_sel != 6) {
        unsigned bits = i.dst_sel < 4 ? 8 : 16, shift = i.dst_sel < 4 ? 8 * i.dst_sel : 16 * (i.dst_sel - 4);
        uint32_t field = ((1u << bits) - 1) << shift;
        for (unsigned l = 0; l < lanes; ++l) {
            uint32_t placed = r[l] << shift & field;
            uint32_t above = ~(field | (field - 1));
            if (i.dst_unused == 2) placed |= destination[l] & ~field;
            else if (i.dst_unused == 1 && (placed & (field & ~(field >> 1)))) placed |= above;
            r[l] = placed;
        }
    }
    merge(w, destination, r, written_lanes(w, op));
}

// Writes halves, in the low 16 bits of each word.
inline void write_halves(Wave &w, const Op &op, uint32_t *r) {
    const uint32_t *destination = w.v[op.dst];
    if (op.i.opcode->format == isa::Format::vop3 && (op.i.op_sel & 8)) {
        for (unsigned l = 0; l < lanes; ++l) r[l] = r[l] << 16 | (destination[l] & 0xFFFF);
    } else if (op.keeps_high_half && op.i.variant != isa::sdwa) {
        for (unsigned l = 0; l < lanes; ++l) r[l] = (r[l] & 0xFFFF) | (destination[l] & 0xFFFF0000);
    }
    write_words(w, op, r);
}

inline uint16_t narrow_half(float x, unsigned round) { return double_to_half(x, round); }
inline uint16_t narrow_half(double x, unsigned round) { return double_to_half(x, round); }

template <class T>
[[gnu::noinline]] void write(Wave &w, const Op &op, typename T::value *r) {
    if constexpr (is_half<T>) {
        alignas(64) uint32_t words[lanes];
        if (op.i.omod || op.i.clamp) {
            for (unsigned l = 0; l < lanes; ++l)  // omod and clamp see the half
                r[l] = half_to_float(narrow_half(r[l], w.round64));
            modify<T>(w, op, r);
        }
        for (unsigned l = 0; l < lanes; ++l) words[l] = narrow_half(r[l], w.round64);
        if (flushes_out<T>(w))
            for (uint32_t &word : words) word = flush_half(uint16_t(word));
        write_halves(w, op, words);
    } else if constexpr (T::type == Type::b16) {
        alignas(64) uint32_t words[lanes];
        for (unsigned l = 0; l < lanes; ++l) words[l] = uint16_t(r[l]);
        write_halves(w, op, words);
    } else if constexpr (T::words == 1) {
        if constexpr (is_float32<T>)
            if (op.i.omod || op.i.clamp || flushes_out<T>(w)) modify<T>(w, op, r);
        if (op.plain_dst) merge(w, w.v[op.dst], reinterpret_cast<const uint32_t *>(r), w.exec());
        else write_words(w, op, reinterpret_cast<uint32_t *>(r));
    } else {
        if constexpr (is_float64<T>)
            if (op.i.omod || op.i.clamp || flushes_out<T>(w)) modify<T>(w, op, r);
        uint32_t *low = w.v[op.dst], *high = w.v[op.dst + 1];
        uint64_t written = written_lanes(w, op);
        if (written == ~uint64_t{0}) {
#pragma GCC ivdep
            for (unsigned l = 0; l < lanes; ++l) {
                uint64_t bits = std::bit_cast<uint64_t>(r[l]);
                low[l] = uint32_t(bits);
                high[l] = uint32_t(bits >> 32);
            }
            return;
        }
        const uint32_t *keep = exec_lanes(w, written);
#pragma GCC ivdep
        for (unsigned l = 0; l < lanes; ++l) {
            uint64_t bits = std::bit_cast<uint64_t>(r[l]);
            low[l] ^= (low[l] ^ uint32_t(bits)) & keep[l];
            high[l] ^= (high[l] ^ uint32_t(bits >> 32)) & keep[l];
        }
    }
}

// Whether the loop may write directly into the register.
template <class T>
inline bool direct(const Wave &w, const Op &op) {
    if constexpr (T::words != 1 || T::type == Type::b16 || T::type == Type::f16) return false;
    else return op.plain_dst && w.exec() == w.existing && !flushes_out<T>(w);
}

// An instruction that computes each lane's result D from that lane's sources S by the function object F. F may take the
// IEEE bit of MODE as its last argument. What instructions with the same types have in common is compiled once (compute).
template <class D, class... S>
struct Signature {
    using Loop = void (*)(typename D::value *out, bool ieee, const typename S::value *...);

    template <class T>
    struct Buffer {
        alignas(64) typename T::value of[lanes];
    };
    template <std::size_t... N>
    [[gnu::noinline]] static void compute(Wave &w, const Op &op, Loop loop, std::index_sequence<N...>) {
        using value = typename D::value;
        alignas(64) value result[lanes];
        std::tuple<Buffer<S>...> buffers;
        std::tuple<const typename S::value *...> sources{source<S>(w, op, N, std::get<N>(buffers).of)...};
        Rounding<D> rounding(w);
        bool in_place = direct<D>(w, op);
        value *out = in_place ? reinterpret_cast<value *>(w.v[op.dst]) : result;
        loop(out, (w.mode & mode_ieee) != 0, std::get<N>(sources)...);
        if (!in_place) write<D>(w, op, result);
    }
};

template <class F, class D, class... S>
struct Valu {
    static void loop(typename D::value *out, bool ieee, const typename S::value *...s) {
        if constexpr (std::is_invocable_v<F, typename S::value..., bool>) {
#pragma GCC ivdep
            for (unsigned l = 0; l < lanes; ++l) out[l] = typename D::value(F{}(s[l]..., ieee));
        } else {
            (void)ieee;
#pragma GCC ivdep
            for (unsigned l = 0; l < lanes; ++l) out[l] = typename D::value(F{}(s[l]...));
        }
    }
    static void run(Wave &w, const Op &op) {
        Signature<D, S...>::compute(w, op, &loop, std::index_sequence_for<S...>{});
    }
};

// A result and one bit for each lane in a pair of SGPRs: carries, and v_div_scale.
template <class Value>
struct Flagged {
    Value value;
    bool flag;
};

template <class F, class D, class... S>
struct FlaggedValu {
    template <std::size_t... N>
    static void compute(Wave &w, const Op &op, std::index_sequence<N...>) {
        alignas(64) typename D::value result[lanes];
        alignas(64) uint32_t flags[lanes];
        std::tuple<typename Signature<D, S...>::template Buffer<S>...> buffers;
        std::tuple<const typename S::value *...> sources{source<S>(w, op, N, std::get<N>(buffers).of)...};
        Rounding<D> rounding(w);
        loop(result, flags, std::get<N>(sources)...);
        uint64_t bits = pack(flags) & written_lanes(w, op);
        write<D>(w, op, result);
        w.set_mask(op.i.sdst, bits);
    }
    static void loop(typename D::value *out, uint32_t *flags, const typename S::value *...s) {
#pragma GCC ivdep
        for (unsigned l = 0; l < lanes; ++l) {
            auto both = F{}(s[l]...);
            out[l] = both.value;
            flags[l] = both.flag ? ~0u : 0u;
        }
    }
    static void run(Wave &w, const Op &op) { compute(w, op, std::index_sequence_for<S...>{}); }
};

// A comparison: one bit for each lane. `opposite`: the bits where F is false.
template <class F, class A, class B>
[[gnu::noinline]] uint64_t compared(Wave &w, const Op &op) {
    alignas(64) typename A::value first[lanes];
    alignas(64) typename B::value second[lanes];
    alignas(64) uint32_t result[lanes];
    const auto *a = source<A>(w, op, 0, first);
    const auto *b = source<B>(w, op, 1, second);
    for (unsigned l = 0; l < lanes; ++l) result[l] = F{}(a[l], b[l]) ? ~0u : 0u;
    return pack(result);
}
template <class F, bool opposite, bool writes_exec, class A, class B>
void write_comparison(Wave &w, const Op &op) {
    uint64_t bits = compared<F, A, B>(w, op);
    if (opposite) bits = ~bits;
    bits &= w.exec();
    w.set_mask(op.dst, bits);
    if (writes_exec) w.set_mask(isa::exec, bits);
}

// The halves of a source's words, lower or upper as op_sel or op_sel_hi says for the lower (which = 0) or upper result.
template <bool floating, class Value>
[[gnu::noinline]] void packed_source(const Wave &w, const Op &op, unsigned n, unsigned which,
                                     const uint32_t *words, Value *out) {
    const isa::Instruction &i = op.i;
    unsigned shift = ((which ? i.op_sel_hi : i.op_sel) >> n & 1) * 16;
    uint32_t negate = floating && ((which ? i.neg_hi : i.neg) >> n & 1) ? 0x8000 : 0;
    for (unsigned l = 0; l < lanes; ++l) {
        uint16_t bits = uint16_t((words[l] >> shift) ^ negate);
        if constexpr (floating) out[l] = widen(w.flush_in64 ? flush_half(bits) : bits);
        else out[l] = Value(bits);
    }
}

// Results as halves, rounded and clamped.
template <class Value>
[[gnu::noinline]] void packed_result(const Wave &w, const Op &op, const Value *result, uint32_t *out) {
    for (unsigned l = 0; l < lanes; ++l) {
        uint16_t bits = narrow_half(result[l], w.round64);
        if (op.i.clamp) bits = narrow_half(clamp_float(half_to_float(bits), w.mode & mode_dx10_clamp), 0);
        out[l] = w.flush_out64 ? flush_half(bits) : bits;
    }
}

// Two halves in one word, each computed from halves that op_sel and op_sel_hi choose.
template <class F, bool floating, class Value, unsigned count>
struct Packed {
    [[gnu::noinline]] static void half(Wave &w, const Op &op, const uint32_t (*words)[lanes], unsigned which,
                                       uint32_t *out) {
        alignas(64) Value s[3][lanes];
        for (unsigned n = 0; n < count; ++n) packed_source<floating>(w, op, n, which, words[n], s[n]);
        [[maybe_unused]] bool ieee = w.mode & mode_ieee;
        auto result = [&](unsigned l) {
            if constexpr (count == 3) return F{}(s[0][l], s[1][l], s[2][l]);
            else if constexpr (std::is_invocable_v<F, Value, Value, bool>) return F{}(s[0][l], s[1][l], ieee);
            else return F{}(s[0][l], s[1][l]);
        };
        if constexpr (floating) {
            for (unsigned l = 0; l < lanes; ++l) s[0][l] = result(l);
            packed_result(w, op, s[0], out);
        } else {
            for (unsigned l = 0; l < lanes; ++l) out[l] = uint16_t(result(l));
        }
    }
    static void run(Wave &w, const Op &op) {
        alignas(64) uint32_t words[3][lanes], low[lanes], high[lanes];
        for (unsigned n = 0; n < count; ++n) raw(w, op, n, 0, 1, words[n]);
        {
            Rounding<F16> rounding(w);
            half(w, op, words, 0, low);
            half(w, op, words, 1, high);
        }
        for (unsigned l = 0; l < lanes; ++l) low[l] |= high[l] << 16;
        merge(w, w.v[op.dst], low, w.exec());
    }
};

// Two floats in a pair of registers, each computed from words that op_sel and op_sel_hi choose.
template <class F, unsigned count>
struct PackedSingle {
    static void run(Wave &w, const Op &op) {
        alignas(64) float s[3][lanes], result[2][lanes];
        const isa::Instruction &i = op.i;
        for (unsigned which = 0; which < 2; ++which) {
            for (unsigned n = 0; n < count; ++n) {
                unsigned word = (which ? i.op_sel_hi : i.op_sel) >> n & 1;
                bool opposite = (which ? i.neg_hi : i.neg) >> n & 1;
                alignas(64) uint32_t words[lanes];
                raw(w, op, n, word, 2, words);
                for (unsigned l = 0; l < lanes; ++l)
                    s[n][l] = std::bit_cast<float>(words[l] ^ uint32_t{opposite} << 31);
                if (w.flush_in32)
                    for (float &x : s[n]) x = flush(x);
            }
            Rounding<F32> rounding(w);
            for (unsigned l = 0; l < lanes; ++l) {
                if constexpr (count == 3) result[which][l] = F{}(s[0][l], s[1][l], s[2][l]);
                else result[which][l] = F{}(s[0][l], s[1][l]);
            }
            if (w.flush_out32)
                for (float &x : result[which]) x = flush(x);
        }
        for (unsigned n = 0; n < 2; ++n)
            merge(w, w.v[op.dst + n], reinterpret_cast<const uint32_t *>(result[n]), w.exec());
    }
};

// Adds instructions to the registry.
struct Adder {
    Registry &registry;

    template <class D, class... S, class F>
    Semantics &op(const char *name, F) {
        return add(registry, {name}, {&Valu<F, D, S...>::run, nullptr, D::type, {S::type...}});
    }
    // With a second function for the clamp bit.
    template <class D, class... S, class F, class C>
    Semantics &op(const char *name, F function, C) {
        Semantics &entry = op<D, S...>(name, function);
        entry.run_clamped = &Valu<C, D, S...>::run;
        return entry;
    }
    // 16-bit results that leave the other half unchanged.
    template <class D, class... S, class... F>
    Semantics &half(const char *name, F... functions) {
        Semantics &entry = op<D, S...>(name, functions...);
        entry.keeps_high_half = true;
        return entry;
    }
    template <class D, class... S, class F>
    Semantics &flagged(const char *name, F) {
        return add(registry, {name}, {&FlaggedValu<F, D, S...>::run, nullptr, D::type, {S::type...}});
    }
    template <class T, class B = T, class F>
    void compare(const char *operation, const char *type, F) {
        add_comparison(registry, operation, type,
                       {&write_comparison<F, false, false, T, B>, nullptr, Type::b64, {T::type, B::type}},
                       &write_comparison<F, false, true, T, B>);
    }
    // A comparison and its opposite, which is also true for NaN.
    template <class T, class F>
    void compare(const char *operation, const char *opposite, const char *type, F function) {
        compare<T>(operation, type, function);
        add_comparison(registry, opposite, type,
                       {&write_comparison<F, true, false, T, T>, nullptr, Type::b64, {T::type, T::type}},
                       &write_comparison<F, true, true, T, T>);
    }
    template <bool floating, class Value, unsigned count, class F>
    Semantics &packed(const char *name, F) {
        constexpr Type type = floating ? Type::packed_f16 : Type::packed16;
        return add(registry, {name},
                   {&Packed<F, floating, Value, count>::run, nullptr, type, {type, type, type}});
    }
    template <class Value, unsigned count, class F, class C>
    Semantics &packed_clamped(const char *name, F function, C) {
        Semantics &entry = packed<false, Value, count>(name, function);
        entry.run_clamped = &Packed<C, false, Value, count>::run;
        return entry;
    }
    template <unsigned count, class F>
    void packed_single(const char *name, F) {
        constexpr Type type = Type::packed_f32;
        add(registry, {name}, {&PackedSingle<F, count>::run, nullptr, type, {type, type, type}});
    }
    // Instructions with their own handlers.
    Semantics &custom(const char *name, Handler handler, Type dst, Type a = Type::none, Type b = Type::none,
                      Type c = Type::none) {
        return add(registry, {name}, {handler, nullptr, dst, {a, b, c}});
    }
};

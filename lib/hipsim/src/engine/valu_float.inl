// Floating-point instructions of the VALU, in all three precisions.

template <class V>
struct FloatBits;
template <>
struct FloatBits<float> {
    using bits = uint32_t;
    static constexpr unsigned fraction = 23;
    static constexpr int bias = 127, most = 255;
};
template <>
struct FloatBits<double> {
    using bits = uint64_t;
    static constexpr unsigned fraction = 52;
    static constexpr int bias = 1023, most = 2047;
};

template <class V>
inline typename FloatBits<V>::bits bits_of(V x) {
    return std::bit_cast<typename FloatBits<V>::bits>(x);
}
template <class V>
inline int exponent_of(V x) {
    return int(bits_of(x) >> FloatBits<V>::fraction) & FloatBits<V>::most;
}
template <class V>
inline bool is_nan(V x) {
    return x != x;
}
template <class V>
inline bool is_infinite(V x) {
    return std::fabs(x) == V(INFINITY);
}
template <class V>
inline bool is_denormal(V x) {
    return exponent_of(x) == 0 && x != 0;
}
template <class V>
inline bool is_negative(V x) {
    return bits_of(x) >> (8 * sizeof(V) - 1);
}
template <class V>
inline bool is_signalling(V x) {
    return x != x && !(bits_of(x) >> (FloatBits<V>::fraction - 1) & 1);
}
template <class V>
inline V quiet(V x) {
    using B = typename FloatBits<V>::bits;
    return x != x ? std::bit_cast<V>(bits_of(x) | B{1} << (FloatBits<V>::fraction - 1)) : x;
}
template <class V>
inline V negate(V x) {
    using B = typename FloatBits<V>::bits;
    return std::bit_cast<V>(bits_of(x) ^ B{1} << (8 * sizeof(V) - 1));
}
template <class V>
inline V with_sign(V x, bool sign) {
    V magnitude = std::fabs(x);
    return sign ? negate(magnitude) : magnitude;
}

// Minimum and maximum: a number wins over a quiet NaN, −0 is below +0, and under IEEE a signalling NaN wins, quieted.
template <class V>
inline V minimum(V a, V b, bool ieee) {
    V smaller = a < b || (a == b && is_negative(a)) ? a : b;
    V result = a != a ? b : b != b ? a : smaller;
    V signalled = is_signalling(a) ? quiet(a) : quiet(b);
    return ieee && (is_signalling(a) || is_signalling(b)) ? signalled : result;
}
template <class V>
inline V maximum(V a, V b, bool ieee) {
    V larger = a > b || (a == b && !is_negative(a)) ? a : b;
    V result = a != a ? b : b != b ? a : larger;
    V signalled = is_signalling(a) ? quiet(a) : quiet(b);
    return ieee && (is_signalling(a) || is_signalling(b)) ? signalled : result;
}
template <class V>
inline V median(V a, V b, V c, bool ieee) {
    if (a != a || b != b || c != c) return minimum(minimum(a, b, ieee), c, ieee);
    V most = maximum(maximum(a, b, ieee), c, ieee);
    if (most == a) return maximum(b, c, ieee);
    if (most == b) return maximum(a, c, ieee);
    return maximum(a, b, ieee);
}

template <class V>
inline V round_even(V x) {  // in every rounding mode
    constexpr V big = V(uint64_t{1} << FloatBits<V>::fraction);
    V magnitude = std::fabs(x);
    V whole = std::trunc(magnitude), rest = magnitude - whole;
    V rounded = rest > V(0.5) || (rest == V(0.5) && std::fmod(whole, V(2)) != 0) ? whole + 1 : whole;
    return magnitude < big ? with_sign(rounded, is_negative(x)) : x + 0;
}

// x − ⌊x⌋, below 1.
template <class V>
inline V fraction_of(V x) {
    if (is_infinite(x))
        return std::bit_cast<V>(FloatBits<V>::most == 255 ? typename FloatBits<V>::bits(0x7FC00000)
                                                          : typename FloatBits<V>::bits(0x7FF8000000000000));
    V result = x - std::floor(x);
    constexpr V below_one = V(1) - (FloatBits<V>::fraction == 23 ? V(0x1p-24) : V(0x1p-53));
    return result > below_one ? below_one : result;
}

template <class V>
inline int32_t frexp_exponent(V x) {
    if (x == 0 || is_nan(x) || is_infinite(x)) return 0;
    int exponent = 0;
    std::frexp(x, &exponent);
    return exponent;
}
template <class V>
inline V frexp_mantissa(V x) {
    if (is_nan(x) || is_infinite(x)) return quiet(x);
    int exponent = 0;
    return std::frexp(x, &exponent);
}
template <class V>
inline V scale_by(V x, int32_t exponent) {
    return std::ldexp(x, exponent < -4000 ? -4000 : exponent > 4000 ? 4000 : exponent);
}

// Conversions to integers truncate and saturate; a NaN becomes 0.
template <class I, class V>
inline I to_integer(V x) {
    constexpr V high = V(std::numeric_limits<I>::max()), low = V(std::numeric_limits<I>::min());
    if (!(x > low)) return x != x ? I(0) : std::numeric_limits<I>::min();
    return x >= high ? std::numeric_limits<I>::max() : I(x);
}
inline uint32_t to_u32(double x) { return to_integer<uint32_t>(x); }
inline int32_t to_i32(double x) { return to_integer<int32_t>(x); }

inline int32_t normalized(float x, float low, float factor) {
    float clamped = x != x ? 0 : x < low ? low : x > 1 ? 1 : x;
    return int32_t(std::nearbyint(double(clamped) * factor));
}
inline uint32_t pack_halves(uint32_t low, uint32_t high) { return (low & 0xFFFF) | high << 16; }

// Scaling that keeps the steps of a division in range: the value to be scaled, the denominator, the numerator.
template <class V>
inline Flagged<V> division_scale(V value, V denominator, V numerator) {
    constexpr bool single = sizeof(V) == 4;
    constexpr int far = single ? 96 : 768, by = single ? 64 : 128, tiny = single ? 23 : 53;
    auto same = [](V a, V b) { return bits_of(a) == bits_of(b); };
    if (numerator == 0 || denominator == 0 || is_nan(value)) return {V(NAN), false};
    V reciprocal = V(1) / denominator, quotient = numerator / denominator;
    if (exponent_of(numerator) - exponent_of(denominator) >= far)
        return {same(value, denominator) ? std::ldexp(value, by) : value, true};
    if (is_denormal(denominator)) return {std::ldexp(value, by), false};
    if (is_denormal(reciprocal) && (is_denormal(quotient) || quotient == 0))
        return {same(value, denominator) ? std::ldexp(value, -by) : value, true};
    if (is_denormal(reciprocal)) return {std::ldexp(value, -by), false};
    if (is_denormal(quotient) || quotient == 0)
        return {same(value, numerator) ? std::ldexp(value, by) : value, true};
    if (exponent_of(numerator) <= tiny) return {std::ldexp(value, by), false};
    return {value, false};
}

// Special cases of a division: the quotient that was computed, the denominator, the numerator.
template <class V>
inline V division_fixup(V quotient, V denominator, V numerator) {
    bool sign = is_negative(denominator) != is_negative(numerator);
    if (is_nan(numerator)) return quiet(numerator);
    if (is_nan(denominator)) return quiet(denominator);
    if ((denominator == 0 && numerator == 0) || (is_infinite(denominator) && is_infinite(numerator)))
        return negate(V(NAN));
    if (denominator == 0 || is_infinite(numerator)) return with_sign(V(INFINITY), sign);
    if (is_infinite(denominator) || numerator == 0) return with_sign(V(0), sign);
    constexpr int least = sizeof(V) == 4 ? -150 : -1075;
    if (exponent_of(numerator) - exponent_of(denominator) < least) return with_sign(V(0), sign);
    // The steps of a division that overflows end with infinity minus infinity.
    return with_sign(is_nan(quotient) ? V(INFINITY) : quotient, sign);
}

// For halves: their division is computed in single precision, and only the special cases remain.
inline float division_fixup_half(float quotient, float denominator, float numerator) {
    bool sign = is_negative(denominator) != is_negative(numerator);
    if (is_nan(numerator)) return quiet(numerator);
    if (is_nan(denominator)) return quiet(denominator);
    if ((denominator == 0 && numerator == 0) || (is_infinite(denominator) && is_infinite(numerator)))
        return negate(float(NAN));
    if (denominator == 0 || is_infinite(numerator)) return with_sign(float(INFINITY), sign);
    if (is_infinite(denominator) || numerator == 0) return with_sign(0.0f, sign);
    return with_sign(quotient, sign);
}

// fma, scaled by a power of 2. A denormal result is rounded only once, too: if the scaled sum is halfway between two
// denormals, the error of the sum's own rounding shows which of them is nearer.
template <class V>
inline V scaled_fma(V a, V b, V c, int by, unsigned round) {
    V sum = std::fma(a, b, c), scaled = std::ldexp(sum, by);
    if (!std::isfinite(sum) || exponent_of(sum) + by > 0 || round != nearest_even) return scaled;
    V error = std::fma(a, b, c - sum);
    V beyond = sum - std::ldexp(scaled, -by), step = std::ldexp(std::numeric_limits<V>::denorm_min(), -by);
    bool halfway = 2 * std::fabs(beyond) == step;
    return halfway && error != 0 && (error > 0) == (beyond > 0) ? std::ldexp(sum + beyond, by) : scaled;
}

template <class D, class S>
struct DivisionFmas {  // fma; in lanes whose bit in VCC is set, undoes the scaling of v_div_scale
    static void run(Wave &w, const Op &op) {
        using V = typename D::value;
        alignas(64) V buffer[3][lanes], result[lanes];
        const V *a = source<S>(w, op, 0, buffer[0]), *b = source<S>(w, op, 1, buffer[1]),
                *c = source<S>(w, op, 2, buffer[2]);
        uint64_t vcc = w.pair(isa::vcc);
        constexpr int by = sizeof(V) == 4 ? 64 : 128;
        Rounding<D> rounding(w);
        for (unsigned l = 0; l < lanes; ++l) {
            V fused = std::fma(a[l], b[l], c[l]);
            if (vcc >> l & 1)
                fused = scaled_fma(a[l], b[l], c[l], exponent_of(c[l]) > FloatBits<V>::bias ? by : -by,
                                   is_float32<D> ? w.round32 : w.round64);
            result[l] = fused;
        }
        write<D>(w, op, result);
    }
};

// v_trig_preop: 53 bits of 2/π, from the segment that the second source chooses.
inline double trig_segment(double x, uint32_t segment) {
    // 2/π without its first zeros: 1201 bits after the point.
    static constexpr uint32_t words[] = {
#include "engine/two_over_pi.inc"
    };
    int shift = int(segment & 31) * 53, exponent = exponent_of(x);
    if (exponent > 1077) shift += exponent - 1077;
    uint64_t bits = 0;
    for (int n = 0; n < 53; ++n) {
        int position = shift + n;  // 0 is the bit of ½
        bool bit = position < 1201 && (words[position / 32] >> (31 - position % 32) & 1);
        bits = bits << 1 | bit;
    }
    int scale = -53 - shift;
    if (exponent >= 1968) scale += 128;
    return std::ldexp(double(bits), scale);
}

template <class V>
inline bool has_class(V x, uint32_t mask) {
    unsigned kind;
    bool negative = is_negative(x);
    if (x != x) kind = is_signalling(x) ? 0 : 1;
    else if (is_infinite(x)) kind = negative ? 2 : 9;
    else if (x == 0) kind = negative ? 5 : 6;
    else if (is_denormal(x)) kind = negative ? 4 : 7;
    else kind = negative ? 3 : 8;
    return mask >> kind & 1;
}
inline bool has_class_half(uint16_t x, uint32_t mask) {
    unsigned kind;
    bool negative = x & 0x8000;
    unsigned exponent = x >> 10 & 31, fraction = x & 0x3FF;
    if (exponent == 31 && fraction) kind = fraction & 0x200 ? 1 : 0;
    else if (exponent == 31) kind = negative ? 2 : 9;
    else if (exponent == 0 && fraction == 0) kind = negative ? 5 : 6;
    else if (exponent == 0) kind = negative ? 4 : 7;
    else kind = negative ? 3 : 8;
    return mask >> kind & 1;
}
// The modifiers of v_cmp_class act on a float, but denormals are not flushed.
struct Class32 : M32 {};
struct Class64 : U64 {
    static constexpr Type type = Type::f64;
};
struct Class16 : U16 {
    static constexpr Type type = Type::f16;
};

inline void add_cube(Adder &a) {
    struct Cube {
        static int face(float x, float y, float z) {
            float ax = std::fabs(x), ay = std::fabs(y), az = std::fabs(z);
            if (az >= ax && az >= ay) return z < 0 ? 5 : 4;
            if (ay >= ax) return y < 0 ? 3 : 2;
            return x < 0 ? 1 : 0;
        }
    };
    a.op<F32, F32, F32, F32>("v_cubeid_f32",
                             [](float x, float y, float z) { return float(Cube::face(x, y, z)); });
    a.op<F32, F32, F32, F32>("v_cubesc_f32", [](float x, float y, float z) {
        const float values[] = {negate(z), z, x, x, x, negate(x)};
        return values[Cube::face(x, y, z)];
    });
    a.op<F32, F32, F32, F32>("v_cubetc_f32", [](float x, float y, float z) {
        const float values[] = {negate(y), negate(y), z, negate(z), negate(y), negate(y)};
        return values[Cube::face(x, y, z)];
    });
    a.op<F32, F32, F32, F32>("v_cubema_f32", [](float x, float y, float z) {
        const float values[] = {x, x, y, y, z, z};
        return 2 * values[Cube::face(x, y, z)];
    });
}

inline void add_single(Adder &a) {
    using f32 = float;
    using u32 = uint32_t;
    a.op<F32, F32, F32>("v_add_f32", [](f32 x, f32 y) { return x + y; });
    a.op<F32, F32, F32>("v_sub_f32", [](f32 x, f32 y) { return x - y; });
    a.op<F32, F32, F32>("v_subrev_f32", [](f32 x, f32 y) { return y - x; });
    a.op<F32, F32, F32>("v_mul_f32", [](f32 x, f32 y) { return x * y; });
    // The product of 0 and anything is 0.
    auto legacy = [](f32 x, f32 y) { return x == 0 || y == 0 ? 0.0f : x * y; };
    a.op<F32, F32, F32>("v_mul_legacy_f32", legacy);
    a.op<F32, F32, F32>("v_min_f32", [](f32 x, f32 y, bool ieee) { return minimum(x, y, ieee); });
    a.op<F32, F32, F32>("v_max_f32", [](f32 x, f32 y, bool ieee) { return maximum(x, y, ieee); });
    a.op<F32, F32, F32, F32>("v_min3_f32",
                             [](f32 x, f32 y, f32 z, bool e) { return minimum(minimum(x, y, e), z, e); });
    a.op<F32, F32, F32, F32>("v_max3_f32",
                             [](f32 x, f32 y, f32 z, bool e) { return maximum(maximum(x, y, e), z, e); });
    a.op<F32, F32, F32, F32>("v_med3_f32", [](f32 x, f32 y, f32 z, bool e) { return median(x, y, z, e); });
    a.op<F32, F32, F32, F32>("v_fma_f32", [](f32 x, f32 y, f32 z) { return std::fma(x, y, z); });
    auto fused = [](f32 x, f32 y, f32 z) { return std::fma(x, y, z); };
    a.op<F32, F32, F32, F32>("v_fmac_f32", fused).accumulates = true;
    a.packed_single<2>("v_pk_add_f32", [](f32 x, f32 y) { return x + y; });
    a.packed_single<2>("v_pk_mul_f32", [](f32 x, f32 y) { return x * y; });
    a.packed_single<3>("v_pk_fma_f32", fused);
    // Multiplication and addition, each rounded; never with denormals.
    auto mad = [](f32 x, f32 y, f32 z) { return flush(x * y) + z; };
    using X = Flushed32;
    a.op<X, X, X, X>("v_mad_f32", mad);
    a.op<X, X, X, X>("v_madmk_f32", mad);
    a.op<X, X, X, X>("v_madak_f32", mad);
    a.op<X, X, X, X>("v_mac_f32", mad).accumulates = true;
    a.op<X, X, X, X>("v_mad_legacy_f32",
                     [](f32 x, f32 y, f32 z) { return (x == 0 || y == 0 ? 0.0f : flush(x * y)) + z; });

    a.op<X, X>("v_exp_f32", [](f32 x) { return f32(exp2_of(x)); });
    a.op<X, X>("v_exp_legacy_f32", [](f32 x) { return f32(exp2_of(x)); });
    a.op<X, X>("v_log_f32", [](f32 x) { return f32(log2_of(x)); });
    a.op<X, X>("v_log_legacy_f32", [](f32 x) { return f32(log2_of(x)); });
    a.op<X, X>("v_rcp_f32", [](f32 x) { return 1 / x; });
    a.op<X, X>("v_rcp_iflag_f32", [](f32 x) { return 1 / x; });
    a.op<X, X>("v_rsq_f32", [](f32 x) { return f32(1 / std::sqrt(double(x))); });
    a.op<X, X>("v_sqrt_f32", [](f32 x) { return std::sqrt(x); });
    a.op<X, X>("v_sin_f32", [](f32 x) { return f32(sine_of(x)); });
    a.op<X, X>("v_cos_f32", [](f32 x) { return f32(cosine_of(x)); });

    a.op<F32, F32>("v_fract_f32", [](f32 x) { return fraction_of(x); });
    a.op<F32, F32>("v_trunc_f32", [](f32 x) { return quiet(std::trunc(x)); });
    a.op<F32, F32>("v_ceil_f32", [](f32 x) { return quiet(std::ceil(x)); });
    a.op<F32, F32>("v_floor_f32", [](f32 x) { return quiet(std::floor(x)); });
    a.op<F32, F32>("v_rndne_f32", [](f32 x) { return round_even(x); });
    a.op<I32, F32>("v_frexp_exp_i32_f32", [](f32 x) { return frexp_exponent(x); });
    a.op<F32, F32>("v_frexp_mant_f32", [](f32 x) { return frexp_mantissa(x); });
    a.op<F32, F32, I32>("v_ldexp_f32", [](f32 x, int32_t y) { return scale_by(x, y); });

    a.op<F32, I32>("v_cvt_f32_i32", [](int32_t x) { return f32(x); });
    a.op<F32, U32>("v_cvt_f32_u32", [](u32 x) { return f32(x); });
    a.op<U32, F32>("v_cvt_u32_f32", [](f32 x) { return to_u32(x); });
    a.op<I32, F32>("v_cvt_i32_f32", [](f32 x) { return to_i32(x); });
    a.op<I32, F32>("v_cvt_rpi_i32_f32", [](f32 x) { return to_i32(std::floor(double(x) + 0.5)); });
    a.op<I32, F32>("v_cvt_flr_i32_f32", [](f32 x) { return to_i32(std::floor(double(x))); });
    a.op<F32, U32>("v_cvt_off_f32_i4", [](u32 x) { return f32(int32_t(x << 28) >> 28) / 16; });
    a.op<F32, U32>("v_cvt_f32_ubyte0", [](u32 x) { return f32(int32_t(x & 0xFF)); });
    a.op<F32, U32>("v_cvt_f32_ubyte1", [](u32 x) { return f32(int32_t(x >> 8 & 0xFF)); });
    a.op<F32, U32>("v_cvt_f32_ubyte2", [](u32 x) { return f32(int32_t(x >> 16 & 0xFF)); });
    a.op<F32, U32>("v_cvt_f32_ubyte3", [](u32 x) { return f32(int32_t(x >> 24)); });
    a.op<F32, F64>("v_cvt_f32_f64", [](double x) { return f32(x); });
    a.op<F32, F16>("v_cvt_f32_f16", [](f32 x) { return quiet(x); });
    a.op<F16, F32>("v_cvt_f16_f32", [](f32 x) { return x; });
    a.op<U32, F32, F32>("v_cvt_pkrtz_f16_f32", [](f32 x, f32 y) {
        return pack_halves(double_to_half(x, toward_zero), double_to_half(y, toward_zero));
    });
    a.op<U32, F32, F32>("v_cvt_pknorm_i16_f32", [](f32 x, f32 y) {
        return pack_halves(u32(normalized(x, -1, 32767)), u32(normalized(y, -1, 32767)));
    });
    a.op<U32, F32, F32>("v_cvt_pknorm_u16_f32", [](f32 x, f32 y) {
        return pack_halves(u32(normalized(x, 0, 65535)), u32(normalized(y, 0, 65535)));
    });
    auto into_byte = [](f32 x, u32 y, u32 z) {
        double clamped = x != x ? 0 : x < 0 ? 0 : x > 255 ? 255 : x;
        unsigned shift = 8 * (y & 3);
        return (z & ~(0xFFu << shift)) | u32(std::nearbyint(clamped)) << shift;
    };
    a.op<U32, F32, U32, U32>("v_cvt_pk_u8_f32", into_byte);
    a.op<U32, F32, U32, U32>("v_cvt_pkaccum_u8_f32", into_byte).accumulates = true;

    a.flagged<F32, F32, F32, F32>("v_div_scale_f32",
                                  [](f32 x, f32 y, f32 z) { return division_scale(x, y, z); });
    a.custom("v_div_fmas_f32", &DivisionFmas<F32, F32>::run, Type::f32, Type::f32, Type::f32, Type::f32);
    a.op<F32, F32, F32, F32>("v_div_fixup_f32", [](f32 x, f32 y, f32 z) { return division_fixup(x, y, z); });
    add_cube(a);
}

inline void add_double(Adder &a) {
    using f64 = double;
    a.op<F64, F64, F64>("v_add_f64", [](f64 x, f64 y) { return x + y; });
    a.op<F64, F64, F64>("v_mul_f64", [](f64 x, f64 y) { return x * y; });
    a.op<F64, F64, F64>("v_min_f64", [](f64 x, f64 y, bool ieee) { return minimum(x, y, ieee); });
    a.op<F64, F64, F64>("v_max_f64", [](f64 x, f64 y, bool ieee) { return maximum(x, y, ieee); });
    auto fused = [](f64 x, f64 y, f64 z) { return std::fma(x, y, z); };
    a.op<F64, F64, F64, F64>("v_fma_f64", fused);
    a.op<F64, F64, F64, F64>("v_fmac_f64", fused).accumulates = true;
    a.op<F64, F64>("v_rcp_f64", [](f64 x) { return 1 / x; });
    a.op<F64, F64>("v_rsq_f64", [](f64 x) { return 1 / std::sqrt(x); });
    a.op<F64, F64>("v_sqrt_f64", [](f64 x) { return std::sqrt(x); });
    a.op<F64, F64>("v_fract_f64", [](f64 x) { return fraction_of(x); });
    a.op<F64, F64>("v_trunc_f64", [](f64 x) { return quiet(std::trunc(x)); });
    a.op<F64, F64>("v_ceil_f64", [](f64 x) { return quiet(std::ceil(x)); });
    a.op<F64, F64>("v_floor_f64", [](f64 x) { return quiet(std::floor(x)); });
    a.op<F64, F64>("v_rndne_f64", [](f64 x) { return round_even(x); });
    a.op<I32, F64>("v_frexp_exp_i32_f64", [](f64 x) { return frexp_exponent(x); });
    a.op<F64, F64>("v_frexp_mant_f64", [](f64 x) { return frexp_mantissa(x); });
    a.op<F64, F64, I32>("v_ldexp_f64", [](f64 x, int32_t y) { return scale_by(x, y); });
    a.op<F64, F64, U32>("v_trig_preop_f64", [](f64 x, uint32_t y) { return trig_segment(x, y); });
    a.op<I32, F64>("v_cvt_i32_f64", [](f64 x) { return to_i32(x); });
    a.op<U32, F64>("v_cvt_u32_f64", [](f64 x) { return to_u32(x); });
    a.op<F64, I32>("v_cvt_f64_i32", [](int32_t x) { return f64(x); });
    a.op<F64, U32>("v_cvt_f64_u32", [](uint32_t x) { return f64(x); });
    a.op<F64, F32>("v_cvt_f64_f32", [](float x) { return f64(x); });
    a.flagged<F64, F64, F64, F64>("v_div_scale_f64",
                                  [](f64 x, f64 y, f64 z) { return division_scale(x, y, z); });
    a.custom("v_div_fmas_f64", &DivisionFmas<F64, F64>::run, Type::f64, Type::f64, Type::f64, Type::f64);
    a.op<F64, F64, F64, F64>("v_div_fixup_f64", [](f64 x, f64 y, f64 z) { return division_fixup(x, y, z); });
}

// Halves are computed as floats. That rounds sums, differences, products, quotients and roots of halves correctly; a
// fused multiplication and addition needs doubles.
inline void add_half(Adder &a) {
    using f32 = float;
    using f64 = double;
    a.op<F16, F16, F16>("v_add_f16", [](f32 x, f32 y) { return x + y; });
    a.op<F16, F16, F16>("v_sub_f16", [](f32 x, f32 y) { return x - y; });
    a.op<F16, F16, F16>("v_subrev_f16", [](f32 x, f32 y) { return y - x; });
    a.op<F16, F16, F16>("v_mul_f16", [](f32 x, f32 y) { return x * y; });
    a.op<F16, F16, F16>("v_min_f16", [](f32 x, f32 y, bool ieee) { return minimum(x, y, ieee); });
    a.op<F16, F16, F16>("v_max_f16", [](f32 x, f32 y, bool ieee) { return maximum(x, y, ieee); });
    a.half<F16, F16, F16, F16>("v_min3_f16",
                               [](f32 x, f32 y, f32 z, bool e) { return minimum(minimum(x, y, e), z, e); });
    a.half<F16, F16, F16, F16>("v_max3_f16",
                               [](f32 x, f32 y, f32 z, bool e) { return maximum(maximum(x, y, e), z, e); });
    a.half<F16, F16, F16, F16>("v_med3_f16", [](f32 x, f32 y, f32 z, bool e) { return median(x, y, z, e); });
    using W = Wide16;
    auto fused = [](f64 x, f64 y, f64 z) { return std::fma(x, y, z); };
    a.half<W, W, W, W>("v_fma_f16", fused);
    a.op<W, W, W, W>("v_fma_legacy_f16", fused);
    // The product is rounded to a half, without denormals, before the addition.
    auto mad = [](f32 x, f32 y, f32 z) { return half_to_float(flush_half(double_to_half(x * y))) + z; };
    using X = Flushed16;
    a.half<X, X, X, X>("v_mad_f16", mad);
    a.op<X, X, X, X>("v_mad_legacy_f16", mad);
    a.op<X, X, X, X>("v_madmk_f16", mad);
    a.op<X, X, X, X>("v_madak_f16", mad);
    a.op<X, X, X, X>("v_mac_f16", mad).accumulates = true;

    a.op<W, W>("v_exp_f16", [](f64 x) { return exp2_of(x); });
    a.op<W, W>("v_log_f16", [](f64 x) { return log2_of(x); });
    a.op<W, W>("v_rcp_f16", [](f64 x) { return 1 / x; });
    a.op<W, W>("v_rsq_f16", [](f64 x) { return 1 / std::sqrt(x); });
    a.op<W, W>("v_sqrt_f16", [](f64 x) { return std::sqrt(x); });
    a.op<W, W>("v_sin_f16", [](f64 x) { return sine_of(x); });
    a.op<W, W>("v_cos_f16", [](f64 x) { return cosine_of(x); });
    a.op<F16, F16>("v_fract_f16", [](f32 x) {
        f32 result = fraction_of(x);
        return result > 0x1.FFCp-1f ? 0x1.FFCp-1f : result;
    });
    a.op<F16, F16>("v_trunc_f16", [](f32 x) { return quiet(std::trunc(x)); });
    a.op<F16, F16>("v_ceil_f16", [](f32 x) { return quiet(std::ceil(x)); });
    a.op<F16, F16>("v_floor_f16", [](f32 x) { return quiet(std::floor(x)); });
    a.op<F16, F16>("v_rndne_f16", [](f32 x) { return round_even(x); });
    a.op<I16, F16>("v_frexp_exp_i16_f16", [](f32 x) { return int16_t(frexp_exponent(x)); });
    a.op<F16, F16>("v_frexp_mant_f16", [](f32 x) { return frexp_mantissa(x); });
    a.op<W, W, I16>("v_ldexp_f16", [](f64 x, int16_t y) {
        return std::ldexp(x, y < -100 ? -100 : y > 100 ? 100 : y);
    });
    a.op<F16, U16>("v_cvt_f16_u16", [](uint16_t x) { return f32(x); });
    a.op<F16, I16>("v_cvt_f16_i16", [](int16_t x) { return f32(x); });
    a.op<U16, F16>("v_cvt_u16_f16", [](f32 x) { return to_integer<uint16_t>(x); });
    a.op<I16, F16>("v_cvt_i16_f16", [](f32 x) { return to_integer<int16_t>(x); });
    a.op<I16, F16>("v_cvt_norm_i16_f16", [](f32 x) { return normalized(x, -1, 32767); });
    a.op<U16, F16>("v_cvt_norm_u16_f16", [](f32 x) { return normalized(x, 0, 65535); });
    a.op<U32, F16, F16>("v_cvt_pknorm_i16_f16", [](f32 x, f32 y) {
        return pack_halves(uint32_t(normalized(x, -1, 32767)), uint32_t(normalized(y, -1, 32767)));
    });
    a.op<U32, F16, F16>("v_cvt_pknorm_u16_f16", [](f32 x, f32 y) {
        return pack_halves(uint32_t(normalized(x, 0, 65535)), uint32_t(normalized(y, 0, 65535)));
    });
    auto fixup = [](f32 x, f32 y, f32 z) { return division_fixup_half(x, y, z); };
    a.half<F16, F16, F16, F16>("v_div_fixup_f16", fixup);
    a.op<F16, F16, F16, F16>("v_div_fixup_legacy_f16", fixup);

    a.packed<true, f32, 2>("v_pk_add_f16", [](f32 x, f32 y) { return x + y; });
    a.packed<true, f32, 2>("v_pk_mul_f16", [](f32 x, f32 y) { return x * y; });
    a.packed<true, f32, 2>("v_pk_min_f16", [](f32 x, f32 y, bool ieee) { return minimum(x, y, ieee); });
    a.packed<true, f32, 2>("v_pk_max_f16", [](f32 x, f32 y, bool ieee) { return maximum(x, y, ieee); });
    a.packed<true, f64, 3>("v_pk_fma_f16", fused);
    a.packed<true, f64, 3>("v_pk_fmac_f16", fused).accumulates = true;
}

template <class T>
void add_float_comparisons(Adder &a, const char *type) {
    using V = typename T::value;
    a.compare<T>("f", "tru", type, [](V, V) { return false; });
    a.compare<T>("lt", "nlt", type, [](V x, V y) { return x < y; });
    a.compare<T>("eq", "neq", type, [](V x, V y) { return x == y; });
    a.compare<T>("le", "nle", type, [](V x, V y) { return x <= y; });
    a.compare<T>("gt", "ngt", type, [](V x, V y) { return x > y; });
    a.compare<T>("lg", "nlg", type, [](V x, V y) { return x < y || x > y; });
    a.compare<T>("ge", "nge", type, [](V x, V y) { return x >= y; });
    a.compare<T>("o", "u", type, [](V x, V y) { return x == x && y == y; });
}

inline void add_comparisons(Adder &a) {
    add_float_comparisons<F32>(a, "f32");
    add_float_comparisons<F64>(a, "f64");
    add_float_comparisons<F16>(a, "f16");
    add_integer_comparisons<U32>(a, "u32");
    add_integer_comparisons<I32>(a, "i32");
    add_integer_comparisons<U64>(a, "u64");
    add_integer_comparisons<I64>(a, "i64");
    add_integer_comparisons<U16>(a, "u16");
    add_integer_comparisons<I16>(a, "i16");
    auto class32 = [](uint32_t x, uint32_t mask) { return has_class(std::bit_cast<float>(x), mask); };
    auto class64 = [](uint64_t x, uint32_t mask) { return has_class(std::bit_cast<double>(x), mask); };
    auto class16 = [](uint16_t x, uint32_t mask) { return has_class_half(x, mask); };
    a.compare<Class32, U32>("class", "f32", class32);
    a.compare<Class64, U32>("class", "f64", class64);
    a.compare<Class16, U32>("class", "f16", class16);
}

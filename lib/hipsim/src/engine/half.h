// Half precision and rounding, in integer arithmetic: the same results on every CPU.

#pragma once

#include <bit>
#include <cstdint>

namespace hipsim {

// Rounding modes, with their numbers in MODE.
enum Round : unsigned { nearest_even = 0, up = 1, down = 2, toward_zero = 3 };

inline float half_to_float(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7FFF;
    // A half's bits, moved to a float's place, are too small by a factor of 2^112. The product also corrects denormals.
    float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
    uint32_t bits = std::bit_cast<uint32_t>(value);
    uint32_t special = 0x7F800000 | (magnitude & 0x3FF) << 13;  // a signalling NaN stays one
    return std::bit_cast<float>(sign | (magnitude >= 0x7C00 ? special : bits));
}

inline uint16_t double_to_half(double value, unsigned round = nearest_even) {
    uint64_t bits = std::bit_cast<uint64_t>(value);
    uint16_t sign = uint16_t(bits >> 48 & 0x8000);
    uint64_t fraction = bits & 0xFFFFFFFFFFFFF;
    int exponent = int(bits >> 52 & 0x7FF);
    if (exponent == 0x7FF) return uint16_t(sign | 0x7C00 | (fraction ? 0x200 | (fraction >> 42) : 0));
    if (exponent) fraction |= uint64_t{1} << 52;
    else exponent = 1;
    // The result has 10 bits after the point of its exponent, and no exponent is below −14.
    int target = exponent - 1023 < -14 ? -14 : exponent - 1023;
    int shift = 42 + (target - (exponent - 1023));
    uint64_t kept = 0, rest = 0, half = 1;
    if (shift < 64) {
        kept = fraction >> shift;
        rest = fraction & ((uint64_t{1} << shift) - 1);
        half = uint64_t{1} << (shift - 1);
    } else if (fraction) {
        rest = 1;
        half = 2;
    }
    bool more = false;
    switch (round) {
        case nearest_even: more = rest > half || (rest == half && (kept & 1)); break;
        case up: more = rest && !sign; break;
        case down: more = rest && sign; break;
        default: break;
    }
    kept += more;
    // kept is below 2^11, or 2^11 after a carry: adding the exponent is right for both.
    uint64_t result = kept >= 0x400 ? (uint64_t(target + 14) << 10) + kept : kept;
    if (result >= 0x7C00) {
        bool to_infinity = round == nearest_even || (round == up && !sign) || (round == down && sign);
        result = to_infinity ? 0x7C00 : 0x7BFF;
    }
    return uint16_t(sign | result);
}

// Flushing keeps the sign.
inline float flush(float value) {
    uint32_t bits = std::bit_cast<uint32_t>(value);
    return std::bit_cast<float>((bits & 0x7F800000) ? bits : bits & 0x80000000);
}
inline double flush(double value) {
    uint64_t bits = std::bit_cast<uint64_t>(value);
    return std::bit_cast<double>((bits & 0x7FF0000000000000) ? bits : bits & 0x8000000000000000);
}
inline uint16_t flush_half(uint16_t bits) { return (bits & 0x7C00) ? bits : bits & 0x8000; }

}  // namespace hipsim

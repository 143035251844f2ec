// exp2, log2, sine and cosine in double precision: polynomials that a compiler can vectorize. Their error is below
// 2^-34, so results rounded to single precision are off by less than 1 unit in the last place. They are the same on
// every machine.

#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace hipsim {

// The nearest integer, for |x| < 2^51.
inline double nearest(double x) {
    double shifted = x + 0x1.8p52;
    return shifted - 0x1.8p52;
}

inline double exp2_of(double x) {
    double clamped = x < -1000 ? -1000 : x > 1000 ? 1000 : x;
    if (!(x == x)) clamped = 0;
    double whole = nearest(clamped);
    double t = (clamped - whole) * 0.693147180559945309417;
    double sum =
        1 +
        t * (1 + t * (1 / 2. +
                      t * (1 / 6. +
                           t * (1 / 24. +
                                t * (1 / 120. +
                                     t * (1 / 720. +
                                          t * (1 / 5040. + t * (1 / 40320. + t * (1 / 362880. +
                                                                                  t * (1 / 3628800.))))))))));
    double scale = std::bit_cast<double>(uint64_t(int64_t(whole) + 1023) << 52);
    return x == x ? sum * scale : x;
}

inline double log2_of(double x) {
    uint64_t bits = std::bit_cast<uint64_t>(x);
    // Splits x into 2^exponent × m, with m between √½ and √2.
    uint64_t shifted = bits - 0x3FE6A09E667F3BCD;
    int64_t exponent = int64_t(shifted) >> 52;
    double m = std::bit_cast<double>(bits - (uint64_t(exponent) << 52));
    double t = (m - 1) / (m + 1), s = t * t;
    double sum =
        t * (2 + s * (2 / 3. +
                      s * (2 / 5. +
                           s * (2 / 7. + s * (2 / 9. + s * (2 / 11. + s * (2 / 13. + s * (2 / 15.))))))));
    double result = double(exponent) + sum * 1.44269504088896340736;
    if (x == 0) result = -INFINITY;
    if (x == INFINITY) result = INFINITY;
    return x < 0 || x != x ? std::bit_cast<double>(0x7FF8000000000000) : result;
}

// sin(2π f) for |f| ≤ ¼.
inline double sine_of_turns(double f) {
    double y = f * 6.28318530717958647693, s = y * y;
    return y * (1 + s * (-1 / 6. +
                         s * (1 / 120. +
                              s * (-1 / 5040. + s * (1 / 362880. + s * (-1 / 39916800. +
                                                                        s * (1 / 6227020800. +
                                                                             s * (-1 / 1307674368000.))))))));
}

// x in turns. Outside ±256, the hardware returns 0 for the sine and 1 for the cosine.
inline double sine_of(double x) {
    double f = x - nearest(x);
    double magnitude = std::fabs(f);
    double folded = magnitude > 0.25 ? 0.5 - magnitude : magnitude;
    double result = sine_of_turns(std::copysign(folded, f));
    if (x == 0) result = x;
    result = std::fabs(x) > 256 ? 0 : result;
    return x - x == 0 ? result : std::bit_cast<double>(0x7FF8000000000000);
}

inline double cosine_of(double x) {
    double f = std::fabs(x - nearest(x));
    double result = sine_of_turns(0.25 - f);
    result = std::fabs(x) > 256 ? 1 : result;
    return x - x == 0 ? result : std::bit_cast<double>(0x7FF8000000000000);
}

}  // namespace hipsim

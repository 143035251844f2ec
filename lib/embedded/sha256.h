// SHA-256 (FIPS 180-4), for the names of cached files and their digests.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace embedded {

class Sha256 {
  public:
    using Digest = std::array<uint8_t, 32>;

    void add(const void *data, size_t size) {
        const auto *bytes = static_cast<const uint8_t *>(data);
        if (size == 0) return;
        total_ += size;
        if (used_) {
            const size_t n = std::min(size, sizeof block_ - used_);
            memcpy(block_ + used_, bytes, n);
            used_ += n;
            bytes += n;
            size -= n;
            if (used_ < sizeof block_) return;
            compress(block_, 1);
            used_ = 0;
        }
        compress(bytes, size / sizeof block_);
        used_ = size % sizeof block_;
        memcpy(block_, bytes + size - used_, used_);
    }
    void add(const std::string &text) { add(text.data(), text.size() + 1); }
    Digest digest() {
        const uint64_t bits = total_ * 8;
        const uint8_t end = 0x80, zero = 0;
        add(&end, 1);
        while (used_ != 56) add(&zero, 1);
        uint8_t length[8];
        for (int k = 0; k < 8; k++) length[k] = static_cast<uint8_t>(bits >> (56 - 8 * k));
        add(length, 8);
        Digest found;
        for (size_t k = 0; k < found.size(); k++)
            found[k] = static_cast<uint8_t>(state_[k / 4] >> (24 - 8 * (k % 4)));
        return found;
    }
    std::string hex() {
        std::string text;
        for (const uint8_t byte : digest())
            for (const int digit : {byte >> 4, byte & 15}) text += "0123456789abcdef"[digit];
        return text;
    }

  private:
    static uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }
    // The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
    static const uint32_t *constants() {
        alignas(16) static uint32_t found[64];
        static const bool ready = [] {
            int n = 0;
            for (uint32_t candidate = 2; n < 64; candidate++) {
                bool prime = true;
                for (uint32_t d = 2; d * d <= candidate; d++) prime &= candidate % d != 0;
                if (!prime) continue;
                unsigned __int128 low = 0, high = static_cast<unsigned __int128>(8) << 32;
                const unsigned __int128 target = static_cast<unsigned __int128>(candidate) << 96;
                while (high - low > 1) {  // floor(cbrt(candidate) * 2^32)
                    const unsigned __int128 middle = (low + high) / 2;
                    if (middle * middle * middle <= target) low = middle;
                    else high = middle;
                }
                found[n++] = static_cast<uint32_t>(low);
            }
            return true;
        }();
        (void)ready;
        return found;
    }
    void compress(const uint8_t *blocks, size_t count) {
        if (count == 0) return;
#ifdef __x86_64__
        static const bool fast = (__builtin_cpu_init(), __builtin_cpu_supports("sha"));
        if (fast) return compress_sha(blocks, count);
#endif
        for (const uint32_t *k = constants(); count; count--, blocks += 64) compress_plain(blocks, k);
    }
    void compress_plain(const uint8_t *block, const uint32_t *k) {
        uint32_t w[64];
        for (int i = 0; i < 16; i++)
            w[i] = static_cast<uint32_t>(block[4 * i]) << 24 | static_cast<uint32_t>(block[4 * i + 1]) << 16 |
                   static_cast<uint32_t>(block[4 * i + 2]) << 8 | block[4 * i + 3];
        for (int i = 16; i < 64; i++)
            w[i] = w[i - 16] + (rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3) + w[i - 7] +
                   (rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10);
        uint32_t a = state_[0], b = state_[1], c = state_[2], d = state_[3];
        uint32_t e = state_[4], f = state_[5], g = state_[6], h = state_[7];
        for (int i = 0; i < 64; i++) {
            const uint32_t t1 =
                h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & f) ^ (~e & g)) + k[i] + w[i];
            const uint32_t t2 =
                (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + t1;
            d = c, c = b, b = a, a = t1 + t2;
        }
        const uint32_t sums[8] = {a, b, c, d, e, f, g, h};
        for (int i = 0; i < 8; i++) state_[i] += sums[i];
    }
#ifdef __x86_64__
    // The same with the CPU's instructions for SHA, which are about five times faster. They keep the state as ABEF and CDGH.
    __attribute__((target("sha,sse4.1"))) void compress_sha(const uint8_t *blocks, size_t count) {
        const auto *k = reinterpret_cast<const __m128i *>(constants());
        const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
        auto *state = reinterpret_cast<__m128i *>(state_);
        const __m128i dcba = _mm_shuffle_epi32(_mm_loadu_si128(state), 0xb1);
        const __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128(state + 1), 0x1b);
        __m128i abef = _mm_alignr_epi8(dcba, hgfe, 8), cdgh = _mm_blend_epi16(hgfe, dcba, 0xf0);
        for (; count; count--, blocks += 64) {
            const __m128i before_abef = abef, before_cdgh = cdgh;
            __m128i w[4];
            for (int i = 0; i < 4; i++)
                w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i *>(blocks + 16 * i)),
                                        swap);
            for (int i = 0; i < 16; i++) {
                __m128i &now = w[i % 4];
                if (i >= 4) {
                    const __m128i last = w[(i + 3) % 4];
                    now = _mm_add_epi32(_mm_sha256msg1_epu32(now, w[(i + 1) % 4]),
                                        _mm_alignr_epi8(last, w[(i + 2) % 4], 4));
                    now = _mm_sha256msg2_epu32(now, last);
                }
                const __m128i sum = _mm_add_epi32(now, _mm_load_si128(k + i));
                cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
                abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
            }
            abef = _mm_add_epi32(abef, before_abef);
            cdgh = _mm_add_epi32(cdgh, before_cdgh);
        }
        const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
        _mm_storeu_si128(state, _mm_blend_epi16(feba, dchg, 0xf0));
        _mm_storeu_si128(state + 1, _mm_alignr_epi8(dchg, feba, 8));
    }
#endif
    uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                          0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    uint8_t block_[64] = {};
    size_t used_ = 0;
    uint64_t total_ = 0;
};

}  // namespace embedded

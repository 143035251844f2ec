// SHA-256 (FIPS 180-4), for the names of cached files.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

namespace cudasim {

class Sha256 {
  public:
    void add(const void *data, size_t size) {
        const auto *bytes = static_cast<const uint8_t *>(data);
        total_ += size;
        while (size) {
            const size_t n = std::min(size, 64 - used_);
            memcpy(block_ + used_, bytes, n);
            used_ += n;
            bytes += n;
            size -= n;
            if (used_ == 64) {
                compress();
                used_ = 0;
            }
        }
    }
    void add(const std::string &text) { add(text.data(), text.size() + 1); }
    std::string hex() {
        const uint64_t bits = total_ * 8;
        const uint8_t end = 0x80, zero = 0;
        add(&end, 1);
        while (used_ != 56) add(&zero, 1);
        uint8_t length[8];
        for (int k = 0; k < 8; k++) length[k] = static_cast<uint8_t>(bits >> (56 - 8 * k));
        add(length, 8);
        char text[65];
        for (int k = 0; k < 8; k++) snprintf(text + 8 * k, 9, "%08x", state_[k]);
        return text;
    }

  private:
    static uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }
    // The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
    static const uint32_t *constants() {
        static uint32_t found[64];
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
    void compress() {
        const uint32_t *k = constants();
        uint32_t w[64], s[8];
        for (int i = 0; i < 16; i++)
            w[i] = static_cast<uint32_t>(block_[4 * i]) << 24 |
                   static_cast<uint32_t>(block_[4 * i + 1]) << 16 |
                   static_cast<uint32_t>(block_[4 * i + 2]) << 8 | block_[4 * i + 3];
        for (int i = 16; i < 64; i++)
            w[i] = w[i - 16] + (rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3) + w[i - 7] +
                   (rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10);
        memcpy(s, state_, sizeof s);
        for (int i = 0; i < 64; i++) {
            const uint32_t t1 = s[7] + (rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25)) +
                                ((s[4] & s[5]) ^ (~s[4] & s[6])) + k[i] + w[i];
            const uint32_t t2 = (rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22)) +
                                ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
            memmove(s + 1, s, 7 * sizeof *s);
            s[4] += t1;
            s[0] = t1 + t2;
        }
        for (int i = 0; i < 8; i++) state_[i] += s[i];
    }
    uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                          0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    uint8_t block_[64] = {};
    size_t used_ = 0;
    uint64_t total_ = 0;
};

}  // namespace cudasim

// Fields of an encoding, as the ISA documents name them: from the highest bit to the lowest.

#pragma once

#include <cstdint>

namespace hipsim::isa {

constexpr uint32_t bits(uint32_t word, unsigned high, unsigned low) {
    return word >> low & ((uint64_t{2} << (high - low)) - 1);
}

constexpr int32_t signed_bits(uint32_t word, unsigned high, unsigned low) {
    return int32_t(word << (31 - high)) >> (31 - high + low);
}

}  // namespace hipsim::isa

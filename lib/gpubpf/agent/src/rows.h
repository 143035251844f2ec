// An array with rows of a word for each of some launches: a launch's value is the largest of its words.
#pragma once

#include <algorithm>
#include <cstdint>

namespace gpubpf {

// Raises the values of launches to the words of a row.
inline void raise_to(uint64_t *values, const uint64_t *row, uint64_t launches) {
    for (uint64_t n = 0; n < launches; ++n) values[n] = std::max(values[n], row[n]);
}

}  // namespace gpubpf

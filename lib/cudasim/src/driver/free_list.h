// Free ranges of an address space.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>

namespace cudasim {

class FreeList {
  public:
    // Adds a range and merges it with its neighbours.
    void add(uint64_t base, size_t bytes) {
        auto next = ranges_.lower_bound(base);
        if (next != ranges_.begin()) {
            auto previous = std::prev(next);
            if (previous->first + previous->second == base) {
                base = previous->first;
                bytes += previous->second;
                ranges_.erase(previous);
            }
        }
        if (next != ranges_.end() && base + bytes == next->first) {
            bytes += next->second;
            ranges_.erase(next);
        }
        ranges_[base] = bytes;
    }

    // Takes `bytes` from the first range that is large enough. Returns 0 if no range is.
    uint64_t take(size_t bytes) {
        for (auto range = ranges_.begin(); range != ranges_.end(); ++range) {
            if (range->second < bytes) continue;
            const uint64_t base = range->first;
            const size_t rest = range->second - bytes;
            ranges_.erase(range);
            if (rest != 0) ranges_[base + bytes] = rest;
            return base;
        }
        return 0;
    }

    void clear() { ranges_.clear(); }

  private:
    std::map<uint64_t, size_t> ranges_;  // address → bytes
};

}  // namespace cudasim

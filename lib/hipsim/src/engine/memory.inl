// Vector memory instructions: FLAT, GLOBAL, SCRATCH, MUBUF and DS.

// The lanes that an instruction works on, and the host's address of each lane's data; 0: outside the buffer or LDS
// (a load returns 0, a store is dropped). `dense`: no address is 0.
struct Access {
    alignas(64) uint64_t at[lanes];
    bool dense = true;
    uint64_t active = 0;
    uint64_t swizzled = 0;  // lanes in scratch: their words are scratch_stride() bytes apart
};

// The distance between one word of a lane's scratch and the next.
inline unsigned scratch_stride(const Wave &w) { return 4 * w.count; }

// The place of a byte of a lane's scratch.
inline uint64_t scratch_place(const Wave &w, uint64_t offset, unsigned lane) {
    return (offset & ~uint64_t{3}) * w.count + lane * 4 + (offset & 3);
}

inline bool within_known(const Wave &w, uint64_t low, uint64_t high, unsigned bytes, bool write) {
    for (const Range &range : w.ranges)
        if (low >= range.begin && high < range.end && range.end - high >= bytes &&
            (range.may_write || !write))
            return true;
    return false;
}

// Checks the addresses of all active lanes; most instructions stay within one allocation. Other lanes' addresses change.
inline bool check(Wave &w, const Op &op, uint64_t *address, uint64_t active, unsigned bytes, bool write) {
    if (!active) return true;
    uint64_t first = address[std::countr_zero(active)];
    if (active != ~uint64_t{0})
        for (unsigned l = 0; l < lanes; ++l) address[l] = active >> l & 1 ? address[l] : first;
    uint64_t low = first, high = first;
    for (unsigned l = 0; l < lanes; ++l) low = address[l] < low ? address[l] : low;
    for (unsigned l = 0; l < lanes; ++l) high = address[l] > high ? address[l] : high;
    if (within_known(w, low, high, bytes, write)) return true;
    w.range(low);
    if (within_known(w, low, high, bytes, write)) return true;
    for (uint64_t rest = active; rest; rest &= rest - 1)
        if (!w.allow(op, address[std::countr_zero(rest)], bytes, write)) return false;
    return true;
}

// Whether the lanes' words are consecutive in memory.
inline bool consecutive(const uint64_t *address) {
    uint64_t different = 0;
    for (unsigned l = 0; l < lanes; ++l) different |= address[l] ^ (address[0] + 4 * l);
    return different == 0;
}

// FLAT, GLOBAL and SCRATCH: computes the host's addresses. Returns false after a fault.
inline bool flat_addresses(Wave &w, const Op &op, unsigned bytes, bool write, Access &access) {
    const isa::Instruction &i = op.i;
    uint64_t *address = access.at;
    access.active = w.exec();
    const uint32_t *low = w.v[i.addr];
    if (i.opcode->format == isa::Format::scratch) {
        uint32_t base = i.saddr != 0x7F ? w.s[i.saddr] : 0;
        access.swizzled = ~uint64_t{0};
        for (uint64_t rest = access.active; rest; rest &= rest - 1) {
            unsigned l = unsigned(std::countr_zero(rest));
            uint64_t offset = uint32_t((i.saddr != 0x7F ? base : low[l]) + uint32_t(i.offset));
            if ((offset + bytes) * w.count > w.scratch_bytes) {
                w.fault(Fault::memory, op, w.group->target->private_base + offset,
                        "an access beyond the scratch memory of the wave", write);
                return false;
            }
            address[l] = uint64_t(w.scratch) + scratch_place(w, offset, l);
        }
        return true;
    }
    uint64_t constant = uint64_t(int64_t(i.offset));
    uint64_t above = 0;  // bits of the lanes' registers that only addresses in an aperture have
    if (i.saddr != 0x7F) {
        uint64_t base = w.pair(i.saddr) + constant;
        for (unsigned l = 0; l < lanes; ++l) address[l] = base + low[l];
    } else {
        const uint32_t *high = w.v[i.addr + 1];
        for (unsigned l = 0; l < lanes; ++l) {
            address[l] = low[l] | uint64_t(high[l]) << 32;
            above |= address[l] >> 47;
            address[l] += constant;
        }
    }
    if (i.opcode->format == isa::Format::flat) {
        if (above) {
            // Some lane may be in an aperture. The test ignores the instruction's constant (LLVM pull request 153001).
            const Target &target = *w.group->target;
            uint64_t global = 0, apertures[lanes];
            for (uint64_t rest = access.active; rest; rest &= rest - 1) {
                unsigned l = unsigned(std::countr_zero(rest));
                uint64_t tested = address[l] - constant;
                uint64_t high = tested >> 32, offset = uint32_t(tested) + constant;
                if (high == target.shared_base >> 32) {
                    bool inside = offset + bytes <= w.group->lds_bytes;
                    apertures[l] = inside ? uint64_t(w.group->lds) + offset : 0;
                    access.dense = access.dense && inside;
                } else if (high == target.private_base >> 32) {
                    if ((offset + bytes) * w.count > w.scratch_bytes) {
                        w.fault(Fault::memory, op, address[l],
                                "an access beyond the scratch memory of the wave", write);
                        return false;
                    }
                    apertures[l] = uint64_t(w.scratch) + scratch_place(w, offset, l);
                    access.swizzled |= uint64_t{1} << l;
                } else {
                    global |= uint64_t{1} << l;
                }
            }
            if (!check(w, op, address, global, bytes, write)) return false;
            for (unsigned l = 0; l < lanes; ++l) address[l] &= ~registered_bit;
            for (uint64_t rest = access.active & ~global; rest; rest &= rest - 1)
                address[std::countr_zero(rest)] = apertures[std::countr_zero(rest)];
            return true;
        }
    }
    if (!check(w, op, address, access.active, bytes, write)) return false;
    for (unsigned l = 0; l < lanes; ++l) address[l] &= ~registered_bit;
    return true;
}

// The bounds that OOB_SELECT of a GFX10 descriptor chooses.
inline bool outside_gfx10(unsigned select, uint32_t index, uint64_t offset, unsigned bytes, uint32_t stride,
                          uint32_t records, uint32_t soffset, bool swizzle) {
    bool structured = index >= records || (stride && offset + bytes > stride);
    switch (select) {
        case 0: return structured;
        case 1: return index >= records;
        case 2: return records == 0;
        default:
            if (swizzle && stride) return structured;
            return offset + uint64_t{index} * stride + bytes + soffset > records;
    }
}

// MUBUF: see "Buffer addressing" in the ISA document.
inline bool buffer_addresses(Wave &w, const Op &op, unsigned bytes, bool write, Access &access) {
    const isa::Instruction &i = op.i;
    const uint32_t *descriptor = w.s + i.srsrc;
    uint64_t base = descriptor[0] | uint64_t(descriptor[1] & 0xFFFF) << 32;
    uint32_t stride = descriptor[1] >> 16 & 0x3FFF, records = descriptor[2];
    bool swizzle = descriptor[1] >> 31, add_lane = descriptor[3] >> 23 & 1;
    unsigned element = 2u << (descriptor[3] >> 19 & 3), index_stride = 8u << (descriptor[3] >> 21 & 3);
    // GFX10 has elements of 4 bytes and no further bits of the stride, and its descriptor says how bounds are checked.
    bool gfx10 = i.set->family == isa::Family::gfx10;
    unsigned bounds = descriptor[3] >> 28 & 3;
    if (gfx10) element = 4;
    else if (add_lane) stride |= (descriptor[3] >> 15 & 15) << 14;
    uint32_t soffset = uint32_t(w.scalar(i.soffset, 1));
    access.active = w.exec();
    alignas(64) uint64_t address[lanes];
    uint64_t checked = 0;
    if (swizzle && add_lane && !i.idxen && element == 4 && index_stride == w.count)
        access.swizzled = ~uint64_t{0};
    if (swizzle && !access.swizzled && bytes > element) {
        w.fault(Fault::illegal_instruction, op, op.address,
                "access wider than an element of a swizzled buffer");
        return false;
    }
    for (uint64_t rest = access.active; rest; rest &= rest - 1) {
        unsigned l = unsigned(std::countr_zero(rest));
        uint32_t index = (i.idxen ? w.v[i.addr][l] : 0) + (add_lane ? l : 0);
        uint32_t offset = uint32_t(i.offset) + (i.offen ? w.v[i.addr + (i.idxen ? 1 : 0)][l] : 0);
        bool outside;
        if (swizzle) {
            address[l] =
                base + soffset +
                (uint64_t{index / index_stride} * stride + (offset & ~(element - 1))) * index_stride +
                (index % index_stride) * element + (offset & (element - 1));
            outside = stride ? index >= records || offset >= stride : false;
            if (gfx10) outside = outside_gfx10(bounds, index, offset, bytes, stride, records, 0, swizzle);
        } else {
            uint64_t linear = uint64_t{index} * stride + offset;
            address[l] = base + soffset + linear;
            outside = stride && i.idxen ? index >= records : linear + bytes + soffset > records;
            if (gfx10)
                outside = outside_gfx10(bounds, index, offset, bytes, stride, records, soffset, swizzle);
        }
        // Scratch must be this wave's.
        if (access.swizzled) {
            uint64_t scratch = uint64_t(w.scratch);
            uint64_t last = address[l] + (bytes > 4 ? (bytes / 4 - 1) * scratch_stride(w) : 0);
            if (address[l] < scratch || last + 4 > scratch + w.scratch_bytes) {
                uint64_t relative = (address[l] - scratch) / w.count;
                w.fault(Fault::memory, op, w.group->target->private_base + uint32_t(relative),
                        "an access beyond the scratch memory of the wave", write);
                return false;
            }
        } else if (!outside) {
            checked |= uint64_t{1} << l;
        }
        access.at[l] = outside ? 0 : address[l] & ~registered_bit;
        access.dense = access.dense && !outside;
    }
    return check(w, op, address, checked, bytes, write);
}

inline bool addresses(Wave &w, const Op &op, unsigned bytes, bool write, Access &access) {
    if (op.i.opcode->format == isa::Format::mubuf) return buffer_addresses(w, op, bytes, write, access);
    return flat_addresses(w, op, bytes, write, access);
}

// How a load changes its register, and which bytes it reads.
enum class Load { u8, s8, u16, s16, word, u8_low, u8_high, s8_low, s8_high, u16_low, u16_high };

constexpr unsigned load_bytes(Load kind) {
    switch (kind) {
        case Load::u8:
        case Load::s8:
        case Load::u8_low:
        case Load::u8_high:
        case Load::s8_low:
        case Load::s8_high: return 1;
        case Load::word: return 4;
        default: return 2;
    }
}

template <class T>
inline T get(const uint8_t *at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}
template <class T>
inline void put(uint8_t *at, T value) {
    std::memcpy(at, &value, sizeof value);
}

template <Load kind>
inline uint32_t loaded(const uint8_t *at, uint32_t old) {
    uint32_t low_kept = old & 0xFFFF, high_kept = old & 0xFFFF0000;
    if constexpr (kind == Load::u8) return *at;
    if constexpr (kind == Load::s8) return uint32_t(int32_t(int8_t(*at)));
    if constexpr (kind == Load::u16) return get<uint16_t>(at);
    if constexpr (kind == Load::s16) return uint32_t(int32_t(get<int16_t>(at)));
    if constexpr (kind == Load::word) return get<uint32_t>(at);
    if constexpr (kind == Load::u8_low) return high_kept | *at;
    if constexpr (kind == Load::u8_high) return low_kept | uint32_t(*at) << 16;
    if constexpr (kind == Load::s8_low) return high_kept | uint16_t(int16_t(int8_t(*at)));
    if constexpr (kind == Load::s8_high) return low_kept | uint32_t(uint16_t(int16_t(int8_t(*at)))) << 16;
    if constexpr (kind == Load::u16_low) return high_kept | get<uint16_t>(at);
    if constexpr (kind == Load::u16_high) return low_kept | uint32_t(get<uint16_t>(at)) << 16;
}

// Two words in one access of the host: as on the GPU, no store of another workgroup comes between them.
using AnyPlace = uint64_t __attribute__((aligned(1), may_alias));

inline uint64_t get_pair(const uint8_t *at) { return *reinterpret_cast<const volatile AnyPlace *>(at); }
inline void put_pair(uint8_t *at, uint64_t value) { *reinterpret_cast<volatile AnyPlace *>(at) = value; }

template <unsigned words>
inline void load_words(uint32_t (*d)[lanes], unsigned lane, const uint8_t *at) {
    for (unsigned n = 0; n + 1 < words; n += 2) {
        uint64_t pair = get_pair(at + 4 * n);
        d[n][lane] = uint32_t(pair);
        d[n + 1][lane] = uint32_t(pair >> 32);
    }
    if constexpr (words % 2) d[words - 1][lane] = get<uint32_t>(at + 4 * (words - 1));
}

template <unsigned words>
inline void store_words(const uint32_t (*d)[lanes], unsigned lane, uint8_t *at) {
    for (unsigned n = 0; n + 1 < words; n += 2)
        put_pair(at + 4 * n, d[n][lane] | uint64_t(d[n + 1][lane]) << 32);
    if constexpr (words % 2) put(at + 4 * (words - 1), d[words - 1][lane]);
}

constexpr uint8_t nothing_there[16] = {};  // read by loads outside a buffer

template <Load kind, unsigned words>
void load(Wave &w, const Op &op) {
    Access access;
    if (!addresses(w, op, words > 1 ? 4 * words : load_bytes(kind), false, access)) return;
    uint32_t (*d)[lanes] = w.v + op.i.vdst;
    if (access.active == ~uint64_t{0} && access.dense && !access.swizzled) {
        if (kind == Load::word && words == 1 && consecutive(access.at)) {
            std::memcpy(d[0], reinterpret_cast<const void *>(access.at[0]), sizeof d[0]);
            return;
        }
        for (unsigned l = 0; l < lanes; ++l) {
            const uint8_t *at = reinterpret_cast<const uint8_t *>(access.at[l]);
            if constexpr (words > 1) load_words<words>(d, l, at);
            else d[0][l] = loaded<kind>(at, d[0][l]);
        }
        return;
    }
    for (uint64_t rest = access.active; rest; rest &= rest - 1) {
        unsigned l = unsigned(std::countr_zero(rest));
        const uint8_t *at = reinterpret_cast<const uint8_t *>(access.at[l]);
        if (!at) at = nothing_there;
        else if (words > 1 && (access.swizzled >> l & 1)) {
            for (unsigned n = 0; n < words; ++n) d[n][l] = loaded<kind>(at + n * scratch_stride(w), d[n][l]);
            continue;
        }
        if constexpr (words > 1) load_words<words>(d, l, at);
        else d[0][l] = loaded<kind>(at, d[0][l]);
    }
}

enum class Store { byte, byte_high, half, half_high, word };

template <Store kind, unsigned words>
void store(Wave &w, const Op &op) {
    constexpr unsigned bytes = kind == Store::word                               ? 4 * words
                               : kind == Store::byte || kind == Store::byte_high ? 1
                                                                                 : 2;
    Access access;
    if (!addresses(w, op, bytes, true, access)) return;
    w.stored_bytes += bytes * unsigned(std::popcount(access.active));
    const uint32_t (*d)[lanes] = w.v + op.i.data[0];
    if (kind == Store::word && words == 1 && access.active == ~uint64_t{0} && access.dense &&
        consecutive(access.at)) {
        std::memcpy(reinterpret_cast<void *>(access.at[0]), d[0], sizeof d[0]);
        return;
    }
    for (uint64_t rest = access.active; rest; rest &= rest - 1) {
        unsigned l = unsigned(std::countr_zero(rest));
        uint8_t *at = reinterpret_cast<uint8_t *>(access.at[l]);
        if (!at) continue;
        uint32_t value = kind == Store::byte_high || kind == Store::half_high ? d[0][l] >> 16 : d[0][l];
        if constexpr (bytes == 1) *at = uint8_t(value);
        else if constexpr (bytes == 2) put(at, uint16_t(value));
        else if (!(access.swizzled >> l & 1)) store_words<words>(d, l, at);
        else
            for (unsigned n = 0; n < words; ++n) put(at + n * scratch_stride(w), d[n][l]);
    }
}

template <class T>
inline T data_of(const uint32_t (*v)[lanes], unsigned lane) {
    if constexpr (sizeof(T) == 4) return std::bit_cast<T>(v[0][lane]);
    else return std::bit_cast<T>(v[0][lane] | uint64_t(v[1][lane]) << 32);
}
template <class T>
inline void set_data(uint32_t (*v)[lanes], unsigned lane, T value) {
    if constexpr (sizeof(T) == 4) {
        v[0][lane] = std::bit_cast<uint32_t>(value);
    } else {
        v[0][lane] = uint32_t(std::bit_cast<uint64_t>(value));
        v[1][lane] = uint32_t(std::bit_cast<uint64_t>(value) >> 32);
    }
}

// An atomic in memory: F computes the new value from the old one, the data, and the second data (of a comparison).
template <class F, class T, unsigned operands>
void atomic(Wave &w, const Op &op) {
    Access access;
    if (!addresses(w, op, sizeof(T), true, access)) return;
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    constexpr unsigned words = sizeof(T) / 4;
    const isa::Instruction &i = op.i;
    for (uint64_t rest = access.active; rest; rest &= rest - 1) {
        unsigned l = unsigned(std::countr_zero(rest));
        uint8_t *at = reinterpret_cast<uint8_t *>(access.at[l]);
        T data = data_of<T>(w.v + i.data[0], l), second{};
        if constexpr (operands == 2) second = data_of<T>(w.v + i.data[0] + words, l);
        Bits old = 0;
        if (at && (access.swizzled >> l & 1) && words == 2) {
            uint32_t halves[2] = {get<uint32_t>(at), get<uint32_t>(at + scratch_stride(w))};
            std::memcpy(&old, halves, sizeof old);
            Bits wanted = std::bit_cast<Bits>(F{}(std::bit_cast<T>(old), data, second));
            std::memcpy(halves, &wanted, sizeof wanted);
            put(at, halves[0]);
            put(at + scratch_stride(w), halves[1]);
        } else if (at) {
            if (uintptr_t(at) % sizeof(T)) {
                w.fault(Fault::memory, op, uintptr_t(at), "an atomic that is not aligned", true);
                return;
            }
            Bits *place = reinterpret_cast<Bits *>(at);
            old = __atomic_load_n(place, __ATOMIC_RELAXED);
            while (true) {
                Bits wanted = std::bit_cast<Bits>(F{}(std::bit_cast<T>(old), data, second));
                if (__atomic_compare_exchange_n(place, &old, wanted, true, __ATOMIC_SEQ_CST,
                                                __ATOMIC_RELAXED))
                    break;
            }
        }
        if (i.glc) set_data<T>(w.v + i.vdst, l, std::bit_cast<T>(old));
    }
}

// DS. Addresses are byte offsets in the workgroup's LDS: 32-bit sums, so a base may be negative.

inline uint8_t *lds_place(const Wave &w, uint32_t address, unsigned bytes) {
    return uint64_t{address} + bytes <= w.group->lds_bytes ? w.group->lds + address : nullptr;
}

// The lowest and the highest address of the lanes of `mask`.
struct Extent {
    uint32_t low = 0, high = 0;
    Extent(const uint32_t *address, uint64_t mask) {
        if (!mask) return;
        low = high = address[std::countr_zero(mask)];
        if (mask == ~uint64_t{0}) {
            for (unsigned l = 0; l < lanes; ++l) low = address[l] < low ? address[l] : low;
            for (unsigned l = 0; l < lanes; ++l) high = address[l] > high ? address[l] : high;
        } else {
            for (; mask; mask &= mask - 1) {
                uint32_t a = address[std::countr_zero(mask)];
                low = a < low ? a : low;
                high = a > high ? a : high;
            }
        }
    }
    bool within(const Wave &w, uint64_t bytes) const { return high + bytes <= w.group->lds_bytes; }
};

// A word of LDS for each lane of `mask`, each at `base` and its own offset.
inline void gather(uint32_t *result, const uint8_t *base, const uint32_t *offset, uint64_t mask) {
    if (mask == ~uint64_t{0}) {
        for (unsigned l = 0; l < lanes; ++l) result[l] = get<uint32_t>(base + offset[l]);
        return;
    }
    for (; mask; mask &= mask - 1) {
        unsigned l = unsigned(std::countr_zero(mask));
        result[l] = get<uint32_t>(base + offset[l]);
    }
}

// If several lanes have the same place, the last lane's word stays.
inline void scatter(const uint32_t *data, uint8_t *base, const uint32_t *offset, uint64_t mask) {
    for (; mask; mask &= mask - 1) {
        unsigned l = unsigned(std::countr_zero(mask));
        put(base + offset[l], data[l]);
    }
}

// Words whose addresses are all in LDS. The registers that are written may hold the addresses.
template <unsigned words>
inline void gather_words(uint32_t (*d)[lanes], const uint8_t *base, const uint32_t *address, uint64_t mask,
                         const Extent &extent) {
    if (mask == ~uint64_t{0} && extent.low == extent.high) {  // often, all lanes read the same words
        for (unsigned n = 0; n < words; ++n) {
            uint32_t word = get<uint32_t>(base + extent.low + 4 * n);
            for (unsigned l = 0; l < lanes; ++l) d[n][l] = word;
        }
        return;
    }
    alignas(64) uint32_t offset[lanes];
    if (words > 1) {
        std::memcpy(offset, address, sizeof offset);
        address = offset;
    }
    for (unsigned n = 0; n < words; ++n) gather(d[n], base + 4 * n, address, mask);
}

template <Load kind, unsigned words>
void lds_read(Wave &w, const Op &op) {
    constexpr unsigned bytes = words > 1 ? 4 * words : load_bytes(kind);
    if constexpr (kind == Load::word) {
        Extent extent(w.v[op.i.addr], w.exec());
        if (extent.within(w, uint32_t(op.i.offset) + uint64_t{bytes}))
            return gather_words<words>(w.v + op.i.vdst, w.group->lds + op.i.offset, w.v[op.i.addr], w.exec(),
                                       extent);
    }
    const uint32_t *address = w.v[op.i.addr];
    uint32_t (*d)[lanes] = w.v + op.i.vdst;
    for (uint64_t rest = w.exec(); rest; rest &= rest - 1) {
        unsigned l = unsigned(std::countr_zero(rest));
        const uint8_t *at = lds_place(w, address[l] + uint32_t(op.i.offset), bytes);
        if (!at) at = nothing_there;
        for (unsigned n = 0; n < words; ++n) d[n][l] = loaded<kind>(at + 4 * n, d[n][l]);
    }
}

template <Store kind, unsigned words>
void lds_write(Wave &w, const Op &op) {
    constexpr unsigned bytes = kind == Store::word                               ? 4 * words
                               : kind == Store::byte || kind == Store::byte_high ? 1
                                                                                 : 2;
    if constexpr (kind == Store::word && words == 1) {
        Extent extent(w.v[op.i.addr], w.exec());
        if (extent.within(w, uint32_t(op.i.offset) + uint64_t{bytes}))
            return scatter(w.v[op.i.data[0]], w.group->lds + op.i.offset, w.v[op.i.addr], w.exec());
    }
    const uint32_t *address = w.v[op.i.addr];
    const uint32_t (*d)[lanes] = w.v + op.i.data[0];
    for (uint64_t rest = w.exec(); rest; rest &= rest - 1) {
        unsigned l = unsigned(std::countr_zero(rest));
        uint8_t *at = lds_place(w, address[l] + uint32_t(op.i.offset), bytes);
        if (!at) continue;
        for (unsigned n = 0; n < words; ++n) {
            uint32_t value = kind == Store::byte_high || kind == Store::half_high ? d[n][l] >> 16 : d[n][l];
            if constexpr (bytes == 1) *at = uint8_t(value);
            else if constexpr (bytes == 2) put(at, uint16_t(value));
            else put(at + 4 * n, value);
        }
    }
}

// The two addresses of read2, write2 and wrxchg2: each byte of the offset counts elements, or 64 of them.
template <class T, unsigned scale>
inline uint8_t *lds_pair(const Wave &w, const Op &op, unsigned lane, unsigned which) {
    uint32_t offset = uint32_t(op.i.offset >> (8 * which) & 0xFF) * unsigned{sizeof(T)} * scale;
    return lds_place(w, w.v[op.i.addr][lane] + offset, sizeof(T));
}

template <class T, unsigned scale>
void lds_read2(Wave &w, const Op &op) {
    constexpr unsigned words = sizeof(T) / 4;
    const uint32_t offset[2] = {uint32_t(op.i.offset & 0xFF) * unsigned{sizeof(T)} * scale,
                                uint32_t(op.i.offset >> 8 & 0xFF) * unsigned{sizeof(T)} * scale};
    Extent extent(w.v[op.i.addr], w.exec());
    if (extent.within(w, uint64_t{most(offset[0], offset[1])} + sizeof(T))) {
        alignas(64) uint32_t address[lanes];
        std::memcpy(address, w.v[op.i.addr], sizeof address);
        for (unsigned n = 0; n < 2; ++n)
            gather_words<words>(w.v + op.i.vdst + n * words, w.group->lds + offset[n], address, w.exec(),
                                extent);
        return;
    }
    for (uint64_t rest = w.exec(); rest; rest &= rest - 1) {
        unsigned l = unsigned(std::countr_zero(rest));
        T value[2];
        for (unsigned n = 0; n < 2; ++n) {
            const uint8_t *at = lds_pair<T, scale>(w, op, l, n);
            value[n] = at ? get<T>(at) : T{};
        }
        for (unsigned n = 0; n < 2; ++n) set_data<T>(w.v + op.i.vdst + n * sizeof(T) / 4, l, value[n]);
    }
}

template <class T, unsigned scale>
void lds_write2(Wave &w, const Op &op) {
    for (uint64_t rest = w.exec(); rest; rest &= rest - 1) {
        unsigned l = unsigned(std::countr_zero(rest));
        for (unsigned n = 0; n < 2; ++n)
            if (uint8_t *at = lds_pair<T, scale>(w, op, l, n)) put(at, data_of<T>(w.v + op.i.data[n], l));
    }
}

template <class T, unsigned scale>
void lds_exchange2(Wave &w, const Op &op) {
    for (uint64_t rest = w.exec(); rest; rest &= rest - 1) {
        unsigned l = unsigned(std::countr_zero(rest));
        T old[2] = {}, data[2];
        for (unsigned n = 0; n < 2; ++n) data[n] = data_of<T>(w.v + op.i.data[n], l);
        for (unsigned n = 0; n < 2; ++n)
            if (uint8_t *at = lds_pair<T, scale>(w, op, l, n)) {
                old[n] = get<T>(at);
                put(at, data[n]);
            }
        for (unsigned n = 0; n < 2; ++n) set_data<T>(w.v + op.i.vdst + n * sizeof(T) / 4, l, old[n]);
    }
}

// All waves of a workgroup run on one host thread, so an atomic in LDS only needs plain accesses.
template <class F, class T, unsigned operands, bool returns>
void lds_atomic(Wave &w, const Op &op) {
    for (uint64_t rest = w.exec(); rest; rest &= rest - 1) {
        unsigned l = unsigned(std::countr_zero(rest));
        uint8_t *at = lds_place(w, w.v[op.i.addr][l] + uint32_t(op.i.offset), sizeof(T));
        T data = data_of<T>(w.v + op.i.data[0], l), second{};
        if constexpr (operands == 2) second = data_of<T>(w.v + op.i.data[1], l);
        T old{};
        if (at) {
            old = get<T>(at);
            put(at, T(F{}(old, data, second)));
        }
        if constexpr (returns) set_data<T>(w.v + op.i.vdst, l, old);
    }
}

// An LDS atomic whose data is read from a second place in LDS.
template <class F, class T>
void lds_atomic_src2(Wave &w, const Op &op) {
    uint32_t offset = uint32_t(op.i.offset);
    for (uint64_t rest = w.exec(); rest; rest &= rest - 1) {
        unsigned l = unsigned(std::countr_zero(rest));
        uint32_t a = w.v[op.i.addr][l];
        // Bit 15 of the offset chooses between an offset in words and the upper half of the address.
        int32_t words = offset & 0x8000 ? int32_t(a) >> 17 : int32_t(offset << 17) >> 17;
        uint32_t first = offset & 0x8000 ? a & 0x1FFFF : a, second = first + uint32_t(words) * 4;
        uint8_t *to = lds_place(w, first, sizeof(T)), *from = lds_place(w, second, sizeof(T));
        if (!to) continue;
        T data = from ? get<T>(from) : T{};
        put(to, T(F{}(get<T>(to), data, T{})));
    }
}

inline void lds_add_lane(Wave &w, const Op &op, bool read) {
    uint32_t base = uint32_t(op.i.offset) + (w.s[isa::m0] & 0xFFFF);
    for (uint64_t rest = w.exec(); rest; rest &= rest - 1) {
        unsigned l = unsigned(std::countr_zero(rest));
        uint8_t *at = lds_place(w, base + l * 4, 4);
        if (read) w.v[op.i.vdst][l] = at ? get<uint32_t>(at) : 0;
        else if (at) put(at, w.v[op.i.data[0]][l]);
    }
}

// The other lane of ds_permute and ds_bpermute. On GFX10 it is among the same 32 lanes, even in waves of 64.
inline unsigned permuted_lane(const Op &op, unsigned lane, uint32_t address) {
    unsigned other = (address + uint32_t(op.i.offset)) / 4;
    if (op.i.set->family == isa::Family::gfx9) return other % lanes;
    return (lane & 32) + other % 32;
}

inline void ds_permute(Wave &w, const Op &op) {
    uint32_t result[lanes] = {};
    const uint32_t *address = w.v[op.i.addr], *data = w.v[op.i.data[0]];
    for (uint64_t rest = w.exec(); rest; rest &= rest - 1) {
        unsigned l = unsigned(std::countr_zero(rest));
        result[permuted_lane(op, l, address[l])] = data[l];
    }
    merge(w, w.v[op.i.vdst], result, w.exec());
}

inline void ds_backward_permute(Wave &w, const Op &op) {
    uint32_t result[lanes];
    const uint32_t *address = w.v[op.i.addr], *data = w.v[op.i.data[0]];
    uint64_t exec = w.exec();
    for (unsigned l = 0; l < lanes; ++l) {
        unsigned from = permuted_lane(op, l, address[l]);
        result[l] = exec >> from & 1 ? data[from] : 0;
    }
    merge(w, w.v[op.i.vdst], result, exec);
}

inline unsigned swizzle_source(uint32_t offset, unsigned l) {
    if (offset & 0x8000) return (l & ~3u) + (offset >> (2 * (l & 3)) & 3);
    return (l & 32) + ((((l & offset) | offset >> 5) ^ offset >> 10) & 31);
}

inline void ds_swizzle(Wave &w, const Op &op) {
    uint32_t result[lanes];
    const uint32_t *data = w.v[op.i.addr];
    uint64_t exec = w.exec();
    for (unsigned l = 0; l < lanes; ++l) {
        unsigned from = swizzle_source(uint32_t(op.i.offset), l);
        result[l] = exec >> from & 1 ? data[from] : 0;
    }
    merge(w, w.v[op.i.vdst], result, exec);
}

struct MemoryAdder {
    Registry &registry;
    void add(std::string_view name, Handler handler) {
        hipsim::add(registry, {name}, {handler, nullptr, Type::none, {}});
    }

    // F(old, data, second), for the instructions of one name in memory, and of a name and a type in LDS.
    template <class T, unsigned operands = 1, class F>
    void atomics(const char *memory, const char *lds, const char *type, F) {
        Atomic all{memory, lds, type, 8 * sizeof(T), nullptr, nullptr, nullptr};
        if (*memory) all.in_memory = &atomic<F, T, operands>;
        if (*lds) {
            all.in_lds = &lds_atomic<F, T, operands, false>;
            all.returns_from_lds = &lds_atomic<F, T, operands, true>;
            if constexpr (operands == 1) all.src2 = &lds_atomic_src2<F, T>;
        }
        add_atomic(registry, all);
    }
    template <class U, class S, class V>
    void integer_atomics();
    void float_atomics();
};

template <class U, class S, class V>
void MemoryAdder::integer_atomics() {
    atomics<U>("swap", "wrxchg", "b", [](U, U data, U) { return data; });
    atomics<U>("add", "add", "u", [](U old, U data, U) { return old + data; });
    atomics<U>("sub", "sub", "u", [](U old, U data, U) { return old - data; });
    atomics<U>("", "rsub", "u", [](U old, U data, U) { return data - old; });
    atomics<S>("smin", "min", "i", [](S old, S data, S) { return least(old, data); });
    atomics<S>("smax", "max", "i", [](S old, S data, S) { return most(old, data); });
    atomics<U>("umin", "min", "u", [](U old, U data, U) { return least(old, data); });
    atomics<U>("umax", "max", "u", [](U old, U data, U) { return most(old, data); });
    atomics<U>("and", "and", "b", [](U old, U data, U) { return old & data; });
    atomics<U>("or", "or", "b", [](U old, U data, U) { return old | data; });
    atomics<U>("xor", "xor", "b", [](U old, U data, U) { return old ^ data; });
    atomics<U>("inc", "inc", "u", [](U old, U data, U) { return old >= data ? U(0) : old + 1; });
    atomics<U>("dec", "dec", "u", [](U old, U data, U) { return old == 0 || old > data ? data : old - 1; });
    atomics<U, 2>("", "mskor", "b", [](U old, U mask, U data) { return (old & ~mask) | data; });
    // In memory the new value comes first, in LDS the one that is compared.
    atomics<U, 2>("cmpswap", "", "", [](U old, U data, U compared) { return old == compared ? data : old; });
    atomics<U, 2>("", "cmpst", "b", [](U old, U compared, U data) { return old == compared ? data : old; });
    atomics<V, 2>("", "cmpst", "f", [](V old, V compared, V data) { return old == compared ? data : old; });
    atomics<V>("", "min", "f", [](V old, V data, V) { return minimum(old, data, true); });
    atomics<V>("", "max", "f", [](V old, V data, V) { return maximum(old, data, true); });
}

// The cache that executes them flushes denormals in single precision, but not those of halves and doubles.
inline void MemoryAdder::float_atomics() {
    auto add_f32 = [](float old, float data, float) { return flush(flush(old) + flush(data)); };
    auto add_f16 = [](uint32_t old, uint32_t data, uint32_t) {
        uint32_t low = double_to_half(widen(old & 0xFFFF) + widen(data & 0xFFFF));
        return low | uint32_t(double_to_half(widen(old >> 16) + widen(data >> 16))) << 16;
    };
    auto add_f64 = [](double old, double data, double) { return old + data; };
    auto min_f64 = [](double old, double data, double) { return minimum(old, data, true); };
    auto max_f64 = [](double old, double data, double) { return maximum(old, data, true); };
    add("global_atomic_add_f32", &atomic<decltype(add_f32), float, 1>);
    add("buffer_atomic_add_f32", &atomic<decltype(add_f32), float, 1>);
    add("global_atomic_pk_add_f16", &atomic<decltype(add_f16), uint32_t, 1>);
    add("buffer_atomic_pk_add_f16", &atomic<decltype(add_f16), uint32_t, 1>);
    for (std::string_view prefix : {"flat_atomic_", "global_atomic_", "buffer_atomic_"}) {
        hipsim::add(registry, {prefix, "add_f64"}, {&atomic<decltype(add_f64), double, 1>});
        hipsim::add(registry, {prefix, "min_f64"}, {&atomic<decltype(min_f64), double, 1>});
        hipsim::add(registry, {prefix, "max_f64"}, {&atomic<decltype(max_f64), double, 1>});
    }
    add("ds_add_f64", &lds_atomic<decltype(add_f64), double, 1, false>);
    add("ds_add_rtn_f64", &lds_atomic<decltype(add_f64), double, 1, true>);
}

inline void add_memory(Registry &registry) {
    MemoryAdder a{registry};
    struct {
        const char *memory, *lds;
        Handler in_memory, in_lds;
    } const loads[] = {
        {"load_ubyte", "read_u8", load<Load::u8, 1>, lds_read<Load::u8, 1>},
        {"load_sbyte", "read_i8", load<Load::s8, 1>, lds_read<Load::s8, 1>},
        {"load_ushort", "read_u16", load<Load::u16, 1>, lds_read<Load::u16, 1>},
        {"load_sshort", "read_i16", load<Load::s16, 1>, lds_read<Load::s16, 1>},
        {"load_dword", "read_b32", load<Load::word, 1>, lds_read<Load::word, 1>},
        {"load_dwordx2", "read_b64", load<Load::word, 2>, lds_read<Load::word, 2>},
        {"load_dwordx3", "read_b96", load<Load::word, 3>, lds_read<Load::word, 3>},
        {"load_dwordx4", "read_b128", load<Load::word, 4>, lds_read<Load::word, 4>},
        {"load_ubyte_d16", "read_u8_d16", load<Load::u8_low, 1>, lds_read<Load::u8_low, 1>},
        {"load_ubyte_d16_hi", "read_u8_d16_hi", load<Load::u8_high, 1>, lds_read<Load::u8_high, 1>},
        {"load_sbyte_d16", "read_i8_d16", load<Load::s8_low, 1>, lds_read<Load::s8_low, 1>},
        {"load_sbyte_d16_hi", "read_i8_d16_hi", load<Load::s8_high, 1>, lds_read<Load::s8_high, 1>},
        {"load_short_d16", "read_u16_d16", load<Load::u16_low, 1>, lds_read<Load::u16_low, 1>},
        {"load_short_d16_hi", "read_u16_d16_hi", load<Load::u16_high, 1>, lds_read<Load::u16_high, 1>},
        {"store_byte", "write_b8", store<Store::byte, 1>, lds_write<Store::byte, 1>},
        {"store_byte_d16_hi", "write_b8_d16_hi", store<Store::byte_high, 1>, lds_write<Store::byte_high, 1>},
        {"store_short", "write_b16", store<Store::half, 1>, lds_write<Store::half, 1>},
        {"store_short_d16_hi", "write_b16_d16_hi", store<Store::half_high, 1>,
         lds_write<Store::half_high, 1>},
        {"store_dword", "write_b32", store<Store::word, 1>, lds_write<Store::word, 1>},
        {"store_dwordx2", "write_b64", store<Store::word, 2>, lds_write<Store::word, 2>},
        {"store_dwordx3", "write_b96", store<Store::word, 3>, lds_write<Store::word, 3>},
        {"store_dwordx4", "write_b128", store<Store::word, 4>, lds_write<Store::word, 4>},
    };
    for (auto [memory, lds, in_memory, in_lds] : loads) {
        add_everywhere(registry, memory, in_memory);
        add(registry, {"ds_", lds}, {in_lds});
    }
    a.add("ds_read2_b32", lds_read2<uint32_t, 1>);
    a.add("ds_read2st64_b32", lds_read2<uint32_t, 64>);
    a.add("ds_read2_b64", lds_read2<uint64_t, 1>);
    a.add("ds_read2st64_b64", lds_read2<uint64_t, 64>);
    a.add("ds_write2_b32", lds_write2<uint32_t, 1>);
    a.add("ds_write2st64_b32", lds_write2<uint32_t, 64>);
    a.add("ds_write2_b64", lds_write2<uint64_t, 1>);
    a.add("ds_write2st64_b64", lds_write2<uint64_t, 64>);
    a.add("ds_wrxchg2_rtn_b32", lds_exchange2<uint32_t, 1>);
    a.add("ds_wrxchg2st64_rtn_b32", lds_exchange2<uint32_t, 64>);
    a.add("ds_wrxchg2_rtn_b64", lds_exchange2<uint64_t, 1>);
    a.add("ds_wrxchg2st64_rtn_b64", lds_exchange2<uint64_t, 64>);

    a.integer_atomics<uint32_t, int32_t, float>();
    a.integer_atomics<uint64_t, int64_t, double>();
    a.float_atomics();
    a.atomics<float>("", "add", "f", [](float old, float data, float) { return old + data; });
    a.atomics<uint32_t, 2>("", "wrap", "b", [](uint32_t old, uint32_t data, uint32_t second) {
        return old >= data ? old - data : old + second;
    });
    a.add("ds_write_src2_b32",
          lds_atomic_src2<decltype([](uint32_t, uint32_t d, uint32_t) { return d; }), uint32_t>);
    a.add("ds_write_src2_b64",
          lds_atomic_src2<decltype([](uint64_t, uint64_t d, uint64_t) { return d; }), uint64_t>);
    // A word is stored if its highest bit is set; that bit is not stored.
    a.add("ds_condxchg32_rtn_b64", [](Wave &w, const Op &op) {
        for (uint64_t rest = w.exec(); rest; rest &= rest - 1) {
            unsigned l = unsigned(std::countr_zero(rest));
            uint8_t *at = lds_place(w, uint64_t{w.v[op.i.addr][l] & ~7u} + uint32_t(op.i.offset & ~7), 8);
            uint32_t data[2] = {w.v[op.i.data[0]][l], w.v[op.i.data[0] + 1][l]};
            for (unsigned n = 0; n < 2; ++n) {
                w.v[op.i.vdst + n][l] = at ? get<uint32_t>(at + 4 * n) : 0;
                if (at && data[n] >> 31) put(at + 4 * n, data[n] & 0x7FFFFFFF);
            }
        }
    });
    a.add("ds_write_addtid_b32", [](Wave &w, const Op &op) { lds_add_lane(w, op, false); });
    a.add("ds_read_addtid_b32", [](Wave &w, const Op &op) { lds_add_lane(w, op, true); });
    a.add("ds_permute_b32", ds_permute);
    a.add("ds_bpermute_b32", ds_backward_permute);
    a.add("ds_swizzle_b32", ds_swizzle);
    for (const char *name : {"ds_nop", "buffer_wbinvl1", "buffer_wbinvl1_vol", "buffer_wbl2", "buffer_invl2"})
        a.add(name, nothing);
}

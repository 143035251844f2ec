// Bulk tensor copies (PTX ISA 9.7.9.25.5): boxes of a tensor in global memory, to and from shared memory. Tiled mode,
// im2col mode, and the modes of four rows.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "engine/internal.h"
#include "engine/tensor_map.h"

namespace cudasim {
namespace {

// GCC 12 has no _Float16 in C++ for aarch64.
#ifdef __ARM_FP16_FORMAT_IEEE
using Half = __fp16;
#else
using Half = _Float16;
#endif

constexpr uint32_t kMapBytes = 128, kPart = 64;  // of a tensor map, and its alignment

union MapBytes {
    uint8_t bytes[kMapBytes];
    TensorMap map;
};

MapBytes read_map(cs_warp *w, uint64_t address) {
    MapBytes read{};
    for (uint32_t at = 0; at < kMapBytes; at += kPart)
        memcpy(read.bytes + at, resolve(w, address + at, kPart, 'r'), kPart);
    return read;
}

// Returns whether a copy can use a map. The driver makes only maps that are valid, but a kernel may have changed its bytes.
bool is_valid(const TensorMap &map, const cs_tensor_copy &copy) {
    const uint32_t rank = copy.rank;
    if (map.magic != TensorMap::kMagic || map.rank != rank) return false;
    if ((map.im2col != 0) != (copy.mode == CS_TENSOR_IM2COL)) return false;
    if (map.im2col && (rank < 3 || rank > TensorMap::kMostDimensions)) return false;
    if (copy.mode == CS_TENSOR_ROWS && (rank != 2 || map.box[1] != 1)) return false;
    for (uint32_t d = 0; d < rank; d++) {
        const uint32_t most = map.im2col && d == 1 ? TensorMap::kMostPixels : TensorMap::kMostElements;
        if (map.box[d] == 0 || map.box[d] > most || map.steps[d] == 0 || map.steps[d] > 8) return false;
        if (d > 0 && (map.strides[d] % 16 != 0 || map.strides[d] >= uint64_t{1} << 40)) return false;
    }
    const uint32_t row = map.box[0] * bytes_of(map.type);
    const bool swizzles =
        map.swizzle == 7 || (map.atom == Atom::bytes16 && (map.swizzle == 1 || map.swizzle == 3));
    return map.base % 16 == 0 && row % 16 == 0 &&
           (swizzles ? row == 16 * (uint32_t{map.swizzle} + 1)
                     : map.swizzle == 0 && map.atom == Atom::bytes16);
}

// Returns what a map has that copies do not support; nullptr if there is nothing.
const char *unsupported(const TensorMap &map) {
    if (map.magic != TensorMap::kMagic) return nullptr;
    if (map.type > ElementType::bf16)
        return "the embedded device does not copy tensors of .tf32 or of packed types";
    if (map.interleave != 0) return "the embedded device does not copy tensors with an interleaved layout";
    if (map.atom == Atom::bytes32_flip8)
        return "the embedded device does not support swizzles that flip 8 bytes";
    return nullptr;
}

double real(ElementType type, uint64_t bits) {
    switch (type) {
        case ElementType::f16: {
            Half value;
            memcpy(&value, &bits, sizeof value);
            return static_cast<double>(value);
        }
        case ElementType::bf16: bits <<= 16; [[fallthrough]];
        case ElementType::f32:
        case ElementType::f32_ftz: {
            float value;
            memcpy(&value, &bits, sizeof value);
            return static_cast<double>(value);
        }
        default: {
            double value;
            memcpy(&value, &bits, sizeof value);
            return value;
        }
    }
}

// Rounds to nearest even. A sum of two numbers of at most 24 bits is rounded twice then, with the same result (Figueroa, 1995).
uint64_t bits_of(ElementType type, double value) {
    uint64_t bits = 0;
    if (type == ElementType::f64) {
        memcpy(&bits, &value, sizeof value);
    } else if (type == ElementType::f16) {
        const auto narrow = static_cast<Half>(value);
        memcpy(&bits, &narrow, sizeof narrow);
        if (std::isnan(value)) bits = 0x7fff;
    } else {
        const auto narrow = static_cast<float>(value);
        memcpy(&bits, &narrow, sizeof narrow);
        if (std::isnan(value)) bits = 0x7fffffff;
        if (type == ElementType::bf16) {
            if (!std::isnan(value)) bits += 0x7fff + (bits >> 16 & 1);
            bits >>= 16;
        }
    }
    return bits;
}

template <typename T>
T whole(uint32_t operation, T old, T value) {
    switch (operation) {
        case CS_TENSOR_ADD: return static_cast<T>(static_cast<uint64_t>(old) + static_cast<uint64_t>(value));
        case CS_TENSOR_MIN: return old < value ? old : value;
        case CS_TENSOR_MAX: return old > value ? old : value;
        case CS_TENSOR_INC: return old >= value ? 0 : static_cast<T>(old + 1);
        case CS_TENSOR_DEC: return old == 0 || old > value ? value : static_cast<T>(old - 1);
        case CS_TENSOR_AND: return old & value;
        case CS_TENSOR_OR: return old | value;
        default: return old ^ value;
    }
}

// Returns the new bits of an element that is reduced.
uint64_t reduced(ElementType type, uint32_t operation, uint64_t old, uint64_t value) {
    switch (type) {
        case ElementType::u32:
            return whole(operation, static_cast<uint32_t>(old), static_cast<uint32_t>(value));
        case ElementType::s32:
            return static_cast<uint32_t>(
                whole(operation, static_cast<int32_t>(old), static_cast<int32_t>(value)));
        case ElementType::u64: return whole(operation, old, value);
        case ElementType::s64:
            return static_cast<uint64_t>(
                whole(operation, static_cast<int64_t>(old), static_cast<int64_t>(value)));
        default: break;
    }
    const double a = real(type, old), b = real(type, value);
    if (operation == CS_TENSOR_ADD) return bits_of(type, a + b);
    if (std::isnan(a) || (std::isnan(b) ? false : operation == CS_TENSOR_MIN ? b < a : b > a)) return value;
    if (a == b) return std::signbit(a) == (operation == CS_TENSOR_MIN) ? old : value;  // -0 is less than +0
    return old;
}

// Returns whether PTX has the reduction for this type.
bool can_reduce(ElementType type, uint32_t operation) {
    const bool bitwise = operation >= CS_TENSOR_AND,
               wraps = operation == CS_TENSOR_INC || operation == CS_TENSOR_DEC;
    switch (type) {
        case ElementType::u8:
        case ElementType::u16:
        case ElementType::f32_ftz: return false;
        case ElementType::u32: return true;
        case ElementType::s32:
        case ElementType::u64:
        case ElementType::s64: return !wraps;
        case ElementType::f16:
        case ElementType::bf16: return !bitwise && !wraps;
        default: return operation == CS_TENSOR_ADD;
    }
}

template <typename T>
void reduce(ElementType type, uint32_t operation, void *at, T value) {
    auto *const target = static_cast<T *>(at);
    T old = __atomic_load_n(target, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(target, &old, static_cast<T>(reduced(type, operation, old, value)),
                                        false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
    }
}

void fill(const TensorMap &map, uint8_t *to, uint32_t size) {
    memset(to, 0, size);
    if (map.not_a_number)
        for (uint32_t at = 0; at < size; at++) to[at] = static_cast<uint8_t>(CS_OOB_NAN >> at % 2 * 8);
}

// The rows of a box in their order in shared memory. A row's elements are neighbours in the tensor's first dimension.
class Rows {
  public:
    Rows(const TensorMap &map, const cs_tensor_copy &copy) : map_(map), copy_(copy) {
        for (uint32_t d = 0; d < map.rank; d++) at_[d] = copy.at[d];
    }

    uint64_t count() const {
        if (copy_.mode == CS_TENSOR_ROWS) return 4;
        if (copy_.mode == CS_TENSOR_IM2COL) return map_.box[1];
        uint64_t found = 1;  // at most 256 in each dimension
        for (uint32_t d = 1; d < map_.rank && found <= kMostShared; d++) found *= map_.count(d);
        return found;
    }

    // Returns a coordinate of the row's first element.
    int64_t at(uint32_t d) const {
        const bool moved = copy_.mode == CS_TENSOR_IM2COL && d > 0 && d + 1 < map_.rank;
        return at_[d] + (moved ? copy_.offset[d - 1] : 0);
    }

    void next() {
        row_++;
        if (copy_.mode == CS_TENSOR_ROWS) {
            at_[1] = row_ < 4 ? copy_.at[1 + row_] : 0;
            return;
        }
        for (uint32_t d = 1; d < map_.rank; d++) {
            at_[d] += map_.step(d);
            if (copy_.mode == CS_TENSOR_TILE) {
                if (++place_[d] < map_.count(d)) return;
                place_[d] = 0;
                at_[d] = copy_.at[d];
            } else {
                if (d + 1 == map_.rank || at_[d] <= int64_t{map_.last[d]} + map_.upper[d - 1]) return;
                at_[d] = map_.lower[d - 1];
            }
        }
    }

  private:
    static constexpr uint32_t kMostShared = 1u << CS_RANK_SHIFT;
    const TensorMap &map_;
    const cs_tensor_copy &copy_;
    uint32_t row_ = 0, place_[TensorMap::kMostDimensions] = {};
    int64_t at_[TensorMap::kMostDimensions] = {};
};

void load(ElementType type, uint8_t *to, const uint8_t *from, uint32_t size) {
    memcpy(to, from, size);
    if (type == ElementType::f32_ftz && (to[3] & 0x7f) == 0 && (to[2] & 0x80) == 0) {  // the exponent is 0
        to[3] &= 0x80;
        memset(to, 0, 3);
    }
}

}  // namespace

// Changes a field of a map. One whose bytes are all 0 becomes a map: kernels make maps so.
void change_map(cs_warp *w, const cs_map_change *change) {
    MapBytes read = read_map(w, change->map);
    const bool empty =
        std::all_of(std::begin(read.bytes), std::end(read.bytes), [](uint8_t b) { return b == 0; });
    if (empty) read.map = TensorMap();
    if (read.map.magic != TensorMap::kMagic)
        raise_fault(w, CS_FAULT_ILLEGAL_INSTRUCTION, change->map, kMapBytes, 'r', "this is not a tensor map");
    TensorMap &map = read.map;
    const uint32_t d = change->dimension;
    const auto value = static_cast<uint32_t>(change->value);
    switch (change->field) {
        case CS_MAP_GLOBAL_ADDRESS: map.base = change->value; break;
        case CS_MAP_RANK: map.rank = static_cast<uint8_t>(std::min(value, 254u) + 1); break;
        case CS_MAP_BOX_DIM: map.box[d] = static_cast<uint16_t>(std::min(value, 65535u)); break;
        case CS_MAP_GLOBAL_DIM: map.last[d] = value - 1; break;
        case CS_MAP_GLOBAL_STRIDE: map.strides[d + 1] = change->value; break;
        case CS_MAP_ELEMENT_STRIDE: map.steps[d] = static_cast<uint8_t>(std::min(value, 255u)); break;
        case CS_MAP_ELEMTYPE: map.type = static_cast<ElementType>(value); break;
        case CS_MAP_SWIZZLE_MODE: map.swizzle = static_cast<uint8_t>((1u << value) - 1); break;
        case CS_MAP_SWIZZLE_ATOMICITY: map.atom = static_cast<Atom>(value); break;
        case CS_MAP_INTERLEAVE_LAYOUT: map.interleave = static_cast<uint8_t>(value); break;
        default: map.not_a_number = value != 0;
    }
    for (uint32_t at = 0; at < kMapBytes; at += kPart)
        memcpy(resolve(w, change->map + at, kPart, 'w'), read.bytes + at, kPart);
}

// Copies one box. Parts of it outside the tensor are filled in shared memory, and are not written to the tensor. Returns its bytes.
uint32_t tensor_copy(cs_warp *w, const cs_tensor_copy *copy) {
    constexpr uint32_t kSharedAlignment = 128;
    const TensorMap map = read_map(w, copy->map).map;
    const bool loads = copy->operation == CS_TENSOR_LOAD;
    if (const char *why = unsupported(map))
        raise_fault(w, CS_FAULT_ILLEGAL_INSTRUCTION, copy->map, kMapBytes, 'r', why);
    const bool known =
        is_valid(map, *copy) && (copy->operation <= CS_TENSOR_STORE || can_reduce(map.type, copy->operation));
    if (!known)
        raise_fault(w, CS_FAULT_ILLEGAL_INSTRUCTION, copy->map, kMapBytes, 'r',
                    "the tensor map does not fit this copy");
    const uint32_t size = bytes_of(map.type), row = map.box[0];
    Rows rows(map, *copy);
    const uint64_t count = row * rows.count();
    const auto bytes = static_cast<uint32_t>(count * size);
    if (count * size > w->total_shared)
        raise_fault(w, CS_FAULT_ILLEGAL_ADDRESS, w->shared_window + copy->shared, bytes, 'w', nullptr);
    uint8_t *const box = shared_memory(w, copy->shared, bytes, loads ? 'w' : 'r');
    if (copy->shared % kSharedAlignment || !box)
        raise_fault(w, copy->shared % kSharedAlignment ? CS_FAULT_MISALIGNED : CS_FAULT_ILLEGAL_ADDRESS,
                    w->shared_window + copy->shared, bytes, loads ? 'w' : 'r', nullptr);
    for (uint32_t k = 0; k < count; k++) {
        bool inside = true;
        uint64_t address = map.base;
        for (uint32_t d = 0; d < map.rank; d++) {
            const int64_t at = rows.at(d) + (d == 0 ? k % row : 0);
            inside = inside && at >= 0 && at <= int64_t{map.last[d]};
            address += static_cast<uint64_t>(at) * (d == 0 ? size : map.strides[d]);
        }
        const uint64_t offset = map.swizzled(copy->shared + uint64_t{k} * size);
        uint8_t *const here = box + (static_cast<int64_t>(offset) - static_cast<int64_t>(copy->shared));
        if (!inside) {
            if (loads) fill(map, here, size);
        } else if (loads) {
            load(map.type, here, static_cast<const uint8_t *>(resolve(w, address, size, 'r')), size);
        } else if (copy->operation == CS_TENSOR_STORE) {
            memcpy(resolve(w, address, size, 'w'), here, size);
        } else {
            void *const there = resolve(w, address, size, 'a');
            uint64_t value = 0;
            memcpy(&value, here, size);
            if (size == 8) reduce<uint64_t>(map.type, copy->operation, there, value);
            else if (size == 4)
                reduce<uint32_t>(map.type, copy->operation, there, static_cast<uint32_t>(value));
            else reduce<uint16_t>(map.type, copy->operation, there, static_cast<uint16_t>(value));
        }
        if (k % row == row - 1) rows.next();
    }
    return bytes;
}

}  // namespace cudasim

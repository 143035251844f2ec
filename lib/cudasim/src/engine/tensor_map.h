// What a tensor map (CUtensorMap) holds on this device. Programs copy its 128 bytes, so it points to nothing of ours.
#pragma once

#include <cstdint>

namespace cudasim {

// As PTX numbers them. Copies of the later types (.tf32, packed types) are not supported.
enum class ElementType : uint8_t { u8, u16, u32, s32, u64, s64, f16, f32, f32_ftz, f64, bf16 };
// What a swizzle moves as a whole, as PTX numbers it. Copies that flip bytes are not supported.
enum class Atom : uint8_t { bytes16, bytes32, bytes32_flip8, bytes64 };

struct TensorMap {
    static constexpr uint64_t kMagic = 0x50414d5f53434355;
    static constexpr uint32_t kMostDimensions = 5;
    static constexpr uint32_t kMostElements = 256,
                              kMostPixels = 1024;  // of a box, in a dimension; of an im2col box

    uint64_t magic = kMagic;
    uint64_t base = 0;
    uint64_t strides[kMostDimensions] = {};  // in bytes, but for the first, which is an element's size
    uint32_t last[kMostDimensions] = {};     // the highest coordinate inside the tensor
    uint16_t box[kMostDimensions] = {};      // in elements of the tensor; im2col: channels and pixels
    uint8_t steps[kMostDimensions] = {};     // from one element that is copied to the next; not of the first
    uint8_t rank = 0;
    ElementType type = ElementType::u8;
    uint8_t swizzle = 0;        // mask: these bits of bytes 128 and up are added to those of bytes 16 and up
    Atom atom = Atom::bytes16;  // larger atoms: only with a swizzle of 128 bytes
    uint8_t interleave = 0;     // as PTX numbers the layouts. Copies support 0, the neighbours of a row
    bool not_a_number = false;  // fills what is outside the tensor, else zero
    // Im2col: pixels are from `lower` to the last coordinate + `upper`, in each dimension between the first and the last.
    uint8_t im2col = 0;  // 1: a map for copies in im2col mode
    int16_t lower[kMostDimensions - 2] = {}, upper[kMostDimensions - 2] = {};

    // From one element in shared memory to the next, in elements of the tensor.
    uint32_t step(uint32_t d) const { return d == 0 ? 1 : steps[d]; }
    // Where the swizzle puts a byte of shared memory.
    uint64_t swizzled(uint64_t offset) const {
        const int more = atom == Atom::bytes16 ? 0 : atom == Atom::bytes64 ? 2 : 1;
        return offset ^ (offset >> 7 & swizzle >> more) << (4 + more);
    }
    // Elements of the box in shared memory.
    uint32_t count(uint32_t d) const { return (box[d] + step(d) - 1) / step(d); }
};
static_assert(sizeof(TensorMap) <= 128);

inline uint32_t bytes_of(ElementType type) {
    switch (type) {
        case ElementType::u8: return 1;
        case ElementType::u16:
        case ElementType::f16:
        case ElementType::bf16: return 2;
        case ElementType::u64:
        case ElementType::s64:
        case ElementType::f64: return 8;
        default: return 4;
    }
}

}  // namespace cudasim

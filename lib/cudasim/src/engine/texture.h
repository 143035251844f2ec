// Textures and surfaces, as the driver describes them to the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cudasim {

enum class TexelType : uint8_t { u8, u16, u32, s8, s16, s32, f16, f32 };
enum class AddressMode : uint8_t { wrap, clamp, mirror, border };  // numbers of CUaddress_mode

inline uint32_t bytes_of(TexelType type) {
    switch (type) {
        case TexelType::u8:
        case TexelType::s8: return 1;
        case TexelType::u16:
        case TexelType::s16:
        case TexelType::f16: return 2;
        default: return 4;
    }
}

struct TextureLevel {  // one level of a mipmapped array, or the only one
    uint64_t base = 0;
    uint32_t width = 1, height = 1, depth = 1;  // texels; the depth of a layered texture counts its layers
    uint64_t pitch = 0, slice = 0;              // bytes between rows, and between slices or layers
};

struct Texture {
    bool surface = false;
    bool linear = false;  // linear memory: fetches outside of it return 0
    TexelType type = TexelType::f32;
    uint32_t channels = 1;
    bool layered = false, cube = false;  // the six faces of a cubemap are layers
    std::vector<TextureLevel> levels;
    // the rest is for textures only
    AddressMode address[3] = {};
    bool normalized = false;                     // coordinates go from 0 to 1
    bool filter = false, filter_levels = false;  // linear, between texels and between levels
    bool as_float = false;                       // integers are read as fractions of their maximum
    bool srgb = false;
    float bias = 0, lowest_level = 0, highest_level = 0;  // of the level of detail
    float border[4] = {};

    uint32_t texel_bytes() const { return bytes_of(type) * channels; }
};

}  // namespace cudasim

// Texture fetches and surface accesses (PTX ISA 9.7.10, 9.7.11; CUDA programming guide, "Texture Fetching").
//
// A coordinate of a linear filter is rounded to 1/256 of a texel, to nearest. So a weight has 8 bits of fraction, as on a
// GPU. The weighted sum is computed in double and rounded once; the guide does not say how a GPU rounds it.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "engine/internal.h"

namespace cudasim {

namespace {

constexpr int64_t kOutside = -1;
constexpr double kFarthest = 1099511627776.0;  // in texels; larger coordinates count as this one

const Texture &find(cs_warp *w, uint64_t handle, bool surface) {
    const Environment &environment = *static_cast<const Block *>(w->block)->job->launch->environment;
    const Texture *found =
        environment.texture != nullptr ? environment.texture(environment.self, handle) : nullptr;
    if (found == nullptr || found->surface != surface)
        raise_fault(w, CS_FAULT_LAUNCH_FAILED, 0, 0, 0,
                    surface ? "surface access with a handle that is not a surface object"
                            : "texture fetch with a handle that is not a texture object");
    return *found;
}

float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, exponent = half >> 10 & 31;
    const uint32_t fraction = half & 1023;
    if (exponent == 31) return as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent != 0) return as_float(sign | (exponent + 112) << 23 | fraction << 13);
    const float small = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -small : small;
}

uint16_t float_to_half(float value) {  // rounds to nearest even
    const uint32_t bits = as_bits(value), sign = bits >> 16 & 0x8000;
    const double size = std::fabs(static_cast<double>(value));
    if (std::isnan(value)) return 0x7fff;
    if (size >= 65520) return static_cast<uint16_t>(sign | 0x7c00);
    int exponent = std::max(static_cast<int>(bits >> 23 & 255) - 127, -14);
    const auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, 10 - exponent)));
    return static_cast<uint16_t>(sign | ((static_cast<uint32_t>(exponent + 14) << 10) + steps));
}

bool returns_floats(const Texture &texture) {
    return texture.as_float || texture.type == TexelType::f16 || texture.type == TexelType::f32;
}

template <class T>
T element(const uint8_t *texel, uint32_t channel) {
    T value;
    memcpy(&value, texel + channel * sizeof(T), sizeof value);
    return value;
}

// Returns a channel as 32 bits: integers extended, floats as they are.
uint32_t channel_bits(TexelType type, const uint8_t *texel, uint32_t channel) {
    switch (type) {
        case TexelType::u8: return element<uint8_t>(texel, channel);
        case TexelType::u16: return element<uint16_t>(texel, channel);
        case TexelType::s8: return static_cast<uint32_t>(element<int8_t>(texel, channel));
        case TexelType::s16: return static_cast<uint32_t>(element<int16_t>(texel, channel));
        case TexelType::f16: return as_bits(half_to_float(element<uint16_t>(texel, channel)));
        default: return element<uint32_t>(texel, channel);
    }
}

// Returns the value of a channel of a texture that returns floats.
double channel_value(const Texture &texture, uint32_t bits, uint32_t channel) {
    const auto number = static_cast<int32_t>(bits);
    switch (texture.type) {
        case TexelType::u8: {
            const double value = number / 255.0;
            if (!texture.srgb || channel == 3) return value;
            return value <= 0.04045 ? value / 12.92 : std::pow((value + 0.055) / 1.055, 2.4);
        }
        case TexelType::u16: return number / 65535.0;
        case TexelType::s8: return std::max(number / 127.0, -1.0);
        case TexelType::s16: return std::max(number / 32767.0, -1.0);
        default: return as_float(bits);
    }
}

struct Texel {  // both forms of a result
    uint32_t bits[4];
    double values[4];
};

// Applies an address mode to the number of a texel. Wrap and mirror need normalized coordinates; otherwise they clamp.
int64_t addressed(const Texture &texture, int dimension, int64_t i, int64_t count, bool clamp) {
    AddressMode mode = texture.address[dimension];
    if (clamp || (!texture.normalized && mode != AddressMode::border)) mode = AddressMode::clamp;
    if (static_cast<uint64_t>(i) < static_cast<uint64_t>(count)) return i;
    switch (mode) {
        case AddressMode::clamp: return i < 0 ? 0 : count - 1;
        case AddressMode::wrap: return (i % count + count) % count;
        case AddressMode::mirror: {
            const int64_t both = (i % (2 * count) + 2 * count) % (2 * count);
            return both < count ? both : 2 * count - 1 - both;
        }
        default: return kOutside;
    }
}

// What one fetch reads: a level, the first slice of its layer, and how to treat each dimension.
struct Sampler {
    const Texture &texture;
    const TextureLevel &level;
    int dimensions;
    int64_t layer;  // slice of a layered texture or cubemap
    bool clamp;     // whatever the address modes are

    Texel read(const int64_t at[3]) const {
        Texel texel{};
        const int64_t counts[3] = {level.width, level.height, level.depth};
        int64_t place[3] = {0, 0, layer};
        for (int d = 0; d < dimensions; d++) {
            if (texture.linear && static_cast<uint64_t>(at[d]) >= static_cast<uint64_t>(counts[d]))
                return texel;
            place[d] = addressed(texture, d, at[d], counts[d], clamp);
            if (place[d] == kOutside) {
                for (uint32_t c = 0; c < 4; c++) {
                    texel.values[c] = texture.border[c];
                    texel.bits[c] = returns_floats(texture) ? as_bits(texture.border[c]) : 0;
                }
                return texel;
            }
        }
        const auto *data =
            reinterpret_cast<const uint8_t *>(level.base + static_cast<uint64_t>(place[2]) * level.slice +
                                              static_cast<uint64_t>(place[1]) * level.pitch +
                                              static_cast<uint64_t>(place[0]) * texture.texel_bytes());
        const bool floats = returns_floats(texture);
        texel.bits[3] = floats ? as_bits(1) : 1;  // a texture without alpha
        texel.values[3] = 1;
        for (uint32_t c = 0; c < texture.channels; c++) {
            texel.bits[c] = channel_bits(texture.type, data, c);
            if (floats) texel.values[c] = channel_value(texture, texel.bits[c], c);
            if (texture.as_float) texel.bits[c] = as_bits(static_cast<float>(texel.values[c]));
        }
        return texel;
    }

    // Returns a coordinate in texels. It is exact: a float times a size fits a double.
    double in_texels(double coordinate, int dimension, bool scaled) const {
        const uint32_t counts[3] = {level.width, level.height, level.depth};
        if (scaled) coordinate *= counts[dimension];
        return coordinate != coordinate ? 0 : std::clamp(coordinate, -kFarthest, kFarthest);
    }

    Texel nearest(const double at[3], const int32_t offset[3]) const {
        int64_t place[3] = {};
        for (int d = 0; d < dimensions; d++) place[d] = static_cast<int64_t>(std::floor(at[d])) + offset[d];
        return read(place);
    }

    // Finds the first texel of a linear filter, and the weight of the second in 1/256.
    static int64_t first(double at, uint32_t &weight) {
        const int64_t fixed = static_cast<int64_t>(std::floor(at * 256 + 0.5)) - 128;
        weight = static_cast<uint32_t>(fixed & 255);
        return fixed >> 8;
    }

    Texel filtered(const double at[3], const int32_t offset[3]) const {
        int64_t begin[3] = {};
        uint32_t weights[3] = {};
        for (int d = 0; d < dimensions; d++) begin[d] = first(at[d], weights[d]) + offset[d];
        Texel sum{};
        for (int corner = 0; corner < 1 << dimensions; corner++) {
            int64_t place[3] = {};
            double weight = 1;
            for (int d = 0; d < dimensions; d++) {
                const bool second = (corner >> d & 1) != 0;
                place[d] = begin[d] + second;
                weight *= (second ? weights[d] : 256 - weights[d]) / 256.0;
            }
            if (weight == 0) continue;  // infinity must not become NaN
            const Texel texel = read(place);
            for (int c = 0; c < 4; c++) sum.values[c] += weight * texel.values[c];
        }
        for (int c = 0; c < 4; c++) sum.bits[c] = as_bits(static_cast<float>(sum.values[c]));
        return sum;
    }

    // Returns one component of the four texels that a linear filter would read, counter-clockwise from the lower left.
    Texel gathered(const double at[3], const int32_t offset[3], uint32_t component) const {
        uint32_t weight;
        const int64_t x = first(at[0], weight) + offset[0], y = first(at[1], weight) + offset[1];
        const int64_t places[4][3] = {{x, y + 1, 0}, {x + 1, y + 1, 0}, {x + 1, y, 0}, {x, y, 0}};
        Texel result{};
        for (int k = 0; k < 4; k++) result.bits[k] = read(places[k]).bits[component];
        return result;
    }
};

// Finds the face of a direction, and its place on the face from 0 to 1 (CUDA programming guide, "Cubemap Textures").
int64_t cube_face(const float direction[3], double &s, double &t) {
    const double x = direction[0], y = direction[1], z = direction[2];
    const double ax = std::fabs(x), ay = std::fabs(y), az = std::fabs(z);
    int64_t face;
    double m;
    if (ax >= ay && ax >= az) {
        face = x < 0 ? 1 : 0;
        m = ax;
        s = x < 0 ? z : -z;
        t = -y;
    } else if (ay >= az) {
        face = y < 0 ? 3 : 2;
        m = ay;
        s = x;
        t = y < 0 ? -z : z;
    } else {
        face = z < 0 ? 5 : 4;
        m = az;
        s = z < 0 ? -x : x;
        t = -y;
    }
    s = (s / m + 1) / 2;
    t = (t / m + 1) / 2;
    return face;
}

// Returns the level of detail of tex.level or tex.grad.
double level_of_detail(const Texture &texture, const cs_texture_fetch &fetch, int dimensions) {
    double level = 0;
    if (fetch.operation == CS_TEX_LEVEL) level = as_float(fetch.level);
    if (fetch.operation == CS_TEX_GRAD) {
        const TextureLevel &largest = texture.levels[0];
        const double counts[3] = {static_cast<double>(largest.width), static_cast<double>(largest.height),
                                  static_cast<double>(largest.depth)};
        double dx = 0, dy = 0;
        for (int d = 0; d < dimensions; d++) {
            // A face of a cubemap covers 2 of each coordinate.
            const double scale = fetch.geometry == CS_CUBE ? counts[0] / 2
                                 : texture.normalized      ? counts[d]
                                                           : 1;
            dx += std::pow(as_float(fetch.dx[d]) * scale, 2);
            dy += std::pow(as_float(fetch.dy[d]) * scale, 2);
        }
        level = std::log2(std::sqrt(std::max(dx, dy)));
    }
    level += texture.bias;
    if (level != level) level = 0;
    level = std::clamp<double>(level, texture.lowest_level,
                               std::max(texture.lowest_level, texture.highest_level));
    return std::clamp<double>(level, 0, static_cast<double>(texture.levels.size() - 1));
}

}  // namespace

void texture_fetch(cs_warp *w, cs_texture_fetch *fetch) {
    const Texture &texture = find(w, fetch->handle, false);
    const bool cube = fetch->geometry == CS_CUBE;
    const int dimensions = cube ? 2 : static_cast<int>(fetch->geometry);
    double at[3];
    for (int d = 0; d < 3; d++)
        at[d] = fetch->integer != 0 ? static_cast<int32_t>(fetch->at[d])
                                    : static_cast<double>(as_float(fetch->at[d]));
    // An index beyond the last layer stands for the last layer.
    int64_t layer = 0;
    if (fetch->layered != 0 || cube) {
        const int64_t faces = cube ? 6 : 1, layers = std::max<int64_t>(1, texture.levels[0].depth / faces);
        layer = (fetch->layered != 0 ? std::min<int64_t>(fetch->layer, layers - 1) : 0) * faces;
    }
    if (cube) {
        const float direction[3] = {as_float(fetch->at[0]), as_float(fetch->at[1]), as_float(fetch->at[2])};
        layer = std::min<int64_t>(layer + cube_face(direction, at[0], at[1]), texture.levels[0].depth - 1);
    }
    const bool scaled = fetch->integer == 0 && (texture.normalized || cube);
    auto sample = [&](size_t number) {
        const TextureLevel &level = texture.levels[number];
        const Sampler sampler{texture, level, dimensions, layer, cube};
        double place[3] = {};
        for (int d = 0; d < dimensions; d++) place[d] = sampler.in_texels(at[d], d, scaled);
        if (fetch->operation == CS_TEX_GATHER)
            return sampler.gathered(place, fetch->offset, fetch->component);
        const bool filter = texture.filter && fetch->integer == 0 && returns_floats(texture);
        return filter ? sampler.filtered(place, fetch->offset) : sampler.nearest(place, fetch->offset);
    };
    if (fetch->operation == CS_TEX_GATHER || texture.levels.size() == 1) {
        memcpy(fetch->result, sample(0).bits, sizeof fetch->result);
        return;
    }
    const double level = level_of_detail(texture, *fetch, cube ? 3 : dimensions);
    if (!texture.filter_levels || !returns_floats(texture)) {
        memcpy(fetch->result, sample(static_cast<size_t>(std::floor(level + 0.5))).bits,
               sizeof fetch->result);
        return;
    }
    const auto fixed = static_cast<size_t>(std::floor(level * 256 + 0.5));
    Texel result = sample(fixed >> 8);
    if ((fixed & 255) != 0) {
        const Texel next = sample((fixed >> 8) + 1);
        for (int c = 0; c < 4; c++) {
            const double weight = static_cast<double>(fixed & 255) / 256;
            result.bits[c] =
                as_bits(static_cast<float>((1 - weight) * result.values[c] + weight * next.values[c]));
        }
    }
    memcpy(fetch->result, result.bits, sizeof fetch->result);
}

namespace {

// Finds the bytes of a surface access, whose first coordinate `x` is in bytes. Returns null if they are outside and the access
// has no effect.
uint8_t *surface_bytes(cs_warp *w, const Texture &surface, const cs_surface_access &access, int64_t x,
                       uint32_t size) {
    const TextureLevel &level = surface.levels[0];
    const int64_t row = int64_t{level.width} * surface.texel_bytes();
    int64_t at[3] = {x, access.geometry >= CS_2D ? access.at[1] : 0, 0};
    if (access.layered != 0) at[2] = access.layer;
    else if (access.geometry == CS_3D) at[2] = access.at[2];
    const int64_t most[3] = {row - size, int64_t{level.height} - 1, int64_t{level.depth} - 1};
    for (int d = 0; d < 3; d++) {
        if (at[d] >= 0 && at[d] <= most[d]) continue;
        if (access.outside == CS_SURFACE_TRAP || most[d] < 0)
            raise_fault(w, CS_FAULT_LAUNCH_FAILED, 0, 0, 0, "surface access outside of the surface");
        if (access.outside == CS_SURFACE_ZERO) return nullptr;
        at[d] = at[d] < 0 ? 0 : most[d];
    }
    const uint64_t address = level.base + static_cast<uint64_t>(at[2]) * level.slice +
                             static_cast<uint64_t>(at[1]) * level.pitch + static_cast<uint64_t>(at[0]);
    return reinterpret_cast<uint8_t *>(address);
}

// Returns the bytes of an access; if they are outside and the access has no effect, zeros that are nobody's.
void *bytes_or_zeros(uint8_t *bytes) {
    alignas(16) static thread_local uint8_t nowhere[32];
    if (bytes != nullptr) return bytes;
    memset(nowhere, 0, sizeof nowhere);
    return nowhere;
}

uint32_t saturated(double value, double least, double most) {
    if (value != value) return 0;
    return static_cast<uint32_t>(static_cast<int64_t>(std::nearbyint(std::clamp(value, least, most))));
}

// Converts a value of sust.p to the type of the surface.
uint32_t converted(TexelType type, uint32_t value) {
    const auto number = static_cast<int32_t>(value);
    switch (type) {
        case TexelType::u8: return std::min(value, 255u);
        case TexelType::u16: return std::min(value, 65535u);
        case TexelType::s8: return saturated(number, -128, 127);
        case TexelType::s16: return saturated(number, -32768, 32767);
        case TexelType::f16: return float_to_half(as_float(value));
        default: return value;
    }
}

}  // namespace

void *surface(cs_warp *w, const cs_surface_access *access) {
    const Texture &found = find(w, access->handle, true);
    // The alignment that PTX demands (9.7.11.1).
    if ((static_cast<uint32_t>(access->at[0]) & (access->size - 1)) != 0)
        raise_fault(w, CS_FAULT_MISALIGNED, 0, 0, 0, "surface access at a misaligned coordinate");
    return bytes_or_zeros(surface_bytes(w, found, *access, access->at[0], access->size));
}

void *surface_texel(cs_warp *w, const cs_surface_access *access, uint32_t *is_signed) {
    const Texture &found = find(w, access->handle, true);
    const uint32_t size = found.texel_bytes();
    *is_signed = found.type == TexelType::s32;
    if ((!*is_signed && found.type != TexelType::u32) || size < access->size)
        raise_fault(w, CS_FAULT_LAUNCH_FAILED, 0, 0, 0,
                    "surface reduction of a surface whose texels have no such integers");
    return bytes_or_zeros(surface_bytes(w, found, *access, int64_t{access->at[0]} * size, size));
}

void surface_put(cs_warp *w, const cs_surface_access *access, const uint32_t *values, uint32_t count) {
    const Texture &found = find(w, access->handle, true);
    const uint32_t size = found.texel_bytes(), width = bytes_of(found.type);
    uint8_t *bytes = surface_bytes(w, found, *access, int64_t{access->at[0]} * size, size);
    if (bytes == nullptr) return;
    for (uint32_t c = 0; c < found.channels && c < count; c++) {
        const uint32_t value = converted(found.type, values[c]);
        memcpy(bytes + c * width, &value, width);  // little-endian
    }
}

uint32_t texture_query(cs_warp *w, uint64_t handle, uint32_t what, uint32_t level) {
    const Environment &environment = *static_cast<const Block *>(w->block)->job->launch->environment;
    const Texture *found =
        environment.texture != nullptr ? environment.texture(environment.self, handle) : nullptr;
    if (found == nullptr)
        raise_fault(w, CS_FAULT_LAUNCH_FAILED, 0, 0, 0,
                    "query of a handle that is not a texture or surface object");
    const TextureLevel &size = found->levels[std::min<size_t>(level, found->levels.size() - 1)];
    switch (what) {
        case CS_QUERY_WIDTH: return size.width;
        case CS_QUERY_HEIGHT: return size.height;
        case CS_QUERY_DEPTH: return found->layered || found->cube ? 1 : size.depth;
        case CS_QUERY_LAYERS: return found->layered ? size.depth / (found->cube ? 6 : 1) : 1;
        default: return static_cast<uint32_t>(found->levels.size());
    }
}

}  // namespace cudasim

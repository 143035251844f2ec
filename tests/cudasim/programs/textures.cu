// Reads textures and places from a file, fetches each place, and writes the results: four words for each place.
// test_textures.py makes the file and knows the answers.
#include "check.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

struct Case {
    int32_t geometry;  // 1, 2, 3; 10: cubemap; 20: gather; 30: tex1Dfetch
    int32_t layered;
    int32_t resource;  // 0: array, 1: linear memory, 2: pitched memory, 3: mipmapped array
    int32_t bits, kind, channels;
    int32_t width, height, depth, levels;
    int32_t address[3];
    int32_t filter, normalized, as_float, srgb;
    float border[4];
    int32_t mip_filter;
    float bias, lowest, highest;
    int32_t how;        // 0: tex, 1: tex.level, 2: tex.grad
    int32_t component;  // of a gather
    int32_t result;     // 0: float4, 1: int4, 2: uint4
    int32_t bytes, places;
};

struct Place {
    float x, y, z;
    int32_t layer;
    float level, dx, dy;
};

template <class T>
__device__ T fetch(cudaTextureObject_t t, const Case &c, const Place &p) {
    switch (c.geometry) {
        case 1:
            if (c.layered) return tex1DLayered<T>(t, p.x, p.layer);
            if (c.how == 1) return tex1DLod<T>(t, p.x, p.level);
            if (c.how == 2) return tex1DGrad<T>(t, p.x, p.dx, p.dy);
            return tex1D<T>(t, p.x);
        case 2:
            if (c.layered && c.how == 1) return tex2DLayeredLod<T>(t, p.x, p.y, p.layer, p.level);
            if (c.layered) return tex2DLayered<T>(t, p.x, p.y, p.layer);
            if (c.how == 1) return tex2DLod<T>(t, p.x, p.y, p.level);
            if (c.how == 2) return tex2DGrad<T>(t, p.x, p.y, make_float2(p.dx, 0), make_float2(0, p.dy));
            return tex2D<T>(t, p.x, p.y);
        case 3:
            if (c.how == 1) return tex3DLod<T>(t, p.x, p.y, p.z, p.level);
            return tex3D<T>(t, p.x, p.y, p.z);
        case 10:
            return c.layered ? texCubemapLayered<T>(t, p.x, p.y, p.z, p.layer) : texCubemap<T>(t, p.x, p.y, p.z);
        case 20:
            switch (c.component) {
                case 0: return tex2Dgather<T>(t, p.x, p.y, 0);
                case 1: return tex2Dgather<T>(t, p.x, p.y, 1);
                case 2: return tex2Dgather<T>(t, p.x, p.y, 2);
                default: return tex2Dgather<T>(t, p.x, p.y, 3);
            }
        default: return tex1Dfetch<T>(t, static_cast<int>(p.x));
    }
}

template <class T>
__global__ void fetchAll(cudaTextureObject_t texture, Case c, const Place *places, T *results) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < c.places) results[i] = fetch<T>(texture, c, places[i]);
}

// The size of a level, as cudaMallocMipmappedArray makes it.
static cudaExtent extent(const Case &c, int level) {
    auto shrunk = [level](int size) { return size == 0 ? 0 : std::max(size >> level, 1); };
    return make_cudaExtent(shrunk(c.width), shrunk(c.height), c.layered || c.geometry == 10 ? c.depth : shrunk(c.depth));
}

static const char *fill(cudaArray_t array, const Case &c, cudaExtent size, const char *texels) {
    size_t texel = c.bits / 8 * c.channels;
    size_t height = std::max<size_t>(size.height, 1), depth = std::max<size_t>(size.depth, 1);
    cudaMemcpy3DParms copy = {};
    copy.srcPtr = make_cudaPitchedPtr(const_cast<char *>(texels), size.width * texel, size.width, height);
    copy.dstArray = array;
    copy.extent = make_cudaExtent(size.width, height, depth);
    copy.kind = cudaMemcpyHostToDevice;
    CHECK(cudaMemcpy3D(&copy));
    return texels + size.width * texel * height * depth;
}

int main(int count, char **arguments) {
    REQUIRE(count == 3);
    FILE *in = fopen(arguments[1], "rb"), *out = fopen(arguments[2], "wb");
    REQUIRE(in && out);
    Case c;
    while (fread(&c, sizeof c, 1, in) == 1) {
        std::vector<char> texels(c.bytes);
        std::vector<Place> places(c.places);
        REQUIRE(fread(texels.data(), 1, texels.size(), in) == texels.size());
        REQUIRE(fread(places.data(), sizeof(Place), places.size(), in) == places.size());
        cudaChannelFormatDesc format = {};
        int *const channels[] = {&format.x, &format.y, &format.z, &format.w};
        for (int k = 0; k < c.channels; k++) *channels[k] = c.bits;
        format.f = static_cast<cudaChannelFormatKind>(c.kind);
        unsigned flags = (c.layered ? cudaArrayLayered : 0) | (c.geometry == 10 ? cudaArrayCubemap : 0) |
                         (c.geometry == 20 ? cudaArrayTextureGather : 0);
        cudaResourceDesc resource = {};
        cudaArray_t array = nullptr;
        cudaMipmappedArray_t mipmapped = nullptr;
        void *memory = nullptr;
        size_t pitch = 0, row = c.width * (c.bits / 8) * c.channels;
        switch (c.resource) {
            case 0:
                CHECK(cudaMalloc3DArray(&array, &format, extent(c, 0), flags));
                fill(array, c, extent(c, 0), texels.data());
                resource.resType = cudaResourceTypeArray;
                resource.res.array.array = array;
                break;
            case 1:
                CHECK(cudaMalloc(&memory, row));
                CHECK(cudaMemcpy(memory, texels.data(), row, cudaMemcpyHostToDevice));
                resource.resType = cudaResourceTypeLinear;
                resource.res.linear.devPtr = memory;
                resource.res.linear.desc = format;
                resource.res.linear.sizeInBytes = row;
                break;
            case 2:
                CHECK(cudaMallocPitch(&memory, &pitch, row, c.height));
                CHECK(cudaMemcpy2D(memory, pitch, texels.data(), row, row, c.height, cudaMemcpyHostToDevice));
                resource.resType = cudaResourceTypePitch2D;
                resource.res.pitch2D.devPtr = memory;
                resource.res.pitch2D.desc = format;
                resource.res.pitch2D.width = c.width;
                resource.res.pitch2D.height = c.height;
                resource.res.pitch2D.pitchInBytes = pitch;
                break;
            default: {
                CHECK(cudaMallocMipmappedArray(&mipmapped, &format, extent(c, 0), c.levels, flags));
                const char *at = texels.data();
                for (int level = 0; level < c.levels; level++) {
                    CHECK(cudaGetMipmappedArrayLevel(&array, mipmapped, level));
                    at = fill(array, c, extent(c, level), at);
                }
                resource.resType = cudaResourceTypeMipmappedArray;
                resource.res.mipmap.mipmap = mipmapped;
            }
        }
        cudaTextureDesc described = {};
        for (int d = 0; d < 3; d++) described.addressMode[d] = static_cast<cudaTextureAddressMode>(c.address[d]);
        described.filterMode = c.filter ? cudaFilterModeLinear : cudaFilterModePoint;
        described.readMode = c.as_float ? cudaReadModeNormalizedFloat : cudaReadModeElementType;
        described.normalizedCoords = c.normalized;
        described.sRGB = c.srgb;
        memcpy(described.borderColor, c.border, sizeof c.border);
        described.mipmapFilterMode = c.mip_filter ? cudaFilterModeLinear : cudaFilterModePoint;
        described.mipmapLevelBias = c.bias;
        described.minMipmapLevelClamp = c.lowest;
        described.maxMipmapLevelClamp = c.highest;
        cudaTextureObject_t texture = 0;
        CHECK(cudaCreateTextureObject(&texture, &resource, &described, nullptr));
        Place *placed = nullptr;
        float4 *results = nullptr;
        CHECK(cudaMalloc(&placed, sizeof(Place) * c.places));
        CHECK(cudaMalloc(&results, sizeof(float4) * c.places));
        CHECK(cudaMemcpy(placed, places.data(), sizeof(Place) * c.places, cudaMemcpyHostToDevice));
        int blocks = (c.places + 63) / 64;
        if (c.result == 0) fetchAll<float4><<<blocks, 64>>>(texture, c, placed, results);
        if (c.result == 1) fetchAll<int4><<<blocks, 64>>>(texture, c, placed, reinterpret_cast<int4 *>(results));
        if (c.result == 2) fetchAll<uint4><<<blocks, 64>>>(texture, c, placed, reinterpret_cast<uint4 *>(results));
        std::vector<float4> found(c.places);
        CHECK(cudaMemcpy(found.data(), results, sizeof(float4) * c.places, cudaMemcpyDeviceToHost));
        fwrite(found.data(), sizeof(float4), found.size(), out);
        CHECK(cudaDestroyTextureObject(texture));
        CHECK(cudaFree(placed));
        CHECK(cudaFree(results));
        if (memory) CHECK(cudaFree(memory));
        if (mipmapped) CHECK(cudaFreeMipmappedArray(mipmapped));
        else if (array) CHECK(cudaFreeArray(array));
    }
    fclose(out);
    puts("textures ok");
    return 0;
}

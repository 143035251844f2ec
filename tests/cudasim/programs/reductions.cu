// Surface reductions (sured) of every form, on surfaces of one, two and three dimensions, at places inside and outside. The host
// computes the same.
#include "check.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

constexpr int kThreads = 256, kWidth = 5, kHeight = 4, kDepth = 3, kTexels = kWidth * kHeight * kDepth;

struct Surfaces {
    cudaSurfaceObject_t clamp[3], zero[3];  // by dimensions
};

// The place of a thread: some are outside, in every direction.
__host__ __device__ void place(int thread, int &x, int &y, int &z) {
    x = thread * 7 % 11 - 3;
    y = thread * 5 % 7 - 2;
    z = thread * 3 % 6 - 2;
}

#define REDUCE(form, op, t, constraint, geometry, mode, surface, ...) \
    asm volatile("sured." form "." op "." geometry "." t "." mode __VA_ARGS__ ::"l"(surface), "r"(x), "r"(y), "r"(z), \
                 constraint(value) : "memory")
#define BOTH(form, op, t, constraint, d, geometry, at) \
    REDUCE(form, op, t, constraint, geometry, "clamp", s.clamp[d], " [%0, " at "], %4;"); \
    REDUCE(form, op, t, constraint, geometry, "zero", s.zero[d], " [%0, " at "], %4;")
#define KERNEL(name, form, op, t, constraint, C)                                  \
    __global__ void name(Surfaces s, const C *values) {                           \
        const C value = values[threadIdx.x];                                      \
        int x, y, z;                                                              \
        place(threadIdx.x, x, y, z);                                              \
        if (form[0] == 'b') x *= sizeof(C);                                       \
        BOTH(form, op, t, constraint, 0, "1d", "{%1}");                           \
        BOTH(form, op, t, constraint, 1, "2d", "{%1, %2}");                       \
        BOTH(form, op, t, constraint, 2, "3d", "{%1, %2, %3, %3}");               \
    }
KERNEL(b_add_u32, "b", "add", "u32", "r", uint32_t)
KERNEL(b_add_s32, "b", "add", "s32", "r", int32_t)
KERNEL(b_add_u64, "b", "add", "u64", "l", uint64_t)
KERNEL(b_min_u32, "b", "min", "u32", "r", uint32_t)
KERNEL(b_min_s32, "b", "min", "s32", "r", int32_t)
KERNEL(b_min_u64, "b", "min", "u64", "l", uint64_t)
KERNEL(b_min_s64, "b", "min", "s64", "l", int64_t)
KERNEL(b_max_u32, "b", "max", "u32", "r", uint32_t)
KERNEL(b_max_s32, "b", "max", "s32", "r", int32_t)
KERNEL(b_max_u64, "b", "max", "u64", "l", uint64_t)
KERNEL(b_max_s64, "b", "max", "s64", "l", int64_t)
KERNEL(b_and_b32, "b", "and", "b32", "r", uint32_t)
KERNEL(b_or_b32, "b", "or", "b32", "r", uint32_t)
KERNEL(p_add_u32, "p", "add", "b32", "r", uint32_t)
KERNEL(p_min_u32, "p", "min", "b32", "r", uint32_t)
KERNEL(p_min_s32, "p", "min", "b32", "r", int32_t)
KERNEL(p_min_u64, "p", "min", "b64", "l", uint64_t)
KERNEL(p_min_s64, "p", "min", "b64", "l", int64_t)
KERNEL(p_max_u32, "p", "max", "b32", "r", uint32_t)
KERNEL(p_max_s32, "p", "max", "b32", "r", int32_t)
KERNEL(p_max_u64, "p", "max", "b64", "l", uint64_t)
KERNEL(p_max_s64, "p", "max", "b64", "l", int64_t)
KERNEL(p_and_u32, "p", "and", "b32", "r", uint32_t)
KERNEL(p_or_u32, "p", "or", "b32", "r", uint32_t)

__global__ void outside(cudaSurfaceObject_t surface) {
    asm volatile("sured.b.add.1d.u32.trap [%0, {%1}], %2;" ::"l"(surface), "r"(4 * kWidth), "r"(1) : "memory");
}
__global__ void formatted(cudaSurfaceObject_t surface) {
    asm volatile("sured.p.add.1d.b32.trap [%0, {%1}], %2;" ::"l"(surface), "r"(0), "r"(1) : "memory");
}

struct Surface {
    cudaArray_t array;
    cudaSurfaceObject_t object;
    cudaExtent extent;
    size_t texel;

    Surface(int dimensions, cudaChannelFormatDesc format) {
        texel = (format.x + format.y) / 8;
        extent = make_cudaExtent(kWidth, dimensions >= 2 ? kHeight : 0, dimensions == 3 ? kDepth : 0);
        CHECK(cudaMalloc3DArray(&array, &format, extent, cudaArraySurfaceLoadStore));
        cudaResourceDesc resource = {};
        resource.resType = cudaResourceTypeArray;
        resource.res.array.array = array;
        CHECK(cudaCreateSurfaceObject(&object, &resource));
    }
    void copy(void *texels, bool in) const {
        cudaMemcpy3DParms parameters = {};
        parameters.extent = make_cudaExtent(kWidth, std::max<size_t>(extent.height, 1), std::max<size_t>(extent.depth, 1));
        const cudaPitchedPtr host = make_cudaPitchedPtr(texels, kWidth * texel, kWidth, kHeight);
        if (in) {
            parameters.srcPtr = host;
            parameters.dstArray = array;
        } else {
            parameters.srcArray = array;
            parameters.dstPtr = host;
        }
        parameters.kind = in ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
        CHECK(cudaMemcpy3D(&parameters));
    }
    void destroy() const {
        CHECK(cudaDestroySurfaceObject(object));
        CHECK(cudaFreeArray(array));
    }
};

uint64_t next_random() {
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return state ^ state >> 29;
}

template <class C, class Operation>
void check(void (*kernel)(Surfaces, const C *), Operation operation) {
    const int bits = 8 * std::min<int>(sizeof(C), 4);
    const auto kind = std::is_signed<C>::value ? cudaChannelFormatKindSigned : cudaChannelFormatKindUnsigned;
    const cudaChannelFormatDesc format = cudaCreateChannelDesc(bits, sizeof(C) == 8 ? bits : 0, 0, 0, kind);
    std::vector<C> values(kThreads), start(kTexels);
    for (C &value : values) value = static_cast<C>(next_random());
    for (C &value : start) value = static_cast<C>(next_random());
    std::vector<Surface> made;
    Surfaces surfaces;
    for (int d = 0; d < 3; d++)
        for (cudaSurfaceObject_t *to : {&surfaces.clamp[d], &surfaces.zero[d]}) {
            made.emplace_back(d + 1, format);
            made.back().copy(start.data(), true);
            *to = made.back().object;
        }
    C *device;
    CHECK(cudaMalloc(&device, kThreads * sizeof(C)));
    CHECK(cudaMemcpy(device, values.data(), kThreads * sizeof(C), cudaMemcpyHostToDevice));
    kernel<<<1, kThreads>>>(surfaces, device);
    CHECK(cudaDeviceSynchronize());
    for (size_t n = 0; n < made.size(); n++) {
        const int d = static_cast<int>(n / 2);
        const bool clamp = n % 2 == 0;
        const int height = d >= 1 ? kHeight : 1, depth = d == 2 ? kDepth : 1;
        std::vector<C> expected = start, found = start;
        for (int thread = 0; thread < kThreads; thread++) {
            int x, y, z;
            place(thread, x, y, z);
            if (d < 1) y = 0;
            if (d < 2) z = 0;
            const bool inside = x >= 0 && x < kWidth && y >= 0 && y < height && z >= 0 && z < depth;
            if (!inside && !clamp) continue;
            x = std::min(std::max(x, 0), kWidth - 1);
            y = std::min(std::max(y, 0), height - 1);
            z = std::min(std::max(z, 0), depth - 1);
            C &texel = expected[(z * kHeight + y) * kWidth + x];
            texel = operation(texel, values[thread]);
        }
        made[n].copy(found.data(), false);
        REQUIRE(memcmp(found.data(), expected.data(), kTexels * sizeof(C)) == 0);
        REQUIRE(memcmp(found.data(), start.data(), kTexels * sizeof(C)) != 0);
        made[n].destroy();
    }
    CHECK(cudaFree(device));
}

struct Add {
    template <class C>
    C operator()(C a, C b) const {
        return static_cast<C>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
    }
};
struct Min {
    template <class C>
    C operator()(C a, C b) const {
        return b < a ? b : a;
    }
};
struct Max {
    template <class C>
    C operator()(C a, C b) const {
        return b > a ? b : a;
    }
};
struct And {
    uint32_t operator()(uint32_t a, uint32_t b) const { return a & b; }
};
struct Or {
    uint32_t operator()(uint32_t a, uint32_t b) const { return a | b; }
};

int main(int count, char **arguments) {
    if (count > 1) {
        const bool format = strcmp(arguments[1], "format") == 0;
        const Surface surface(1, format ? cudaCreateChannelDesc<float>() : cudaCreateChannelDesc<unsigned>());
        if (format) formatted<<<1, 1>>>(surface.object);
        else outside<<<1, 1>>>(surface.object);
        printf("sync: %s\n", cudaGetErrorName(cudaDeviceSynchronize()));
        return 0;
    }
    check(b_add_u32, Add());
    check(b_add_s32, Add());
    check(b_add_u64, Add());
    check(b_min_u32, Min());
    check(b_min_s32, Min());
    check(b_min_u64, Min());
    check(b_min_s64, Min());
    check(b_max_u32, Max());
    check(b_max_s32, Max());
    check(b_max_u64, Max());
    check(b_max_s64, Max());
    check(b_and_b32, And());
    check(b_or_b32, Or());
    check(p_add_u32, Add());
    check(p_min_u32, Min());
    check(p_min_s32, Min());
    check(p_min_u64, Min());
    check(p_min_s64, Min());
    check(p_max_u32, Max());
    check(p_max_s32, Max());
    check(p_max_u64, Max());
    check(p_max_s64, Max());
    check(p_and_u32, And());
    check(p_or_u32, Or());
    puts("reductions ok");
    return 0;
}

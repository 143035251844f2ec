// Arrays and surfaces: copies of every kind, descriptions, surface reads and writes of every shape, and what is refused.
#include "check.h"

#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#define DRIVER(call) REQUIRE((call) == CUDA_SUCCESS)

static const cudaChannelFormatDesc kFloat = cudaCreateChannelDesc<float>();

static std::vector<float> numbers(size_t count, float first = 0) {
    std::vector<float> made(count);
    std::iota(made.begin(), made.end(), first);
    return made;
}

static std::vector<float> contents(cudaArray_t array, size_t width, size_t height) {
    std::vector<float> found(width * height);
    CHECK(cudaMemcpy2DFromArray(found.data(), width * 4, array, 0, 0, width * 4, height, cudaMemcpyDeviceToHost));
    return found;
}

// Copies of rows, of parts of rows, of boxes; to and from arrays; now and in a stream; in a graph.
static void copies() {
    cudaArray_t array, other;
    CHECK(cudaMallocArray(&array, &kFloat, 8, 5));
    CHECK(cudaMallocArray(&other, &kFloat, 8, 5));
    std::vector<float> all = numbers(40);
    CHECK(cudaMemcpyToArray(array, 0, 0, all.data(), 160, cudaMemcpyHostToDevice));
    REQUIRE(contents(array, 8, 5) == all);
    // from the middle of a row to the middle of another
    std::vector<float> part = numbers(19, 100);
    CHECK(cudaMemcpyToArray(array, 5 * 4, 1, part.data(), 19 * 4, cudaMemcpyHostToDevice));
    for (int i = 0; i < 19; i++) all[8 + 5 + i] = part[i];
    REQUIRE(contents(array, 8, 5) == all);
    std::vector<float> found(19);
    CHECK(cudaMemcpyFromArray(found.data(), array, 5 * 4, 1, 19 * 4, cudaMemcpyDeviceToHost));
    REQUIRE(found == part);
    FAILS(cudaMemcpyToArray(array, 0, 4, part.data(), 19 * 4, cudaMemcpyHostToDevice), cudaErrorInvalidValue);

    // from pitched device memory, and between arrays
    float *memory;
    size_t pitch;
    CHECK(cudaMallocPitch(&memory, &pitch, 3 * 4, 2));
    CHECK(cudaMemcpy2D(memory, pitch, part.data(), 3 * 4, 3 * 4, 2, cudaMemcpyHostToDevice));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMemcpy2DToArrayAsync(array, 2 * 4, 3, memory, pitch, 3 * 4, 2, cudaMemcpyDeviceToDevice, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int y = 0; y < 2; y++)
        for (int x = 0; x < 3; x++) all[(3 + y) * 8 + 2 + x] = part[y * 3 + x];
    REQUIRE(contents(array, 8, 5) == all);
    CHECK(cudaMemcpy2DArrayToArray(other, 0, 0, array, 0, 0, 32, 5));
    REQUIRE(contents(other, 8, 5) == all);
    FAILS(cudaMemcpy2DToArray(array, 8, 4, memory, pitch, 12, 2, cudaMemcpyDefault), cudaErrorInvalidValue);
    // one row needs no pitch
    CHECK(cudaMemcpy2DToArray(other, 4, 2, part.data(), 0, 12, 1, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy2DFromArray(found.data(), 0, other, 4, 2, 12, 1, cudaMemcpyDeviceToHost));
    REQUIRE(std::equal(found.begin(), found.begin() + 3, part.begin()));
    FAILS(cudaMemcpy2DToArray(other, 4, 2, part.data(), 0, 12, 2, cudaMemcpyHostToDevice), cudaErrorInvalidPitchValue);
    FAILS(cudaMemcpy2DToArray(other, 4, 2, part.data(), 8, 12, 1, cudaMemcpyHostToDevice), cudaErrorInvalidPitchValue);
    CHECK(cudaMemcpy2DArrayToArray(other, 0, 0, array, 0, 0, 32, 5));

    // a box, whose positions count elements in the array and bytes in memory
    cudaArray_t box;
    cudaChannelFormatDesc two = cudaCreateChannelDesc<float2>();
    CHECK(cudaMalloc3DArray(&box, &two, make_cudaExtent(4, 3, 2)));
    std::vector<float> texels = numbers(48), back(48);
    cudaMemcpy3DParms copy = {};
    copy.srcPtr = make_cudaPitchedPtr(texels.data(), 4 * 8, 4, 3);
    copy.dstArray = box;
    copy.extent = make_cudaExtent(4, 3, 2);
    copy.kind = cudaMemcpyHostToDevice;
    CHECK(cudaMemcpy3D(&copy));
    copy = {};
    copy.srcArray = box;
    copy.srcPos = make_cudaPos(1, 1, 1);
    copy.dstPtr = make_cudaPitchedPtr(back.data(), 4 * 8, 4, 3);
    copy.dstPos = make_cudaPos(8, 0, 0);
    copy.extent = make_cudaExtent(2, 2, 1);
    copy.kind = cudaMemcpyDeviceToHost;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaGraphNode_t node;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddMemcpyNode(&node, graph, nullptr, 0, &copy));
    cudaMemcpy3DParms described = {};
    CHECK(cudaGraphMemcpyNodeGetParams(node, &described));
    REQUIRE(described.srcArray == box && described.srcPos.x == 1 && described.extent.width == 2);
    REQUIRE(described.dstPtr.ptr == back.data() && described.dstPos.x == 8);
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int y = 0; y < 2; y++)
        for (int x = 0; x < 4; x++) REQUIRE(back[y * 8 + 2 + x] == texels[24 + (1 + y) * 8 + 2 + x]);
    copy.extent.width = 4;
    FAILS(cudaMemcpy3D(&copy), cudaErrorInvalidValue);

    cudaChannelFormatDesc channels;
    cudaExtent extent;
    unsigned flags = 9;
    CHECK(cudaArrayGetInfo(&channels, &extent, &flags, box));
    REQUIRE(channels.x == 32 && channels.y == 32 && channels.z == 0 && channels.f == cudaChannelFormatKindFloat);
    REQUIRE(extent.width == 4 && extent.height == 3 && extent.depth == 2 && flags == 0);

    // the driver's copies of rows
    auto row = reinterpret_cast<CUarray>(array);
    CUdeviceptr device = reinterpret_cast<CUdeviceptr>(memory);
    DRIVER(cuMemcpyHtoA(row, 4, texels.data(), 28));
    DRIVER(cuMemcpyAtoD(device, row, 8, 12));
    DRIVER(cuMemcpyDtoA(row, 20, device, 12));
    DRIVER(cuMemcpyAtoA(reinterpret_cast<CUarray>(other), 0, row, 16, 16));
    DRIVER(cuMemcpyAtoHAsync(back.data(), reinterpret_cast<CUarray>(other), 0, 16, stream));
    CHECK(cudaStreamSynchronize(stream));
    REQUIRE(back[0] == 3 && back[1] == 1 && back[2] == 2 && back[3] == 3);
    REQUIRE(cuMemcpyHtoA(row, 4, texels.data(), 32) == CUDA_ERROR_INVALID_VALUE);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaFreeArray(box));
    CHECK(cudaFreeArray(other));
    CHECK(cudaFreeArray(array));
    FAILS(cudaFreeArray(array), cudaErrorInvalidResourceHandle);
    CHECK(cudaFree(memory));
    CHECK(cudaStreamDestroy(stream));
}

template <class T>
__global__ void copy1D(cudaSurfaceObject_t from, cudaSurfaceObject_t to, int width) {
    for (int x = threadIdx.x; x < width; x += blockDim.x) {
        T value;
        surf1Dread(&value, from, x * sizeof(T));
        surf1Dwrite(value, to, (width - 1 - x) * sizeof(T));
    }
}

__global__ void turn(cudaSurfaceObject_t from, cudaSurfaceObject_t to, int width, int height) {
    int x = threadIdx.x, y = threadIdx.y;
    surf2Dwrite(surf2Dread<float>(from, x * 4, y), to, (width - 1 - x) * 4, height - 1 - y);
}

__global__ void mark(cudaSurfaceObject_t box, cudaSurfaceObject_t layers, cudaSurfaceObject_t rows, cudaSurfaceObject_t cube) {
    int x = threadIdx.x, y = threadIdx.y, z = threadIdx.z;
    surf3Dwrite<float>(100 * z + 10 * y + x, box, x * 4, y, z);
    surf2DLayeredwrite<float>(surf3Dread<float>(box, x * 4, y, z) + 1000, layers, x * 4, y, z);
    if (y == 0) surf1DLayeredwrite<float>(10 * z + x, rows, x * 4, z);
    surfCubemapwrite<float>(-1 - surf2DLayeredread<float>(layers, x * 4, y, z), cube, x * 4, y, z);
}

// Places outside of a surface of 4 x 2: clamped, ignored, and read as zero.
__global__ void outside(cudaSurfaceObject_t surface, float *results) {
    results[0] = surf2Dread<float>(surface, -8, 0, cudaBoundaryModeClamp);
    results[1] = surf2Dread<float>(surface, 100, 7, cudaBoundaryModeClamp);
    results[2] = surf2Dread<float>(surface, 4, -1, cudaBoundaryModeZero);
    results[3] = surf2Dread<float>(surface, 16, 0, cudaBoundaryModeZero);
    surf2Dwrite(77.0f, surface, 16, 1, cudaBoundaryModeZero);
    surf2Dwrite(88.0f, surface, 16, 1, cudaBoundaryModeClamp);
    results[4] = surf2Dread<float>(surface, 12, 1);
    int width, height;
    asm("suq.width.b32 %0, [%1];" : "=r"(width) : "l"(surface));
    asm("suq.height.b32 %0, [%1];" : "=r"(height) : "l"(surface));
    results[5] = width * 10 + height;
}

__global__ void formatted(cudaSurfaceObject_t bytes, cudaSurfaceObject_t halves) {
    asm volatile("sust.p.2d.v2.b32.zero [%0, {%1, %2}], {%3, %4};" ::"l"(bytes), "r"(1), "r"(1), "r"(300), "r"(-300));
    asm volatile("sust.p.2d.b32.zero [%0, {%1, %2}], {%3};" ::"l"(halves), "r"(2), "r"(0), "r"(__float_as_int(1.5f)));
}

__global__ void beyond(cudaSurfaceObject_t surface) { surf2Dwrite(1.0f, surface, 16, 0); }

__global__ void sizes(cudaTextureObject_t texture, int *results) {
    asm("txq.width.b32 %0, [%1];" : "=r"(results[0]) : "l"(texture));
    asm("txq.height.b32 %0, [%1];" : "=r"(results[1]) : "l"(texture));
    asm("txq.depth.b32 %0, [%1];" : "=r"(results[2]) : "l"(texture));
}

__global__ void packed(cudaTextureObject_t texture, unsigned *results) {
    float x = 1.5f;
    asm("{ .reg .f16x2 a, b; tex.1d.v2.f16x2.f32 {a, b}, [%1, {%2}]; mov.b32 %0, a; }"
        : "=r"(results[0]) : "l"(texture), "f"(x));
}

static cudaSurfaceObject_t surface_of(cudaArray_t array) {
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = array;
    cudaSurfaceObject_t made = 0;
    CHECK(cudaCreateSurfaceObject(&made, &resource));
    cudaResourceDesc found = {};
    CHECK(cudaGetSurfaceObjectResourceDesc(&found, made));
    REQUIRE(found.resType == cudaResourceTypeArray && found.res.array.array == array);
    return made;
}

static cudaArray_t array_of(cudaExtent extent, unsigned flags, cudaChannelFormatDesc format = kFloat) {
    cudaArray_t made;
    CHECK(cudaMalloc3DArray(&made, &format, extent, flags | cudaArraySurfaceLoadStore));
    return made;
}

template <class T>
static void reversed() {  // what one kernel writes the host reads, and the other way round
    constexpr int width = 50;
    T given[width], found[width];
    auto *bytes = reinterpret_cast<unsigned char *>(given);
    for (size_t k = 0; k < sizeof given; k++) bytes[k] = static_cast<unsigned char>(k * 7);
    cudaArray_t from = array_of(make_cudaExtent(width, 0, 0), 0, cudaCreateChannelDesc<T>());
    cudaArray_t to = array_of(make_cudaExtent(width, 0, 0), 0, cudaCreateChannelDesc<T>());
    CHECK(cudaMemcpyToArray(from, 0, 0, given, sizeof given, cudaMemcpyHostToDevice));
    copy1D<T><<<1, 32>>>(surface_of(from), surface_of(to), width);
    CHECK(cudaMemcpyFromArray(found, to, 0, 0, sizeof found, cudaMemcpyDeviceToHost));
    for (int x = 0; x < width; x++) REQUIRE(memcmp(&found[x], &given[width - 1 - x], sizeof(T)) == 0);
    CHECK(cudaFreeArray(from));
    CHECK(cudaFreeArray(to));
}

static std::vector<float> slices(cudaArray_t array, size_t width, size_t height, size_t depth) {
    std::vector<float> found(width * height * depth);
    cudaMemcpy3DParms copy = {};
    copy.srcArray = array;
    copy.dstPtr = make_cudaPitchedPtr(found.data(), width * 4, width, height);
    copy.extent = make_cudaExtent(width, height, depth);
    copy.kind = cudaMemcpyDeviceToHost;
    CHECK(cudaMemcpy3D(&copy));
    return found;
}

static void surfaces() {
    reversed<unsigned char>();
    reversed<short2>();
    reversed<float>();
    reversed<uint2>();
    reversed<float4>();

    cudaArray_t from = array_of(make_cudaExtent(4, 2, 0), 0), to = array_of(make_cudaExtent(4, 2, 0), 0);
    std::vector<float> all = numbers(8);
    CHECK(cudaMemcpyToArray(from, 0, 0, all.data(), 32, cudaMemcpyHostToDevice));
    turn<<<1, dim3(4, 2)>>>(surface_of(from), surface_of(to), 4, 2);
    REQUIRE((contents(to, 4, 2) == std::vector<float>{7, 6, 5, 4, 3, 2, 1, 0}));

    cudaArray_t box = array_of(make_cudaExtent(2, 2, 6), 0), layers = array_of(make_cudaExtent(2, 2, 6), cudaArrayLayered);
    cudaArray_t rows = array_of(make_cudaExtent(2, 0, 6), cudaArrayLayered);
    cudaArray_t cube = array_of(make_cudaExtent(2, 2, 6), cudaArrayCubemap);
    mark<<<1, dim3(2, 2, 6)>>>(surface_of(box), surface_of(layers), surface_of(rows), surface_of(cube));
    std::vector<float> in_box = slices(box, 2, 2, 6), in_layers = slices(layers, 2, 2, 6);
    std::vector<float> in_rows = slices(rows, 2, 1, 6), in_cube = slices(cube, 2, 2, 6);
    for (int z = 0; z < 6; z++)
        for (int y = 0; y < 2; y++)
            for (int x = 0; x < 2; x++) {
                float expected = 100 * z + 10 * y + x;
                int at = (z * 2 + y) * 2 + x;
                REQUIRE(in_box[at] == expected && in_layers[at] == expected + 1000);
                REQUIRE(in_cube[at] == -1001 - expected && in_rows[z * 2 + x] == 10 * z + x);
            }

    float *results, found[6];
    CHECK(cudaMalloc(&results, sizeof found));
    outside<<<1, 1>>>(surface_of(from), results);
    CHECK(cudaMemcpy(found, results, sizeof found, cudaMemcpyDeviceToHost));
    const float expected[] = {0, 7, 0, 0, 88, 42};
    for (int k = 0; k < 6; k++) REQUIRE(found[k] == expected[k]);

    cudaArray_t bytes = array_of(make_cudaExtent(3, 2, 0), 0, cudaCreateChannelDesc<char2>());
    cudaArray_t halves = array_of(make_cudaExtent(3, 2, 0), 0, cudaCreateChannelDescHalf());
    formatted<<<1, 1>>>(surface_of(bytes), surface_of(halves));
    signed char pair[2];
    unsigned short half = 0;
    CHECK(cudaMemcpyFromArray(pair, bytes, 2, 1, 2, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpyFromArray(&half, halves, 4, 0, 2, cudaMemcpyDeviceToHost));
    REQUIRE(pair[0] == 127 && pair[1] == -128 && half == 0x3e00);
}

static void objects() {
    cudaArray_t array;
    CHECK(cudaMallocArray(&array, &kFloat, 8, 4));
    std::vector<float> all = numbers(32);
    CHECK(cudaMemcpyToArray(array, 0, 0, all.data(), 128, cudaMemcpyHostToDevice));
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = array;
    cudaTextureDesc described = {};
    described.filterMode = cudaFilterModeLinear;
    described.addressMode[1] = cudaAddressModeMirror;
    described.normalizedCoords = 1;
    cudaTextureObject_t texture = 0, other = 0;
    CHECK(cudaCreateTextureObject(&texture, &resource, &described, nullptr));
    cudaTextureDesc found = {};
    cudaResourceDesc from = {};
    CHECK(cudaGetTextureObjectTextureDesc(&found, texture));
    CHECK(cudaGetTextureObjectResourceDesc(&from, texture));
    REQUIRE(memcmp(&found, &described, sizeof found) == 0 && from.res.array.array == array);
    int *results, sized[3];
    CHECK(cudaMalloc(&results, sizeof sized));
    sizes<<<1, 1>>>(texture, results);
    CHECK(cudaMemcpy(sized, results, sizeof sized, cudaMemcpyDeviceToHost));
    REQUIRE(sized[0] == 8 && sized[1] == 4 && sized[2] == 1);
    cudaSurfaceObject_t surface;
    FAILS(cudaCreateSurfaceObject(&surface, &resource), cudaErrorInvalidValue);  // no cudaArraySurfaceLoadStore

    // which levels of mipmapped arrays do not need
    cudaMipmappedArray_t mipmapped;
    CHECK(cudaMallocMipmappedArray(&mipmapped, &kFloat, make_cudaExtent(8, 4, 0), 2));
    CHECK(cudaGetMipmappedArrayLevel(&resource.res.array.array, mipmapped, 1));
    cudaArray_t small = array_of(make_cudaExtent(4, 2, 0), 0);
    CHECK(cudaMemcpyToArray(small, 0, 0, all.data(), 32, cudaMemcpyHostToDevice));
    turn<<<1, dim3(4, 2)>>>(surface_of(small), surface_of(resource.res.array.array), 4, 2);
    REQUIRE((contents(resource.res.array.array, 4, 2) == std::vector<float>{7, 6, 5, 4, 3, 2, 1, 0}));
    CHECK(cudaFreeMipmappedArray(mipmapped));
    resource.res.array.array = array;

    // another format of the same size
    cudaResourceViewDesc view = {};
    view.format = cudaResViewFormatUnsignedChar4;
    view.width = 8;
    view.height = 4;
    described.readMode = cudaReadModeNormalizedFloat;
    CHECK(cudaCreateTextureObject(&other, &resource, &described, &view));
    view.format = cudaResViewFormatUnsignedChar2;
    FAILS(cudaCreateTextureObject(&surface, &resource, &described, &view), cudaErrorInvalidValue);
    view.format = cudaResViewFormatUnsignedBlockCompressed1;
    FAILS(cudaCreateTextureObject(&surface, &resource, &described, &view), cudaErrorNotSupported);
    CHECK(cudaDestroyTextureObject(other));
    CHECK(cudaDestroyTextureObject(texture));
    FAILS(cudaDestroyTextureObject(texture), cudaErrorInvalidValue);
    CHECK(cudaDestroyTextureObject(0));
    CHECK(cudaDestroySurfaceObject(0));
    CHECK(cudaFreeArray(array));

    // the first of four channels as halves; the texture has one
    unsigned halves;
    CHECK(cudaMallocArray(&array, &kFloat, 4));
    CHECK(cudaMemcpyToArray(array, 0, 0, all.data(), 16, cudaMemcpyHostToDevice));
    resource.res.array.array = array;
    described = {};
    CHECK(cudaCreateTextureObject(&texture, &resource, &described, nullptr));
    packed<<<1, 1>>>(texture, reinterpret_cast<unsigned *>(results));
    CHECK(cudaMemcpy(&halves, results, sizeof halves, cudaMemcpyDeviceToHost));
    REQUIRE(halves == 0x3c00);

    cudaChannelFormatDesc whole = cudaCreateChannelDesc<int>(), three = cudaCreateChannelDesc(8, 8, 8, 0, cudaChannelFormatKindUnsigned);
    FAILS(cudaMallocArray(&array, &three, 4, 4), cudaErrorInvalidChannelDescriptor);
    CHECK(cudaMallocArray(&array, &whole, 4, 4));
    resource.res.array.array = array;
    described.filterMode = cudaFilterModeLinear;
    FAILS(cudaCreateTextureObject(&texture, &resource, &described, nullptr), cudaErrorInvalidFilterSetting);
    described.filterMode = cudaFilterModePoint;
    described.readMode = cudaReadModeNormalizedFloat;
    FAILS(cudaCreateTextureObject(&texture, &resource, &described, nullptr), cudaErrorInvalidNormSetting);
    FAILS(cudaMalloc3DArray(&array, &whole, make_cudaExtent(4, 3, 6), cudaArrayCubemap), cudaErrorInvalidValue);
    CHECK(cudaMalloc3DArray(&array, &kFloat, make_cudaExtent(4, 4, 6), cudaArrayCubemap));
    resource.res.array.array = array;
    described = {};
    described.seamlessCubemap = 1;
    CHECK(cudaCreateTextureObject(&texture, &resource, &described, nullptr));
    described.filterMode = cudaFilterModeLinear;
    FAILS(cudaCreateTextureObject(&texture, &resource, &described, nullptr), cudaErrorNotSupported);
}

int main(int count, char **arguments) {
    if (count > 1) {  // a fault
        cudaArray_t array = array_of(make_cudaExtent(4, 2, 0), 0);
        cudaSurfaceObject_t surface = surface_of(array);
        if (strcmp(arguments[1], "destroyed") == 0) CHECK(cudaDestroySurfaceObject(surface));
        beyond<<<1, 1>>>(surface);
        printf("sync: %s\n", cudaGetErrorName(cudaDeviceSynchronize()));
        return 0;
    }
    copies();
    surfaces();
    objects();
    puts("arrays ok");
    return 0;
}

// Bulk tensor copies: boxes of tensors of every rank, type and swizzle, loaded, stored and reduced, against loops on the host.
#include "check.h"

#include <cuda.h>
#include <algorithm>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

constexpr int kMostShared = 32768;

// One thread copies a box into shared memory (or the bytes of `data` from there), and `data` gets what was there.
template <int Rank, int What>  // What: 0 load, 1 store, 2 add, 3 min, 4 max
__global__ void copy(const __grid_constant__ CUtensorMap map, int4 at, int last, uint8_t *data, int bytes) {
    extern __shared__ __align__(1024) uint8_t box[];
    __shared__ __align__(8) uint64_t barrier;
    const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(box));
    const auto done = static_cast<uint32_t>(__cvta_generic_to_shared(&barrier));
    for (int i = threadIdx.x; i < bytes; i += blockDim.x) box[i] = What == 0 ? 0x5a : data[i];
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(done) : "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        const auto m = reinterpret_cast<uint64_t>(&map);
#define COPY(RANK, PLACES)                                                                                        \
    if constexpr (Rank == RANK && What == 0) {                                                                    \
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(done), "r"(bytes) : "memory");     \
        asm volatile("cp.async.bulk.tensor." #RANK                                                                \
                     "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {" PLACES "}], [%2];" \
                     ::"r"(to), "l"(m), "r"(done), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "r"(last)          \
                     : "memory");                                                                                 \
    }                                                                                                             \
    if constexpr (Rank == RANK && What == 1)                                                                      \
        asm volatile("cp.async.bulk.tensor." #RANK "d.global.shared::cta.bulk_group [%1, {" PLACES "}], [%0];"    \
                     ::"r"(to), "l"(m), "r"(done), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "r"(last)          \
                     : "memory");                                                                                 \
    if constexpr (Rank == RANK && What >= 2) {                                                                    \
        if constexpr (What == 2) REDUCE(RANK, "add", PLACES);                                                     \
        if constexpr (What == 3) REDUCE(RANK, "min", PLACES);                                                     \
        if constexpr (What == 4) REDUCE(RANK, "max", PLACES);                                                     \
    }
#define REDUCE(RANK, OPERATION, PLACES)                                                                        \
    asm volatile("cp.reduce.async.bulk.tensor." #RANK "d.global.shared::cta." OPERATION ".tile.bulk_group [%1, {" \
                 PLACES "}], [%0];" ::"r"(to), "l"(m), "r"(done), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w),  \
                 "r"(last)                                                                                     \
                 : "memory")
        COPY(1, "%3")
        COPY(2, "%3, %4")
        COPY(3, "%3, %4, %5")
        COPY(4, "%3, %4, %5, %6")
        COPY(5, "%3, %4, %5, %6, %7")
        if constexpr (What == 0) {
            asm volatile(
                "{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra W; }" ::"r"(done)
                : "memory");
        } else {
            asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
        }
    }
    __syncthreads();
    if (What == 0)
        for (int i = threadIdx.x; i < bytes; i += blockDim.x) data[i] = box[i];
}

struct Case {
    CUtensorMapDataType type;
    int rank;
    cuuint64_t sizes[5];
    cuuint32_t box[5], steps[5];
    CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
    CUtensorMapFloatOOBfill fill = CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
    int at[5] = {};
    int what = 0;
};

int size_of(CUtensorMapDataType type) {
    switch (type) {
        case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
        case CU_TENSOR_MAP_DATA_TYPE_UINT16:
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
        case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
        case CU_TENSOR_MAP_DATA_TYPE_UINT64:
        case CU_TENSOR_MAP_DATA_TYPE_INT64:
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return 8;
        default: return 4;
    }
}

template <class T>
T combined(int what, T a, T b) {
    return what == 2 ? static_cast<T>(a + b) : what == 3 ? (b < a ? b : a) : (b > a ? b : a);
}

template <class T>
void combine(int what, void *to, const void *from) {
    T a, b;
    memcpy(&a, to, sizeof a);
    memcpy(&b, from, sizeof b);
    a = combined(what, a, b);
    memcpy(to, &a, sizeof a);
}

void reduce(const Case &c, void *to, const void *from) {
    switch (c.type) {
        case CU_TENSOR_MAP_DATA_TYPE_UINT32: return combine<uint32_t>(c.what, to, from);
        case CU_TENSOR_MAP_DATA_TYPE_INT32: return combine<int32_t>(c.what, to, from);
        case CU_TENSOR_MAP_DATA_TYPE_UINT64: return combine<uint64_t>(c.what, to, from);
        case CU_TENSOR_MAP_DATA_TYPE_INT64: return combine<int64_t>(c.what, to, from);
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: return combine<float>(c.what, to, from);
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return combine<double>(c.what, to, from);
        default: REQUIRE(!"a type that this test does not reduce");
    }
}

template <int Rank>
void launch(const Case &c, const CUtensorMap &map, uint8_t *data, int bytes) {
    const int4 at = make_int4(c.at[0], c.at[1], c.at[2], c.at[3]);
    switch (c.what) {
        case 0: copy<Rank, 0><<<1, 64, bytes>>>(map, at, c.at[4], data, bytes); break;
        case 1: copy<Rank, 1><<<1, 64, bytes>>>(map, at, c.at[4], data, bytes); break;
        case 2: copy<Rank, 2><<<1, 64, bytes>>>(map, at, c.at[4], data, bytes); break;
        case 3: copy<Rank, 3><<<1, 64, bytes>>>(map, at, c.at[4], data, bytes); break;
        default: copy<Rank, 4><<<1, 64, bytes>>>(map, at, c.at[4], data, bytes); break;
    }
    CHECK(cudaDeviceSynchronize());
}

using Encode = decltype(&cuTensorMapEncodeTiled);

void check(Encode encode, const Case &c) {
    const int size = size_of(c.type);
    // Rows are padded by 16 bytes or more; the padding must stay as it is.
    cuuint64_t strides[5] = {};
    cuuint64_t bytes_of_tensor = (c.sizes[0] * size + 31) / 16 * 16;
    for (int d = 1; d < c.rank; d++) {
        strides[d - 1] = bytes_of_tensor;
        bytes_of_tensor *= c.sizes[d];
    }
    std::vector<uint8_t> tensor(bytes_of_tensor);
    uint32_t random = 12345;
    auto next = [&] { return random = random * 1664525 + 1013904223; };
    for (uint8_t &byte : tensor) byte = next() >> 24;
    const bool reduces_floats = c.what >= 2 && (c.type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 || c.type == CU_TENSOR_MAP_DATA_TYPE_FLOAT64);
    if (reduces_floats)  // numbers, not any bits
        for (size_t i = 0; i < tensor.size(); i += size) {
            const float f = static_cast<int>(next() >> 8) / 4096.0f - 1000;
            const double d = f;
            memcpy(&tensor[i], size == 4 ? static_cast<const void *>(&f) : &d, size);
        }
    int counts[5], steps[5], count = 1;
    for (int d = 0; d < c.rank; d++) {
        steps[d] = d == 0 ? 1 : c.steps[d];
        counts[d] = (c.box[d] + steps[d] - 1) / steps[d];
        count *= counts[d];
    }
    const int bytes = count * size;
    REQUIRE(bytes <= kMostShared);
    uint8_t *device, *data;
    CHECK(cudaMalloc(&device, tensor.size()));
    CHECK(cudaMemcpy(device, tensor.data(), tensor.size(), cudaMemcpyHostToDevice));
    CHECK(cudaMalloc(&data, bytes));
    std::vector<uint8_t> box(bytes), expected(bytes);
    for (uint8_t &byte : box) byte = next() >> 24;
    if (reduces_floats)
        for (int i = 0; i < bytes; i += size) memcpy(&box[i], &tensor[static_cast<size_t>(i) % tensor.size()], size);
    CHECK(cudaMemcpy(data, box.data(), bytes, cudaMemcpyHostToDevice));

    alignas(64) CUtensorMap map;
    REQUIRE(encode(&map, c.type, c.rank, device, c.sizes, strides, c.box, c.steps, CU_TENSOR_MAP_INTERLEAVE_NONE, c.swizzle,
                   CU_TENSOR_MAP_L2_PROMOTION_NONE, c.fill) == CUDA_SUCCESS);
    switch (c.rank) {
        case 1: launch<1>(c, map, data, bytes); break;
        case 2: launch<2>(c, map, data, bytes); break;
        case 3: launch<3>(c, map, data, bytes); break;
        case 4: launch<4>(c, map, data, bytes); break;
        default: launch<5>(c, map, data, bytes); break;
    }

    const int span = 16 << std::min<int>(c.swizzle, CU_TENSOR_MAP_SWIZZLE_128B);  // 16, 32, 64, 128
    const int unit = c.swizzle == CU_TENSOR_MAP_SWIZZLE_128B_ATOM_64B ? 64 : c.swizzle == CU_TENSOR_MAP_SWIZZLE_128B_ATOM_32B ? 32 : 16;
    for (int k = 0; k < count; k++) {
        int rest = k;
        size_t offset = 0;
        bool inside = true;
        for (int d = 0; d < c.rank; d++) {
            const long long at = c.at[d] + static_cast<long long>(rest % counts[d]) * steps[d];
            rest /= counts[d];
            inside = inside && at >= 0 && at < static_cast<long long>(c.sizes[d]);
            offset += static_cast<size_t>(at) * (d == 0 ? size : strides[d - 1]);
        }
        // The chunks of a row change places with those that differ in the row's number.
        int place = k * size;
        place ^= place / 128 % (span / unit) * unit;
        if (c.what == 0 && inside) {
            memcpy(&expected[place], &tensor[offset], size);
        } else if (c.what == 0) {
            for (int n = 0; n < size; n++) expected[place + n] = !c.fill ? 0 : n % 2 ? 0x7f : 0xf7;
        } else if (inside && c.what == 1) {
            memcpy(&tensor[offset], &box[place], size);
        } else if (inside) {
            reduce(c, &tensor[offset], &box[place]);
        }
    }
    if (c.what == 0) {
        CHECK(cudaMemcpy(box.data(), data, bytes, cudaMemcpyDeviceToHost));
        REQUIRE(box == expected);
    }
    std::vector<uint8_t> after(tensor.size());
    CHECK(cudaMemcpy(after.data(), device, after.size(), cudaMemcpyDeviceToHost));
    REQUIRE(after == tensor);
    CHECK(cudaFree(device));
    CHECK(cudaFree(data));
}

void refused(Encode encode) {
    alignas(64) CUtensorMap map;
    void *device;
    CHECK(cudaMalloc(&device, 1 << 16));
    const cuuint64_t sizes[5] = {64, 64, 8, 8, 8}, strides[4] = {256, 16384, 131072, 1048576}, odd[4] = {260, 16384, 131072, 1048576};
    const cuuint32_t box[5] = {32, 8, 1, 1, 1}, ones[5] = {1, 1, 1, 1, 1}, large[5] = {32, 257, 1, 1, 1}, narrow[5] = {3, 8, 1, 1, 1};
    auto status = [&](int rank, void *address, const cuuint64_t *s, const cuuint32_t *b, CUtensorMapSwizzle swizzle,
                      CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CUtensorMap *to = nullptr) {
        return encode(to ? to : &map, type, rank, address, sizes, s, b, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                      CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    const auto none = CU_TENSOR_MAP_SWIZZLE_NONE;
    REQUIRE(status(2, device, strides, box, none) == CUDA_SUCCESS);
    REQUIRE(status(0, device, strides, box, none) == CUDA_ERROR_INVALID_VALUE);
    REQUIRE(status(6, device, strides, box, none) == CUDA_ERROR_INVALID_VALUE);
    REQUIRE(status(2, static_cast<char *>(device) + 4, strides, box, none) == CUDA_ERROR_INVALID_VALUE);
    REQUIRE(status(2, device, odd, box, none) == CUDA_ERROR_INVALID_VALUE);
    REQUIRE(status(2, device, strides, large, none) == CUDA_ERROR_INVALID_VALUE);
    REQUIRE(status(2, device, strides, narrow, none) == CUDA_ERROR_INVALID_VALUE);  // rows of 12 bytes
    REQUIRE(status(2, device, strides, box, CU_TENSOR_MAP_SWIZZLE_64B) == CUDA_ERROR_INVALID_VALUE);  // rows of 128 bytes
    REQUIRE(status(2, device, strides, box, none, CU_TENSOR_MAP_DATA_TYPE_TFLOAT32) == CUDA_ERROR_NOT_SUPPORTED);
    REQUIRE(status(2, device, strides, box, CU_TENSOR_MAP_SWIZZLE_128B_ATOM_32B_FLIP_8B) == CUDA_ERROR_NOT_SUPPORTED);
    alignas(64) char misaligned[256];
    REQUIRE(status(2, device, strides, box, none, CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                   reinterpret_cast<CUtensorMap *>(misaligned + 16)) == CUDA_ERROR_INVALID_VALUE);
    CHECK(cudaFree(device));
    // A map that no call made: the launch fails, and the process goes on.
    CUtensorMap zero{};
    uint8_t *data;
    CHECK(cudaMalloc(&data, 1024));
    copy<2, 0><<<1, 32, 1024>>>(zero, make_int4(0, 0, 0, 0), 0, data, 1024);
    FAILS(cudaDeviceSynchronize(), cudaErrorIllegalInstruction);
}

int main() {
    Encode encode;
    cudaDriverEntryPointQueryResult found;
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", reinterpret_cast<void **>(&encode), 12000,
                                           cudaEnableDefault, &found));
    REQUIRE(found == cudaDriverEntryPointSuccess && encode != nullptr);
    const auto u8 = CU_TENSOR_MAP_DATA_TYPE_UINT8, u16 = CU_TENSOR_MAP_DATA_TYPE_UINT16;
    const auto u32 = CU_TENSOR_MAP_DATA_TYPE_UINT32, s32 = CU_TENSOR_MAP_DATA_TYPE_INT32;
    const auto u64 = CU_TENSOR_MAP_DATA_TYPE_UINT64, s64 = CU_TENSOR_MAP_DATA_TYPE_INT64;
    const auto f16 = CU_TENSOR_MAP_DATA_TYPE_FLOAT16, bf16 = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const auto f32 = CU_TENSOR_MAP_DATA_TYPE_FLOAT32, f64 = CU_TENSOR_MAP_DATA_TYPE_FLOAT64;
    const auto none = CU_TENSOR_MAP_SWIZZLE_NONE;
    const auto zero = CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE, nan = CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA;
    std::vector<Case> cases = {
        {u8, 1, {1000}, {256}, {1}, none, zero, {100}},
        {u8, 1, {1000}, {256}, {1}, none, zero, {900}},
        {u16, 2, {70, 30}, {64, 8}, {1, 1}, none, zero, {3, 5}},
        {f16, 2, {70, 30}, {64, 8}, {1, 1}, CU_TENSOR_MAP_SWIZZLE_128B, zero, {3, 25}},
        {bf16, 2, {70, 30}, {32, 16}, {1, 1}, CU_TENSOR_MAP_SWIZZLE_64B, nan, {-5, -2}},
        {f32, 2, {40, 40}, {8, 32}, {1, 1}, CU_TENSOR_MAP_SWIZZLE_32B, nan, {36, 20}},
        {f32, 2, {40, 40}, {32, 16}, {1, 1}, CU_TENSOR_MAP_SWIZZLE_128B, zero, {8, 8}},
        {f64, 3, {20, 10, 6}, {8, 4, 3}, {1, 1, 1}, none, nan, {15, 8, 4}},
        {u32, 3, {20, 10, 6}, {8, 7, 4}, {1, 3, 2}, none, zero, {2, 1, 0}},
        {s64, 4, {12, 6, 5, 4}, {4, 3, 2, 3}, {1, 1, 1, 1}, none, zero, {5, 2, 3, 2}},
        {s32, 5, {12, 6, 5, 4, 3}, {4, 3, 2, 2, 2}, {1, 2, 1, 1, 1}, none, zero, {-2, -1, 3, 2, 2}},
    };
    const CUtensorMapSwizzle atoms[] = {CU_TENSOR_MAP_SWIZZLE_128B_ATOM_32B, CU_TENSOR_MAP_SWIZZLE_128B_ATOM_64B};
    int major;
    CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    for (CUtensorMapSwizzle swizzle : atoms)
        if (major >= 10) cases.push_back({f16, 2, {70, 30}, {64, 10}, {1, 1}, swizzle, zero, {3, 25}});
    const std::vector<Case> loads = cases;
    for (Case c : loads) {
        c.what = 1;
        c.fill = zero;
        cases.push_back(c);
    }
    for (auto [type, operations] : {std::pair{u32, 0b11100}, {s32, 0b11100}, {u64, 0b11100}, {s64, 0b11100}, {f32, 0b00100}, {f64, 0b00100}})
        for (int what = 2; what <= 4; what++)
            if (operations >> what & 1) {
                cases.push_back({type, 2, {20, 12}, {8, 6}, {1, 1}, none, zero, {15, 8}, what});
                cases.push_back({type, 3, {20, 12, 4}, {4, 6, 2}, {1, 2, 1}, none, zero, {-2, 3, 3}, what});
            }
    for (const Case &c : cases) check(encode, c);
    refused(encode);
    puts("tensor_maps ok");
    return 0;
}

// The API of tensor maps: cuTensorMapEncodeTiled, cuTensorMapEncodeIm2col. Not supported: interleaved layouts, packed 4-bit and 6-bit elements, TF32 (PTX does
// not say how it is rounded), swizzles that flip 8 bytes, and boxes whose rows are shorter than the swizzle.
#include "driver/driver.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "config.h"
#include "engine/tensor_map.h"

namespace cudasim::driver {
namespace {

std::optional<ElementType> element_type(CUtensorMapDataType type) {
    switch (type) {
        case CU_TENSOR_MAP_DATA_TYPE_UINT8: return ElementType::u8;
        case CU_TENSOR_MAP_DATA_TYPE_UINT16: return ElementType::u16;
        case CU_TENSOR_MAP_DATA_TYPE_UINT32: return ElementType::u32;
        case CU_TENSOR_MAP_DATA_TYPE_INT32: return ElementType::s32;
        case CU_TENSOR_MAP_DATA_TYPE_UINT64: return ElementType::u64;
        case CU_TENSOR_MAP_DATA_TYPE_INT64: return ElementType::s64;
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT16: return ElementType::f16;
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: return ElementType::f32;
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return ElementType::f64;
        case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return ElementType::bf16;
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ: return ElementType::f32_ftz;
        default: return std::nullopt;
    }
}

bool is_float(ElementType type) { return type >= ElementType::f16; }

// Returns whether the swizzle allows the first dimension's size in bytes. Sets the swizzle of the map.
CUresult describe_swizzle(CUtensorMapSwizzle swizzle, uint64_t row, TensorMap &map) {
    map.swizzle = 7;
    switch (swizzle) {
        case CU_TENSOR_MAP_SWIZZLE_NONE: map.swizzle = 0; return CUDA_SUCCESS;
        case CU_TENSOR_MAP_SWIZZLE_32B: map.swizzle = 1; break;
        case CU_TENSOR_MAP_SWIZZLE_64B: map.swizzle = 3; break;
        case CU_TENSOR_MAP_SWIZZLE_128B: break;
        case CU_TENSOR_MAP_SWIZZLE_128B_ATOM_32B: map.atom = Atom::bytes32; break;
        case CU_TENSOR_MAP_SWIZZLE_128B_ATOM_64B: map.atom = Atom::bytes64; break;
        default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (map.atom != Atom::bytes16 && config().cc_major < 10) return CUDA_ERROR_NOT_SUPPORTED;
    const uint64_t span = 16 * (uint64_t{map.swizzle} + 1);
    if (row > span) return CUDA_ERROR_INVALID_VALUE;
    return row < span ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

// What both kinds of maps have.
struct Tensor {
    CUtensorMapDataType type;
    cuuint32_t rank;
    void *address;
    const cuuint64_t *dimensions, *strides;
    const cuuint32_t *steps;
    CUtensorMapInterleave interleave;
    CUtensorMapFloatOOBfill fill;
};

// Checks the arguments for a tensor and writes them to a map.
CUresult describe_tensor(const CUtensorMap *to, const Tensor &tensor, TensorMap &map) {
    if (CUresult status = check_initialized()) return status;
    if (config().cc_major < 9) return CUDA_ERROR_NOT_SUPPORTED;
    const auto base = reinterpret_cast<uint64_t>(tensor.address);
    if (to == nullptr || reinterpret_cast<uint64_t>(to) % 64 != 0 || tensor.rank == 0 ||
        tensor.rank > TensorMap::kMostDimensions)
        return CUDA_ERROR_INVALID_VALUE;
    if (base == 0 || base % 16 != 0 || tensor.dimensions == nullptr || tensor.steps == nullptr ||
        (tensor.strides == nullptr && tensor.rank > 1))
        return CUDA_ERROR_INVALID_VALUE;
    const std::optional<ElementType> element = element_type(tensor.type);
    if (!element || tensor.interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) return CUDA_ERROR_NOT_SUPPORTED;
    map.not_a_number = tensor.fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
    if (map.not_a_number && !is_float(*element)) return CUDA_ERROR_INVALID_VALUE;
    map.base = base;
    map.rank = static_cast<uint8_t>(tensor.rank);
    map.type = *element;
    for (cuuint32_t d = 0; d < tensor.rank; d++) {
        const cuuint64_t dimension = tensor.dimensions[d];
        if (dimension == 0 || dimension > uint64_t{1} << 32) return CUDA_ERROR_INVALID_VALUE;
        if (tensor.steps[d] == 0 || tensor.steps[d] > 8) return CUDA_ERROR_INVALID_VALUE;
        if (d > 0 && (tensor.strides[d - 1] % 16 != 0 || tensor.strides[d - 1] >= uint64_t{1} << 40))
            return CUDA_ERROR_INVALID_VALUE;
        map.last[d] = static_cast<uint32_t>(dimension - 1);
        map.steps[d] = static_cast<uint8_t>(tensor.steps[d]);
        if (d > 0) map.strides[d] = tensor.strides[d - 1];
    }
    return CUDA_SUCCESS;
}

// Checks the size of a row in shared memory and the swizzle, and writes the map.
CUresult write_map(CUtensorMap *to, TensorMap &map, CUtensorMapSwizzle swizzle) {
    const uint64_t row = uint64_t{map.box[0]} * bytes_of(map.type);
    if (row % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult status = describe_swizzle(swizzle, row, map)) return status;
    memset(to, 0, sizeof *to);
    memcpy(to, &map, sizeof map);
    return CUDA_SUCCESS;
}

}  // namespace
}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

CUresult cuTensorMapEncodeTiled(CUtensorMap *to, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dimensions, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
    TensorMap map;
    const Tensor tensor{type, rank, address, dimensions, strides, steps, interleave, fill};
    if (CUresult status = describe_tensor(to, tensor, map)) return status;
    if (box == nullptr) return CUDA_ERROR_INVALID_VALUE;
    for (cuuint32_t d = 0; d < rank; d++) {
        if (box[d] == 0 || box[d] > TensorMap::kMostElements) return CUDA_ERROR_INVALID_VALUE;
        map.box[d] = static_cast<uint16_t>(box[d]);
    }
    return write_map(to, map, swizzle);
}

// A step of the last dimension has no meaning that is documented. Only 1 is supported.
CUresult cuTensorMapEncodeIm2col(CUtensorMap *to, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                 const cuuint64_t *dimensions, const cuuint64_t *strides, const int *lower,
                                 const int *upper, cuuint32_t channels, cuuint32_t pixels,
                                 const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                 CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill fill) {
    TensorMap map;
    const Tensor tensor{type, rank, address, dimensions, strides, steps, interleave, fill};
    if (CUresult status = describe_tensor(to, tensor, map)) return status;
    if (rank < 3 || lower == nullptr || upper == nullptr || channels == 0 ||
        channels > TensorMap::kMostElements || pixels == 0 || pixels > TensorMap::kMostPixels)
        return CUDA_ERROR_INVALID_VALUE;
    if (steps[rank - 1] != 1) return CUDA_ERROR_NOT_SUPPORTED;
    const int most = rank == 3 ? 32767 : rank == 4 ? 127 : 15;
    for (cuuint32_t d = 1; d + 1 < rank; d++) {
        const int low = lower[d - 1], high = upper[d - 1];
        if (low < -most - 1 || low > most || high < -most - 1 || high > most ||
            int64_t{map.last[d]} + high < low)
            return CUDA_ERROR_INVALID_VALUE;
        map.lower[d - 1] = static_cast<int16_t>(low);
        map.upper[d - 1] = static_cast<int16_t>(high);
    }
    map.im2col = 1;
    std::fill_n(map.box, rank, uint16_t{1});
    map.box[0] = static_cast<uint16_t>(channels);
    map.box[1] = static_cast<uint16_t>(pixels);
    return write_map(to, map, swizzle);
}

CUresult cuTensorMapReplaceAddress(CUtensorMap *map, void *address) {
    if (CUresult status = check_initialized()) return status;
    TensorMap changed;
    if (map == nullptr || reinterpret_cast<uint64_t>(address) % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
    memcpy(static_cast<void *>(&changed), map, sizeof changed);
    if (changed.magic != TensorMap::kMagic) return CUDA_ERROR_INVALID_VALUE;
    changed.base = reinterpret_cast<uint64_t>(address);
    memcpy(map, &changed, sizeof changed);
    return CUDA_SUCCESS;
}

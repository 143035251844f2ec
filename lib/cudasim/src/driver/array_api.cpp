// The API of CUDA arrays: creating, describing and destroying them. Copies are in stream_api.cpp.
#include "driver/array.h"

#include <algorithm>

namespace cudasim::driver {

bool texel_type(CUarray_format format, TexelType &type) {
    switch (format) {
        case CU_AD_FORMAT_UNSIGNED_INT8: type = TexelType::u8; return true;
        case CU_AD_FORMAT_UNSIGNED_INT16: type = TexelType::u16; return true;
        case CU_AD_FORMAT_UNSIGNED_INT32: type = TexelType::u32; return true;
        case CU_AD_FORMAT_SIGNED_INT8: type = TexelType::s8; return true;
        case CU_AD_FORMAT_SIGNED_INT16: type = TexelType::s16; return true;
        case CU_AD_FORMAT_SIGNED_INT32: type = TexelType::s32; return true;
        case CU_AD_FORMAT_HALF: type = TexelType::f16; return true;
        case CU_AD_FORMAT_FLOAT: type = TexelType::f32; return true;
        default: return false;
    }
}

Array::~Array() { Memory::instance().release(level.base, id); }

namespace {

constexpr unsigned kFlags = CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_SURFACE_LDST | CUDA_ARRAY3D_CUBEMAP |
                            CUDA_ARRAY3D_TEXTURE_GATHER | CUDA_ARRAY3D_COLOR_ATTACHMENT;
// Sizes of arrays (CUDA programming guide, "Technical Specifications per Compute Capability").
constexpr size_t kMost1D = 131072, kMost2D = 131072, kMost2DHeight = 65536, kMost3D = 16384;
constexpr size_t kMostLayered = 32768, kMostLayers = 2048;

CUresult check_shape(const CUDA_ARRAY3D_DESCRIPTOR &described) {
    const size_t width = described.Width, height = described.Height, depth = described.Depth;
    const bool layered = (described.Flags & CUDA_ARRAY3D_LAYERED) != 0;
    if (width == 0) return CUDA_ERROR_INVALID_VALUE;
    if ((described.Flags & CUDA_ARRAY3D_CUBEMAP) != 0) {
        const bool faces = layered ? depth != 0 && depth % 6 == 0 : depth == 6;
        return faces && width == height && width <= kMostLayered && depth <= kMostLayers
                   ? CUDA_SUCCESS
                   : CUDA_ERROR_INVALID_VALUE;
    }
    if (layered)
        return depth != 0 && depth <= kMostLayers && width <= kMostLayered && height <= kMostLayered
                   ? CUDA_SUCCESS
                   : CUDA_ERROR_INVALID_VALUE;
    if (depth != 0 && height == 0) return CUDA_ERROR_INVALID_VALUE;
    if (depth != 0)
        return std::max({width, height, depth}) <= kMost3D ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (height != 0)
        return width <= kMost2D && height <= kMost2DHeight ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    return width <= kMost1D ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult make_array(const std::shared_ptr<Context> &context, const CUDA_ARRAY3D_DESCRIPTOR &described,
                    std::shared_ptr<Array> &array) {
    array = std::make_shared<Array>();
    array->context = context;
    array->described = described;
    if (!texel_type(described.Format, array->type) || (described.Flags & ~kFlags) != 0)
        return CUDA_ERROR_NOT_SUPPORTED;
    const unsigned channels = described.NumChannels;
    if (channels != 1 && channels != 2 && channels != 4) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult status = check_shape(described)) return status;
    TextureLevel &level = array->level;
    level.width = static_cast<uint32_t>(described.Width);
    level.height = static_cast<uint32_t>(std::max<size_t>(described.Height, 1));
    level.depth = static_cast<uint32_t>(std::max<size_t>(described.Depth, 1));
    level.pitch = described.Width * bytes_of(array->type) * channels;
    level.slice = level.pitch * level.height;
    level.base = Memory::instance().allocate(level.slice * level.depth, MemoryKind::device, context->device,
                                             context->handle);
    if (level.base == 0) return CUDA_ERROR_OUT_OF_MEMORY;
    array->id = Memory::instance().find(level.base)->id;
    return CUDA_SUCCESS;
}

// Waits until no work uses an array that is about to be destroyed.
CUresult finish_uses(const std::weak_ptr<Context> &owner) {
    std::shared_ptr<Context> context = owner.lock();
    if (!context || context->destroyed) return CUDA_SUCCESS;
    if (CUresult status = check_unsafe_call()) return status;
    if (on_worker_thread()) return CUDA_ERROR_NOT_PERMITTED;
    ExclusiveContext exclusive(context);
    drain(*context);
    return CUDA_SUCCESS;
}

}  // namespace
}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

CUresult cuArray3DCreate(CUarray *handle, const CUDA_ARRAY3D_DESCRIPTOR *described) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (handle == nullptr || described == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult status = check_unsafe_call()) return status;
    ExclusiveContext exclusive(context);
    std::shared_ptr<Array> array;
    if (CUresult status = make_array(context, *described, array)) return status;
    array->handle = tables().arrays.add(array);
    *handle = static_cast<CUarray>(array->handle);
    return CUDA_SUCCESS;
}

CUresult cuArrayCreate(CUarray *handle, const CUDA_ARRAY_DESCRIPTOR *flat) {
    if (flat == nullptr) return CUDA_ERROR_INVALID_VALUE;
    CUDA_ARRAY3D_DESCRIPTOR described{};
    described.Width = flat->Width;
    described.Height = flat->Height;
    described.Format = flat->Format;
    described.NumChannels = flat->NumChannels;
    return cuArray3DCreate(handle, &described);
}

CUresult cuArray3DGetDescriptor(CUDA_ARRAY3D_DESCRIPTOR *described, CUarray handle) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    std::shared_ptr<Array> array = tables().arrays.get(handle);
    if (!array) return CUDA_ERROR_INVALID_HANDLE;
    if (described == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *described = array->described;
    return CUDA_SUCCESS;
}

CUresult cuArrayGetDescriptor(CUDA_ARRAY_DESCRIPTOR *flat, CUarray handle) {
    CUDA_ARRAY3D_DESCRIPTOR described;
    if (CUresult status = cuArray3DGetDescriptor(&described, handle)) return status;
    if (flat == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *flat = {described.Width, described.Height, described.Format, described.NumChannels};
    return CUDA_SUCCESS;
}

CUresult cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *requirements, CUarray handle,
                                      CUdevice) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<Array> array = tables().arrays.get(handle);
    if (!array) return CUDA_ERROR_INVALID_HANDLE;
    if (requirements == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *requirements = {};
    requirements->size = array->level.slice * array->level.depth;
    requirements->alignment = 512;
    return CUDA_SUCCESS;
}

CUresult cuArrayDestroy(CUarray handle) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<Array> array = tables().arrays.get(handle);
    if (!array) return CUDA_ERROR_INVALID_HANDLE;
    if (array->part) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult status = finish_uses(array->context)) return status;
    tables().arrays.remove(handle);
    return CUDA_SUCCESS;
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *handle, const CUDA_ARRAY3D_DESCRIPTOR *described,
                                unsigned int levels) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (handle == nullptr || described == nullptr || levels == 0) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult status = check_unsafe_call()) return status;
    ExclusiveContext exclusive(context);
    auto mipmapped = std::make_shared<MipmappedArray>();
    CUDA_ARRAY3D_DESCRIPTOR size = *described;
    const bool slices_shrink = (size.Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) == 0;
    for (unsigned level = 0; level < levels; level++) {  // at most down to one texel
        std::shared_ptr<Array> array;
        if (CUresult status = make_array(context, size, array)) return status;
        array->part = true;
        mipmapped->levels.push_back(array);
        if (std::max({size.Width, size.Height, slices_shrink ? size.Depth : 1}) == 1) break;
        size.Width = std::max<size_t>(size.Width / 2, 1);
        if (size.Height != 0) size.Height = std::max<size_t>(size.Height / 2, 1);
        if (size.Depth != 0 && slices_shrink) size.Depth = std::max<size_t>(size.Depth / 2, 1);
    }
    for (const std::shared_ptr<Array> &array : mipmapped->levels) array->handle = tables().arrays.add(array);
    mipmapped->handle = tables().mipmapped_arrays.add(mipmapped);
    *handle = static_cast<CUmipmappedArray>(mipmapped->handle);
    return CUDA_SUCCESS;
}

CUresult cuMipmappedArrayGetLevel(CUarray *level, CUmipmappedArray handle, unsigned int number) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<MipmappedArray> mipmapped = tables().mipmapped_arrays.get(handle);
    if (!mipmapped) return CUDA_ERROR_INVALID_HANDLE;
    if (level == nullptr || number >= mipmapped->levels.size()) return CUDA_ERROR_INVALID_VALUE;
    *level = static_cast<CUarray>(mipmapped->levels[number]->handle);
    return CUDA_SUCCESS;
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray handle) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<MipmappedArray> mipmapped = tables().mipmapped_arrays.get(handle);
    if (!mipmapped) return CUDA_ERROR_INVALID_HANDLE;
    if (CUresult status = finish_uses(mipmapped->levels[0]->context)) return status;
    tables().mipmapped_arrays.remove(handle);
    for (const std::shared_ptr<Array> &array : mipmapped->levels) tables().arrays.remove(array->handle);
    return CUDA_SUCCESS;
}

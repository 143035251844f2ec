// CUDA arrays, texture objects and surface objects.
#include "runtime/runtime.h"

#include <algorithm>

using namespace cudasim::runtime;

namespace {

// Converts a channel format. Its channels must have the same number of bits.
cudaError_t driver_format(const cudaChannelFormatDesc &channels, CUarray_format &format, unsigned &count) {
    const int bits[] = {channels.x, channels.y, channels.z, channels.w};
    count = 0;
    while (count < 4 && bits[count] != 0) count++;
    if (count == 0 || count == 3) return cudaErrorInvalidChannelDescriptor;
    for (unsigned c = 0; c < 4; c++)
        if (bits[c] != (c < count ? channels.x : 0)) return cudaErrorInvalidChannelDescriptor;
    struct Known {
        cudaChannelFormatKind kind;
        int bits;
        CUarray_format format;
    };
    static constexpr Known known[] = {
        {cudaChannelFormatKindUnsigned, 8, CU_AD_FORMAT_UNSIGNED_INT8},
        {cudaChannelFormatKindUnsigned, 16, CU_AD_FORMAT_UNSIGNED_INT16},
        {cudaChannelFormatKindUnsigned, 32, CU_AD_FORMAT_UNSIGNED_INT32},
        {cudaChannelFormatKindSigned, 8, CU_AD_FORMAT_SIGNED_INT8},
        {cudaChannelFormatKindSigned, 16, CU_AD_FORMAT_SIGNED_INT16},
        {cudaChannelFormatKindSigned, 32, CU_AD_FORMAT_SIGNED_INT32},
        {cudaChannelFormatKindFloat, 16, CU_AD_FORMAT_HALF},
        {cudaChannelFormatKindFloat, 32, CU_AD_FORMAT_FLOAT},
    };
    for (const Known &one : known)
        if (one.kind == channels.f && one.bits == channels.x) {
            format = one.format;
            return cudaSuccess;
        }
    return channels.f > cudaChannelFormatKindNone ? cudaErrorNotSupported : cudaErrorInvalidChannelDescriptor;
}

cudaChannelFormatDesc channels_of(CUarray_format format, unsigned count) {
    cudaChannelFormatDesc channels{};
    int bits = 32;
    switch (format) {
        case CU_AD_FORMAT_UNSIGNED_INT8:
        case CU_AD_FORMAT_SIGNED_INT8: bits = 8; break;
        case CU_AD_FORMAT_UNSIGNED_INT16:
        case CU_AD_FORMAT_SIGNED_INT16:
        case CU_AD_FORMAT_HALF: bits = 16; break;
        default: break;
    }
    int *const fields[] = {&channels.x, &channels.y, &channels.z, &channels.w};
    for (unsigned c = 0; c < std::min(count, 4u); c++) *fields[c] = bits;
    switch (format) {
        case CU_AD_FORMAT_HALF:
        case CU_AD_FORMAT_FLOAT: channels.f = cudaChannelFormatKindFloat; break;
        case CU_AD_FORMAT_SIGNED_INT8:
        case CU_AD_FORMAT_SIGNED_INT16:
        case CU_AD_FORMAT_SIGNED_INT32: channels.f = cudaChannelFormatKindSigned; break;
        default: channels.f = cudaChannelFormatKindUnsigned; break;
    }
    return channels;
}

cudaError_t describe_array(const cudaChannelFormatDesc *channels, cudaExtent extent, unsigned flags,
                           CUDA_ARRAY3D_DESCRIPTOR &described) {
    if (channels == nullptr) return cudaErrorInvalidValue;
    described = {};
    described.Width = extent.width;
    described.Height = extent.height;
    described.Depth = extent.depth;
    described.Flags = flags;  // both APIs have the same numbers
    return driver_format(*channels, described.Format, described.NumChannels);
}

cudaError_t make_array(cudaArray_t *array, const cudaChannelFormatDesc *channels, cudaExtent extent,
                       unsigned flags) {
    ENSURE_CONTEXT();
    CUDA_ARRAY3D_DESCRIPTOR described;
    if (array == nullptr) return record_error(cudaErrorInvalidValue);
    if (cudaError_t error = describe_array(channels, extent, flags, described)) return record_error(error);
    return record_error(cu().Array3DCreate(reinterpret_cast<CUarray *>(array), &described));
}

cudaError_t driver_resource(const cudaResourceDesc &resource, CUDA_RESOURCE_DESC &described) {
    described = {};
    described.flags = resource.flags;
    switch (resource.resType) {
        case cudaResourceTypeArray:
            described.resType = CU_RESOURCE_TYPE_ARRAY;
            described.res.array.hArray = reinterpret_cast<CUarray>(resource.res.array.array);
            return cudaSuccess;
        case cudaResourceTypeMipmappedArray:
            described.resType = CU_RESOURCE_TYPE_MIPMAPPED_ARRAY;
            described.res.mipmap.hMipmappedArray =
                reinterpret_cast<CUmipmappedArray>(resource.res.mipmap.mipmap);
            return cudaSuccess;
        case cudaResourceTypeLinear:
            described.resType = CU_RESOURCE_TYPE_LINEAR;
            described.res.linear.devPtr = device_pointer(resource.res.linear.devPtr);
            described.res.linear.sizeInBytes = resource.res.linear.sizeInBytes;
            return driver_format(resource.res.linear.desc, described.res.linear.format,
                                 described.res.linear.numChannels);
        case cudaResourceTypePitch2D:
            described.resType = CU_RESOURCE_TYPE_PITCH2D;
            described.res.pitch2D.devPtr = device_pointer(resource.res.pitch2D.devPtr);
            described.res.pitch2D.width = resource.res.pitch2D.width;
            described.res.pitch2D.height = resource.res.pitch2D.height;
            described.res.pitch2D.pitchInBytes = resource.res.pitch2D.pitchInBytes;
            return driver_format(resource.res.pitch2D.desc, described.res.pitch2D.format,
                                 described.res.pitch2D.numChannels);
    }
    return cudaErrorInvalidValue;
}

cudaResourceDesc runtime_resource(const CUDA_RESOURCE_DESC &described) {
    cudaResourceDesc resource{};
    resource.flags = described.flags;
    resource.resType = static_cast<cudaResourceType>(described.resType);  // both APIs have the same numbers
    switch (described.resType) {
        case CU_RESOURCE_TYPE_ARRAY:
            resource.res.array.array = reinterpret_cast<cudaArray_t>(described.res.array.hArray);
            break;
        case CU_RESOURCE_TYPE_MIPMAPPED_ARRAY:
            resource.res.mipmap.mipmap =
                reinterpret_cast<cudaMipmappedArray_t>(described.res.mipmap.hMipmappedArray);
            break;
        case CU_RESOURCE_TYPE_LINEAR:
            resource.res.linear.devPtr = reinterpret_cast<void *>(described.res.linear.devPtr);
            resource.res.linear.desc =
                channels_of(described.res.linear.format, described.res.linear.numChannels);
            resource.res.linear.sizeInBytes = described.res.linear.sizeInBytes;
            break;
        default:
            resource.res.pitch2D.devPtr = reinterpret_cast<void *>(described.res.pitch2D.devPtr);
            resource.res.pitch2D.desc =
                channels_of(described.res.pitch2D.format, described.res.pitch2D.numChannels);
            resource.res.pitch2D.width = described.res.pitch2D.width;
            resource.res.pitch2D.height = described.res.pitch2D.height;
            resource.res.pitch2D.pitchInBytes = described.res.pitch2D.pitchInBytes;
            break;
    }
    return resource;
}

// Finds the channels that a texture has. Those of a view are reported as one.
cudaError_t resource_channels(const CUDA_RESOURCE_DESC &resource, const cudaResourceViewDesc *view,
                              cudaChannelFormatDesc &channels) {
    if (view != nullptr && view->format != cudaResViewFormatNone) {  // in groups of 1, 2 and 4 channels
        static constexpr CUarray_format formats[] = {CU_AD_FORMAT_UNSIGNED_INT8,  CU_AD_FORMAT_SIGNED_INT8,
                                                     CU_AD_FORMAT_UNSIGNED_INT16, CU_AD_FORMAT_SIGNED_INT16,
                                                     CU_AD_FORMAT_UNSIGNED_INT32, CU_AD_FORMAT_SIGNED_INT32,
                                                     CU_AD_FORMAT_HALF,           CU_AD_FORMAT_FLOAT};
        if (view->format > cudaResViewFormatFloat4) return cudaErrorNotSupported;
        channels = channels_of(formats[(view->format - 1) / 3], 1);
        return cudaSuccess;
    }
    if (resource.resType == CU_RESOURCE_TYPE_LINEAR || resource.resType == CU_RESOURCE_TYPE_PITCH2D) {
        channels = resource.resType == CU_RESOURCE_TYPE_LINEAR
                       ? channels_of(resource.res.linear.format, resource.res.linear.numChannels)
                       : channels_of(resource.res.pitch2D.format, resource.res.pitch2D.numChannels);
        return cudaSuccess;
    }
    CUarray array = resource.res.array.hArray;
    if (resource.resType == CU_RESOURCE_TYPE_MIPMAPPED_ARRAY)
        if (CUresult status = cu().MipmappedArrayGetLevel(&array, resource.res.mipmap.hMipmappedArray, 0))
            return static_cast<cudaError_t>(status);
    CUDA_ARRAY3D_DESCRIPTOR described;
    if (CUresult status = cu().Array3DGetDescriptor(&described, array))
        return static_cast<cudaError_t>(status);
    channels = channels_of(described.Format, described.NumChannels);
    return cudaSuccess;
}

CUDA_RESOURCE_VIEW_DESC driver_view(const cudaResourceViewDesc &view) {
    CUDA_RESOURCE_VIEW_DESC described{};
    described.format = static_cast<CUresourceViewFormat>(view.format);  // both APIs have the same numbers
    described.width = view.width;
    described.height = view.height;
    described.depth = view.depth;
    described.firstMipmapLevel = view.firstMipmapLevel;
    described.lastMipmapLevel = view.lastMipmapLevel;
    described.firstLayer = view.firstLayer;
    described.lastLayer = view.lastLayer;
    return described;
}

}  // namespace

extern "C" {

// ---------------------------------------------------------------------------------------------------- arrays

cudaError_t cudaMallocArray(cudaArray_t *array, const struct cudaChannelFormatDesc *channels, size_t width,
                            size_t height, unsigned int flags) {
    return make_array(array, channels, {width, height, 0}, flags);
}

cudaError_t cudaMalloc3DArray(cudaArray_t *array, const struct cudaChannelFormatDesc *channels,
                              struct cudaExtent extent, unsigned int flags) {
    return make_array(array, channels, extent, flags);
}

cudaError_t cudaFreeArray(cudaArray_t array) {
    ENSURE_CONTEXT();
    if (array == nullptr) return cudaSuccess;
    return record_error(cu().ArrayDestroy(reinterpret_cast<CUarray>(array)));
}

cudaError_t cudaArrayGetInfo(struct cudaChannelFormatDesc *channels, struct cudaExtent *extent,
                             unsigned int *flags, cudaArray_t array) {
    ENSURE_CONTEXT();
    CUDA_ARRAY3D_DESCRIPTOR described;
    size_t element = 0;
    if (cudaError_t error = find_array(array, described, element)) return record_error(error);
    if (channels != nullptr) *channels = channels_of(described.Format, described.NumChannels);
    if (extent != nullptr) *extent = {described.Width, described.Height, described.Depth};
    if (flags != nullptr) *flags = described.Flags;
    return cudaSuccess;
}

cudaError_t cudaGetChannelDesc(struct cudaChannelFormatDesc *channels, cudaArray_const_t array) {
    if (channels == nullptr) return record_error(cudaErrorInvalidValue);
    return cudaArrayGetInfo(channels, nullptr, nullptr, const_cast<cudaArray_t>(array));
}

cudaError_t cudaArrayGetMemoryRequirements(struct cudaArrayMemoryRequirements *requirements,
                                           cudaArray_t array, int device) {
    ENSURE_CONTEXT();
    if (requirements == nullptr) return record_error(cudaErrorInvalidValue);
    CUDA_ARRAY_MEMORY_REQUIREMENTS found{};
    CUresult status = cu().ArrayGetMemoryRequirements(&found, reinterpret_cast<CUarray>(array), device);
    *requirements = {};
    requirements->size = found.size;
    requirements->alignment = found.alignment;
    return record_error(status);
}

cudaError_t cudaMallocMipmappedArray(cudaMipmappedArray_t *mipmapped,
                                     const struct cudaChannelFormatDesc *channels, struct cudaExtent extent,
                                     unsigned int levels, unsigned int flags) {
    ENSURE_CONTEXT();
    CUDA_ARRAY3D_DESCRIPTOR described;
    if (mipmapped == nullptr) return record_error(cudaErrorInvalidValue);
    if (cudaError_t error = describe_array(channels, extent, flags, described)) return record_error(error);
    return record_error(
        cu().MipmappedArrayCreate(reinterpret_cast<CUmipmappedArray *>(mipmapped), &described, levels));
}

cudaError_t cudaGetMipmappedArrayLevel(cudaArray_t *level, cudaMipmappedArray_const_t mipmapped,
                                       unsigned int number) {
    ENSURE_CONTEXT();
    return record_error(cu().MipmappedArrayGetLevel(
        reinterpret_cast<CUarray *>(level),
        reinterpret_cast<CUmipmappedArray>(const_cast<cudaMipmappedArray_t>(mipmapped)), number));
}

cudaError_t cudaFreeMipmappedArray(cudaMipmappedArray_t mipmapped) {
    ENSURE_CONTEXT();
    if (mipmapped == nullptr) return cudaSuccess;
    return record_error(cu().MipmappedArrayDestroy(reinterpret_cast<CUmipmappedArray>(mipmapped)));
}

cudaError_t cudaDeviceGetTexture1DLinearMaxWidth(size_t *width, const struct cudaChannelFormatDesc *channels,
                                                 int device) {
    ENSURE_DRIVER();
    CUarray_format format;
    unsigned count;
    if (channels == nullptr) return record_error(cudaErrorInvalidValue);
    if (cudaError_t error = driver_format(*channels, format, count)) return record_error(error);
    return record_error(cu().DeviceGetTexture1DLinearMaxWidth(width, format, count, device));
}

// ---------------------------------------------------------------------------------------------------- textures, surfaces

cudaError_t cudaCreateTextureObject(cudaTextureObject_t *texture, const struct cudaResourceDesc *resource,
                                    const struct cudaTextureDesc *texturing,
                                    const struct cudaResourceViewDesc *view) {
    ENSURE_CONTEXT();
    if (texture == nullptr || resource == nullptr || texturing == nullptr)
        return record_error(cudaErrorInvalidValue);
    CUDA_RESOURCE_DESC described;
    if (cudaError_t error = driver_resource(*resource, described)) return record_error(error);
    cudaChannelFormatDesc channels;
    if (cudaError_t error = resource_channels(described, view, channels)) return record_error(error);
    const bool integers = channels.f != cudaChannelFormatKindFloat;
    const bool as_float = texturing->readMode == cudaReadModeNormalizedFloat;
    if (integers && as_float && channels.x == 32) return record_error(cudaErrorInvalidNormSetting);
    if (integers && !as_float && texturing->filterMode == cudaFilterModeLinear)
        return record_error(cudaErrorInvalidFilterSetting);
    CUDA_TEXTURE_DESC sampling{};
    for (int d = 0; d < 3; d++)
        sampling.addressMode[d] = static_cast<CUaddress_mode>(texturing->addressMode[d]);
    sampling.filterMode = static_cast<CUfilter_mode>(texturing->filterMode);
    if (integers && !as_float) sampling.flags |= CU_TRSF_READ_AS_INTEGER;
    if (texturing->normalizedCoords != 0) sampling.flags |= CU_TRSF_NORMALIZED_COORDINATES;
    if (texturing->sRGB != 0) sampling.flags |= CU_TRSF_SRGB;
    if (texturing->disableTrilinearOptimization != 0)
        sampling.flags |= CU_TRSF_DISABLE_TRILINEAR_OPTIMIZATION;
    if (texturing->seamlessCubemap != 0) sampling.flags |= CU_TRSF_SEAMLESS_CUBEMAP;
    sampling.maxAnisotropy = texturing->maxAnisotropy;
    sampling.mipmapFilterMode = static_cast<CUfilter_mode>(texturing->mipmapFilterMode);
    sampling.mipmapLevelBias = texturing->mipmapLevelBias;
    sampling.minMipmapLevelClamp = texturing->minMipmapLevelClamp;
    sampling.maxMipmapLevelClamp = texturing->maxMipmapLevelClamp;
    std::copy_n(texturing->borderColor, 4, sampling.borderColor);
    CUDA_RESOURCE_VIEW_DESC viewed{};
    if (view != nullptr) viewed = driver_view(*view);
    CUtexObject object = 0;
    CUresult status =
        cu().TexObjectCreate(&object, &described, &sampling, view != nullptr ? &viewed : nullptr);
    if (status == CUDA_SUCCESS) *texture = object;
    return record_error(status);
}

cudaError_t cudaDestroyTextureObject(cudaTextureObject_t texture) {
    ENSURE_CONTEXT();
    return record_error(cu().TexObjectDestroy(texture));
}

cudaError_t cudaGetTextureObjectResourceDesc(struct cudaResourceDesc *resource, cudaTextureObject_t texture) {
    ENSURE_CONTEXT();
    if (resource == nullptr) return record_error(cudaErrorInvalidValue);
    CUDA_RESOURCE_DESC described{};
    CUresult status = cu().TexObjectGetResourceDesc(&described, texture);
    if (status == CUDA_SUCCESS) *resource = runtime_resource(described);
    return record_error(status);
}

cudaError_t cudaGetTextureObjectTextureDesc(struct cudaTextureDesc *texturing, cudaTextureObject_t texture) {
    ENSURE_CONTEXT();
    if (texturing == nullptr) return record_error(cudaErrorInvalidValue);
    CUDA_TEXTURE_DESC sampling{};
    CUDA_RESOURCE_DESC described{};
    if (CUresult status = cu().TexObjectGetTextureDesc(&sampling, texture)) return record_error(status);
    if (CUresult status = cu().TexObjectGetResourceDesc(&described, texture)) return record_error(status);
    cudaChannelFormatDesc channels;
    if (cudaError_t error = resource_channels(described, nullptr, channels)) return record_error(error);
    *texturing = {};
    for (int d = 0; d < 3; d++)
        texturing->addressMode[d] = static_cast<cudaTextureAddressMode>(sampling.addressMode[d]);
    texturing->filterMode = static_cast<cudaTextureFilterMode>(sampling.filterMode);
    const bool as_float =
        channels.f != cudaChannelFormatKindFloat && (sampling.flags & CU_TRSF_READ_AS_INTEGER) == 0;
    texturing->readMode = as_float ? cudaReadModeNormalizedFloat : cudaReadModeElementType;
    texturing->sRGB = (sampling.flags & CU_TRSF_SRGB) != 0;
    std::copy_n(sampling.borderColor, 4, texturing->borderColor);
    texturing->normalizedCoords = (sampling.flags & CU_TRSF_NORMALIZED_COORDINATES) != 0;
    texturing->maxAnisotropy = sampling.maxAnisotropy;
    texturing->mipmapFilterMode = static_cast<cudaTextureFilterMode>(sampling.mipmapFilterMode);
    texturing->mipmapLevelBias = sampling.mipmapLevelBias;
    texturing->minMipmapLevelClamp = sampling.minMipmapLevelClamp;
    texturing->maxMipmapLevelClamp = sampling.maxMipmapLevelClamp;
    texturing->seamlessCubemap = (sampling.flags & CU_TRSF_SEAMLESS_CUBEMAP) != 0;
    texturing->disableTrilinearOptimization = (sampling.flags & CU_TRSF_DISABLE_TRILINEAR_OPTIMIZATION) != 0;
    return cudaSuccess;
}

cudaError_t cudaGetTextureObjectResourceViewDesc(struct cudaResourceViewDesc *view,
                                                 cudaTextureObject_t texture) {
    ENSURE_CONTEXT();
    if (view == nullptr) return record_error(cudaErrorInvalidValue);
    CUDA_RESOURCE_VIEW_DESC found{};
    if (CUresult status = cu().TexObjectGetResourceViewDesc(&found, texture)) return record_error(status);
    *view = {};
    view->format = static_cast<cudaResourceViewFormat>(found.format);
    view->width = found.width;
    view->height = found.height;
    view->depth = found.depth;
    view->firstMipmapLevel = found.firstMipmapLevel;
    view->lastMipmapLevel = found.lastMipmapLevel;
    view->firstLayer = found.firstLayer;
    view->lastLayer = found.lastLayer;
    return cudaSuccess;
}

cudaError_t cudaCreateSurfaceObject(cudaSurfaceObject_t *surface, const struct cudaResourceDesc *resource) {
    ENSURE_CONTEXT();
    if (surface == nullptr || resource == nullptr) return record_error(cudaErrorInvalidValue);
    CUDA_RESOURCE_DESC described;
    if (cudaError_t error = driver_resource(*resource, described)) return record_error(error);
    CUsurfObject object = 0;
    CUresult status = cu().SurfObjectCreate(&object, &described);
    if (status == CUDA_SUCCESS) *surface = object;
    return record_error(status);
}

cudaError_t cudaDestroySurfaceObject(cudaSurfaceObject_t surface) {
    ENSURE_CONTEXT();
    return record_error(cu().SurfObjectDestroy(surface));
}

cudaError_t cudaGetSurfaceObjectResourceDesc(struct cudaResourceDesc *resource, cudaSurfaceObject_t surface) {
    ENSURE_CONTEXT();
    if (resource == nullptr) return record_error(cudaErrorInvalidValue);
    CUDA_RESOURCE_DESC described{};
    CUresult status = cu().SurfObjectGetResourceDesc(&described, surface);
    if (status == CUDA_SUCCESS) *resource = runtime_resource(described);
    return record_error(status);
}

}  // extern "C"

// The API of texture and surface objects.
#include "driver/array.h"

#include <algorithm>
#include <deque>

namespace cudasim::driver {
namespace {

struct TextureObject {
    Texture texture;
    CUDA_RESOURCE_DESC resource{};
    CUDA_TEXTURE_DESC described{};
    CUDA_RESOURCE_VIEW_DESC view{};
};

// The objects of the process by handle, which is a small number, as on a GPU. A kernel looks up the handle of each fetch
// without a lock. In hostile mode, the handle of a destroyed object is reused at once, otherwise as late as possible.
class Objects {
  public:
    static Objects &instance() {
        static Objects *const instance = new Objects();
        return *instance;
    }

    const Texture *find(uint64_t handle) const {
        if (handle == 0 || handle > kMost) return nullptr;
        const TextureObject *found = slots_[handle - 1].load(std::memory_order_acquire);
        return found == nullptr ? nullptr : &found->texture;
    }

    uint64_t add(std::unique_ptr<TextureObject> object) {  // 0: there are too many
        std::lock_guard lock(mutex_);
        uint64_t handle = 0;
        if (next_ <= kMost && (unused_.empty() || !config().hostile)) {
            handle = next_++;
        } else if (!unused_.empty()) {
            handle = config().hostile ? unused_.back() : unused_.front();
            config().hostile ? unused_.pop_back() : unused_.pop_front();
        }
        if (handle != 0) slots_[handle - 1].store(object.release(), std::memory_order_release);
        return handle;
    }

    // Copies what an object was made of. Returns false if there is no such object.
    bool describe(uint64_t handle, bool surface, TextureObject &object) const {
        std::lock_guard lock(mutex_);
        const Texture *found = find(handle);
        if (found == nullptr || found->surface != surface) return false;
        object = *slots_[handle - 1].load();
        return true;
    }

    bool remove(uint64_t handle, bool surface) {
        std::lock_guard lock(mutex_);
        const Texture *found = find(handle);
        if (found == nullptr || found->surface != surface) return false;
        delete slots_[handle - 1].exchange(nullptr);
        unused_.push_back(handle);
        return true;
    }

  private:
    static constexpr uint64_t kMost = uint64_t{1} << 20;
    mutable std::mutex mutex_;
    static inline std::atomic<const TextureObject *> slots_[kMost];
    uint64_t next_ = 1;
    std::deque<uint64_t> unused_;
};

// Describes memory that is not an array. `height` 0: linear memory of `width` texels.
CUresult describe_memory(Texture &texture, CUdeviceptr address, CUarray_format format, unsigned channels,
                         size_t width, size_t height, size_t pitch) {
    if (!texel_type(format, texture.type)) return CUDA_ERROR_NOT_SUPPORTED;
    if (channels != 1 && channels != 2 && channels != 4) return CUDA_ERROR_INVALID_VALUE;
    texture.channels = channels;
    texture.linear = height == 0;
    // The limits are those of attributes such as CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_WIDTH.
    const bool too_large = texture.linear ? width > (size_t{1} << 28) : width > 131072 || height > 65000;
    constexpr size_t kPitchAlignment = 32;
    if (width == 0 || too_large || address % bytes_of(texture.type) != 0) return CUDA_ERROR_INVALID_VALUE;
    if (!texture.linear && (pitch < width * texture.texel_bytes() || pitch % kPitchAlignment != 0))
        return CUDA_ERROR_INVALID_VALUE;
    const size_t row = width * texture.texel_bytes();
    if (CUresult status = check_range(address, texture.linear ? row : (height - 1) * pitch + row))
        return status;
    TextureLevel level;
    level.base = address;
    level.width = static_cast<uint32_t>(width);
    level.height = static_cast<uint32_t>(std::max<size_t>(height, 1));
    level.pitch = pitch;
    texture.levels = {level};
    return CUDA_SUCCESS;
}

void describe_array(Texture &texture, const Array &array) {
    texture.type = array.type;
    texture.channels = array.described.NumChannels;
    texture.layered = (array.described.Flags & CUDA_ARRAY3D_LAYERED) != 0;
    texture.cube = (array.described.Flags & CUDA_ARRAY3D_CUBEMAP) != 0;
    texture.levels.push_back(array.level);
}

CUresult describe_resource(Texture &texture, const CUDA_RESOURCE_DESC &resource) {
    if (resource.flags != 0) return CUDA_ERROR_INVALID_VALUE;
    switch (resource.resType) {
        case CU_RESOURCE_TYPE_ARRAY: {
            std::shared_ptr<Array> array = tables().arrays.get(resource.res.array.hArray);
            if (!array) return CUDA_ERROR_INVALID_HANDLE;
            // cuda-samples' bindlessTexture writes to levels of a mipmapped array that was created without the flag.
            if (texture.surface && !array->part && (array->described.Flags & CUDA_ARRAY3D_SURFACE_LDST) == 0)
                return CUDA_ERROR_INVALID_VALUE;
            describe_array(texture, *array);
            return CUDA_SUCCESS;
        }
        case CU_RESOURCE_TYPE_MIPMAPPED_ARRAY: {
            std::shared_ptr<MipmappedArray> mipmapped =
                tables().mipmapped_arrays.get(resource.res.mipmap.hMipmappedArray);
            if (!mipmapped) return CUDA_ERROR_INVALID_HANDLE;
            for (const std::shared_ptr<Array> &array : mipmapped->levels) describe_array(texture, *array);
            return CUDA_SUCCESS;
        }
        case CU_RESOURCE_TYPE_LINEAR: {
            const auto &linear = resource.res.linear;
            TexelType type;
            if (!texel_type(linear.format, type)) return CUDA_ERROR_NOT_SUPPORTED;
            const size_t texel = size_t{bytes_of(type)} * std::max(linear.numChannels, 1u);
            return describe_memory(texture, linear.devPtr, linear.format, linear.numChannels,
                                   linear.sizeInBytes / texel, 0, 0);
        }
        case CU_RESOURCE_TYPE_PITCH2D: {
            const auto &pitched = resource.res.pitch2D;
            if (pitched.height == 0) return CUDA_ERROR_INVALID_VALUE;
            return describe_memory(texture, pitched.devPtr, pitched.format, pitched.numChannels,
                                   pitched.width, pitched.height, pitched.pitchInBytes);
        }
        default: return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult describe_sampling(Texture &texture, const CUDA_TEXTURE_DESC &described) {
    constexpr unsigned known = CU_TRSF_READ_AS_INTEGER | CU_TRSF_NORMALIZED_COORDINATES | CU_TRSF_SRGB |
                               CU_TRSF_DISABLE_TRILINEAR_OPTIMIZATION | CU_TRSF_SEAMLESS_CUBEMAP;
    if ((described.flags & ~known) != 0) return CUDA_ERROR_INVALID_VALUE;
    // A filter that reads across the edges of a cubemap is not supported.
    if (texture.cube && (described.flags & CU_TRSF_SEAMLESS_CUBEMAP) != 0 &&
        described.filterMode == CU_TR_FILTER_MODE_LINEAR)
        return CUDA_ERROR_NOT_SUPPORTED;
    const bool small = bytes_of(texture.type) < 4 && texture.type != TexelType::f16;
    texture.as_float = small && (described.flags & CU_TRSF_READ_AS_INTEGER) == 0;
    texture.normalized = (described.flags & CU_TRSF_NORMALIZED_COORDINATES) != 0;
    texture.srgb = texture.as_float && texture.type == TexelType::u8 && (described.flags & CU_TRSF_SRGB) != 0;
    texture.filter = described.filterMode == CU_TR_FILTER_MODE_LINEAR;
    texture.filter_levels = described.mipmapFilterMode == CU_TR_FILTER_MODE_LINEAR;
    texture.bias = described.mipmapLevelBias;
    texture.lowest_level = described.minMipmapLevelClamp;
    texture.highest_level = described.maxMipmapLevelClamp;
    std::copy_n(described.borderColor, 4, texture.border);
    bool border = false;
    for (int d = 0; d < 3; d++) {
        if (described.addressMode[d] > CU_TR_ADDRESS_MODE_BORDER) return CUDA_ERROR_INVALID_VALUE;
        texture.address[d] = static_cast<AddressMode>(described.addressMode[d]);
        border = border || texture.address[d] == AddressMode::border;
    }
    const bool floats = texture.as_float || texture.type == TexelType::f16 || texture.type == TexelType::f32;
    if (texture.filter && !floats) return CUDA_ERROR_INVALID_VALUE;
    // How a border color becomes an integer is not documented.
    if (border && !floats && std::any_of(texture.border, texture.border + 4, [](float c) { return c != 0; }))
        return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

// The formats of a view that are not block-compressed are in groups of 1, 2 and 4 channels.
CUresult describe_view(Texture &texture, const CUDA_RESOURCE_VIEW_DESC &view) {
    static constexpr TexelType types[] = {TexelType::u8,  TexelType::s8,  TexelType::u16, TexelType::s16,
                                          TexelType::u32, TexelType::s32, TexelType::f16, TexelType::f32};
    if (view.format > CU_RES_VIEW_FORMAT_FLOAT_4X32) return CUDA_ERROR_NOT_SUPPORTED;
    if (view.format != CU_RES_VIEW_FORMAT_NONE) {
        const unsigned number = view.format - 1, before = texture.texel_bytes();
        texture.type = types[number / 3];
        texture.channels = 1u << number % 3;
        if (texture.texel_bytes() != before) return CUDA_ERROR_INVALID_VALUE;
    }
    const TextureLevel &largest = texture.levels[0];
    if (view.firstMipmapLevel > view.lastMipmapLevel || view.lastMipmapLevel >= texture.levels.size() ||
        view.firstLayer > view.lastLayer || (view.lastLayer != 0 && view.lastLayer >= largest.depth))
        return CUDA_ERROR_INVALID_VALUE;
    texture.levels = {texture.levels.begin() + view.firstMipmapLevel,
                      texture.levels.begin() + view.lastMipmapLevel + 1};
    if (!texture.layered && !texture.cube) return CUDA_SUCCESS;
    for (TextureLevel &level : texture.levels) {
        level.base += view.firstLayer * level.slice;
        level.depth = view.lastLayer - view.firstLayer + 1;
    }
    return CUDA_SUCCESS;
}

template <class Part>
CUresult get_part(uint64_t handle, bool surface, Part TextureObject::*part, Part *value) {
    if (CUresult status = check_initialized()) return status;
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    TextureObject object;
    if (!Objects::instance().describe(handle, surface, object)) return CUDA_ERROR_INVALID_VALUE;
    *value = object.*part;
    return CUDA_SUCCESS;
}

CUresult destroy(uint64_t handle, bool surface) {
    if (CUresult status = check_initialized()) return status;
    if (on_worker_thread()) return CUDA_ERROR_NOT_PERMITTED;
    if (handle == 0)
        return CUDA_SUCCESS;  // cuda-samples' volumeFiltering destroys a surface that it never made
    TextureObject object;
    if (!Objects::instance().describe(handle, surface, object)) return CUDA_ERROR_INVALID_VALUE;
    for (const std::shared_ptr<Context> &context : tables().contexts.all())
        drain(*context);  // running kernels may still use it
    return Objects::instance().remove(handle, surface) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

const Texture *find_texture(void *, uint64_t handle) { return Objects::instance().find(handle); }

}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

CUresult cuTexObjectCreate(CUtexObject *handle, const CUDA_RESOURCE_DESC *resource,
                           const CUDA_TEXTURE_DESC *described, const CUDA_RESOURCE_VIEW_DESC *view) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (handle == nullptr || resource == nullptr || described == nullptr) return CUDA_ERROR_INVALID_VALUE;
    auto object = std::make_unique<TextureObject>();
    object->resource = *resource;
    object->described = *described;
    Texture &texture = object->texture;
    if (CUresult status = describe_resource(texture, *resource)) return status;
    if (view != nullptr) {
        object->view = *view;
        if (CUresult status = describe_view(texture, *view)) return status;
    }
    if (CUresult status = describe_sampling(texture, *described)) return status;
    *handle = Objects::instance().add(std::move(object));
    return *handle != 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuTexObjectDestroy(CUtexObject handle) { return destroy(handle, false); }

CUresult cuTexObjectGetResourceDesc(CUDA_RESOURCE_DESC *resource, CUtexObject handle) {
    return get_part(handle, false, &TextureObject::resource, resource);
}

CUresult cuTexObjectGetTextureDesc(CUDA_TEXTURE_DESC *described, CUtexObject handle) {
    return get_part(handle, false, &TextureObject::described, described);
}

CUresult cuTexObjectGetResourceViewDesc(CUDA_RESOURCE_VIEW_DESC *view, CUtexObject handle) {
    return get_part(handle, false, &TextureObject::view, view);
}

CUresult cuSurfObjectCreate(CUsurfObject *handle, const CUDA_RESOURCE_DESC *resource) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (handle == nullptr || resource == nullptr || resource->resType != CU_RESOURCE_TYPE_ARRAY)
        return CUDA_ERROR_INVALID_VALUE;
    auto object = std::make_unique<TextureObject>();
    object->resource = *resource;
    object->texture.surface = true;
    if (CUresult status = describe_resource(object->texture, *resource)) return status;
    *handle = Objects::instance().add(std::move(object));
    return *handle != 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuSurfObjectDestroy(CUsurfObject handle) { return destroy(handle, true); }

CUresult cuSurfObjectGetResourceDesc(CUDA_RESOURCE_DESC *resource, CUsurfObject handle) {
    return get_part(handle, true, &TextureObject::resource, resource);
}

CUresult cuDeviceGetTexture1DLinearMaxWidth(size_t *width, CUarray_format format, unsigned channels,
                                            CUdevice device) {
    if (CUresult status = check_initialized()) return status;
    TexelType type;
    if (width == nullptr || (channels != 1 && channels != 2 && channels != 4) || !texel_type(format, type))
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *width = size_t{1} << 28;
    return CUDA_SUCCESS;
}

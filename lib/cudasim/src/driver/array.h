// CUDA arrays and the objects that kernels read and write them through.
#pragma once

#include "driver/driver.h"

namespace cudasim::driver {

// A CUDA array. Its texels lie row by row in device memory, without gaps. A layer of a layered array is a slice.
struct Array {
    std::weak_ptr<Context> context;
    void *handle = nullptr;
    CUDA_ARRAY3D_DESCRIPTOR described{};
    TexelType type = TexelType::f32;
    TextureLevel level;
    uint64_t id = 0;    // of its allocation
    bool part = false;  // a level of a mipmapped array, which must not be destroyed alone
    ~Array();
};

struct MipmappedArray {
    void *handle = nullptr;
    std::vector<std::shared_ptr<Array>> levels;
};

// Finds the texel type of a format. Returns false for formats that the device does not support.
bool texel_type(CUarray_format format, TexelType &type);

// Called for kernels. Returns the texture or surface that a handle names, or null.
const Texture *find_texture(void *, uint64_t handle);

}  // namespace cudasim::driver

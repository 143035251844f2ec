// The runtime's calls whose meaning depends on the default stream. Compiled twice, like driver/stream_api.cpp: with
// CUDA_API_PER_THREAD_DEFAULT_STREAM the header renames them to their _ptds and _ptsz variants.
#include "runtime/runtime.h"

#include <algorithm>

using namespace cudasim::runtime;

namespace {

#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
#define EXPORTED(name) name##_ptsz
#else
#define EXPORTED(name) name
#endif

cudaError_t copy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    ENSURE_CONTEXT();
    if (bytes == 0) return cudaSuccess;
    switch (kind) {
        case cudaMemcpyHostToDevice: return record_error(cu().MemcpyHtoD(device_pointer(to), from, bytes));
        case cudaMemcpyDeviceToHost: return record_error(cu().MemcpyDtoH(to, device_pointer(from), bytes));
        case cudaMemcpyDeviceToDevice:
            return record_error(cu().MemcpyDtoD(device_pointer(to), device_pointer(from), bytes));
        case cudaMemcpyHostToHost:
        case cudaMemcpyDefault:
            return record_error(cu().Memcpy(device_pointer(to), device_pointer(from), bytes));
    }
    return record_error(cudaErrorInvalidMemcpyDirection);
}

cudaError_t copy_async(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    ENSURE_CONTEXT();
    if (bytes == 0) return cudaSuccess;
    switch (kind) {
        case cudaMemcpyHostToDevice:
            return record_error(cu().MemcpyHtoDAsync(device_pointer(to), from, bytes, stream));
        case cudaMemcpyDeviceToHost:
            return record_error(cu().MemcpyDtoHAsync(to, device_pointer(from), bytes, stream));
        case cudaMemcpyDeviceToDevice:
            return record_error(
                cu().MemcpyDtoDAsync(device_pointer(to), device_pointer(from), bytes, stream));
        case cudaMemcpyHostToHost:
        case cudaMemcpyDefault:
            return record_error(cu().MemcpyAsync(device_pointer(to), device_pointer(from), bytes, stream));
    }
    return record_error(cudaErrorInvalidMemcpyDirection);
}

cudaMemcpy3DParms pitched_copy(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                               size_t height, cudaMemcpyKind kind) {
    cudaMemcpy3DParms parameters{};
    parameters.srcPtr = {const_cast<void *>(from), from_pitch, width, height};
    parameters.dstPtr = {to, to_pitch, width, height};
    parameters.extent = {width, height, 1};
    parameters.kind = kind;
    return parameters;
}

// A copy between an array and memory, or between arrays, of rows of `width` bytes. A null array: the memory.
struct ArrayEnd {
    cudaArray_const_t array = nullptr;
    size_t x = 0, y = 0;  // in an array: bytes, rows
    const void *memory = nullptr;
    size_t pitch = 0;
};

void describe_end(const ArrayEnd &end, bool host, bool any, CUmemorytype &type, CUarray &array, size_t &x,
                  size_t &y) {
    type = end.array != nullptr ? CU_MEMORYTYPE_ARRAY
           : any                ? CU_MEMORYTYPE_UNIFIED
           : host               ? CU_MEMORYTYPE_HOST
                                : CU_MEMORYTYPE_DEVICE;
    array = reinterpret_cast<CUarray>(const_cast<cudaArray_t>(end.array));
    x = end.x;
    y = end.y;
}

cudaError_t copy_array(const ArrayEnd &to, const ArrayEnd &from, size_t width, size_t height,
                       cudaMemcpyKind kind, bool async, cudaStream_t stream) {
    ENSURE_CONTEXT();
    CUDA_MEMCPY3D flat{};
    const bool any = kind == cudaMemcpyDefault;
    describe_end(from, kind == cudaMemcpyHostToDevice || kind == cudaMemcpyHostToHost, any,
                 flat.srcMemoryType, flat.srcArray, flat.srcXInBytes, flat.srcY);
    describe_end(to, kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyHostToHost, any, flat.dstMemoryType,
                 flat.dstArray, flat.dstXInBytes, flat.dstY);
    flat.srcHost = from.memory;
    flat.srcDevice = device_pointer(from.memory);
    flat.srcPitch = from.pitch;
    flat.dstHost = const_cast<void *>(to.memory);
    flat.dstDevice = device_pointer(to.memory);
    flat.dstPitch = to.pitch;
    flat.WidthInBytes = width;
    flat.Height = height;
    flat.Depth = 1;
    return record_error(async ? cu().Memcpy3DAsync(&flat, stream) : cu().Memcpy3D(&flat));
}

// Copies `bytes` consecutive bytes of an array's rows, which may begin and end within a row, to or from memory.
cudaError_t copy_rows(const ArrayEnd &array, bool to_array, const void *memory, size_t bytes,
                      cudaMemcpyKind kind, bool async, cudaStream_t stream) {
    ENSURE_CONTEXT();
    CUDA_ARRAY3D_DESCRIPTOR described;
    size_t element = 0;
    if (cudaError_t error = find_array(array.array, described, element)) return record_error(error);
    const size_t row = described.Width * element;
    if (array.x >= row && bytes != 0) return record_error(cudaErrorInvalidValue);
    ArrayEnd at = array;
    while (bytes != 0) {
        const size_t width = at.x == 0 && bytes >= row ? row : std::min(bytes, row - at.x);
        const size_t height = width == row ? bytes / row : 1;
        ArrayEnd other;
        other.memory = memory;
        other.pitch = width;
        if (cudaError_t error = to_array ? copy_array(at, other, width, height, kind, async, stream)
                                         : copy_array(other, at, width, height, kind, async, stream))
            return error;
        memory = static_cast<const char *>(memory) + width * height;
        bytes -= width * height;
        at.x = 0;
        at.y += height;
    }
    return cudaSuccess;
}

ArrayEnd in_array(cudaArray_const_t array, size_t x, size_t y) { return {array, x, y, nullptr, 0}; }
ArrayEnd in_memory(const void *memory, size_t pitch) { return {nullptr, 0, 0, memory, pitch}; }

// Rows of an array need a pitch of their width at least. A single row needs none.
bool pitch_fits(size_t pitch, size_t width, size_t height) {
    return width <= pitch || (pitch == 0 && height == 1);
}

// Records the result of a launch. Like NVIDIA's runtime, this one leaves it to the driver to reject a configuration, and
// has an error of its own for that. So the driver sees each launch of a kernel.
cudaError_t record_launch(CUresult status, dim3 grid, dim3 block) {
    if (status == CUDA_ERROR_INVALID_VALUE && !valid_configuration(grid, block))
        return record_error(cudaErrorInvalidConfiguration);
    return record_error(status);
}

cudaError_t launch(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                   cudaStream_t stream, bool cooperative) {
    ENSURE_CONTEXT();
    CUkernel kernel = nullptr;
    if (cudaError_t error = find_kernel(function, kernel)) return record_error(error);
    auto as_function = reinterpret_cast<CUfunction>(kernel);
    auto bytes = static_cast<unsigned>(std::min<size_t>(shared, 0xffffffff));
    CUresult status = cooperative ? cu().LaunchCooperativeKernel(as_function, grid.x, grid.y, grid.z, block.x,
                                                                 block.y, block.z, bytes, stream, arguments)
                                  : cu().LaunchKernel(as_function, grid.x, grid.y, grid.z, block.x, block.y,
                                                      block.z, bytes, stream, arguments, nullptr);
    return record_launch(status, grid, block);
}

CUlaunchConfig driver_configuration(const cudaLaunchConfig_t &config) {
    CUlaunchConfig converted{};
    converted.gridDimX = config.gridDim.x;
    converted.gridDimY = config.gridDim.y;
    converted.gridDimZ = config.gridDim.z;
    converted.blockDimX = config.blockDim.x;
    converted.blockDimY = config.blockDim.y;
    converted.blockDimZ = config.blockDim.z;
    converted.sharedMemBytes = static_cast<unsigned>(std::min<size_t>(config.dynamicSmemBytes, 0xffffffff));
    converted.hStream = config.stream;
    static_assert(sizeof(CUlaunchAttribute) == sizeof(cudaLaunchAttribute), "both APIs use the same layout");
    converted.attrs = reinterpret_cast<CUlaunchAttribute *>(config.attrs);
    converted.numAttrs = config.numAttrs;
    return converted;
}

// Asks the driver about the clusters of a kernel.
template <class Ask>
cudaError_t ask_about_clusters(Ask ask, int *result, const void *function, const cudaLaunchConfig_t *config) {
    ENSURE_CONTEXT();
    if (config == nullptr) return record_error(cudaErrorInvalidValue);
    CUkernel kernel = nullptr;
    if (cudaError_t error = find_kernel(function, kernel)) return record_error(error);
    const CUlaunchConfig converted = driver_configuration(*config);
    return record_error(ask(result, reinterpret_cast<CUfunction>(kernel), &converted));
}

}  // namespace

extern "C" {

// ---------------------------------------------------------------------------------------------------- launches

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    return launch(function, grid, block, arguments, shared, stream, false);
}

cudaError_t EXPORTED(__cudaLaunchKernel)(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                                         size_t shared, cudaStream_t stream) {
    return launch(kernel, grid, block, arguments, shared, stream, false);
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                        size_t shared, cudaStream_t stream) {
    return launch(function, grid, block, arguments, shared, stream, true);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    ENSURE_CONTEXT();
    if (config == nullptr) return record_error(cudaErrorInvalidValue);
    CUkernel kernel = nullptr;
    if (cudaError_t error = find_kernel(function, kernel)) return record_error(error);
    const CUlaunchConfig converted = driver_configuration(*config);
    return record_launch(
        cu().LaunchKernelEx(&converted, reinterpret_cast<CUfunction>(kernel), arguments, nullptr),
        config->gridDim, config->blockDim);
}

#ifndef CUDA_API_PER_THREAD_DEFAULT_STREAM
cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *function,
                                           const cudaLaunchConfig_t *config) {
    return ask_about_clusters(cu().OccupancyMaxActiveClusters, clusters, function, config);
}

cudaError_t cudaOccupancyMaxPotentialClusterSize(int *blocks, const void *function,
                                                 const cudaLaunchConfig_t *config) {
    return ask_about_clusters(cu().OccupancyMaxPotentialClusterSize, blocks, function, config);
}
#endif

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    ENSURE_CONTEXT();
    return record_error(cu().LaunchHostFunc(stream, function, data));
}

// ---------------------------------------------------------------------------------------------------- copies

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    return copy(to, from, bytes, kind);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    return copy_async(to, from, bytes, kind, stream);
}

#ifndef CUDA_API_PER_THREAD_DEFAULT_STREAM
cudaError_t cudaMemcpyPeer(void *to, int, const void *from, int, size_t bytes) {
    return copy(to, from, bytes, cudaMemcpyDeviceToDevice);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t stream) {
    return copy_async(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}
#endif

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset,
                               enum cudaMemcpyKind kind) {
    ENSURE_CONTEXT();
    void *to = nullptr;
    if (cudaError_t error = find_symbol_range(symbol, bytes, offset, to)) return record_error(error);
    return copy(to, from, bytes, kind);
}

cudaError_t cudaMemcpyFromSymbol(void *to, const void *symbol, size_t bytes, size_t offset,
                                 enum cudaMemcpyKind kind) {
    ENSURE_CONTEXT();
    void *from = nullptr;
    if (cudaError_t error = find_symbol_range(symbol, bytes, offset, from)) return record_error(error);
    return copy(to, from, bytes, kind);
}

cudaError_t cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t bytes, size_t offset,
                                    enum cudaMemcpyKind kind, cudaStream_t stream) {
    ENSURE_CONTEXT();
    void *to = nullptr;
    if (cudaError_t error = find_symbol_range(symbol, bytes, offset, to)) return record_error(error);
    return copy_async(to, from, bytes, kind, stream);
}

cudaError_t cudaMemcpyFromSymbolAsync(void *to, const void *symbol, size_t bytes, size_t offset,
                                      enum cudaMemcpyKind kind, cudaStream_t stream) {
    ENSURE_CONTEXT();
    void *from = nullptr;
    if (cudaError_t error = find_symbol_range(symbol, bytes, offset, from)) return record_error(error);
    return copy_async(to, from, bytes, kind, stream);
}

cudaError_t cudaMemcpy3D(const struct cudaMemcpy3DParms *parameters) {
    ENSURE_CONTEXT();
    CUDA_MEMCPY3D described;
    if (parameters == nullptr) return record_error(cudaErrorInvalidValue);
    if (cudaError_t error = describe_copy(*parameters, described)) return record_error(error);
    return record_error(cu().Memcpy3D(&described));
}

cudaError_t cudaMemcpy3DAsync(const struct cudaMemcpy3DParms *parameters, cudaStream_t stream) {
    ENSURE_CONTEXT();
    CUDA_MEMCPY3D described;
    if (parameters == nullptr) return record_error(cudaErrorInvalidValue);
    if (cudaError_t error = describe_copy(*parameters, described)) return record_error(error);
    return record_error(cu().Memcpy3DAsync(&described, stream));
}

cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                         size_t height, enum cudaMemcpyKind kind) {
    if (width > to_pitch || width > from_pitch) return record_error(cudaErrorInvalidPitchValue);
    cudaMemcpy3DParms parameters = pitched_copy(to, to_pitch, from, from_pitch, width, height, kind);
    return cudaMemcpy3D(&parameters);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    if (width > to_pitch || width > from_pitch) return record_error(cudaErrorInvalidPitchValue);
    cudaMemcpy3DParms parameters = pitched_copy(to, to_pitch, from, from_pitch, width, height, kind);
    return cudaMemcpy3DAsync(&parameters, stream);
}

cudaError_t cudaMemcpy2DToArray(cudaArray_t to, size_t x, size_t y, const void *from, size_t pitch,
                                size_t width, size_t height, enum cudaMemcpyKind kind) {
    if (!pitch_fits(pitch, width, height)) return record_error(cudaErrorInvalidPitchValue);
    return copy_array(in_array(to, x, y), in_memory(from, pitch), width, height, kind, false, nullptr);
}

cudaError_t cudaMemcpy2DToArrayAsync(cudaArray_t to, size_t x, size_t y, const void *from, size_t pitch,
                                     size_t width, size_t height, enum cudaMemcpyKind kind,
                                     cudaStream_t stream) {
    if (!pitch_fits(pitch, width, height)) return record_error(cudaErrorInvalidPitchValue);
    return copy_array(in_array(to, x, y), in_memory(from, pitch), width, height, kind, true, stream);
}

cudaError_t cudaMemcpy2DFromArray(void *to, size_t pitch, cudaArray_const_t from, size_t x, size_t y,
                                  size_t width, size_t height, enum cudaMemcpyKind kind) {
    if (!pitch_fits(pitch, width, height)) return record_error(cudaErrorInvalidPitchValue);
    return copy_array(in_memory(to, pitch), in_array(from, x, y), width, height, kind, false, nullptr);
}

cudaError_t cudaMemcpy2DFromArrayAsync(void *to, size_t pitch, cudaArray_const_t from, size_t x, size_t y,
                                       size_t width, size_t height, enum cudaMemcpyKind kind,
                                       cudaStream_t stream) {
    if (!pitch_fits(pitch, width, height)) return record_error(cudaErrorInvalidPitchValue);
    return copy_array(in_memory(to, pitch), in_array(from, x, y), width, height, kind, true, stream);
}

cudaError_t cudaMemcpy2DArrayToArray(cudaArray_t to, size_t to_x, size_t to_y, cudaArray_const_t from,
                                     size_t from_x, size_t from_y, size_t width, size_t height,
                                     enum cudaMemcpyKind kind) {
    return copy_array(in_array(to, to_x, to_y), in_array(from, from_x, from_y), width, height, kind, false,
                      nullptr);
}

cudaError_t cudaMemcpyToArray(cudaArray_t to, size_t x, size_t y, const void *from, size_t bytes,
                              enum cudaMemcpyKind kind) {
    return copy_rows(in_array(to, x, y), true, from, bytes, kind, false, nullptr);
}

cudaError_t cudaMemcpyToArrayAsync(cudaArray_t to, size_t x, size_t y, const void *from, size_t bytes,
                                   enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copy_rows(in_array(to, x, y), true, from, bytes, kind, true, stream);
}

cudaError_t cudaMemcpyFromArray(void *to, cudaArray_const_t from, size_t x, size_t y, size_t bytes,
                                enum cudaMemcpyKind kind) {
    return copy_rows(in_array(from, x, y), false, to, bytes, kind, false, nullptr);
}

cudaError_t cudaMemcpyFromArrayAsync(void *to, cudaArray_const_t from, size_t x, size_t y, size_t bytes,
                                     enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copy_rows(in_array(from, x, y), false, to, bytes, kind, true, stream);
}

static cudaMemcpy3DParms as_3d(const cudaMemcpy3DPeerParms &peer) {
    cudaMemcpy3DParms parameters{};
    parameters.srcArray = peer.srcArray;
    parameters.srcPos = peer.srcPos;
    parameters.srcPtr = peer.srcPtr;
    parameters.dstArray = peer.dstArray;
    parameters.dstPos = peer.dstPos;
    parameters.dstPtr = peer.dstPtr;
    parameters.extent = peer.extent;
    parameters.kind = cudaMemcpyDeviceToDevice;
    return parameters;
}

cudaError_t cudaMemcpy3DPeer(const struct cudaMemcpy3DPeerParms *peer) {
    if (peer == nullptr) return record_error(cudaErrorInvalidValue);
    cudaMemcpy3DParms parameters = as_3d(*peer);
    return cudaMemcpy3D(&parameters);
}

cudaError_t cudaMemcpy3DPeerAsync(const struct cudaMemcpy3DPeerParms *peer, cudaStream_t stream) {
    if (peer == nullptr) return record_error(cudaErrorInvalidValue);
    cudaMemcpy3DParms parameters = as_3d(*peer);
    return cudaMemcpy3DAsync(&parameters, stream);
}

// ---------------------------------------------------------------------------------------------------- memsets

cudaError_t cudaMemset(void *pointer, int value, size_t bytes) {
    ENSURE_CONTEXT();
    return record_error(cu().MemsetD8(device_pointer(pointer), static_cast<unsigned char>(value), bytes));
}

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, cudaStream_t stream) {
    ENSURE_CONTEXT();
    return record_error(
        cu().MemsetD8Async(device_pointer(pointer), static_cast<unsigned char>(value), bytes, stream));
}

cudaError_t cudaMemset2D(void *pointer, size_t pitch, int value, size_t width, size_t height) {
    ENSURE_CONTEXT();
    return record_error(
        cu().MemsetD2D8(device_pointer(pointer), pitch, static_cast<unsigned char>(value), width, height));
}

cudaError_t cudaMemset2DAsync(void *pointer, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream) {
    ENSURE_CONTEXT();
    return record_error(cu().MemsetD2D8Async(device_pointer(pointer), pitch,
                                             static_cast<unsigned char>(value), width, height, stream));
}

cudaError_t cudaMemset3DAsync(struct cudaPitchedPtr pitched, int value, struct cudaExtent extent,
                              cudaStream_t stream) {
    for (size_t z = 0; z < extent.depth; z++) {
        char *slice = static_cast<char *>(pitched.ptr) + z * pitched.pitch * pitched.ysize;
        if (cudaError_t error =
                cudaMemset2DAsync(slice, pitched.pitch, value, extent.width, extent.height, stream))
            return error;
    }
    return cudaSuccess;
}

cudaError_t cudaMemset3D(struct cudaPitchedPtr pitched, int value, struct cudaExtent extent) {
    return cudaMemset3DAsync(pitched, value, extent, nullptr);
}

// ---------------------------------------------------------------------------------------------------- stream-ordered memory

cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) {
    ENSURE_CONTEXT();
    if (pointer == nullptr) return record_error(cudaErrorInvalidValue);
    if (bytes == 0) {
        *pointer = nullptr;
        return cudaSuccess;
    }
    CUdeviceptr address = 0;
    CUresult status = cu().MemAllocAsync(&address, bytes, stream);
    if (status == CUDA_SUCCESS) *pointer = reinterpret_cast<void *>(address);
    return record_error(status);
}

cudaError_t cudaMallocFromPoolAsync(void **pointer, size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
    ENSURE_CONTEXT();
    if (pointer == nullptr) return record_error(cudaErrorInvalidValue);
    CUdeviceptr address = 0;
    CUresult status = cu().MemAllocFromPoolAsync(&address, bytes, pool, stream);
    if (status == CUDA_SUCCESS) *pointer = reinterpret_cast<void *>(address);
    return record_error(status);
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) {
    ENSURE_CONTEXT();
    return record_error(cu().MemFreeAsync(device_pointer(pointer), stream));
}

cudaError_t cudaMemPrefetchAsync(const void *pointer, size_t bytes, struct cudaMemLocation location,
                                 unsigned int flags, cudaStream_t stream) {
    ENSURE_CONTEXT();
    return record_error(
        cu().MemPrefetchAsync(device_pointer(pointer), bytes, driver_location(location), flags, stream));
}

// ---------------------------------------------------------------------------------------------------- streams, events

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    ENSURE_CONTEXT();
    return record_query(cu().StreamQuery(stream));
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    ENSURE_CONTEXT();
    return record_error(cu().StreamSynchronize(stream));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
    ENSURE_CONTEXT();
    return record_error(cu().StreamWaitEvent(stream, event, flags));
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data,
                                  unsigned int flags) {
    ENSURE_CONTEXT();
    return record_error(
        cu().StreamAddCallback(stream, reinterpret_cast<CUstreamCallback>(callback), data, flags));
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    ENSURE_CONTEXT();
    return record_error(cu().StreamGetPriority(stream, priority));
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned int *flags) {
    ENSURE_CONTEXT();
    return record_error(cu().StreamGetFlags(stream, flags));
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id) {
    ENSURE_CONTEXT();
    return record_error(cu().StreamGetId(stream, id));
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device) {
    ENSURE_CONTEXT();
    CUcontext context = nullptr, before = nullptr;
    if (CUresult status = cu().StreamGetCtx(stream, &context)) return record_error(status);
    cu().CtxGetCurrent(&before);
    cu().CtxSetCurrent(context);
    CUresult status = cu().CtxGetDevice(device);
    cu().CtxSetCurrent(before);
    return record_error(status);
}

cudaError_t cudaStreamAttachMemAsync(cudaStream_t stream, void *pointer, size_t length, unsigned int flags) {
    ENSURE_CONTEXT();
    return record_error(cu().StreamAttachMemAsync(stream, device_pointer(pointer), length, flags));
}

cudaError_t cudaStreamCopyAttributes(cudaStream_t to, cudaStream_t from) {
    ENSURE_CONTEXT();
    return record_error(cu().StreamCopyAttributes(to, from));
}

cudaError_t cudaStreamGetAttribute(cudaStream_t stream, cudaStreamAttrID which, cudaStreamAttrValue *value) {
    ENSURE_CONTEXT();
    return record_error(cu().StreamGetAttribute(stream, static_cast<CUstreamAttrID>(which),
                                                reinterpret_cast<CUstreamAttrValue *>(value)));
}

cudaError_t cudaStreamSetAttribute(cudaStream_t stream, cudaStreamAttrID which,
                                   const cudaStreamAttrValue *value) {
    ENSURE_CONTEXT();
    return record_error(cu().StreamSetAttribute(stream, static_cast<CUstreamAttrID>(which),
                                                reinterpret_cast<const CUstreamAttrValue *>(value)));
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
    ENSURE_CONTEXT();
    return record_error(cu().EventRecordWithFlags(event, stream, flags));
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

// ---------------------------------------------------------------------------------------------------- capture, graphs

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    ENSURE_CONTEXT();
    return record_error(cu().StreamBeginCapture(stream, static_cast<CUstreamCaptureMode>(mode)));
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph,
                                          const cudaGraphNode_t *dependencies, const cudaGraphEdgeData *,
                                          size_t count, enum cudaStreamCaptureMode mode) {
    ENSURE_CONTEXT();
    return record_error(cu().StreamBeginCaptureToGraph(stream, graph, dependencies, nullptr, count,
                                                       static_cast<CUstreamCaptureMode>(mode)));
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    ENSURE_CONTEXT();
    return record_error(cu().StreamEndCapture(stream, graph));
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    ENSURE_CONTEXT();
    return record_error(cu().StreamIsCapturing(stream, reinterpret_cast<CUstreamCaptureStatus *>(status)));
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    ENSURE_CONTEXT();
    cuuint64_t number = 0;
    CUresult result =
        cu().StreamGetCaptureInfo(stream, reinterpret_cast<CUstreamCaptureStatus *>(status), &number, graph,
                                  dependencies, reinterpret_cast<const CUgraphEdgeData **>(edges), count);
    if (id != nullptr) *id = number;
    return record_error(result);
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *nodes,
                                                const cudaGraphEdgeData *, size_t count, unsigned int flags) {
    ENSURE_CONTEXT();
    return record_error(cu().StreamUpdateCaptureDependencies(stream, nodes, nullptr, count, flags));
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphLaunch(exec, stream));
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream) {
    ENSURE_CONTEXT();
    return record_error(cu().GraphUpload(exec, stream));
}

cudaError_t cudaGraphInstantiateWithParams(cudaGraphExec_t *exec, cudaGraph_t graph,
                                           cudaGraphInstantiateParams *parameters) {
    ENSURE_CONTEXT();
    static_assert(sizeof(CUDA_GRAPH_INSTANTIATE_PARAMS) == sizeof(cudaGraphInstantiateParams),
                  "both APIs use the same layout");
    return record_error(cu().GraphInstantiateWithParams(
        exec, graph, reinterpret_cast<CUDA_GRAPH_INSTANTIATE_PARAMS *>(parameters)));
}

// ---------------------------------------------------------------------------------------------------- entry points

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned int version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    if (cudaError_t error = ensure_driver()) return record_error(error);
    if (name == nullptr || function == nullptr) return record_error(cudaErrorInvalidValue);
    cuuint64_t effective_flags = flags;
    if (effective_flags == 0)
        effective_flags =
            kPerThread ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM : CU_GET_PROC_ADDRESS_LEGACY_STREAM;
    CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    CUresult found = cu().GetProcAddress(name, function, static_cast<int>(version), effective_flags, &status);
    if (result != nullptr) *result = static_cast<cudaDriverEntryPointQueryResult>(status);
    if (found == CUDA_SUCCESS && *function == nullptr && result == nullptr)
        return record_error(cudaErrorSymbolNotFound);
    return record_error(found);
}

// CUDA 13's header declares it with _ptsz only, but older objects use it without.
#undef cudaGetDriverEntryPoint
cudaError_t EXPORTED(cudaGetDriverEntryPoint)(const char *name, void **function, unsigned long long flags,
                                              enum cudaDriverEntryPointQueryResult *result) {
    return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags, result);
}

}  // extern "C"

// Copies as the runtime and as the driver describe them.
#include "runtime/runtime.h"

#include <algorithm>

namespace cudasim::runtime {

cudaError_t find_array(cudaArray_const_t array, CUDA_ARRAY3D_DESCRIPTOR &described, size_t &element) {
    auto handle = reinterpret_cast<CUarray>(const_cast<cudaArray_t>(array));
    if (handle == nullptr) return cudaErrorInvalidValue;
    if (CUresult status = driver(false).Array3DGetDescriptor(&described, handle))
        return static_cast<cudaError_t>(status);
    const bool small =
        described.Format == CU_AD_FORMAT_UNSIGNED_INT8 || described.Format == CU_AD_FORMAT_SIGNED_INT8;
    const bool half = described.Format == CU_AD_FORMAT_UNSIGNED_INT16 ||
                      described.Format == CU_AD_FORMAT_SIGNED_INT16 || described.Format == CU_AD_FORMAT_HALF;
    element = size_t{small ? 1u : half ? 2u : 4u} * described.NumChannels;
    return cudaSuccess;
}

cudaError_t describe_copy(const cudaMemcpy3DParms &parameters, CUDA_MEMCPY3D &described) {
    described = {};
    if ((parameters.srcArray != nullptr && parameters.srcPtr.ptr != nullptr) ||
        (parameters.dstArray != nullptr && parameters.dstPtr.ptr != nullptr))
        return cudaErrorInvalidValue;
    // With an array, the extent counts its elements, and so does a position in it. All else is in bytes.
    size_t source_element = 1, destination_element = 1;
    CUDA_ARRAY3D_DESCRIPTOR array;
    if (parameters.srcArray != nullptr)
        if (cudaError_t error = find_array(parameters.srcArray, array, source_element)) return error;
    if (parameters.dstArray != nullptr)
        if (cudaError_t error = find_array(parameters.dstArray, array, destination_element)) return error;
    if (parameters.srcArray != nullptr && parameters.dstArray != nullptr &&
        source_element != destination_element)
        return cudaErrorInvalidValue;
    auto kind = parameters.kind;
    auto memory_type = [&](cudaMemcpyKind kind_with_host, cudaArray_t in_array) {
        if (in_array != nullptr) return CU_MEMORYTYPE_ARRAY;
        if (kind == cudaMemcpyDefault) return CU_MEMORYTYPE_UNIFIED;
        return kind == kind_with_host || kind == cudaMemcpyHostToHost ? CU_MEMORYTYPE_HOST
                                                                      : CU_MEMORYTYPE_DEVICE;
    };
    described.srcXInBytes = parameters.srcPos.x * source_element;
    described.srcY = parameters.srcPos.y;
    described.srcZ = parameters.srcPos.z;
    described.srcMemoryType = memory_type(cudaMemcpyHostToDevice, parameters.srcArray);
    described.srcHost = parameters.srcPtr.ptr;
    described.srcDevice = device_pointer(parameters.srcPtr.ptr);
    described.srcArray = reinterpret_cast<CUarray>(parameters.srcArray);
    described.srcPitch = parameters.srcPtr.pitch;
    described.srcHeight = parameters.srcPtr.ysize;
    described.dstXInBytes = parameters.dstPos.x * destination_element;
    described.dstY = parameters.dstPos.y;
    described.dstZ = parameters.dstPos.z;
    described.dstMemoryType = memory_type(cudaMemcpyDeviceToHost, parameters.dstArray);
    described.dstHost = parameters.dstPtr.ptr;
    described.dstDevice = device_pointer(parameters.dstPtr.ptr);
    described.dstArray = reinterpret_cast<CUarray>(parameters.dstArray);
    described.dstPitch = parameters.dstPtr.pitch;
    described.dstHeight = parameters.dstPtr.ysize;
    described.WidthInBytes = parameters.extent.width * std::max(source_element, destination_element);
    described.Height = parameters.extent.height;
    described.Depth = parameters.extent.depth;
    return cudaSuccess;
}

cudaError_t describe_parameters(const CUDA_MEMCPY3D &found, cudaMemcpy3DParms &parameters) {
    const bool from_host = found.srcMemoryType == CU_MEMORYTYPE_HOST,
               to_host = found.dstMemoryType == CU_MEMORYTYPE_HOST;
    parameters = {};
    size_t source_element = 1, destination_element = 1;
    CUDA_ARRAY3D_DESCRIPTOR array;
    if (found.srcMemoryType == CU_MEMORYTYPE_ARRAY) {
        parameters.srcArray = reinterpret_cast<cudaArray_t>(found.srcArray);
        if (cudaError_t error = find_array(parameters.srcArray, array, source_element)) return error;
    } else {
        parameters.srcPtr = {
            from_host ? const_cast<void *>(found.srcHost) : reinterpret_cast<void *>(found.srcDevice),
            found.srcPitch, found.WidthInBytes, found.srcHeight};
    }
    if (found.dstMemoryType == CU_MEMORYTYPE_ARRAY) {
        parameters.dstArray = reinterpret_cast<cudaArray_t>(found.dstArray);
        if (cudaError_t error = find_array(parameters.dstArray, array, destination_element)) return error;
    } else {
        parameters.dstPtr = {to_host ? found.dstHost : reinterpret_cast<void *>(found.dstDevice),
                             found.dstPitch, found.WidthInBytes, found.dstHeight};
    }
    parameters.srcPos = {found.srcXInBytes / source_element, found.srcY, found.srcZ};
    parameters.dstPos = {found.dstXInBytes / destination_element, found.dstY, found.dstZ};
    parameters.extent = {found.WidthInBytes / std::max(source_element, destination_element), found.Height,
                         found.Depth};
    if (found.srcMemoryType == CU_MEMORYTYPE_UNIFIED || found.dstMemoryType == CU_MEMORYTYPE_UNIFIED)
        parameters.kind = cudaMemcpyDefault;
    else if (from_host) parameters.kind = to_host ? cudaMemcpyHostToHost : cudaMemcpyHostToDevice;
    else parameters.kind = to_host ? cudaMemcpyDeviceToHost : cudaMemcpyDeviceToDevice;
    return cudaSuccess;
}

}  // namespace cudasim::runtime

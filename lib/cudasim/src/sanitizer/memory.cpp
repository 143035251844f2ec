// Memory and streams. The subscriber gets no callbacks for these.
#include <cstring>

#include "driver/context.h"
#include "sanitizer/entry_points.h"
#include "sanitizer/subscriber.h"

using namespace cudasim;
using namespace cudasim::sanitizer;
using cudasim::driver::tables;

namespace {

Result allocate(CUcontext handle, void **memory, size_t size, MemoryKind kind) {
    const std::shared_ptr<driver::Context> context =
        handle == nullptr ? driver::current_context_or_null() : tables().contexts.get(handle);
    if (memory == nullptr || size == 0) return kInvalidParameter;
    if (!context) return kInvalidContext;
    const uint64_t address = Memory::instance().allocate(size, kind, context->device, context->handle);
    if (address == 0) return kOutOfMemory;
    *memory = reinterpret_cast<void *>(address);
    return kSuccess;
}

Result release(void *memory) {
    return Memory::instance().release(reinterpret_cast<uint64_t>(memory)) ? kSuccess : kInvalidParameter;
}

// Appends an operation to a stream, or runs it at once if the stream is being captured. After a fault, nothing runs in the context.
Result submit(StreamHandle handle, driver::Operation operation, bool wait) {
    std::shared_ptr<driver::Context> context;
    const std::shared_ptr<driver::Stream> stream = find_stream(handle, context);
    if (!stream) return kInvalidParameter;
    Fence fence;
    if (driver::submit(context, stream, std::move(operation), &fence) != CUDA_SUCCESS) return kUnknown;
    if (wait) fence.wait();
    return context->sticky_error == 0 ? kSuccess : kUnknown;
}

bool is_device_memory(const void *memory, size_t size) {
    return Memory::instance().covers(reinterpret_cast<uint64_t>(memory), size);
}

driver::Operation copy(void *to, const void *from, size_t size) {
    driver::Operation operation;
    operation.type = CU_GRAPH_NODE_TYPE_MEMCPY;
    operation.copy.source = reinterpret_cast<uint64_t>(from);
    operation.copy.destination = reinterpret_cast<uint64_t>(to);
    operation.copy.width = size;
    return operation;
}

}  // namespace

namespace cudasim::sanitizer::entry {

Result Alloc(CUcontext context, void **memory, size_t size) {
    return allocate(context, memory, size, MemoryKind::device);
}
Result AllocHost(CUcontext context, void **memory, size_t size) {
    return allocate(context, memory, size, MemoryKind::pinned);
}
Result Free(CUcontext, void *memory) { return release(memory); }
Result FreeHost(CUcontext, void *memory) { return release(memory); }

Result MemcpyHostToDeviceAsync(void *to, void *from, size_t size, StreamHandle stream) {
    if (!is_device_memory(to, size)) return kNotInDeviceMemory;
    // The source may change after the call, so it is copied first.
    auto kept =
        std::make_shared<std::vector<char>>(static_cast<char *>(from), static_cast<char *>(from) + size);
    driver::Operation operation = copy(to, kept->data(), size);
    operation.keep_alive = kept;
    return submit(stream, std::move(operation), false);
}

Result MemcpyDeviceToHost(void *to, void *from, size_t size, StreamHandle stream) {
    if (!is_device_memory(from, size)) return kNotInDeviceMemory;
    return submit(stream, copy(to, from, size), true);
}

Result Memset(void *memory, int value, size_t size, StreamHandle stream) {
    if (!is_device_memory(memory, size)) return kNotInDeviceMemory;
    driver::Operation operation;
    operation.type = CU_GRAPH_NODE_TYPE_MEMSET;
    operation.memset.destination = reinterpret_cast<uint64_t>(memory);
    operation.memset.value = static_cast<unsigned char>(value);
    operation.memset.width = operation.memset.pitch = size;
    return submit(stream, std::move(operation), false);
}

Result StreamSynchronize(StreamHandle handle) { return submit(handle, driver::Operation(), true); }

Result GetStream(StreamHandle handle, CUstream *stream) {
    std::shared_ptr<driver::Context> context;
    const std::shared_ptr<driver::Stream> found = find_stream(handle, context);
    if (stream == nullptr || !found) return kInvalidParameter;
    *stream = static_cast<CUstream>(found->handle);
    return kSuccess;
}

Result GetStreamHandle(CUcontext handle, CUstream stream, StreamHandle *result) {
    std::shared_ptr<driver::Context> context =
        handle == nullptr ? driver::current_context_or_null() : tables().contexts.get(handle);
    if (result == nullptr) return kInvalidParameter;
    if (!context) return kInvalidContext;
    const std::shared_ptr<driver::Stream> found =
        stream == nullptr || stream == CU_STREAM_LEGACY ? context->legacy : tables().streams.get(stream);
    if (!found || found->context.lock() != context) return kInvalidParameter;
    *result = handle_of(*found);
    return kSuccess;
}

}  // namespace cudasim::sanitizer::entry

// Replacements of functions that are hooked only for the operation log and for programs at operations:
// copies, memsets, events, synchronization, allocations. They do what the original does. The replacements in
// hooks_held.def are also here. They hold back work that may not end by itself.
#include <cstring>

#include "copies/drain.h"
#include "driver/gpu_idle.h"
#include "driver/stream.h"
#include "hook_call.h"
#include "log/allocation.h"
#include "log/host_program.h"
#include "log/operation.h"
#include "log/stack.h"

// These names are the exported symbols, not what the header's macros make of them.
#undef cuEventDestroy
#undef cuStreamDestroy
#undef cuMemcpyBatchAsync
#undef cuMemcpy3DBatchAsync

namespace gpubpf {

namespace {

uint64_t number(const void *p) { return reinterpret_cast<uint64_t>(p); }

enum class Timed { No, Yes, AsBatch };  // how the operation is timed

// Calls the driver and logs the operation. `before` fills in the fields known before the call, `after` the rest.
template <class Call, class Before, class After>
[[gnu::always_inline]] inline CUresult logged(Kind kind, StreamRef where, uint16_t flags, Timed timed,
                                              const Call &call, const Before &before, const After &after) {
    HookCall hook;
    if (!hook || !(oplog.on() || operation_program())) return in_driver(call);
    Operation operation(kind, where, flags);
    Record &r = operation.record;
    before(operation);
    if (kind < Kind::Api) operation.announce();
    if (timed != Timed::No) operation.time(timed == Timed::AsBatch);
    operation.called();
    CUresult result = in_driver(call);
    operation.returned(result);
    if (!hook.keeps_records()) return result;
    after(operation);
    // Only a copy to host memory has certainly finished when the call returns (CUDA driver API, "API
    // synchronization behavior").
    if (timed != Timed::No && r.kind != Kind::D2H && r.kind != Kind::H2H)
        r.flags &= static_cast<uint16_t>(~kSynchronous);
    if (agent.config.kept.slots && result == CUDA_SUCCESS && operation.queue.context &&
        (r.flags & (kSynchronous | kCaptured)) == kSynchronous)
        quietly([&] {
            if (r.kind == Kind::Sync) r.sync.kept = keep_latest(*operation.queue.context);
            if (r.kind == Kind::D2H) r.copy.kept = keep_latest(*operation.queue.context);
        });
    operation.log();
    return result;
}

// --- copies ---

struct Bytes {
    uint64_t size, to, from;
};

void describe_copy(Record &r, const Bytes &copy) { r.copy = {copy.size, copy.to, copy.from, 0}; }

bool on_host(CUmemorytype type, uint64_t address) {
    if (type != CU_MEMORYTYPE_UNIFIED) return type == CU_MEMORYTYPE_HOST;
    Untimed scope;
    unsigned found = 0;
    bool known =
        driver.cuPointerGetAttribute &&
        driver.cuPointerGetAttribute(&found, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) == CUDA_SUCCESS;
    return !known || found == CU_MEMORYTYPE_HOST;  // memory that the driver does not know is pageable
}

Kind kind_of(bool from_host, bool to_host) {
    if (from_host) return to_host ? Kind::H2H : Kind::H2D;
    return to_host ? Kind::D2H : Kind::D2D;
}

// For copies between addresses of any kind.
void describe_unified(Record &r, const Bytes &copy) {
    describe_copy(r, copy);
    r.kind = kind_of(on_host(CU_MEMORYTYPE_UNIFIED, copy.from), on_host(CU_MEMORYTYPE_UNIFIED, copy.to));
}

// For CUDA_MEMCPY2D and CUDA_MEMCPY3D. Each place is a host pointer, a device pointer or an array.
template <class Params>
void describe_params(Record &r, const Params *p, uint64_t depth_of) {
    if (!p) return;
    auto place = [](CUmemorytype type, const void *host, CUdeviceptr device, CUarray array) {
        return type == CU_MEMORYTYPE_HOST    ? number(host)
               : type == CU_MEMORYTYPE_ARRAY ? number(array)
                                             : uint64_t(device);
    };
    Bytes copy{uint64_t(p->WidthInBytes) * p->Height * depth_of,
               place(p->dstMemoryType, p->dstHost, p->dstDevice, p->dstArray),
               place(p->srcMemoryType, p->srcHost, p->srcDevice, p->srcArray)};
    describe_copy(r, copy);
    r.kind = kind_of(on_host(p->srcMemoryType, copy.from), on_host(p->dstMemoryType, copy.to));
}

void describe_batch(Record &r, const CUdeviceptr *to, const CUdeviceptr *from, const size_t *sizes,
                    size_t n) {
    if (!to || !from || !sizes || !n) return;
    if (n > 1) r.flags |= kBatch;
    Bytes copy{0, to[0], from[0]};
    for (size_t i = 0; i < n; ++i) copy.size += sizes[i];
    describe_unified(r, copy);
}

void describe_batch(Record &r, const CUDA_MEMCPY3D_BATCH_OP *ops, size_t n) {
    if (!ops || !n) return;
    auto place = [](const CUmemcpy3DOperand &o) {
        return o.type == CU_MEMCPY_OPERAND_TYPE_ARRAY ? number(o.op.array.array) : uint64_t(o.op.ptr.ptr);
    };
    auto host = [](const CUmemcpy3DOperand &o) {
        return o.type == CU_MEMCPY_OPERAND_TYPE_POINTER && on_host(CU_MEMORYTYPE_UNIFIED, o.op.ptr.ptr);
    };
    if (n > 1) r.flags |= kBatch;
    Bytes copy{0, place(ops[0].dst), place(ops[0].src)};
    for (size_t i = 0; i < n; ++i)
        copy.size += uint64_t(ops[i].extent.width) * ops[i].extent.height * ops[i].extent.depth;
    describe_copy(r, copy);
    r.kind = kind_of(host(ops[0].src), host(ops[0].dst));
}

// A function, and its variant whose null stream is the thread's own. `stream` is the call's argument. BEFORE
// and AFTER may use `Operation &o` and its `Record &r`.
#define ONE(symbol, kind, where, flags, timed, PARAMETERS, ARGUMENTS, BEFORE, ...) \
    CUresult hook_##symbol PARAMETERS {                                            \
        return logged(                                                             \
            kind, where, flags, timed, [&] { return ORIGINAL(symbol) ARGUMENTS; }, \
            [&]([[maybe_unused]] Operation &o) {                                   \
                [[maybe_unused]] Record &r = o.record;                             \
                BEFORE                                                             \
            },                                                                     \
            [&]([[maybe_unused]] Operation &o) {                                   \
                [[maybe_unused]] Record &r = o.record;                             \
                __VA_ARGS__                                                        \
            });                                                                    \
    }
#define WAITS(symbol, kind, PARAMETERS, ARGUMENTS, ...)                                                   \
    ONE(symbol, kind, (StreamRef{nullptr, false}), kSynchronous, Timed::Yes, PARAMETERS, ARGUMENTS,       \
        __VA_ARGS__, {})                                                                                  \
    ONE(symbol##_ptds, kind, (StreamRef{nullptr, true}), kSynchronous, Timed::Yes, PARAMETERS, ARGUMENTS, \
        __VA_ARGS__, {})
#define STREAMED(symbol, kind, timed, PARAMETERS, ARGUMENTS, BEFORE, ...)                               \
    ONE(symbol, kind, (StreamRef{stream, false}), 0, timed, PARAMETERS, ARGUMENTS, BEFORE, __VA_ARGS__) \
    ONE(symbol##_ptsz, kind, (StreamRef{stream, true}), 0, timed, PARAMETERS, ARGUMENTS, BEFORE, __VA_ARGS__)

WAITS(cuMemcpy, Kind::D2D, (CUdeviceptr to, CUdeviceptr from, size_t n), (to, from, n),
      { describe_unified(r, {n, to, from}); })
WAITS(cuMemcpyPeer, Kind::D2D,
      (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t n),
      (to, to_context, from, from_context, n), { describe_copy(r, {n, to, from}); })
WAITS(cuMemcpyHtoD_v2, Kind::H2D, (CUdeviceptr to, const void *from, size_t n), (to, from, n),
      { describe_copy(r, {n, to, number(from)}); })
WAITS(cuMemcpyDtoH_v2, Kind::D2H, (void *to, CUdeviceptr from, size_t n), (to, from, n),
      { describe_copy(r, {n, number(to), from}); })
WAITS(cuMemcpyDtoD_v2, Kind::D2D, (CUdeviceptr to, CUdeviceptr from, size_t n), (to, from, n),
      { describe_copy(r, {n, to, from}); })
WAITS(cuMemcpyDtoA_v2, Kind::D2D, (CUarray to, size_t at, CUdeviceptr from, size_t n), (to, at, from, n),
      { describe_copy(r, {n, number(to), from}); })
WAITS(cuMemcpyAtoD_v2, Kind::D2D, (CUdeviceptr to, CUarray from, size_t at, size_t n), (to, from, at, n),
      { describe_copy(r, {n, to, number(from)}); })
WAITS(cuMemcpyHtoA_v2, Kind::H2D, (CUarray to, size_t at, const void *from, size_t n), (to, at, from, n),
      { describe_copy(r, {n, number(to), number(from)}); })
WAITS(cuMemcpyAtoH_v2, Kind::D2H, (void *to, CUarray from, size_t at, size_t n), (to, from, at, n),
      { describe_copy(r, {n, number(to), number(from)}); })
WAITS(cuMemcpyAtoA_v2, Kind::D2D, (CUarray to, size_t to_at, CUarray from, size_t at, size_t n),
      (to, to_at, from, at, n), { describe_copy(r, {n, number(to), number(from)}); })
WAITS(cuMemcpy2D_v2, Kind::D2D, (const CUDA_MEMCPY2D *p), (p), { describe_params(r, p, 1); })
WAITS(cuMemcpy2DUnaligned_v2, Kind::D2D, (const CUDA_MEMCPY2D *p), (p), { describe_params(r, p, 1); })
WAITS(cuMemcpy3D_v2, Kind::D2D, (const CUDA_MEMCPY3D *p), (p), { describe_params(r, p, p ? p->Depth : 1); })
WAITS(cuMemcpy3DPeer, Kind::D2D, (const CUDA_MEMCPY3D_PEER *p), (p),
      { describe_params(r, p, p ? p->Depth : 1); })

STREAMED(cuMemcpyAsync, Kind::D2D, Timed::Yes, (CUdeviceptr to, CUdeviceptr from, size_t n, CUstream stream),
         (to, from, n, stream), { describe_unified(r, {n, to, from}); }, {})
STREAMED(cuMemcpyPeerAsync, Kind::D2D, Timed::Yes,
         (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t n,
          CUstream stream),
         (to, to_context, from, from_context, n, stream), { describe_copy(r, {n, to, from}); }, {})
STREAMED(cuMemcpyHtoDAsync_v2, Kind::H2D, Timed::Yes,
         (CUdeviceptr to, const void *from, size_t n, CUstream stream), (to, from, n, stream),
         { describe_copy(r, {n, to, number(from)}); }, {})
STREAMED(cuMemcpyDtoHAsync_v2, Kind::D2H, Timed::Yes, (void *to, CUdeviceptr from, size_t n, CUstream stream),
         (to, from, n, stream), { describe_copy(r, {n, number(to), from}); }, {})
STREAMED(cuMemcpyDtoDAsync_v2, Kind::D2D, Timed::Yes,
         (CUdeviceptr to, CUdeviceptr from, size_t n, CUstream stream), (to, from, n, stream),
         { describe_copy(r, {n, to, from}); }, {})
STREAMED(cuMemcpyHtoAAsync_v2, Kind::H2D, Timed::Yes,
         (CUarray to, size_t at, const void *from, size_t n, CUstream stream), (to, at, from, n, stream),
         { describe_copy(r, {n, number(to), number(from)}); }, {})
STREAMED(cuMemcpyAtoHAsync_v2, Kind::D2H, Timed::Yes,
         (void *to, CUarray from, size_t at, size_t n, CUstream stream), (to, from, at, n, stream),
         { describe_copy(r, {n, number(to), number(from)}); }, {})
STREAMED(cuMemcpy2DAsync_v2, Kind::D2D, Timed::Yes, (const CUDA_MEMCPY2D *p, CUstream stream), (p, stream),
         { describe_params(r, p, 1); }, {})
STREAMED(cuMemcpy3DAsync_v2, Kind::D2D, Timed::Yes, (const CUDA_MEMCPY3D *p, CUstream stream), (p, stream),
         { describe_params(r, p, p ? p->Depth : 1); }, {})
STREAMED(cuMemcpy3DPeerAsync, Kind::D2D, Timed::Yes, (const CUDA_MEMCPY3D_PEER *p, CUstream stream),
         (p, stream), { describe_params(r, p, p ? p->Depth : 1); }, {})
STREAMED(cuMemcpyBatchAsync, Kind::D2D, Timed::AsBatch,
         (CUdeviceptr * to, CUdeviceptr *from, size_t *sizes, size_t n, void *attributes, size_t *starts,
          size_t count, size_t *failed, CUstream stream),
         (to, from, sizes, n, attributes, starts, count, failed, stream),
         { describe_batch(r, to, from, sizes, n); }, {})
STREAMED(cuMemcpyBatchAsync_v2, Kind::D2D, Timed::AsBatch,
         (CUdeviceptr * to, CUdeviceptr *from, size_t *sizes, size_t n, void *attributes, size_t *starts,
          size_t count, CUstream stream),
         (to, from, sizes, n, attributes, starts, count, stream), { describe_batch(r, to, from, sizes, n); },
         {})
STREAMED(cuMemcpy3DBatchAsync, Kind::D2D, Timed::AsBatch,
         (size_t n, CUDA_MEMCPY3D_BATCH_OP *ops, size_t *failed, unsigned long long flags, CUstream stream),
         (n, ops, failed, flags, stream), { describe_batch(r, ops, n); }, {})
STREAMED(cuMemcpy3DBatchAsync_v2, Kind::D2D, Timed::AsBatch,
         (size_t n, CUDA_MEMCPY3D_BATCH_OP *ops, unsigned long long flags, CUstream stream),
         (n, ops, flags, stream), { describe_batch(r, ops, n); }, {})
STREAMED(cuMemcpyWithAttributesAsync, Kind::D2D, Timed::Yes,
         (CUdeviceptr to, CUdeviceptr from, size_t size, void *attributes, CUstream stream),
         (to, from, size, attributes, stream), { describe_batch(r, &to, &from, &size, 1); }, {})
STREAMED(cuMemcpy3DWithAttributesAsync, Kind::D2D, Timed::Yes,
         (CUDA_MEMCPY3D_BATCH_OP * op, unsigned long long flags, CUstream stream), (op, flags, stream),
         { describe_batch(r, op, 1); }, {})

// --- memsets ---

void describe_fill(Record &r, uint64_t bytes, CUdeviceptr to) { r.copy = {bytes, to, 0, 0}; }

#define FILL(name, size, type)                                                                               \
    WAITS(name##_v2, Kind::Memset, (CUdeviceptr to, type value, size_t n), (to, value, n),                   \
          { describe_fill(r, n * size, to); })                                                               \
    STREAMED(name##Async, Kind::Memset, Timed::Yes, (CUdeviceptr to, type value, size_t n, CUstream stream), \
             (to, value, n, stream), { describe_fill(r, n * size, to); }, {})
#define FILL_2D(name, size, type)                                                                           \
    WAITS(name##_v2, Kind::Memset, (CUdeviceptr to, size_t pitch, type value, size_t width, size_t height), \
          (to, pitch, value, width, height), { describe_fill(r, width * height * size, to); })              \
    STREAMED(name##Async, Kind::Memset, Timed::Yes,                                                         \
             (CUdeviceptr to, size_t pitch, type value, size_t width, size_t height, CUstream stream),      \
             (to, pitch, value, width, height, stream), { describe_fill(r, width * height * size, to); },   \
             {})

FILL(cuMemsetD8, 1, unsigned char)
FILL(cuMemsetD16, 2, unsigned short)
FILL(cuMemsetD32, 4, unsigned)
FILL_2D(cuMemsetD2D8, 1, unsigned char)
FILL_2D(cuMemsetD2D16, 2, unsigned short)
FILL_2D(cuMemsetD2D32, 4, unsigned)

// --- events and synchronization ---

void describe_record(Record &r, CUevent event) {
    if (r.result == CUDA_SUCCESS) quietly([&] { event_recorded(event, r.flags & kCaptured ? 0 : r.id); });
}

// Waiting for an event of a capture makes the stream part of the capture.
void describe_wait(Record &r, StreamRef where, CUevent event) {
    if (capturing(where.handle())) r.flags |= kCaptured;
    quietly([&] {
        r.event.record = recorded_by(event);
        if (r.event.record || registry().captures.load(std::memory_order_relaxed) || !driver.cuEventQuery)
            return;
        DriverScope scope;
        if (driver.cuEventQuery(event) == CUDA_SUCCESS) r.event.record = kNoRecord;
    });
}

STREAMED(
    cuEventRecord, Kind::Recorded, Timed::No, (CUevent event, CUstream stream), (event, stream),
    { r.event.event = number(event); }, { describe_record(r, event); })
STREAMED(
    cuEventRecordWithFlags, Kind::Recorded, Timed::No, (CUevent event, CUstream stream, unsigned flags),
    (event, stream, flags), { r.event.event = number(event); }, { describe_record(r, event); })
ONE(
    cuStreamWaitEvent, Kind::Wait, (StreamRef{stream, false}), 0, Timed::No,
    (CUstream stream, CUevent event, unsigned flags), (stream, event, flags),
    { r.event.event = number(event); }, { describe_wait(r, StreamRef{stream, false}, event); })
ONE(
    cuStreamWaitEvent_ptsz, Kind::Wait, (StreamRef{stream, true}), 0, Timed::No,
    (CUstream stream, CUevent event, unsigned flags), (stream, event, flags),
    { r.event.event = number(event); }, { describe_wait(r, StreamRef{stream, true}, event); })

void describe_sync(Record &r, SyncTarget what) {
    r.flags |= kSynchronous;
    r.sync.what = static_cast<uint32_t>(what);
}

STREAMED(cuStreamSynchronize, Kind::Sync, Timed::No, (CUstream stream), (stream),
         { describe_sync(r, SyncTarget::Stream); }, {})
ONE(cuCtxSynchronize, Kind::Sync, kNoStream, kSynchronous, Timed::No, (), (),
    { describe_sync(r, SyncTarget::Context); }, {})
ONE(cuCtxSynchronize_v2, Kind::Sync, kNoStream, kSynchronous, Timed::No, (CUcontext context), (context),
    {
        describe_sync(r, SyncTarget::Context);
        quietly([&] {
            if (Context *c = context ? registry().context(context) : nullptr) {
                o.queue.context = c;
                r.context = c->serial;
            }
        });
    },
    {})
ONE(
    cuEventSynchronize, Kind::Sync, kNoStream, kSynchronous, Timed::No, (CUevent event), (event),
    {
        describe_sync(r, SyncTarget::Event);
        r.sync.event = number(event);
    },
    { quietly([&] { r.sync.record = recorded_by(event); }); })

// --- allocations ---

// Call this before the allocation. `to`: where the memory will be, if the program specifies it.
void will_allocate(Operation &o, size_t index, uint64_t bytes, uint64_t to = 0) {
    describe_call(o.record, index, bytes);
    if (agent.config.allocation_stacks) o.record.stack = host_stack();
    o.announce(bytes, to, 0);
}

void has_allocated(Operation &o, uint64_t bytes, uint64_t address) {
    Record &r = o.record;
    r.api.bytes = bytes;
    if (r.result != CUDA_SUCCESS || !address || !bytes) return;
    quietly([&] {
        describe_memory(r, address,
                        allocated(address, bytes, o.queue.context ? o.queue.context->serial : kNoContext));
    });
}

#define ALLOCATES(symbol, where, n, to, at, PARAMETERS, ARGUMENTS)     \
    ONE(                                                               \
        symbol, Kind::Api, where, 0, Timed::No, PARAMETERS, ARGUMENTS, \
        { will_allocate(o, kHook_##symbol, n, to); }, { has_allocated(o, n, at); })
#define ALLOCATES_STREAMED(symbol, n, at, PARAMETERS, ARGUMENTS)                   \
    ALLOCATES(symbol, (StreamRef{stream, false}), n, 0, at, PARAMETERS, ARGUMENTS) \
    ALLOCATES(symbol##_ptsz, (StreamRef{stream, true}), n, 0, at, PARAMETERS, ARGUMENTS)

uint64_t given(const CUdeviceptr *p) { return p ? *p : 0; }
uint64_t given(void **p) { return p ? number(*p) : 0; }

ALLOCATES(cuMemAlloc_v2, kNoStream, n, 0, given(p), (CUdeviceptr * p, size_t n), (p, n))
ONE(
    cuMemAllocPitch_v2, Kind::Api, kNoStream, 0, Timed::No,
    (CUdeviceptr * p, size_t *pitch, size_t width, size_t height, unsigned element),
    (p, pitch, width, height, element), { will_allocate(o, kHook_cuMemAllocPitch_v2, width * height); },
    {
        const bool made = r.result == CUDA_SUCCESS && pitch;
        has_allocated(o, (made ? *pitch : width) * height, given(p));
    })
ALLOCATES(cuMemAllocManaged, kNoStream, n, 0, given(p), (CUdeviceptr * p, size_t n, unsigned flags),
          (p, n, flags))
ALLOCATES(cuMemAllocHost_v2, kNoStream, n, 0, given(p), (void **p, size_t n), (p, n))
ALLOCATES(cuMemHostAlloc, kNoStream, n, 0, given(p), (void **p, size_t n, unsigned flags), (p, n, flags))
ALLOCATES(cuMemHostRegister_v2, kNoStream, n, number(p), number(p), (void *p, size_t n, unsigned flags),
          (p, n, flags))
ALLOCATES(cuMemMap, kNoStream, n, p, p,
          (CUdeviceptr p, size_t n, size_t offset, CUmemGenericAllocationHandle memory,
           unsigned long long flags),
          (p, n, offset, memory, flags))
ALLOCATES_STREAMED(cuMemAllocAsync, n, given(p), (CUdeviceptr * p, size_t n, CUstream stream), (p, n, stream))
ALLOCATES_STREAMED(cuMemAllocFromPoolAsync, n, given(p),
                   (CUdeviceptr * p, size_t n, CUmemoryPool pool, CUstream stream), (p, n, pool, stream))

// For another process's memory: asks the driver for its size.
uint64_t size_at(CUdeviceptr p) {
    Untimed scope;
    CUdeviceptr base = 0;
    size_t size = 0;
    return driver.cuMemGetAddressRange_v2 && driver.cuMemGetAddressRange_v2(&base, &size, p) == CUDA_SUCCESS
               ? size
               : 0;
}

ONE(
    cuIpcOpenMemHandle_v2, Kind::Api, kNoStream, 0, Timed::No,
    (CUdeviceptr * p, CUipcMemHandle handle, unsigned flags), (p, handle, flags),
    { will_allocate(o, kHook_cuIpcOpenMemHandle_v2, 0); },
    { has_allocated(o, r.result == CUDA_SUCCESS && p ? size_at(*p) : 0, given(p)); })
ONE(
    cuMemPoolImportPointer, Kind::Api, kNoStream, 0, Timed::No,
    (CUdeviceptr * p, CUmemoryPool pool, CUmemPoolPtrExportData *data), (p, pool, data),
    { will_allocate(o, kHook_cuMemPoolImportPointer, 0); },
    { has_allocated(o, r.result == CUDA_SUCCESS && p ? size_at(*p) : 0, given(p)); })

// Calls that share memory with other processes or devices. Some name the memory by a handle, not by its
// address, which is then 0 here.
#define SHARES(symbol, address, PARAMETERS, ARGUMENTS)                     \
    ONE(symbol, Kind::Api, kNoStream, 0, Timed::No, PARAMETERS, ARGUMENTS, \
        {                                                                  \
            describe_call(r, kHook_##symbol, 0);                           \
            describe_memory(r, address, allocation_epoch());               \
        },                                                                 \
        {})
SHARES(cuIpcGetMemHandle, p, (CUipcMemHandle * handle, CUdeviceptr p), (handle, p))
SHARES(cuMemPoolExportPointer, p, (CUmemPoolPtrExportData * data, CUdeviceptr p), (data, p))
SHARES(cuMemGetHandleForAddressRange, p,
       (void *handle, CUdeviceptr p, size_t n, CUmemRangeHandleType type, unsigned long long flags),
       (handle, p, n, type, flags))
SHARES(cuMemExportToShareableHandle, 0,
       (void *to, CUmemGenericAllocationHandle memory, CUmemAllocationHandleType type,
        unsigned long long flags),
       (to, memory, type, flags))
SHARES(cuMemImportFromShareableHandle, 0,
       (CUmemGenericAllocationHandle * memory, void *from, CUmemAllocationHandleType type),
       (memory, from, type))

// Frees the allocation at `address` or, with `bytes`, all allocations that begin in that range.
template <class Call>
CUresult frees(size_t index, StreamRef where, uint64_t address, uint64_t bytes, const Call &call) {
    Freeing what;
    return logged(
        Kind::Api, where, 0, Timed::No, call,
        [&](Operation &o) {
            describe_call(o.record, index, bytes);
            o.announce(bytes, 0, address);
            // In a capture, the call adds a node to a graph and frees nothing.
            if (address && !(o.record.flags & kCaptured)) quietly([&] { what = freeing(address, bytes); });
            describe_memory(o.record, address, what.epoch);
        },
        [&](Operation &o) {
            if (o.record.result == CUDA_SUCCESS) quietly([&] { freed(what); });
        });
}

#define FREES(symbol, where, address, bytes, PARAMETERS, ARGUMENTS)                                      \
    CUresult hook_##symbol PARAMETERS {                                                                  \
        return frees(kHook_##symbol, where, address, bytes, [&] { return ORIGINAL(symbol) ARGUMENTS; }); \
    }

FREES(cuMemFree_v2, kNoStream, p, 0, (CUdeviceptr p), (p))
FREES(cuMemFreeHost, kNoStream, number(p), 0, (void *p), (p))
FREES(cuMemHostUnregister, kNoStream, number(p), 0, (void *p), (p))
FREES(cuIpcCloseMemHandle, kNoStream, p, 0, (CUdeviceptr p), (p))
FREES(cuMemUnmap, kNoStream, p, n, (CUdeviceptr p, size_t n), (p, n))
FREES(cuMemFreeAsync, (StreamRef{stream, false}), p, 0, (CUdeviceptr p, CUstream stream), (p, stream))
FREES(cuMemFreeAsync_ptsz, (StreamRef{stream, true}), p, 0, (CUdeviceptr p, CUstream stream), (p, stream))

// --- other calls ---

// Forgets the handle before it can stand for something else.
#define FORGETS(symbol, Handle, forget)                             \
    CUresult hook_##symbol(Handle handle) {                         \
        HookCall hook;                                              \
        if (hook.keeps_records()) quietly([&] { forget(handle); }); \
        return FORWARD(symbol)(handle);                             \
    }
FORGETS(cuEventDestroy, CUevent, forget_event)
FORGETS(cuEventDestroy_v2, CUevent, forget_event)
FORGETS(cuStreamDestroy, CUstream, forget_queue)
FORGETS(cuStreamDestroy_v2, CUstream, forget_queue)

#define MAKES_STREAM(symbol, PARAMETERS, ARGUMENTS)                              \
    ONE(                                                                         \
        symbol, Kind::Api, kNoStream, 0, Timed::No, PARAMETERS, ARGUMENTS,       \
        { describe_call(r, kHook_##symbol, 0); },                                \
        {                                                                        \
            if (r.result == CUDA_SUCCESS) quietly([&] { new_stream(*stream); }); \
        })
MAKES_STREAM(cuStreamCreate, (CUstream * stream, unsigned flags), (stream, flags))
MAKES_STREAM(cuStreamCreateWithPriority, (CUstream * stream, unsigned flags, int priority),
             (stream, flags, priority))
MAKES_STREAM(cuGreenCtxStreamCreate, (CUstream * stream, CUgreenCtx green, unsigned flags, int priority),
             (stream, green, flags, priority))

// --- work that may not end by itself ---

void put_behind(StreamRef where) {
    if (!watchers.load(std::memory_order_acquire)) return;
    HookCall hook;
    if (hook.keeps_records()) launched_in(where);
}

#define HELD(symbol, where, PARAMETERS, ARGUMENTS) \
    CUresult hook_##symbol PARAMETERS {            \
        Launching launching;                       \
        CUresult r;                                \
        {                                          \
            HookCall hook;                         \
            r = FORWARD(symbol) ARGUMENTS;         \
        }                                          \
        put_behind(where);                         \
        return r;                                  \
    }
#define HELD_STREAMED(symbol, PARAMETERS, ARGUMENTS)                \
    HELD(symbol, (StreamRef{stream, false}), PARAMETERS, ARGUMENTS) \
    HELD(symbol##_ptsz, (StreamRef{stream, true}), PARAMETERS, ARGUMENTS)
HELD_STREAMED(cuStreamWaitValue32_v2, (CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned flags),
              (stream, at, value, flags))
HELD_STREAMED(cuStreamWaitValue64_v2, (CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned flags),
              (stream, at, value, flags))
HELD_STREAMED(cuStreamBatchMemOp_v2,
              (CUstream stream, unsigned n, CUstreamBatchMemOpParams *operations, unsigned flags),
              (stream, n, operations, flags))

#define HELD_CALL(symbol, where, PARAMETERS, ARGUMENTS)                                            \
    CUresult hook_##symbol PARAMETERS {                                                            \
        Launching launching;                                                                       \
        CUresult result = logged(                                                                  \
            Kind::HostFunction, where, 0, Timed::Yes, [&] { return ORIGINAL(symbol) ARGUMENTS; },  \
            [](Operation &o) { describe_call(o.record, kHook_##symbol, 0); }, [](Operation &) {}); \
        put_behind(where);                                                                         \
        return result;                                                                             \
    }
#define HELD_CALL_STREAMED(symbol, PARAMETERS, ARGUMENTS)                \
    HELD_CALL(symbol, (StreamRef{stream, false}), PARAMETERS, ARGUMENTS) \
    HELD_CALL(symbol##_ptsz, (StreamRef{stream, true}), PARAMETERS, ARGUMENTS)
HELD_CALL_STREAMED(cuLaunchHostFunc, (CUstream stream, CUhostFn function, void *data),
                   (stream, function, data))
HELD_CALL_STREAMED(cuLaunchHostFunc_v2, (CUstream stream, CUhostFn function, void *data, unsigned mode),
                   (stream, function, data, mode))
HELD_CALL_STREAMED(cuStreamAddCallback,
                   (CUstream stream, CUstreamCallback callback, void *data, unsigned flags),
                   (stream, callback, data, flags))

}  // namespace

void log_hooks() {
#define GPUBPF_HOOK(symbol) hooks[kHook_##symbol].replacement = reinterpret_cast<void *>(&hook_##symbol);
#include "hooks_held.def"
#include "hooks_log.def"
#undef GPUBPF_HOOK
}

}  // namespace gpubpf

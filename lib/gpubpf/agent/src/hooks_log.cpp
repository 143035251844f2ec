// The replacements of functions that are hooked for the operation log's sake alone: copies, memsets, events, synchronization,
// allocations. What they do for the program is what the original does.
#include <cstring>

#include "hook_call.h"
#include "operation.h"

// Names are those of the exported symbols, not what the header makes of them.
#undef cuEventDestroy
#undef cuStreamDestroy
#undef cuMemcpyBatchAsync
#undef cuMemcpy3DBatchAsync

namespace gpubpf {

namespace {

uint64_t number(const void *p) { return reinterpret_cast<uint64_t>(p); }

enum class Timed : bool { No, Yes };  // whether timing events go around it

// Calls the driver, and logs the operation. `describe` fills in what its kind has, once the call returned.
template <class Call, class Describe>
CUresult logged(Kind kind, Where where, uint16_t flags, Timed timed, const Call &call, const Describe &describe) {
  Outer outer;
  if (!outer || !oplog.on()) return call();
  Operation operation(kind, where, flags);
  if (timed == Timed::Yes) operation.time();
  operation.called();
  CUresult result = call();
  operation.returned(result);
  describe(operation.record);
  Record &r = operation.record;
  // Only what ends in host memory is over for certain when the call returns (CUDA driver API, "API synchronization behavior").
  if (timed == Timed::Yes && r.kind != Kind::DtoH && r.kind != Kind::HtoH) r.flags &= static_cast<uint16_t>(~kCallWaits);
  operation.log();
  return result;
}

// --- copies ---

struct Bytes {
  uint64_t size, to, from;
};

void describe_copy(Record &r, const Bytes &copy) {
  r.wide[0] = copy.size;
  r.wide[1] = copy.to;
  r.wide[2] = copy.from;
}

bool on_host(CUmemorytype type, uint64_t address) {
  if (type != CU_MEMORYTYPE_UNIFIED) return type == CU_MEMORYTYPE_HOST;
  ++depth();
  unsigned found = 0;
  bool known = driver.cuPointerGetAttribute &&
               driver.cuPointerGetAttribute(&found, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) == CUDA_SUCCESS;
  --depth();
  return !known || found == CU_MEMORYTYPE_HOST;  // what the driver does not know is pageable
}

Kind kind_of(bool from_host, bool to_host) {
  if (from_host) return to_host ? Kind::HtoH : Kind::HtoD;
  return to_host ? Kind::DtoH : Kind::DtoD;
}

// Copies between addresses of any kind.
void describe_unified(Record &r, const Bytes &copy) {
  describe_copy(r, copy);
  r.kind = kind_of(on_host(CU_MEMORYTYPE_UNIFIED, copy.from), on_host(CU_MEMORYTYPE_UNIFIED, copy.to));
}

// CUDA_MEMCPY2D, CUDA_MEMCPY3D: one place is a host pointer, a device pointer or an array.
template <class Params>
void describe_params(Record &r, const Params *p, uint64_t depth_of) {
  if (!p) return;
  auto place = [](CUmemorytype type, const void *host, CUdeviceptr device, CUarray array) {
    return type == CU_MEMORYTYPE_HOST ? number(host) : type == CU_MEMORYTYPE_ARRAY ? number(array) : uint64_t(device);
  };
  Bytes copy{uint64_t(p->WidthInBytes) * p->Height * depth_of, place(p->dstMemoryType, p->dstHost, p->dstDevice, p->dstArray),
             place(p->srcMemoryType, p->srcHost, p->srcDevice, p->srcArray)};
  describe_copy(r, copy);
  r.kind = kind_of(on_host(p->srcMemoryType, copy.from), on_host(p->dstMemoryType, copy.to));
}

void describe_batch(Record &r, const CUdeviceptr *to, const CUdeviceptr *from, const size_t *sizes, size_t n) {
  if (!to || !from || !sizes || !n) return;
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
  Bytes copy{0, place(ops[0].dst), place(ops[0].src)};
  for (size_t i = 0; i < n; ++i) copy.size += uint64_t(ops[i].extent.width) * ops[i].extent.height * ops[i].extent.depth;
  describe_copy(r, copy);
  r.kind = kind_of(host(ops[0].src), host(ops[0].dst));
}

// A function and the one whose null stream is the thread's own. `stream` is what the call names; DESCRIBE sees `Record &r`.
#define ONE(symbol, kind, where, flags, timed, PARAMETERS, ARGUMENTS, DESCRIBE)          \
  CUresult hook_##symbol PARAMETERS {                                                    \
    return logged(                                                                       \
        kind, where, flags, timed, [&] { return ORIGINAL(symbol) ARGUMENTS; },           \
        [&]([[maybe_unused]] Record &r) DESCRIBE);                                       \
  }
#define WAITS(symbol, kind, PARAMETERS, ARGUMENTS, DESCRIBE)                                                       \
  ONE(symbol, kind, (Where{nullptr, false}), kCallWaits, Timed::Yes, PARAMETERS, ARGUMENTS, DESCRIBE)              \
  ONE(symbol##_ptds, kind, (Where{nullptr, true}), kCallWaits, Timed::Yes, PARAMETERS, ARGUMENTS, DESCRIBE)
#define STREAMED(symbol, kind, timed, PARAMETERS, ARGUMENTS, DESCRIBE)                            \
  ONE(symbol, kind, (Where{stream, false}), 0, timed, PARAMETERS, ARGUMENTS, DESCRIBE)            \
  ONE(symbol##_ptsz, kind, (Where{stream, true}), 0, timed, PARAMETERS, ARGUMENTS, DESCRIBE)

WAITS(cuMemcpy, Kind::DtoD, (CUdeviceptr to, CUdeviceptr from, size_t n), (to, from, n), { describe_unified(r, {n, to, from}); })
WAITS(cuMemcpyPeer, Kind::DtoD, (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t n),
      (to, to_context, from, from_context, n), { describe_copy(r, {n, to, from}); })
WAITS(cuMemcpyHtoD_v2, Kind::HtoD, (CUdeviceptr to, const void *from, size_t n), (to, from, n),
      { describe_copy(r, {n, to, number(from)}); })
WAITS(cuMemcpyDtoH_v2, Kind::DtoH, (void *to, CUdeviceptr from, size_t n), (to, from, n),
      { describe_copy(r, {n, number(to), from}); })
WAITS(cuMemcpyDtoD_v2, Kind::DtoD, (CUdeviceptr to, CUdeviceptr from, size_t n), (to, from, n),
      { describe_copy(r, {n, to, from}); })
WAITS(cuMemcpyDtoA_v2, Kind::DtoD, (CUarray to, size_t at, CUdeviceptr from, size_t n), (to, at, from, n),
      { describe_copy(r, {n, number(to), from}); })
WAITS(cuMemcpyAtoD_v2, Kind::DtoD, (CUdeviceptr to, CUarray from, size_t at, size_t n), (to, from, at, n),
      { describe_copy(r, {n, to, number(from)}); })
WAITS(cuMemcpyHtoA_v2, Kind::HtoD, (CUarray to, size_t at, const void *from, size_t n), (to, at, from, n),
      { describe_copy(r, {n, number(to), number(from)}); })
WAITS(cuMemcpyAtoH_v2, Kind::DtoH, (void *to, CUarray from, size_t at, size_t n), (to, from, at, n),
      { describe_copy(r, {n, number(to), number(from)}); })
WAITS(cuMemcpyAtoA_v2, Kind::DtoD, (CUarray to, size_t to_at, CUarray from, size_t at, size_t n), (to, to_at, from, at, n),
      { describe_copy(r, {n, number(to), number(from)}); })
WAITS(cuMemcpy2D_v2, Kind::DtoD, (const CUDA_MEMCPY2D *p), (p), { describe_params(r, p, 1); })
WAITS(cuMemcpy2DUnaligned_v2, Kind::DtoD, (const CUDA_MEMCPY2D *p), (p), { describe_params(r, p, 1); })
WAITS(cuMemcpy3D_v2, Kind::DtoD, (const CUDA_MEMCPY3D *p), (p), { describe_params(r, p, p ? p->Depth : 1); })
WAITS(cuMemcpy3DPeer, Kind::DtoD, (const CUDA_MEMCPY3D_PEER *p), (p), { describe_params(r, p, p ? p->Depth : 1); })

STREAMED(cuMemcpyAsync, Kind::DtoD, Timed::Yes, (CUdeviceptr to, CUdeviceptr from, size_t n, CUstream stream),
         (to, from, n, stream), { describe_unified(r, {n, to, from}); })
STREAMED(cuMemcpyPeerAsync, Kind::DtoD, Timed::Yes,
         (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t n, CUstream stream),
         (to, to_context, from, from_context, n, stream), { describe_copy(r, {n, to, from}); })
STREAMED(cuMemcpyHtoDAsync_v2, Kind::HtoD, Timed::Yes, (CUdeviceptr to, const void *from, size_t n, CUstream stream),
         (to, from, n, stream), { describe_copy(r, {n, to, number(from)}); })
STREAMED(cuMemcpyDtoHAsync_v2, Kind::DtoH, Timed::Yes, (void *to, CUdeviceptr from, size_t n, CUstream stream),
         (to, from, n, stream), { describe_copy(r, {n, number(to), from}); })
STREAMED(cuMemcpyDtoDAsync_v2, Kind::DtoD, Timed::Yes, (CUdeviceptr to, CUdeviceptr from, size_t n, CUstream stream),
         (to, from, n, stream), { describe_copy(r, {n, to, from}); })
STREAMED(cuMemcpyHtoAAsync_v2, Kind::HtoD, Timed::Yes, (CUarray to, size_t at, const void *from, size_t n, CUstream stream),
         (to, at, from, n, stream), { describe_copy(r, {n, number(to), number(from)}); })
STREAMED(cuMemcpyAtoHAsync_v2, Kind::DtoH, Timed::Yes, (void *to, CUarray from, size_t at, size_t n, CUstream stream),
         (to, from, at, n, stream), { describe_copy(r, {n, number(to), number(from)}); })
STREAMED(cuMemcpy2DAsync_v2, Kind::DtoD, Timed::Yes, (const CUDA_MEMCPY2D *p, CUstream stream), (p, stream),
         { describe_params(r, p, 1); })
STREAMED(cuMemcpy3DAsync_v2, Kind::DtoD, Timed::Yes, (const CUDA_MEMCPY3D *p, CUstream stream), (p, stream),
         { describe_params(r, p, p ? p->Depth : 1); })
STREAMED(cuMemcpy3DPeerAsync, Kind::DtoD, Timed::Yes, (const CUDA_MEMCPY3D_PEER *p, CUstream stream), (p, stream),
         { describe_params(r, p, p ? p->Depth : 1); })
STREAMED(cuMemcpyBatchAsync, Kind::DtoD, Timed::Yes,
         (CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t n, void *attributes, size_t *starts, size_t count,
          size_t *failed, CUstream stream),
         (to, from, sizes, n, attributes, starts, count, failed, stream), { describe_batch(r, to, from, sizes, n); })
STREAMED(cuMemcpyBatchAsync_v2, Kind::DtoD, Timed::Yes,
         (CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t n, void *attributes, size_t *starts, size_t count,
          CUstream stream),
         (to, from, sizes, n, attributes, starts, count, stream), { describe_batch(r, to, from, sizes, n); })
STREAMED(cuMemcpy3DBatchAsync, Kind::DtoD, Timed::Yes,
         (size_t n, CUDA_MEMCPY3D_BATCH_OP *ops, size_t *failed, unsigned long long flags, CUstream stream),
         (n, ops, failed, flags, stream), { describe_batch(r, ops, n); })
STREAMED(cuMemcpy3DBatchAsync_v2, Kind::DtoD, Timed::Yes,
         (size_t n, CUDA_MEMCPY3D_BATCH_OP *ops, unsigned long long flags, CUstream stream), (n, ops, flags, stream),
         { describe_batch(r, ops, n); })

// --- memsets ---

void describe_fill(Record &r, uint64_t bytes, CUdeviceptr to) {
  r.wide[0] = bytes;
  r.wide[1] = to;
}

#define FILL(name, size, type)                                                                                             \
  WAITS(name##_v2, Kind::Memset, (CUdeviceptr to, type value, size_t n), (to, value, n), { describe_fill(r, n * size, to); }) \
  STREAMED(name##Async, Kind::Memset, Timed::Yes, (CUdeviceptr to, type value, size_t n, CUstream stream),                  \
           (to, value, n, stream), { describe_fill(r, n * size, to); })
#define FILL_2D(name, size, type)                                                                                           \
  WAITS(name##_v2, Kind::Memset, (CUdeviceptr to, size_t pitch, type value, size_t width, size_t height),                   \
        (to, pitch, value, width, height), { describe_fill(r, width * height * size, to); })                                \
  STREAMED(name##Async, Kind::Memset, Timed::Yes,                                                                           \
           (CUdeviceptr to, size_t pitch, type value, size_t width, size_t height, CUstream stream),                        \
           (to, pitch, value, width, height, stream), { describe_fill(r, width * height * size, to); })

FILL(cuMemsetD8, 1, unsigned char)
FILL(cuMemsetD16, 2, unsigned short)
FILL(cuMemsetD32, 4, unsigned)
FILL_2D(cuMemsetD2D8, 1, unsigned char)
FILL_2D(cuMemsetD2D16, 2, unsigned short)
FILL_2D(cuMemsetD2D32, 4, unsigned)

// --- events and synchronization ---

void describe_record(Record &r, CUevent event) {
  r.wide[0] = number(event);
  if (r.result == CUDA_SUCCESS) quietly([&] { event_recorded(event, r.flags & kCaptured ? 0 : r.id); });
}

constexpr uint64_t kNothing = ~uint64_t(0);  // as the record waited for: the event is over, or was never recorded

// A wait for an event of a capture takes its stream into the capture.
void describe_wait(Record &r, Where where, CUevent event) {
  if (capturing(where.handle())) r.flags |= kCaptured;
  r.wide[0] = number(event);
  quietly([&] {
    r.wide[1] = recorded_by(event);
    if (r.wide[1] || registry().captures.load(std::memory_order_relaxed) || !driver.cuEventQuery) return;
    DriverScope scope;
    if (driver.cuEventQuery(event) == CUDA_SUCCESS) r.wide[1] = kNothing;
  });
}

enum : uint32_t { kStream, kEvent, kContext };  // what the host waits for

STREAMED(cuEventRecord, Kind::Record, Timed::No, (CUevent event, CUstream stream), (event, stream), { describe_record(r, event); })
STREAMED(cuEventRecordWithFlags, Kind::Record, Timed::No, (CUevent event, CUstream stream, unsigned flags),
         (event, stream, flags), { describe_record(r, event); })
ONE(cuStreamWaitEvent, Kind::Wait, (Where{stream, false}), 0, Timed::No, (CUstream stream, CUevent event, unsigned flags),
    (stream, event, flags), { describe_wait(r, Where{stream, false}, event); })
ONE(cuStreamWaitEvent_ptsz, Kind::Wait, (Where{stream, true}), 0, Timed::No, (CUstream stream, CUevent event, unsigned flags),
    (stream, event, flags), { describe_wait(r, Where{stream, true}, event); })

void describe_sync(Record &r, uint32_t what) {
  r.flags |= kCallWaits;
  r.narrow[0] = what;
}

STREAMED(cuStreamSynchronize, Kind::Sync, Timed::No, (CUstream stream), (stream), { describe_sync(r, kStream); })
ONE(cuCtxSynchronize, Kind::Sync, kNoStream, kCallWaits, Timed::No, (), (), { describe_sync(r, kContext); })
ONE(cuCtxSynchronize_v2, Kind::Sync, kNoStream, kCallWaits, Timed::No, (CUcontext context), (context), {
  describe_sync(r, kContext);
  quietly([&] {
    if (Context *c = context ? registry().context(context) : nullptr) r.context = c->serial;
  });
})
ONE(cuEventSynchronize, Kind::Sync, kNoStream, kCallWaits, Timed::No, (CUevent event), (event), {
  describe_sync(r, kEvent);
  r.wide[1] = number(event);
  quietly([&] { r.wide[2] = recorded_by(event); });
})

// --- other calls ---

#define CALL(symbol, where, bytes, PARAMETERS, ARGUMENTS) \
  ONE(symbol, Kind::Api, where, 0, Timed::No, PARAMETERS, ARGUMENTS, { describe_call(r, kHook_##symbol, bytes); })
#define CALL_STREAMED(symbol, bytes, PARAMETERS, ARGUMENTS)         \
  CALL(symbol, (Where{stream, false}), bytes, PARAMETERS, ARGUMENTS) \
  CALL(symbol##_ptsz, (Where{stream, true}), bytes, PARAMETERS, ARGUMENTS)

// What the handle stood for is forgotten before it can stand for something else.
#define FORGETS(symbol, Handle, forget)                                        \
  CUresult hook_##symbol(Handle handle) {                                      \
    Outer outer;                                                               \
    if (outer.keeps_records()) quietly([&] { forget(handle); });               \
    return ORIGINAL(symbol)(handle);                                           \
  }
FORGETS(cuEventDestroy, CUevent, forget_event)
FORGETS(cuEventDestroy_v2, CUevent, forget_event)
FORGETS(cuStreamDestroy, CUstream, forget_lane)
FORGETS(cuStreamDestroy_v2, CUstream, forget_lane)

CALL(cuStreamCreate, kNoStream, 0, (CUstream * stream, unsigned flags), (stream, flags))
CALL(cuStreamCreateWithPriority, kNoStream, 0, (CUstream * stream, unsigned flags, int priority), (stream, flags, priority))
CALL(cuMemAlloc_v2, kNoStream, n, (CUdeviceptr * p, size_t n), (p, n))
CALL(cuMemAllocPitch_v2, kNoStream, width *height, (CUdeviceptr * p, size_t *pitch, size_t width, size_t height, unsigned element),
     (p, pitch, width, height, element))
CALL(cuMemAllocManaged, kNoStream, n, (CUdeviceptr * p, size_t n, unsigned flags), (p, n, flags))
CALL(cuMemFree_v2, kNoStream, 0, (CUdeviceptr p), (p))
CALL(cuMemAllocHost_v2, kNoStream, n, (void **p, size_t n), (p, n))
CALL(cuMemHostAlloc, kNoStream, n, (void **p, size_t n, unsigned flags), (p, n, flags))
CALL(cuMemFreeHost, kNoStream, 0, (void *p), (p))
CALL(cuMemHostRegister_v2, kNoStream, n, (void *p, size_t n, unsigned flags), (p, n, flags))
CALL(cuMemHostUnregister, kNoStream, 0, (void *p), (p))
CALL_STREAMED(cuMemAllocAsync, n, (CUdeviceptr * p, size_t n, CUstream stream), (p, n, stream))
CALL_STREAMED(cuMemAllocFromPoolAsync, n, (CUdeviceptr * p, size_t n, CUmemoryPool pool, CUstream stream), (p, n, pool, stream))
CALL_STREAMED(cuMemFreeAsync, 0, (CUdeviceptr p, CUstream stream), (p, stream))
CALL_STREAMED(cuLaunchHostFunc, 0, (CUstream stream, CUhostFn function, void *data), (stream, function, data))
CALL_STREAMED(cuStreamAddCallback, 0, (CUstream stream, CUstreamCallback callback, void *data, unsigned flags),
              (stream, callback, data, flags))

}  // namespace

void log_hooks() {
#define GPUBPF_HOOK(symbol) hooks[kHook_##symbol].replacement = reinterpret_cast<void *>(&hook_##symbol);
#include "hooks_log.def"
#undef GPUBPF_HOOK
}

}  // namespace gpubpf

// Start and return times of the program's HIP calls, which packets in a queue do not have.
//
// The functions are hooked like those of the CUDA driver (../src/patch.h). While a thread is in one, records of the work that it
// submits are held until the function returns.
#include <cstring>
#include <dlfcn.h>
#include <link.h>
#include <tuple>

#include "agent.h"
#include "log/stack.h"
#include "patch.h"
#include "thread.h"

namespace gpubpf {

namespace {

enum What {
    kLaunches,
    kWaitsForCopy,
    kWaitsForStream,
    kWaitsForGpu,
    kOther,
    kAllocates,
    kAllocatesInPool,
    kFreesInPool,
    kExports,
    kMoves,
    kWaitsForEvent
};
constexpr int kNoStream = -1;

// The last operation in each HIP stream, by the stream's handle.
struct Streams {
    std::mutex lock;
    std::unordered_map<uint64_t, uint64_t> last;
};
AttachmentState<Streams> streams;
constexpr size_t kMostStreams = 4096;

void log_wait(const Call &call, uint64_t returned, What what) {
    Record r;
    r.id = other_id();
    r.kind = Kind::Sync;
    r.thread = thread_id();
    r.call_ns = call.began;
    r.return_ns = returned;
    r.stream = call.stream;
    if (what == kWaitsForGpu) {
        if (agent.gpus.size() != 1) return;  // HIP does not say which GPU it waited for
        r.sync.what = static_cast<uint32_t>(SyncTarget::Context);
    } else {
        std::lock_guard<std::mutex> hold(streams->lock);
        const auto last = streams->last.find(call.stream);
        if (last == streams->last.end()) return;
        r.sync.what = static_cast<uint32_t>(SyncTarget::Operation);
        r.sync.record = last->second;
    }
    oplog.put(r);
}

void log_held(Call &call, uint64_t returned, int result) {
    if (call.waits && !result) log_copy_of_host(call);
    for (Record &r : call.records) {
        r.return_ns = returned;
        oplog.put(r);
    }
    if (call.records.empty() || result || call.stream == kUnknownStream) return;
    std::lock_guard<std::mutex> hold(streams->lock);
    if (streams->last.size() >= kMostStreams) streams->last.clear();
    streams->last[call.stream] = call.records.back().id;
}

template <int kStream, class... Arguments>
uint64_t stream_of(const Arguments &...arguments) {
    uint64_t stream = kUnknownStream;
    int at = 0;
    [[maybe_unused]] auto look = [&](const auto &argument) {
        if constexpr (std::is_pointer_v<std::decay_t<decltype(argument)>>)
            if (at == kStream) stream = reinterpret_cast<uint64_t>(argument);
        ++at;
    };
    (look(arguments), ...);
    return stream;
}

using P = void *;
using N = size_t;
using W = unsigned;
using I = int;

uint64_t address(P at) { return reinterpret_cast<uint64_t>(at); }

// Returns the memory that a call copies or sets, from the types of its arguments (hip_calls.def). The address of a symbol is not the
// address of its memory.
Moved moved_by(const char *, ...) { return {}; }
template <class... Rest>
Moved moved_by(const char *name, P to, P from, N bytes, Rest...) {
    return {strstr(name, "ToSymbol") ? 0 : address(to), strstr(name, "FromSymbol") ? 0 : address(from),
            bytes};
}
template <class... Rest>
Moved moved_by(const char *, P to, I, P from, I, N bytes, Rest...) {
    return {address(to), address(from), bytes};
}
template <class... Rest>
Moved moved_by(const char *, P to, N, P from, N, N width, N height, Rest...) {
    return {address(to), address(from), width * height};
}
template <class... Rest>
Moved moved_by(const char *name, P to, I, N count, Rest...) {
    return {address(to), 0, count * (strstr(name, "D32") ? 4 : strstr(name, "D16") ? 2 : 1)};
}
template <class... Rest>
Moved moved_by(const char *, P to, N, I, N width, N height, Rest...) {
    return {address(to), 0, width * height};
}

enum CallIndex : size_t {
#define HIP_CALL(symbol, ...) kCall_##symbol,
#include "hip_calls.def"
#undef HIP_CALL
    kCalls
};
extern Hook hip_hooks[kCalls];

constexpr bool allocates(What what) { return what == kAllocates || what == kAllocatesInPool; }

template <CallIndex kIndex, What kWhat, int kStream, class... Arguments>
int replacement(Arguments... arguments) {
    HookCall hook;
    auto *original = reinterpret_cast<int (*)(Arguments...)>(hip_hooks[kIndex].original);
    if (!hook.keeps_records()) return original(arguments...);
    if (!agent.live) {
        InDriver in_hip;
        return original(arguments...);
    }
    Call call;
    call.stream = stream_of<kStream>(arguments...);
    call.waits = kWhat == kWaitsForCopy;
    call.for_event = kWhat == kWaitsForEvent;
    if constexpr (kWhat == kWaitsForCopy || kWhat == kMoves)
        call.moved = moved_by(hip_hooks[kIndex].name, arguments...);
    if (call.waits) call.copies = copies_logged();
    if (allocates(kWhat)) call.allocates = hip_hooks[kIndex].name;
    if (allocates(kWhat) || (kWhat == kLaunches && agent.config.stacks)) call.stack = host_stack();
    call.began = now_ns();
    [[maybe_unused]] const std::tuple<Arguments...> all(arguments...);
    Freeing given_back;
    if constexpr (kWhat == kFreesInPool)
        quietly([&] { given_back = freeing(reinterpret_cast<uint64_t>(std::get<0>(all)), 0); });
    own_call() = &call;
    int result;
    {
        InDriver in_hip;
        result = original(arguments...);
    }
    own_call() = nullptr;
    if (!hook.keeps_records()) return result;
    const uint64_t returned = now_ns();
    quietly([&] {
        log_held(call, returned, result);
        if constexpr (kWhat == kAllocatesInPool)
            if (!result && !call.allocated)
                allocated_from_pool(*static_cast<void **>(std::get<0>(all)), std::get<1>(all), call);
        if (kWhat == kFreesInPool && !result) freed_into_pool(given_back, hip_hooks[kIndex].name);
        if constexpr (kWhat == kExports)
            if (!result) exported(std::get<1>(all), hip_hooks[kIndex].name);
        if (!result && (kWhat == kWaitsForStream || kWhat == kWaitsForGpu)) log_wait(call, returned, kWhat);
    });
    return result;
}

struct D {
    unsigned x, y, z;
};
struct E {
    size_t width, height, depth;
};
template <CallIndex kIndex, What kWhat, int kStream, class... Arguments>
void *replacement_of() {
    return reinterpret_cast<void *>(&replacement<kIndex, kWhat, kStream, Arguments...>);
}

Hook hip_hooks[kCalls] = {
#define HIP_CALL(symbol, what, stream, ...)                                                                \
    {#symbol, replacement_of<kCall_##symbol, what, stream __VA_OPT__(, ) __VA_ARGS__>(), nullptr, nullptr, \
     kLacksCall},
#include "hip_calls.def"
#undef HIP_CALL
};

constexpr bool kOfMemory[kCalls] = {
#define HIP_CALL(symbol, what, ...) allocates(what) || what == kFreesInPool || what == kExports,
#include "hip_calls.def"
#undef HIP_CALL
};

// Returns a handle of the HIP library in the process, or null.
void *hip_library() {
    std::string path;
    dl_iterate_phdr(
        [](dl_phdr_info *info, size_t, void *to) {
            const char *name = strrchr(info->dlpi_name, '/');
            name = name ? name + 1 : info->dlpi_name;
            if (strncmp(name, "libamdhip64.so", 14) != 0) return 0;
            *static_cast<std::string *>(to) = info->dlpi_name;
            return 1;
        },
        &path);
    return path.empty() ? nullptr : dlopen(path.c_str(), RTLD_NOLOAD | RTLD_LAZY);
}

}  // namespace

HookTable calls_to_hook(bool work, bool allocations) {
    void *library = work || allocations ? hip_library() : nullptr;
    if (!library) return {hip_hooks, 0};
    for (size_t i = 0; i < kCalls; ++i)
        hip_hooks[i].target =
            (kOfMemory[i] ? allocations : work) ? dlsym(library, hip_hooks[i].name) : nullptr;
    return {hip_hooks, kCalls};
}

bool allocates_memory(const char *function) {
    for (size_t i = 0; i < kCalls; ++i)
        if (kOfMemory[i] && strcmp(hip_hooks[i].name, function) == 0) return true;
    return false;
}

const Lifetime hip_lifetime = lifetime_of_attachment_state<streams>();

const void *driver_code() {
    void *library = hip_library();
    return library ? dlsym(library, "hipLaunchKernel") : nullptr;
}

}  // namespace gpubpf

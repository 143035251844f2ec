// Types, numbers and offsets: CUPTI 13 (cupti_activity.h). Records keep their first fields from version to
// version.
#include "log/cupti.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <mutex>
#include <type_traits>
#include <unordered_map>

#include "agent.h"
#include "driver/driver.h"
#include "hooks.h"
#include "log/clock.h"
#include "log/other_profilers.h"

namespace gpubpf {

namespace {

enum Activity : uint32_t {
    kMemcpy = 1,
    kMemset = 2,
    kDriver = 4,
    kConcurrentKernel = 10,
    kPeerCopy = 22,
    kExternal = 39
};
constexpr uint64_t bit(uint32_t activity) { return uint64_t(1) << activity; }
constexpr uint32_t kForced = 1;  // flag of cuptiActivityFlushAll: incomplete buffers, too
constexpr uint32_t kCustom = 3;  // kind of our external correlation ids
constexpr int kSuccess = 0;
constexpr size_t kBuffer = 1 << 20, kAligned = 8;
constexpr size_t kMost = 1 << 16;  // operations that wait for their times

// Offsets in a record. Start and end are at 16 and 24 in all of them.
constexpr size_t kStart = 16, kEnd = 24, kKernelCorrelation = 92, kCopyCorrelation = 44,
                 kPeerCorrelation = 60;
constexpr size_t kExternalId = 8, kExternalCorrelation = 16;

struct Functions {
    int (*Enable)(uint32_t);
    int (*Disable)(uint32_t);
    int (*RegisterCallbacks)(void (*)(uint8_t **, size_t *, size_t *),
                             void (*)(CUcontext, uint32_t, uint8_t *, size_t, size_t));
    int (*RegisterTimestampCallback)(uint64_t (*)());
    int (*GetNextRecord)(uint8_t *, size_t, uint8_t **);
    int (*PushExternalCorrelationId)(uint32_t, uint64_t);
    int (*PopExternalCorrelationId)(uint32_t, uint64_t *);
    int (*FlushAll)(uint32_t);
} cupti;

struct Waiting {
    std::mutex lock;
    std::unordered_map<uint64_t, Record> operations;      // by operation number
    std::unordered_map<uint32_t, uint64_t> correlations;  // CUPTI's number of a call → the operation's
};
Waiting *waiting = nullptr;
std::atomic<bool> on{false}, yielding{false};
std::atomic<bool> own_clock{false};            // CUPTI's times are on the log's clock
std::atomic<uint64_t> enabled{0}, refused{0};  // kinds of activities
std::mutex changing;                           // held while these change, and while CUPTI returns buffers

template <typename T>
T at(const uint8_t *record, size_t offset) {
    T value;
    memcpy(&value, record + offset, sizeof value);
    return value;
}

void log_span(uint32_t correlation, uint64_t start, uint64_t end) {
    Record span;
    {
        std::lock_guard<std::mutex> hold(waiting->lock);
        auto call = waiting->correlations.find(correlation);
        if (call == waiting->correlations.end()) return;
        auto operation = waiting->operations.find(call->second);
        waiting->correlations.erase(call);
        if (operation == waiting->operations.end()) return;
        span = operation->second;
        waiting->operations.erase(operation);
    }
    uint64_t of = span.id;
    span.kind = Kind::Span;
    span.id = take_ids(1);
    span.flags |= kHostClock;
    span.stack = 0;
    clear_part(span);
    span.span = {of, start, end, 0};
    oplog.put(span);
}

// After the end, a program that uses CUPTI gets the clock that CUPTI has by default on Linux
// (cupti_activity.h, cuptiActivityRegisterTimestampCallback). A callback cannot be removed.
uint64_t cupti_clock() {
    if (own_clock) return now_ns();
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000 + static_cast<uint64_t>(now.tv_nsec);
}

// What CUPTI must record for the times of an operation. 0: it gives none. A launch of a graph, for example, has
// a record for each node.
uint64_t activities_of(Kind kind) {
    switch (kind) {
        case Kind::Kernel: return bit(kDriver) | bit(kConcurrentKernel);
        case Kind::H2D:
        case Kind::D2H:
        case Kind::D2D:
        case Kind::H2H: return bit(kDriver) | bit(kMemcpy) | bit(kPeerCopy);
        case Kind::Memset: return bit(kDriver) | bit(kMemset);
        default: return 0;
    }
}

// Recording slows all kernels or copies of the program, so it begins with the first operation that needs it.
bool enable(uint64_t activities) {
    if ((enabled & activities) == activities) return true;
    if (refused & activities || registry().captures.load()) return false;
    std::lock_guard<std::mutex> hold(changing);
    if (!on) return false;
    DriverScope scope;
    for (uint32_t kind = 0; kind < 64; ++kind) {
        if (!(activities & ~enabled & bit(kind))) continue;
        if (cupti.Enable(kind) == kSuccess) enabled |= bit(kind);
        else refused |= bit(kind);
    }
    return (enabled & activities) == activities;
}

// CUPTI keeps no buffer of ours afterwards, so it cannot give one to another user's callback.
void stop_recording() {
    std::lock_guard<std::mutex> hold(changing);
    if (!on) return;
    on = yielding = false;
    DriverScope scope;
    for (uint32_t kind = 0; kind < 64; ++kind)
        if (enabled & bit(kind)) cupti.Disable(kind);
    enabled = 0;
    cupti.FlushAll(kForced);
    own_clock = false;
    std::lock_guard<std::mutex> table(waiting->lock);  // CUPTI may still call back, so the tables stay
    waiting->operations.clear();
    waiting->correlations.clear();
}

void buffer_requested(uint8_t **buffer, size_t *size, size_t *records) {
    *records = 0;
    *buffer = static_cast<uint8_t *>(aligned_alloc(kAligned, kBuffer));
    *size = *buffer ? kBuffer : 0;
}

void buffer_completed(CUcontext, uint32_t, uint8_t *buffer, size_t, size_t valid) {
    quietly([&] {
        uint8_t *record = nullptr;
        while (valid && cupti.GetNextRecord(buffer, valid, &record) == kSuccess) {
            size_t correlation = 0;
            switch (at<uint32_t>(record, 0)) {
                case kExternal: {
                    std::lock_guard<std::mutex> hold(waiting->lock);
                    if (waiting->correlations.size() >= kMost)
                        waiting->correlations.clear();  // of calls that never ran
                    waiting->correlations[at<uint32_t>(record, kExternalCorrelation)] =
                        at<uint64_t>(record, kExternalId);
                    break;
                }
                case kConcurrentKernel: correlation = kKernelCorrelation; break;
                case kMemcpy:
                case kMemset: correlation = kCopyCorrelation; break;
                case kPeerCopy: correlation = kPeerCorrelation; break;
                default: break;
            }
            if (correlation)
                log_span(at<uint32_t>(record, correlation), at<uint64_t>(record, kStart),
                         at<uint64_t>(record, kEnd));
        }
    });
    free(buffer);
}

bool find(void *library) {
    bool all = true;
    auto get = [&](auto &function, const char *name) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
        all = all && function;
    };
    get(cupti.Enable, "cuptiActivityEnable");
    get(cupti.Disable, "cuptiActivityDisable");
    get(cupti.RegisterCallbacks, "cuptiActivityRegisterCallbacks");
    get(cupti.RegisterTimestampCallback, "cuptiActivityRegisterTimestampCallback");
    get(cupti.GetNextRecord, "cuptiActivityGetNextRecord");
    get(cupti.PushExternalCorrelationId, "cuptiActivityPushExternalCorrelationId");
    get(cupti.PopExternalCorrelationId, "cuptiActivityPopExternalCorrelationId");
    get(cupti.FlushAll, "cuptiActivityFlushAll");
    return all;
}

}  // namespace

std::string start_cupti(const std::string &libraries, bool yields) {
    void *library = nullptr;
    for (size_t at = 0; !library && at < libraries.size();) {
        size_t end = std::min(libraries.find(':', at), libraries.size());
        library = dlopen(libraries.substr(at, end - at).c_str(), RTLD_NOW | RTLD_LOCAL);
        at = end + 1;
    }
    if (!library) return "it cannot be loaded";
    if (!find(library)) return "it is too old";
    if (!waiting) waiting = new Waiting;  // CUPTI may call back at once
    own_clock = true;
    int error = cupti.RegisterCallbacks(buffer_requested, buffer_completed);
    if (error == kSuccess) error = cupti.RegisterTimestampCallback(cupti_clock);
    if (error == kSuccess) error = cupti.Enable(kExternal);  // costs nothing without other kinds
    if (error != kSuccess) {
        own_clock = false;
        return "it does not record (error " + std::to_string(error) + ")";
    }
    enabled = bit(kExternal);
    refused = 0;
    yielding = yields;
    on = true;
    return "";
}

void end_cupti_records() {
    if (waiting) stop_recording();
}

bool begin_cupti(const Record &operation) noexcept {
    const uint64_t activities = on ? activities_of(operation.kind) : 0;
    bool ok = false;
    if (activities)
        quietly([&] {
            if (!enable(activities)) return;
            std::lock_guard<std::mutex> hold(waiting->lock);
            if (waiting->operations.size() >= kMost)
                waiting->operations.clear();  // operations that CUPTI did not report
            waiting->operations.emplace(operation.id, operation);
            ok = true;
        });
    if (ok) cupti.PushExternalCorrelationId(kCustom, operation.id);
    return ok;
}

void end_cupti() noexcept {
    uint64_t popped = 0;
    cupti.PopExternalCorrelationId(kCustom, &popped);
}

void collect_cupti() noexcept {
    if (!on) return;
    quietly([] {
        std::lock_guard<std::mutex> hold(changing);
        if (on) cupti.FlushAll(0);
    });
}

}  // namespace gpubpf

#ifdef __x86_64__

// Ends recording if a caller other than the driver loads another library than the driver. Returns the original of
// the hook.
extern "C" __attribute__((used)) void *gpubpf_loads(const char *library, const void *caller,
                                                    size_t hook) noexcept {
    using namespace gpubpf;
    Visit visit;
    if (attachment.load() && yielding && library && strcmp(library, "libcuda.so.1") != 0 &&
        !is_drivers(caller, reinterpret_cast<const void *>(cupti.Enable)))
        quietly(stop_recording);
    return hooks[hook].original;
}

// The stack has three registers, then the return address.
#define GPUBPF_LOADS(symbol, library)                                                            \
    __attribute__((naked)) void gpubpf::hook_##symbol() {                                        \
        asm("push %%rdi\n push %%rsi\n push %%rdx\n mov %%" library                              \
            ", %%rdi\n mov 24(%%rsp), %%rsi\n"                                                   \
            "mov %0, %%edx\n call gpubpf_loads\n pop %%rdx\n pop %%rsi\n pop %%rdi\n jmp *%%rax" \
            :                                                                                    \
            : "i"(gpubpf::kHook_##symbol));                                                      \
    }
GPUBPF_LOADS(dlopen, "rdi")
GPUBPF_LOADS(dlmopen, "rsi")

#else

void gpubpf::hook_dlopen() {}  // nothing is hooked there (patch.cpp)
void gpubpf::hook_dlmopen() {}

#endif

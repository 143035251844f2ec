// Types, numbers and offsets: CUPTI 13 (cupti_activity.h). Records keep their first fields from version to
// version.
#include "log/cupti.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <mutex>
#include <type_traits>
#include <unordered_map>

#include "agent.h"
#include "log/clock.h"

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
constexpr uint32_t kRecorded[] = {kExternal, kDriver, kConcurrentKernel, kMemcpy, kMemset, kPeerCopy};
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
bool on = false;

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
    get(cupti.RegisterCallbacks, "cuptiActivityRegisterCallbacks");
    get(cupti.RegisterTimestampCallback, "cuptiActivityRegisterTimestampCallback");
    get(cupti.GetNextRecord, "cuptiActivityGetNextRecord");
    get(cupti.PushExternalCorrelationId, "cuptiActivityPushExternalCorrelationId");
    get(cupti.PopExternalCorrelationId, "cuptiActivityPopExternalCorrelationId");
    get(cupti.FlushAll, "cuptiActivityFlushAll");
    cupti.Disable = reinterpret_cast<int (*)(uint32_t)>(dlsym(library, "cuptiActivityDisable"));
    return all;
}

}  // namespace

bool cupti_records() { return on; }

std::string start_cupti(const std::string &libraries) {
    void *library = nullptr;
    for (size_t at = 0; !library && at < libraries.size();) {
        size_t end = std::min(libraries.find(':', at), libraries.size());
        library = dlopen(libraries.substr(at, end - at).c_str(), RTLD_NOW | RTLD_LOCAL);
        at = end + 1;
    }
    if (!library) return "it cannot be loaded";
    if (!find(library)) return "it is too old";
    if (!waiting) waiting = new Waiting;  // CUPTI may call back at once
    int error = cupti.RegisterCallbacks(buffer_requested, buffer_completed);
    if (error == kSuccess) error = cupti.RegisterTimestampCallback(now_ns);
    for (uint32_t kind : kRecorded)
        if (error == kSuccess) error = cupti.Enable(kind);
    on = error == kSuccess;
    return on ? "" : "it does not record (error " + std::to_string(error) + ")";
}

void end_cupti_records() {
    if (!waiting) return;
    on = false;
    for (uint32_t kind : kRecorded)
        if (cupti.Disable) cupti.Disable(kind);
    std::lock_guard<std::mutex> hold(waiting->lock);  // CUPTI may still call back, so the tables stay
    waiting->operations.clear();
    waiting->correlations.clear();
}

void begin_cupti(const Record &operation) noexcept {
    quietly([&] {
        std::lock_guard<std::mutex> hold(waiting->lock);
        if (waiting->operations.size() >= kMost)
            waiting->operations.clear();  // operations that CUPTI did not report
        waiting->operations.emplace(operation.id, operation);
    });
    cupti.PushExternalCorrelationId(kCustom, operation.id);
}

void end_cupti() noexcept {
    uint64_t popped = 0;
    cupti.PopExternalCorrelationId(kCustom, &popped);
}

void collect_cupti() noexcept {
    if (on) quietly([] { cupti.FlushAll(0); });
}

}  // namespace gpubpf

// Types, numbers and offsets: CUPTI 13 (cupti_activity.h). Records keep their first fields from version to
// version.
#include "log/cupti.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "attachment.h"
#include "driver/driver.h"
#include "driver/gpu_idle.h"
#include "hook_table.h"
#include "library.h"
#include "log/clock.h"
#include "log/other_profilers.h"
#include "log/private_copy.h"

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
constexpr uint32_t kForced = 1;  // flag of cuptiActivityFlushAll: include incomplete buffers
constexpr uint32_t kCustom = 3;  // kind of the agent's external correlation ids
constexpr int kSuccess = 0;
constexpr uint32_t kDriverDomain = 1, kCalls = 4096;  // of callbacks; more calls than any driver has
constexpr size_t kBuffer = 1 << 20, kAligned = 8;
constexpr size_t kMost = 1 << 16;   // operations waiting for their times; also incomplete records
constexpr uint32_t kPatience = 50;  // ms that the recording of kernels waits for a suitable moment
constexpr std::chrono::nanoseconds kLeastPause = std::chrono::seconds(1),
                                   kMostPause = std::chrono::minutes(1);

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
    int (*EnableDriverApi)(uint32_t, uint8_t);  // null: this CUPTI can only record all driver calls, or none
    int (*GetCallbackName)(uint32_t, uint32_t, const char **);
} cupti;

struct Times {
    uint64_t start, end;
};
struct Waiting {
    std::mutex lock;
    std::unordered_map<uint64_t, Record> operations;  // by operation number
    std::deque<uint64_t> order;                       // the numbers of the latest operations
    // By CUPTI's number of a call: the operation's number, and the times. Either may come first.
    std::map<uint32_t, uint64_t> correlations;
    std::map<uint32_t, Times> times;
};
Waiting *waiting = nullptr;
std::atomic<bool> on{false}, yielding{false};
std::atomic<bool> own_clock{false};  // CUPTI's times are on the log's clock
std::atomic<uint64_t> enabled{0};    // kinds of activities
std::vector<uint32_t> calls;         // driver calls that CUPTI records
std::atomic<uint64_t> reported{0};   // kinds of operations (Kind)
// Held while these change, and while CUPTI returns buffers. A thread that cannot wait for it sets `ends`. Then
// the thread that holds it ends the recording.
std::timed_mutex changing;
std::atomic<bool> ends{false};
bool recording = false;
constexpr std::chrono::milliseconds kLongest{100};  // longest time that the program's dlopen() waits
// On steady_clock: when to try to record kernels, and how long to wait after a try that failed.
constexpr int64_t kNever = INT64_MAX;  // an attempt is in progress, or kernels are recorded
std::atomic<int64_t> kernels_due{0};
std::chrono::nanoseconds kernels_pause = kLeastPause;  // only the worker thread uses it

template <typename T>
T at(const uint8_t *record, size_t offset) {
    T value;
    memcpy(&value, record + offset, sizeof value);
    return value;
}

// Adds an entry. If there is no room, the oldest entry is dropped: it belongs to a call that never ran, or to
// work of the program that is not timed here. CUPTI's numbers ascend.
template <typename T>
void add(std::map<uint32_t, T> &entries, uint32_t correlation, T entry) {
    if (entries.size() >= kMost) entries.erase(entries.begin());
    entries[correlation] = entry;
}

// Logs the span of a call if its operation and its times are known. Call it with waiting->lock held.
void log_span(uint32_t correlation) {
    auto call = waiting->correlations.find(correlation);
    auto times = waiting->times.find(correlation);
    if (call == waiting->correlations.end() || times == waiting->times.end()) return;
    const uint64_t of = call->second;
    const Times its = times->second;
    waiting->correlations.erase(call);
    waiting->times.erase(times);
    auto operation = waiting->operations.find(of);
    if (operation == waiting->operations.end()) return;
    Record span = operation->second;
    waiting->operations.erase(operation);
    reported |= uint64_t(1) << static_cast<uint32_t>(span.kind);
    span.kind = Kind::Span;
    span.id = other_id();
    span.flags |= kHostClock;
    span.stack = 0;
    clear_part(span);
    span.span = {of, its.start, its.end, 0};
    oplog.put(span);
    ++agent.control->cupti_reported;
}

// After the end, a program that uses CUPTI gets the clock that CUPTI has by default on Linux
// (cupti_activity.h, cuptiActivityRegisterTimestampCallback). A callback cannot be removed.
uint64_t cupti_clock() {
    if (own_clock) return now_ns();
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000 + static_cast<uint64_t>(now.tv_nsec);
}

// Returns what CUPTI must record for the times of an operation. 0: it cannot time it. A launch of a graph, for
// example, has a record for each node.
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

// CUPTI keeps none of the agent's buffers afterwards, so it cannot give one to another user's callback. Call
// it with `changing` held.
void disable_all() {
    ends = false;
    if (!recording) return;
    recording = false;
    DriverScope scope;
    SignalsBlocked blocked;
    for (uint32_t kind = 0; kind < 64; ++kind)
        if (enabled & bit(kind)) cupti.Disable(kind);
    for (uint32_t call : calls) cupti.EnableDriverApi(call, 0);
    calls.clear();
    enabled = 0;
    cupti.FlushAll(kForced);
    own_clock = false;
    std::lock_guard<std::mutex> table(waiting->lock);  // CUPTI may still call back, so the tables stay
    waiting->operations.clear();
    waiting->order.clear();
    waiting->correlations.clear();
    waiting->times.clear();
}

// Does `work` while CUPTI records, and ends the recording if that was requested meanwhile.
template <typename Work>
void while_recording(const Work &work) {
    {
        std::lock_guard<std::timed_mutex> hold(changing);
        DriverScope scope;
        SignalsBlocked blocked;
        if (on) work();
    }
    if (!ends) return;
    std::lock_guard<std::timed_mutex> hold(changing);
    disable_all();
}

void stop_recording() {
    on = yielding = false;
    std::lock_guard<std::timed_mutex> hold(changing);
    disable_all();
}

// The same for a thread of the program. CUPTI may be waiting for that thread.
void stop_recording_soon() {
    on = yielding = false;
    ends = true;
    if (std::unique_lock<std::timed_mutex> hold(changing, kLongest); hold) disable_all();
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
                    const uint32_t call = at<uint32_t>(record, kExternalCorrelation);
                    add(waiting->correlations, call, at<uint64_t>(record, kExternalId));
                    log_span(call);
                    break;
                }
                case kConcurrentKernel: correlation = kKernelCorrelation; break;
                case kMemcpy:
                case kMemset: correlation = kCopyCorrelation; break;
                case kPeerCopy: correlation = kPeerCorrelation; break;
                default: break;
            }
            // 0: CUPTI could not collect the time, or the record is incomplete.
            const Times times{at<uint64_t>(record, kStart), at<uint64_t>(record, kEnd)};
            if (!correlation || !times.start || !times.end) continue;
            std::lock_guard<std::mutex> hold(waiting->lock);
            const uint32_t call = at<uint32_t>(record, correlation);
            add(waiting->times, call, times);
            log_span(call);
        }
    });
    free(buffer);
}

bool find(void *library) {
    FunctionsOf(library)
        .get(cupti.EnableDriverApi, "cuptiActivityEnableDriverApi")
        .get(cupti.GetCallbackName, "cuptiGetCallbackName");
    return FunctionsOf(library)
        .get(cupti.Enable, "cuptiActivityEnable")
        .get(cupti.Disable, "cuptiActivityDisable")
        .get(cupti.RegisterCallbacks, "cuptiActivityRegisterCallbacks")
        .get(cupti.RegisterTimestampCallback, "cuptiActivityRegisterTimestampCallback")
        .get(cupti.GetNextRecord, "cuptiActivityGetNextRecord")
        .get(cupti.PushExternalCorrelationId, "cuptiActivityPushExternalCorrelationId")
        .get(cupti.PopExternalCorrelationId, "cuptiActivityPopExternalCorrelationId")
        .get(cupti.FlushAll, "cuptiActivityFlushAll")
        .all();
}

// External correlations need records of the driver's calls (cupti_activity.h,
// cuptiActivityPushExternalCorrelationId). Only those calls are recorded that put a wanted operation into a stream.
bool enable_calls(uint64_t wanted) {
    if (!cupti.EnableDriverApi || !cupti.GetCallbackName) return cupti.Enable(kDriver) == kSuccess;
    bool any = false;
    for (uint32_t call = 1; call < kCalls; ++call) {
        const char *name = nullptr;
        if (cupti.GetCallbackName(kDriverDomain, call, &name) != kSuccess || !name) continue;
        const std::string_view called = name;
        const bool copies = called.rfind("cuMemcpy", 0) == 0 || called.rfind("cuMemset", 0) == 0;
        const bool launches = called.rfind("cuLaunch", 0) == 0;
        if (((copies && wanted & bit(kMemcpy)) || (launches && wanted & bit(kConcurrentKernel))) &&
            cupti.EnableDriverApi(call, 1) == kSuccess) {
            calls.push_back(call);
            any = true;
        }
    }
    return any || cupti.Enable(kDriver) == kSuccess;
}

// Records activities of the kinds in `wanted`, and the driver's calls that cause them.
void enable_kinds(uint64_t wanted) {
    if (enable_calls(wanted)) enabled |= bit(kDriver);
    for (uint32_t kind = 0; kind < 64; ++kind)
        if (wanted & ~bit(kDriver) & bit(kind) && cupti.Enable(kind) == kSuccess) enabled |= bit(kind);
}

// Begins to record with the library that find() has found. Returns CUPTI's error.
int record_with_it(uint64_t wanted) {
    own_clock = true;
    int error = cupti.RegisterCallbacks(buffer_requested, buffer_completed);
    if (error == kSuccess) error = cupti.RegisterTimestampCallback(cupti_clock);
    if (error == kSuccess) error = cupti.Enable(kExternal);
    if (error == kSuccess) {
        calls.clear();
        enabled = bit(kExternal);
        enable_kinds(wanted);
        return kSuccess;
    }
    own_clock = false;
    return error;
}

int64_t steady_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// Has the worker thread record kernels, if an attempt is due.
void want_kernels() {
    int64_t due = kernels_due.load(std::memory_order_relaxed);
    if (due != kNever && steady_ns() >= due && kernels_due.compare_exchange_strong(due, kNever))
        agent.wake_to_record_kernels();
}

}  // namespace

std::string start_cupti(const std::string &libraries, bool yields) {
    if (!waiting) waiting = new Waiting;  // CUPTI may call back at once
    reported = 0;
    const uint64_t wanted =
        activities_of(Kind::H2D) | activities_of(Kind::Memset) | (yields ? 0 : activities_of(Kind::Kernel));
    std::string why = "it cannot be loaded";
    DriverScope scope;
    SignalsBlocked blocked;
    any_path(libraries, [&](const std::string &path) {
        void *library = yields ? load_private_copy(path) : dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!library) return false;
        // A library that is not used stays loaded, because it may have started threads.
        if (!find(library)) why = "it is too old";
        else if (int error = record_with_it(wanted); error != kSuccess)
            why = "it does not record (error " + std::to_string(error) + ")";
        else {
            yielding = yields;
            kernels_due = 0;
            kernels_pause = kLeastPause;
            ends = false;
            recording = on = true;
            why.clear();
        }
        return why.empty();
    });
    return why;
}

void end_cupti_records() {
    if (waiting) stop_recording();
}

void record_kernels() {
    std::vector<Context *> contexts;
    for (Context *c : registry().all_contexts())
        if (!c->dead) contexts.push_back(c);
    const bool possible = std::all_of(contexts.begin(), contexts.end(), is_usable);
    if (possible && on)
        when_idle(contexts, kPatience, [](LaunchesHeld &) {
            while_recording([] {
                if (cupti.Enable(kConcurrentKernel) != kSuccess) return;
                if (enable_calls(bit(kConcurrentKernel))) enabled |= bit(kDriver) | bit(kConcurrentKernel);
                else cupti.Disable(kConcurrentKernel);
            });
        });
    if (enabled & bit(kConcurrentKernel)) return;
    kernels_due = steady_ns() + kernels_pause.count();
    kernels_pause = std::min(2 * kernels_pause, kMostPause);
}

Recorded begin_cupti(const Record &operation) noexcept {
    const uint64_t activities = on ? activities_of(operation.kind) : 0;
    if (!activities) return Recorded::No;
    if ((enabled & activities) != activities) {
        if (operation.kind == Kind::Kernel && yielding) want_kernels();
        return Recorded::No;
    }
    bool ok = false;
    quietly([&] {
        std::lock_guard<std::mutex> hold(waiting->lock);
        // Some operations have no record, such as copies of 0 bytes.
        if (waiting->order.size() >= kMost) {
            waiting->operations.erase(waiting->order.front());
            waiting->order.pop_front();
        }
        ok = waiting->operations.emplace(operation.id, operation).second;
        if (ok) waiting->order.push_back(operation.id);
    });
    if (!ok) return Recorded::No;
    cupti.PushExternalCorrelationId(kCustom, operation.id);
    return reported & uint64_t(1) << static_cast<uint32_t>(operation.kind) ? Recorded::Yes
                                                                           : Recorded::Perhaps;
}

void end_cupti(const Record &operation, bool failed) noexcept {
    uint64_t popped = 0;
    cupti.PopExternalCorrelationId(kCustom, &popped);
    if (!failed) return;
    std::lock_guard<std::mutex> hold(waiting->lock);
    waiting->operations.erase(operation.id);
}

void collect_cupti() noexcept {
    if (on) quietly([] { while_recording([] { cupti.FlushAll(0); }); });
}

}  // namespace gpubpf

// Ends recording if a caller other than the driver loads another library than the driver. Returns the original of
// the hook. The hooks of dlopen and dlmopen call it (machine/*/loads.cpp).
extern "C" __attribute__((used)) void *gpubpf_loads(const char *library, const void *caller,
                                                    size_t hook) noexcept {
    using namespace gpubpf;
    const bool nested = is_nested();  // CUPTI loads a library itself, in a call of the agent
    Visit visit;
    if (!nested && attachment.load() && yielding && library && strcmp(library, "libcuda.so.1") != 0 &&
        !is_drivers(caller, reinterpret_cast<const void *>(cupti.Enable)))
        quietly(stop_recording_soon);
    return hooks[hook].original;
}

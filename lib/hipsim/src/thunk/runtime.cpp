// Virtual clock: the functions of ROCr at which host threads submit work, wait for it, or look whether it is complete.
//
// ROCr passes its table of functions to OnLoad, because HSA_TOOLS_LIB names this library. HIP and other programs call ROCr through
// the table. The rules:
//
// - A launch call takes the calling thread 1,000 ns, a copy on the CPU 1 ns for 10 bytes. All other submissions take no time.
// - A wait takes the thread until the time at which the signal's work is complete.
// - A thread that reads a signal whose work is complete at a later time than the thread's own sees that it is not complete yet. So
//   what HIP does depends on virtual times alone, not on the speed of host and device.
// - A thread that reads such signals again and again is polling: then it has waited for the first of them.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include <amd_hsa_signal.h>
#include <hsa.h>
#define AMD_INTERNAL_BUILD  // else it looks for other headers in a folder inc
#include <hsa_api_trace.h>
#undef AMD_INTERNAL_BUILD
#include <hsa_ext_amd.h>

#include "config.h"
#include "thunk/clock.h"
#include "thunk/handlers.h"
#include "thunk/hip_calls.h"
#include "thunk/submissions.h"

namespace hipsim {
namespace {

constexpr uint64_t kShortWait = 1'000'000;  // ns: HIP waits 10 us and 100 us before it does something else
constexpr uint32_t kPolls = 64;
// ns of hsa_init. ROCr divides by the time since it read the clocks first.
constexpr uint64_t kInitialize = 1'000'000;

CoreApiTable core;  // ROCr's own functions
AmdExtTable amd;

// --- what a thread sees of a signal ---

// The signals that the thread has read since it last did something else.
struct Polling {
    uint32_t reads = 0;
    uint64_t first = UINT64_MAX;  // the earliest of their ends
};
thread_local Polling polling;

// The calling thread submits or waits.
void act() {
    note_activity();
    polling = {};
}

amd_signal_t *memory_of(hsa_signal_t signal) {
    auto *memory = reinterpret_cast<amd_signal_t *>(signal.handle);
    return memory != nullptr && memory->kind == AMD_SIGNAL_KIND_USER ? memory : nullptr;
}

uint64_t end_of(const amd_signal_t &signal) { return __atomic_load_n(&signal.end_ts, __ATOMIC_RELAXED); }

bool holds(hsa_signal_condition_t condition, hsa_signal_value_t value, hsa_signal_value_t compared) {
    switch (condition) {
        case HSA_SIGNAL_CONDITION_EQ: return value == compared;
        case HSA_SIGNAL_CONDITION_NE: return value != compared;
        case HSA_SIGNAL_CONDITION_LT: return value < compared;
        default: return value >= compared;
    }
}

// Returns the value that the calling thread sees, which `value` is in truth: without the last decrement, if that is later.
hsa_signal_value_t seen(const amd_signal_t &signal, hsa_signal_value_t value) {
    note_activity();
    uint64_t end = end_of(signal);
    if (end <= host_time()) return value;
    if (value > 0) {
        polling.reads = 0;  // the device has not got that far
        return value;
    }
    polling.first = std::min(polling.first, end);
    if (++polling.reads > kPolls) {
        end = polling.first;
        polling = {};
        advance_host(end);
    }
    // Another thread has reached this time, and may have told this one.
    if (uint64_t end = end_of(signal); end <= latest_host_time()) advance_host(end);
    return value + (end_of(signal) > host_time());
}

template <auto kFunction>
hsa_signal_value_t on_load(hsa_signal_t signal) {
    hsa_signal_value_t value = (core.*kFunction)(signal);
    const amd_signal_t *memory = untimed() ? nullptr : memory_of(signal);
    return memory == nullptr ? value : seen(*memory, value);
}

template <auto kFunction>
hsa_signal_value_t on_wait(hsa_signal_t signal, hsa_signal_condition_t condition, hsa_signal_value_t compared,
                           uint64_t timeout, hsa_wait_state_t state) {
    const amd_signal_t *memory = untimed() ? nullptr : memory_of(signal);
    if (memory == nullptr) return (core.*kFunction)(signal, condition, compared, timeout, state);
    hsa_signal_value_t value = seen(*memory, core.hsa_signal_load_scacquire_fn(signal));
    if (holds(condition, value, compared) || timeout < kShortWait) return value;
    act();
    {
        Waits here([&] { return holds(condition, core.hsa_signal_load_relaxed_fn(signal), compared); });
        value = (core.*kFunction)(signal, condition, compared, timeout, state);
    }
    if (holds(condition, value, compared)) advance_host(end_of(*memory));
    act();
    return value;
}

uint32_t on_wait_any(uint32_t count, hsa_signal_t *signals, hsa_signal_condition_t *conditions,
                     hsa_signal_value_t *compared, uint64_t timeout, hsa_wait_state_t state,
                     hsa_signal_value_t *value) {
    act();
    uint32_t found;
    {
        Waits here([&] {
            return std::any_of(signals, signals + count, [&](const hsa_signal_t &signal) {
                size_t i = static_cast<size_t>(&signal - signals);
                return holds(conditions[i], core.hsa_signal_load_relaxed_fn(signal), compared[i]);
            });
        });
        found = amd.hsa_amd_signal_wait_any_fn(count, signals, conditions, compared, timeout, state, value);
    }
    const amd_signal_t *memory = found < count ? memory_of(signals[found]) : nullptr;
    if (memory != nullptr && !untimed()) advance_host(end_of(*memory));
    return found;
}

// What a host thread stores is complete at the thread's time.
void note_change(hsa_signal_t signal) {
    if (untimed()) return;
    act();
    if (amd_signal_t *memory = memory_of(signal); memory != nullptr)
        memory->end_ts = std::max(memory->end_ts, host_time());
}

template <auto kFunction>
void on_store(hsa_signal_t signal, hsa_signal_value_t value) {
    Works here;
    if (submit_packets(signal, static_cast<uint64_t>(value))) polling = {};
    else note_change(signal);
    (core.*kFunction)(signal, value);
}

template <auto kFunction>
void on_subtract(hsa_signal_t signal, hsa_signal_value_t value) {
    note_change(signal);
    (core.*kFunction)(signal, value);
}

// --- functions that ROCr calls ---

struct Handler {
    hsa_signal_t signal;
    hsa_signal_condition_t condition;
    hsa_signal_value_t compared;
    hsa_amd_signal_handler function;
    void *argument;
    Request request;
};

bool on_change(hsa_signal_value_t value, void *argument) {
    note_thread_of_rocr();
    Handler *handler = static_cast<Handler *>(argument);
    const amd_signal_t *memory = memory_of(handler->signal);
    run_at(memory == nullptr ? 0 : end_of(*memory), handler->request, [handler, value] {
        const Handler &of = *handler;
        if (!of.function(value, of.argument) ||
            amd.hsa_amd_signal_async_handler_fn(of.signal, of.condition, of.compared, on_change, handler) !=
                HSA_STATUS_SUCCESS)
            delete handler;
    });
    return false;
}

hsa_status_t on_async_handler(hsa_signal_t signal, hsa_signal_condition_t condition,
                              hsa_signal_value_t compared, hsa_amd_signal_handler function, void *argument) {
    Works here;
    act();
    if (untimed() || signal.handle == 0 || function == nullptr)
        return amd.hsa_amd_signal_async_handler_fn(signal, condition, compared, function, argument);
    auto *handler = new Handler{signal, condition, compared, function, argument, request()};
    hsa_status_t status =
        amd.hsa_amd_signal_async_handler_fn(signal, condition, compared, on_change, handler);
    if (status != HSA_STATUS_SUCCESS) delete handler;
    return status;
}

// --- copies ---

// Calls ROCr to copy, and notes when.
template <typename Call>
hsa_status_t copy(hsa_signal_t completion, const Call &call) {
    Works here;
    if (untimed()) return call();
    act();
    begin_submission(false);
    submit_work(completion.handle, host_time());
    hsa_status_t status = call();
    if (status != HSA_STATUS_SUCCESS) forget_work(completion.handle);
    return status;
}

hsa_status_t on_copy(void *to, hsa_agent_t at, const void *from, hsa_agent_t of, size_t size, uint32_t count,
                     const hsa_signal_t *signals, hsa_signal_t completion) {
    return copy(completion, [&] {
        return amd.hsa_amd_memory_async_copy_fn(to, at, from, of, size, count, signals, completion);
    });
}

hsa_status_t on_copy_box(const hsa_pitched_ptr_t *to, const hsa_dim3_t *to_offset,
                         const hsa_pitched_ptr_t *from, const hsa_dim3_t *from_offset,
                         const hsa_dim3_t *extent, hsa_agent_t by, hsa_amd_copy_direction_t direction,
                         uint32_t count, const hsa_signal_t *signals, hsa_signal_t completion) {
    return copy(completion, [&] {
        return amd.hsa_amd_memory_async_copy_rect_fn(to, to_offset, from, from_offset, extent, by, direction,
                                                     count, signals, completion);
    });
}

// Releases of ROCr from 5.5 on have a function that also chooses the engine.
template <typename Table>
void replace_copy_by_engine(Table &table) {
    if constexpr (requires { table.hsa_amd_memory_async_copy_on_engine_fn; }) {
        using Function = decltype(table.hsa_amd_memory_async_copy_on_engine_fn);
        static Function original;
        original = table.hsa_amd_memory_async_copy_on_engine_fn;
        table.hsa_amd_memory_async_copy_on_engine_fn =
            [](void *to, hsa_agent_t at, const void *from, hsa_agent_t of, size_t size, uint32_t count,
               const hsa_signal_t *signals, hsa_signal_t completion, auto engine, bool force) {
                return copy(completion, [&] {
                    return original(to, at, from, of, size, count, signals, completion, engine, force);
                });
            };
    }
}

// Calls of ROCr that return when the copy or fill is complete.
hsa_status_t on_memory_copy(void *to, const void *from, size_t size) {
    act();
    hsa_status_t status = core.hsa_memory_copy_fn(to, from, size);
    if (status == HSA_STATUS_SUCCESS && !untimed()) advance_host(host_time() + copy_ns(size));
    return status;
}

hsa_status_t on_fill(void *to, uint32_t value, size_t count) {
    act();
    hsa_status_t status = amd.hsa_amd_memory_fill_fn(to, value, count);
    if (status == HSA_STATUS_SUCCESS && !untimed())
        advance_host(host_time() + fill_ns(count * sizeof(value)));
    return status;
}

// --- queues ---

hsa_status_t on_create(hsa_agent_t agent, uint32_t size, hsa_queue_type32_t type,
                       void (*error)(hsa_status_t, hsa_queue_t *, void *), void *data, uint32_t scratch,
                       uint32_t group, hsa_queue_t **made) {
    Works here;
    hsa_status_t status = core.hsa_queue_create_fn(agent, size, type, error, data, scratch, group, made);
    if (status == HSA_STATUS_SUCCESS) note_queue(*made);
    return status;
}

hsa_status_t on_create_intercepted(hsa_agent_t agent, uint32_t size, hsa_queue_type32_t type,
                                   void (*error)(hsa_status_t, hsa_queue_t *, void *), void *data,
                                   uint32_t scratch, uint32_t group, hsa_queue_t **made) {
    Works here;
    hsa_status_t status =
        amd.hsa_amd_queue_intercept_create_fn(agent, size, type, error, data, scratch, group, made);
    if (status == HSA_STATUS_SUCCESS) note_queue(*made);
    return status;
}

hsa_status_t on_destroy(hsa_queue_t *queue) {
    Works here;
    act();
    if (queue != nullptr) forget_queue(queue);
    return core.hsa_queue_destroy_fn(queue);
}

uint64_t on_load_read_index(const hsa_queue_t *queue) {
    uint64_t index = core.hsa_queue_load_read_index_relaxed_fn(queue);
    return untimed() ? index : std::min(index, packets_complete(queue));
}

hsa_status_t on_destroy_signal(hsa_signal_t signal) {
    Works here;
    if (signal.handle != 0) forget_signal(signal.handle);
    return core.hsa_signal_destroy_fn(signal);
}

// Sets variables of the environment before the program starts, because HIP and ROCr read them when they start: puts this library
// into HSA_TOOLS_LIB, and lets the device copy what HIP would otherwise write into device memory itself.
[[gnu::constructor]] void prepare_environment() {
    constexpr char kVariable[] = "HSA_TOOLS_LIB", kOwn[] = "libhsakmt.so.1";
    const char *clock = getenv("HIPSIM_CLOCK"), *others = getenv(kVariable);
    if (clock == nullptr || strcmp(clock, "virtual") != 0) return;
    setenv("ROC_ENABLE_LARGE_BAR", "0", 0);
    if (others != nullptr && strstr(others, kOwn) != nullptr) return;
    // First: then tools put their functions before these.
    std::string all = kOwn;
    if (others != nullptr && *others != '\0') all += std::string(" ") + others;
    setenv(kVariable, all.c_str(), 1);
}

}  // namespace
}  // namespace hipsim

using namespace hipsim;

extern "C" {
#pragma GCC visibility push(default)

bool OnLoad(HsaApiTable *table, uint64_t, uint64_t, const char *const *) {
    if (!config().virtual_clock) return false;
    if (table->core_->version.minor_id < sizeof(CoreApiTable) ||
        table->amd_ext_->version.minor_id < offsetof(AmdExtTable, hsa_amd_memory_async_copy_rect_fn) + 8) {
        fprintf(stderr,
                "hipsim: this release of ROCr has another table of functions; the virtual clock does not "
                "repeat exactly\n");
        return false;
    }
    core = *table->core_;
    memcpy(static_cast<void *>(&amd), table->amd_ext_,
           std::min(sizeof amd, size_t{table->amd_ext_->version.minor_id}));
    CoreApiTable &to = *table->core_;
#define REPLACE(name, function) to.name = function<&CoreApiTable::name>
    REPLACE(hsa_signal_load_relaxed_fn, on_load);
    REPLACE(hsa_signal_load_scacquire_fn, on_load);
    REPLACE(hsa_signal_wait_relaxed_fn, on_wait);
    REPLACE(hsa_signal_wait_scacquire_fn, on_wait);
    REPLACE(hsa_signal_store_relaxed_fn, on_store);
    REPLACE(hsa_signal_store_screlease_fn, on_store);
    REPLACE(hsa_signal_subtract_relaxed_fn, on_subtract);
    REPLACE(hsa_signal_subtract_scacquire_fn, on_subtract);
    REPLACE(hsa_signal_subtract_screlease_fn, on_subtract);
    REPLACE(hsa_signal_subtract_scacq_screl_fn, on_subtract);
#undef REPLACE
    to.hsa_memory_copy_fn = on_memory_copy;
    to.hsa_queue_create_fn = on_create;
    to.hsa_queue_destroy_fn = on_destroy;
    to.hsa_queue_load_read_index_relaxed_fn = on_load_read_index;
    to.hsa_signal_destroy_fn = on_destroy_signal;
    table->amd_ext_->hsa_amd_signal_wait_any_fn = on_wait_any;
    table->amd_ext_->hsa_amd_signal_async_handler_fn = on_async_handler;
    table->amd_ext_->hsa_amd_memory_async_copy_fn = on_copy;
    table->amd_ext_->hsa_amd_memory_async_copy_rect_fn = on_copy_box;
    table->amd_ext_->hsa_amd_memory_fill_fn = on_fill;
    table->amd_ext_->hsa_amd_queue_intercept_create_fn = on_create_intercepted;
    replace_copy_by_engine(*table->amd_ext_);
    advance_all_hosts(latest_host_time() + kInitialize);
    watch_hip_calls();
    return true;
}

void OnUnload() {
    forget_functions();
    forget_submissions();
}

#pragma GCC visibility pop
}

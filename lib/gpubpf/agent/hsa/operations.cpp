// The operation log of AMD GPUs: the work given to queues and copy engines (docs/timing.md, "AMD GPUs").
//
// A ROCr queue is logged as a stream that does not wait for others. Signals are its events: a packet or copy with a completion signal
// records the signal, and a packet that depends on a signal waits for it. HIP puts several of its streams into one queue.
#include <cstring>
#include <deque>
#include <optional>
#include <utility>

#include "agent.h"

namespace gpubpf {

namespace {

// The kernels that HIP launches for memsets and copies.
constexpr char kFills[] = "__amd_rocclr_fill", kCopies[] = "__amd_rocclr_copy";

constexpr size_t kMostSignals = 1 << 16, kMostTimers = 4096;

// A copy or dispatch that sets a signal at its end. ROCr then knows its times.
struct Timed {
    uint64_t operation;  // id of the operation; 0: none, or its times are already logged
    uint32_t gpu;
    bool dispatch;
    uint64_t since;  // ns; the operation began after this
};
struct Signalled {
    uint64_t record;  // id of the record operation
    Timed work;
};
struct Timer {  // an agent's signal, for a dispatch without a signal
    uint64_t signal;
    Timed work;
};

struct State {
    std::mutex lock;
    std::unordered_map<uint64_t, Signalled> signals;        // by handle
    std::map<std::pair<uint32_t, Kind>, uint32_t> engines;  // queue numbers, by GPU and kind of copy
    std::deque<Timer> running;
    std::vector<uint64_t> free;  // unused signals for timers
    size_t timers = 0;
    std::atomic<uint32_t> queues{0};
    std::atomic<uint64_t> copies{0};  // number of logged copies
};
AttachmentState<State> state;

const hsa_signal &memory_of(uint64_t signal) { return *reinterpret_cast<const hsa_signal *>(signal); }

bool is_over(uint64_t signal) { return __atomic_load_n(&memory_of(signal).value, __ATOMIC_ACQUIRE) <= 0; }

// Whether the calling thread may know that a signal's work has ended. On the virtual clock, the device is ahead of the host, so the host
// may not know it yet.
bool is_known_over(uint64_t signal) {
    return is_over(signal) && (!virtual_clock() || memory_of(signal).end <= now_ns());
}

Record new_record(Kind kind, uint32_t gpu, uint32_t queue, uint64_t id) {
    Record r;
    r.kind = kind;
    r.id = id;
    r.thread = thread_id();
    r.context = gpu;
    r.queue = queue;
    return r;
}

void log_queue(uint32_t number, uint32_t gpu, QueueKind kind) {
    Record r = new_record(Kind::Queue, gpu, number, other_id());
    r.call_ns = r.return_ns = now_ns();
    r.queue_part = {static_cast<uint32_t>(kind), 0};
    oplog.put(r);
}

// Logs the times of the operation that a signal ended, if ROCr knows them.
void log_times(uint64_t signal, Timed &work) {
    if (!work.operation) return;
    Record r = new_record(Kind::Span, work.gpu, 0, other_id());
    r.flags = kByRocr;
    r.span.of = work.operation;
    const Gpu *gpu = work.dispatch ? agent.gpus[work.gpu].get() : nullptr;
    // A signal may still have the times of its previous use.
    if (times_of(gpu, {signal}, r.span) && r.span.start + r.span.error_ns >= work.since) oplog.put(r);
    work.operation = 0;
}

// Gives a dispatch one of the agent's signals, if one is available.
void start_timer(hsa_packet &packet, const Timed &work) {
    std::lock_guard<std::mutex> hold(state->lock);
    for (; !state->running.empty() && is_over(state->running.front().signal); state->running.pop_front()) {
        log_times(state->running.front().signal, state->running.front().work);
        state->free.push_back(state->running.front().signal);
    }
    if (state->free.empty()) {
        hsa_handle made{};
        if (state->timers >= kMostTimers || hsa.amd_signal_create(1, 0, nullptr, HSA_SIGNAL_GPU_ONLY, &made))
            return;
        ++state->timers;
        state->free.push_back(made.handle);
    }
    const uint64_t signal = state->free.back();
    state->free.pop_back();
    hsa.signal_store_relaxed({signal}, 1);
    state->running.push_back({signal, work});
    packet.completion = {signal};
}

// Forgets a signal's operation. Call with the lock held. `again`: the program reuses the signal, so the operation has ended.
void settle(uint64_t signal, bool again) {
    const auto found = state->signals.find(signal);
    if (found == state->signals.end()) return;
    if (again || is_over(signal)) log_times(signal, found->second.work);
    state->signals.erase(found);
}

void record_signal(uint64_t signal, uint32_t queue, const Timed &work) {
    if (!signal) return;
    Record r = new_record(Kind::Recorded, work.gpu, queue, other_id());
    r.event.event = signal;
    {
        std::lock_guard<std::mutex> hold(state->lock);
        settle(signal, true);
        if (state->signals.size() >= kMostSignals) state->signals.clear();
        state->signals[signal] = {r.id, work};
    }
    put_operation(r);
}

void wait_for_signals(const uint64_t *signals, uint32_t count, uint32_t gpu, uint32_t queue, bool all) {
    for (uint32_t i = 0; i < count; ++i) {
        if (!signals[i]) continue;
        Record r = new_record(Kind::Wait, gpu, queue, other_id());
        r.event.event = signals[i];
        if (const Call *call = current_call(); call && !call->for_event) r.flags |= kOrder;
        if (is_known_over(signals[i])) {
            r.event.record = kNoRecord;
        } else if (all) {
            std::lock_guard<std::mutex> hold(state->lock);
            const auto found = state->signals.find(signals[i]);
            if (found != state->signals.end()) r.event.record = found->second.record;
        }
        put_operation(r);
    }
}

uint32_t engine(uint32_t gpu, Kind kind) {
    std::lock_guard<std::mutex> hold(state->lock);
    uint32_t &number = state->engines[{gpu, kind}];
    const QueueKind what = kind == Kind::H2D   ? QueueKind::H2D
                           : kind == Kind::D2H ? QueueKind::D2H
                                               : QueueKind::D2D;
    if (!number) log_queue(number = ++state->queues, gpu, what);
    return number;
}

// Returns the GPU whose memory this is; null if it is the host's or unknown.
const Gpu *gpu_of(uint64_t at) { return at ? agent.gpu(info_of(at).owner) : nullptr; }

Kind kind_of(const Moved &moved) {
    const bool to = gpu_of(moved.to), from = gpu_of(moved.from);
    return to ? (from ? Kind::D2D : Kind::H2D) : from ? Kind::D2H : Kind::H2H;
}

// A copy, from before ROCr's call until after it.
class Copy {
  public:
    Copy(hsa_handle to, hsa_handle from, uint64_t destination, uint64_t source, uint64_t bytes,
         uint32_t count, const hsa_handle *signals, hsa_handle completion)
        : completion_(completion.handle) {
        const Gpu *target = agent.gpu(to), *origin = agent.gpu(from), *gpu = target ? target : origin;
        if (!gpu) return;
        const Kind kind = !target ? Kind::D2H : !origin ? Kind::H2D : Kind::D2D;
        since_ = now_ns();
        queue_ = engine(gpu->number, kind);
        record_ = new_record(kind, gpu->number, queue_, other_id());
        if (const Call *call = current_call(); call && call->waits && kind != Kind::D2D)
            record_.flags |= kSynchronous;
        record_.copy.bytes = bytes;
        record_.copy.destination = destination;
        record_.copy.source = source;
        static_assert(sizeof(hsa_handle) == sizeof(uint64_t));
        if (signals) wait_for_signals(&signals->handle, count, gpu->number, queue_, true);
        std::lock_guard<std::mutex> hold(state->lock);
        settle(completion_, true);
    }
    void done(hsa_status status) {
        if (!queue_ || status) return;
        ++state->copies;
        put_operation(record_);
        record_signal(completion_, queue_, {record_.id, record_.context, false, since_});
    }

  private:
    Record record_;
    uint32_t queue_ = 0;
    uint64_t completion_, since_ = 0;
};

// Calls ROCr to copy, and logs the copy. `describe` creates the Copy.
template <class Describe, class Original>
hsa_status logged(const Describe &describe, const Original &original) {
    std::optional<Copy> copy;
    uint64_t of = 0;
    if (OwnWork work; work && agent.live)
        quietly([&] {
            of = attachment;
            describe(copy);
        });
    const hsa_status status = original();
    if (!copy) return status;
    if (OwnWork work; work && attachment == of) quietly([&] { copy->done(status); });
    return status;
}

uint64_t address(const void *at) { return reinterpret_cast<uint64_t>(at); }

}  // namespace

uint32_t new_queue(const Gpu &gpu) {
    const uint32_t number = ++state->queues;
    if (agent.log_operations) log_queue(number, gpu.number, QueueKind::Hardware);
    return number;
}

void put_operation(Record &r) {
    Call *call = current_call();
    if (!call) {
        r.call_ns = r.return_ns = now_ns();
        return oplog.put(r);
    }
    r.call_ns = call->called_at();
    r.stream = call->stream == kUnknownStream ? 0 : call->stream;
    r.stack = call->stack;
    call->records.push_back(r);
}

void describe_own_kernel(Record &r, const std::string &kernel) {
    const bool sets = kernel.rfind(kFills, 0) == 0;
    if (!sets && kernel.rfind(kCopies, 0) != 0) return;
    Call *call = current_call();
    const Moved moved =
        call ? std::exchange(call->moved, {}) : Moved();  // the first of several kernels gets all bytes
    r.kind = sets ? Kind::Memset : kind_of(moved);
    if (!sets && r.kind == Kind::H2H) r.kind = Kind::D2D;  // a kernel does not copy for the host alone
    r.copy = {};
    r.copy.bytes = moved.bytes;
    r.copy.destination = moved.to;
    r.copy.source = moved.from;
}

uint64_t copies_logged() { return state->copies; }

void log_copy_of_host(Call &call) {
    const Kind kind = kind_of(call.moved);
    if (!call.moved.bytes || kind == Kind::H2H || call.copies != copies_logged()) return;
    const uint32_t gpu = gpu_of(kind == Kind::H2D ? call.moved.to : call.moved.from)->number;
    Record r = new_record(kind, gpu, engine(gpu, kind), other_id());
    r.flags |= kSynchronous;
    r.call_ns = call.began;
    r.stream = call.stream == kUnknownStream ? 0 : call.stream;
    r.stack = call.stack;
    r.copy.bytes = call.moved.bytes;
    r.copy.destination = call.moved.to;
    r.copy.source = call.moved.from;
    call.records.push_back(r);
}

void log_packet(const hsa_packet &packet, const Gpu &gpu, uint32_t queue, uint64_t untimed,
                hsa_packet &changed) {
    const int type = packet.header & 0xff;
    if (type == HSA_BARRIER_AND || type == HSA_BARRIER_OR) {
        uint64_t signals[5];
        memcpy(signals, reinterpret_cast<const char *>(&packet) + HSA_DEPENDENCY, sizeof signals);
        wait_for_signals(signals, 5, gpu.number, queue, type == HSA_BARRIER_AND);
    }
    const Timed work{untimed, gpu.number, true, now_ns()};
    record_signal(packet.completion.handle, queue, work);
    if (untimed && !packet.completion.handle) start_timer(changed, work);
}

void log_known_times() {
    std::lock_guard<std::mutex> hold(state->lock);
    for (auto &[signal, of] : state->signals)
        if (of.work.operation && is_over(signal)) log_times(signal, of.work);
    for (Timer &timer : state->running)
        if (is_over(timer.signal)) log_times(timer.signal, timer.work);
}

hsa_status on_copy(void *to, hsa_handle at, const void *from, hsa_handle of, size_t size, uint32_t count,
                   const hsa_handle *signals, hsa_handle completion) {
    return logged(
        [&](auto &copy) {
            copy.emplace(at, of, address(to), address(from), size, count, signals, completion);
        },
        [&] { return originals.copy(to, at, from, of, size, count, signals, completion); });
}

hsa_status on_copy_by_engine(void *to, hsa_handle at, const void *from, hsa_handle of, size_t size,
                             uint32_t count, const hsa_handle *signals, hsa_handle completion, int engine,
                             bool force) {
    return logged(
        [&](auto &copy) {
            copy.emplace(at, of, address(to), address(from), size, count, signals, completion);
        },
        [&] {
            return originals.copy_by_engine(to, at, from, of, size, count, signals, completion, engine,
                                            force);
        });
}

hsa_status on_copy_box(const hsa_box *to, const uint32_t *to_offset, const hsa_box *from,
                       const uint32_t *from_offset, const uint32_t *extent, hsa_handle by, int direction,
                       uint32_t count, const hsa_handle *signals, hsa_handle completion) {
    return logged(
        [&](auto &copy) {
            const hsa_handle host{};
            if (to && from && extent)
                copy.emplace(direction & HSA_TO_GPU ? by : host, direction & HSA_FROM_GPU ? by : host,
                             address(to->base), address(from->base),
                             uint64_t(extent[0]) * extent[1] * extent[2], count, signals, completion);
        },
        [&] {
            return originals.copy_box(to, to_offset, from, from_offset, extent, by, direction, count, signals,
                                      completion);
        });
}

hsa_status on_destroy_signal(hsa_handle signal) {
    if (OwnWork work; work)
        quietly([&] {
            std::lock_guard<std::mutex> hold(state->lock);
            settle(signal.handle, false);
        });
    return originals.destroy_signal(signal);
}

// Signals that a packet may still set must not be freed.
void give_back_timers() {
    std::lock_guard<std::mutex> hold(state->lock);
    for (const uint64_t signal : state->free) hsa.signal_destroy({signal});
    for (Timer &timer : state->running) {
        if (!is_over(timer.signal)) continue;
        log_times(timer.signal, timer.work);
        hsa.signal_destroy({timer.signal});
    }
    state->free.clear();
    state->running.clear();
    state->timers = kMostTimers;  // create no further timers
}

const Lifetime operations_lifetime = lifetime_of_attachment_state<state>();

}  // namespace gpubpf

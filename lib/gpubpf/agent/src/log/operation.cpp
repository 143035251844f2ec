#include "log/operation.h"

#include <cstring>
#include <iterator>
#include <unordered_map>
#include <unordered_set>

#include "attachment.h"
#include "driver/fault.h"
#include "driver/gpu_idle.h"
#include "hook_table.h"
#include "log/clock.h"
#include "log/cupti.h"
#include "log/host_program.h"
#include "log/stamp.h"

namespace gpubpf {

namespace {

struct Queues {
    std::mutex lock;  // guards the members below
    std::unordered_map<StreamKey, Queue, StreamKey::Hash> known;
    std::unordered_set<CUstream> made;  // streams created since the attachment, in a program that ran before
    uint32_t count = 0;
};

AttachmentState<Queues> all_queues;
Queues &queues() { return *all_queues; }

std::atomic<uint64_t> queue_epoch{1};  // queues that a thread cached under an earlier epoch may be wrong

// The queues that the thread used last.
struct Remembered {
    uint64_t epoch;
    StreamKey key;
    Queue queue;
};
struct OfThread {
    Remembered last[4];
    uint64_t number;  // unlike the kernel's thread id, never reused
};

uint64_t number_of(OfThread &thread) {
    static std::atomic<uint64_t> last{0};
    if (!thread.number) thread.number = ++last;
    return thread.number;
}

// Returns nothing for a stream that is being captured: asking for its flags invalidates the capture.
Queue new_queue(const StreamKey &key) {
    Queue queue;
    QueueKind kind = QueueKind::Legacy;
    int priority = 0;
    {
        DriverScope scope;
        unsigned flags = 0;
        if (key.context) {
            queue.context = const_cast<Context *>(key.context);
            kind = key.stream == CU_STREAM_PER_THREAD ? QueueKind::PerThread : QueueKind::Legacy;
        } else {
            if (capturing(key.stream)) return queue;
            queue.context = registry().context_of(key.stream);
            if (driver.cuStreamGetFlags && driver.cuStreamGetFlags(key.stream, &flags) == CUDA_SUCCESS)
                kind = flags & CU_STREAM_NON_BLOCKING ? QueueKind::NonBlocking : QueueKind::Blocking;
            else return queue;  // not a stream
        }
        if (driver.cuStreamGetPriority && kind != QueueKind::Legacy)
            driver.cuStreamGetPriority(key.stream, &priority);
    }
    Queues &all = queues();
    bool before = agent.late;
    {
        std::lock_guard<std::mutex> hold(all.lock);
        before = before && (key.context ? key.context->before : !all.made.count(key.stream));
        auto put = all.known.emplace(key, queue);
        if (!put.second) return put.first->second;
        put.first->second.number = queue.number = ++all.count;
    }
    Record r;
    r.kind = Kind::Queue;
    if (before) r.flags |= kFromBefore;
    r.id = other_id();
    r.thread = thread_id();
    r.call_ns = r.return_ns = now_ns();
    r.stream = reinterpret_cast<uint64_t>(key.stream);
    r.queue = queue.number;
    r.context = queue.context ? queue.context->serial : 0;
    r.queue_part = {static_cast<uint32_t>(kind), priority};
    oplog.put(r);
    return queue;
}

Queue find_queue(const StreamKey &key, uint64_t epoch, Remembered &slot) {
    Queue queue;
    bool known = false;
    {
        std::lock_guard<std::mutex> hold(queues().lock);
        auto it = queues().known.find(key);
        if ((known = it != queues().known.end())) queue = it->second;
    }
    if (!known) queue = new_queue(key);
    if (queue.number) slot = {epoch, key, queue};
    return queue;
}

}  // namespace

Queue queue_of(StreamRef where) {
    StreamKey key{where.handle(), nullptr, 0};
    if (!key.stream) key.stream = CU_STREAM_LEGACY;
    const bool is_default = key.stream == CU_STREAM_LEGACY || key.stream == CU_STREAM_PER_THREAD;
    Queue queue;
    OfThread none{};
    OfThread &thread = thread_cache(CacheSlot::Queues, none);
    if (is_default) {
        key.context = registry().only.load(std::memory_order_acquire);
        if (!key.context) quietly([&] { key.context = registry().current(); });
        if (!key.context) return queue;
        if (key.stream == CU_STREAM_PER_THREAD) key.thread = number_of(thread);
    }
    uint64_t epoch = queue_epoch.load(std::memory_order_acquire);
    Remembered &slot = thread.last[(reinterpret_cast<uintptr_t>(key.stream) >> 4) % std::size(thread.last)];
    if (slot.epoch == epoch && slot.key == key) return slot.queue;
    quietly([&] { queue = find_queue(key, epoch, slot); });
    return queue;
}

void new_stream(CUstream stream) {
    if (!agent.late) return;
    std::lock_guard<std::mutex> hold(queues().lock);
    queues().made.insert(stream);
}

void forget_queue(CUstream stream) {
    std::lock_guard<std::mutex> hold(queues().lock);
    queues().known.erase({stream, nullptr, 0});
    queues().made.erase(stream);
    queue_epoch.fetch_add(1, std::memory_order_release);
}

void forget_queues(const Context *context) {
    std::lock_guard<std::mutex> hold(queues().lock);
    auto &known = queues().known;
    for (auto it = known.begin(); it != known.end();)
        it = it->second.context == context ? known.erase(it) : std::next(it);
    queue_epoch.fetch_add(1, std::memory_order_release);
}

// --- events ---

namespace {

struct Events {
    struct Shard {
        std::mutex lock;
        std::unordered_map<CUevent, uint64_t> recorded;
    } shards[16];
};

AttachmentState<Events> all_events;
Events::Shard &events(CUevent event) {
    return all_events->shards[(reinterpret_cast<uintptr_t>(event) >> 5) % std::size(all_events->shards)];
}

}  // namespace

void event_recorded(CUevent event, uint64_t id) {
    Events::Shard &e = events(event);
    std::lock_guard<std::mutex> hold(e.lock);
    e.recorded[event] = id;
}

uint64_t recorded_by(CUevent event) {
    Events::Shard &e = events(event);
    std::lock_guard<std::mutex> hold(e.lock);
    auto it = e.recorded.find(event);
    return it == e.recorded.end() ? 0 : it->second;
}

void forget_event(CUevent event) {
    Events::Shard &e = events(event);
    std::lock_guard<std::mutex> hold(e.lock);
    e.recorded.erase(event);
}

const Lifetime operation_lifetime{
    [] {
        all_queues.begin();
        all_events.begin();
        queue_epoch.fetch_add(1, std::memory_order_release);
    },
    nullptr,
    [] {
        queue_epoch.fetch_add(1, std::memory_order_release);
        all_queues.end();
        all_events.end();
    },
    nullptr,
};

// --- operations ---

void describe_call(Record &r, size_t index, uint64_t bytes) {
    describe_call(r, static_cast<uint32_t>(index), hooks[index].name, bytes);
}

Operation::Operation(Kind kind, StreamRef where, uint16_t flags) noexcept
    : queue(queue_of(where)), where_(where) {
    if (!where.any && capturing(where.handle())) flags |= kCaptured;
    record.id = kind == Kind::Kernel && !(flags & kCaptured) ? take_ids(1) : other_id();
    record.kind = kind;
    record.flags = flags;
    record.thread = thread_id();
    record.stream = reinterpret_cast<uint64_t>(where.given);
    record.queue = queue.number;
    record.context = queue.context ? queue.context->serial : 0;
}

void Operation::announce() noexcept {
    const bool copy = record.kind >= Kind::H2D && record.kind <= Kind::H2H,
               fill = record.kind == Kind::Memset;
    announce(copy || fill ? record.copy.bytes : 0, copy || fill ? record.copy.destination : 0,
             copy ? record.copy.source : 0);
}

void Operation::announce(uint64_t bytes, uint64_t destination, uint64_t source) noexcept {
    if (!operation_program() || record.flags & kCaptured) return;
    run_operation_program({record.id, static_cast<uint64_t>(record.kind), record.stream, now_ns(), bytes,
                           destination, source,
                           queue.context ? static_cast<uint64_t>(queue.context->device) : 0});
}

void Operation::time(bool batch) noexcept {
    if (!agent.config.stamps || !queue.context || record.flags & kCaptured) return;
    const Recorded recorded = batch ? Recorded::No : begin_cupti(record);
    recorded_ = recorded != Recorded::No;
    if (recorded != Recorded::Yes) stamp_ = begin_stamp(*queue.context, where_.handle());
}

void Operation::called() noexcept { record.call_ns = now_ns(); }

void Operation::returned(CUresult result) noexcept {
    if (recorded_) end_cupti(record, result != CUDA_SUCCESS);
    const Thread *thread = own_record();
    over_ = !thread || !thread->number;
    if (over_) return;
    record.return_ns = now_ns();
    record.result = result;
    if (recorded_ && result == CUDA_SUCCESS) ++agent.control->cupti_given;
    if (result != CUDA_SUCCESS && is_sticky(result) && queue.context &&
        !queue.context->broken.exchange(true)) {
        Record r = record;
        r.id = other_id();
        r.kind = Kind::Fault;
        clear_part(r);
        r.fault.error = result;
        oplog.put(r);
    }
    if (stamp_) end_stamp(stamp_, where_.handle(), record, result);
}

}  // namespace gpubpf

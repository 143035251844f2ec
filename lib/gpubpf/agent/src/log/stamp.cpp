#include "log/stamp.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cmath>
#include <deque>
#include <map>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "attachment.h"
#include "driver/current.h"
#include "log/clock.h"

namespace gpubpf {

class Stamp : public AttachmentObject {
  public:
    CUevent first = nullptr, second = nullptr;
    Stamps *of = nullptr;
    Record span;
};

struct Stamps : AttachmentObject {  // of a context
    // Guards the members below. Never held across a driver call: another thread may need this one to
    // continue.
    std::mutex lock;
    bool over = false;  // its events have been released
    std::vector<Stamp *> free, fresh;
    size_t made = 0;
    std::vector<CUevent> events;                      // all that were created
    std::map<uint32_t, std::deque<Stamp *>> pending;  // by queue; guarded by Context::busy
};

namespace {

constexpr size_t kMost = 4096;         // per context; when all are in use, further operations are not timed
constexpr size_t kAtOnce = 1024;       // most that the polling thread finishes in one turn
constexpr uint32_t kResolution = 500;  // ns, of timing events (CUDA driver API, cuEventElapsedTime)

struct Poller {
    std::mutex lock;
    std::condition_variable changed;
    std::atomic<size_t> pending{0};
    std::atomic<bool> asleep{false}, over{false};
    pthread_t thread{};
};

Poller *poller = nullptr;

// Marks a driver call that the agent makes in a hook, so that nested hooks do not mistake it for the program's.
struct AgentCall {
    AgentCall() { ++depth(); }
    ~AgentCall() { --depth(); }
};

// Drops the context's pending stamps: it is broken.
void drop(Stamps &stamps) {
    std::lock_guard<std::mutex> hold(stamps.lock);
    for (auto &queue : stamps.pending)
        for (Stamp *s : queue.second) {
            stamps.free.push_back(s);
            --poller->pending;
        }
    stamps.pending.clear();
}

// Returns false if the times are not known yet.
bool times(Context &context, Stamp &s) {
    Record &r = s.span;
    if (driver.cudasim_event_time) {
        uint64_t first = 0, second = 0;
        if (driver.cudasim_event_time(s.first, &first) == CUDA_SUCCESS &&
            driver.cudasim_event_time(s.second, &second) == CUDA_SUCCESS) {
            // The event has completed before the call that submits the work after it returns. That work
            // begins no earlier.
            bool waited = r.return_ns >= second;
            r.span.start = virtual_clock() && !waited ? std::max(first, r.return_ns) : first;
            r.span.end = second;
            r.span.error_ns = 0;
            return true;
        }
    }
    std::shared_ptr<const Reference> reference = reference_of(context);
    float until = 0, length = 0;  // ms
    if (!reference) return false;
    if (driver.cuEventElapsedTime(&until, reference->event, s.first) == CUDA_SUCCESS &&
        driver.cuEventElapsedTime(&length, s.first, s.second) == CUDA_SUCCESS) {
        r.span.start = reference->gpu_ns +
                       static_cast<uint64_t>(static_cast<int64_t>(std::llround(double(until) * 1e6)));
        r.span.end = r.span.start + static_cast<uint64_t>(std::llround(std::fabs(double(length)) * 1e6));
        double rounding = (std::fabs(double(until)) + double(length)) * 1e6 / (1 << 24);
        r.span.error_ns =
            reference->error_ns + kResolution + static_cast<uint32_t>(std::min(rounding, 1e9)) + 1;
    }
    return true;
}

// Logs finished spans. Call it with the context current and `busy` held. Returns true if nothing is pending.
bool poll(Context &context, bool last) {
    Stamps &stamps = *context.stamps;
    {
        std::lock_guard<std::mutex> hold(stamps.lock);
        for (Stamp *s : stamps.fresh) stamps.pending[s->span.queue].push_back(s);
        stamps.fresh.clear();
    }
    std::vector<Stamp *> over;
    for (auto queue = stamps.pending.begin(); queue != stamps.pending.end() && over.size() < kAtOnce;) {
        auto &waiting = queue->second;
        while (!waiting.empty() && over.size() < kAtOnce) {
            Stamp *s = waiting.front();
            CUresult r = driver.cuEventQuery(s->second);
            if (r == CUDA_ERROR_NOT_READY) break;
            if (r != CUDA_SUCCESS) return drop(stamps), true;
            if (!times(context, *s) && !last) break;
            oplog.put(s->span);
            over.push_back(s);
            waiting.pop_front();
        }
        queue = waiting.empty() ? stamps.pending.erase(queue) : std::next(queue);
    }
    poller->pending -= over.size();
    std::lock_guard<std::mutex> hold(stamps.lock);
    stamps.free.insert(stamps.free.end(), over.begin(), over.end());
    return stamps.pending.empty() && stamps.fresh.empty();
}

void run(Poller *p) {
    prctl(PR_SET_NAME, "gpubpf-stamp");
    ++depth();
    while (!p->over) {
        if (!p->pending) {
            std::unique_lock<std::mutex> hold(p->lock);
            p->asleep = true;
            p->changed.wait_for(hold, std::chrono::seconds(1), [&] { return p->pending != 0 || p->over; });
            p->asleep = false;
            continue;
        }
        usleep(1000);
        quietly([] {
            std::vector<Context *> contexts;
            {
                std::lock_guard<std::mutex> hold(registry().lock);
                for (auto &c : registry().contexts)
                    if (c.second->stamps) contexts.push_back(c.second);
            }
            for (Context *c : contexts) {
                std::unique_lock<std::mutex> busy(c->busy, std::try_to_lock);
                if (!busy || c->dead) continue;
                Current current(*c);
                if (current.ok()) poll(*c, false);
            }
        });
    }
}

bool start_poller() {
    static std::mutex lock;
    std::lock_guard<std::mutex> hold(lock);
    if (poller) return true;
    auto *made = new Poller;
    SignalsBlocked blocked;
    bool ok = pthread_create(
                  &made->thread, nullptr,
                  [](void *p) -> void * { return run(static_cast<Poller *>(p)), nullptr; }, made) == 0;
    if (ok) poller = made;
    else delete made;
    return ok;
}

Stamps *stamps_of(Context &context) {
    Stamps *known = context.stamps.load(std::memory_order_acquire);
    if (known) return known;
    if (!driver.cuEventCreate || !driver.cuEventRecord || !driver.cuEventQuery ||
        !driver.cuEventElapsedTime || !start_poller())
        return nullptr;
    auto *made = new Stamps;
    if (context.stamps.compare_exchange_strong(known, made)) return made;
    delete made;
    return known;
}

// A driver call with the context's stream needs the context to be current.
bool is_current(const Context &context) {
    if (registry().only.load(std::memory_order_relaxed) == &context) return true;
    CUcontext handle = nullptr;
    return driver.cuCtxGetCurrent(&handle) == CUDA_SUCCESS && handle == context.handle;
}

Stamp *take(Stamps &stamps) {
    {
        std::lock_guard<std::mutex> hold(stamps.lock);
        if (stamps.over) return nullptr;
        if (!stamps.free.empty()) {
            Stamp *s = stamps.free.back();
            stamps.free.pop_back();
            return s;
        }
        if (stamps.made >= kMost) return nullptr;
        ++stamps.made;
        stamps.free.reserve(stamps.made);  // so that returning a stamp needs no memory
        stamps.fresh.reserve(stamps.made);
    }
    auto s = std::make_unique<Stamp>();
    s->of = &stamps;
    DriverScope scope;
    for (CUevent *event : {&s->first, &s->second}) {
        if (driver.cuEventCreate(event, CU_EVENT_DEFAULT) != CUDA_SUCCESS) return nullptr;
        std::lock_guard<std::mutex> hold(stamps.lock);
        stamps.events.push_back(*event);
    }
    return s.release();
}

void give_back(Stamp *s) {
    std::lock_guard<std::mutex> hold(s->of->lock);
    s->of->free.push_back(s);
}

bool is_over(Stamps &stamps) {
    std::lock_guard<std::mutex> hold(stamps.lock);
    return stamps.over;
}

}  // namespace

namespace {

void stop_poller() {
    if (!poller) return;
    {
        std::lock_guard<std::mutex> hold(poller->lock);
        poller->over = true;
        poller->changed.notify_one();
    }
    pthread_join(poller->thread, nullptr);
    delete poller;
    poller = nullptr;
}

}  // namespace

// A forked child has no polling thread, so begin() drops the parent's.
const Lifetime stamp_lifetime{[] { poller = nullptr; }, stop_poller, nullptr, nullptr};

void gather_stamps(const Context &context, std::vector<CUevent> &events) {
    Stamps *stamps = context.stamps.load();
    if (!stamps) return;
    drop(*stamps);
    std::lock_guard<std::mutex> hold(stamps->lock);
    stamps->over = true;
    poller->pending -= stamps->fresh.size();
    stamps->fresh.clear();
    events.insert(events.end(), stamps->events.begin(), stamps->events.end());
    stamps->events.clear();
}

Stamp *begin_stamp(Context &context, CUstream stream) noexcept {
    Stamp *stamp = nullptr;
    quietly([&] {
        if (context.dead.load(std::memory_order_relaxed) || !is_current(context)) return;
        Stamps *stamps = stamps_of(context);
        Stamp *s = stamps ? take(*stamps) : nullptr;
        if (!s) return;
        AgentCall agent_call;
        if (driver.cuEventRecord(s->first, stream) == CUDA_SUCCESS) stamp = s;
        else give_back(s);
    });
    return stamp;
}

void end_stamp(Stamp *stamp, CUstream stream, const Record &operation, CUresult result) noexcept {
    quietly([&] {
        AgentCall agent_call;
        if (is_over(*stamp->of)) return;
        if (result != CUDA_SUCCESS || driver.cuEventRecord(stamp->second, stream) != CUDA_SUCCESS)
            return give_back(stamp);
        Record r = operation;
        r.kind = Kind::Span;
        r.id = other_id();
        r.stack = 0;
        clear_part(r);
        r.span.of = operation.id;
        stamp->span = r;
        std::lock_guard<std::mutex> hold(stamp->of->lock);
        if (stamp->of->over) return;
        ++poller->pending;
        stamp->of->fresh.push_back(stamp);
    });
    if (poller && poller->asleep.load(std::memory_order_relaxed)) poller->changed.notify_one();
}

void collect_stamps(Context &context, uint32_t wait_ms) {
    if (!context.stamps || context.dead) return;
    Current current(context);
    if (!current.ok()) return;
    auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(wait_ms);
    while (!poll(context, wait_ms != 0) && std::chrono::steady_clock::now() < until) usleep(500);
}

}  // namespace gpubpf

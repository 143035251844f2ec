#include "driver/gpu_idle.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <optional>
#include <pthread.h>
#include <set>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <unordered_map>
#include <unordered_set>

#include "attachment.h"
#include "driver/current.h"
#include "driver/waiting_call.h"

namespace gpubpf {

std::atomic<uint32_t> watchers{0};

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// A capture that began before the attachment is noticed when the program adds work to it. A capturing program
// gets this long to do so before the agent waits for its context, because that would end the capture.
constexpr milliseconds kSettle{100};
constexpr milliseconds kForQuiet{25};  // longest wait for a moment when nothing runs, if work makes progress
constexpr size_t kMostStreams = 4096;  // streams known not to be in an earlier capture

// A stream, since its first launch while it is being watched.
struct Busy {
    // Guards the members below, also across driver calls. Threads that launch into the same stream would wait
    // in the driver anyway.
    std::mutex lock;
    CUevent latest = nullptr;  // recorded after the last launch
    bool ahead = false;        // `latest` has not been seen completed
    Clock::time_point put_latest{};
    CUevent probe = nullptr;  // recorded after some launch, until it has completed
    bool probing = false;
    Clock::time_point put{};  // when the probe was recorded
    uint32_t passed = 0;      // probes that have completed
    Clock::duration took{};   // from the recording of the last probe until it was seen completed
    bool lost = false;        // no event could be recorded, so nothing is known about the stream

    void look() {
        const Clock::time_point now = Clock::now();
        if (probing && driver.cuEventQuery(probe) == CUDA_SUCCESS) {
            probing = false;
            took = now - put;
            ++passed;
        }
        if (ahead && driver.cuEventQuery(latest) == CUDA_SUCCESS) ahead = false;
    }
    // The stream makes progress, as far as known, and its current work takes no longer than earlier work.
    bool moves() const { return passed >= 2 && (!probing || expected(put)); }
    // Launches have stopped, and the stream's work should end as soon as earlier work did.
    bool comes_to_its_end() const { return passed >= 2 && expected(put_latest); }

  private:
    bool expected(Clock::time_point since) const { return Clock::now() - since < 2 * took + milliseconds(2); }
};

struct Streams {
    std::mutex lock;  // guards the members below; never held across a driver call
    std::unordered_map<StreamKey, std::shared_ptr<Busy>, StreamKey::Hash> busy;
    std::unordered_map<const Context *, uint64_t> proofs;  // number of the requested proof
    std::unordered_set<CUstream> not_captured;  // not captured, or in a capture that a hooked call began
    // Streams in which captures began through hooks, with the thread of a per-thread default stream.
    std::set<std::pair<CUstream, uint32_t>> origins;
    // Streams in earlier captures. Registry::captures counts each of them; it may be too high, but not too
    // low.
    std::unordered_set<CUstream> before;
    std::atomic<Clock::rep> since{Clock::now().time_since_epoch().count()};  // the hooks are in place
};

AttachmentState<Streams> all;
std::atomic<uint64_t> stream_epoch{1};  // streams that a thread cached under an earlier epoch may be wrong

uint32_t thread_of(CUstream stream) { return stream == CU_STREAM_PER_THREAD ? thread_id() : 0; }

void destroy(Busy &b) {
    if (!driver.cuEventDestroy_v2) return;
    if (b.latest) driver.cuEventDestroy_v2(b.latest);
    if (b.probe) driver.cuEventDestroy_v2(b.probe);
}

// --- launches before the watch ---

// A thread that waits for a context. It may wait as long as the process runs. Then it stays the only one for
// that context across attachments, so it uses no state of an attachment.
struct Waiter {
    // Numbers of proofs. refused: a capture was in progress.
    std::atomic<uint64_t> asked{0}, done{0}, refused{0};
    std::atomic<bool> running{false};
    std::atomic<pid_t> thread{0};
};

struct Waiters {
    std::mutex lock;  // guards the member below
    std::unordered_map<CUcontext, std::shared_ptr<Waiter>> known;
};

ProcessState<Waiters> waiters;

std::shared_ptr<Waiter> waiter_of(CUcontext context) {
    std::lock_guard<std::mutex> hold(waiters->lock);
    std::shared_ptr<Waiter> &known = waiters->known[context];
    if (!known) known = std::make_shared<Waiter>();
    return known;
}

// Returns a number. When `done` reaches it, everything that was launched in the context before this call is
// finished.
uint64_t ask(const std::shared_ptr<Waiter> &waiter, const Context &asked) {
    if (waiter->running.exchange(true)) return 0;  // it is still waiting for an earlier request
    const uint64_t number = ++waiter->asked;
    try {
        Stay stay(asked);
        if (!stay) {
            waiter->running = false;
            return 0;
        }
        SignalsBlocked blocked;
        std::thread([waiter, entered = std::move(stay), context = asked.handle, number,
                     now = attachment.load()]() mutable {
            std::optional<Stay> stay(std::move(entered));
            prctl(PR_SET_NAME, "gpubpf-wait");
            waiter->thread = static_cast<pid_t>(syscall(SYS_gettid));
            ++depth();
            if (driver.cudasim_untimed) driver.cudasim_untimed(1);
            CUcontext popped;
            bool over = driver.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS;
            if (over) {
                std::optional<WaitingCall> call;
                {
                    Visit visit;
                    if (attachment.load() == now) call.emplace(captured_now);
                }
                const bool may = call && *call;
                over = may && driver.cuCtxSynchronize() == CUDA_SUCCESS;
                call.reset();
                if (!may) waiter->refused = number;
                driver.cuCtxPopCurrent_v2(&popped);
            }
            stay.reset();
            if (driver.cudasim_untimed) driver.cudasim_untimed(0);
            waiter->thread = 0;
            if (over) waiter->done = number;  // must come before `running` is cleared
            waiter->running = false;
        }).detach();
    } catch (...) {
        waiter->running = false;
    }
    return waiter->running || waiter->done >= number ? number : 0;
}

constexpr uint64_t kFailed = UINT64_MAX;

bool nothing_from_before(Context &context) {
    std::shared_ptr<Waiter> waiter = waiter_of(context.handle);
    uint64_t number;
    {
        std::lock_guard<std::mutex> hold(all->lock);
        number = all->proofs[&context];
    }
    if (number == kFailed) return false;
    const bool running = waiter->running;
    if (number && waiter->done >= number) return true;
    if (number && running) {
        yield_if_inside(waiter->thread);
        return false;
    }
    if (number && number != kFailed && waiter->refused >= number) number = 0;
    // If a request's thread has ended without a result, the context is broken.
    number = number ? kFailed : ask(waiter, context);
    std::lock_guard<std::mutex> hold(all->lock);
    all->proofs[&context] = number;
    return false;
}

std::vector<std::shared_ptr<Busy>> streams_of(const Context &context) {
    std::vector<std::shared_ptr<Busy>> streams;
    std::lock_guard<std::mutex> hold(all->lock);
    for (auto &s : all->busy)
        if (s.first.context == &context) streams.push_back(s.second);
    return streams;
}

// Quiet: nothing is known to run. Moving: the running work makes progress.
enum class State { Quiet, Moving, Unknown };

State state_of(Context &context, bool (Busy::*gets_on)() const) {
    if (context.dead || context.broken || captured_now() || !nothing_from_before(context))
        return State::Unknown;
    State state = State::Quiet;
    for (auto &s : streams_of(context)) {
        std::unique_lock<std::mutex> hold(s->lock, std::try_to_lock);
        if (!hold) return State::Unknown;
        s->look();
        if (s->lost || (s->ahead && !((*s).*gets_on)())) return State::Unknown;
        if (s->ahead) state = State::Moving;
    }
    return state;
}

}  // namespace

Watching::Watching() { ++watchers; }

Watching::~Watching() {
    if (--watchers) return;
    std::unordered_map<StreamKey, std::shared_ptr<Busy>, StreamKey::Hash> over;
    {
        std::lock_guard<std::mutex> hold(all->lock);
        over.swap(all->busy);
        all->proofs.clear();
    }
    quietly([&] {
        for (auto &s : over) {
            if (s.first.context->dead) continue;
            std::lock_guard<std::mutex> hold(s.second->lock);
            Current current(*s.first.context);
            if (current.ok()) destroy(*s.second);
            s.second->latest = s.second->probe = nullptr;
        }
    });
}

bool wait_is_short(Context &context, uint32_t patience_ms) {
    bool quiet = false;
    quietly([&] {
        Watching watching;
        Current current(context);
        const Clock::time_point begin = Clock::now(), until = begin + milliseconds(patience_ms);
        for (useconds_t pause = 50; current.ok() && !context.dead;
             pause = std::min<useconds_t>(pause * 2, 1000)) {
            // A moment when nothing runs is better.
            const State state = state_of(context, &Busy::moves);
            quiet = state == State::Quiet ||
                    (state == State::Moving &&
                     Clock::now() - begin >= std::min(milliseconds(patience_ms) / 2, kForQuiet));
            if (quiet || Clock::now() >= until) break;
            usleep(pause);
        }
    });
    return quiet;
}

// --- launches held back ---

std::atomic<bool> launches_begun{false};
std::atomic<int64_t> launches_held{0};

namespace {

constexpr milliseconds kToAsk{100}, kToBegin{100}, kInAll{1000};  // how long launches are held, by phase
constexpr uint32_t kUnderWay = 20;                                // ms to wait for launches that have begun

int64_t count(Clock::time_point at) { return at.time_since_epoch().count(); }

}  // namespace

// The time limit identifies the holder. A limit in the past belongs to no thread, because its holder may have
// exited.
int64_t hold_launches() noexcept {
    const Clock::time_point now = Clock::now();
    int64_t before = launches_held.load();
    const int64_t until = count(now + kToAsk);
    return before < count(now) && launches_held.compare_exchange_strong(before, until) ? until : 0;
}

LaunchesHeld::LaunchesHeld() : LaunchesHeld(hold_launches()) {}

LaunchesHeld::LaunchesHeld(int64_t until)
    : until_(until),
      latest_(until - Clock::duration(kToAsk).count() + Clock::duration(kInAll - kToAsk).count()) {}

LaunchesHeld::~LaunchesHeld() {
    if (until_) launches_held.compare_exchange_strong(until_, 0);
}

bool LaunchesHeld::extend(int64_t until) {
    const int64_t before = until_;
    int64_t now = before;
    if (!before || !launches_held.compare_exchange_strong(now, until)) return false;
    until_ = until;
    return count(Clock::now()) < before;  // otherwise some launches were not held in between
}

bool LaunchesHeld::none_under_way() const {
    return until_ && wait_until_none_launches(kUnderWay) && launches_held.load() == until_;
}

bool LaunchesHeld::nothing_runs(Context &context) {
    bool quiet = false;
    quietly([&] {
        Current current(context);
        while (current.ok() && !context.dead && !quiet) {
            const State state = state_of(context, &Busy::comes_to_its_end);
            quiet = state == State::Quiet && launches_held.load() == until_ && count(Clock::now()) < until_;
            if (quiet || count(Clock::now()) >= latest_) break;
            // Work that runs as long as expected would block the driver, and so the program, for that long.
            if (count(Clock::now() + milliseconds(2)) >= until_ &&
                !(state == State::Moving && extend(count(Clock::now() + milliseconds(20)))))
                break;
            usleep(200);
        }
    });
    return quiet;
}

void LaunchesHeld::begin_work() {
    const Clock::time_point now = Clock::now();
    work_until_ = extend(count(now + kInAll)) ? count(now + kToBegin) : 0;
}

bool LaunchesHeld::more() const { return count(Clock::now()) < work_until_; }

bool when_idle(const std::vector<Context *> &contexts, uint32_t patience_ms,
               const std::function<void(LaunchesHeld &)> &work) {
    Watching watching;
    for (Context *c : contexts)
        if (!wait_is_short(*c, patience_ms)) return false;
    LaunchesHeld held;
    if (!held.none_under_way()) return false;
    for (Context *c : contexts)
        if (!held.nothing_runs(*c)) return false;
    held.begin_work();
    if (!held.more()) return false;
    work(held);
    return true;
}

void wait_while_held(Thread *thread) noexcept {
    for (;;) {
        const int64_t until = launches_held.load(std::memory_order_acquire);
        if (!until || count(Clock::now()) >= until) return;
        if (thread) thread->launching.store(false, std::memory_order_release);
        const timespec pause{0, 100000};
        syscall(SYS_nanosleep, &pause, nullptr);  // unlike nanosleep(), not a cancellation point
        if (thread) thread->launching.store(true, std::memory_order_relaxed);
        std::atomic_signal_fence(std::memory_order_seq_cst);
    }
}

LaunchPaused::~LaunchPaused() {
    if (!thread_) return;
    thread_->launching.store(true, std::memory_order_relaxed);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if (launches_held.load(std::memory_order_acquire) != 0) wait_while_held(thread_);
}

void put_event_behind(StreamRef where) noexcept {
    quietly([&] {
        if (!driver.cuEventCreate || !driver.cuEventRecord || !driver.cuEventQuery ||
            capturing(where.handle()))
            return;
        CUstream stream = where.handle() ? where.handle() : CU_STREAM_LEGACY;
        DriverScope scope;
        Context *context = context_of(where);
        if (!context || context->dead) return;
        std::shared_ptr<Busy> busy;
        {
            std::lock_guard<std::mutex> hold(all->lock);
            std::shared_ptr<Busy> &known = all->busy[{stream, context, thread_of(stream)}];
            if (!known) known = std::make_shared<Busy>();
            busy = known;
        }
        std::lock_guard<std::mutex> hold(busy->lock);
        auto put = [&](CUevent &event) {
            return (event || driver.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS) &&
                   driver.cuEventRecord(event, stream) == CUDA_SUCCESS;
        };
        busy->lost = !put(busy->latest);
        busy->ahead = true;
        busy->put_latest = Clock::now();
        if (busy->probing || busy->lost || !put(busy->probe)) return;
        busy->probing = true;
        busy->put = Clock::now();
    });
}

const Lifetime gpu_idle_lifetime{
    [] {
        all.begin();
        watchers = 0;
        launches_begun = agent.late;
        stream_epoch.fetch_add(1, std::memory_order_release);
    },
    nullptr,
    [] {
        stream_epoch.fetch_add(1, std::memory_order_release);
        all.end();
    },
    [] {
        waiters.in_forked_child();
        launches_held = 0;
    },
};

void hooks_are_in() { all->since = Clock::now().time_since_epoch().count(); }

void forget_streams(const Context *context) {
    std::lock_guard<std::mutex> hold(all->lock);
    for (auto it = all->busy.begin(); it != all->busy.end();)
        it = it->first.context == context ? all->busy.erase(it) : std::next(it);
    all->proofs.erase(context);
}

// --- captures ---

bool captured_now() {
    const bool settles =
        agent.late && Clock::now().time_since_epoch() < Clock::duration(all->since.load()) + kSettle;
    if (settles || registry().captures.load()) return true;
    // While a blocking stream is captured, this query on the legacy stream reports it and does no harm (CUDA
    // driver API, cuStreamIsCapturing). Other errors mean that the context is broken.
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (!driver.cuStreamIsCapturing) return false;
    const CUresult r = driver.cuStreamIsCapturing(CU_STREAM_LEGACY, &status);
    return r == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT ||
           (r == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE);
}

void capture_began(CUstream stream) {
    std::lock_guard<std::mutex> hold(all->lock);
    all->origins.emplace(stream, thread_of(stream));
}

bool capture_ended(CUstream stream) {
    std::lock_guard<std::mutex> hold(all->lock);
    if (all->origins.erase({stream, thread_of(stream)})) return true;
    const bool counted = !all->before.empty();
    if (counted)
        // The caller subtracts one more.
        registry().captures.fetch_sub(static_cast<int>(all->before.size()) - 1);
    all->before.clear();
    hooks_are_in();
    all->not_captured.clear();  // another earlier capture may exist; it will be noticed again
    stream_epoch.fetch_add(1, std::memory_order_release);
    return counted;
}

namespace {

// Streams that a thread has cached as not captured.
struct NotCaptured {
    struct One {
        uint64_t epoch;
        CUstream stream;
    } of[8];
    One &at(CUstream stream) {
        const auto s = reinterpret_cast<uintptr_t>(stream);
        return of[(s >> 4 ^ s >> 7) % std::size(of)];
    }
};

[[gnu::noinline]] bool ask_whether_captured(CUstream stream) {
    NotCaptured none{};
    NotCaptured::One &last = thread_cache(CacheSlot::Captures, none).at(stream);
    const uint64_t epoch = stream_epoch.load(std::memory_order_acquire);
    bool captured = false;
    quietly([&] {
        const bool own = stream == CU_STREAM_PER_THREAD;  // each thread has a different one
        {
            std::lock_guard<std::mutex> hold(all->lock);
            if (!own && all->not_captured.count(stream)) {
                last = {epoch, stream};
                return;
            }
        }
        Untimed scope;
        CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
        if (!driver.cuStreamIsCapturing) return;
        CUresult r = driver.cuStreamIsCapturing(stream, &status);
        if (r != CUDA_SUCCESS && r != CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return;  // not a stream
        captured = status != CU_STREAM_CAPTURE_STATUS_NONE && r == CUDA_SUCCESS;
        std::lock_guard<std::mutex> hold(all->lock);
        if (captured || r == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) {
            if ((captured || all->before.empty()) && all->before.insert(stream).second)
                registry().captures.fetch_add(1);
            return;
        }
        last = {epoch, stream};
        if (!own && all->not_captured.size() < kMostStreams) all->not_captured.insert(stream);
    });
    return captured;
}

}  // namespace

bool captured_before(CUstream stream) {
    const Thread *t = own_record();
    // This runs at every launch.
    if (void *known = t ? t->cache[static_cast<size_t>(CacheSlot::Captures)] : nullptr) {
        const NotCaptured::One &last = static_cast<NotCaptured *>(known)->at(stream);
        if (last.epoch == stream_epoch.load(std::memory_order_acquire) && last.stream == stream) return false;
    }
    return ask_whether_captured(stream);
}

bool capturing(CUstream stream) {
    if (registry().captures.load(std::memory_order_relaxed) == 0)
        return agent.late && captured_before(stream);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (!driver.cuStreamIsCapturing) return true;
    return driver.cuStreamIsCapturing(stream, &status) != CUDA_SUCCESS ||
           status != CU_STREAM_CAPTURE_STATUS_NONE;
}

}  // namespace gpubpf

#include "driver/leftovers.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <pthread.h>
#include <string>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

#include "attachment.h"
#include "copies/graph.h"
#include "driver/current.h"
#include "driver/gpu_idle.h"
#include "driver/objects.h"
#include "driver/waiting_call.h"
#include "hook_table.h"
#include "log/clock.h"
#include "log/stamp.h"
#include "patch.h"

namespace gpubpf {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr uint32_t kAtOnce = 1000;  // ms that a detach waits for a context's kernels
constexpr uint32_t kInside = 100;   // ms that it waits for the agent's threads in a context without objects
constexpr uint32_t kBusy = 20;      // ms to wait for other threads in the context, while launches are held
constexpr milliseconds kLook{20}, kSeldom{500};  // between checks of the leftovers
constexpr milliseconds kProof{50};  // how long launches are held to find out whether anything runs
constexpr milliseconds kLeastPause{1000}, kMostPause{8000};  // until the next attempt
// µs per step, and number of steps, that process exit waits for the agent
constexpr useconds_t kStep = 1000, kSteps = 100;

struct LeftoverList {
    std::mutex lock;                  // guards the members below; never held across a driver call
    std::condition_variable changed;  // a thread has finished waiting for a context, or an entry was removed
    std::vector<Leftovers> all;
    uint32_t inside = 0;  // how many of the agent's threads are in a context
    bool thread = false;  // the releasing thread exists
};
ProcessState<LeftoverList> leftovers;
std::atomic<bool> any{false}, abandoned{false};
std::atomic<int> captures{0};

// The objects are released when nothing runs. If graphs hold copies, they are released when their context
// ends.
bool waits_for_kernels(const Leftovers &r) { return !r.graphs; }

// Collects all objects to be released. Call it with context.busy held.
Leftovers gather(Context &context, uint64_t attachment) {
    Leftovers r;
    r.context = context.handle;
    r.device = context.device;
    r.attachment = attachment;
    context.usable = false;
    if (CUstream stream = std::exchange(context.stream, nullptr)) r.streams.push_back(stream);
    for (const RingMemory &ring : context.rings)
        if (!ring.mapped && ring.data) r.memory.push_back(ring.data);
    context.rings.clear();
    r.registered.swap(context.registered);
    for (const Sidecar &s : context.sidecars)
        if (s.handle) r.modules.push_back(s.handle);
    gather_clock(context, r);
    gather_stamps(context, r.events);
    gather_graphs(context, r);
    std::lock_guard<std::mutex> hold(context.memory);
    if (context.patches.modules.empty()) {  // else patches use it
        for (const auto &pool : context.pools) r.memory.push_back(pool->base);
        if (CUdeviceptr table = std::exchange(context.patches.table, 0)) r.memory.push_back(table);
    }
    r.memory.insert(r.memory.end(), context.cell_memory.begin(), context.cell_memory.end());
    context.cell_memory.clear();
    context.cells.clear();
    return r;
}

bool is_empty(const Leftovers &r) {
    return r.memory.empty() && r.registered.empty() && r.modules.empty() && r.events.empty() &&
           r.streams.empty();
}

// Removes one object and returns it.
Leftovers one_of(Leftovers &r) {
    Leftovers one;
    auto move = [](auto &from, auto &to) {
        if (from.empty()) return false;
        to.push_back(from.back());
        from.pop_back();
        return true;
    };
    (void)(move(r.memory, one.memory) || move(r.registered, one.registered) || move(r.events, one.events) ||
           move(r.streams, one.streams) || move(r.modules, one.modules));
    return one;
}

// Call it when nothing runs in the context and the context is current.
void free_all(const Leftovers &r) {
    for (CUdeviceptr base : r.memory) driver.cuMemFree_v2(base);
    for (const auto &host : r.registered)
        if (driver.cuMemHostUnregister && driver.cuMemHostUnregister(host.first) == CUDA_SUCCESS)
            munmap(host.first, host.second);
    for (CUevent event : r.events)
        if (driver.cuEventDestroy_v2) driver.cuEventDestroy_v2(event);
    for (CUstream stream : r.streams)
        if (driver.cuStreamDestroy_v2) driver.cuStreamDestroy_v2(stream);
    for (CUmodule module : r.modules)
        if (driver.cuModuleUnload) driver.cuModuleUnload(module);
}

// Removes a context's entries.
void take(CUcontext context) {
    std::lock_guard<std::mutex> hold(leftovers->lock);
    auto end = std::remove_if(leftovers->all.begin(), leftovers->all.end(),
                              [&](const Leftovers &r) { return r.context == context; });
    leftovers->all.erase(end, leftovers->all.end());
    any = !leftovers->all.empty();
    leftovers->changed.notify_all();
}

// Enters a context, unless the program has ended it: then it has no leftovers.
class InContext {
  public:
    explicit InContext(CUcontext context) : stay_(context), leftovers_(&*leftovers) {
        if (!stay_) return;
        {
            std::lock_guard<std::mutex> hold(leftovers_->lock);
            if (abandoned || std::none_of(leftovers_->all.begin(), leftovers_->all.end(),
                                          [&](const Leftovers &r) { return r.context == context; }))
                return;
            ++leftovers_->inside;
        }
        entered_ = true;
        pushed_ = driver.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS;
    }
    ~InContext() {
        CUcontext popped;
        if (pushed_) driver.cuCtxPopCurrent_v2(&popped);
        if (!entered_) return;
        std::lock_guard<std::mutex> hold(leftovers_->lock);
        --leftovers_->inside;
    }
    InContext(const InContext &) = delete;
    InContext &operator=(const InContext &) = delete;
    explicit operator bool() const { return pushed_; }

  private:
    Stay stay_;
    DriverScope scope_;
    LeftoverList *leftovers_;
    bool entered_ = false, pushed_ = false;
};

// A thread that waits for a context, as long as kernels run there.
struct Waiting {
    std::mutex lock;  // guards the members below
    // over: the thread has finished. idle: everything launched before has ended. broken: every call in the
    // context fails.
    bool over = false, idle = false, broken = false;
    bool holds = false;  // launches are to be held as soon as the context is idle
    int64_t held = 0;    // the time limit while they are held
    pid_t thread = 0;
    bool is_over() {
        std::lock_guard<std::mutex> hold(lock);
        return over;
    }
};

// `soon`: other threads wait for it with launches held.
std::shared_ptr<Waiting> wait_for_context(CUcontext context, bool soon) {
    auto waiting = std::make_shared<Waiting>();
    waiting->holds = !soon;
    try {
        SignalsBlocked blocked;
        std::thread([waiting, context, soon] {
            prctl(PR_SET_NAME, "gpubpf-wait");
            {
                std::lock_guard<std::mutex> hold(waiting->lock);
                waiting->thread = static_cast<pid_t>(syscall(SYS_gettid));
            }
            quietly([&] {
                InContext in(context);
                bool may = false;
                CUresult r = CUDA_ERROR_NOT_READY;
                if (in) {
                    WaitingCall call([] { return captures.load() != 0; });
                    may = static_cast<bool>(call);
                    if (may) r = driver.cuCtxSynchronize();
                }
                std::lock_guard<std::mutex> hold(waiting->lock);
                waiting->idle = r == CUDA_SUCCESS;
                const bool captured = captures.load() || (r >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED &&
                                                          r <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
                waiting->broken = r != CUDA_SUCCESS && may && !captured;
                if (waiting->idle && waiting->holds) waiting->held = hold_launches();
            });
            {
                std::lock_guard<std::mutex> hold(waiting->lock);
                waiting->over = true;
                waiting->thread = 0;
            }
            std::lock_guard<std::mutex> hold(leftovers->lock);
            leftovers->changed.notify_all();
        }).detach();
    } catch (...) {
        waiting->over = true;
    }
    return waiting;
}

// The progress of the releasing thread in one context.
struct Turn {
    std::shared_ptr<Waiting> waiting;  // null: no thread waits there
    Clock::time_point next{};          // time of the next attempt
    milliseconds pause = kLeastPause;
    void later() {
        next = Clock::now() + pause;
        pause = std::min(2 * pause, kMostPause);
    }
};

// With launches held: waits once more, for work that was launched before that, and releases the objects.
// Objects in contexts that do not become idle in time stay.
void free_held(CUcontext context, Turn &turn, const std::vector<uint64_t> &attachments, int64_t begun) {
    LaunchesHeld held(begun);
    turn.later();
    if (!held.none_under_way() || captures.load()) return;
    for (uint64_t number : attachments)
        if (copies_under_way(number)) return;
    std::shared_ptr<Waiting> waiting = wait_for_context(context, true);
    {
        std::unique_lock<std::mutex> hold(leftovers->lock);
        leftovers->changed.wait_for(hold, kProof, [&] { return waiting->is_over(); });
    }
    {
        std::lock_guard<std::mutex> hold(waiting->lock);
        if (!waiting->over) {  // it keeps waiting; the next attempt is possible when it returns
            turn.waiting = waiting;
            return;
        }
        if (!waiting->idle) return;
    }
    held.begin_work();
    InContext in(context);
    while (in && held.more() && !abandoned) {
        Leftovers one;  // one object at a time: if the program ends the context, nothing is left to release
        {
            std::lock_guard<std::mutex> hold(leftovers->lock);
            auto r = std::find_if(leftovers->all.begin(), leftovers->all.end(), [&](const Leftovers &l) {
                return l.context == context && waits_for_kernels(l);
            });
            if (r == leftovers->all.end()) break;
            one = one_of(*r);
            if (is_empty(*r)) leftovers->all.erase(r);
            any = !leftovers->all.empty();
        }
        free_all(one);
    }
}

// Checks one context.
void take_turn(CUcontext context, Turn &turn, const std::vector<uint64_t> &attachments) {
    if (!turn.waiting) {
        if (Clock::now() >= turn.next && !captures.load()) turn.waiting = wait_for_context(context, false);
        return;
    }
    int64_t begun = 0;
    bool broken = false;
    {
        std::lock_guard<std::mutex> hold(turn.waiting->lock);
        if (!turn.waiting->over) {
            yield_if_inside(turn.waiting->thread);
            if (Clock::now() >= turn.next) turn.waiting->holds = true;
            return;
        }
        begun = turn.waiting->held;
        broken = turn.waiting->broken;
    }
    turn.waiting = nullptr;
    if (broken) take(context);  // its objects end with it
    else if (begun) free_held(context, turn, attachments, begun);
}

void *free_later(void *) {
    prctl(PR_SET_NAME, "gpubpf-free");
    std::map<CUcontext, Turn> turns;
    bool hooked = true;
    for (size_t seen = 0;;) {
        // together with the attachments that left objects there
        std::map<CUcontext, std::vector<uint64_t>> contexts;
        {
            std::unique_lock<std::mutex> hold(leftovers->lock);
            bool all_wait = true;
            for (const auto &t : turns) all_wait = all_wait && t.second.waiting;
            auto changed = [&] {
                return leftovers->all.size() != seen ||
                       std::any_of(turns.begin(), turns.end(), [](const auto &t) {
                           return t.second.waiting && t.second.waiting->is_over();
                       });
            };
            leftovers->changed.wait_for(hold, all_wait ? kSeldom : kLook, changed);
            if (leftovers->all.empty() || abandoned) {
                leftovers->thread = false;
                break;
            }
            seen = leftovers->all.size();
            for (const Leftovers &r : leftovers->all)
                if (waits_for_kernels(r)) contexts[r.context].push_back(r.attachment);
        }
        for (auto it = turns.begin(); it != turns.end();)
            it = contexts.count(it->first) ? std::next(it) : turns.erase(it);
        for (auto &c : contexts)
            if (!abandoned) quietly([&] { take_turn(c.first, turns[c.first], c.second); });
        if (contexts.empty() && hooked)
            take_out_rest(serves_leftovers);  // launches no longer need to be held back
        hooked = !contexts.empty();
    }
    if (!abandoned) take_out_rest(serves_leftovers);
    return nullptr;
}

// Call it with leftovers->lock held.
void start_thread() {
    if (leftovers->thread || leftovers->all.empty()) return;
    SignalsBlocked blocked;
    pthread_t thread;
    leftovers->thread = pthread_create(&thread, nullptr, free_later, nullptr) == 0;
    if (leftovers->thread) pthread_detach(thread);
}

}  // namespace

CUcontext primary_of(CUdevice device) {
    using Retain = CUresult (*)(CUcontext *, CUdevice);
    using Release = CUresult (*)(CUdevice);
    auto retain = reinterpret_cast<Retain>(hooks[kHook_cuDevicePrimaryCtxRetain].original);
    auto release = reinterpret_cast<Release>(hooks[kHook_cuDevicePrimaryCtxRelease_v2].original);
    unsigned flags = 0;
    int active = 0;
    CUcontext primary = nullptr;
    if (!retain || !release || !driver.cuDevicePrimaryCtxGetState ||
        driver.cuDevicePrimaryCtxGetState(device, &flags, &active) != CUDA_SUCCESS || !active ||
        retain(&primary, device) != CUDA_SUCCESS)
        return nullptr;
    release(device);
    return primary;
}

bool is_primary(CUcontext context, CUdevice device) { return primary_of(device) == context; }

void release_driver_objects(uint64_t attachment) {
    const std::vector<Context *> contexts = registry().all_contexts();
    graphs_back(kAtOnce);
    std::vector<Leftovers> rest;
    std::vector<Context *> of_rest;
    for (Context *c : contexts) {
        if (c->dead || !lock_within(c->busy, kAtOnce)) continue;
        Leftovers r;
        {
            std::lock_guard<std::mutex> busy(c->busy, std::adopt_lock);
            r = gather(*c, attachment);
        }
        if (is_empty(r)) {
            // A thread waits for a kernel in the context: the hooks must see the end of the context.
            if (!left_within(c->handle, kInside)) {
                rest.push_back(std::move(r));
                of_rest.push_back(c);
            }
            continue;
        }
        const bool launched = wait_until_each_was_out(kAtOnce) && !copies_under_way(attachment);
        if (launched && waits_for_kernels(r) && !abandoned)
            when_idle(*c, kAtOnce, [&](LaunchesHeld &held) {
                if (!lock_within(c->busy, kBusy)) return;
                std::lock_guard<std::mutex> busy(c->busy, std::adopt_lock);
                Current current(*c);
                while (!c->dead && current.ok() && !registry().captures.load() && !abandoned &&
                       !is_empty(r) && held.more())
                    free_all(one_of(r));
            });
        if (c->dead || is_empty(r)) continue;
        rest.push_back(std::move(r));
        of_rest.push_back(c);
    }
    if (rest.empty()) return;
    for (Leftovers &r : rest) r.primary = is_primary(r.context, r.device);
    captures = registry().captures.load();
    {
        std::lock_guard<std::mutex> hold(leftovers->lock);
        std::move(rest.begin(), rest.end(), std::back_inserter(leftovers->all));
        any = true;
    }
    // The end of a context removes its entry. Contexts that ended before they had an entry are removed here.
    for (Context *c : of_rest)
        if (c->dead) take(c->handle);
    std::lock_guard<std::mutex> hold(leftovers->lock);
    start_thread();
}

bool has_leftovers() { return any.load(std::memory_order_acquire); }

bool serves_leftovers(const char *name) {
    if (!has_leftovers()) return false;
    auto is_one_of = [&](std::initializer_list<const char *> beginnings) {
        return std::any_of(beginnings.begin(), beginnings.end(),
                           [&](const char *b) { return strncmp(name, b, strlen(b)) == 0; });
    };
    if (strcmp(name, "cuDevicePrimaryCtxRetain") == 0) return false;
    if (is_one_of({"cuCtxDestroy", "cuDevicePrimaryCtxRe", "cuGreenCtxDestroy", "cuStreamBeginCapture",
                   "cuStreamEndCapture"}))
        return true;
    std::lock_guard<std::mutex> hold(leftovers->lock);
    return std::any_of(leftovers->all.begin(), leftovers->all.end(), waits_for_kernels) &&
           is_one_of({"cuLaunch", "cuGraphLaunch", "cuStreamWaitValue", "cuStreamBatchMemOp",
                      "cuStreamAddCallback"});
}

void leftovers_end_with(CUcontext context) {
    if (!has_leftovers()) return;
    quietly([&] { take(context); });
}

void leftovers_end_with_device(CUdevice device) {
    if (!has_leftovers() || !driver.cuDevicePrimaryCtxGetState) return;
    unsigned flags = 0;
    int active = 1;
    if (driver.cuDevicePrimaryCtxGetState(device, &flags, &active) != CUDA_SUCCESS || active) return;
    quietly([&] {
        std::vector<CUcontext> gone;
        {
            std::lock_guard<std::mutex> hold(leftovers->lock);
            for (const Leftovers &r : leftovers->all)
                if (r.primary && r.device == device) gone.push_back(r.context);
        }
        for (CUcontext c : gone) take(c);
    });
}

void leftovers_captured(int more) {
    int before = captures.load();
    while (before + more >= 0 && !captures.compare_exchange_weak(before, before + more)) {
    }
}

const Lifetime leftovers_lifetime{
    nullptr,
    nullptr,
    nullptr,
    [] {
        leftovers.in_forked_child();
        any = false;
    },
};

void abandon_leftovers() {
    abandoned = true;
    auto inside = [] {
        std::lock_guard<std::mutex> hold(leftovers->lock);
        return leftovers->inside != 0;
    };
    for (useconds_t i = 0; i < kSteps && inside(); ++i) usleep(kStep);
}

}  // namespace gpubpf

// Whether the driver would block for a long time. Loading a module, allocating and freeing may wait for all
// work on the GPU, with the context's lock held (docs/attach.md, "A driver that waits").
//
// While a watch is active, launching threads record events after their launches. Earlier launches are known to
// be finished when the driver has waited for the whole context, which a separate thread does. Without a watch,
// nothing is done.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "driver/stream.h"
#include "state.h"

namespace gpubpf {

// Launches are watched while an object of this class exists. The facts about streams are dropped with the last
// object.
class Watching {
  public:
    Watching();
    ~Watching();
    Watching(const Watching &) = delete;
    Watching &operator=(const Watching &) = delete;
};

// Returns whether a call that waits for the GPU would return soon. Waits up to `patience_ms` for such a
// moment. Do not call it in a launch, or with a lock held that a launch may take. Also returns false while a
// stream is being captured.
bool wait_is_short(Context &context, uint32_t patience_ms);

extern std::atomic<uint32_t> watchers;
void put_event_behind(StreamRef where) noexcept;
// Called after a launch, in the thread that launched.
inline void launched_in(StreamRef where) noexcept {
    if (__builtin_expect(watchers.load(std::memory_order_acquire) != 0, 0)) put_event_behind(where);
}

// --- launches held back ---

// Holds back the program's launches while it exists: for 0.1 s at most, for 0.9 s while earlier work comes to
// its end, and for another second once work has begun.
// Otherwise, a kernel that never ends could be launched after the check that nothing runs and before the
// work. Then the driver would wait for that kernel, and hold the lock that the program's next call needs.
// Works with and without an attachment, as long as the launch functions are hooked.
class LaunchesHeld {
  public:
    LaunchesHeld();
    explicit LaunchesHeld(int64_t until);  // what hold_launches() returned
    ~LaunchesHeld();
    LaunchesHeld(const LaunchesHeld &) = delete;
    LaunchesHeld &operator=(const LaunchesHeld &) = delete;
    // Whether all launches that began earlier have reached the driver. Also false if another thread holds the
    // launches.
    bool none_under_way() const;
    // Call it after that, while launches are held. Returns whether nothing runs in a context. Waits for
    // earlier launches while they make progress.
    bool nothing_runs(Context &context);
    // Nothing runs, so the work that follows will end soon. Extends the time limit.
    void begin_work();
    bool more() const;  // whether there is time to begin more work

  private:
    bool extend(int64_t until);
    int64_t until_;   // 0: not held
    int64_t latest_;  // on steady_clock: launches are not held for longer to wait for earlier work
    int64_t work_until_ = 0;
};
// Does `work` while nothing runs in the contexts and launches are held. Waits up to `patience_ms` in each
// context for such a moment. Returns false if there was no such moment.
bool when_idle(const std::vector<Context *> &contexts, uint32_t patience_ms,
               const std::function<void(LaunchesHeld &)> &work);
inline bool when_idle(Context &context, uint32_t patience_ms,
                      const std::function<void(LaunchesHeld &)> &work) {
    return when_idle(std::vector<Context *>{&context}, patience_ms, work);
}
int64_t hold_launches() noexcept;  // returns the time limit; 0: another thread holds them

// Whether a launch has begun since the agent attached, or may have before. False: nothing runs on any GPU.
extern std::atomic<bool> launches_begun;

extern std::atomic<int64_t> launches_held;  // the time limit, on steady_clock; 0: launches are not held
void wait_while_held(Thread *thread) noexcept;

// Marks a call that puts work into a stream which may not end by itself. It must exist before the hook's own
// part begins, and until the work is in the stream.
class Launching {
  public:
    [[gnu::always_inline]] Launching() noexcept {
        if (is_nested()) return;
        if (__builtin_expect(!launches_begun.load(std::memory_order_relaxed), 0)) launches_begun = true;
        thread_ = own_record();
        if (__builtin_expect(!thread_, 0)) thread_ = new_record_of_thread();
        if (thread_) thread_->launching.store(true, std::memory_order_relaxed);
        // A thread that holds launches makes all threads pass a memory barrier afterwards.
        std::atomic_signal_fence(std::memory_order_seq_cst);
        if (__builtin_expect(launches_held.load(std::memory_order_acquire) != 0, 0)) wait_while_held(thread_);
    }
    ~Launching() {
        if (thread_) thread_->launching.store(false, std::memory_order_release);
    }
    Launching(const Launching &) = delete;
    Launching &operator=(const Launching &) = delete;

  private:
    Thread *thread_ = nullptr;
};

// While it exists, the calling thread, which is in a launch, does not count as launching.
class LaunchPaused {
  public:
    LaunchPaused() noexcept : thread_(own_record()) {
        if (thread_) thread_->launching.store(false, std::memory_order_release);
    }
    ~LaunchPaused();
    LaunchPaused(const LaunchPaused &) = delete;
    LaunchPaused &operator=(const LaunchPaused &) = delete;

  private:
    Thread *thread_;
};

extern const Lifetime gpu_idle_lifetime;
void hooks_are_in();                          // the hooks are installed: captures are noticed from now on
void forget_streams(const Context *context);  // before the context is destroyed: its events end with it

// --- captures ---

// For captures that began after the attachment, the origin stream is known. For an earlier one, at best its
// existence is known.
void capture_began(CUstream stream);
// Whether a stream is being captured. Also true in the first 0.1 s of a late attachment, when an earlier capture
// may not have been noticed yet. The context must be current.
bool captured_now();
// Returns false if the capture was not counted.
bool capture_ended(CUstream stream);
// Whether a stream is in a capture that began before the attachment. Asks the driver once per stream.
bool captured_before(CUstream stream);
bool capturing(CUstream stream);  // whether work in this stream goes into a graph

}  // namespace gpubpf

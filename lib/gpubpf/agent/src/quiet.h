// Whether the driver would wait for long: loading a module, allocating and freeing may wait for everything that runs on the GPU, with the
// context's lock held (docs/attach.md, "A driver that waits").
//
// While somebody wants to know, launching threads put events behind their launches; what was launched before that is over when the
// driver has waited for the whole context, which a thread of its own does. Nothing is done otherwise.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "operation.h"
#include "state.h"

namespace gpubpf {

// Launches are watched as long as there is one: what is learnt of streams lasts that long.
class Watching {
  public:
    Watching();
    ~Watching();
    Watching(const Watching &) = delete;
    Watching &operator=(const Watching &) = delete;
};

// Whether what may wait for the GPU would be done with that soon: waits up to `patience_ms` for such a moment. Not in a launch, nor with a
// lock held that one may take. False also where a stream is being captured.
bool may_wait(Context &context, uint32_t patience_ms);

extern std::atomic<uint32_t> watchers;
void put_event_behind(Where where) noexcept;
// After a launch, in the thread that launched.
inline void launched_in(Where where) noexcept {
    if (__builtin_expect(watchers.load(std::memory_order_acquire) != 0, 0)) put_event_behind(where);
}

// --- launches held back ---

// Launches of the program's wait as long as this is there, a tenth of a second at most, a second in all once something is done meanwhile: what
// is launched between the question whether anything runs and what it was asked for could be a kernel that does not end, and the driver would wait
// for it with the lock that the program's next call needs. Works with and without an attachment, where launches come through hooks.
class LaunchesHeld {
  public:
    LaunchesHeld();
    explicit LaunchesHeld(int64_t begun) : until_(begun) {}  // by hold_launches()
    ~LaunchesHeld();
    LaunchesHeld(const LaunchesHeld &) = delete;
    LaunchesHeld &operator=(const LaunchesHeld &) = delete;
    // Whether all launches that were begun before are put to the driver. False also where somebody else holds them.
    bool none_under_way() const;
    // Then, while they are held: whether nothing runs in a context. Waits for what was launched before as long as that goes on.
    bool nothing_runs(Context &context);
    // Nothing runs: what follows ends soon, and has more time.
    void begin_work();
    bool more() const;  // whether there is time to begin something

  private:
    bool extend(int64_t until);
    int64_t until_;  // 0: not held
    int64_t work_until_ = 0;
};
// Does `work` while nothing runs in the context and launches are held; waits up to `patience_ms` for such a moment. False: there was none.
bool when_quiet(Context &context, uint32_t patience_ms, const std::function<void(LaunchesHeld &)> &work);
int64_t hold_launches() noexcept;  // until when; 0: somebody else does

extern std::atomic<int64_t> launches_held;  // until when, as steady_clock counts; 0: not at all
void wait_while_held(Thread *thread) noexcept;

// The program puts something into a stream that may not end by itself. To be there before the hook's own part begins, and until it is put.
class Launching {
  public:
    [[gnu::always_inline]] Launching() noexcept {
        if (is_nested()) return;
        thread_ = own_record();
        if (__builtin_expect(!thread_, 0)) thread_ = new_record_of_thread();
        if (thread_) thread_->launching.store(true, std::memory_order_relaxed);
        std::atomic_signal_fence(
            std::memory_order_seq_cst);  // who holds launches has all threads pass a barrier then
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

extern const Lifetime quiet_lifetime;
void settle();                              // the hooks are in: what is captured is met from now on
void forget_quiet(const Context *context);  // before it is destroyed: its events go with it

// --- captures ---

// Of captures that began after the agent came their origin is known; of one from before it is only known, at best, that there is one.
void capture_began(CUstream stream);
// In the hook, once it is counted and before it begins: not while the driver is about to be asked to wait for a context, which would end it.
void before_capture() noexcept;
// The other side of it, before such a call: false where `captured` says that something is.
bool may_enter(bool (*captured)());
// False: the capture was not counted.
bool capture_ended(CUstream stream);
// Whether a stream is being captured from before; asks the driver, once for each stream.
bool captured_before(CUstream stream);

}  // namespace gpubpf

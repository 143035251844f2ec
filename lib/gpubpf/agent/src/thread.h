// Tracks which threads are inside a hook (docs/attach.md, "The life of an agent"). The state of an attachment
// is freed only when no thread can be using it.
//
// Each thread stores its position in its own record, with a plain store. The thread that frees first marks
// the attachment as over. Then it makes all threads pass a memory barrier (membarrier) and checks the
// records. A thread that it does not see inside a hook will see that the attachment is over.
#pragma once

#include <atomic>
#include <csignal>
#include <cstdint>
#include <type_traits>

#include "lifetime.h"
#include "machine/cpu.h"

namespace gpubpf {

// Driver: in the program's own call of the driver, which may wait for a long time. The attachment's state may
// be freed meanwhile, but not what the call itself launches (DriverWithCopy).
enum class ThreadIn : uint64_t { Application, Hook, Driver, DriverWithCopy };

// What a thread caches between its calls. Each slot has its own type: see thread_cache().
enum class CacheSlot { Context, Queues, Captures, Addresses, Unknown, Id, Random, Ranges };
constexpr size_t kCacheSlots = 8;

struct alignas(64) Thread {
    std::atomic<uint64_t> state{0};      // number of the attachment << 2 | ThreadIn
    std::atomic<bool> launching{false};  // see Launching in gpu_idle.h; used with and without an attachment
    std::atomic<uint64_t> calls{0};      // written only by the thread itself while there is an attachment
    // The members below belong to the thread itself, except `used`.
    uint64_t number = 0;  // number of the attachment that the thread is inside; 0: none
    uint64_t timed_since = 0, ticks = 0, slow_since = 0;
    std::atomic<bool> used{true};
    std::atomic<uint32_t> id{0};
    uint64_t patch_data = 0;  // see PatchData in copies/patched.h
    Thread *next = nullptr;
    void *cache[kCacheSlots] = {};
};

// The number of the current attachment; 0 if there is none. Then no thread may access its state.
extern std::atomic<uint64_t> attachment;

// The number of hooked functions or agent calls that the thread is inside. 0: the application itself makes the call.
inline int &depth() {
    static thread_local int value __attribute__((tls_model("initial-exec"))) = 0;
    return value;
}

inline Thread *&own_record() {
    static thread_local Thread *value __attribute__((tls_model("initial-exec"))) = nullptr;
    return value;
}

// The hook through which the thread entered: its frame, and the return address there. 0: the thread is not
// inside a hook.
struct Entry {
    uintptr_t frame, from;
};
inline Entry &entry() {
    static thread_local Entry value __attribute__((tls_model("initial-exec"))) = {0, 0};
    return value;
}

Thread *new_record_of_thread() noexcept;  // the calling thread's; null if memory is short

// Returns the calling thread's memory for one cache slot, initially zero, or `otherwise` if memory is short.
// It is in the thread's record for two reasons: a library that is loaded late gets little static TLS
// (glibc has a few hundred bytes for all of them), and other TLS is allocated at first use.
void *allocate_thread_cache(CacheSlot note, size_t size) noexcept;
template <class T>
T &thread_cache(CacheSlot note, T &otherwise) {
    static_assert(std::is_trivially_copyable_v<T>);
    Thread *t = own_record();
    void *known = t ? t->cache[static_cast<size_t>(note)] : nullptr;
    if (__builtin_expect(!known, 0) && !(known = allocate_thread_cache(note, sizeof(T)))) return otherwise;
    return *static_cast<T *>(known);
}

// For a hook with this frame, while the thread counts as inside another hook. Returns whether that other hook
// was abandoned: a signal handler interrupted it and jumped out (siglongjmp). If so, the thread then counts
// as outside all hooks.
bool was_left(uintptr_t frame) noexcept;
// Call it in the hook itself, because it checks the hook's frame.
[[gnu::always_inline]] inline bool is_nested() {
    return __builtin_expect(depth() != 0, 0) &&
           !was_left(reinterpret_cast<uintptr_t>(__builtin_frame_address(0)));
}

// One call in this many is timed.
constexpr uint64_t kTimedEvery = 64;
void begin_timed(Thread &thread) noexcept;
void end_timed(Thread &thread) noexcept;  // of the calling thread, while it is inside a hook
void pause_timed(Thread &thread) noexcept;
void resume_timed(Thread &thread) noexcept;
// Returns the calling thread's record if it is inside a hook; null: its work is not timed.
Thread *begin_slow_path() noexcept;
void end_slow_path(Thread &thread) noexcept;

// Enters a hook: marks the thread as inside, and determines whether the application itself makes the call,
// rather than the driver from inside another hooked function. Use it in the hook itself, or in a function
// that is always inlined there.
class HookCall {
  public:
    [[gnu::always_inline]] HookCall() noexcept : HookCall(is_nested()) {}
    // `nested`: the thread is inside another hook.
    [[gnu::always_inline]] explicit HookCall(bool nested) noexcept : before_(nested ? depth() : 0) {
        depth() = before_ + 1;
        if (before_ != 0) return;
        const auto frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
        entry() = {frame, *machine::return_slot(frame)};
        const uint64_t number = attachment.load(std::memory_order_relaxed);
        if (!number) return;
        thread_ = own_record();
        if (__builtin_expect(!thread_, 0) && !(thread_ = new_record_of_thread())) return;
        thread_->state.store(number << 2 | static_cast<uint64_t>(ThreadIn::Hook), std::memory_order_relaxed);
        std::atomic_signal_fence(std::memory_order_seq_cst);
        if (__builtin_expect(attachment.load(std::memory_order_acquire) != number, 0)) {
            leave();
            return;
        }
        thread_->number = number;
        const uint64_t calls = thread_->calls.load(std::memory_order_relaxed) + 1;
        thread_->calls.store(calls, std::memory_order_relaxed);
        if (__builtin_expect(calls % kTimedEvery == 0, 0)) begin_timed(*thread_);
    }
    ~HookCall() {
        if (thread_) {
            if (__builtin_expect(thread_->timed_since != 0, 0)) end_timed(*thread_);
            thread_->number = 0;
            leave();
        }
        depth() = before_;
        if (before_ == 0) entry().frame = 0;
    }
    HookCall(const HookCall &) = delete;
    HookCall &operator=(const HookCall &) = delete;
    explicit operator bool() const;  // whether launches are replaced; defined in hook_call.h
    // Whether records are kept, even if launches are no longer replaced. The answer may change during the
    // driver's call: if the attachment ended meanwhile, its state must not be accessed.
    bool keeps_records() const { return thread_ && thread_->number; }

  private:
    void leave() { thread_->state.store(0, std::memory_order_release); }
    Thread *thread_ = nullptr;
    int before_;
};

// Marks the program's own call of the driver. Do not use the attachment's state after it, unless HookCall
// reports that the attachment still exists. Inside the agent's own calls, it does nothing.
class InDriver {
  public:
    explicit InDriver(ThreadIn how = ThreadIn::Driver) noexcept {
        Thread *t = own_record();
        if (depth() != 1 || !t || !t->number) return;
        thread_ = t;
        if (__builtin_expect(t->timed_since != 0, 0)) pause_timed(*t);
        t->state.store(t->number << 2 | static_cast<uint64_t>(how), std::memory_order_release);
    }
    ~InDriver() {
        Thread *t = thread_;
        if (!t) return;
        t->state.store(t->number << 2 | static_cast<uint64_t>(ThreadIn::Hook), std::memory_order_relaxed);
        std::atomic_signal_fence(std::memory_order_seq_cst);
        if (__builtin_expect(attachment.load(std::memory_order_acquire) != t->number, 0)) {
            t->number = t->timed_since = 0;
            t->state.store(0, std::memory_order_release);
        } else if (__builtin_expect(t->timed_since != 0, 0)) {
            resume_timed(*t);
        }
    }
    InDriver(const InDriver &) = delete;
    InDriver &operator=(const InDriver &) = delete;

  private:
    Thread *thread_ = nullptr;
};

// For a hooked function that the driver calls during a call of the program (InDriver): marks the thread as inside the agent. False if
// the thread is not in such a call, or if the attachment has ended meanwhile. Then the attachment's state must not be accessed.
class BackFromDriver {
  public:
    BackFromDriver() noexcept {
        Thread *t = own_record();
        if (!t || !t->number || t->state.load(std::memory_order_relaxed) != in(*t, ThreadIn::Driver)) return;
        t->state.store(in(*t, ThreadIn::Hook), std::memory_order_relaxed);
        std::atomic_signal_fence(std::memory_order_seq_cst);
        if (attachment.load(std::memory_order_acquire) == t->number) thread_ = t;
        else t->state.store(in(*t, ThreadIn::Driver), std::memory_order_release);
    }
    ~BackFromDriver() {
        if (thread_) thread_->state.store(in(*thread_, ThreadIn::Driver), std::memory_order_release);
    }
    BackFromDriver(const BackFromDriver &) = delete;
    BackFromDriver &operator=(const BackFromDriver &) = delete;
    explicit operator bool() const { return thread_; }

  private:
    static uint64_t in(const Thread &thread, ThreadIn place) {
        return thread.number << 2 | static_cast<uint64_t>(place);
    }
    Thread *thread_ = nullptr;
};

// Marks rare work in hooks that may take long, such as loading a module or waiting for an answer. It is
// always timed. If the hook call itself is being timed as a sample, that timer pauses. The program's own
// driver call (InDriver) must not be made meanwhile.
class SlowPath {
  public:
    SlowPath() noexcept : thread_(begin_slow_path()) {}
    ~SlowPath() {
        if (thread_) end_slow_path(*thread_);
    }
    SlowPath(const SlowPath &) = delete;
    SlowPath &operator=(const SlowPath &) = delete;

  private:
    Thread *thread_;
};

// For the start of a thread: the application's handlers must run only on its own threads.
class SignalsBlocked {
  public:
    SignalsBlocked() noexcept {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked &) = delete;
    SignalsBlocked &operator=(const SignalsBlocked &) = delete;

  private:
    sigset_t before_;
};

// For code outside hooks: a signal handler, process exit, the start of an attachment. Nothing is freed while
// a Visit exists. Async-signal-safe.
class Visit {
  public:
    Visit() noexcept { ++visits; }
    ~Visit() { --visits; }
    Visit(const Visit &) = delete;
    Visit &operator=(const Visit &) = delete;
    static std::atomic<uint32_t> visits;
};

// Call it after the store that keeps threads from launching copies. Waits until each thread was seen outside
// the hooks. Returns false on timeout.
bool wait_until_each_was_out(uint32_t wait_ms);
// The same, but each thread was seen where it launches no copy. Its launches are then in the stream, and counted.
bool wait_until_copies_are_launched(uint32_t wait_ms);
// The same for launches by any thread that began earlier.
bool wait_until_none_launches(uint32_t wait_ms);
// The attachment is over. Waits until no thread uses its state.
void wait_until_out();
// Whether a thread is still launching a copy of attachment `number`.
bool copies_under_way(uint64_t number);
uint64_t rest_of_calls();   // calls of all threads that are not in the control block yet
uint64_t calls_not_told();  // the same; also resets the counts
extern const Lifetime thread_lifetime;

}  // namespace gpubpf

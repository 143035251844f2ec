// Who is inside a hook (docs/attach.md, "The life of an agent"). What belongs to an attachment is freed only once no thread can be using it.
//
// A thread says in a record of its own where it is: a plain store. Who frees says first that the attachment is over, has all
// threads pass a barrier (membarrier), and then looks at the records: a thread that is not seen inside sees that it is over.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "lifetime.h"

#ifdef __x86_64__
#include <x86intrin.h>
#endif

namespace gpubpf {

// Away: in the program's own call of the driver, which may wait for long. What the attachment has may go meanwhile; but what the call itself
// launches, AwayWithCopy, must not.
enum class Inside : uint64_t { Out, In, Away, AwayWithCopy };

// What a thread remembers of its own calls, each of a type of its own: see remembered().
enum class Note { Context, Queues, Captures, Addresses, Unknown, Id, Random };
constexpr size_t kNotes = 7;

struct alignas(64) Thread {
    std::atomic<uint64_t> state{0};      // number of the attachment << 2 | Inside
    std::atomic<bool> launching{false};  // see Launching in quiet.h; with or without an attachment
    std::atomic<uint64_t> calls{0};      // written by the thread alone as long as there is an attachment
    // Below: the thread's own, but for `used`.
    uint64_t number = 0;  // of the attachment for which it is inside; 0: none
    uint64_t timed_since = 0, ticks = 0, rare_since = 0;
    std::atomic<bool> used{true};
    std::atomic<uint32_t> id{0};
    Thread *next = nullptr;
    void *remembered[kNotes] = {};
};

// The number of the attachment that there is; 0: none, and nothing that one has may be touched.
extern std::atomic<uint64_t> attachment;

// How deep the thread is inside hooked functions or the agent's own calls; 0: the application itself is calling.
inline int &depth() {
    static thread_local int value __attribute__((tls_model("initial-exec"))) = 0;
    return value;
}

inline Thread *&own_record() {
    static thread_local Thread *value __attribute__((tls_model("initial-exec"))) = nullptr;
    return value;
}

// The hook that the thread came in by: its frame, and the return address there. 0: it came in by none, or is out again.
struct Entry {
    uintptr_t frame, from;
};
inline uintptr_t *return_slot(uintptr_t frame) { return reinterpret_cast<uintptr_t *>(frame) + 1; }
inline Entry &entry() {
    static thread_local Entry value __attribute__((tls_model("initial-exec"))) = {0, 0};
    return value;
}

Thread *new_record_of_thread() noexcept;  // the calling thread's; null: no memory

// Memory of the calling thread for one of its notes, zeros at first. In its record, as there is little static TLS for a library that comes late
// (glibc: a few hundred bytes for all of them), and other TLS is allocated at its first use. `otherwise`: where there is no memory.
void *memory_of_thread(Note note, size_t size) noexcept;
template <class T>
T &remembered(Note note, T &otherwise) {
    static_assert(std::is_trivially_copyable_v<T>);
    Thread *t = own_record();
    void *known = t ? t->remembered[static_cast<size_t>(note)] : nullptr;
    if (__builtin_expect(!known, 0) && !(known = memory_of_thread(note, sizeof(T)))) return otherwise;
    return *static_cast<T *>(known);
}

// In a hook with this frame, while the thread is inside of another: whether that one was left without its end, by a signal's handler that
// interrupted it and jumped out (siglongjmp). Then the thread is outside of all.
bool was_left(uintptr_t frame) noexcept;
// To be called in the hook itself: it is the hook's frame that counts.
[[gnu::always_inline]] inline bool is_nested() {
    return __builtin_expect(depth() != 0, 0) &&
           !was_left(reinterpret_cast<uintptr_t>(__builtin_frame_address(0)));
}

// One call in so many is timed.
constexpr uint64_t kTimedEvery = 64;
void begin_timed(Thread &thread) noexcept;
void end_timed(Thread &thread) noexcept;  // of the calling thread, while it is inside
void pause_timed(Thread &thread) noexcept;
void resume_timed(Thread &thread) noexcept;
Thread *
begin_rare() noexcept;  // the calling thread's, where it is inside a hook; null: what it does needs no time taken
void end_rare(Thread &thread) noexcept;

// Whether the application itself is calling, rather than the driver from inside another hooked function; and that the thread is inside. Made in the
// hook itself, or in what is always inlined there.
class Outer {
  public:
    [[gnu::always_inline]] Outer() noexcept : before_(is_nested() ? depth() : 0) {
        depth() = before_ + 1;
        if (before_ != 0) return;
        const auto frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
        entry() = {frame, *return_slot(frame)};
        const uint64_t number = attachment.load(std::memory_order_relaxed);
        if (!number) return;
        thread_ = own_record();
        if (__builtin_expect(!thread_, 0) && !(thread_ = new_record_of_thread())) return;
        thread_->state.store(number << 2 | static_cast<uint64_t>(Inside::In), std::memory_order_relaxed);
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
    ~Outer() {
        if (thread_) {
            if (__builtin_expect(thread_->timed_since != 0, 0)) end_timed(*thread_);
            thread_->number = 0;
            leave();
        }
        depth() = before_;
        if (before_ == 0) entry().frame = 0;
    }
    Outer(const Outer &) = delete;
    Outer &operator=(const Outer &) = delete;
    explicit operator bool() const;  // whether launches are swapped; defined in hook_call.h
    // Whether records are kept, though launches may not be swapped any more. After the driver's call another answer may come: the attachment
    // ended meanwhile, and nothing of it may be touched.
    bool keeps_records() const { return thread_ && thread_->number; }

  private:
    void leave() { thread_->state.store(0, std::memory_order_release); }
    Thread *thread_ = nullptr;
    int before_;
};

// The program's own call of the driver. Nothing that belongs to an attachment may be held across it, unless Outer says afterwards that it is
// still there. Inside the agent's own calls it does nothing.
class Away {
  public:
    explicit Away(Inside how = Inside::Away) noexcept {
        Thread *t = own_record();
        if (depth() != 1 || !t || !t->number) return;
        thread_ = t;
        if (__builtin_expect(t->timed_since != 0, 0)) pause_timed(*t);
        t->state.store(t->number << 2 | static_cast<uint64_t>(how), std::memory_order_release);
    }
    ~Away() {
        Thread *t = thread_;
        if (!t) return;
        t->state.store(t->number << 2 | static_cast<uint64_t>(Inside::In), std::memory_order_relaxed);
        std::atomic_signal_fence(std::memory_order_seq_cst);
        if (__builtin_expect(attachment.load(std::memory_order_acquire) != t->number, 0)) {
            t->number = t->timed_since = 0;
            t->state.store(0, std::memory_order_release);
        } else if (__builtin_expect(t->timed_since != 0, 0)) {
            resume_timed(*t);
        }
    }
    Away(const Away &) = delete;
    Away &operator=(const Away &) = delete;

  private:
    Thread *thread_ = nullptr;
};

// What hooks do rarely, and what may take long: a module is loaded, an answer waited for. Each is timed; a call that is timed as one of many goes
// without it. No call goes to the driver for the program meanwhile (Away).
class Rare {
  public:
    Rare() noexcept : thread_(begin_rare()) {}
    ~Rare() {
        if (thread_) end_rare(*thread_);
    }
    Rare(const Rare &) = delete;
    Rare &operator=(const Rare &) = delete;

  private:
    Thread *thread_;
};

// For what is not in a hook: a signal's handler, the end of the process, the start of an attachment. As long as there is a visit nothing is
// freed. Async-signal-safe.
class Visit {
  public:
    Visit() noexcept { ++visits; }
    ~Visit() { --visits; }
    Visit(const Visit &) = delete;
    Visit &operator=(const Visit &) = delete;
    static std::atomic<uint32_t> visits;
};

// After what keeps threads from launching copies was stored: waits until each was seen not to be inside. False: not in time.
bool wait_until_each_was_out(uint32_t wait_ms);
// The same for launches, whoever's: that were begun before.
bool wait_until_none_launches(uint32_t wait_ms);
// The attachment is over. Waits until no thread uses anything of it.
void wait_until_out();
// Whether a thread is still launching a copy of attachment `number`.
bool copies_under_way(uint64_t number);
uint64_t rest_of_calls();   // of all threads: those that no timed call has told the control block
uint64_t calls_not_told();  // the same; counts from there on anew
extern const Lifetime thread_lifetime;

}  // namespace gpubpf

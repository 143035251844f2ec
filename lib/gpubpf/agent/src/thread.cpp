#include "thread.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <new>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>

#include "log/stack.h"
#include "machine/cpu.h"
#include "patch.h"
#include "readable.h"
#include "this_agent.h"

namespace gpubpf {

std::atomic<uint64_t> attachment{0};
std::atomic<uint32_t> Visit::visits{0};

namespace {

std::atomic<Thread *> threads{nullptr};  // records are never freed, but reused

void put_out(Thread &thread) {
    thread.number = thread.timed_since = thread.slow_since = 0;
    thread.state.store(0, std::memory_order_release);
    thread.launching.store(false, std::memory_order_release);
}

void give_up(Thread &thread) {
    put_out(thread);
    thread.used.store(false, std::memory_order_release);
}

void thread_ended(void *record) {
    own_record() = nullptr;  // if this thread calls the driver again, it gets a new record
    give_up(*static_cast<Thread *>(record));
}

pthread_key_t key_of_records() {
    static pthread_key_t key;
    static const bool made = pthread_key_create(&key, thread_ended) == 0;
    return made ? key : static_cast<pthread_key_t>(-1);
}

bool is_there(const Thread &thread) {
    return syscall(SYS_tgkill, getpid(), thread.id.load(std::memory_order_relaxed), 0) == 0 || errno != ESRCH;
}

ThreadIn place_of(const Thread &thread) {
    return static_cast<ThreadIn>(thread.state.load(std::memory_order_acquire) & 3);
}

// --- time ---

uint64_t monotonic_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

struct Rate {
    uint64_t ticks, ns;  // when the first rate was taken
    uint64_t reading;    // duration of reading the counter, in ticks
};

const Rate &rate() {
    static const Rate made = [] {
        uint64_t least = UINT64_MAX;
        for (int i = 0; i < 64; ++i) {
            const uint64_t before = machine::ticks();
            least = std::min(least, machine::ticks() - before);
        }
        return Rate{machine::ticks(), monotonic_ns(), least};
    }();
    return made;
}

// A hook needs a few µs at most for a launch. Longer calls had to wait, or were not scheduled.
constexpr uint64_t kLong = 50000;  // ns

uint64_t in_ns(uint64_t ticks) {
    const Rate &r = rate();
    const uint64_t passed = machine::ticks() - r.ticks, ns = monotonic_ns() - r.ns;
    return passed ? static_cast<uint64_t>(static_cast<double>(ticks) *
                                          (static_cast<double>(ns) / static_cast<double>(passed)))
                  : 0;
}

void add_ticks(Thread &thread) {
    const uint64_t passed = machine::ticks() - thread.timed_since;
    thread.ticks += passed - std::min(passed, rate().reading);
}

}  // namespace

void begin_timed(Thread &thread) noexcept {
    rate();
    thread.ticks = 0;
    thread.timed_since = machine::ticks() | 1;
}

void pause_timed(Thread &thread) noexcept {
    add_ticks(thread);
    thread.timed_since = 1;
}

void resume_timed(Thread &thread) noexcept { thread.timed_since = machine::ticks() | 1; }

void end_timed(Thread &thread) noexcept {
    add_ticks(thread);
    thread.timed_since = 0;
    const uint64_t ns = in_ns(thread.ticks);
    Control &control = control_block();
    control.hooks.fetch_add(kTimedEvery, std::memory_order_relaxed);
    control.hooks_timed.fetch_add(1, std::memory_order_relaxed);
    if (ns > kLong) control.hooks_long.fetch_add(1, std::memory_order_relaxed);
    (ns > kLong ? control.hooks_long_ns : control.hooks_ticks_ns).fetch_add(ns, std::memory_order_relaxed);
}

Thread *begin_slow_path() noexcept {
    Thread *t = own_record();
    if (!t || !t->number || t->slow_since) return nullptr;
    if (t->timed_since) pause_timed(*t);
    rate();
    t->slow_since = machine::ticks() | 1;
    return t;
}

void end_slow_path(Thread &thread) noexcept {
    const uint64_t passed = machine::ticks() - thread.slow_since;
    thread.slow_since = 0;
    if (!thread.number) return;  // the attachment is over
    control_block().hooks_rare_ns.fetch_add(in_ns(passed), std::memory_order_relaxed);
    if (thread.timed_since) resume_timed(thread);
}

Thread *new_record_of_thread() noexcept {
    Thread *mine = nullptr;
    for (Thread *t = threads.load(std::memory_order_acquire); t && !mine; t = t->next) {
        bool no = false;
        if (!t->used.load(std::memory_order_relaxed) && t->used.compare_exchange_strong(no, true)) mine = t;
    }
    const bool known = mine != nullptr;
    if (known)
        for (void *&memory : mine->cache)
            free(std::exchange(memory, nullptr));  // from the thread that had the record before
    if (!mine) mine = new (std::nothrow) Thread;
    if (!mine) return nullptr;
    mine->id = static_cast<uint32_t>(syscall(SYS_gettid));
    if (!known) {
        mine->next = threads.load(std::memory_order_relaxed);
        while (!threads.compare_exchange_weak(mine->next, mine)) {
        }
    }
    if (pthread_setspecific(key_of_records(), mine) != 0) {  // the record would never be returned
        mine->used = false;
        return nullptr;
    }
    return own_record() = mine;
}

void *allocate_thread_cache(CacheSlot note, size_t size) noexcept {
    Thread *t = own_record();
    if (!t && !(t = new_record_of_thread())) return nullptr;
    void *&memory = t->cache[static_cast<size_t>(note)];
    if (!memory) memory = calloc(1, size);
    return memory;
}

__attribute__((no_sanitize("address"))) bool was_left(uintptr_t frame) noexcept {
    constexpr uintptr_t kNear = 1 << 20;
    Entry &of = entry();
    if (!of.frame) return false;
    if (frame < of.frame) {
        // The call comes from the driver, or from a signal handler. Otherwise, later calls have overwritten
        // the other hook's return address, or the stack shows it. A frame far away is on another stack. A
        // nearby frame may also be on another stack that no longer exists.
        if (is_internal(machine::plain_return_address(*machine::return_slot(frame))) ||
            of.frame - frame > kNear)
            return false;
        const uintptr_t *slot = machine::return_slot(of.frame);
        if (is_readable(slot) && *slot == of.from && !stack_lacks(reinterpret_cast<uintptr_t>(slot)))
            return false;
    } else {
        // On the same stack, the other frame no longer exists. A signal handler may have its own stack, at
        // any address.
        stack_t stack{};
        if (sigaltstack(nullptr, &stack) != 0 || (stack.ss_flags & SS_ONSTACK)) return false;
    }
    if (Thread *t = own_record()) put_out(*t);
    depth() = 0;
    of.frame = 0;
    return true;
}

namespace {

// Waits until each thread was seen with `is_in` false.
template <class IsIn>
bool wait_until_each_was_seen(uint32_t wait_ms, const IsIn &is_in) {
    barrier_in_all_threads();
    const uint64_t until = monotonic_ns() + wait_ms * uint64_t{1000000};
    useconds_t pause = 50;
    for (Thread *t = threads.load(std::memory_order_acquire); t;) {
        if (!is_in(*t)) {
            t = t->next;
        } else {
            if (monotonic_ns() > until) return false;
            usleep(pause);
            pause = std::min<useconds_t>(pause * 2, 1000);
        }
    }
    return true;
}

}  // namespace

bool wait_until_each_was_out(uint32_t wait_ms) {
    return wait_until_each_was_seen(wait_ms, [](const Thread &t) { return place_of(t) == ThreadIn::Hook; });
}

bool wait_until_copies_are_launched(uint32_t wait_ms) {
    return wait_until_each_was_seen(wait_ms, [](const Thread &t) {
        const ThreadIn place = place_of(t);
        return (place == ThreadIn::Hook || place == ThreadIn::DriverWithCopy) && is_there(t);
    });
}

bool wait_until_none_launches(uint32_t wait_ms) {
    return wait_until_each_was_seen(
        wait_ms, [](const Thread &t) { return t.launching.load(std::memory_order_acquire) && is_there(t); });
}

void wait_until_out() {
    barrier_in_all_threads();
    useconds_t pause = 50;
    for (Thread *t = threads.load(std::memory_order_acquire); t;) {
        if (place_of(*t) != ThreadIn::Hook) {
            t = t->next;
            continue;
        }
        usleep(pause);
        pause = std::min<useconds_t>(pause * 2, 10000);
        if (pause == 10000 && !is_there(*t)) give_up(*t);  // it ended in the middle of a hook
    }
    while (Visit::visits.load()) {
        usleep(pause);
        pause = std::min<useconds_t>(pause * 2, 10000);
    }
}

bool copies_under_way(uint64_t number) {
    for (Thread *t = threads.load(std::memory_order_acquire); t; t = t->next)
        if (t->state.load(std::memory_order_acquire) ==
                (number << 2 | static_cast<uint64_t>(ThreadIn::DriverWithCopy)) &&
            is_there(*t))
            return true;
    return false;
}

uint64_t rest_of_calls() {
    uint64_t calls = 0;
    for (Thread *t = threads.load(std::memory_order_acquire); t; t = t->next)
        calls += t->calls.load(std::memory_order_relaxed) % kTimedEvery;
    return calls;
}

uint64_t calls_not_told() {
    const uint64_t calls = rest_of_calls();
    for (Thread *t = threads.load(std::memory_order_acquire); t; t = t->next) t->calls = 0;
    control_block().hooks_rest = 0;
    return calls;
}

namespace {

// Only the calling thread exists in the child.
void free_other_records() {
    Thread *mine = own_record();
    for (Thread *t = threads.load(std::memory_order_acquire); t; t = t->next) {
        t->state = 0;
        t->launching = false;
        t->calls = 0;
        t->number = t->timed_since = t->slow_since = 0;
        t->used = t == mine;
    }
    if (mine) mine->id = static_cast<uint32_t>(syscall(SYS_gettid));
    Visit::visits = 0;
}

}  // namespace

const Lifetime thread_lifetime{nullptr, nullptr, nullptr, free_other_records};

}  // namespace gpubpf

#include "driver/waiting_call.h"

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace gpubpf {

struct CallSlot {
    std::atomic<pid_t> thread{0};  // 0: free
    // When the call began, on the monotonic clock in ns; 0: not yet. It identifies the call.
    std::atomic<int64_t> began{0};
    std::atomic<int64_t> cpu{0};       // CPU time of the thread then, in ns
    std::atomic<int64_t> inside{0};    // the last call that was found inside the driver
    std::atomic<int64_t> yielding{0};  // the last call whose thread got the lowest priority
};

namespace {

// A thread is inside the driver, past its check for captures, when it has used kInsideAfter of CPU time since it
// began the call, or sleeps there. Wall-clock time would prove nothing about a thread that is not scheduled.
constexpr int64_t kAsleep = 1'000'000;    // ns
constexpr int64_t kUnknown = 50'000'000;  // ns after which it counts as inside if its state is unknown
constexpr int64_t kPause = 200'000;       // ns
constexpr size_t kMostCalls = 64;         // further concurrent calls are refused

CallSlot slots[kMostCalls];

int64_t now_on(clockid_t clock) {
    timespec t{};
    return clock_gettime(clock, &t) ? -1 : t.tv_sec * int64_t{1'000'000'000} + t.tv_nsec;
}

// The CPU time of a thread of this process (include/linux/posix-timers.h: CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED).
clockid_t cpu_clock_of(pid_t thread) {
    return static_cast<clockid_t>(~static_cast<unsigned>(thread) << 3 | 6);
}

// Returns the letter of proc(5) for a thread's state; 0: unknown. Uses no cancellation point.
char state_of_thread(pid_t thread) {
    char text[512], path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
    const long file = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    const long got = syscall(SYS_read, file, text, sizeof text - 1);
    syscall(SYS_close, file);
    if (got <= 0) return 0;
    text[got] = 0;
    const char *name_end = strrchr(text, ')');
    return name_end && name_end[1] == ' ' ? name_end[2] : 0;
}

bool is_inside(CallSlot &slot, pid_t thread) {
    const int64_t call = slot.began.load(std::memory_order_acquire);
    if (!call) return false;
    if (slot.inside == call) return true;
    const int64_t cpu = now_on(cpu_clock_of(thread)), before = slot.cpu;
    const int64_t took = now_on(CLOCK_MONOTONIC) - call;
    bool inside = before >= 0 && cpu - before > kInsideAfter;
    if (!inside && took > kAsleep) {
        const char state = state_of_thread(thread);
        inside = state == 'S' || ((!state || cpu < 0) && took > kUnknown);
    }
    if (inside) slot.inside = call;
    return inside;
}

// In this order: once `thread` is 0, the slot may belong to another call.
void release(CallSlot &slot) {
    slot.began = 0;
    slot.thread = 0;
}

}  // namespace

WaitingCall::WaitingCall(bool (*captured)()) noexcept {
    const auto self = static_cast<pid_t>(syscall(SYS_gettid));
    for (CallSlot &slot : slots) {
        pid_t nobody = 0;
        if (!slot.thread.compare_exchange_strong(nobody, self)) continue;
        slot_ = &slot;
        break;
    }
    // A capture that is not counted yet will see the slot.
    may_ = slot_ && !captured();
    if (!may_) return;
    slot_->cpu = now_on(CLOCK_THREAD_CPUTIME_ID);
    slot_->began = now_on(CLOCK_MONOTONIC);
}

WaitingCall::~WaitingCall() {
    if (slot_) release(*slot_);
}

void before_capture() noexcept {
    int64_t until = 0;
    for (CallSlot &slot : slots) {
        const pid_t thread = slot.thread;
        while (thread && slot.thread == thread && !is_inside(slot, thread)) {
            const int64_t now = now_on(CLOCK_MONOTONIC);
            if (!until) until = now + kMostHeld;
            if (now > until) return;
            const timespec pause{0, kPause};
            syscall(SYS_nanosleep, &pause, nullptr);  // unlike nanosleep(), not a cancellation point
        }
    }
}

void yield_if_inside(pid_t thread) noexcept {
    for (CallSlot &slot : slots) {
        const int64_t call = slot.began;
        if (!thread || slot.thread != thread || slot.yielding == call || !is_inside(slot, thread)) continue;
        setpriority(PRIO_PROCESS, static_cast<id_t>(thread), 19);
        slot.yielding = call;
    }
}

const Lifetime waiting_call_lifetime{
    nullptr,
    nullptr,
    nullptr,
    [] {
        for (CallSlot &slot : slots) release(slot);
    },
};

}  // namespace gpubpf

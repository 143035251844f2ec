#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <time.h>
#include <unistd.h>

#include <hsakmt.h>

#include "config.h"
#include "embedded/thread_id.h"
#include "thunk/clock.h"
#include "thunk/forked.h"
#include "thunk/handlers.h"

namespace hipsim {
namespace {

// Not 0: for ROCr, a timestamp of 0 has not been written. The timeline of programs begins at 1,000,000,000 ns, after kInitialize.
constexpr uint64_t kStart = 999'000'000;

std::atomic<uint64_t> device_time{kStart}, latest{kStart};
std::atomic<uint64_t> floor_of_all{kStart};  // no host thread is earlier

struct HostThread {
    bool started = false;
    uint64_t now = 0;
    uint64_t worker_now = 0;  // while a function of the program runs that a signal started; else 0
    int untimed = 0;
};
thread_local HostThread host_thread;

struct Threads {
    std::mutex mutex;
    std::set<int> with_time;
};
Threads &threads() {
    static Threads *const instance = new Threads;
    return *instance;
}

// Returns whether the value was lower.
bool raise(std::atomic<uint64_t> &value, uint64_t to) {
    uint64_t before = value.load(std::memory_order_relaxed);
    while (before < to && !value.compare_exchange_weak(before, to, std::memory_order_acq_rel)) {
    }
    return before < to;
}

}  // namespace

uint64_t now() {
    if (config().virtual_clock) return std::max(device_time.load(), latest.load());
    timespec time{};
    clock_gettime(CLOCK_BOOTTIME, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
}

void advance(uint64_t time) { raise(device_time, time); }

uint64_t latest_host_time() { return latest; }

uint64_t host_time() {
    if (host_thread.worker_now != 0) return host_thread.worker_now;
    if (!host_thread.started) {
        host_thread.started = true;
        host_thread.now = latest;
        Threads &all = threads();
        std::lock_guard lock(all.mutex);
        all.with_time.insert(embedded::thread_id());
    }
    return host_thread.now = std::max(host_thread.now, floor_of_all.load());
}

void advance_host(uint64_t time) {
    if (untimed() || time <= host_time()) return;
    if (host_thread.worker_now != 0) {
        host_thread.worker_now = time;
        return;
    }
    host_thread.now = time;
    if (raise(latest, time)) wake_handlers();
}

void advance_all_hosts(uint64_t time) {
    raise(latest, time);
    raise(floor_of_all, time);
}

bool untimed() { return host_thread.untimed != 0; }

bool has_time(int thread) {
    Threads &all = threads();
    std::lock_guard lock(all.mutex);
    return all.with_time.contains(thread);
}

WorkerTime::WorkerTime(uint64_t time) { host_thread.worker_now = time; }
WorkerTime::~WorkerTime() { host_thread.worker_now = 0; }

}  // namespace hipsim

using namespace hipsim;

extern "C" {
#pragma GCC visibility push(default)

HSAKMT_STATUS hsaKmtGetClockCounters(HSAuint32 node, HsaClockCounters *counters) {
    HIPSIM_NOT_IN_CHILD;
    if (counters == nullptr) return HSAKMT_STATUS_INVALID_PARAMETER;
    if (node > static_cast<uint32_t>(config().devices)) return HSAKMT_STATUS_INVALID_NODE_UNIT;
    uint64_t time = now();
    counters->GPUClockCounter = time;
    counters->CPUClockCounter = time;
    counters->SystemClockCounter = time;
    counters->SystemClockFrequencyHz = 1'000'000'000;
    return HSAKMT_STATUS_SUCCESS;
}

// --- for tools ---

// Returns the calling thread's virtual time in ns; UINT64_MAX with the real clock. A thread that has no time yet gets the latest.
uint64_t hipsim_virtual_now() {
    if (!config().virtual_clock) return UINT64_MAX;
    return host_thread.started || host_thread.worker_now != 0 ? host_time() : latest_host_time();
}

// Between hipsim_untimed(1) and hipsim_untimed(0), what the calling thread does takes no virtual time. The calls nest.
void hipsim_untimed(int on) {
    host_thread.untimed += on != 0 ? 1 : -1;
    if (!host_thread.started || host_thread.untimed != (on != 0 ? 1 : 0)) return;
    if (on != 0) begin_work();
    else end_work();
}

#pragma GCC visibility pop
}

#include "driver/clock.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "config.h"

namespace cudasim::driver {
namespace {

// How long a query waits for the real work. Work that takes longer may itself wait for the thread that queries (a kernel
// that spins on a flag), so the query then returns "not ready".
constexpr std::chrono::milliseconds kMaxQueryWait{2000};

struct HostThread {
    bool started = false;
    uint64_t now = 0;
    int untimed = 0;
    uint64_t worker_now = 0;    // in a worker thread: the time of the callback that it runs
    uint64_t polled_at = 0;     // the thread's time when it queried `polled`
    std::vector<Fence> polled;  // not done at that time
};

thread_local HostThread host;

std::atomic<uint64_t> latest_host_time{kTimelineStart};

void raise_latest(uint64_t to) {
    uint64_t seen = latest_host_time.load(std::memory_order_relaxed);
    while (seen < to && !latest_host_time.compare_exchange_weak(seen, to)) {
    }
}

}  // namespace

bool virtual_clock() { return config().virtual_clock; }

bool untimed() { return host.untimed != 0; }

uint64_t host_time() {
    if (!virtual_clock()) return 0;
    if (!host.started) {
        host.started = true;
        host.now = latest_host_time;
    }
    return host.now;
}

void advance_host_time(uint64_t end) {
    if (!virtual_clock() || untimed() || end <= host_time()) return;
    host.now = end;
    raise_latest(end);
}

void wait_on_host(const Fence &fence) {
    fence.wait();
    advance_host_time(fence.end());
}

bool host_query(const Fence &fence) {
    if (!virtual_clock() || untimed()) return fence.done();
    if (fence.completion && !fence.completion->wait_for(kMaxQueryWait)) return false;
    uint64_t now = host_time();
    if (fence.end() <= latest_host_time) {
        // Another thread has reached this time, and may have synchronised with this one without CUDA (std::thread::join).
        advance_host_time(fence.end());
        return true;
    }
    constexpr size_t kMaxPolled = 1024;
    if (host.polled_at != now || host.polled.size() == kMaxPolled) host.polled.clear();
    host.polled_at = now;
    bool repeated = std::any_of(host.polled.begin(), host.polled.end(),
                                [&](const Fence &other) { return other.completion == fence.completion; });
    if (!repeated) {
        host.polled.push_back(fence);
        return false;
    }
    uint64_t next = fence.end();
    for (const Fence &other : host.polled) next = std::min(next, other.end());
    advance_host_time(next);
    host.polled_at = next;
    host.polled = {fence};
    return fence.end() <= next;
}

WorkerTime::WorkerTime(uint64_t now) { host.worker_now = now; }
WorkerTime::~WorkerTime() { host.worker_now = 0; }

}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

extern "C" {

// An interface for tools. It is not part of CUDA.

// Returns the calling thread's virtual time in ns; UINT64_MAX on the real clock. In a host function that a stream calls,
// this is the start of the call.
uint64_t cudasim_virtual_now(void) {
    if (!virtual_clock()) return UINT64_MAX;
    if (on_worker_thread()) return host.worker_now;
    return host.started ? host.now : latest_host_time.load();
}

// Returns the latest virtual time of all host threads. Valid on the virtual clock only.
uint64_t cudasim_virtual_last(void) { return latest_host_time; }

// Between cudasim_untimed(1) and cudasim_untimed(0), the calling thread's work and waits take no virtual time. They change
// neither its own time nor the start of other work in the same streams. The calls nest.
void cudasim_untimed(int on) { host.untimed += on != 0 ? 1 : -1; }
}

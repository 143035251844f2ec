#include "driver/clock.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "config.h"

namespace cudasim::driver {
namespace {

// How long a question whether work is done waits for it really. Work that takes longer waits for something that the
// asking thread has yet to do (a kernel that spins on a flag), or is very long: then the answer is "not yet".
constexpr std::chrono::milliseconds kPatience{2000};

struct HostThread {
    bool begun = false;
    uint64_t now = 0;
    int untimed = 0;
    uint64_t worker_now = 0;   // in a worker thread
    uint64_t asked_at = 0;     // when it asked for what is in `asked`
    std::vector<Fence> asked;  // not done at that time
};

thread_local HostThread host;

std::atomic<uint64_t> largest{kBeginning};

void raise(uint64_t to) {
    uint64_t seen = largest.load(std::memory_order_relaxed);
    while (seen < to && !largest.compare_exchange_weak(seen, to)) {
    }
}

}  // namespace

bool virtual_clock() { return config().virtual_clock; }

bool untimed() { return host.untimed != 0; }

uint64_t host_time() {
    if (!virtual_clock()) return 0;
    if (!host.begun) {
        host.begun = true;
        host.now = largest;
    }
    return host.now;
}

void host_reaches(uint64_t end) {
    if (!virtual_clock() || untimed() || end <= host_time()) return;
    host.now = end;
    raise(end);
}

void host_waits(const Fence &fence) {
    fence.wait();
    host_reaches(fence.end());
}

bool host_sees(const Fence &fence) {
    if (!virtual_clock() || untimed()) return fence.reached();
    if (fence.completion && !fence.completion->wait_for(kPatience)) return false;
    uint64_t now = host_time();
    if (fence.end() <= largest) {
        // Some thread has been there, and may have told this one, by means that are not CUDA's (joining a thread).
        host_reaches(fence.end());
        return true;
    }
    constexpr size_t kMost = 1024;
    if (host.asked_at != now || host.asked.size() == kMost) host.asked.clear();
    host.asked_at = now;
    bool again = std::any_of(host.asked.begin(), host.asked.end(),
                             [&](const Fence &other) { return other.completion == fence.completion; });
    if (!again) {
        host.asked.push_back(fence);
        return false;
    }
    uint64_t next = fence.end();
    for (const Fence &other : host.asked) next = std::min(next, other.end());
    host_reaches(next);
    host.asked_at = next;
    host.asked = {fence};
    return fence.end() <= next;
}

WorkerTime::WorkerTime(uint64_t now) { host.worker_now = now; }
WorkerTime::~WorkerTime() { host.worker_now = 0; }

}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

extern "C" {

// For tools, beside the public interface of the driver.

// The calling thread's time on the virtual timeline in ns, UINT64_MAX on the real clock. In a host function that a
// stream calls: when that starts.
uint64_t cudasim_virtual_now(void) {
    if (!virtual_clock()) return UINT64_MAX;
    if (on_worker_thread()) return host.worker_now;
    return host.begun ? host.now : largest.load();
}

// The largest time that any host thread of the process has come to; only on the virtual clock.
uint64_t cudasim_virtual_last(void) { return largest; }

// Between (1) and (0), which nest, what the calling thread submits and waits for takes no virtual time and changes
// nobody's: neither its own, nor when other work of the same streams starts.
void cudasim_untimed(int on) { host.untimed += on != 0 ? 1 : -1; }
}

#include "driver/current.h"

#include <mutex>
#include <set>
#include <unistd.h>

#include "agent.h"

namespace gpubpf {

// The contexts that the agent's threads are in, once per stay, and those that the program may be ending.
struct Stays {
    std::mutex lock;  // guards the members below; never held across a driver call
    std::multiset<CUcontext> inside, closed;
};

namespace {

constexpr uint32_t kMostMs = 2000;  // longest wait
constexpr useconds_t kStep = 1000;  // µs

ProcessState<Stays> all;

}  // namespace

Stay::Stay(CUcontext context, const std::atomic<bool> *dead) noexcept : context_(context) {
    quietly([&] {
        for (uint32_t ms = 0; ms < kMostMs; ++ms, usleep(kStep)) {
            Stays &stays = *all;
            std::lock_guard<std::mutex> hold(stays.lock);
            if (dead && *dead) return;
            // A thread that is inside may stay several times.
            if (stays.closed.count(context) && !stays.inside.count(context)) continue;
            stays.inside.insert(context);
            stays_ = &stays;
            return;
        }
    });
}

Stay::~Stay() {
    if (!stays_) return;
    std::lock_guard<std::mutex> hold(stays_->lock);
    stays_->inside.erase(stays_->inside.find(context_));
}

ContextClosed::ContextClosed(CUcontext context) noexcept : context_(context) {
    if (!context) return;
    quietly([&] {
        Stays &stays = *all;
        {
            std::lock_guard<std::mutex> hold(stays.lock);
            stays.closed.insert(context);
            stays_ = &stays;
        }
        left_within(context, kMostMs);
    });
}

ContextClosed::~ContextClosed() {
    if (!stays_) return;
    std::lock_guard<std::mutex> hold(stays_->lock);
    stays_->closed.erase(stays_->closed.find(context_));
}

bool left_within(CUcontext context, uint32_t wait_ms) {
    auto inside = [&] {
        std::lock_guard<std::mutex> hold(all->lock);
        return all->inside.count(context) != 0;
    };
    for (uint32_t ms = 0; ms < wait_ms && inside(); ++ms) usleep(kStep);
    return !inside();
}

const Lifetime current_lifetime = lifetime_of_process_state<all>();

}  // namespace gpubpf

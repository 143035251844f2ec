#include "driver/current.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <set>
#include <unistd.h>
#include <utility>

#include "attachment.h"

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

bool wait_for(CUstream stream, uint32_t wait_ms) {
    auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(wait_ms);
    for (useconds_t pause = 10;; pause = std::min<useconds_t>(pause * 2, 1000)) {
        CUresult r = driver.cuStreamQuery(stream);
        if (r == CUDA_SUCCESS) return true;
        if (r != CUDA_ERROR_NOT_READY || std::chrono::steady_clock::now() > until) return false;
        usleep(pause);
    }
}

bool lock_within(std::mutex &lock, uint32_t wait_ms) {
    auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(wait_ms);
    while (!lock.try_lock()) {
        if (std::chrono::steady_clock::now() > until) return false;
        usleep(500);
    }
    return true;
}

bool add_pool(Context &context, uint64_t size, uint64_t used) {
    CUdeviceptr base = 0;
    if (driver.cuMemAlloc_v2(&base, size) != CUDA_SUCCESS) return false;
    if (!agent.config.memory_is_zero &&
        (driver.cuMemsetD8Async(base, 0, size, context.stream) != CUDA_SUCCESS ||
         !wait_for(context.stream, 10000)))
        return false;
    auto pool = std::make_unique<Pool>();
    pool->base = base;
    pool->size = size;
    pool->used = used;
    std::lock_guard<std::mutex> hold(context.memory);
    context.pools.push_back(std::move(pool));
    context.generation.fetch_add(1);
    return true;
}

}  // namespace gpubpf

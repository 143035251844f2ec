#include "driver/queue.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace cudasim {
namespace {

thread_local bool worker = false;

// A worker that has had nothing to do for this long ends: programs make streams by the hundred.
constexpr std::chrono::seconds kIdle{2};

// Signals of the application are for its own threads; faults are for the thread that makes them.
void block_signals(sigset_t *before) {
    sigset_t all;
    sigfillset(&all);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) sigdelset(&all, fault);
    pthread_sigmask(SIG_BLOCK, &all, before);
}

}  // namespace

bool on_worker_thread() { return worker; }

void Completion::finish(uint64_t end) {
    {
        std::lock_guard lock(mutex_);
        end_ = end;
        done_.store(true, std::memory_order_release);
    }
    changed_.notify_all();
}

void Completion::wait() const {
    if (reached()) return;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return reached(); });
}

bool Completion::wait_for(std::chrono::milliseconds longest) const {
    if (reached()) return true;
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, longest, [this] { return reached(); });
}

Fence Queue::submit(std::vector<Fence> after, Work work, uint64_t not_before, bool timed) {
    auto completion = std::make_shared<Completion>();
    std::unique_lock lock(mutex_);
    items_.push_back({std::move(after), std::move(work), not_before, timed, completion});
    last_ = completion;
    if (!serving_) {
        serving_ = true;
        sigset_t before;
        block_signals(&before);
        std::thread([self = shared_from_this()] { self->serve(); }).detach();
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    } else {
        lock.unlock();  // or the worker wakes up to wait for it
        more_.notify_one();
    }
    return {std::move(completion)};
}

void Queue::serve() {
    worker = true;
    pthread_setname_np(pthread_self(), "cudasim-stream");
    std::unique_lock lock(mutex_);
    for (;;) {
        if (items_.empty() && !more_.wait_for(lock, kIdle, [this] { return !items_.empty(); })) {
            serving_ = false;
            return;
        }
        Item item = std::move(items_.front());
        items_.pop_front();
        lock.unlock();
        uint64_t start = std::max(end_, item.not_before);
        for (const Fence &fence : item.after) {
            fence.wait();
            start = std::max(start, fence.end());
        }
        uint64_t end = item.work(start);
        if (item.timed) end_ = end;
        std::shared_ptr<Completion> completion = std::move(item.completion);
        item = {};  // releases what the work held before others learn that it is done
        completion->finish(end_);
        lock.lock();
    }
}

Fence Queue::tail() {
    std::lock_guard lock(mutex_);
    return {last_};
}

}  // namespace cudasim

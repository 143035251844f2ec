#include "driver/queue.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace cudasim {
namespace {

thread_local bool is_worker = false;

// An idle worker exits after this time, because programs create hundreds of streams.
constexpr std::chrono::seconds kIdleTimeout{2};

// The application's own threads handle its signals. Signals of faults stay with the thread that causes them.
void block_signals(sigset_t *before) {
    sigset_t all;
    sigfillset(&all);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) sigdelset(&all, fault);
    pthread_sigmask(SIG_BLOCK, &all, before);
}

}  // namespace

bool on_worker_thread() { return is_worker; }

void Completion::finish(uint64_t end) {
    {
        std::lock_guard lock(mutex_);
        end_ = end;
        done_.store(true, std::memory_order_release);
    }
    changed_.notify_all();
}

void Completion::wait() const {
    if (done()) return;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done(); });
}

bool Completion::wait_for(std::chrono::milliseconds timeout) const {
    if (done()) return true;
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, timeout, [this] { return done(); });
}

Fence Queue::submit(std::vector<Fence> wait_for, Work work, uint64_t not_before, bool timed) {
    auto completion = std::make_shared<Completion>();
    std::unique_lock lock(mutex_);
    items_.push_back({std::move(wait_for), std::move(work), not_before, timed, completion});
    last_ = completion;
    if (!worker_running_) {
        worker_running_ = true;
        sigset_t before;
        block_signals(&before);
        std::thread([self = shared_from_this()] { self->run_worker(); }).detach();
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    } else {
        lock.unlock();  // so that the worker does not wake up only to wait for it
        work_available_.notify_one();
    }
    return {std::move(completion)};
}

void Queue::run_worker() {
    is_worker = true;
    pthread_setname_np(pthread_self(), "cudasim-stream");
    std::unique_lock lock(mutex_);
    for (;;) {
        if (items_.empty() &&
            !work_available_.wait_for(lock, kIdleTimeout, [this] { return !items_.empty(); })) {
            worker_running_ = false;
            return;
        }
        Item item = std::move(items_.front());
        items_.pop_front();
        if (waiting_for_room_ > 0) room_.notify_all();
        lock.unlock();
        uint64_t start = std::max(end_, item.not_before);
        for (const Fence &fence : item.wait_for) {
            fence.wait();
            start = std::max(start, fence.end());
        }
        uint64_t end = item.work(start);
        if (item.timed) end_ = end;
        std::shared_ptr<Completion> completion = std::move(item.completion);
        item = {};  // frees what the work holds before others see that it is done
        completion->finish(end_);
        lock.lock();
    }
}

void Queue::wait_for_room(size_t limit) {
    std::unique_lock lock(mutex_);
    if (items_.size() < limit) return;
    ++waiting_for_room_;
    room_.wait(lock, [&] { return items_.size() < limit; });
    --waiting_for_room_;
}

Fence Queue::tail() {
    std::lock_guard lock(mutex_);
    return {last_};
}

}  // namespace cudasim

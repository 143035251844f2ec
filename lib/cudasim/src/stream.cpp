#include "stream.h"

#include <pthread.h>
#include <signal.h>

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

bool Fence::reached() const { return !queue || queue->reached(sequence); }

void Fence::wait() const {
    if (queue) queue->wait(sequence);
}

Fence Queue::submit(std::vector<Fence> after, std::function<void()> work) {
    std::unique_lock lock(mutex_);
    items_.push_back({std::move(after), std::move(work)});
    Fence fence{shared_from_this(), ++submitted_};
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
    return fence;
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
        for (const Fence &fence : item.after) fence.wait();
        item.work();
        item = {};  // releases what the work held before others learn that it is done
        lock.lock();
        completed_++;
        done_.notify_all();
    }
}

Fence Queue::tail() {
    std::lock_guard lock(mutex_);
    return {shared_from_this(), submitted_};
}

bool Queue::idle() {
    std::lock_guard lock(mutex_);
    return completed_ == submitted_;
}

bool Queue::reached(uint64_t sequence) {
    std::lock_guard lock(mutex_);
    return completed_ >= sequence;
}

void Queue::wait(uint64_t sequence) {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return completed_ >= sequence; });
}

}  // namespace cudasim

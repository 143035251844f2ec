// Work queues. Each stream has one. A queue has its own worker thread, which runs its work in order. The work of
// different queues overlaps, and a fence lets work wait for work of another queue.
//
// On the virtual clock, all work has a start and an end in virtual nanoseconds. They depend only on what the work waits
// for, not on when the worker runs it, so they are the same in every run.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace cudasim {

// The completion of one piece of work, with its end on the virtual clock (0 on the real clock).
class Completion {
  public:
    void finish(uint64_t end);
    bool done() const { return done_.load(std::memory_order_acquire); }
    void wait() const;
    bool wait_for(std::chrono::milliseconds timeout) const;  // returns whether it is done
    uint64_t end() const { return end_; }                    // valid once it is done

  private:
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    std::atomic<bool> done_{false};
    uint64_t end_ = 0;
};

// A point in a queue or in a graph that work can wait for. An empty fence is done.
struct Fence {
    std::shared_ptr<Completion> completion;

    bool done() const { return !completion || completion->done(); }
    void wait() const {
        if (completion) completion->wait();
    }
    uint64_t end() const { return completion ? completion->end() : 0; }
};

class Queue : public std::enable_shared_from_this<Queue> {
  public:
    // Takes the virtual time at which the work starts, and returns the time at which it ends.
    using Work = std::function<uint64_t(uint64_t start)>;

    // Appends work and returns its fence. The work starts after all earlier work of this queue, after the fences `wait_for`,
    // and not before the virtual time `not_before`. Work that is not `timed` does not affect the virtual times of later
    // work. Starts the worker thread if it does not run.
    Fence submit(std::vector<Fence> wait_for, Work work, uint64_t not_before = 0, bool timed = true);

    // Waits until fewer than `limit` pieces of work wait for their turn.
    void wait_for_room(size_t limit);

    // Returns the fence of the work that was submitted last.
    Fence tail();

  private:
    struct Item {
        std::vector<Fence> wait_for;
        Work work;
        uint64_t not_before;
        bool timed;
        std::shared_ptr<Completion> completion;
    };
    void run_worker();

    std::mutex mutex_;
    std::condition_variable work_available_, room_;
    std::deque<Item> items_;
    std::shared_ptr<Completion> last_;
    bool worker_running_ = false;
    int waiting_for_room_ = 0;
    uint64_t end_ = 0;  // virtual end of the last timed work; used by the worker only
};

// Returns whether the calling thread is a worker, which it also is in callbacks of the application.
bool on_worker_thread();

}  // namespace cudasim

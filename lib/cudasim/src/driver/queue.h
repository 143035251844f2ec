// A stream: a queue with its own worker thread. Work of one stream runs in order, work of different streams overlaps,
// and a fence lets work wait for a point in another stream.
//
// On the virtual clock every piece of work has a start and an end in virtual nanoseconds. They follow from what the work
// waits for alone, never from when the worker came to it, so they are the same in every run.
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

// That one piece of work is done, and when on the virtual clock (0 on the real one).
class Completion {
  public:
    void finish(uint64_t end);
    bool reached() const { return done_.load(std::memory_order_acquire); }
    void wait() const;
    bool wait_for(std::chrono::milliseconds longest) const;  // false: not done even then
    uint64_t end() const { return end_; }                    // once it is reached

  private:
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    std::atomic<bool> done_{false};
    uint64_t end_ = 0;
};

// A point in a stream or in a graph; one that was never given anything to wait for is reached.
struct Fence {
    std::shared_ptr<Completion> completion;

    bool reached() const { return !completion || completion->reached(); }
    void wait() const {
        if (completion) completion->wait();
    }
    uint64_t end() const { return completion ? completion->end() : 0; }
};

class Queue : public std::enable_shared_from_this<Queue> {
  public:
    // Gets the virtual time at which it starts, and returns that at which it ends.
    using Work = std::function<uint64_t(uint64_t start)>;

    // Appends `work`, which starts after all earlier work of this queue, after `after`, and not before the virtual time
    // `not_before`. Starts the worker thread if none runs. The fence is that of this piece of work. Work that is not
    // `timed` leaves no trace on the virtual clock: what comes after it starts as if it had not been there.
    Fence submit(std::vector<Fence> after, Work work, uint64_t not_before = 0, bool timed = true);

    // A fence behind everything submitted so far.
    Fence tail();

  private:
    struct Item {
        std::vector<Fence> after;
        Work work;
        uint64_t not_before;
        bool timed;
        std::shared_ptr<Completion> completion;
    };
    void serve();

    std::mutex mutex_;
    std::condition_variable more_;
    std::deque<Item> items_;
    std::shared_ptr<Completion> last_;
    bool serving_ = false;
    uint64_t end_ = 0;  // virtual time of the last work that ran; the worker's
};

// True in a thread that runs work of a queue, so also in callbacks of the application.
bool on_worker_thread();

}  // namespace cudasim

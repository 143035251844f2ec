// A stream: a queue with its own worker thread. Work of one stream runs in order, work of different streams overlaps,
// and a fence lets work wait for a point in another stream.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace cudasim {

class Queue;

// The moment when the first `sequence` pieces of work of `queue` are done.
struct Fence {
    std::shared_ptr<Queue> queue;
    uint64_t sequence = 0;

    bool reached() const;
    void wait() const;
};

class Queue : public std::enable_shared_from_this<Queue> {
  public:
    // Appends `work`, which starts after all earlier work of this queue and after `after`. Starts the worker thread
    // if none runs. The fence is that of this piece of work.
    Fence submit(std::vector<Fence> after, std::function<void()> work);

    // A fence behind everything submitted so far.
    Fence tail();
    bool idle();
    bool reached(uint64_t sequence);
    void wait(uint64_t sequence);

  private:
    struct Item {
        std::vector<Fence> after;
        std::function<void()> work;
    };
    void serve();

    std::mutex mutex_;
    std::condition_variable more_, done_;
    std::deque<Item> items_;
    uint64_t submitted_ = 0, completed_ = 0;
    bool serving_ = false;
};

// True in a thread that runs work of a queue, so also in callbacks of the application.
bool on_worker_thread();

}  // namespace cudasim

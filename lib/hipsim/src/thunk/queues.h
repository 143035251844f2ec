// User-mode queues: the program writes packets into memory and stores to a doorbell, without any call.
//
// One thread looks at all doorbells, and wakes the thread of each queue that has packets. aql.cpp and sdma.cpp process
// the packets.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include <hsakmt.h>

namespace hipsim {

struct Queue {
    uint64_t id = 0;
    uint32_t node = 0;
    bool aql = false;           // else SDMA
    uint64_t ring = 0;          // packets
    uint64_t ring_bytes = 0;    // a power of two
    uint64_t *read = nullptr;   // number of packets (AQL) or bytes (SDMA) that the device has processed
    uint64_t *write = nullptr;  // what the program has written
    uint64_t *doorbell = nullptr;
    uint64_t own_pointers[2] = {0, 0};  // SDMA: *read and *write
    std::vector<uint32_t> cu_mask;

    std::mutex mutex;
    std::condition_variable wake;
    uint64_t rung = ~uint64_t{0};        // the doorbell's value when the look-out saw it last
    bool pending = false;                // the doorbell has been rung since the thread last looked
    std::atomic<bool> suspended{false};  // hsaKmtUpdateQueue with 0 %
    std::atomic<bool> failed{false};     // after an error; the program can only destroy the queue
    std::atomic<bool> destroyed{false};
    bool working = false;              // the thread processes packets
    std::atomic<bool> waiting{false};  // meanwhile, it waits for a change of memory
    // Virtual clock:
    uint64_t time = 0;   // when the last packet ended
    uint64_t ready = 0;  // SDMA: the end of what the current copy depends on
    uint64_t spent = 0;  // SDMA: how long the packets of the current copy took
    std::thread thread;
};

// Checks the doorbells now, as the look-out does every few microseconds: the caller is about to wait.
void wake_queues();

// Returns whether no queue has work that it can do now.
bool queues_wait();

// Wakes the queue with this ring, if there is one: more of its packets may be processed.
void wake_queue(uint64_t ring);

// Process all packets that the program has submitted. Return when there are none, or the queue has failed.
void process_aql(Queue &queue);
void process_sdma(Queue &queue);

// Waits until `condition()` holds. Returns false if the queue is destroyed first.
template <typename Condition>
bool wait_for(Queue &queue, Condition condition);

// One step of waiting for a change without notification, such as the program's store to memory.
void pause(uint32_t step);

template <typename Condition>
bool wait_for(Queue &queue, Condition condition) {
    for (uint32_t step = 0; !condition(); step++) {
        if (queue.destroyed.load(std::memory_order_relaxed)) return false;
        queue.waiting = true;
        pause(step);
    }
    queue.waiting = false;
    return true;
}

}  // namespace hipsim

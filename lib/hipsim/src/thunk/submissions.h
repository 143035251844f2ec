// Virtual clock: when host threads have submitted the work that queues take.
//
// An AQL packet carries the time in the field `reserved2`. HIP uses this field only if a profiler is attached to it; then the
// packet carries no time. Other work is known by its completion signal.
#pragma once

#include <cstdint>

#include <hsa.h>

namespace hipsim {

// What a packet or signal has that no host thread has submitted through ROCr's functions, as ROCr's own work. It takes time only
// from other work in its queue.
constexpr uint64_t kUnknownTime = 0;

// A kernel of HIP's own, with which it sets or copies memory. On the virtual clock it takes as long as a fill or copy of SDMA.
enum class OwnKernel { no, fill, copy, other };
OwnKernel own_kernel(uint64_t kernel_object);

// The program creates or destroys a queue into which it writes packets itself.
void note_queue(const hsa_queue_t *queue);
void forget_queue(const hsa_queue_t *queue);

// ROCr has been shut down: its queues and signals are gone.
void forget_submissions();

// The calling thread is about to store a value to a signal. Returns whether the signal is a queue's doorbell. Then the packets up
// to that value carry the thread's time. A kernel's launch takes the thread some time first.
bool submit_packets(hsa_signal_t doorbell, uint64_t value);

// Returns how many packets of the queue are complete at the calling thread's time, as far as their signals show. HIP waits for old
// signals, or makes new ones, according to this number.
uint64_t packets_complete(const hsa_queue_t *queue);

// The program destroys a signal.
void forget_signal(uint64_t signal);

// Whether the device may take the packet at `index` of the queue with this ring: it carries the time of its submission, or never
// will.
bool is_submitted(uint64_t ring, uint64_t index);

// Returns when the packet was submitted.
uint64_t submission_of(const void *packet);
// The packet has been processed.
void clear_submission(void *packet);

// The calling thread submits work that will decrement this signal.
void submit_work(uint64_t signal, uint64_t time);
uint64_t submission_of_work(uint64_t signal);
void forget_work(uint64_t signal);

}  // namespace hipsim

// Functions that the program asked ROCr to call when a signal changes (hsa_amd_signal_async_handler), on the virtual clock.
//
// HIP notes there which of its commands are complete, and does not look at their signals any more. So such a function must not run
// before a host thread has reached the virtual time of the signal, however fast the device is. One thread runs them, in the order
// of their times.
//
// The program may sleep until such a function has run: then no host thread would ever reach that time. So if all of them sleep and
// the device has nothing to do, time passes to the earliest function.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

namespace hipsim {

// What a host thread does: how often it has called the runtime, doorbells aside.
struct HostCalls {
    int thread;
    std::atomic<uint64_t> count{0};
};
// Returns those of the calling thread.
const std::shared_ptr<HostCalls> &host_calls();

// A host thread asks ROCr to call a function. It submits the work afterwards, and then HIP may still note what the function reads.
// So the function must not run until the thread calls the runtime again or sleeps.
struct Request {
    std::shared_ptr<const HostCalls> by;
    uint64_t count;
};
Request request();

// Runs a function once a host thread has reached `time`, or all of them sleep.
void run_at(uint64_t time, const Request &request, std::function<void()> function);

// ROCr is being shut down, and calls no functions any more.
void forget_functions();

// A host thread's time has changed.
void wake_handlers();

// Notes that the calling host thread calls the runtime. Without calls, it may be waiting for such a function in a loop of its own.
void note_activity();

// Notes that the calling thread is one of ROCr's, which calls functions when signals change.
void note_thread_of_rocr();

// Notes that the calling host thread begins or ends work. In it, the thread counts as running even if it waits: a thread of the
// device may have the lock that it waits for, or a tool works in it.
void begin_work();
void end_work();

class Works {
  public:
    Works() { begin_work(); }
    ~Works() { end_work(); }
    Works(const Works &) = delete;
    Works &operator=(const Works &) = delete;
};

// While it exists, the calling thread waits for the device, until `over()` holds; another thread asks. Threads of the device wait
// always: queues_wait() knows what they do.
class Waits {
  public:
    explicit Waits(std::function<bool()> over);
    ~Waits();
    Waits(const Waits &) = delete;
    Waits &operator=(const Waits &) = delete;
};

}  // namespace hipsim

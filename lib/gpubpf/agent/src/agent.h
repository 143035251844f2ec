// The agent as a whole: its connection to the tool, and whether it may act.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <pthread.h>
#include <string>

#include "lifetime.h"
#include "state.h"
#include "wire.h"

namespace gpubpf {

// A question to the tool about a module's image.
struct Question {
    std::mutex lock;
    std::condition_variable changed;
    bool done = false;       // answered, or the tool is gone
    bool abandoned = false;  // nobody waits: whoever gets the answer applies it
    std::shared_ptr<const Answer> answer;
    Module *module = nullptr;
    Context *context = nullptr;
};

struct Agent {
    // The tool is there and launches are swapped. Cleared by a hang-up, a stop, or in a forked child: then the attachment ends.
    std::atomic<bool> live{false};
    std::atomic<bool> connected{false};
    std::atomic<uint32_t> heard{0};            // messages of the tool
    std::atomic<uint32_t> silent{UINT32_MAX};  // `heard` when it was last given up waiting for
    // The program ran before the agent came: it has modules, contexts, streams and captures that no hook saw made.
    bool late = false;
    NeverDestroyed<Config> config_storage;
    Config &config = config_storage.value;
    Control *control = nullptr;
    int control_fd = -1;

    void send(Message type, const Writer &writer, int fd = -1);
    // `about`: what the message says after number and GPU. Unless somebody waits, the answer is applied when that does no harm.
    std::shared_ptr<Question> ask(Message type, Module *module, Context *context, const Writer &about,
                                  int file, bool waits);
    // The process ends: has the worker thread wait (bounded) for the GPU and send everything; returns when done or after wait_ms + 2 s.
    void finish(uint32_t wait_ms);
    void want_memory();  // the worker thread enlarges a pool
    void want_found();   // it has work in found.h
    // So many more launches were instrumented. As often as the tool wants it (Config::pump), the worker thread reads the maps.
    void launched(uint64_t launches) {
        const uint64_t pump = config.pump;
        if (!pump) return;
        const uint64_t before = pumped.fetch_add(launches, std::memory_order_relaxed);
        if (before / pump != (before + launches) / pump) want_reading();
    }
    std::atomic<uint64_t> pumped{0};
    void want_reading();
    // Reads the maps when the process exits. Called once cuInit is over: what is registered late runs before the driver's own end.
    void watch_exit();
};

extern Agent agent;

// The agent's part of a hooked call. The application knows nothing of it: no exception gets out (memory may be short), and it is
// not a place where the thread can be cancelled.
template <typename Work>
void quietly(const Work &work) noexcept {
    int before = PTHREAD_CANCEL_ENABLE;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    try {
        work();
    } catch (...) {
    }
    pthread_setcancelstate(before, nullptr);
}

bool is_ours(void (*handler)(int));  // whether a signal's handler is the agent's

// sidecar.cpp
const void *image_at(
    const void *image,
    uint64_t &size);  // what is behind a wrapper; understands fatbins, ELF, PTX. Null: nothing
// A copy in a memory file, or -1; of what was linked (of `linked` inputs) the PTX, if there is one.
int image_of(const void *image, uint64_t &size, uint32_t &linked);
int image_of_file(const char *path, uint64_t &size, uint32_t &linked);
void loaded(Module *module, int image, uint64_t size, uint32_t linked);  // after the application's own load
// Sidecars of libraries for a new context. `waits`: for the tool, if need be.
void context_ready(Context *context, bool waits = true);
void obtain(Module *module, Context *context,
            bool waits = true);  // makes the copies there, with the tool's answer
void retry_waiting();            // after a capture
void apply(Module *module, Context *context, const std::shared_ptr<const Answer> &answer);
std::shared_ptr<const Answer> parse_answer(Reader &reader, int image);

// drain.cpp
bool drain(uint32_t sequence, uint32_t wait_ms,
           bool rings);                // every context; `rings`: only those in GPU memory
void read_maps();                      // every context, unasked
void calibrate_all();                  // the clocks of every context's GPU
void close_context(Context *context);  // final drain before it goes away
void read_context(Context *context);   // a drain before it may go away
void lose_context(Context *context);   // it is gone: nothing of the agent's touches it any more
void enlarge_pools();                  // where one is wanted, as soon as that makes nobody wait:
void enlarge_pool(Context &context);

}  // namespace gpubpf

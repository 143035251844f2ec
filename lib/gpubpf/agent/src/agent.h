// The agent as a whole: its connection to the tool, and whether it may act.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <pthread.h>
#include <string>

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
  // The tool is there and launches are swapped. Cleared for good by a hang-up, a stop, or in a forked child.
  std::atomic<bool> live{false};
  std::atomic<bool> connected{false};
  // There are records to keep, tool or none: the worker thread may be in a context that goes away. False in a forked child.
  std::atomic<bool> present{false};
  std::atomic<uint32_t> heard{0};          // messages of the tool
  std::atomic<uint32_t> silent{UINT32_MAX};  // `heard` when it was last given up waiting for
  Config config;
  Control *control = nullptr;
  int control_fd = -1;

  void send(Message type, const Writer &writer, int fd = -1);
  std::shared_ptr<Question> ask(Module *module, Context *context, int image, uint64_t size);
  // The process ends: has the worker thread wait (bounded) for the GPU and send everything; returns when done or after wait_ms + 2 s.
  void finish(uint32_t wait_ms);
  void want_memory();  // the worker thread enlarges a pool
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
int image_of(const void *image, uint64_t &size);  // a copy in a memory file, or -1; understands wrappers, fatbins, ELF, PTX
int image_of_file(const char *path, uint64_t &size);
void loaded(Module *module, int image, uint64_t size);  // after the application's own load
void context_ready(Context *context);                   // sidecars of libraries for a new context
void retry_waiting();                                   // after a capture
void apply(Module *module, Context *context, const std::shared_ptr<const Answer> &answer);
std::shared_ptr<const Answer> parse_answer(Reader &reader, int image);

// drain.cpp
bool drain(uint32_t sequence, uint32_t wait_ms, bool rings);  // every context; `rings`: only those in GPU memory
void read_maps();      // every context, unasked
void calibrate_all();  // the clocks of every context's GPU
void close_context(Context *context);             // final drain before it goes away
void enlarge_pools();

}  // namespace gpubpf

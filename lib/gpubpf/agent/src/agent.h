// The agent as a whole: its connection to the tool, and whether it may act.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
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
  Config config;
  Control *control = nullptr;
  int control_fd = -1;

  void send(Message type, const Writer &writer, int fd = -1);
  std::shared_ptr<Question> ask(Module *module, Context *context, int image, uint64_t size);
  // Has the worker thread wait (bounded) for the GPU and send everything; returns when done or after wait_ms + 2 s.
  void finish(uint32_t wait_ms);
  void want_memory();  // the worker thread enlarges a pool
  // Reads the maps when the process exits. Called once cuInit is over: what is registered late runs before the driver's own end.
  void watch_exit();
};

extern Agent agent;

// sidecar.cpp
int image_of(const void *image, uint64_t &size);  // a copy in a memory file, or -1; understands wrappers, fatbins, ELF, PTX
int image_of_file(const char *path, uint64_t &size);
void loaded(Module *module, int image, uint64_t size);  // after the application's own load
void context_ready(Context *context);                   // sidecars of libraries for a new context
void retry_waiting();                                   // after a capture
void apply(Module *module, Context *context, const std::shared_ptr<const Answer> &answer);
std::shared_ptr<const Answer> parse_answer(Reader &reader, int image);

// drain.cpp
bool drain(uint32_t sequence, uint32_t wait_ms);  // every context
void close_context(Context *context);             // final drain before it goes away
void enlarge_pools();

}  // namespace gpubpf

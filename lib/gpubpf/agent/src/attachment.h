// The attachment, as every file of the agent for CUDA sees it: the connection to the tool, and what is true until it ends. agent.cpp
// starts and ends it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "lifetime.h"
#include "log/log.h"
#include "messages.h"
#include "this_agent.h"
#include "wire.h"

namespace gpubpf {

struct Context;
struct Module;

// A question to the tool about a module's image.
struct Question {
    std::mutex lock;
    std::condition_variable changed;
    bool done = false;       // answered, or the tool has exited
    bool abandoned = false;  // a thread does not wait: the thread that gets the answer uses it
    std::shared_ptr<const Answer> answer;
    Message type{};
    Module *module = nullptr;
    Context *context = nullptr;
};

// OnTheWay: the program may launch more. Last: the process is about to end.
enum class Reading { OnTheWay, Last };
constexpr uint32_t kAtExit = 2000;  // ms that running kernels may take to finish at process exit

struct Agent {
    // The tool is connected, and launches are replaced by instrumented copies. A hang-up, a stop request and a
    // fork (in the child) clear it. Then the agent detaches.
    std::atomic<bool> live{false};
    std::atomic<bool> connected{false};
    // The thread that runs the exit handlers, once they have reached the agent's; 0: the process is not exiting.
    std::atomic<uint32_t> exit_thread{0};
    // The agent's exit handler has read the maps, and that thread has launched nothing since. The agent's threads leave the driver
    // alone, because it may be shut down.
    std::atomic<bool> resting{false};
    std::atomic<bool> ending{false};  // the maps are read for the last time
    // Whether the maps will be read after a launch of this thread. If not, it runs the original (Reason::PROCESS_ENDING).
    bool is_read_later() const {
        const uint32_t exiting = exit_thread.load(std::memory_order_relaxed);
        return !ending.load(std::memory_order_relaxed) && (!exiting || exiting == thread_id());
    }
    std::atomic<uint32_t> heard{0};            // messages received from the tool
    std::atomic<uint32_t> silent{UINT32_MAX};  // the value of `heard` at the last wait that was given up
    // The program was running before the agent was attached. It has modules, contexts, streams and captures
    // whose creation no hook saw.
    bool late = false;
    NeverDestroyed<Config> config_storage;
    Config &config = config_storage.value;
    Control *control = nullptr;
    int control_fd = -1;

    // Asks the tool. `message`: without its request number. If no thread waits (`waits` is false), the answer is used as soon as
    // that blocks no thread. `question`: a new one.
    template <class T>
    std::shared_ptr<Question> ask(T message, Module *module, Context *context, int file, bool waits,
                                  std::shared_ptr<Question> question = std::make_shared<Question>()) {
        question->abandoned = !waits;
        question->type = T::kMessage;
        question->module = module;
        question->context = context;
        message.request = begin_question(question);
        if (message.request) tell_tool(message, file);
        // If the tool exited or the program closed the socket, nothing would wake the waiters.
        if (!message.request || !connected) give_up(*question);
        return question;
    }
    uint32_t begin_question(const std::shared_ptr<Question> &question);  // returns 0 if it cannot be sent
    void give_up(Question &question);  // other threads may wait for the answer
    // Makes the worker thread wait for the GPU (up to wait_ms) and send all measurements. Returns when that is
    // done, or after wait_ms + 3 s.
    void finish(uint32_t wait_ms, Reading reading);
    void wake_for_pools();          // makes the worker thread enlarge a pool
    void wake_to_report();          // makes the worker thread call report_preexisting()
    void wake_to_record_kernels();  // with CUPTI
    void wake_to_install();         // makes the service thread check when installs are due
    // Counts `launches` more instrumented launches. The worker thread reads the maps once per Config::pump
    // launches.
    void launched(uint64_t launches) {
        if (__builtin_expect(resting.load(std::memory_order_relaxed), 0)) resume();
        const uint64_t pump = config.pump;
        if (!pump) return;
        const uint64_t before = pumped.fetch_add(launches, std::memory_order_relaxed);
        if (before / pump != (before + launches) / pump) wake_for_reading();
    }
    std::atomic<uint64_t> pumped{0};
    // Graph launches with copies in bodies of conditional nodes, and the executions there that drains have counted.
    std::atomic<uint64_t> bodies{0}, executions{0};
    void wake_for_reading();
    // Registers handlers that read the maps when the process exits. Call it after cuInit: handlers registered
    // later run earlier, so the agent's run before the driver's.
    void watch_exit();
    // An exit handler or destructor has launched, so the driver works. Registers the agent's handler again: it
    // runs next, before what may shut the driver down.
    void resume();
};

extern Agent agent;

bool is_agents_thread();  // whether the calling thread is one of the agent's own

}  // namespace gpubpf

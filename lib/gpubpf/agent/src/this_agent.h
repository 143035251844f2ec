// The interface between shared files and the agent that they are in: the CUDA agent (agent.cpp, log/clock.cpp), or the agent for
// AMD's runtime (../hsa/agent.cpp, ../hsa/clock.cpp).
#pragma once

#include <cstdint>
#include <pthread.h>

#include "definitions.h"
#include "wire.h"

namespace gpubpf {

// Sends a message to the tool, with a file unless `file` is -1.
void tell_tool(Message type, const Writer &writer, int file);
template <class T>
void tell_tool(const T &message, int file = -1) {
    tell_tool(T::kMessage, Writer(message), file);
}
Control &control_block();
// Returns a function of the library that the program calls for its GPU. That library's frames are not the program's.
const void *driver_code();
bool is_connected();             // to a tool
void read_before_signal_ends();  // in a signal handler: sends all measurements, because the signal ends the process

// Returns CLOCK_MONOTONIC in ns, or the calling thread's time on the virtual clock. Any thread may call it;
// it takes no locks.
uint64_t now_ns();
bool virtual_clock();

// Runs the agent's work in a call of the program, which must not notice it. So no exception leaves it (memory
// may be short), and the thread cannot be cancelled in it.
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

}  // namespace gpubpf

// Threads of the device.
#pragma once

#include <csignal>
#include <sys/prctl.h>
#include <thread>

#include "thunk/handlers.h"

namespace hipsim {

// Starts a thread of the device. Threads of the device receive no signals: the program's handlers expect its own threads.
template <typename Function>
std::thread start_thread(const char *name, Function function) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread thread([name, function] {
        prctl(PR_SET_NAME, name);
        prctl(PR_SET_TIMERSLACK, 1000);  // 1 us, not 50
        Waits device([] { return false; });
        function();
    });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
}

}  // namespace hipsim

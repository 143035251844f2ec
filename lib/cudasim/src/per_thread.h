#pragma once

#include <unistd.h>

#include <utility>

namespace cudasim {

// The calling thread's T. exit() destroys the thread_local objects of its caller, and then runs what may yet call the driver (atexit, static
// objects): what is the first thread's stays; another thread gets a new one.
template <typename T>
T &of_this_thread() {
    thread_local T *mine = nullptr;
    struct End {
        ~End() {
            if (gettid() != getpid()) delete std::exchange(mine, nullptr);
        }
    };
    thread_local End end;
    static_cast<void>(&end);  // made here
    if (mine == nullptr) mine = new T;
    return *mine;
}

}  // namespace cudasim

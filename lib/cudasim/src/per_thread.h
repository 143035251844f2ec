// Objects of a thread that code in exit handlers may still use.
#pragma once

#include <unistd.h>

#include <utility>

#include "embedded/thread_id.h"

namespace cudasim {

// Returns the calling thread's T. exit() destroys the thread_local objects of its caller before it runs atexit functions and
// the destructors of static objects, which may still call the driver. So the main thread's T is never destroyed, and
// another thread that calls exit() gets a new one.
template <typename T>
T &per_thread() {
    thread_local T *object = nullptr;
    struct AtThreadExit {
        ~AtThreadExit() {
            if (embedded::thread_id() != getpid()) delete std::exchange(object, nullptr);
        }
    };
    thread_local AtThreadExit at_thread_exit;
    static_cast<void>(&at_thread_exit);  // constructs it
    if (object == nullptr) object = new T;
    return *object;
}

}  // namespace cudasim

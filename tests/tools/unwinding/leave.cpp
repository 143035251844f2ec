// leave LIBRARY [WAYS…]: calls each function of a library (library.inc), and leaves each in each way, as a program may:
//   throw    an exception that is caught around the call
//   jump     longjmp
//   cancel   pthread_cancel of a thread that holds a lock (std::lock_guard)
//   exit     pthread_exit in such a thread
//   return   the functions return their number
// Prints how many calls did what they do without a tool.
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <mutex>
#include <pthread.h>
#include <setjmp.h>
#include <stdexcept>

using Function = long (*)(void *, void *, void *, void *, void *, void *);

static Function *functions;
static thread_local int armed = -1;  // the function that is to be left: it may call others, or a tool may
static long zeros[512];              // what a first argument may point to
static int count;
static jmp_buf place;
static std::timed_mutex mutex;
static const char *way;

static void act(int which) {
    if (which != armed) return;
    armed = -1;
    if (!strcmp(way, "throw")) throw std::runtime_error(way);
    if (!strcmp(way, "jump")) longjmp(place, 1);
    if (!strcmp(way, "exit")) pthread_exit(nullptr);
    if (!strcmp(way, "cancel")) {
        pthread_cancel(pthread_self());
        pthread_testcancel();
    }
}

static long call(int i) {
    armed = i;
    return functions[i](zeros, nullptr, nullptr, nullptr, nullptr, nullptr);
}

static void *with_lock(void *which) {
    std::lock_guard<std::timed_mutex> held(mutex);
    call(static_cast<int>(reinterpret_cast<long>(which)));
    return which;
}

static bool as_wanted(int i) {
    if (!strcmp(way, "return")) return call(i) == i;
    if (!strcmp(way, "throw")) {
        try {
            call(i);
        } catch (const std::exception &error) {
            return !strcmp(error.what(), way);
        }
        return false;
    }
    if (!strcmp(way, "jump")) {
        if (setjmp(place)) return true;
        call(i);
        return false;
    }
    pthread_t thread;
    void *result = nullptr;
    pthread_create(&thread, nullptr, with_lock, reinterpret_cast<void *>(static_cast<long>(i)));
    pthread_join(thread, &result);
    if (!mutex.try_lock_for(std::chrono::seconds(5))) return false;
    mutex.unlock();
    return !strcmp(way, "exit") ? !result : result == PTHREAD_CANCELED;
}

int main(int argc, char **argv) {
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!library) return puts(dlerror()), 2;
    functions = static_cast<Function *>(dlsym(library, "functions"));
    count = *static_cast<int *>(dlsym(library, "count"));
    *static_cast<void (**)(int)>(dlsym(library, "act")) = act;
    if (void *start = dlsym(library, "cuInit")) reinterpret_cast<int (*)(int)>(start)(0);
    for (int a = 2; a < argc; a++) {
        int good = 0;
        way = argv[a];
        for (int i = 0; i < count; i++) good += as_wanted(i);
        printf("%s: %d of %d\n", way, good, count);
        fflush(stdout);
    }
}

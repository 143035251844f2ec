// Captures begin while another thread, which is rarely scheduled, is about to wait in the driver. Prints how many
// captures began between that thread's check and its entry, how many of these had a reason (the capture was held
// for as long as it may be, or the thread was charged the CPU time of one that is inside), and how many calls were
// refused.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "driver/waiting_call.h"

namespace {

std::atomic<int> captures{0};
std::atomic<bool> checked{false}, inside{false}, ended{false}, over{false};

int64_t now_on(clockid_t clock) {
    timespec t{};
    clock_gettime(clock, &t);
    return t.tv_sec * int64_t{1'000'000'000} + t.tv_nsec;
}

bool captured() {
    const bool one = captures != 0;
    checked = true;
    return one;
}

// A driver that sleeps until the GPU is idle, or one that waits in a busy loop.
void wait_for_context(bool sleeps) {
    for (int i = 0; i < 5; ++i) sched_yield();  // the thread is ready, but others are scheduled
    inside = true;
    while (!ended)
        if (sleeps) usleep(1000);
}

}  // namespace

int main(int, char **argv) {
    const bool sleeps = !strcmp(argv[1], "sleeps");
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof one, &one);
    std::vector<std::thread> busy;
    for (int i = 0; i < 3; ++i)
        busy.emplace_back([] {
            while (!over) {
            }
        });
    int early = 0, excused = 0, refused = 0;
    for (int round = 0; round < 40; ++round) {
        captures = 0;
        checked = inside = ended = false;
        std::atomic<bool> may{true};
        std::thread waits([&] {
            gpubpf::WaitingCall call(captured);
            may = static_cast<bool>(call);
            if (may) wait_for_context(sleeps);
        });
        if (round % 4)
            while (!checked) sched_yield();
        captures = 1;
        clockid_t cpu;
        pthread_getcpuclockid(waits.native_handle(), &cpu);
        const int64_t began = now_on(CLOCK_MONOTONIC), before = now_on(cpu);
        gpubpf::before_capture();
        if (may && checked && !inside) {
            const bool reason = now_on(CLOCK_MONOTONIC) - began > gpubpf::kMostHeld;
            // Half: `before` may be read after the thread has begun to use its time.
            ++(reason || now_on(cpu) - before > gpubpf::kInsideAfter / 2 ? excused : early);
        }
        ended = true;
        waits.join();
        refused += !may;
    }
    // The child has none of the threads.
    captures = 0;
    checked = ended = false;
    std::thread waits([&] {
        gpubpf::WaitingCall call(captured);
        while (!ended) usleep(1000);
    });
    while (!checked) sched_yield();
    const pid_t child = fork();
    if (!child) {
        gpubpf::waiting_call_lifetime.in_forked_child();
        gpubpf::before_capture();
        _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    ended = over = true;
    waits.join();
    for (std::thread &b : busy) b.join();
    printf("early %d excused %d refused %d child %d\n", early, excused, refused, status);
    return 0;
}

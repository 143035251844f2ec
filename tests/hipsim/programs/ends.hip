// ends WAY [wait]: launches six times and ends in this way, also from a thread. "child": a child process ends by _exit first, which must
// not end the measurement of its parent. "older": three more launches at the end, in an exit handler and a destructor that are older
// than the first call of HIP. A number: this signal ends it. "quiet": SIGKILL ends it three seconds later. "handlers": SIGPIPE ends it
// after it has looked at its handlers. "wait": before it launches, it prints "ready" and waits for a line.
#include "check.h"

#include <csignal>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

__global__ void increment(int *x) { x[blockIdx.x * blockDim.x + threadIdx.x]++; }

static int *data;
static const char *way;

static void launch(int n) {
    for (; n > 0; n--) increment<<<4, 128>>>(data);
    OK(hipDeviceSynchronize());
}

static void older() {
    if (strcmp(way, "older") && strcmp(way, "quick_older")) return;
    launch(2);
    int found;
    OK(hipMemcpy(&found, data, sizeof found, hipMemcpyDeviceToHost));
    printf("found %d\n", found);
    fflush(stdout);
}

struct Older {
    ~Older() {
        if (!strcmp(way, "older")) launch(1);
    }
};

static void end() {
    if (!strcmp(way, "_exit")) _exit(4);
    if (!strcmp(way, "_Exit")) _Exit(4);
    if (!strcmp(way, "quick_exit")) quick_exit(4);
    if (!strcmp(way, "exit")) exit(4);
    if (!strcmp(way, "quick_older")) quick_exit(4);
    if (!strcmp(way, "exec")) execl("/bin/true", "true", nullptr);
    if (!strcmp(way, "handlers")) {  // it finds what it would find alone
        struct sigaction found;
        for (int number : {SIGINT, SIGABRT, SIGSEGV, SIGPIPE, SIGRTMIN})
            CHECK(sigaction(number, nullptr, &found) == 0 && found.sa_handler == SIG_DFL && !found.sa_flags);
        CHECK(signal(SIGPIPE, SIG_IGN) == SIG_DFL && signal(SIGPIPE, SIG_DFL) == SIG_IGN);
        raise(SIGPIPE);
    }
    if (!strcmp(way, "quiet")) {
        sleep(3);  // the agent reads the maps meanwhile
        raise(SIGKILL);
    }
    if (!strcmp(way, "fault")) *(volatile int *)8 = 1;
    if (atoi(way)) raise(atoi(way));
}

int main(int count, char **arguments) {
    way = count > 1 ? arguments[1] : "";
    static Older object;
    atexit(older);
    at_quick_exit(older);
    OK(hipMalloc(&data, 512 * sizeof(int)));
    OK(hipMemset(data, 0, 512 * sizeof(int)));
    if (count > 2) {
        puts("ready");
        fflush(stdout);
        getchar();
    }
    for (int n = 0; n < 6; n++) {
        increment<<<4, 128>>>(data);
        if (n == 2 && !strcmp(way, "child")) {
            OK(hipDeviceSynchronize());
            const pid_t child = fork();
            if (child == 0) _exit(1);
            CHECK(child > 0 && waitpid(child, nullptr, 0) == child);
            const pid_t sharing = vfork();
            if (sharing == 0) _exit(1);
            CHECK(sharing > 0 && waitpid(sharing, nullptr, 0) == sharing);
        }
    }
    OK(hipDeviceSynchronize());
    puts("launched");
    fflush(stdout);
    if (!strcmp(way, "thread")) std::thread([] { _exit(4); }).join();
    end();
    return 4;
}

// ends WAY: launches six times and ends in this way, also from a thread. "child": a child process ends by _exit first, which must not end
// the measurement of its parent.
#include "check.h"

#include <csignal>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

__global__ void increment(int *x) { x[blockIdx.x * blockDim.x + threadIdx.x]++; }

static void end(const char *way) {
    if (!strcmp(way, "_exit")) _exit(4);
    if (!strcmp(way, "_Exit")) _Exit(4);
    if (!strcmp(way, "quick_exit")) quick_exit(4);
    if (!strcmp(way, "exit")) exit(4);
    if (!strcmp(way, "term")) raise(SIGTERM);
}

int main(int count, char **arguments) {
    const char *way = count > 1 ? arguments[1] : "";
    int *data;
    OK(hipMalloc(&data, 512 * sizeof(int)));
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
    if (!strcmp(way, "thread")) std::thread([] { end("_exit"); }).join();
    end(way);
    return 4;
}

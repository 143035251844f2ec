// forks: a child process has no device, and nothing that it does changes what its parent has there.
#include "check.h"

#include <sys/wait.h>
#include <unistd.h>

__global__ void increment(int *x) { x[blockIdx.x * blockDim.x + threadIdx.x]++; }

int main() {
    constexpr int count = 1 << 20;
    Buffer<int> data(std::vector<int>(count, 5));
    increment<<<count / 256, 256>>>(data);
    OK(hipDeviceSynchronize());
    const char *ways[] = {"exit", "free", "allocate", "launch", "reset"};
    for (const char *way : ways) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            void *other = nullptr;
            hipError_t error = hipErrorUnknown;
            if (!strcmp(way, "exit")) exit(0);  // ROCr's handlers run
            if (!strcmp(way, "free")) error = hipFree(data.data);
            if (!strcmp(way, "allocate")) error = hipMalloc(&other, size_t{64} << 20);
            if (!strcmp(way, "launch")) error = hipStreamCreate(reinterpret_cast<hipStream_t *>(&other));
            if (!strcmp(way, "reset")) error = hipDeviceReset();
            (void)error;
            _exit(0);
        }
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child);
        if (!strcmp(way, "exit")) CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        for (int value : data.read()) CHECK(value == 6);
    }
    increment<<<count / 256, 256>>>(data);
    OK(hipDeviceSynchronize());
    for (int value : data.read()) CHECK(value == 7);
    Buffer<int> more(std::vector<int>(count, 1));
    for (int value : more.read()) CHECK(value == 1);
    puts("ok");
}
